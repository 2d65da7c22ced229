"""`straggle.lab.faults` under a clock that only work and sleeps move."""

import math
import os
import signal
from collections.abc import Callable

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from repository import ROOT
from torch import nn
from torch.utils.checkpoint import checkpoint

from straggle.lab.faults import (
    DropComputeDelay,
    Fault,
    FaultInjector,
    Kill,
    Moment,
    RandomDelay,
    Slowdown,
    Stall,
    dropcompute_factors,
    dropcompute_pmf,
)

SCENARIOS = sorted((ROOT / "conf" / "faults").glob("*.yaml"))
FORWARD_S, BACKWARD_S = 1.0, 2.0


class FakeTime:
    """A clock in seconds; sleeps move it and are kept, with the time at which they began."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.oversleep_s = oversleep_s
        self.sleeps: list[tuple[float, float]] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append((self.now_s, seconds))
        self.now_s += seconds + self.oversleep_s

    @property
    def slept_s(self) -> float:
        return sum(seconds for _, seconds in self.sleeps)


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, time):
        ctx.time = time
        ctx.save_for_backward(x, weight)
        time.now_s += FORWARD_S
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.time.now_s += BACKWARD_S
        return gradient * weight, (gradient * x).sum().reshape(1), None


class Layer(nn.Module):
    """Takes one second forward and two seconds backward."""

    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.time = time

    def forward(self, x):
        return Work.apply(x, self.weight, self.time)


class Net(nn.Module):
    def __init__(self, time: FakeTime, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(time) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(module: nn.Module) -> None:
    module(torch.ones(2)).sum().backward()


def injected(
    kind: Callable[..., nn.Module] = Net,
    oversleep_s: float = 0.0,
    num_layers: int = 4,
    rank: int = 0,
    seed: int = 0,
    **faults: Fault,
) -> tuple[FakeTime, nn.Module, FaultInjector]:
    """The clock, a net and what slows it."""
    time = FakeTime(oversleep_s)
    net = kind(time, num_layers)
    return time, net, FaultInjector(net, faults, rank=rank, seed=seed, clock=time.clock, sleep=time.sleep)


def delays(fault: Fault, rank: int = 0, seed: int = 0, num_steps: int = 20) -> list[float]:
    time, net, injector = injected(rank=rank, seed=seed, num_layers=1, fault=fault)
    slept = []
    for step in range(num_steps):
        injector.step(step)
        before_s = time.slept_s
        train(net)
        slept.append(time.slept_s - before_s)
    return slept


def test_factor_two_doubles_the_time_of_forward_and_of_backward_evenly_over_the_layers():
    time, net, _ = injected(slow=Slowdown(2.0))
    train(net)
    assert [seconds for _, seconds in time.sleeps] == 4 * [FORWARD_S] + 4 * [BACKWARD_S]
    assert time.now_s == 2.0 * 4 * (FORWARD_S + BACKWARD_S)


def test_slowdown_by_chance_is_of_complete_steps_and_of_so_many():
    chosen = [seconds > 0 for seconds in delays(Slowdown(3.0, chance=0.25), num_steps=400)]
    assert 70 <= sum(chosen) <= 130  # 100 and more than three times their standard deviation of 8.7
    assert [seconds > 0 for seconds in delays(Slowdown(3.0, chance=0.25), num_steps=400)] == chosen
    assert set(delays(Slowdown(3.0, chance=0.25), num_steps=40)) == {0.0, 2 * (FORWARD_S + BACKWARD_S)}
    assert not any(delays(Slowdown(3.0, chance=0.0), num_steps=10))


@pytest.mark.parametrize(
    ("faults", "expected_s"),
    [
        ({"pace": Slowdown(4.0), "slow": Slowdown(2.0)}, 8.0 * 4 * 3.0),  # they multiply
        ({"delay": RandomDelay(1.0, seconds=8.0), "slow": Slowdown(2.0)}, 2.0 * 4 * 3.0 + 2.0 * 8.0),
        ({"slow": Slowdown(2.0), "delay": RandomDelay(1.0, seconds=8.0)}, 2.0 * 4 * 3.0 + 8.0),
    ],
)
def test_slowdown_stretches_the_faults_listed_before_it_only(faults, expected_s):
    time, net, _ = injected(**faults)
    train(net)
    assert time.now_s == expected_s


def test_work_between_forward_and_backward_belongs_to_backward_and_work_before_forward_to_nobody():
    time, net, injector = injected(num_layers=1, slow=Slowdown(2.0))
    injector.step(0)
    time.now_s += 100.0  # loading, or waiting for peers
    output = net(torch.ones(2))
    assert time.slept_s == FORWARD_S
    time.now_s += 8.0  # the loss
    output.sum().backward()
    assert time.slept_s == FORWARD_S + 8.0 + BACKWARD_S


def test_oversleep_is_taken_off_the_following_sleeps():
    time, net, _ = injected(oversleep_s=0.25, slow=Slowdown(2.0))
    train(net)
    assert time.now_s == 2.0 * 4 * (FORWARD_S + BACKWARD_S) + 0.25  # the last sleep's


def test_rank_that_no_fault_affects_gets_no_hooks():
    time, net, injector = injected(rank=1, slow=Slowdown(2.0, ranks=[0, 2]), stall=Stall(0, seconds=1.0, rank=3))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
    injector.step(0)
    injector.data()
    train(net)
    assert time.sleeps == []


def test_close_removes_the_hooks():
    time, net, injector = injected(slow=Slowdown(2.0))
    with injector:
        train(net)
    slept_s = time.slept_s
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
    injector.data()
    train(net)
    assert time.slept_s == slept_s > 0.0


def test_evaluation_is_not_slowed():
    time, net, injector = injected(slow=Slowdown(2.0), delay=RandomDelay(1.0, seconds=1.0))
    with torch.no_grad():
        net(torch.ones(2))
    net.eval()
    net(torch.ones(2))
    assert time.sleeps == []
    net.train()
    injector.step(1)
    train(net)
    assert time.now_s == 2 * 4 * FORWARD_S + 2.0 * 4 * (FORWARD_S + BACKWARD_S) + 1.0


def test_layer_kept_in_evaluation_mode_is_slowed_in_training():
    time, net, _ = injected(slow=Slowdown(2.0))
    net.layers[1].eval()
    train(net)
    assert time.now_s == 2.0 * 4 * (FORWARD_S + BACKWARD_S)


def test_recomputation_of_a_checkpointed_layer_is_backward_work():
    class Checkpointed(Net):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    time, net, _ = injected(Checkpointed, slow=Slowdown(2.0), delay=RandomDelay(1.0, seconds=1.0))
    train(net)
    assert time.now_s == 2.0 * 4 * (2 * FORWARD_S + BACKWARD_S) + 1.0


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
@pytest.mark.parametrize(("every", "steps"), [(3, [2, 5, 8]), (None, [2])])
def test_stall_comes_once_at_exactly_its_steps(every, steps, phase):
    stall = Stall(2, seconds=8.0, rank=3, phase=phase, every=every)
    time, net, injector = injected(rank=3, stall=stall)
    stalled = []
    for step in range(10):
        injector.step(step)
        time.sleeps.clear()
        for _ in range(2):
            injector.data()
            train(net)
        stalled += [(step, seconds) for _, seconds in time.sleeps]
    assert stalled == [(step, 8.0) for step in steps]


def test_kill_ends_the_process_at_its_moment_and_at_no_other():
    kill = Kill(2, rank=1)
    assert (kill.affects(1), kill.affects(0)) == (True, False)
    for step, phase, index in ((1, "backward", 0), (3, "backward", 0), (2, "forward", 0), (2, "backward", 1)):
        assert kill.delay_s(Moment(1, step, 0, phase, 0.1, index)) == 0.0
    child = os.fork()
    if child == 0:
        kill.delay_s(Moment(1, 2, 0, "backward", 0.1))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def test_backward_stalls_in_its_middle_and_not_always_at_the_same_parameter():
    time, net, injector = injected(stall=Stall(0, seconds=8.0, rank=0, phase="backward", every=1))
    began = []
    for step in range(20):
        injector.step(step)
        start_s = time.now_s
        train(net)
        began.append(time.sleeps[-1][0] - start_s - 4 * FORWARD_S)
    assert set(began) == {2 * BACKWARD_S, 3 * BACKWARD_S, 4 * BACKWARD_S}
    assert len(time.sleeps) == 20


def test_backward_stall_comes_although_most_parameters_are_not_used():
    class FirstOnly(Net):
        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    time, net, injector = injected(
        FirstOnly, num_layers=50, stall=Stall(0, seconds=8.0, rank=0, phase="backward", every=1)
    )
    for step in range(5):
        injector.step(step)
        train(net)
    assert [seconds for _, seconds in time.sleeps] == 5 * [8.0]


def test_backward_stall_comes_after_two_forward_passes_with_one_backward():
    time, net, _ = injected(stall=Stall(0, seconds=8.0, rank=0, phase="backward"))
    (net(torch.ones(2)) + net(torch.ones(2))).sum().backward()
    assert time.slept_s == 8.0


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_random_delay_comes_once_per_microbatch(phase):
    time, net, injector = injected(delay=RandomDelay(1.0, seconds=8.0, phase=phase))
    injector.step(0)
    for _ in range(3):
        injector.data()
        train(net)
    assert [seconds for _, seconds in time.sleeps] == 3 * [8.0]


def test_random_delay_comes_with_its_probability():
    drawn = delays(RandomDelay(0.25, seconds=1.0), num_steps=1000)
    assert set(drawn) == {0.0, 1.0}
    assert sum(drawn) == pytest.approx(250, abs=4 * math.sqrt(1000 * 0.25 * 0.75))
    assert sum(delays(RandomDelay(0.0, seconds=1.0))) == 0.0


def test_microbatches_of_a_step_have_delays_of_their_own():
    time, net, injector = injected(noise=DropComputeDelay(1.0))
    injector.step(0)
    for _ in range(5):
        train(net)
    assert len({seconds for _, seconds in time.sleeps}) == len(time.sleeps) == 5


@pytest.mark.parametrize("fault", [RandomDelay(0.5, seconds=1.0), DropComputeDelay(1.0)])
def test_delays_depend_on_the_seed_and_the_rank_and_on_nothing_else(fault):
    assert delays(fault) == delays(fault)
    assert delays(fault) != delays(fault, seed=1)
    assert delays(fault) != delays(fault, rank=1)


def test_equal_faults_of_different_names_do_not_strike_together():
    time, net, injector = injected(num_layers=1, a=RandomDelay(0.5, seconds=1.0), b=RandomDelay(0.5, seconds=2.0))
    for step in range(40):
        injector.step(step)
        train(net)
    assert {seconds for _, seconds in time.sleeps} == {1.0, 2.0, 3.0}


@pytest.mark.parametrize("cut", range(4))
def test_next_step_is_clean_after_an_exception_in_the_middle_of_backward(cut):
    def stop(_):
        raise KeyboardInterrupt

    time, net, injector = injected(slow=Slowdown(2.0), stall=Stall(0, seconds=8.0, rank=0, phase="backward"))
    handle = net.layers[cut].weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(net)
    handle.remove()
    time.now_s += 100.0
    injector.step(1)
    start_s = time.now_s
    train(net)
    assert time.now_s - start_s == 2.0 * 4 * (FORWARD_S + BACKWARD_S)


def test_evaluation_and_next_step_are_clean_after_an_exception_in_the_middle_of_forward():
    def stop(*_):
        raise KeyboardInterrupt

    time, net, injector = injected(slow=Slowdown(2.0), delay=RandomDelay(1.0, seconds=8.0))
    handle = net.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(net)
    handle.remove()
    start_s = time.now_s
    with torch.no_grad():
        net(torch.ones(2))
    assert time.now_s - start_s == 4 * FORWARD_S
    injector.step(1)
    start_s = time.now_s
    train(net)
    assert time.now_s - start_s == 2.0 * 4 * (FORWARD_S + BACKWARD_S) + 8.0


def test_gradients_are_those_of_the_plain_module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    net(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    time, _, _ = injected(lambda *_: net, delay=RandomDelay(1.0, seconds=1.0, phase="backward"))
    net(x).square().sum().backward()
    assert time.slept_s == 1.0
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_frozen_parameters_are_left_alone():
    class FirstIsFrozen(Net):
        def __init__(self, time, num_layers):
            super().__init__(time, num_layers)
            self.layers[0].requires_grad_(False)

    time, net, _ = injected(FirstIsFrozen, slow=Slowdown(2.0))
    train(net)
    assert time.now_s == 2.0 * (4 * FORWARD_S + 3 * BACKWARD_S)


def test_dropcompute_distribution_has_the_published_moments():
    pmf = dropcompute_pmf()
    lengths = torch.arange(1, 1000, dtype=torch.float64)
    mean = (pmf @ lengths).item()
    factors = 1.0 + 0.5 * lengths / mean
    variance = (pmf @ (factors - 1.5).square()).item()
    assert pmf.sum().item() == pytest.approx(1.0)
    assert (pmf[54] / pmf[0]).item() == pytest.approx(math.exp(-((math.log(55) - 4) ** 2) / 2 + 8) / 55)
    assert mean == pytest.approx(87.63, abs=0.005)
    assert (pmf @ factors).item() == pytest.approx(1.5)
    assert math.sqrt(variance) == pytest.approx(0.581, abs=0.0005)
    assert factors.max().item() == pytest.approx(6.70, abs=0.005)


def test_dropcompute_samples_follow_the_distribution():
    num_samples = 200_000
    sampled = dropcompute_factors((4, num_samples // 4), torch.Generator().manual_seed(0))
    lengths = torch.arange(1, 1000, dtype=torch.float64)
    pmf = dropcompute_pmf()
    drawn = ((sampled - 1.0) / 0.5 * (pmf @ lengths)).flatten()
    assert sampled.shape == (4, num_samples // 4)
    assert torch.allclose(drawn, drawn.round())
    assert drawn.min().item() >= 0.99
    assert drawn.max().item() <= 999.01
    assert sampled.mean().item() == pytest.approx(1.5, abs=4 * 0.581 / math.sqrt(num_samples))
    assert sampled.std().item() == pytest.approx(0.581, rel=0.02)
    frequency = torch.bincount(drawn.round().long(), minlength=1000)[1:] / num_samples
    assert (frequency - pmf).abs().max().item() < 4 * math.sqrt(pmf.max().item() / num_samples)


def test_dropcompute_factor_scales_the_delay():
    single = dropcompute_factors((100,), torch.Generator().manual_seed(0))
    double = dropcompute_factors((100,), torch.Generator().manual_seed(0), 2.0)
    assert torch.allclose(double - 1.0, 2.0 * (single - 1.0))
    assert delays(DropComputeDelay(3.0, factor=2.0)) == pytest.approx([6.0 * d for d in delays(DropComputeDelay(1.0))])
    assert sum(delays(DropComputeDelay(1.0), num_steps=1000)) / 1000 == pytest.approx(0.5, abs=4 * 0.581 / 1000**0.5)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_a_mapping_of_names_to_faults(path):
    faults = instantiate(OmegaConf.load(path))
    assert all(isinstance(fault, Fault) for fault in faults.values())
    time, net, injector = injected(**faults)
    for step in range(100):
        injector.step(step)
        injector.data()
        train(net)
    assert time.sleeps


def test_scenarios_are_those_documented():
    names = ["dropcompute", "everyone_noisy", "kill", "pace", "random_delay", "slow_rank", "stall", "two_ranks"]
    assert [path.stem for path in SCENARIOS] == names


def test_slow_rank_scenario_makes_rank_3_twice_as_slow_as_the_others():
    faults = instantiate(OmegaConf.load(next(path for path in SCENARIOS if path.stem == "slow_rank")))
    assert {name: fault.affects(3) for name, fault in faults.items()} == {"pace": True, "slow": True, "stall": True}
    assert {name: fault.affects(0) for name, fault in faults.items()} == {"pace": True, "slow": False, "stall": False}


def test_moment_gives_the_same_generator_again():
    moment = Moment(rank=1, step=2, microbatch=0, phase="forward", elapsed_s=0.5, seed=7)
    assert torch.equal(torch.rand(3, generator=moment.generator()), torch.rand(3, generator=moment.generator()))
