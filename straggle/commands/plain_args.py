"""Commands that take plain words instead of a configuration: their help, their refusals, their exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from straggle.extras import remedy


def run_command(words: Sequence[str], usage: str, work: Callable[[Sequence[str]], int], *, extra: str) -> int:
    """Return the exit status of ``work(words)``; without words, or for ``--help``, print ``usage`` instead.

    The status is 2 if there were no words, if ``work`` raised ``ValueError`` or ``OSError`` for wrong ones, or if it
    raised ``ImportError`` because the package's ``extra`` is not installed. The message goes to standard error.
    """
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(usage)
        return 0 if words else 2
    try:
        return work(words)
    except ImportError as error:
        sys.stderr.write(f"{remedy(error, extra)}\n")
        return 2
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
