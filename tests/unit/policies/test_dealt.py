"""Since when the ranks have their shares, by weights that are written down, and what AutoDeadline makes of it."""

import pytest
import torch

from straggle import AutoDeadline, History, Progress
from straggle.policies.dealt import steps_since_dealt

A, B, C = (8, 8, 8, 8), (9, 9, 9, 5), (10, 9, 9, 4)


@pytest.mark.parametrize(
    ("weights", "since"),
    [
        ([A] * 9, None),
        ([A] * 9 + [B] * 2, None),  # not yet settled
        ([A] * 9 + [B] * 3, 3),
        ([A] * 9 + [B] * 5, 5),
        ([A] * 9 + [B] * 5 + [(3, 3, 3, 1)], 6),  # the last step of an epoch
        ([A] * 9 + [B] * 5 + [(3, 3, 3, 1)] + [B] * 4, 10),
        ([A] * 4 + [(2, 2, 2, 2)] + [A] * 4, None),
        ([A] * 4 + [B] * 4 + [C] * 7, 7),
        ([A] * 4 + [B] * 2 + [C] * 7, 7),
        ([A, B, C, B, A, C, A], None),  # drawn from a pool
        ([A], None),
        ([A] * 5 + [(8, 8, 8, 0)] * 3, 3),  # a rank has left
    ],
)
def test_steps_since_dealt(weights, since):
    assert steps_since_dealt(torch.tensor(weights, dtype=torch.float64)) == since


def history_of(rows, dealt=True):
    """Of (rank's seconds for four stages, weights) in each step."""
    own_s, weight = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    unit_s = own_s.unsqueeze(-1) * torch.tensor([0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    share, at_once = torch.full_like(unit_s, 0.25), torch.zeros_like(own_s)
    progress = Progress(unit_s, share, torch.ones_like(unit_s), share[0, 0], weight, at_once, at_once[:, 0])
    return History(len(rows), own_s, torch.ones_like(own_s, dtype=torch.bool), progress, dealt=dealt)


def test_times_of_other_shares_are_forgotten():
    before = [([1.0, 1.0, 1.0, 2.0], A)] * 20
    after = [([1.12, 1.13, 1.12, 1.25], B)] * 3
    policy = AutoDeadline()
    assert policy.decide(history_of(before)).seconds < 1.1  # rank 3 is clearly slow
    assert policy.decide(history_of(before + after)).seconds == pytest.approx(1.4 * 1.12)
    assert AutoDeadline().decide(history_of(before + after)).seconds == pytest.approx(1.4 * 1.12)  # of a resumed run


def test_new_shares_are_chosen_for_in_each_of_the_first_ten_steps_and_then_once_in_every():
    rows = [([1.0, 1.0, 1.0, 2.0], A)] * 30
    policy, seen = AutoDeadline(every=25), []
    for step in range(30):
        rows = [*rows, ([1.0 + 0.01 * step] * 4, B)]
        seen.append(policy.decide(history_of(rows)).seconds)
    assert seen[1] < 1.1  # not settled
    assert seen[2] == pytest.approx(1.4, abs=0.01)
    assert len(set(seen[2:12])) > 1
    assert len(set(seen[12:27])) == 1
    assert seen[27] > seen[26]
