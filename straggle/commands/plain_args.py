"""Commands that take plain words instead of a configuration: their words, their help, refusals, and exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from straggle.extras import remedy


@dataclass(frozen=True)
class Words:
    """A command line: ``names`` are the words that are not ``key=value``."""

    names: tuple[str, ...]
    keys: Mapping[str, str]

    @staticmethod
    def of(words: Sequence[str], keys: Collection[str]) -> Words:
        """Read the words; raises ``ValueError`` for a key that is not in ``keys``, and for an option with dashes."""
        found = [word for word in words if re.match(r"\w+=", word)]  # but a folder may be called runs/lr=0.1
        given = dict(word.split("=", 1) for word in found)
        unknown = sorted(given.keys() - set(keys))
        if dashed := [word for word in words if word.startswith("-")]:
            raise ValueError(f"unknown option {dashed[0]}; options are written key=value, with keys {', '.join(keys)}")
        if unknown:
            raise ValueError(f"unknown key {unknown[0]}; valid keys: {', '.join(keys)}")
        return Words(tuple(word for word in words if word not in found), given)

    def flag(self, key: str) -> bool:
        """``key=true`` or ``key=false``, the default; raises ``ValueError`` for another value."""
        if (value := self.keys.get(key, "false")) not in ("true", "false"):
            raise ValueError(f"{key}={value}: choose one of true, false")
        return value == "true"


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
