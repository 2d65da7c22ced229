"""A run in which ranks were late, stopped and stood in for is repeated bit for bit from what each rank decided."""

import math
import random
import time
from contextlib import nullcontext

import pytest
import torch
from members import run_job
from queued_device import queued_device
from ranks import digest, run_forked, staged
from torch import nn
from training import Signals, features, mlp

from straggle import Abstain, Elastic, LastOwn, LateHandling
from straggle.observe.recording import DecisionWriter, read_recording
from straggle.replay.wing import Decision, Recording

STEPS = 30
PARTLY = LateHandling(grace_s=0.005, max_lag=4)
WHOLE = LateHandling(grace_s=0.03, max_lag=4, granularity="step")


class Noisy(nn.Module):
    """Dropout and BatchNorm, whose results depend on how far a forward pass came."""

    def __init__(self):
        super().__init__()
        layers = []
        for width in (4, 16, 16):
            layers += [nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


def train(rank, folder, replay, estimator, late_handling, members=None, queued=False):
    """Trains under random stalls, or as recorded; parameters, buffers and random state, and what happened.

    ``members``: of the run that is recorded; a replay has none. ``queued``: on a device that is a queue, and with bad
    numbers.
    """
    torch.manual_seed(0)
    module = Noisy()
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    draw = random.Random(rank)
    stall = [0.0]

    def sleep(*_):
        seconds, stall[0] = stall[0], 0.0
        time.sleep(seconds)

    places = draw.sample([layer for layer in module.layers if isinstance(layer, nn.Linear)], 2)
    places[0].register_forward_pre_hook(sleep)
    places[1].weight.register_post_accumulate_grad_hook(sleep)
    reports = []
    path = folder / f"rank{rank}.jsonl"
    options = {"deadline": 0.02, "late_handling": late_handling, "estimator": estimator}
    device = queued_device() if queued else nullcontext()
    with device, staged(module, members=None if replay else members, **options) as model:
        if replay:
            model.replay(read_recording(path))
        with DecisionWriter(folder / f"rank{rank}.{'again' if replay else 'jsonl'}") as writer:
            for number in range(STEPS):
                stall[0] = 0.06 if not replay and draw.random() < 0.3 else 0.0
                with model.step(num_microbatches=2):
                    for part in range(2):
                        loss = model(features(rank, 2 * number + part)).square().mean() / 2
                        (loss * math.nan if queued and (number + rank) % 5 == 0 else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                reports.append(model.last_report)
                writer.write(model.last_decision, model.learned)
    state = digest([*module.parameters(), *module.buffers(), torch.get_rng_state()])
    computed = [[each.stages for each in report.ranks] for report in reports]
    stood_in = sum(each.stood_in for report in reports for each in report.ranks)
    stopped = sum(each.late and not each.stood_in for report in reports for each in report.ranks)
    return state, computed, stopped, stood_in


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("estimator", "late_handling"),
    [
        pytest.param(LastOwn(0.5), PARTLY, id="LastOwn"),
        pytest.param(LastOwn(0.5), WHOLE, id="whole-steps"),  # it remembers what was dropped, too
    ],
)
def test_replayed_run_equals_the_recorded_one_bit_for_bit(tmp_path, estimator, late_handling, world_size):
    first = run_forked(train, world_size, tmp_path, False, estimator, late_handling)
    again = run_forked(train, world_size, tmp_path, True, estimator, late_handling)
    assert first[0][2] + first[0][3] > 0  # some rank was late, or this shows nothing
    for (state, computed, _, _), (state_again, computed_again, _, _) in zip(first, again, strict=True):
        assert state == state_again
        assert computed == computed_again
    for rank in range(world_size):
        recorded = read_recording(tmp_path / f"rank{rank}.jsonl")
        assert len(recorded.decisions) == STEPS
        assert recorded == read_recording(tmp_path / f"rank{rank}.again")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_run_with_bad_numbers_on_a_queued_device_is_replayed_bit_for_bit(tmp_path, num_ranks):
    first = run_forked(train, num_ranks, tmp_path, False, Abstain(), PARTLY, None, True)
    again = run_forked(train, num_ranks, tmp_path, True, Abstain(), PARTLY, None, True)
    assert [state for state, *_ in first] == [state for state, *_ in again]
    assert num_ranks == 1 or first[0][2] + first[0][3] > 0  # some rank was late, or this shows less


def test_run_in_which_no_rank_left_is_replayed_without_members(tmp_path):
    first = run_forked(train, 3, tmp_path, False, LastOwn(0.5), LateHandling(grace_s=0.005), Elastic(suspect_s=30.0))
    again = run_forked(train, 3, tmp_path, True, LastOwn(0.5), LateHandling(grace_s=0.005))
    assert first[0][2] + first[0][3] > 0  # some rank was late, or this shows nothing
    assert [state for state, *_ in first] == [state for state, *_ in again]


def refuse_changed_members(_rank, num_decisions):
    with staged(mlp()) as model:
        decisions = tuple(Decision(step, 4, None, False, members_changed=step > 1) for step in range(num_decisions))
        model.replay(Recording((), (), decisions))


def test_steps_in_which_members_had_changed_are_refused_in_a_replay_and_those_before_are_not():
    assert run_forked(refuse_changed_members, 1, 2) == [None]
    with pytest.raises(AssertionError, match="the members of the recorded run changed in step 2 "):
        run_forked(refuse_changed_members, 1, 3)


def record_with_members(rank, board, folder):
    """Train until the job's end, and record it; in which steps the members changed."""
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with staged(module, members=Elastic(min_ranks=1)) as model:
        step, changed_in = model.register_state(optimizer=optimizer), []
        model.register_members_hook(lambda report: changed_in.append((report.step, report.at_the_end)))
        with DecisionWriter(folder / f"rank{rank}.jsonl") as writer:
            while step < board.end:
                with model.step():
                    model(features(rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                writer.write(model.last_decision, model.learned)
                step = model.last_report.step + 1
                time.sleep(0.01)
                board.note(rank, step)
    return changed_in


def test_recording_tells_the_step_in_which_a_rank_was_killed(tmp_path):
    with run_job(3, record_with_members, tmp_path) as job:
        job.walk(5)
        job.kill(2)
        job.walk(5, [0, 1])
        outcomes = job.finish([0, 1])
    for rank in (0, 1):
        decisions = read_recording(tmp_path / f"rank{rank}.jsonl").decisions
        changed = [decision.step for decision in decisions if decision.members_changed]
        assert changed == list(range(outcomes[rank][0][0], len(decisions)))
    killed = read_recording(tmp_path / "rank2.jsonl").decisions
    assert len(killed) <= changed[0] <= len(killed) + 1  # it may have ended a step that it could not write


def run_out_of_data_while_stuck(rank, folder, replay):
    """Rank 1 is stuck with the last of its batches. Who had no data, by step and rank, and the parameters."""
    signals, path, no_data = Signals(), folder / f"rank{rank}.jsonl", []
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    with staged(module, deadline=0.02, late_handling=LateHandling(grace_s=0.0, max_lag=8)) as model:
        if replay:
            model.replay(read_recording(path))
        with DecisionWriter(folder / f"rank{rank}.again" if replay else path) as writer:
            for number, x in enumerate(model.join([features(rank, number) for number in range(2 if rank else 7)])):
                if (rank, number) == (0, 5) and not replay:
                    signals.send("on")
                if number == 6 and not replay:  # the other one is back, and has no data for the last step
                    signals.wait("back") if rank == 0 else signals.send("back")
                with model.step():
                    if (rank, number) == (1, 1) and not replay:
                        signals.wait("on")
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                no_data.append(tuple(own.idle for own in model.last_report.ranks))
                writer.write(model.last_decision, model.learned)
    return no_data, digest(module.parameters())


def test_rank_that_was_stood_in_for_before_it_had_no_data_has_data_in_the_replay_too(tmp_path):
    first = run_forked(run_out_of_data_while_stuck, 2, tmp_path, False)
    assert first[0] == first[1]
    no_data = first[0][0]
    assert no_data[2:5] == [(False, False)] * 3  # it had not entered these
    assert no_data[-1][1]
    assert run_forked(run_out_of_data_while_stuck, 2, tmp_path, True) == first


def test_recording_that_does_not_begin_at_step_0_is_refused(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with DecisionWriter(path) as writer:
        writer.write(Decision(3, 1, None, False), ([], []))
    with pytest.raises(ValueError, match="has every step from 0 on"):
        read_recording(path)
    with pytest.raises(ValueError, match="no recording at"):
        read_recording(tmp_path / "rank1.jsonl")


def test_writer_that_goes_on_keeps_the_steps_before_and_drops_the_ones_after(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with DecisionWriter(path) as writer:
        for step in range(5):
            writer.write(Decision(step, 1, None, False), ([0], [1.0]))
    with DecisionWriter(path, first_step=3) as writer:
        writer.write(Decision(3, 7, 2, True), ([0], [1.0]))
    recording = read_recording(path)
    assert [decision.num_gradients for decision in recording.decisions] == [1, 1, 1, 7]
    assert recording.order == (0,)


def take_as_recorded(_rank):
    """Computed shares of both stages, in steps in which the stand-in had submitted two, one and no gradient."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    reached = []
    with staged(module, stages=2) as model:
        taken = enumerate(((2, 1), (1, 0), (0, 0)))
        model.replay(Recording((), (), tuple(Decision(step, num, None, True, over) for step, (num, over) in taken)))
        for _ in range(3):
            with model.step():
                model(features(0, 0)).square().mean().backward()
            module.zero_grad()
            reached.append((model.last_report.ranks[0].stages, model.last_decision.num_gradients))
    return reached


def test_gradients_that_came_too_late_in_the_recorded_run_are_not_merged_in_its_replay():
    assert run_forked(take_as_recorded, 1) == [[((1.0, 1.0), 2), ((1.0, 0.0), 1), ((0.0, 0.0), 0)]]
