"""A member dies or freezes in the middle of a pool: what it had drawn is drawn again or dropped, and never twice."""

import time

import pytest
import torch
from members import run_job
from ranks import Raised, die, digest, run_ranks
from training import Chain, features, grads, mlp

from straggle import Elastic, StagedDataParallel

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
                if number == DIES_IN and rank != 2:
                    time.sleep(0.2)  # it comes to its second one before all are drawn
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


class Steps:
    """How many there were, for a rank that comes back."""

    def __init__(self):
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


FROZEN_IN = 6
AS_MUCH = {"done": [[[1 / 3, 100.0]] * 3] * 4, "present": [True] * 3, "draws": True}  # three of twelve are sure


def one_freezes(rank, board):
    """Rank 2 is in its second micro-batch of one step until it is resumed, and the others draw no more meanwhile."""
    module, steps, seen = Chain(), Steps(), {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = StagedDataParallel(module, members=Elastic(suspect_s=1.0))
    model.register_state(optimizer=optimizer, steps=steps)
    while steps.number < board.end:
        number, own = steps.number, []
        if number == FROZEN_IN and not seen.get(number):
            model.pulling.load_state_dict(AS_MUCH)  # and no micro-batch takes too long
        with model.step() as step:
            for part in step.pull(range(NUM_PARTS)):
                own.append(part)
                if number == FROZEN_IN and rank == 2 and len(own) == 2:
                    (board.folder / "in its second").touch()
                    while not (board.folder / "resumed").exists():
                        time.sleep(0.01)
                while number == FROZEN_IN and rank != 2 and 2 in model.member_ranks:
                    time.sleep(0.01)
                model(float(part + 1)).backward()
        merged = [g[0].item() for g in grads(module) if g is not None]  # none of a step in which it was no member
        seen[number] = own, merged, model.last_report
        optimizer.step()
        optimizer.zero_grad()
        steps.number += 1
        board.note(rank, steps.number)
        if rank == 0 and FROZEN_IN in seen and 2 in model.member_ranks:
            (board.folder / "is in again").touch()
    result = digest(module.parameters()), seen.get(FROZEN_IN)
    model.close()
    return result


def test_what_a_frozen_rank_had_drawn_is_drawn_by_the_others_and_counts_once_though_it_wakes():
    with run_job(3, one_freezes) as job:
        job.wait((job.folder / "in its second").exists, "rank 2 is in its second micro-batch")
        job.stop(2)
        job.wait(lambda: min(job.board.made(0), job.board.made(1)) > FROZEN_IN + 2, "the others go on")
        (job.folder / "resumed").touch()
        job.resume(2)
        job.wait(
            (job.folder / "is in again").exists, "rank 2 is in again: it also walks through steps without being so"
        )
        (first, zero), (second, one), (third, _) = job.finish()
    assert first == second == third
    report = zero[2]
    assert report.absent_ranks == (2,)
    assert sorted(zero[0] + one[0]) == list(range(NUM_PARTS))
    assert report.dropped_share == pytest.approx(0.0)
    mean = sum(range(1, NUM_PARTS + 1)) / NUM_PARTS
    assert zero[1] == one[1] == pytest.approx([(layer + 1) * mean for layer in range(len(zero[1]))])


def one_comes_back(rank, board):
    """Rank 2 is started again, and its peers do not go on with the step that it comes to before it has drawn."""
    module, steps, reports = mlp(), Steps(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = StagedDataParallel(module, members=Elastic(suspect_s=60.0))
    model.register_state(optimizer=optimizer, steps=steps)
    comes_back, has_drawn = steps.number > 0, board.folder / "has drawn"
    while steps.number < board.end:
        was_absent = model.last_report is not None and 2 in model.last_report.absent_ranks
        with model.step() as step:
            for part in step.pull([features(part, steps.number) for part in range(NUM_PARTS)]):
                while was_absent and 2 in model.member_ranks and not has_drawn.exists():
                    time.sleep(0.01)
                if comes_back:
                    has_drawn.touch()
                model(part).square().mean().backward()
            if comes_back:
                has_drawn.touch()
        optimizer.step()
        optimizer.zero_grad()
        steps.number += 1
        reports.append(model.last_report)
        board.note(rank, steps.number)
    result = digest(module.parameters()), reports
    model.close()
    return result


def test_rank_that_comes_to_a_step_which_was_submitted_for_it_draws_nothing_that_would_be_lost():
    with run_job(3, one_comes_back) as job:
        job.wait(lambda: min(map(job.board.made, range(3))) > 3, "all have made some steps")
        job.kill(2)
        job.wait(lambda: min(job.board.made(0), job.board.made(1)) > job.board.made(2) + 3, "the others go on")
        job.start(2)
        job.wait(lambda: job.board.made(2) > 0, "it is back")
        job.meet()
        (first, reports), (second, _), (third, _) = job.finish()
    assert first == second == third
    away = [report.step for report in reports if report.absent_ranks]
    done = {report.step: sum(own.parts for own in report.ranks) for report in reports}
    assert away
    assert {step for step, number in done.items() if number != NUM_PARTS} <= {away[0]}  # in which it died
