"""Steps on a device that is a queue: the host waits for no part of them, and what the device alone knows comes later.

The device is a fake one, with tensors on the CPU, for which each read by the host is counted.
"""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from host_reads import HostReads
from queued_device import RecordingDevice, queued_device
from ranks import digest, logged, run_forked, run_ranks, staged
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from training import Chain, Stopper, features, grads, mlp

from straggle import LastMerged, Merge, world
from straggle.backward import stages as planned

pytestmark = pytest.mark.light

BUCKET_BYTES = planned.BUCKET_BYTES, planned.QUEUED_BYTES
PLANNED = 3  # steps after which the stages are planned, and all buffers are as they stay


def held_in(module):
    return [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def deep():
    return mlp(depth=9)


WAYS = {
    "plain": {},
    "a deadline that nobody misses": {"deadline": 60.0},
    "micro-batches": {"passes": 3},
    "buffers": {"module": norms},
    "logged loss": {"logs": True},
    "clipping": {"clips": True},
    "a weight": {"weight": 3.0},
    "optimizer within the step": {"early": True, "merge": Merge(nonfinite="keep")},
    "fused": {"fused": True},
    "an estimator": {"estimator": LastMerged()},
    "rounded on the wire": {"merge": Merge(wire_dtype=torch.bfloat16)},
    "kept bad numbers": {"merge": Merge(nonfinite="keep")},
    "several buckets": {"module": deep, "stages": 9, "bucket_bytes": (1, 500)},
    "several buckets of micro-batches": {"module": deep, "stages": 9, "bucket_bytes": (1, 500), "passes": 3},
    "several buckets, and the optimizer within the step": {
        "module": deep,
        "stages": 9,
        "bucket_bytes": (1, 500),
        "early": True,
        "merge": Merge(nonfinite="keep"),
    },
}


def one_step(model, optimizer, rank, number, *, passes=1, logs=False, clips=False, weight=None, early=False):
    with model.step(passes, optimizer=optimizer if early else None) as step:
        if weight is not None:
            step.weight = weight + rank
        for one in range(passes):
            loss = model(features(rank, passes * number + one)).square().mean()
            loss.backward()
        if logs:
            step.log(loss=loss)
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not early:
        optimizer.step()
        optimizer.zero_grad()


def steps_by(rank, queued, ways):
    return [steps(rank, queued, **WAYS[way]) for way in ways]


def steps(rank, queued, *, module=mlp, fused=False, bucket_bytes=BUCKET_BYTES, stages=None, **how):
    """Each step's reads of the device by the host, and what came of the steps."""
    of_model = {name: how.pop(name) for name in ("deadline", "merge", "estimator") if name in how}
    planned.BUCKET_BYTES, planned.QUEUED_BYTES = bucket_bytes
    torch.manual_seed(0)
    own, reads = module(), []
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01, fused=fused)
    with (
        queued_device() if queued else nullcontext() as device,
        staged(own, stages=stages, **of_model) as model,
    ):
        for number in range(8):
            with HostReads(held_in(own)) as seen:
                one_step(model, optimizer, rank, number, **how)
            reads.append([one for one in seen.reads if "straggle" in one or "step" in one])
        waits = device.waits if queued else 0
    return reads, waits, digest([*own.parameters(), *own.buffers()])


@pytest.mark.parametrize("part", range(6))
def test_host_reads_nothing_back_and_the_result_is_that_of_the_cpu_bit_for_bit(part):
    ways = tuple(WAYS)[part::6]
    on_host, _ = run_forked(steps_by, 2, False, ways)
    for results in run_forked(steps_by, 2, True, ways):
        for way, (reads, waits, state), (_, _, expected) in zip(ways, results, on_host, strict=True):
            assert not any(reads[PLANNED:]), (way, reads)
            assert waits == 0, way
            assert state == expected, way


def joined(rank):
    """Rank 1 has two batches fewer."""
    module, seen = mlp(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with queued_device() as device, staged(module) as model:
        for number, x in enumerate(model.join([features(rank, number) for number in range(7 - 2 * rank)])):
            with HostReads([*held_in(module), x]) as reads:
                with model.step():
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(reads.reads if number >= PLANNED else [])
    return seen, device.waits, digest(module.parameters())


def test_host_reads_nothing_back_if_ranks_have_different_numbers_of_batches():
    (first, waits, parameters), (second, _, others) = run_forked(joined, 2)
    assert len(first) == len(second) == 7
    assert not any(first + second)
    assert (waits, parameters) == (0, others)


# -- what only the device knows


def poisoned(rank, poison, fused=False, behind=0, num_steps=6, at=3):
    """Reports of steps, of which one has a NaN where ``poison[rank]`` has a layer; what parameters were after each."""
    module, reports, states = Chain(4), [], []
    bad = [False]
    for layer in poison[rank]:
        module.layers[layer].weight.register_hook(lambda gradient: gradient * (math.nan if bad[0] else 1.0))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
    with queued_device(RecordingDevice(behind)), staged(module, stages=4) as model:
        for number in range(num_steps):
            bad[0] = number == at
            with model.step():
                model(float(rank + 1)).backward()
            if bad[0]:
                merged = grads(module)
            optimizer.step()
            optimizer.zero_grad()
            reports.append(model.last_report)
            states.append(digest([*module.parameters(), *optimizer.state[module.layers[0].weight].values()]))
    return reports, states, merged


def counted(reports):
    """For each step, what its report has of bad numbers, and of which step these are."""
    return [
        ([rank.nonfinite for rank in report.ranks], report.skipped, report.step - report.counts_behind)
        for report in reports
    ]


def test_bad_numbers_of_one_rank_are_left_out_and_counted_in_the_next_report():
    for reports, _, merged in run_forked(poisoned, 3, [[], [1], []]):
        assert counted(reports)[3:5] == [([0, 0, 0], False, 2), ([0, 4, 0], False, 3)]
        for layer, gradient in enumerate(merged):  # all four are in one bucket
            assert torch.equal(gradient, torch.full((2 + layer,), (layer + 1) * (1.0 + 3.0) / 2))


def test_counts_come_when_the_device_is_there_however_far_the_host_is_ahead():
    for reports, _, _ in run_forked(poisoned, 2, [[2], []], False, 5, 9, 1):
        assert sum(sum(rank.nonfinite for rank in report.ranks) for report in reports) == 4
        assert max(report.counts_behind for report in reports) > 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_step_without_usable_gradients_changes_nothing_if_the_optimizer_can_be_told(fused):
    for reports, states, merged in run_forked(poisoned, 2, [[0], [3]], fused):
        assert not any(gradient.any() for gradient in merged)
        assert (states[3] == states[2]) is fused
        assert len(set(states)) == (5 if fused else 6)
        assert [report.skipped for report in reports] == [False] * 4 + [True, False]
        assert counted(reports)[4] == ([4, 4], True, 3)


def warned(rank):
    with logged("straggle") as said:
        poisoned(rank, [[0], [3]])
    return said


def test_warning_of_such_a_step_says_that_its_gradients_were_zeros():
    first, _ = run_forked(warned, 2)
    assert "step 3: gradients of ranks [0, 1] were not finite" in first[0]
    assert "the merged gradients were zeros: only a fused optimizer changes nothing then" in first[0]


def logs(rank, behind):
    module, found = mlp(), []
    with queued_device(RecordingDevice(behind)), staged(module) as model:
        for number in range(6):
            with model.step() as step:
                model(features(rank, number)).square().mean().backward()
                step.log(on_device=torch.tensor(10.0 * number + rank), on_host=float(number))
            found.append(dict(model.last_report.scalars))
    return found


def test_scalars_on_the_device_come_as_means_in_the_next_report_and_others_at_once():
    for found in run_forked(logs, 2, 0):
        assert [own["on_host"] for own in found] == list(range(6))
        on_device = [own["on_device"] for own in found]
        assert math.isnan(on_device[0])
        assert on_device[1:] == [0.5, 10.5, 20.5, 30.5, 40.5]


def many_logs(rank):
    module, found = mlp(), []
    with queued_device(), staged(module) as model:
        for number in range(4):
            with model.step() as step:
                model(features(rank, number)).square().mean().backward()
                names = [f"{'host' if number else 'device'}{one}" for one in range(8)]
                step.log(**{name: float(number) if number else torch.tensor(5.0) for name in names[: 9 - 2 * number]})
            found.append(dict(model.last_report.scalars))
    return found


def test_scalars_for_which_a_row_has_no_room_wait_for_the_next_one():
    for found in run_forked(many_logs, 2):
        assert [sum(name.startswith("host") for name in own) for own in found] == [0, 7, 5, 3]
        on_device = [[value for name, value in own.items() if name.startswith("device")] for own in found]
        assert list(map(len, on_device)) == [8, 1, 3, 4]
        assert all(map(math.isnan, on_device[0]))
        assert all(value == 5.0 for own in on_device[1:] for value in own)


def logs_odd_ones(rank):
    """Each report's scalars, and the error for a tensor of two numbers."""
    module, found, running = mlp(), [], torch.zeros(1)
    with queued_device(), staged(module) as model:
        for number in range(4):
            with model.step() as step:
                model(features(rank, number)).square().mean().backward()
                step.log(running=running.add_(1.0), count=torch.tensor(number), twice=torch.tensor(9.0))
                running.add_(100.0)
                step.log(twice=float(number))
                with pytest.raises(RuntimeError):
                    step.log(two=torch.zeros(2))
            found.append(dict(model.last_report.scalars))
    return found


def test_scalar_is_what_it_was_when_it_was_logged_and_the_last_of_its_name():
    for found in run_forked(logs_odd_ones, 2):
        assert [own["twice"] for own in found] == [0.0, 1.0, 2.0, 3.0]
        assert [str(own["running"]) for own in found] == ["nan", "1.0", "102.0", "203.0"]
        assert [str(own["count"]) for own in found] == ["nan", "0.0", "1.0", "2.0"]


def logs_of_a_mesh(rank, placement):
    module, found = mlp(), []
    mesh = init_device_mesh("cpu", (2,))
    with queued_device(), staged(module) as model:
        for number in range(2):
            with model.step() as step:
                model(features(rank, number)).square().mean().backward()
                step.log(
                    loss=DTensor.from_local(
                        torch.tensor(2.5 if placement.is_replicate() else 2.0 + rank), mesh, [placement]
                    )
                )
            found.append(dict(model.last_report.scalars))
    return found


@pytest.mark.parametrize("placement", [Replicate(), Partial("avg")], ids=str)
def test_scalar_of_a_mesh_is_that_of_all_its_ranks(placement):
    for first, second in run_forked(logs_of_a_mesh, 2, placement):
        assert [*first] == ["loss"]
        assert math.isnan(first["loss"])
        assert second == {"loss": 2.5}


def skips(rank):
    """Whether each report has a skipped step, if the ranks' devices are differently far behind."""
    module, reports = Chain(4), []
    device = RecordingDevice()
    with queued_device(device), staged(module, stages=4) as model:
        for number in range(8):
            with model.step():
                loss = model(float(rank + 1))
                (loss * math.nan if number == 3 else loss).backward()
            if number == 3 and rank:
                device.behind = 2
            reports.append((model.last_report.skipped, model.last_report.ranks[rank].nonfinite))
    return reports


def test_skipped_step_is_in_one_report_though_ranks_hear_of_it_in_different_ones():
    for reports in run_forked(skips, 2):
        assert [skipped for skipped, _ in reports].count(True) == 1
        assert [nonfinite for _, nonfinite in reports].count(4) == 1


def fails_to_step(rank):
    """What an optimizer is told in a step that fails, and in the next one, to which no rank has given anything."""
    module, told = Chain(2), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    def closure():
        told.append(float(getattr(optimizer, "found_inf", 0.0)))
        if len(told) == 1:
            raise ValueError("as if the loss could not be computed")

    with queued_device(), staged(module) as model:
        with model.step():
            (model(1.0) * math.nan).backward()
        with pytest.raises(ValueError, match="as if"):
            optimizer.step(closure)
        with model.step():
            pass
        optimizer.step(closure)
    return told


def test_optimizer_whose_step_failed_is_told_nothing_of_that_one_in_the_next():
    assert run_forked(fails_to_step, 1) == [[1.0, 0.0]]


def bad_at_the_end(rank):
    module = mlp()
    with logged("straggle") as said, queued_device(), staged(module) as model:
        for number in range(3):
            with model.step():
                loss = model(features(rank, number)).square().mean()
                (loss * math.nan if rank == 1 and number == 2 else loss).backward()
        model.close()
    return said


def test_bad_numbers_of_the_last_step_are_named_when_the_model_is_closed():
    first, second = run_forked(bad_at_the_end, 2)
    assert first == []
    assert "rank 1, since step 2: 6 gradients were not finite and left out" in second[0]


AS = ("tensor", "number", "nothing")  # how a rank logs a scalar in a step
WHERE = ("goes on", "late before it logs", "late after it has logged")


def logs_as(rank, schedule, queued):
    """Each report's scalar, with which of them are known to come; ``schedule``: of each step and rank, how it logs."""
    module, found = mlp(), []
    stopper = Stopper(module)
    with queued_device() if queued else nullcontext(), staged(module) as model:
        model.register_step_hook(lambda record: found.append((dict(record.report.scalars), record.awaited)))
        for number, of_ranks in enumerate(schedule):
            how, where = of_ranks[rank]
            with model.step() as step:
                stopper.arm(step, 0 if where == "late before it logs" else None)
                loss = model(features(rank, number)).square().mean()
                value = 10.0 * number + rank
                if how != "nothing":
                    step.log(loss=torch.tensor(value) if how == "tensor" else value)
                if where == "late after it has logged":
                    step.stop()
                loss.backward()
    return found


def expected_of(schedule, queued):
    """For each step the mean over the values that its rows have; NaN if there is none, and some are to come."""
    expected, of_before = [], {}
    for number, of_ranks in enumerate(schedule):
        logged = {
            rank: (how, 10.0 * number + rank)
            for rank, (how, where) in enumerate(of_ranks)
            if how != "nothing" and where != "late before it logs"
        }
        now = {rank: value for rank, (how, value) in logged.items() if how == "number" or not queued}
        values = {**of_before, **now}
        mean = sum(values.values()) / len(values) if values else math.nan
        expected.append(({"loss": mean}, not values) if values or logged else ({}, False))
        of_before = {rank: value for rank, (how, value) in logged.items() if how == "tensor" and queued}
    return expected


@pytest.mark.parametrize("queued", [False, True], ids=["on the host", "on a queue"])
@pytest.mark.parametrize("where", WHERE)
def test_report_has_each_scalar_that_was_logged_in_its_step_with_its_mean_or_as_one_that_is_to_come(where, queued):
    # two ranks in two steps that follow each other, in all ways: the second is a first step of those that logged not
    ways = list(product(AS, repeat=4))
    schedule = [
        [(one, "goes on"), (other, where)] for way in ways for one, other in (way[:2], way[2:], ("nothing", "nothing"))
    ]
    for found in run_ranks(logs_as, 2, schedule, queued):
        for number, ((scalars, awaited), (expected, comes)) in enumerate(
            zip(found, expected_of(schedule, queued), strict=True)
        ):
            assert repr(scalars) == repr(expected), (number, schedule[number - 1 : number + 1])
            assert awaited == ({"loss"} if comes else set())


STUCK = ("between two steps", "before it logs", "after it has logged")


def logs_while_stuck(rank, where):
    """Each report's scalars, if rank 1 is stuck there in every third step; each rank logs a number and a tensor."""
    module, found = mlp(), []
    with queued_device(), staged(module, deadline=0.1) as model:
        model.register_step_hook(
            lambda record: found.append(
                (dict(record.report.scalars), record.awaited, [own.stood_in for own in record.report.ranks])
            )
        )
        for number in range(12):
            stuck = rank == 1 and number % 3 == 2
            if stuck and where == "between two steps":
                world.sleep(1.0)
            with model.step() as step:
                if stuck and where == "before it logs":
                    world.sleep(1.0)
                step.log(number=float(number), tensor=torch.tensor(float(number)))
                if stuck and where == "after it has logged":
                    world.sleep(1.0)
                world.sleep(0.05)
                model(features(rank, number)).square().mean().backward()
        model.close()
    return found


@pytest.mark.parametrize("where", STUCK)
def test_report_has_a_tensor_beside_each_number_also_if_a_rank_is_stood_in_for(where):
    first, *others = run_ranks(logs_while_stuck, 3, where)
    assert all(repr(own) == repr(first) for own in others)
    assert sum(any(stood_in) for _, _, stood_in in first) >= 3
    for step, (scalars, awaited, _) in enumerate(first):
        assert scalars["number"] == step
        assert math.isnan(scalars["tensor"]) == ("tensor" in awaited) == (step == 0)
        # of the step before, and of a rank that comes back also of those in which it was stood in for
        assert step == 0 or step - 4 <= scalars["tensor"] <= step - 1


# -- found by chance


def by_chance(rank, seed):
    torch.manual_seed(0)
    module, chance = mlp(), torch.Generator().manual_seed(100 * seed + rank)
    stopper, optimizer = Stopper(module), torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    digests = []
    with queued_device(RecordingDevice(behind=seed)), staged(module, deadline=60.0, estimator=LastMerged()) as model:
        for number in range(40):
            draw = torch.rand(3, generator=chance).tolist()
            with model.step() as step:
                step.weight = 1.0 + int(4 * draw[2])
                stopper.arm(step, int(4 * draw[0]) if draw[0] < 0.5 else None)
                loss = model(features(rank, number)).square().mean()
                (loss * math.inf if draw[1] < 0.2 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(module.parameters()))
    return digests, all(torch.isfinite(own).all() for own in module.parameters())


def by_chances(rank):
    return [by_chance(rank, seed) for seed in range(3)]


def test_replicas_are_the_same_bit_for_bit_after_any_lateness_and_bad_numbers():
    first, *others = run_forked(by_chances, 3)
    for seed, (digests, is_finite) in enumerate(first):
        assert all(own[seed][0] == digests for own in others), seed
        assert is_finite, seed
