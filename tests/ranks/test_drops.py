"""What a run says of the gradients that it drops, in real groups: by whom, when, and when not."""

import gc
import logging
import math
import time

import pytest
import torch
from ranks import die, run_forked, run_ranks, staged
from sharding import Blocks, batch, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from training import Signals, mlp

from straggle import Elastic, LateHandling, LateLoader, Merge, StagedDataParallel
from straggle.loop.drops import FIRST

pytestmark = pytest.mark.light


class Heard:
    """Level and text of what the logger `straggle` itself says."""

    def __init__(self):
        self.lines = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.lines.append((record.levelname, record.getMessage()))
        handler.addFilter(lambda record: record.name == "straggle")
        logger = logging.getLogger("straggle")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    @property
    def levels(self):
        return [level for level, _ in self.lines]


def steps(model, rank, number, cut=(), nonfinite=(), skipped=()):
    """Steps in which some ranks leave their pass at its end, as a late one does, at no gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for count in range(number):
        with model.step() as step:
            loss = model(torch.randn(4, 4)).square().mean()
            if rank in skipped:
                continue
            if rank in cut and count:
                step.stop()
            (loss * (math.nan if rank in nonfinite else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def says(rank, number, merge, ways):
    heard = Heard()
    with staged(mlp(), merge=merge) as model:
        steps(model, rank, number, **ways)
        before = list(heard.levels)
    return before, heard.levels, heard.lines


def test_lowest_rank_warns_once_and_again_at_the_end_if_a_rank_gave_less_than_half():
    (before, levels, lines), *others = run_ranks(says, 3, FIRST + 5, Merge(), {"cut": (2,)})
    assert (before, levels) == (["WARNING"], ["WARNING", "WARNING"])
    first, second = lines[-1][1].splitlines()
    assert first.startswith(f"straggle, Sequential: {FIRST + 5} steps of ")
    assert f"% of rank 2's (late {FIRST + 4} times, in " in first
    assert second.startswith("rank 2 gives less than half: deal it less (straggle.Rebalance)")
    assert [levels for _, levels, _ in others] == [[], []]


def test_lines_after_the_first_are_no_warnings():
    (before, levels, _), *_ = run_ranks(says, 2, FIRST, Merge(log_every_s=1e-9), {"cut": (1,)})
    assert before == ["WARNING"] + ["INFO"] * (FIRST - 3)  # the first step drops nothing, and the next is counted
    assert levels[len(before) :] == ["WARNING"]


@pytest.mark.parametrize(
    ("merge", "ways"),
    [
        (Merge(), {}),
        (Merge(), {"nonfinite": (1,)}),
        (Merge(), {"skipped": (1,)}),
        (Merge(log_every_s=math.inf), {"cut": (1,)}),
    ],
    ids=["all given", "not finite", "left out by the loop", "turned off"],
)
def test_silent(merge, ways):
    assert [levels for _, levels, _ in run_ranks(says, 2, FIRST + 5, merge, ways)] == [[], []]


def uneven(rank):
    heard = Heard()
    with staged(mlp()) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in model.join([torch.randn(4, 4)] * (3 + 4 * rank)):
            with model.step():
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return heard.levels


def test_a_rank_without_more_data_dropped_nothing():
    assert run_ranks(uneven, 2) == [[], []]


def pulled(rank):
    heard = Heard()
    with staged(mlp()) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            with model.step() as step:
                for _number in step.pull(range(6)):
                    model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return heard.levels


def test_a_pool_that_was_computed_dropped_nothing():
    assert run_ranks(pulled, 2) == [[], []]


def two_models(rank):
    heard = Heard()

    class Critic(nn.Sequential):
        pass

    first, second = StagedDataParallel(mlp()), StagedDataParallel(Critic(nn.Linear(4, 4)))
    for model in (first, second):
        steps(model, rank, 3, cut=(1,))
    del model, first
    gc.collect()
    freed = [line.split(":")[0] for _, line in heard.lines]
    second.close()
    second.close()
    return freed, [line.split(":")[0] for _, line in heard.lines]


def test_a_freed_model_speaks_too_and_each_says_its_name():
    expected = ["straggle, Sequential"], ["straggle, Sequential", "straggle, Critic"]
    assert run_forked(two_models, 2) == [expected, ([], [])]


def in_groups(rank):
    heard = Heard()
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with staged(mlp(), process_group=groups[rank // 2]) as model:
        steps(model, rank % 2, 3, cut=(1,))
    return [line.partition(" (late")[0].rpartition("of ")[2] for _, line in heard.lines]


def test_lowest_rank_of_each_group_speaks_and_numbers_are_those_of_its_reports():
    assert run_ranks(in_groups, 4) == [["rank 1's"], [], ["rank 1's"], []]


def raises(rank):
    heard = Heard()
    model = StagedDataParallel(mlp())
    steps(model, rank, 3, cut=(1,))
    try:
        with model.step():
            if rank == 0:
                raise KeyError("the user's")
            model(torch.randn(4, 4)).square().mean().backward()
    except (KeyError, RuntimeError):
        pass
    model.close()
    return heard.levels


def test_a_loop_that_ends_with_an_error_is_told_what_was_dropped_until_then():
    assert run_ranks(raises, 2) == [["WARNING"], []]


def members(rank):
    heard, signals = Heard(), Signals()
    model = StagedDataParallel(mlp(), members=Elastic(min_ranks=1, suspect_s=5.0), late_handling=LateHandling())
    steps(model, rank, 4, cut=(2,))
    said = list(heard.levels)
    if rank == 0:
        signals.wait("ready")
        die()
    if rank == 1:
        signals.send("ready")
    steps(model, rank, 2 * FIRST, cut=(2,))
    model.close()
    return said, heard.levels, "".join(line for _, line in heard.lines)


def test_next_member_speaks_if_the_lowest_one_died():
    _, (said, levels, line), (_, others, lines) = run_ranks(members, 3, outcomes=True)
    assert (said, levels, others) == ([], ["WARNING", "WARNING"], []), lines
    assert "of rank 2's" in line
    assert "rank 0" not in line


def slow(rank, deadline, left_out):
    """Rank 1 works for longer than the others: until some time after rank 0 has submitted its part."""
    heard, signals = Heard(), Signals()
    group = torch.distributed.new_group([0, 2]) if left_out else None
    if left_out and rank == 1:
        return heard.levels
    with staged(mlp(), process_group=group, deadline=deadline) as model:
        model.register_submit_hook(lambda step: signals.send(f"{rank} has submitted {step}"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(4):
            with model.step():
                x = torch.randn(4, 4)
                if rank == 1:
                    signals.wait(f"0 has submitted {number}")
                    until = time.monotonic() + 0.2
                    while time.monotonic() < until:
                        time.sleep(0.01)
                        model(x)  # ends the block if this rank is late
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return heard.levels


def test_what_the_line_says_to_do_helps():
    assert run_ranks(slow, 3, 0.01, False) == [["WARNING"], [], []]
    assert run_ranks(slow, 3, 60.0, False) == [[], [], []]
    assert run_ranks(slow, 3, 60.0, True) == [[], [], []]


class SlowData(Dataset):
    """Rank 1 has a batch only after the step that is its next one is over for rank 0."""

    def __init__(self, rank, signals):
        self.step, self._slow, self._signals = 0, rank == 1, signals

    def __len__(self):
        return 14

    def __getitem__(self, number):
        if self._slow and self.step > 1:
            self._signals.wait(f"merged {self.step}")
        return torch.full((4,), float(number))


def loads_slowly(rank, load):
    heard, signals = Heard(), Signals()
    data = SlowData(rank, signals)
    handling = LateHandling(grace_s=0.0, max_lag=2)
    with staged(mlp(), deadline=0.2, late_handling=handling) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, x in enumerate(load(model, DataLoader(data))):
            with model.step():
                model(x).square().mean().backward()
            if rank == 0:
                signals.send(f"merged {number}")
            optimizer.step()
            optimizer.zero_grad()
            data.step = number + 1
        given = model.last_report.step + 1
    return given, "LateLoader" in "".join(line for _, line in heard.lines)


def plain_loader(_model, loader):
    return loader


def test_what_the_line_says_to_write_for_a_rank_that_loads_slowly_helps():
    assert run_ranks(loads_slowly, 2, plain_loader) == [(14, True), (14, False)]
    assert run_ranks(loads_slowly, 2, LateLoader) == [(14, False), (14, False)]


def sharded(rank):
    heard = Heard()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    net = shard(Blocks(2), mesh["dp_shard"])
    with staged(net, mesh=mesh["dp_replicate"]) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(5):
            with model.step() as step:
                if rank == 3 and number:
                    step.stop()
                model(batch(number, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return heard.lines


def test_replicas_are_said_once_for_all_of_their_ranks():
    (lines, *others) = run_ranks(sharded, 4)
    assert others == [[], [], []]
    ((level, line),) = lines
    assert level == "WARNING"
    assert "% of replica 1's (late 4 times, " in line
    assert "\nreplica 1 gives less than half: wait longer" in line
