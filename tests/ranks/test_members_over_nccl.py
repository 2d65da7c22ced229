"""Members that merge over nccl, in the simulated world: revoked, formed again, merged again, and nothing hangs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from straggle import Elastic, StagedDataParallel, world
from straggle.backward import stages
from straggle.backward.device import Host
from straggle.lab.world.faults import Freeze, Kill, Stall
from straggle.lab.world.groups import path_of
from straggle.lab.world.nccl import FAILED, Nccl, nccl_of
from straggle.lab.world.run import Run, parameters_of, run_world, simulated
from straggle.lab.world.store import PrefixStore, Store
from straggle.members.regrouped.formed_again import Communicator, NcclGroup
from straggle.merge.wire.groups import GlooGroup, is_over, kept_by, set_aside
from straggle.waits import until

NCCL = "cuda:nccl2"
STEPS = 20
LAYERS = 4
SUSPECT_S = 1.0


@pytest.fixture(autouse=True)
def _a_bucket_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "BUCKET_BYTES", 1)


def loop(rank: Any, steps: int = STEPS) -> str:
    """Each layer takes 5 ms, forward and backward; rank r gives r + 1 in each gradient."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(LAYERS)))
    for layer in module:
        layer.register_forward_hook(lambda *_: rank.work(0.005))
        layer.weight.register_hook(lambda _: rank.work(0.005))
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient: torch.full_like(gradient, rank.number + 1.0))
    model = StagedDataParallel(module, members=Elastic(1, SUSPECT_S), links=False)
    model.register_members_hook(lambda report: rank.note(generation=report.generation))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = model.register_state(optimizer=optimizer)
    while step < steps:
        with model.step():
            model(torch.ones(1, 2)).sum().backward()
        report = model.last_report
        assert report is not None
        gradients = [None if own.grad is None else own.grad.clone() for own in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        rank.note(step=report.step, rows=report.ranks, gradients=gradients)
        step = report.step + 1
    model.close()
    return parameters_of(module)


def steps_of(run: Run, rank: int) -> list[dict[str, Any]]:
    return [note for note in run.notes[rank] if "step" in note]


def check_nothing_of_survivors_is_lost(run: Run, survivors: set[int]) -> None:
    """And each gradient is the mean of those whose rows say that they gave it."""
    for note in itertools.chain.from_iterable(steps_of(run, rank) for rank in survivors):
        rows = {row.rank: row for row in note["rows"] if not row.absent}
        for rank in survivors & rows.keys():
            assert (min(rows[rank].stages), rows[rank].cause) == (1.0, None), note["step"]
        given = [row.rank + 1.0 for row in rows.values() if min(row.stages) == 1.0]
        if all(min(row.stages) in (0.0, 1.0) == max(row.stages) for row in rows.values()):
            for gradient in note["gradients"]:
                torch.testing.assert_close(gradient, torch.full_like(gradient, sum(given) / len(given)))


def longest_s(run: Run, rank: int) -> float:
    ends = [note["at"] for note in steps_of(run, rank)]
    return max(after - before for before, after in itertools.pairwise(ends))


def test_results_are_those_over_gloo_bit_for_bit():
    over = [run_world(loop, ranks=3, backend=backend) for backend in ("gloo", NCCL)]
    assert len(set(over[0].results + over[1].results)) == 1


@pytest.mark.parametrize("moment", range(10))
def test_gradients_on_their_way_when_a_rank_is_killed_are_merged_again_without_it(moment):
    faults = [Kill(2, at_s=0.21, turns=9 * moment)]
    run = run_world(loop, ranks=3, seed=moment, faults=faults, backend=NCCL)
    assert run.results[0] == run.results[1]
    assert steps_of(run, 0)[-1]["step"] == STEPS - 1
    check_nothing_of_survivors_is_lost(run, {0, 1})
    assert longest_s(run, 0) < SUSPECT_S + 1.0


def test_over_gloo_what_was_on_its_way_is_lost_in_one_of_these_moments():
    """So the test before can fail: gloo keeps nothing."""

    def loses(moment: int) -> bool:
        run = run_world(loop, ranks=3, seed=moment, faults=[Kill(2, at_s=0.21, turns=9 * moment)])
        return any(row.cause == "members" for note in steps_of(run, 0) for row in note["rows"])

    assert any(map(loses, range(10)))


@pytest.mark.parametrize("back_s", [0.05, 0.5, 2.5])
@pytest.mark.parametrize("moment", range(3))
def test_rank_that_is_killed_comes_back_with_a_communicator_of_its_own(moment, back_s):
    faults = [Kill(2, at_s=0.21, turns=31 * moment, back_s=back_s)]
    run = run_world(lambda rank: loop(rank, 120), ranks=3, seed=moment, faults=faults, backend=NCCL)
    assert len(set(run.results)) == 1
    assert steps_of(run, 2)[-1]["step"] == 119
    check_nothing_of_survivors_is_lost(run, {0, 1})


@pytest.mark.parametrize("moment", range(4))
def test_two_changes_in_a_row_and_a_slow_rank_lose_nothing_of_the_others(moment):
    faults = [Kill(3, at_s=0.21, turns=13 * moment), Freeze(2, at_s=0.215, for_s=2.5), Stall(1, 0.3, 0.2)]
    run = run_world(lambda rank: loop(rank, 100), ranks=4, seed=moment, faults=faults, backend=NCCL)
    assert len(set(run.results[:3])) == 1
    check_nothing_of_survivors_is_lost(run, {0})
    assert longest_s(run, 0) < 2 * (SUSPECT_S + 1.0)


def number() -> int:
    """Of the process that calls this: that of its rank, if it is the rank's first."""
    process: Any = world.process()
    return int(process[1])


@pytest.fixture
def nth_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``nth_form(rank, which, happens)``: what happens when a rank forms a communicator for the which-th time."""
    formed, happened = list[int](), list[int]()

    def at(rank: int, which: int, happens: Any) -> None:
        form = Nccl.reconfigure

        def forms(self: Nccl, options: Any) -> Any:
            formed.extend([1] * (number() == rank))
            if number() == rank and len(formed) == which and not happened:
                happened.append(1)
                happens()
            return form(self, options)

        monkeypatch.setattr(Nccl, "reconfigure", forms)

    yield at
    assert happened


@pytest.mark.parametrize("seed", range(4))
def test_second_rank_that_dies_while_the_groups_are_formed_again_costs_its_suspicion(seed, nth_form):
    nth_form(2, 2, lambda: world.end_process(1))
    run = run_world(loop, ranks=4, seed=seed, faults=[Kill(3, at_s=0.21)], backend=NCCL)
    assert run.results[0] == run.results[1]
    check_nothing_of_survivors_is_lost(run, {0, 1})
    assert longest_s(run, 0) < 2 * (SUSPECT_S + 1.0)


@pytest.mark.parametrize("seed", range(2))
def test_rank_that_hangs_while_it_forms_its_communicator_takes_another_one(seed, nth_form):
    nth_form(1, 2, lambda: world.sleep(300.0))
    run = run_world(loop, ranks=3, seed=seed, faults=[Kill(2, at_s=0.21)], backend=NCCL, end_s=400.0)
    assert run.results[0] == run.results[1]
    check_nothing_of_survivors_is_lost(run, {0, 1})
    # nccl's own limit, until the members begin anew, and what it takes to see that
    assert longest_s(run, 0) < SUSPECT_S + 10.0 + 5.0 + 2.0


def test_attempt_that_fails_on_one_rank_is_made_again_by_all_of_them(nth_form):
    """In the next generation, with new communicators: what failed has a name that may be another rank's, too."""

    def fails() -> None:
        raise RuntimeError("wait timeout")

    nth_form(1, 2, fails)
    run = run_world(loop, ranks=4, faults=[Kill(0, at_s=0.21)], backend=NCCL)
    assert len(set(run.results[1:])) == 1
    check_nothing_of_survivors_is_lost(run, {1, 2, 3})
    assert longest_s(run, 3) < SUSPECT_S + 10.0 + 5.0 + 2.0


def test_rank_whose_device_lets_go_of_a_communicator_late_takes_another_one(monkeypatch):
    abort, aborted = Nccl.abort, list[int]()

    def comes_late(self: Nccl) -> None:
        if number() == 1 and not aborted:
            aborted.append(1)
            world.sleep(3.0)
        abort(self)

    monkeypatch.setattr(Nccl, "abort", comes_late)
    run = run_world(lambda rank: loop(rank, 120), ranks=3, faults=[Kill(2, at_s=0.21)], backend=NCCL)
    assert run.results[0] == run.results[1]
    assert aborted
    assert run.seconds > 6.0
    assert longest_s(run, 0) < SUSPECT_S + 2.0 + 1.0
    assert [note["generation"] for note in run.notes[0] if "generation" in note] == [1]


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``held_up(rank, seconds)``: a rank's control group of generation 1 is there so much later; the moments at which.

    One for each attempt to form it.
    """

    def hold(rank: int, seconds: float) -> list[float]:
        make, came = GlooGroup.__init__, list[float]()

        def makes(self: GlooGroup, store: Any, *arguments: Any) -> None:
            make(self, store, *arguments)
            if number() == rank and path_of(store).endswith("/1/control"):
                world.sleep(seconds)
                came.append(world.monotonic())

        monkeypatch.setattr(GlooGroup, "__init__", makes)
        return came

    return hold


def test_late_thread_of_an_older_view_leaves_the_communicator_to_the_newer_one(held_up, monkeypatch):
    """Rank 1 is held up in the first change, the second comes meanwhile, and the third finds what it revokes."""
    came, begin, made = held_up(1, 2.0), Nccl.__init__, list[int]()
    monkeypatch.setattr(Nccl, "__init__", lambda own, *given: (begin(own, *given), made.append(number()))[0])
    faults = [Kill(3, at_s=0.21, back_s=4.5), Kill(2, at_s=1.5)]
    run = run_world(lambda rank: loop(rank, 160), ranks=4, faults=faults, backend=NCCL)
    assert len(came) == 1
    changes = [note["at"] for note in run.notes[1] if "generation" in note]
    assert changes[0] < came[0] < changes[1]
    assert made.count(1) == 1  # all views of rank 1 have the same
    assert run.results[0] == run.results[1] == run.results[3]
    check_nothing_of_survivors_is_lost(run, {0, 1})


def test_late_thread_that_has_formed_an_older_view_does_not_take_the_place_of_the_newer_one(monkeypatch):
    """Rank 1 hears late that its barrier of the first change is over; the third one revokes what the second formed."""
    begin, abort, barrier = Nccl.__init__, Nccl.abort, Nccl.barrier
    made, aborted, held, came = list[Nccl](), list[Nccl](), list[float](), list[float]()

    def notes(call: Any, of_rank: list[Nccl]) -> Any:
        return lambda own, *given: (of_rank.extend([own] * (number() == 1)), call(own, *given))[1]

    monkeypatch.setattr(Nccl, "__init__", notes(begin, made))
    monkeypatch.setattr(Nccl, "abort", notes(abort, aborted))

    def comes_late(own: Nccl, *given: Any) -> Any:
        work = barrier(own, *given)
        if number() == 1 and own.world.now > 0.5 and not held:
            held.append(own.world.now)
            until(work.is_completed, every_s=0.01)
            world.sleep(2.0)
            came.append(own.world.now)
        return work

    monkeypatch.setattr(Nccl, "barrier", comes_late)
    faults = [Kill(3, at_s=0.21, back_s=4.5), Kill(2, at_s=1.5)]
    run = run_world(lambda rank: loop(rank, 160), ranks=4, faults=faults, backend=NCCL)
    changes = [note["at"] for note in run.notes[1] if "generation" in note]
    assert held[0] < changes[0] < came[0] < changes[1]
    assert aborted == made
    assert len(made) == 2
    assert run.results[0] == run.results[1] == run.results[3]
    check_nothing_of_survivors_is_lost(run, {0, 1})


def test_over_gloo_groups_that_take_long_are_waited_for(held_up):
    """A second attempt would be under the keys of the first, which is still there."""
    came = held_up(1, 100.0)
    run = run_world(loop, ranks=3, faults=[Kill(2, at_s=0.21)], end_s=150.0)
    assert run.results[0] == run.results[1]
    assert [note["generation"] for note in run.notes[1] if "generation" in note] == [1]
    assert len(came) == 1


@pytest.mark.parametrize("seed", range(4))  # in some nccl does not notice that a rank is gone
def test_thread_that_is_held_up_in_a_launch_is_freed_by_the_revoke(seed, monkeypatch):
    """NCCL connects when a collective is launched, and that thread holds the lock of the merge."""
    launch, held = Nccl.allreduce, list[float]()

    def holds_up(self: Nccl, *arguments: Any) -> Any:
        if number() == 1 and self.world.now > 0.2 and not held:
            held.append(self.world.now)
            until(lambda: self.error, every_s=0.01)
        return launch(self, *arguments)

    monkeypatch.setattr(Nccl, "allreduce", holds_up)
    run = run_world(loop, ranks=3, seed=seed, faults=[Kill(2, at_s=0.21)], backend=NCCL)
    assert held
    assert run.results[0] == run.results[1]
    check_nothing_of_survivors_is_lost(run, {0, 1})
    assert longest_s(run, 1) < SUSPECT_S + 1.0


def test_what_nccl_cannot_send_is_its_callers_error():
    def raises() -> None:
        raise RuntimeError("Unsupported tensor data type for NCCL")

    group = NcclGroup(SimpleNamespace(barrier=raises, get_error=lambda: SimpleNamespace(name="SUCCESS")))
    with pytest.raises(RuntimeError, match="Unsupported"):
        group.barrier()


def test_members_over_nccl_are_refused_with_the_versions_if_it_cannot_form_groups_again(monkeypatch):
    monkeypatch.delattr(dist, "ProcessGroupNCCL2", raising=False)
    with pytest.raises(
        ValueError, match=rf"torch 2.14 or newer, with NCCL 2.28.*This is torch {torch.__version__[:4]}"
    ):
        Communicator(lambda: None, 0, 1, Host())


@pytest.mark.skipif(not hasattr(dist, "ProcessGroupNCCL2"), reason="needs torch 2.14, built with NCCL")
def test_torchs_own_communicator_has_what_is_asked_of_it_with_a_gpu_or_without():
    kind: Any = vars(dist)["ProcessGroupNCCL2"]
    options = kind.Options()
    options.enable_reconfigure = True
    own = kind(dist.PrefixStore("own", dist.HashStore()), 3, 4, options)
    set_aside(own, math.inf)  # without a driver its destructor ends the process
    assert own.supports_reconfigure
    assert own.get_reconfigure_handle() == "nccl2:3:-1:"
    asked: Any = vars(dist.distributed_c10d)["ReconfigureOptions"]()
    asked.uuid, asked.handles, asked.timeout = 2**62 - 1, ["nccl2:9:1:"], timedelta(seconds=1)
    with pytest.raises(RuntimeError, match="Local nccl2 reconfigure handle is not part"):
        own.reconfigure(asked)
    group = NcclGroup(own)
    with pytest.raises(RuntimeError, match="requires CUDA tensors"):
        group.all_reduce(torch.ones(2))


def made(rank: Any, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> list[str]:
    """Wrap a model, in vain if another rank ``refuses``; what happened to this rank's communicator."""
    happened = list[str]()
    begin, shutdown = Nccl.__init__, Nccl.shutdown
    with monkeypatch.context() as patch:
        patch.setattr(Nccl, "__init__", lambda own, *given: (begin(own, *given), happened.append("made"))[0])
        patch.setattr(Nccl, "shutdown", lambda own: (shutdown(own), happened.append("closed"))[0])
        if refuses:
            with pytest.raises(ValueError, match="sparse"):
                StagedDataParallel(torch.nn.Embedding(4, 2, sparse=True), members=Elastic(1), links=False)
        else:
            StagedDataParallel(torch.nn.Linear(2, 2), members=Elastic(1), links=False).close()
    return happened


def test_communicator_is_closed_if_the_model_could_not_be_wrapped(monkeypatch):
    run = run_world(lambda rank: made(rank, monkeypatch, refuses=True), ranks=1, backend=NCCL)
    assert run.results == (["made", "closed"],)


def test_model_on_the_cpu_goes_over_gloo_where_there_is_nccl_for_others(monkeypatch):
    config = "cpu:gloo,cuda:nccl2"
    run = run_world(lambda rank: made(rank, monkeypatch, refuses=False), ranks=1, backend=config)
    assert run.results == ([],)


@pytest.mark.parametrize("backend", ["cpu:mpi", "cuda:ucc"])
def test_members_over_other_backends_are_refused(backend):
    (error,) = run_world(loop, ranks=1, backend=backend).results
    assert isinstance(error, ValueError)
    assert 'dist.init_process_group("gloo")' in str(error)


def test_simulated_communicator_is_as_torch_has_it():
    """Works that are over but were not seen to be have failed when it is revoked, and what was begun is NaN."""

    def one(rank: Any) -> None:
        kind = nccl_of(rank.job.network)
        corner = PrefixStore("own", Store(rank.job.server))
        options = SimpleNamespace(enable_reconfigure=True, _timeout=timedelta(seconds=60))
        own = kind(corner, rank.number, 2, options)
        with pytest.raises(RuntimeError, match="not formed"):
            own.allreduce([torch.ones(1)])
        assert own.get_reconfigure_handle() == f"nccl2:{rank.number}:-1:own"
        handles = [f"nccl2:{number}:-1:own" for number in (1, 0)]  # the other way round
        own.reconfigure(SimpleNamespace(uuid=5, handles=handles, timeout=timedelta(seconds=9))).wait()
        assert own.get_reconfigure_handle() == f"nccl2:{1 - rank.number}:5:own"
        group = NcclGroup(own)
        sums = [torch.full((2,), rank.number + 1.0) for _ in range(3)]
        seen, unseen = group.all_reduce(sums[0]), group.all_reduce(sums[1])
        assert is_over(seen, 5.0)
        rank.work(1.0)
        begun = group.all_reduce(sums[2]) if rank.number else None
        own.abort()
        assert seen.is_completed()
        assert sums[0].tolist() == sums[1].tolist() == [3.0, 3.0]
        with pytest.raises(dist.DistBackendError, match=FAILED):
            unseen.wait()
        assert own.get_error().name == "COMM_ERROR"
        assert group.barrier().is_completed()  # it has failed, and raises nothing before it is waited for
        if begun is not None:
            rank.work(0.1)
            assert sums[2].isnan().all()
            (kept,) = kept_by([begun])
            assert kept.tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="handle"):
            own.reconfigure(SimpleNamespace(uuid=6, handles=handles, timeout=timedelta(seconds=9)))

    with simulated(one, ranks=2, backend=NCCL) as job:
        run = job.run_to_the_end(60.0)
    assert run.results == (None, None)
