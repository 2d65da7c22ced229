"""A gradient source: what the merge and an open step take from it, and what they give back."""

import torch
from torch import nn
from training import mlp

from straggle import Estimate
from straggle.backward.stages import StagePlan, plan_stages
from straggle.merge.round.buffers import StageBuffers
from straggle.merge.round.round import Contribution, Layout, Round, RoundTerms
from straggle.policies.estimators import Estimator, FillIn
from straggle.source.replicated import ReplicatedSource
from straggle.source.source import GradientSource, Slot


def shards(module: nn.Module) -> list[Slot]:
    """One slot for each parameter, of which this rank has the first row."""
    return [Slot(name, own.detach()[:1].clone(), own) for name, own in module.named_parameters()]


def plan_of(slots: list[Slot], module: nn.Module) -> StagePlan:
    return plan_stages(module, 1, named=[(slot.name, nn.Parameter(slot.tensor)) for slot in slots])


def test_slots_of_a_replica_are_its_parameters() -> None:
    module = mlp()
    source: GradientSource = ReplicatedSource(module)
    assert [slot.name for slot in source.slots] == [name for name, _ in module.named_parameters()]
    assert all(slot.tensor is slot.parameter for slot in source.slots)
    assert [slot.nbytes for slot in source.slots] == [own.nbytes for own in module.parameters()]


def test_renewed_slots_are_in_the_same_list() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ReplicatedSource(module)
    slots = source.slots
    module[1] = nn.Linear(2, 3)
    source.renew()
    assert source.slots is slots
    assert [slot.tensor.shape for slot in slots] == [own.shape for own in module.parameters()]


def test_placed_gradients_are_those_of_the_parameters() -> None:
    module = nn.Linear(2, 2)
    source, gradient = ReplicatedSource(module), torch.ones(2, 2)
    module.bias.grad = torch.ones(2)
    source.place([gradient, None])
    assert module.weight.grad is gradient
    assert module.bias.grad is None
    assert source.of_parameters({0: gradient}) == [(module.weight, gradient)]


def test_gradients_are_reported_until_hooks_are_closed() -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
            self.seen.append(index)
            parameter.grad = None

        def check(self) -> None:
            self.seen.append(-1)

    module, observer = nn.Linear(2, 2), Observer()
    attached = ReplicatedSource(module).attach(observer)
    attached.check_at([""])
    module(torch.ones(1, 2)).sum().backward()
    attached.close()
    module(torch.ones(1, 2)).sum().backward()
    assert observer.seen[0] == -1
    assert sorted(observer.seen[1:]) == [0, 1]


def test_buffers_have_the_shape_of_a_shard_and_not_that_of_its_parameter() -> None:
    slots = shards(module := nn.Linear(4, 3))
    buffers = StageBuffers(plan_of(slots, module), slots, 1)
    assert [view.shape for view in buffers.views] == [(1, 4), (1,)]
    assert not any(isinstance(slot.tensor, nn.Parameter) for slot in slots)


def test_estimator_of_a_missing_shard_is_asked_about_its_parameter() -> None:
    class Ones(Estimator):
        def contribution(self, parameter: nn.Parameter) -> Estimate:
            asked.append(parameter)
            return Estimate(torch.ones_like(parameter), 0.5)

    asked, module = list[nn.Parameter](), nn.Linear(4, 3)
    slots = [Slot(name, own.detach(), own) for name, own in module.named_parameters()]
    plan = plan_of(slots, module)
    current = Round(0, Layout(plan, slots), StageBuffers(plan, slots, 1), RoundTerms(None))
    own = current.estimate(Contribution([1.0, 0.0], {}), FillIn(Ones()), slots)
    assert own.estimated == {1: 0.5}
    assert len(asked) == 1
    assert asked[0] is module.bias
    assert torch.equal(current.buffers.views[1], torch.full((3,), 0.5))
