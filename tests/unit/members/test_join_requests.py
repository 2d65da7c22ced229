"""What the leader reads in the requests of ranks that want to be let in."""

from __future__ import annotations

import torch.distributed as dist

from straggle.members.join_requests import JoinRequests
from straggle.members.view import Seal, View

VIEW = View(0, {0: "a", 2: "c"})


def test_of_a_rank_that_is_kept_out_the_leader_takes_what_its_probe_says_and_lets_it_in_no_sooner() -> None:
    store, seal = dist.HashStore(), Seal("secret")
    asking, leader = JoinRequests(1, 3, "b", seal), JoinRequests(0, 3, "a", seal)
    asking.ask(store)
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {})
    asking.own_probe = 7.0, 0.25
    asking.ask(store)
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {1: (7.0, 0.25)})
    asking.ask(store)
    leader.hear(store, VIEW, ())
    assert (leader.wanted, leader.probes) == ({1: "b"}, {})
    leader.forget()
    leader.hear(store, VIEW, {1})
    assert (leader.wanted, leader.probes) == ({}, {1: (7.0, 0.25)})
