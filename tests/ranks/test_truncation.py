"""Stopping a pass is exact: what was finished is the full gradient bit for bit, and the rest was never touched."""

import pytest
import torch
from ranks import run_forked, staged
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Stopper, Tied, features, grads, mlp

from straggle.lab.workloads.digits import Digits
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import Text

pytestmark = pytest.mark.light


class Checkpointed(nn.Module):
    """Two layers that are computed again in backward, and one that is not."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant))


def synthetic():
    return of_workload(Synthetic(width=16, depth=2, num_samples=16))


def digits():
    return of_workload(Digits(channels=8, depth=3))


def text():
    return of_workload(Text(__file__, context=16, width=16, depth=2, heads=2))


def of_workload(workload):
    batch = workload.batch(torch.arange(4))
    return workload.model(), lambda model: workload.loss(model, batch)


def of_module(module):
    return module, lambda model: model(features(0, 0)).square().mean()


CASES = {
    "synthetic": synthetic,
    "digits": digits,
    "text": text,
    "mlp": lambda: of_module(mlp()),
    "tied": lambda: of_module(Tied()),
    "checkpoint": lambda: of_module(Checkpointed(use_reentrant=False)),
    "reentrant checkpoint": lambda: of_module(Checkpointed(use_reentrant=True)),
}


def bits(gradient):
    return gradient.detach().contiguous().view(torch.uint8).numpy().tobytes()


def cut_everywhere(rank, case, bucket_stages):
    """For every number of finished gradients: those that were kept, whether they are right, and the next full step."""
    torch.manual_seed(0)
    module, loss = CASES[case]()
    loss(module).backward()
    full = [bits(gradient) for gradient in grads(module)]
    module.zero_grad()
    stopper = Stopper(module)
    results = []
    with staged(module, stages=bucket_stages) as model:
        for after in range(len(full) + 1):
            for stop in (after, None):
                with model.step() as step:
                    stopper.arm(step, stop)
                    loss(model).backward()
                kept = [(bits(g), want) for g, want in zip(grads(module), full, strict=True) if g is not None]
                results.append((stop, len(kept), all(g == want for g, want in kept), model.last_report.late_ranks))
                module.zero_grad()
    return results


@pytest.mark.parametrize("bucket_stages", [None, 1], ids=["default stages", "one stage"])
@pytest.mark.parametrize("case", CASES)
def test_kept_gradients_are_the_full_ones_at_every_cut_and_the_next_step_is_whole(case, bucket_stages):
    (results,) = run_forked(cut_everywhere, 1, case, bucket_stages)
    total = results[1][1]
    assert total == len(results) // 2 - 1
    for stop, num_kept, equal, late in results:
        assert num_kept == (total if stop is None else stop)
        assert equal
        assert late == ((0,) if num_kept < total else ())


def cut_in_forward(rank):
    """Stop in the middle of the forward pass; which modules ran, and whether code after it did."""
    module = mlp()
    ran = []
    with staged(module, stages=["0", "2", "4"]) as model:
        step = model.step()
        for name, child in module.named_children():
            child.register_forward_hook(lambda *_, name=name: ran.append(name))
        module[1].register_forward_hook(lambda *_: step.stop())
        with step:
            loss = model(features(0, 0)).sum()
            ran.append("after forward")
            loss.backward()
        return ran, grads(module), model.last_report.ranks[0].cause, model.last_report.ranks[0].reach


def test_stopped_forward_pass_ends_before_the_next_stage():
    assert run_forked(cut_in_forward, 1) == [(["0", "1"], [None] * 6, "forward", 0.0)]


def run_body_to_its_end(rank):
    """A stop that no check sees: the body ended first."""
    module = mlp()
    with staged(module) as model:
        with model.step() as step:
            model(features(0, 0)).sum().backward()
            step.stop()
        first = model.last_report.late_ranks
        with model.step():
            model(features(0, 0)).sum().backward()
        return first, model.last_report.late_ranks


def test_stop_after_the_work_is_done_makes_nobody_late_now_or_later():
    assert run_forked(run_body_to_its_end, 1) == [((), ())]
