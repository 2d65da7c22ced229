"""`straggle.watch` on each kind of job, by a clock that only the model's layers and the waits for others move."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from host_reads import HostReads
from ranks import digest, run_forked, run_ranks
from sharding import batch, mesh_of, shard, sum_only
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import straggle
from straggle.advise.answer import answer

DATA, FORWARD, BACKWARD, CLIP, STEP, EXTRA, WAIT = 0.5, 1.0, 2.0, 0.125, 0.25, 6.0, 0.0625
DEPTH, SLOW, PHASES = 3, 1, ("data", "forward", "backward", "optimizer")


class OfRank(threading.local):
    """Seconds of this rank; ``sleeps``: the extra ones of a slow rank pass in its world as well."""

    now, sleeps = 0.0, False

    def spend(self, seconds: float, extra: float = 0.0) -> None:
        self.now += seconds + extra
        if self.sleeps:
            time.sleep(0.05 * extra)


Clock = OfRank()


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Timed) -> Tensor:
        ctx.block = block
        Clock.spend(FORWARD, block.extra.get("forward", 0.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Clock.spend(BACKWARD, ctx.block.extra.get("backward", 0.0))
        return gradient, None


class Timed(nn.Module):
    """A block of two layers that takes time in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.extra: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = Spend.apply(x, self)
        return x + self.down(torch.tanh(self.up(x)))  # for what comes here, a checkpoint computes all again


class Net(nn.Module):
    """``again``: its blocks are called twice; ``checkpointed``: they are computed again in the backward pass."""

    def __init__(self, *, again: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Timed() for _ in range(DEPTH))
        self.again, self.checkpointed = again, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, *(self.blocks if self.again else ())]:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


class Optimizer(torch.optim.SGD):
    extra = 0.0

    def step(self, closure: Any = None) -> Any:
        Clock.spend(STEP, self.extra)
        return super().step(closure)


# -- kinds of jobs: the model as the loop calls it, and what the loop does between a pass and the optimizer

Made = tuple[nn.Module, Callable[[], None]]


def nothing() -> None:
    """The merge is not the loop's."""


def by_hand(net: nn.Module, group: Any = None) -> Callable[[], None]:
    """The mean over ranks, in which they wait for each other."""

    def merge() -> None:
        for parameter in net.parameters():
            gradient = parameter.grad.to_local() if hasattr(parameter, "placements") else parameter.grad  # type: ignore[union-attr]
            dist.all_reduce(gradient, group=group)
        Clock.spend(WAIT)

    return merge


def loop(**options: Any) -> Made:
    net = Net(**options)
    return net, by_hand(net)


def ddp(**options: Any) -> Made:
    return DistributedDataParallel(Net(**options)), nothing


def fsdp2(**options: Any) -> Made:
    return sum_only(shard(Net(**options), init_device_mesh("cpu", (dist.get_world_size(),)))), nothing


def hsdp(**options: Any) -> Made:
    return sum_only(shard(Net(**options), mesh_of(2, dist.get_world_size() // 2))), nothing


def replicas_by_hand() -> Made:
    mesh = mesh_of(2, 2)
    net = sum_only(shard(Net(), mesh["dp_shard"]))
    return net, by_hand(net, mesh["dp_replicate"].get_group())


def stepwise() -> Made:
    """The same with straggle's merge over the replicas."""
    mesh = mesh_of(2, 2)
    net = shard(Net(), mesh["dp_shard"])
    return straggle.StagedDataParallel(net, mesh=mesh["dp_replicate"], deadline=straggle.WaitForAll()), nothing


def split(net: nn.Module, mesh: Any) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


def tensor_parallel(**options: Any) -> Made:
    return split(Net(**options), init_device_mesh("cpu", (dist.get_world_size(),))), nothing


def split_and_sharded() -> Made:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sum_only(shard(split(Net(), mesh["tp"]), mesh["dp"])), nothing


KINDS: dict[str, tuple[Callable[..., Made], int, str]] = {
    "loop": (loop, 2, "loop"),
    "DDP": (ddp, 2, "DDP"),
    "FSDP2": (fsdp2, 2, "FSDP2"),
    "HSDP": (hsdp, 4, "FSDP2"),
    "replicas by hand": (replicas_by_hand, 4, "FSDP2"),
    "StagedDataParallel": (stepwise, 4, "FSDP2"),
    "tensor parallel": (tensor_parallel, 2, "tensor parallel"),
    "split and sharded": (split_and_sharded, 4, "FSDP2"),
}


@pytest.fixture(autouse=True)
def _waits_take_time() -> Iterator[None]:
    """Each collective of FSDP2, and each use of a functional one, takes its time by the clock."""

    def slowed(call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            Clock.now += WAIT
            return call(*args, **kwargs)

        return waiting

    with (
        mock.patch.object(dist, "all_gather_single", slowed(dist.all_gather_single)),
        mock.patch.object(dist, "reduce_scatter_single", slowed(dist.reduce_scatter_single)),
        mock.patch.object(functional, "wait_tensor", slowed(functional.wait_tensor)),
    ):
        yield


def watching(model: nn.Module, folder: Path | None) -> Any:
    clock = time.monotonic if Clock.sleeps else lambda: Clock.now
    return nullcontext() if folder is None else straggle.Watch(model, folder, clock=clock)


def train(
    rank: int, kind: str, folder: Path | None, phase: str, options: dict[str, Any], steps: int = 11, parts: int = 1
) -> tuple[list[Any], str]:
    """The lines of this rank's file, and its parameters in the end."""
    make, _, _ = KINDS[kind]
    model, merge = make(**options)
    optimizer = Optimizer(model.parameters(), lr=0.01)
    extra = {phase: EXTRA} if rank == SLOW else {}
    optimizer.extra = extra.get("optimizer", 0.0)
    next(own for own in model.modules() if isinstance(own, Timed)).extra = extra
    with watching(model, folder):
        for number in range(steps):
            with model.step() if isinstance(model, straggle.StagedDataParallel) else nullcontext():
                for part in range(parts):
                    Clock.spend(DATA, extra.get("data", 0.0))
                    with syncing(model, is_last=part == parts - 1):
                        model(batch(number, rank)).square().mean().backward()
            merge()
            Clock.spend(CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(model, straggle.StagedDataParallel):
        model.close()
    shards = [own.to_local() if hasattr(own, "placements") else own for own in model.parameters()]
    return lines_of(folder, rank), digest(shards)


def syncing(model: nn.Module, *, is_last: bool) -> Any:
    """The context of a pass after which its gradients are merged, or are not yet."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext()


def lines_of(folder: Path | None, rank: int) -> list[Any]:
    if folder is None:
        return []
    return [*map(json.loads, (folder / "watch" / f"rank{rank}.jsonl").read_text().splitlines())]


def in_each_phase(rank: int, kind: str, folder: Path) -> list[list[Any]]:
    """The files of this rank, which is slow in one phase after another."""
    return [train(rank, kind, folder / phase, phase, {})[0] for phase in PHASES]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_own_work_is_in_its_phase_and_no_waiting_with_it_in_each_kind_of_job(kind: str, tmp_path: Path) -> None:
    _, num_ranks, said = KINDS[kind]
    own = {"data": DATA, "forward": DEPTH * FORWARD, "backward": DEPTH * BACKWARD, "optimizer": STEP}
    for rank, files in enumerate(run_ranks(in_each_phase, num_ranks, kind, tmp_path)):
        for phase, (head, *lines) in zip(PHASES, files, strict=True):
            assert (head["rank"], head["world_size"], head["job"]) == (rank, num_ranks, said)
            expected = {name: seconds + EXTRA * (name == phase and rank == SLOW) for name, seconds in own.items()}
            for line in lines[2:]:
                assert {name: line[f"{name}_s"] for name in own} == expected, (rank, phase)
                assert line["wait_s"] == line["seconds"] - sum(expected.values()) - line["outside_s"]
                assert kind == "DDP" or line["wait_s"] >= WAIT  # DDP's own is in C++, and takes no time here
    for phase in PHASES:
        given = answer(tmp_path / phase)
        assert [(one.rank, one.named) for one in given.slowness.ranks] == [(SLOW, (phase,))]
        assert bool(given.gains) == (said in ("loop", "DDP"))
        assert ("What these files do not tell" in str(given)) == (said != "DDP")


def called_again_and_computed_again(rank: int, kind: str, folder: Path) -> list[list[Any]]:
    options = [{"checkpointed": True}, *([{"again": True}] if kind != "DDP" else [])]  # DDP refuses that
    return [train(rank, kind, folder / str(number), "", own, 4)[0] for number, own in enumerate(options)]


@pytest.mark.parametrize("kind", ["loop", "DDP", "FSDP2", "HSDP"])
def test_blocks_that_are_called_twice_or_computed_again_are_work(kind: str, tmp_path: Path) -> None:
    for files in run_ranks(called_again_and_computed_again, KINDS[kind][1], kind, tmp_path):
        expected = [(FORWARD, BACKWARD + FORWARD), (2 * FORWARD, 2 * BACKWARD)]
        for (_, *lines), (forward_s, backward_s) in zip(files, expected, strict=False):
            for line in lines[2:]:
                assert (line["forward_s"], line["backward_s"]) == (DEPTH * forward_s, DEPTH * backward_s)


@pytest.mark.parametrize("kind", ["loop", "DDP", "FSDP2", "tensor parallel"])
def test_loading_between_micro_batches_is_loading(kind: str, tmp_path: Path) -> None:
    for (_, *lines), _ in run_ranks(train, 2, kind, tmp_path, "", {}, 4, 3):
        for line in lines[1:]:
            assert line["data_s"] == 3 * DATA
            assert line["backward_s"] == 3 * DEPTH * BACKWARD
            assert len(line["microbatch_s"]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_job_trains_bit_for_bit_as_it_does_alone(kind: str, tmp_path: Path) -> None:
    plain, watched = (
        [parameters for _, parameters in run_ranks(train, KINDS[kind][1], kind, folder, "", {}, 4)]
        for folder in (None, tmp_path)
    )
    assert watched == plain


def over_a_group(rank: int, folder: Path) -> tuple[list[Any], str]:
    """Its lines, where ranks 0 and 2 have one model, and ranks 1 and 3 another; and its file."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    model = DistributedDataParallel(Net(), process_group=groups[rank % 2])
    optimizer = Optimizer(model.parameters(), lr=0.01)
    with straggle.Watch(model, folder, clock=lambda: Clock.now) as watched:
        for number in range(11):
            Clock.spend(DATA, EXTRA * (rank == 3))
            model(batch(number, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        path = str(watched.path)
    return [*map(json.loads, Path(path).read_text().splitlines())], path


def test_ranks_of_several_groups_have_a_folder_for_each_group(tmp_path: Path) -> None:
    outcomes = run_ranks(over_a_group, 4, tmp_path)
    places = [("watch", 0), ("group1/watch", 0), ("watch", 1), ("group1/watch", 1)]
    for number, ((head, *lines), path) in enumerate(outcomes):
        folder, rank = places[number]
        assert path == str(tmp_path / folder / f"rank{rank}.jsonl")
        assert (head["rank"], head["world_size"]) == (rank, 2)
        assert f"ranks {[number % 2, number % 2 + 2]} of the job" in head["unknown"][0]
        assert {line["data_s"] for line in lines[2:]} == {DATA + EXTRA * (number == 3)}
    assert not answer(tmp_path).slowness.ranks
    assert [(one.rank, one.named) for one in answer(tmp_path / "group1").slowness.ranks] == [(1, ("data",))]


def evaluate(rank: int, folder: Path) -> list[Any]:
    """A model of one process with an evaluation after each second step."""
    model, seen = Net(), Net()
    optimizer = Optimizer(model.parameters(), lr=0.01)
    with watching(model, folder):
        for number in range(6):
            Clock.spend(DATA)
            model(batch(number, rank)).square().mean().backward()
            seen(batch(number, rank)).square().mean().backward()  # another model, which is not watched
            optimizer.step()
            optimizer.zero_grad()
            if number % 2:
                with torch.no_grad():
                    model(batch(number, rank))
    return lines_of(folder, rank)


def test_one_process_is_told_where_its_time_goes(tmp_path: Path) -> None:
    (lines,) = run_ranks(evaluate, 1, tmp_path)
    other_s = DEPTH * (FORWARD + BACKWARD)
    for line in lines[2:]:
        after_evaluation = line["step"] % 2 == 0
        assert line["outside_s"] == other_s + after_evaluation * (DEPTH * FORWARD + DATA)
        assert line["data_s"] == (0 if after_evaluation else DATA)
        assert (line["forward_s"], line["backward_s"]) == (DEPTH * FORWARD, DEPTH * BACKWARD)


def close(rank: int, kind: str, folder: Path) -> tuple[bool, list[str]]:
    model, _ = KINDS[kind][0]()
    wait_tensor, before = functional.wait_tensor, hooks_of(model)
    first, second = (straggle.watch(model, folder / name) for name in ("first", "second"))
    assert kind == "loop" or functional.wait_tensor is not wait_tensor
    first.close()
    second.close()
    return functional.wait_tensor is wait_tensor, [one for one in hooks_of(model) if one not in before]


def hooks_of(model: nn.Module) -> list[str]:
    hooks = [(*own._forward_hooks.values(), *own._forward_pre_hooks.values()) for own in model.modules()]
    units = [own for own in model.modules() if isinstance(own, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    return [*map(repr, hooks), *(repr(sorted(vars(group))) for group in groups)]


@pytest.mark.parametrize("kind", ["loop", "FSDP2", "tensor parallel"])
def test_two_watches_that_are_closed_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    assert run_forked(close, 2, kind, tmp_path) == [(True, [])] * 2


def read_by_the_host(rank: int, kind: str, folder: Path) -> list[list[str]]:
    """What the host reads of a device's tensors in three steps, without a watch and with it."""
    reads = []
    for watched in (None, folder):
        model, merge = KINDS[kind][0]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        x = batch(0, rank)
        with watching(model, watched), HostReads([x, *model.parameters()]) as seen:
            for _ in range(3):
                model(x).square().mean().backward()
                merge()
                optimizer.step()
                optimizer.zero_grad()
        reads.append([one.partition(":")[0] for one in seen.reads])
    return reads


@pytest.mark.parametrize("kind", ["loop", "DDP", "FSDP2"])
def test_the_host_reads_nothing_of_a_device_because_of_a_watch(kind: str, tmp_path: Path) -> None:
    for without, with_watch in run_forked(read_by_the_host, 2, kind, tmp_path):
        assert with_watch == without


def refused(_rank: int) -> list[str]:
    frozen = Net().requires_grad_(False)
    old = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    said = []
    for model in (frozen, old, Net().parameters()):
        with pytest.raises((TypeError, ValueError)) as error:
            straggle.watch(model)  # type: ignore[arg-type]
        said.append(str(error.value))
    return said


def test_what_cannot_be_watched_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """What these say to give instead is what the other tests watch."""
    for frozen, old, no_model in run_ranks(refused, 2):
        assert frozen == "watch(Net): no parameter is trained; give the model that is"
        assert "use fully_shard() instead of FullyShardedDataParallel" in old
        assert no_model == "watch(generator): give the model, which is an nn.Module"
    assert all(files[0] for files, _ in run_ranks(train, 2, "FSDP2", tmp_path, "", {}, 4))


def train_slowly(rank: int, kind: str, folder: Path, phase: str) -> None:
    Clock.sleeps = True
    train(rank, kind, folder, phase, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_sleeps_is_named_with_its_phase(kind: str, tmp_path: Path) -> None:
    """By its world's clock it sleeps for 0.3 s in each step; DDP waits in C++, which only real clocks see."""
    run = run_forked if kind == "DDP" else run_ranks
    for phase in ("data", "backward"):
        run(train_slowly, KINDS[kind][1], kind, tmp_path / phase, phase)
        one = answer(tmp_path / phase).slowness.ranks[0]
        assert (one.rank, one.named[0]) == (SLOW, phase)
