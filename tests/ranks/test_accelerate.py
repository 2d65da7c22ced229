"""`StagedAccelerator` beside the Accelerator under DDP: the real one, on ranks over gloo."""

import os
from importlib.util import find_spec

import pytest
import torch
from launched import as_launched
from ranks import digest, run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.slow,  # accelerate takes its seconds to load
    # asked for, not imported: each test process collects this file
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
NUM_RANKS, FOUR = 2, 4


class Job:
    """What people write with Accelerate: 11 batches a rank, 4 to a step, so that the last step has 3."""

    def __init__(self, kind, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        x = torch.randn(88, 6, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x[:, :3]), batch_size=4, shuffle=True)
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=4, **options)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.num_steps, self.between = 0, None

    def epoch(self, after_block=True, stop_at=()):
        """``after_block``: the optimizer's lines come after the block, and not in it."""
        for number, (x, y) in enumerate(self.loader):
            with self.accelerator.accumulate(self.model):
                if number in stop_at:
                    self.model.open_step.stop()
                self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                if not after_block:
                    self.step()
            if after_block:
                self.step()
        return digest(self.accelerator.unwrap_model(self.model).parameters())

    def step(self):
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.num_steps += 1
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def beside_ddp(rank, folder):
    as_launched(rank)
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from straggle.integrations.accelerate import StagedAccelerator

    results = []
    for kind, after_block in ((Accelerator, False), (StagedAccelerator, True)):
        set_seed(5)
        job = Job(kind)
        results.append(([job.epoch(after_block), job.epoch(after_block)], job.num_steps))
    ends = []
    for kind, after_block in ((Accelerator, False), (StagedAccelerator, True)):
        set_seed(5)
        job = Job(kind)
        job.epoch(after_block)
        job.accelerator.save_state(folder)
        again = Job(kind)
        again.accelerator.load_state(folder)
        ends.append(again.epoch(after_block))
    files = sorted(name for name in os.listdir(folder) if name.startswith("straggle"))
    return results, ends, files, type(again.accelerator.unwrap_model(again.model)).__name__


def test_trains_as_under_ddp_and_saves_its_state(tmp_path):
    for results, (ddp_end, staged_end), files, kind in run_ranks(beside_ddp, NUM_RANKS, str(tmp_path), timeout_s=120):
        (ddp, ddp_steps), (staged, staged_steps) = results
        assert staged == ddp
        assert staged_steps == ddp_steps == 6
        assert staged_end == ddp_end
        assert files == [f"straggle_0_{rank}.pt" for rank in range(NUM_RANKS)]
        assert kind == "Sequential"


def with_a_late_rank(rank):
    as_launched(rank)
    from accelerate.utils import set_seed

    from straggle.integrations.accelerate import StagedAccelerator

    set_seed(5)
    job = Job(StagedAccelerator, deadline=100.0)
    late = []
    job.model.register_step_hook(lambda record: late.append((record.report.late_ranks, record.report.dropped_share)))
    return job.epoch(stop_at=(5, 8) if rank else ()), job.num_steps, late


def test_a_late_rank_skips_its_micro_batches_and_all_apply_the_same():
    first, second = run_ranks(with_a_late_rank, NUM_RANKS, timeout_s=120)
    assert first == second
    assert first[1] == 3
    assert [ranks for ranks, _ in first[2]] == [(), (1,), (1,)]
    assert [dropped for _, dropped in first[2]] == pytest.approx([0, 0.375, 0.5])


def on_four(rank):
    """An epoch under DDP and under straggle, and one in which the last rank is late in its first step."""
    as_launched(rank, FOUR)
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from straggle.integrations.accelerate import StagedAccelerator

    values = []
    for kind, after_block in ((Accelerator, False), (StagedAccelerator, True)):
        set_seed(5)
        job = Job(kind)
        job.epoch(after_block)
        bare = job.accelerator.unwrap_model(job.model)
        values.append(torch.cat([parameter.detach().flatten() for parameter in bare.parameters()]).tolist())
    job = Job(StagedAccelerator, deadline=100.0)
    late = []
    job.model.register_step_hook(lambda record: late.append((record.report.late_ranks, record.report.dropped_share)))
    return *values, job.epoch(stop_at=(1,) if rank == FOUR - 1 else ()), job.num_steps, late


def test_four_ranks_train_as_under_ddp_and_stay_alike_where_one_is_late():
    first, *others = run_ranks(on_four, FOUR, timeout_s=120)
    assert others == [first] * (FOUR - 1)
    ddp, staged, _, num_steps, late = first
    assert staged == pytest.approx(ddp, abs=1e-5)  # sums of more than two numbers have an order
    assert num_steps == 2
    assert [ranks for ranks, _ in late] == [(FOUR - 1,), ()]
    assert late[0][1] == pytest.approx(3 / 16)  # of four micro-batches one was made


def stepped_inside(rank):
    as_launched(rank)
    from straggle.integrations.accelerate import StagedAccelerator

    job = Job(StagedAccelerator)
    with pytest.raises(RuntimeError, match="step after it"):
        job.epoch(after_block=False)
    return True


def test_an_optimizer_that_steps_in_the_block_is_told_where_to():
    assert run_ranks(stepped_inside, NUM_RANKS, timeout_s=120) == [True] * NUM_RANKS
