"""What the error of a collective of the loop's own says, if a member is gone."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from straggle.members.own_collectives import OwnCollectives
from straggle.members.views.in_replica import InReplica
from straggle.members.views.view import DONE, TOO_FAR_BEHIND, Leaving, View
from straggle.merge.wire.channel import PeerFailed
from straggle.stuck.states import INSTEAD

FIRST = View(0, {0: "0-a", 1: "0-b", 2: "0-c"}, job="x")
ENDED = Leaving("ended", "its process ended by SIGKILL, after 4.0 s")
RAISED = Leaving("raised", "rank 2 raised after step 4, outside of a step: RuntimeError('...')")
CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


GONE = FIRST.without({1: ENDED})


class Members:
    """Of a rank that sees ``views`` one after the other, one at each look."""

    def __init__(self, *views: View, size: int = 1, in_step: bool = False) -> None:
        self.views, self.rank, self.inside, self.num_suspected = [FIRST, *views], 0, InReplica(0, size), 0
        self.chain = SimpleNamespace(changes={(1, False): GONE.changes[0]})
        self.detector = SimpleNamespace(connection_broke=self.suspect, is_in_step=lambda: in_step)

    @property
    def view(self) -> View:
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        self.chain.changes.update({(change.rank, change.joined): change for change in view.changes})
        return view

    def suspect(self) -> None:
        self.num_suspected += 1


def said_of(error: Exception, members: Any, *, comes_late: bool = False) -> str:
    """What torch's caller reads of an error of its collective."""
    own = OwnCollectives(members, known_s=0.05)
    own.begin(comes_late=comes_late)
    try:
        raises_in_torch(error)
    except Exception as raised:
        return str(raised)
    finally:
        own.close(None)
    return ""


def raises_in_torch(error: Exception) -> None:
    """A function of torch's that fails, with what torch puts around each of its collectives."""

    def all_reduce() -> None:
        raise error

    dist.c10d_logger._exception_logger(all_reduce)()


@pytest.mark.parametrize(
    ("views", "who"),
    [
        ([GONE], "rank 1 left (its process ended by SIGKILL, after 4.0 s)"),
        ([FIRST, FIRST, GONE], "rank 1 left (its process ended by SIGKILL, after 4.0 s)"),  # a moment later
        ([GONE.without({2: RAISED})], "rank 1 left (its process ended by SIGKILL, after 4.0 s), and"),
        ([replace(GONE, members={**FIRST.members, 1: "1-d"})], "rank 1 left (its process ended by SIGKILL"),
        ([FIRST.without({2: RAISED})], f"rank 2 left ({RAISED.reason})"),
        ([FIRST.without({2: DONE})], "rank 2 left (ended)"),
        ([FIRST.without({2: DONE}).again()], "rank 2 left (ended)"),
        ([replace(FIRST, generation=2, members={0: "0-a", 1: "0-b"})], "rank 2 left, and"),
    ],
    ids=["gone", "a moment later", "others raised because of it", "back", "raised", "done", "unseen, done", "unseen"],
)
def test_error_names_who_is_gone(views: list[View], who: str) -> None:
    said = said_of(RuntimeError(CLOSED), Members(*views))
    assert said.startswith(who)
    assert said.endswith(f", and a collective of the loop's own {INSTEAD}: {CLOSED}")


def test_process_that_was_started_again_has_no_peers() -> None:
    said = said_of(RuntimeError("[gloo/...] Timed out waiting 60000ms"), Members(), comes_late=True)
    assert said.startswith("rank 0 was started again, and a collective of the loop's own")


LIVES = [Leaving("returns", "returns: too far behind"), Leaving("restarted", TOO_FAR_BEHIND), Leaving("link", "slow")]


@pytest.mark.parametrize("why", LIVES)
def test_rank_that_lives_is_not_the_reason(why: Leaving) -> None:
    assert said_of(RuntimeError(CLOSED), Members(FIRST.without({1: why}))) == CLOSED


@pytest.mark.parametrize(
    ("error", "members"),
    [
        (RuntimeError("Invalid scalar type"), Members(GONE)),
        (ValueError("connection"), Members(GONE)),
        (PeerFailed("rank 1: connection lost"), Members(GONE)),
        (RuntimeError(CLOSED), Members(GONE, size=2, in_step=True)),  # FSDP's, of which the replica's ranks hear
    ],
    ids=["torch's own", "no collective", "straggle's", "of the replica"],
)
def test_other_errors_stay_as_they_are(error: Exception, members: Members) -> None:
    assert said_of(error, members) == str(error)


def test_only_the_first_of_such_errors_waits_and_suspects_silent_members() -> None:
    members = Members()
    own = OwnCollectives(members, known_s=0.05)  # type: ignore[arg-type]
    own.begin(comes_late=False)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Connection closed"):
            raises_in_torch(RuntimeError(CLOSED))
    own.close(None)
    assert members.num_suspected == 1


def test_error_that_torch_tells_nobody_of_is_explained_as_the_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    for error, number in ((RuntimeError(CLOSED), 1), (RuntimeError(f"...{INSTEAD}: {CLOSED}"), 0), (None, 0)):
        caplog.clear()
        own = OwnCollectives(Members(GONE), known_s=0.05)  # type: ignore[arg-type]
        own.begin(comes_late=False)
        own.close(error)
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * number
        assert all("rank 1 left" in record.message and INSTEAD in record.message for record in caplog.records)
