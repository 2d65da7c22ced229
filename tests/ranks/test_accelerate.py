"""`StagedAccelerator` beside the Accelerator under DDP: the real one, on ranks over gloo."""

import os
from importlib.util import find_spec

import pytest
import torch
from launched import as_launched
from loaded import ranks_with
from ranks import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.slow,  # accelerate takes its seconds to load
    # asked for, not imported: each test process collects this file
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
NUM_RANKS, FOUR = 2, 4


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("accelerate", "straggle.integrations.accelerate") as run:
        yield run


class Job:
    """What people write with Accelerate: 11 batches a rank, 4 to a step, so that the last step has 3."""

    def __init__(self, kind, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        x = torch.randn(88, 6, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x[:, :3]), batch_size=4, shuffle=True)
        held_out = DataLoader(TensorDataset(x), batch_size=4)
        if "gradient_accumulation_plugin" not in options:
            options["gradient_accumulation_steps"] = 4
        self.accelerator = kind(cpu=True, **options)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler, held_out)
        self.model, self.optimizer, self.loader, self.scheduler, self.held_out = prepared
        self.num_steps, self.between = 0, None

    def epoch(self, after_block=True, stop_at=(), leave_at=None, loader=None):
        """``after_block``: the optimizer's lines come after the block, and not in it.

        ``between(number)`` comes after each batch.
        """
        for number, (x, y) in enumerate(loader or self.loader):
            if number == leave_at:
                break
            with self.accelerator.accumulate(self.model):
                if number in stop_at:
                    self.model.open_step.stop()
                self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                if not after_block:
                    self.step()
            if after_block:
                self.step()
            if self.between is not None:
                self.between(number)
        return digest(self.accelerator.unwrap_model(self.model).parameters())

    def evaluate(self):
        """On some of the batches."""
        self.model.eval()
        with torch.no_grad():
            for number, (x,) in enumerate(self.held_out):
                self.model(x)
                if number == 2:
                    break
        self.model.train()

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


def test_trains_as_under_ddp_and_saves_its_state(tmp_path, run_loaded):
    for results, (ddp_end, staged_end), files, kind in run_loaded(beside_ddp, NUM_RANKS, str(tmp_path), timeout_s=120):
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


def test_a_late_rank_skips_its_micro_batches_and_all_apply_the_same(run_loaded):
    first, second = run_loaded(with_a_late_rank, NUM_RANKS, timeout_s=120)
    assert first == second
    assert first[1] == 3
    assert [ranks for ranks, _ in first[2]] == [(), (1,), (1,)]
    assert [dropped for _, dropped in first[2]] == pytest.approx([0, 0.375, 0.5])


def left_early(job, _again, **words):
    """The loop leaves its loader in the middle of an accumulation, which the next epoch goes on with."""
    job.epoch(leave_at=6, **words)
    job.epoch(**words)
    job.epoch(leave_at=1, **words)
    return job.epoch(**words), job.num_steps


def evaluated_between(job, _again, **words):
    """An evaluation in the middle of an accumulation leaves its own loader early."""
    job.between = lambda number: job.evaluate() if number in (1, 5, 10) else None
    job.epoch(**words)
    return job.epoch(**words), job.num_steps


def changed(job, _again, **words):
    """Batches of a step change while it is accumulated."""

    def change(number):
        if number in (1, 6):
            job.accelerator.gradient_accumulation_steps = number // 3 + 2

    job.between = change
    job.epoch(**words)
    return job.epoch(**words), job.num_steps


def resumed(job, again, folder, **words):
    """In the middle of an epoch, and of an accumulation, whose gradients no checkpoint has."""
    job.epoch(leave_at=6, **words)
    job.accelerator.save_state(folder)
    job.accelerator.wait_for_everyone()
    job = again()
    job.accelerator.load_state(folder)
    job.epoch(loader=job.accelerator.skip_first_batches(job.loader, 6), **words)
    return job.epoch(**words), job.num_steps


def over_epochs(job, _again, **words):
    """The last batches of an epoch belong to a step with the first ones of the next."""
    job.epoch(**words)
    job.epoch(**words)
    return job.epoch(**words), job.num_steps


def left_in_the_middle(rank, folder):
    """Ends of each under DDP and under straggle, and where the last rank is late in some micro-batches."""
    as_launched(rank)
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin, set_seed

    from straggle.integrations.accelerate import StagedAccelerator

    kinds = [(Accelerator, False, {}), (StagedAccelerator, True, {}), (StagedAccelerator, True, {"deadline": 100.0})]
    ends = {}
    for program in (left_early, evaluated_between, changed, resumed, over_epochs):
        ends[program.__name__] = []
        for kind, after_block, options in kinds:
            words = {"after_block": after_block}
            if options and rank:
                words["stop_at"] = (2, 5, 9)
            if program is resumed:
                words["folder"] = f"{folder}/{len(ends[program.__name__])}"
            set_seed(5)

            def job(kind=kind, options=options, program=program):
                plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
                return Job(
                    kind, **options, **({"gradient_accumulation_plugin": plugin} if program is over_epochs else {})
                )

            ends[program.__name__].append(program(job(), job, **words))
    return ends


def test_what_ddp_does_with_an_accumulation_that_is_left_in_the_middle(tmp_path, run_loaded):
    first, second = run_loaded(left_in_the_middle, NUM_RANKS, str(tmp_path), timeout_s=240)
    assert first == second
    for name, (ddp, staged, late) in first.items():
        assert staged == ddp, name
        assert late[0] != ddp[0]
        assert late[1] == ddp[1]
    assert [ends[0][1] for ends in first.values()] == [8, 5, 8, 5, 8]


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


def test_four_ranks_train_as_under_ddp_and_stay_alike_where_one_is_late(run_loaded):
    first, *others = run_loaded(on_four, FOUR, timeout_s=120)
    assert others == [first] * (FOUR - 1)
    ddp, staged, _, num_steps, late = first
    assert staged == pytest.approx(ddp, abs=1e-5)  # sums of more than two numbers have an order
    assert num_steps == 2
    assert [ranks for ranks, _ in late] == [(FOUR - 1,), ()]
    assert late[0][1] == pytest.approx(3 / 16)  # of four micro-batches one was made


def refused(rank):
    as_launched(rank)
    from straggle.integrations.accelerate import StagedAccelerator

    job = Job(StagedAccelerator)
    with pytest.raises(ValueError, match=r"model\.join"), job.accelerator.join_uneven_inputs([job.model], False):
        pass
    with job.accelerator.join_uneven_inputs([job.model]), pytest.raises(RuntimeError, match="step after it"):
        job.epoch(after_block=False)
    return True


def test_what_is_refused_is_told_what_to_do(run_loaded):
    assert run_loaded(refused, NUM_RANKS, timeout_s=120) == [True] * NUM_RANKS


def refused_with_members(rank):
    """What each says, and the words of one that follows it."""
    as_launched(rank)
    import straggle
    from straggle.integrations.accelerate import StagedAccelerator

    said = []
    with pytest.raises(ValueError, match="leave it out") as accumulates:
        StagedAccelerator(cpu=True, members=straggle.Elastic(), gradient_accumulation_steps=4)
    said.append(str(accumulates.value))
    accelerator = StagedAccelerator(cpu=True, members=straggle.Elastic())
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    with pytest.raises(ValueError, match="prepare") as alone:
        accelerator.prepare(nn.Linear(2, 2))
    said.append(str(alone.value))
    with pytest.raises(RuntimeError, match="give both to one call") as apart:
        iter(accelerator.prepare(loader)).__next__()
    said.append(str(apart.value))
    accelerator = StagedAccelerator(cpu=True, members=straggle.Elastic())
    model, loader = accelerator.prepare(nn.Linear(2, 2), loader)  # as they say
    with pytest.raises(ValueError, match="evaluation_mode=True") as two:
        accelerator.prepare(nn.Linear(2, 2))
    said.append(str(two.value))
    assert not isinstance(accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True), type(model))
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
    model.close()
    return said, model.last_report.step


def test_what_members_do_not_go_with_is_told_what_to_do(run_loaded):
    for said, last in run_loaded(refused_with_members, NUM_RANKS, timeout_s=120):
        assert len(said) == 4
        assert last == 1
