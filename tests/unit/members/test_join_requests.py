"""What the leader reads in the requests of ranks that want to be let in."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from straggle.members.views.join_requests import JoinRequests, Refused
from straggle.members.views.view import View

OURS = {"buffers": [], "options": {"merge": "Merge()"}, "straggle": "0.1.0", "torch": "2.13.0"}
VIEW = View(0, {0: "a", 2: "c"})


def test_of_a_rank_that_is_kept_out_the_leader_takes_what_its_probe_says_and_lets_it_in_no_sooner() -> None:
    store = dist.HashStore()
    asking, leader = JoinRequests(1, 3, "b"), JoinRequests(0, 3, "a")
    asking.ask(store)
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {})
    asking.tell_probe(7.0, 0.25)
    asking.ask(store)
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {1: (7.0, 0.25)})
    asking.ask(store)
    leader.hear(store, VIEW, ())
    assert (leader.wanted, leader.probes) == ({1: "b"}, {})
    leader.forget()
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {1: (7.0, 0.25)})


def answered(**theirs: object) -> str | None:
    """What a newcomer is told that differs so from the members; ``None`` if it is wanted."""
    store = dist.HashStore()
    asks, leader = JoinRequests(1, 2, "new"), JoinRequests(0, 2, "a")
    asks.describe(json.dumps({**OURS, **theirs}))
    leader.describe(json.dumps(OURS))
    asks.ask(store)
    leader.hear(store, View(3, {0: "a"}), ())
    try:
        asks.check_refused(store)
    except Refused as refused:
        return str(refused)
    assert leader.wanted == {1: "new"}
    return None


NOT_OURS = "is not that of the job: its members have"


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({}, None),
        ({"torch": "2.11.0"}, f"the version of torch {NOT_OURS} 2.13.0, and this rank has 2.11.0"),
        ({"straggle": "0.2.0", "options": {}}, f"the version of straggle {NOT_OURS} 0.1.0, and this rank has 0.2.0"),
        ({"straggle": None}, f"the version of straggle {NOT_OURS} 0.1.0, and this rank has None"),
        ({"options": {}}, f"options {NOT_OURS} {OURS['options']}, and this rank has {{}}"),
        ({"more": 1}, "it has options that the job's members do not have"),
    ],
)
def test_newcomer_is_told_which_version_or_option_is_not_that_of_the_members(
    theirs: dict[str, object], told: str | None
) -> None:
    assert answered(**theirs) == told
