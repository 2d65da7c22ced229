"""What the agents of a launcher say in the job's store of ranks that will not come, and ranks of whom they need.

A job that another launcher has started has no such words. All keys lie at the root of the store, also if the caller has
a `PrefixStore`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from straggle.merge.wire.store import peek, server_of

PREFIX = "straggle/agents"


def at_root(store: Any) -> Any:
    """The store itself, whatever connection to it the caller has; keys begin with `PREFIX`."""
    return server_of(store)


def said(store: Any, key: str) -> str | None:
    """What is said under this key, if anything is."""
    return peek(at_root(store), f"{PREFIX}/{key}")


def post_started(store: Any, rank: int, count: int) -> None:
    """Report that process number ``count`` of this rank is being started."""
    at_root(store).set(f"{PREFIX}/started/{rank}", str(count))
    at_root(store).delete_key(f"{PREFIX}/down/{rank}")


def started(store: Any, rank: int) -> int | None:
    """The number of this rank's last process; ``None`` if none was started."""
    word = said(store, f"started/{rank}")
    return None if word is None else int(word)


def post_down(store: Any, rank: int, why: str) -> None:
    """Report that this rank has ended and is not started again, and why, in a sentence without its end."""
    at_root(store).set(f"{PREFIX}/down/{rank}", why)
    at_root(store).set(f"{PREFIX}/down", "")


def down(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """Those of these ranks that have ended and are not started again, and why. One request, if there are none."""
    if not at_root(store).check([f"{PREFIX}/down"]):
        return {}
    words = {rank: said(store, f"down/{rank}") for rank in ranks}
    return {rank: word for rank, word in words.items() if word is not None}


def post_needs_all(store: Any) -> None:
    """Report that this job trains with all of its ranks, or not at all."""
    at_root(store).set(f"{PREFIX}/needs all", "")


def needs_all(store: Any) -> bool:
    """Whether this job trains with all of its ranks, or not at all."""
    return bool(at_root(store).check([f"{PREFIX}/needs all"]))


def will_not_come(store: Any, ranks: Iterable[int], missing: Iterable[int], count: int) -> str:
    """Why a process, start number ``count`` of its rank, waits in vain for ``ranks``; nothing if it does not.

    ``missing``: those that have not come. Processes of another start number meet elsewhere.
    """
    if gone := down(store, ranks):
        return "; ".join(gone.values())
    later = {rank: number for rank in missing if (number := started(store, rank) or 0) > count}
    return "; ".join(
        f"rank {rank} was started again, as number {number}, and this process is number {count} of its rank: it ends, "
        "for its launcher to start it, too"
        for rank, number in later.items()
    )
