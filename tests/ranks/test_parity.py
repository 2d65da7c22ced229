"""Without a deadline the gradients and parameters are those of `DistributedDataParallel`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_forked, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import features, grads, mlp

from straggle import StagedDataParallel
from straggle.backward import stages
from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.text import Text

NUM_STEPS = 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(4, 6, bias=False)
        self.middle = nn.Linear(6, 6)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.middle(self.embedding(x))), self.embedding.weight.t())


class Sparsely(nn.Module):
    """``never`` is used on no rank, ``rarely`` on rank 0 only, ``sometimes`` in every other step."""

    def __init__(self):
        super().__init__()
        self.always, self.never, self.rarely, self.sometimes = (nn.Linear(4, 4) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.always(x)
        x = self.rarely(x) if dist.get_rank() == 0 else x
        return self.sometimes(x) if self.calls % 2 else x


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.convolutions(x).flatten(1))


@dataclass
class Case:
    """A model, its loss on a batch, and what the loop around it does."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    ddp: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int = 1
    clip: float | None = None
    zero_grad: bool | None = True  # set_to_none; None: gradients are kept
    rtol: float = 1e-6


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def square(model, rank, step):
    return model(features(rank, step)).float().square().mean()


def pictures(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.rand(4, 1, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
    return nn.functional.cross_entropy(model(x), torch.arange(4))


def workload_case(workload, **options):
    def loss(model, rank, step):
        return workload.loss(model, workload.batch((torch.arange(8) + 40 * step + 10 * rank) % workload.num_samples))

    return Case(workload.model, loss, sgd, **options)


CASES = {
    "mlp": lambda: Case(mlp, square),
    "digits": lambda: workload_case(Digits(channels=8, depth=3)),
    "text": lambda: workload_case(Text(__file__, context=8, width=16, depth=2, heads=2)),
    "tied": lambda: Case(Tied, square, sgd),
    "unused": lambda: Case(Sparsely, square, sgd, ddp={"find_unused_parameters": True}),
    "microbatches": lambda: Case(mlp, square, num_microbatches=3),
    "bf16": lambda: Case(lambda: mlp().bfloat16(), square_bf16, sgd, rtol=2**-6),
    "clipped": lambda: Case(mlp, square, clip=0.01),
    "zeroed in place": lambda: Case(mlp, square, zero_grad=False),
    "channels last": lambda: Case(lambda: Images().to(memory_format=torch.channels_last), pictures, sgd),
}


def square_bf16(model, rank, step):
    return model(features(rank, step).bfloat16()).float().square().mean()


def train(case, wrapped, rank):
    """Gradients and parameters after each step of the loop."""
    module = wrapped.module
    optimizer = case.optimizer(module.parameters())
    history = []
    for step in range(NUM_STEPS):
        ours = isinstance(wrapped, StagedDataParallel)
        with wrapped.step(case.num_microbatches) if ours else contextlib.nullcontext():
            for microbatch in range(case.num_microbatches):
                last = ours or microbatch == case.num_microbatches - 1
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    case.loss(wrapped, rank, 10 * step + microbatch).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), case.clip)
        history.append(grads(module))
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in module.parameters()])
        if case.zero_grad is not None:
            optimizer.zero_grad(set_to_none=case.zero_grad)
    return history


def train_both(rank, name, bucket_bytes=stages.BUCKET_BYTES):
    """The same loop with DDP and with us, from the same parameters."""
    stages.BUCKET_BYTES = bucket_bytes
    case = CASES[name]()
    torch.manual_seed(0)
    reference = train(case, DistributedDataParallel(case.model(), **case.ddp), rank)
    torch.manual_seed(0)
    ours = StagedDataParallel(case.model())
    result = train(case, ours, rank)
    ours.close()
    return reference, result


def check(reference, result, rtol):
    """Equal, or with ``rtol`` so to this part of each tensor's norm; a missing gradient is missing in both."""
    for want, got in ((w, g) for ws, gs in zip(reference, result, strict=True) for w, g in zip(ws, gs, strict=True)):
        assert (want is None) == (got is None)
        if want is not None and rtol == 0:
            assert torch.equal(want, got)
        elif want is not None:
            assert (want.double() - got.double()).norm() <= rtol * want.double().norm()


@pytest.mark.parametrize("bucket_bytes", [1, stages.BUCKET_BYTES], ids=["many messages", "one message"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_ddp_bit_for_bit_at_one_and_two_ranks(name, world_size, bucket_bytes):
    run = run_forked if (world_size, bucket_bytes) == (2, stages.BUCKET_BYTES) else run_ranks  # gloo's own sums, too
    for reference, result in run(train_both, world_size, name, bucket_bytes):
        check(reference, result, 0)


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_ddp_to_rounding_at_more_ranks(name, world_size):
    for reference, result in run_ranks(train_both, world_size, name):
        check(reference, result, CASES[name]().rtol)


def keep_gradients(rank, ours):
    """Two steps without zeroing the gradients between them."""
    module = mlp()
    wrapped = StagedDataParallel(module) if ours else DistributedDataParallel(module)
    for step in range(3):
        with wrapped.step() if ours else contextlib.nullcontext():
            square(wrapped, rank, step).backward()
    if ours:
        wrapped.close()
    return grads(module)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_kept_gradients_are_added_to_as_ddp_does(world_size):
    reference, result = (run_ranks(keep_gradients, world_size, ours)[0] for ours in (False, True))
    torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-7)


def train_divided(rank, plan, bucket_bytes):
    stages.BUCKET_BYTES = bucket_bytes
    torch.manual_seed(0)
    case = CASES["digits"]()
    model = StagedDataParallel(case.model(), stages=plan)
    history = train(case, model, rank)
    model.close()
    return history


@pytest.mark.parametrize("bucket_bytes", [1, 2000])
@pytest.mark.parametrize("plan", [1, 3, ["blocks", "head"], ["blocks.1"], ["blocks.2", "blocks.0", "blocks"]], ids=str)
def test_stages_change_nothing_in_the_result(plan, bucket_bytes):
    for reference, result in zip(
        run_ranks(train_divided, 2, None, stages.BUCKET_BYTES),
        run_ranks(train_divided, 2, plan, bucket_bytes),
        strict=True,
    ):
        check(reference, result, 0)


def layouts(rank):
    torch.manual_seed(0)
    case = CASES["channels last"]()
    model = StagedDataParallel(case.model())
    with model.step():
        case.loss(model, rank, 0).backward()
    model.close()
    return [
        (p.stride(), p.grad.stride(), p.dim() < 4 or p.grad.is_contiguous(memory_format=torch.channels_last))
        for p in model.parameters()
    ]


def test_merged_gradients_have_the_memory_format_of_their_parameters():
    for ours, gradient, channels_last in run_ranks(layouts, 2)[0]:
        assert ours == gradient
        assert channels_last


def construct(rank):
    """What each rank starts with, and the names in its checkpoint."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[0].bias.requires_grad = False
    nn.init.constant_(module[0].bias, float(rank))
    module[1].running_mean.fill_(rank)
    model = StagedDataParallel(module)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    model.load_state_dict(state)
    model.close()
    reference = list(DistributedDataParallel(module).state_dict())
    return state, {name: value.clone() for name, value in model.state_dict().items()}, reference


def test_parameters_and_buffers_start_as_rank_zeros_and_have_ddps_names():
    results = run_ranks(construct, 3)
    first = results[0][0]
    assert first["module.0.bias"].eq(0).all()
    assert first["module.1.running_mean"].eq(0).all()
    for state, loaded, reference in results:
        assert list(state) == reference
        assert all(torch.equal(state[name], first[name]) for name in first)
        assert all(torch.equal(loaded[name], first[name]) for name in first)


def use_own_group(rank):
    """Two pairs of ranks train apart."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = StagedDataParallel(mlp(seed=rank // 2), process_group=groups[rank // 2])
    with model.step():
        square(model, rank, 0).backward()
    model.close()
    return grads(model), len(model.last_report.ranks)


def test_process_group_of_some_ranks_merges_among_them():
    results = run_ranks(use_own_group, 4)
    assert all(count == 2 for _, count in results)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    torch.testing.assert_close(results[2][0], results[3][0], rtol=0, atol=0)
    assert not torch.equal(results[0][0][0], results[2][0][0])
