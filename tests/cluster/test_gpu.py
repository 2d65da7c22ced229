"""On a GPU: the same gradients as DDP, truncation out of the device's own backward thread, mixed precision."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, staged, started_command
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import Stopper

from straggle import FinishedStage, StagedBackward
from straggle.backward import stages
from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.text import Text
from straggle.lab.workloads.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def workload(name: str) -> Workload:
    return {"text": Text, "digits": Digits}[name]()


def batches(work: Workload, count: int) -> list[tuple[Tensor, Tensor]]:
    pairs = [work.batch(torch.arange(8) + 8 * number) for number in range(count)]
    return [(x.cuda(), y.cuda()) for x, y in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["text", "digits"])
@pytest.mark.filterwarnings("ignore:.*ttention defaults to a non-deterministic algorithm")  # on some GPUs
def test_training_equals_ddp_bit_for_bit_over_nccl(nccl: None, name: str, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    work = workload(name)
    torch.manual_seed(0)
    ours = work.model().cuda()
    theirs = copy.deepcopy(ours)
    ddp = DistributedDataParallel(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    with staged(ours, deadline=60.0) as model:
        for batch in batches(work, 4):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                with model.step():
                    work.loss(model, batch).backward()
                work.loss(ddp, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_kept_gradients_of_a_truncated_backward_equal_the_full_ones_on_the_device(nccl: None) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    work = workload("text")
    torch.manual_seed(0)
    module = work.model().cuda()
    (batch,) = batches(work, 1)
    work.loss(module, batch).backward()
    full = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    stopper = Stopper(module)
    with staged(module, deadline=60.0) as model:
        for cut in (None, 1, len(full) // 2, len(full) - 1, None):
            with model.step() as step:
                stopper.arm(step, cut)
                work.loss(model, batch).backward()
            kept = [parameter.grad for parameter in module.parameters()]
            assert sum(gradient is not None for gradient in kept) == (len(full) if cut is None else cut)
            for gradient, expected in zip(kept, full, strict=True):
                assert gradient is None or torch.equal(gradient, expected)
            module.zero_grad()


def memory_of_truncated_steps() -> tuple[int, int]:
    work = workload("text")
    module = work.model().cuda()
    (batch,) = batches(work, 1)
    stopper = Stopper(module)
    allocated = []
    with staged(module, deadline=60.0) as model:
        for number in range(1000):
            with model.step() as step:
                stopper.arm(step, number % 70 + 1)
                work.loss(model, batch).backward()
            module.zero_grad()
            if number in (10, 999):
                allocated.append(torch.cuda.memory_allocated())
    return allocated[0], allocated[1]


@pytest.mark.slow
def test_a_thousand_truncated_steps_leave_no_memory_behind(nccl: None) -> None:
    early, late = memory_of_truncated_steps()
    assert late == early


def merge_on_one_device(rank: int) -> list[float]:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).cuda()
    with torch.no_grad():
        module[0].weight.fill_(2.0)
        module[1].weight.fill_(3.0)
    stopper = Stopper(module)
    x = torch.full((1, 1), float(rank + 1), device="cuda")
    with staged(module, deadline=60.0, stages=2) as model:
        for cut in (None, 1 if rank == 1 else None):
            with model.step() as step:
                stopper.arm(step, cut)
                module.zero_grad()
                model(x).sum().backward()
        return [parameter.grad.item() for parameter in module.parameters()]


def test_a_late_rank_is_left_out_of_the_mean_on_the_device() -> None:
    # d/dw1 = w2 x = 3 x, d/dw2 = w1 x = 2 x; rank 1 (x = 2) is stopped after w2
    for gradients in run_forked(merge_on_one_device, 2):
        assert gradients == [3.0, 2.0 * (1 + 2) / 2]


def merge_with_nan(rank: int, bucket_bytes: int) -> tuple[list[float], int]:
    stages.BUCKET_BYTES = bucket_bytes
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).cuda()
    for parameter, value in zip(module.parameters(), (2.0, 3.0), strict=True):
        nn.init.constant_(parameter, value)
    if rank == 1:
        module[0].weight.register_hook(lambda gradient: gradient * math.nan)
    x = torch.full((1, 1), float(rank + 1), device="cuda")
    with staged(module, stages=2) as model:
        for _ in range(3):  # before and after the stages are planned
            module.zero_grad()
            with model.step():
                model(x).sum().backward()
        assert model.last_report is not None
        gradients = [parameter.grad.item() for parameter in module.parameters()]
        return gradients, model.last_report.ranks[1].nonfinite


@pytest.mark.parametrize(("bucket_bytes", "expected"), [(1, ([3.0, 3.0], 1)), (2**20, ([3.0, 2.0], 2))])
def test_a_bucket_with_a_nan_is_left_out_of_the_mean_on_the_device(
    bucket_bytes: int, expected: tuple[list[float], int]
) -> None:
    # as above; rank 1 has a NaN in w1, and w2 is in a bucket of its own, or in the same
    assert run_forked(merge_with_nan, 2, bucket_bytes) == [expected, expected]


# -- the staged backward by itself


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(2048, 2048), nn.Tanh()))).cuda()


def test_stage_seconds_are_device_seconds_and_add_up_to_the_whole_pass() -> None:
    module = deep()
    watched = StagedBackward(module, stages=8)
    for _ in range(3):
        loss = module(torch.randn(2048, 2048, device="cuda")).square().mean()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step = watched.backward(loss)
        end.record()
        end.synchronize()
        module.zero_grad()
    assert len(step.report.stages) == 8
    assert step.report.seconds == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.02)


def device_seconds(module: nn.Module, cut: int | None) -> float:
    """Device seconds of a pass that is stopped after ``cut`` stages."""
    seconds, finished = [], list[str]()

    def count(stage: FinishedStage) -> None:
        finished.append(stage.name)
        if len(finished) == cut:
            stage.stop()

    watched = StagedBackward(module, stages=8, on_stage=count)
    for _ in range(5):
        loss = module(torch.randn(2048, 2048, device="cuda")).square().mean()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        finished.clear()
        torch.cuda.synchronize()
        begin.record()
        watched.backward(loss, budget_s=60.0)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
        module.zero_grad()
    return sorted(seconds)[2]


def test_stopping_at_half_of_the_stages_saves_device_time() -> None:
    whole = device_seconds(deep(), None)
    assert device_seconds(deep(), 4) < 0.75 * whole


def test_host_is_at_most_one_stage_ahead_of_the_device_when_there_is_a_budget() -> None:
    module = deep()
    events: list[torch.cuda.Event] = []
    ahead: list[int] = []

    def finished(_: object) -> None:
        ahead.append(sum(not event.query() for event in events))
        events.append(torch.cuda.Event())
        events[-1].record()

    watched = StagedBackward(module, stages=8, on_stage=finished)
    for _ in range(3):
        events.clear()
        ahead.clear()
        watched.backward(module(torch.randn(2048, 2048, device="cuda")).square().mean(), budget_s=60.0)
        module.zero_grad()
    assert max(ahead) <= 1


def test_stopped_passes_of_the_staged_backward_leave_no_memory_behind() -> None:
    module = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh()))).cuda()
    watched = StagedBackward(module, on_stage=lambda stage: stage.stop() if stage.name == "4" else None, stages=["4"])
    allocated = []
    for number in range(1000):
        loss = module(torch.randn(256, 256, device="cuda")).square().mean()
        watched.backward(loss)
        module.zero_grad()
        if number in (10, 999):
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[0] == allocated[1]


def test_worker_that_is_forked_from_a_process_with_torch_loaded_has_the_device(tmp_path: Path) -> None:
    """The library that it loads asks for devices, too."""
    (tmp_path / "asks.py").write_text(
        "import torch\nnum_devices = torch.cuda.device_count(), torch.cuda.is_available()\n"
    )
    (tmp_path / "worker.py").write_text("import torch\nprint('sum', torch.ones(3, device='cuda').sum().item())\n")
    words = ("--preload=asks", "--max-restarts=0", tmp_path / "worker.py")
    with started_command("launch", *words, folder=tmp_path) as job:
        assert job.status() == 0, job.log.read_text()
    assert "sum 3.0" in job.log.read_text()
