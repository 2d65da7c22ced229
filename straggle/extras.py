"""What is said where an extra of the package is not installed: one sentence, with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def remedy(error: ImportError, extra: str) -> str:
    """What is missing, and the command that installs the ``extra`` which has it; said once, wherever it is caught."""
    return str(error) if "pip install" in str(error) else f"{error}; this needs: pip install 'straggle[{extra}]'"


class MissingExtra(ImportError):
    """What is missing, with the command that installs it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around the imports of what an ``extra`` installs: raises `MissingExtra`, which says how to have it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("straggle"):  # a mistake of ours, which no extra mends
            raise
        raise MissingExtra(remedy(error, extra), name=error.name) from error
