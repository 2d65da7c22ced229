"""Gradients that are merged in groups: what is in, of which pass, is as exact as if each were merged by itself."""

import contextlib

import pytest
import torch
from ranks import run_forked, run_ranks, staged
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import Layer, Signals, Stopper, grads

from straggle import FixedDeadline, LateHandling

pytestmark = pytest.mark.light

NUM_LAYERS = 4


class Layers(nn.Module):
    """A sum over those of its layers that it is called with, which backward finishes from the last to the first.

    The gradient of layer ``i`` is ``(i + 1) * x``.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(2, float(i + 1)) for i in range(NUM_LAYERS))

    def forward(self, x, order):
        total = torch.zeros(())
        for index in order:
            total = self.layers[index](total, torch.tensor(float(x)))
        return total


def first_elements(module):
    return [None if gradient is None else gradient[0].item() for gradient in grads(module)]


def in_orders(rank, orders, after):
    """Steps with the layers in these orders, all in one stage; rank 1 stops ``after`` so many gradients of the last."""
    module = Layers()
    stopper = Stopper(module)
    results = []
    with staged(module, stages=1, deadline=1000.0) as model:
        for order in [range(NUM_LAYERS), *orders]:
            with model.step() as step:
                if rank == 1 and order is orders[-1]:
                    stopper.arm(step, after)
                model(rank + 1, order).backward()
            results.append(first_elements(module))
            module.zero_grad()
        return results[1:], model.last_report.ranks[1].reach


def means(x):
    return [(i + 1) * x for i in range(NUM_LAYERS)]


def test_order_that_changes_from_step_to_step_gives_the_mean():
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)]
    for results, reach in run_ranks(in_orders, 2, orders, None):
        assert results == [means(1.5)] * len(orders)
        assert reach == 1.0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3, 0, 2)], ids=["as learned", "another"])
@pytest.mark.parametrize("after", range(1, NUM_LAYERS))
def test_cut_in_the_middle_of_a_group_has_what_was_finished_and_nothing_else(order, after):
    finished = order[::-1][:after]
    for results, reach in run_ranks(in_orders, 2, [order], after):
        assert results == [[(i + 1) * (1.5 if i in finished else 1.0) for i in range(NUM_LAYERS)]]
        assert reach == after / NUM_LAYERS


@pytest.mark.parametrize("last", [0, 3], ids=["the end of the group", "its begin"])
def test_layer_that_a_step_does_not_use_is_a_zero_where_others_use_it_and_none_where_no_rank_does(last):
    used = [i for i in range(NUM_LAYERS) if i != last]
    for results, reach in run_ranks(in_orders, 2, [used, range(NUM_LAYERS), used], None):
        without = [None if i == last else (i + 1) * 1.5 for i in range(NUM_LAYERS)]
        assert results == [without, means(1.5), without]
        assert reach == 1.0


def in_passes(rank, orders, fail_in):
    """A step of two passes with these orders; rank 1 fails in pass ``fail_in``, before its layer 0, and goes on."""
    module = Layers()
    fail = [False]
    module.layers[0].weight.register_hook(lambda _: out_of_memory() if fail[0] else None)
    with staged(module, stages=1, deadline=1000.0) as model:
        for step in range(2):
            module.zero_grad()
            with model.step(num_microbatches=2):
                for number, order in enumerate(orders if step else [range(NUM_LAYERS)] * 2):
                    fail[0] = (rank, step, number) == (1, 1, fail_in)
                    with contextlib.suppress(RuntimeError):
                        model(10**number * (rank + 1), order).backward()
        return first_elements(module), model.last_report.ranks[1].stages


def out_of_memory():
    raise RuntimeError("out of memory")


def test_gradients_left_at_the_end_of_a_pass_are_of_that_pass():
    # the group ends with layer 0, which the first pass does not use
    for gradients, stages in run_ranks(in_passes, 2, [(1, 2, 3), (0, 1, 2, 3)], None):
        assert gradients == [1.5 * 10] + [(i + 1) * 1.5 * 11 for i in (1, 2, 3)]
        assert stages == (1.0,)


@pytest.mark.parametrize("fail_in", [0, 1])
def test_gradients_that_were_finished_before_a_pass_failed_are_in(fail_in):
    for gradients, stages in run_ranks(in_passes, 2, [range(NUM_LAYERS)] * 2, fail_in):
        (own, other), left = (11, 22), 2 * 10 ** (1 - fail_in)
        assert gradients == pytest.approx([(own + left) / 1.5] + [(i + 1) * (own + other) / 2 for i in (1, 2, 3)])
        assert stages == (7 / 8,)


class Checkpointed(Layers):
    """Its first two layers are computed again in backward, by a run of the engine inside of the pass."""

    def forward(self, x, order):
        total = checkpoint(self.part, torch.zeros(()), x, order[:2], use_reentrant=True)
        return self.part(total, x, order[2:])

    def part(self, total, x, order):
        for index in order:
            total = self.layers[index](total, x)
        return total


def with_nested_runs(rank):
    """The first steps have no checkpoints; then some have, and others share a weight between two of them."""
    module = Layers()
    results = []
    nested = Checkpointed()
    nested.layers = module.layers
    with staged(module, stages=1, deadline=1000.0) as model:
        for nests in (False, False, True, False):
            with model.step():
                x = torch.tensor(float(rank + 1), requires_grad=True)
                model(rank + 1, range(NUM_LAYERS)).backward() if not nests else nested(x, range(NUM_LAYERS)).backward()
            results.append(first_elements(module))
            module.zero_grad()
        try:
            with model.step():
                x = torch.tensor(float(rank + 1), requires_grad=True)
                nested(x, (0, 2, 1, 2)).backward()
        except RuntimeError as error:
            return results, str(error)


def test_nested_runs_that_begin_later_are_merged_and_shared_weights_refused():
    for results, words in run_ranks(with_nested_runs, 2):
        assert results == [means(1.5)] * 4
        assert "got a gradient twice in one backward pass" in words


def stuck_in_a_group(rank):
    """Rank 1 is stuck in step 2 after the first two gradients of a group of four, until rank 0 has gone on."""
    module = Layers()
    signals = Signals()
    stuck = [False]
    module.layers[1].weight.register_hook(lambda _: signals.wait("merged") if stuck[0] else None)
    gradients, reports = [], []
    with staged(module, stages=1, deadline=FixedDeadline(0.1), late_handling=LateHandling(grace_s=0.0)) as model:
        for number in range(4):
            stuck[0] = (rank, number) == (1, 2)
            with model.step():
                model(rank + 1, range(NUM_LAYERS)).backward()
            gradients.append(first_elements(module))
            reports.append(model.last_report)
            module.zero_grad()
            if (rank, number) == (0, 2):
                signals.send("merged")
        return gradients[2:3], [(report.ranks[1].stood_in, report.ranks[1].reach) for report in reports[2:3]]


def test_gradients_that_wait_for_their_group_are_submitted_for_a_stuck_rank():
    for gradients, submitted in run_ranks(stuck_in_a_group, 2):
        assert gradients == [[(i + 1) * (1.5 if i in (2, 3) else 1.0) for i in range(NUM_LAYERS)]]
        assert submitted == [(True, 0.5)]


def stage_times(rank):
    """When each stage was complete in a step in which all stages are in one group."""
    module = Layers()
    with staged(module, stages=NUM_LAYERS, deadline=1000.0) as model:
        for _ in range(2):
            with model.step():
                model(rank + 1, range(NUM_LAYERS)).backward()
            module.zero_grad()
        return list(model.last_report.ranks[rank].stage_s)


def test_stages_of_one_group_have_times_of_their_own():
    for seconds in run_forked(stage_times, 2):
        assert seconds == sorted(set(seconds))
        assert len(seconds) == NUM_LAYERS
