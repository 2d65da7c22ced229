"""A rank that is told to end leaves after a step, and is missed by nobody; if it cannot be spared, all end with it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

import pytest
import torch
from ranks import digest, run_forked, staged
from torch.utils.data import DataLoader, TensorDataset
from training import Signals, features, mlp

from straggle import DealtLoader, Elastic, Epochs, FixedDeadline, JobDone, LateHandling, StagedDataParallel
from straggle.lab.world.faults import Freeze, Notice
from straggle.lab.world.run import run_world
from straggle.members import agents
from straggle.members.views.membership import TooFewRanks
from straggle.merge.wire.store import default_store
from straggle.report import StepReport
from straggle.stop_signal import StopSignal

MORE = 6  # steps that are made without the rank that has left
MOST = 2_000


@dataclass
class Outcome:
    """What a rank had when its loop was over."""

    step: int
    peers_go_on: bool
    parameters: str
    reports: list[StepReport] = field(repr=False)
    left_kinds: dict[int, str]
    closed_s: float = 0.0

    def absent(self, rank: int) -> list[int]:
        return [report.step for report in self.reports if report.ranks[rank].absent]


def loop(rank, tell, *, members=None, file=None, step_s=0.01, **options):
    """Train until told to end, or until `MORE` steps were made without some rank."""
    reports, changes = [], []
    model = mlp()
    with staged(model, members=members or Elastic(suspect_s=30.0), **options) as staged_model:
        staged_model.register_members_hook(changes.append)
        optimizer = torch.optim.SGD(staged_model.parameters(), lr=0.01)
        with StopSignal(file=file) as stop:
            for number in range(MOST):
                tell(rank, number)
                with staged_model.step() as step:
                    stop.tell(step)
                    time.sleep(step_s)
                    staged_model(features(rank, number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                reports.append(staged_model.last_report)
                if stop.agreed(reports[-1]):
                    break
                if sum(bool(report.absent_ranks) for report in reports) == MORE:
                    break
        kinds = {rank: kind for change in changes for rank, kind in change.left_kinds.items() if kind != "done"}
        outcome = Outcome(reports[-1].step, stop.peers_go_on, digest(model.parameters()), reports, kinds)
        closes_at = time.monotonic()
    outcome.closed_s = time.monotonic() - closes_at
    return outcome


def check_left(outcomes, gone):
    """Those in ``gone`` left alone, and the others went on without losing anything."""
    stayed = [own for rank, own in enumerate(outcomes) if rank not in gone]
    assert [own.peers_go_on for own in outcomes] == [rank in gone for rank in range(len(outcomes))]
    assert len({own.parameters for own in stayed}) == 1
    for own in stayed:
        assert own.left_kinds == dict.fromkeys(gone, "notice")
        for rank in gone:
            last = outcomes[rank].step
            assert own.absent(rank) == list(range(last + 1, own.step + 1))  # it has made its step, and none after it
        # what was computed is in the merge, in each step
        assert all(row.reach == 1 for report in own.reports for row in report.ranks if not row.absent)


def tell(*ranks, at=4, number=signal.SIGTERM):
    def told(rank, step):
        if rank in ranks and step == at:
            os.kill(os.getpid(), number)

    return told


def leave(rank, gone, number):
    return loop(rank, tell(*gone, number=number))


@pytest.mark.parametrize(
    ("gone", "number"), [((2,), signal.SIGTERM), ((0,), signal.SIGTERM), ((3,), signal.SIGUSR1)], ids=str
)
def test_rank_that_is_told_to_end_leaves_after_a_step_and_the_others_go_on(gone, number):
    check_left(run_forked(leave, 4, gone, number), gone)


def leave_two(rank):
    return loop(rank, tell(1, 3), members=Elastic(min_ranks=2, suspect_s=30.0))


def test_two_that_are_told_at_once_leave_if_the_others_are_enough():
    check_left(run_forked(leave_two, 4), (1, 3))


def check_ended_together(outcomes):
    assert len({(own.step, own.parameters, own.peers_go_on) for own in outcomes}) == 1
    assert not outcomes[0].peers_go_on
    assert outcomes[0].left_kinds == {}


def end_as_too_few_are_left(rank):
    return loop(rank, tell(1))


def test_all_end_after_the_same_step_if_too_few_would_be_left():
    outcomes = run_forked(end_as_too_few_are_left, 2)
    check_ended_together(outcomes)
    assert 4 <= outcomes[0].step < MOST - 1


def end_as_all_are_told(rank):
    def told(rank, step):
        if step == 4:
            agents.post_all_told(default_store())  # as a launcher of one node does before it sends the signals
            tell(1)(rank, step)

    return loop(rank, told, members=Elastic(min_ranks=1, suspect_s=30.0))


def test_all_end_after_the_same_step_if_the_launcher_tells_all_of_them_whoever_hears_it_first():
    check_ended_together(run_forked(end_as_all_are_told, 3))


def told_one_after_the_other(rank):
    def told(rank, step):
        if step == 4 + 60 * rank:
            os.kill(os.getpid(), signal.SIGTERM)

    return loop(rank, told)


def test_of_ranks_that_are_told_one_after_the_other_those_that_cannot_be_spared_end_together():
    first, *others = run_forked(told_one_after_the_other, 3)
    assert first.peers_go_on
    assert first.step < 64
    assert {own.step > first.step + MORE - 1 for own in others} == {True}
    assert len({(own.step, own.parameters) for own in others}) == 1


@pytest.mark.parametrize("told", [True, False], ids=["told", "done"])
def test_rank_that_is_out_while_the_only_member_is_told_to_end_hears_that_the_job_has_ended_early(told):
    def job(rank):
        layer = torch.nn.Linear(4, 4)
        layer.register_forward_hook(lambda *_: rank.work(0.05))
        model = StagedDataParallel(layer, members=Elastic(min_ranks=1))
        for _ in range(60):
            with model.step() as step:
                if rank.is_told:
                    step.departure.ask()
                model(torch.ones(2, 4)).sum().backward()
            if step.departure.ends_after(model.last_report.step):
                break
        model.close()
        return model.last_report.step

    run = run_world(job, ranks=2, seed=1, faults=[Freeze(1, 0.3, 6.0), *[Notice(0, 3.0)] * told])
    last, error = run.results
    if told:
        assert last < 59
        assert isinstance(error, TooFewRanks)
        assert "ranks [0] have ended their loops early, as ranks were told to end" in str(error)
    else:
        assert last == 59
        assert isinstance(error, JobDone)


def leave_while_stuck(rank):
    """Rank 2 is told within a step that takes far longer than its peers wait for it."""
    signals = Signals()
    options = {"deadline": FixedDeadline(0.05), "late_handling": LateHandling(grace_s=0.0, max_lag=10_000)}

    def told(rank, step):
        if rank != 2 or step != 12:
            return
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait("gone")

    own = loop(rank, told, **options)
    if rank == 0:
        signals.send("gone")
    return own


def test_rank_whose_step_does_not_end_leaves_all_the_same():
    outcomes = run_forked(leave_while_stuck, 3)
    assert outcomes[0].left_kinds == outcomes[1].left_kinds == {2: "notice"}
    assert [own.peers_go_on for own in outcomes] == [False, False, True]
    assert outcomes[0].parameters == outcomes[1].parameters


def leave_for_a_file(rank, path):
    def told(rank, step):
        if (rank, step) == (1, 4):
            path.touch()

    return loop(rank, told, file=path if rank == 1 else None)


def test_file_that_appears_is_a_signal(tmp_path):
    check_left(run_forked(leave_for_a_file, 3, tmp_path / "notice"), (1,))


def seen_samples(rank, dealt):
    """Which samples this rank brought in each step of the first epoch; rank 1 leaves in it."""
    seen = []
    with staged(mlp(), members=Elastic(suspect_s=30.0)) as model, StopSignal() as stop:
        data = TensorDataset(torch.arange(600))
        if dealt:
            loader = epochs = DealtLoader(model, DataLoader(data, batch_size=4, shuffle=True))
            batches = iter(loader)
        else:
            epochs = Epochs(model, num_samples=600, batch_size=4)
            batches = epochs.batches(DataLoader(data, batch_sampler=epochs.sampler))
        for number, (own,) in enumerate(batches):
            if (rank, number) == (1, 4):
                os.kill(os.getpid(), signal.SIGTERM)
            with model.step() as step:
                stop.tell(step)
                time.sleep(0.01)
                model(features(rank, number)).sum().backward()
            took_part = model.last_report.ranks[rank].reach and not model.last_report.ranks[rank].idle
            seen.append(own.tolist() if took_part else [])
            if stop.agreed(model.last_report):
                break
        return seen, stop.peers_go_on


@pytest.mark.parametrize("dealt", [False, True], ids=["Epochs", "DealtLoader"])
def test_samples_of_a_rank_that_leaves_go_to_the_others_each_exactly_once(dealt):
    (first, gone, last), went_on = zip(*run_forked(seen_samples, 3, dealt), strict=True)
    assert went_on == (False, True, False)
    assert sorted(sample for seen in (first, gone, last) for own in seen for sample in own) == list(range(600))
    assert 4 < len(gone) < 50 - 1
    if dealt:  # from its last step on the others have its part of each
        gone += [[]] * (len(first) - len(gone))
        sizes = [sum(map(len, own)) for own in zip(first, gone, last, strict=True)]
        assert set(sizes[:-1]) == {12}
