"""A member dies in the middle of a pool: the others lose what it had drawn and not given, once, and go on."""

import pytest
import torch
from ranks import Raised, die, digest, run_ranks
from training import features, mlp

from straggle import Elastic, StagedDataParallel

pytestmark = pytest.mark.slow
NUM_PARTS, DIES_IN, STEPS = 12, 4, 9


def one_dies(rank):
    """Rank 2 dies in its second micro-batch of one step."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = StagedDataParallel(module, members=Elastic())
    model.register_state(optimizer=optimizer)
    reports = []
    for number in range(STEPS):
        with model.step() as step:
            for done, x in enumerate(step.pull([features(part, number) for part in range(NUM_PARTS)])):
                if (rank, number, done) == (2, DIES_IN, 1):
                    die()
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(model.last_report)
    result = digest(module.parameters()), reports
    model.close()
    return result


def test_what_a_dead_member_had_drawn_is_dropped_once_and_the_others_draw_on():
    *ends, dead = run_ranks(one_dies, 3, outcomes=True)
    assert isinstance(dead, Raised)
    assert dead.kind == "Killed"
    (first, reports), (second, _) = ends
    assert first == second
    for report in reports:
        done = sum(own.parts for own in report.ranks if not own.absent)
        assert report.pool_parts == NUM_PARTS
        if report.step == DIES_IN:  # what was being merged with the dead rank is lost as well, as without a pool
            assert report.dropped_share >= 1 - done / NUM_PARTS > 0
        else:
            assert done == NUM_PARTS
            assert report.dropped_share == pytest.approx(0.0)
        assert report.absent_ranks == ((2,) if report.step >= DIES_IN else ())
