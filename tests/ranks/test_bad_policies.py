"""What a policy gives that is no number of seconds and no weight: refused by the policy's name, and no rank hangs."""

import math

import pytest
import torch
from ranks import run_ranks, staged
from training import Chain, Signals, Stopper, features, mlp

from straggle import (
    Deadline,
    DropBudget,
    Estimate,
    Estimator,
    FixedDeadline,
    LastMerged,
    LateHandling,
    Merge,
    MovingAverage,
    QuantileDeadline,
    Shadow,
)

WITHIN_S = 30.0


class Saying(Deadline):
    """Says something from a step on."""

    def __init__(self, word, from_step=2, before=60.0):
        self.word, self.from_step, self.before = word, from_step, before

    def decide(self, history):
        return self.word if history.num_steps >= self.from_step else self.before


def train(rank, deadline, estimator=None, only=None, stop_at=None):
    """A rank that is not in ``only`` has other policies, of the same class."""
    module = Chain(4)
    stopper = Stopper(module)
    if only is not None and rank != only:
        deadline.word = 60.0
    with staged(module, deadline=deadline, estimator=estimator) as model:
        for number in range(4):
            with model.step() as step:
                stopper.arm(step, 2 if (rank, number) == (1, stop_at) else None)
                model(float(rank + 1)).backward()
        return model.last_report.deadline_s


@pytest.mark.parametrize("word", [math.nan, -1.0, -math.inf, None, "soon", True, torch.ones(2), [1.0]])
def test_deadline_that_is_no_seconds_is_refused_by_its_policy_on_every_rank(word):
    for end in run_ranks(train, 2, Saying(word), outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert f"Saying.decide() gave {word!r} for step 2: give a number of seconds of at least 0" in end.message


@pytest.mark.parametrize(
    ("wrapped", "name"),
    [
        (lambda inner: DropBudget(inner, 0.5), "DropBudget(Saying)"),
        (lambda inner: Shadow(DropBudget(inner, 0.5)), "Shadow(DropBudget(Saying))"),
    ],
)
def test_policy_around_it_is_named_with_it(wrapped, name):
    for end in run_ranks(train, 2, wrapped(Saying(math.nan)), outcomes=True, timeout_s=WITHIN_S):
        assert end.kind == "ValueError"
        assert f"{name}.decide() gave nan" in end.message


@pytest.mark.parametrize("word", [60, torch.tensor(60.0), torch.tensor([60])])
def test_deadline_that_is_some_number_is_accepted(word):
    assert run_ranks(train, 2, Saying(word)) == [60.0, 60.0]


class Alone(Deadline):
    """Gives no number on rank 1 alone, which no policy may."""

    def decide(self, history):
        return math.nan if torch.distributed.get_rank() == 1 and history.num_steps == 2 else 60.0


def test_peers_of_a_rank_whose_policy_fails_alone_learn_why():
    peer, failed = run_ranks(train, 2, Alone(), outcomes=True, timeout_s=WITHIN_S)
    assert failed.kind == "ValueError"
    assert peer.kind == "PeerFailed"
    assert "rank 1, step 1: ValueError('Alone.decide() gave nan for step 2" in peer.message


def stand_in_hears_it(rank):
    """Rank 1 is stuck while its stand-in asks the policy, which then gives no number."""
    signals = Signals()
    with staged(
        mlp(), deadline=Saying(math.nan, from_step=4, before=0.05), late_handling=LateHandling(grace_s=0.0)
    ) as model:
        try:
            for number in range(6):
                with model.step():
                    if (rank, number) == (1, 3):
                        signals.wait("refused")
                    model(features(rank, number)).sum().backward()
        finally:
            signals.send("refused")


def test_rank_that_was_stood_in_for_ends_with_the_same_refusal():
    ends = run_ranks(stand_in_hears_it, 2, outcomes=True, timeout_s=WITHIN_S)
    assert [end.kind for end in ends] == ["ValueError", "PeerFailed"]  # rank 1 first takes the step in which it was
    for end in ends:
        assert "Saying.decide() gave nan for step 4" in end.message


class Giving(Estimator):
    """Gives what it was constructed with."""

    def __init__(self, estimate):
        self.estimate = estimate

    def contribution(self, parameter):
        weight = self.estimate
        return Estimate(torch.zeros_like(parameter), weight) if isinstance(weight, (float, str)) else weight


BAD_ESTIMATES = [
    (math.nan, "Giving.contribution() gave weight=nan: must be a finite number of at least 0"),
    (-0.5, "Giving.contribution() gave weight=-0.5"),
    (math.inf, "Giving.contribution() gave weight=inf"),
    ("half", "Giving.contribution() gave weight='half'"),
    (torch.zeros(3), "Giving.contribution() gave tensor([0., 0., 0.]): give a straggle.Estimate, or None to abstain"),
    (Estimate(torch.zeros(()), 0.5), "Giving.contribution() gave a gradient of shape () for a parameter of shape (2,)"),
]


@pytest.mark.parametrize(("given", "words"), BAD_ESTIMATES)
def test_estimate_that_cannot_be_merged_is_refused_by_its_estimator_and_the_peers_learn_why(given, words):
    ends = run_ranks(train, 2, None, Giving(given), None, 2, outcomes=True, timeout_s=WITHIN_S)
    assert ends[1].kind == "ValueError"
    assert words in ends[1].message
    assert ends[0].kind == "PeerFailed"
    assert "rank 1, step 2: ValueError(" in ends[0].message
    assert "Giving.contribution() gave" in ends[0].message


@pytest.mark.parametrize(
    "make",
    [
        lambda word: FixedDeadline(word),
        lambda word: QuantileDeadline(word),
        lambda word: QuantileDeadline(0.5, word),
        lambda word: LateHandling(grace_s=word),
        lambda word: LateHandling(give_up_s=word),
        lambda word: LateHandling(quorum=word),
        lambda word: DropBudget(FixedDeadline(1.0), word),
        lambda word: LastMerged(word),
        lambda word: MovingAverage(decay=word),
        lambda word: Merge(check_every=word),
    ],
)
@pytest.mark.parametrize("word", [math.nan, "soon", True, -2])
def test_argument_of_a_policy_that_is_no_such_number_is_refused(make, word):
    with pytest.raises(ValueError, match=str(word)):
        make(word)
