"""What goes wrong on one rank, between steps, is raised on all of them: no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from straggle.lab.jobs import gather

Result = TypeVar("Result")


class RefusedByAll(ValueError):
    """What all ranks refuse together."""


def on_all_ranks(work: Callable[[], Result]) -> list[Result]:
    """What ``work`` returns on each rank; collective.

    If it raises ``OSError`` or ``ValueError`` on one rank, this raises `RefusedByAll` on all, with the ranks' reasons.
    """
    done = gather(_outcome(work))
    if any(problems for _, problems in done):
        raise RefusedByAll(of_ranks([problems for _, problems in done]))
    return [result for result, _ in done]


def of_ranks(sentences: Sequence[Sequence[str]]) -> str:
    """The ranks' sentences, each once, with the ranks that have it if these are not all."""
    by = dict[str, list[int]]()
    for rank, own in enumerate(sentences):
        for sentence in own:
            by.setdefault(sentence, []).append(rank)
    return "; ".join(_who(ranks, len(sentences)) + sentence for sentence, ranks in by.items())


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, list[str]]:
    try:
        return work(), []
    except (OSError, ValueError) as error:
        return None, [str(error)]


def _who(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
