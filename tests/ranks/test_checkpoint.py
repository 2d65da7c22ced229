"""A checkpoint brings everything back: model, optimizer, history, each rank's estimator memory and random state."""

import os
import resource
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, die, digest, run_forked, run_ranks, staged
from torch import nn
from training import features, mlp

from straggle import Epochs, MovingAverage, QuantileDeadline, Rebalance
from straggle.commands.saved import durable
from straggle.commands.saved.agreement import OneReplica
from straggle.commands.saved.checkpoint import BehindPeers, Checkpoint, NotSaved


def trained(module, model, optimizer, rank, steps):
    """Trains with random input, so that the random state matters, and gives digests of all that there is afterwards."""
    for step in steps:
        with model.step():
            model(features(rank, step) + torch.rand(())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    history = model.history
    return (
        digest(module.parameters()),
        digest([state for values in optimizer.state.values() for state in values.values()]),
        digest(model.estimator.memory[parameter] for parameter in module.parameters()),
        digest([torch.get_rng_state()]),
        history.num_steps,
        tuple(history.compute_s.shape),
    )


def save_and_load(rank, directory):
    """The digests after four steps, after these again from the checkpoint, and the histories on both sides of it."""
    checkpoint = Checkpoint(directory / "checkpoint")
    outcomes, histories, ends = [], [], []
    for resumed in (False, True):
        torch.manual_seed(100 * resumed + rank)
        module = mlp(seed=resumed)
        torch.manual_seed(100 * resumed + rank)
        optimizer = torch.optim.AdamW(module.parameters())
        with staged(module, deadline=QuantileDeadline(0.5, warmup_steps=1000), estimator=MovingAverage()) as model:
            if resumed:
                ends.append(checkpoint.load(model, optimizer))
            else:
                trained(module, model, optimizer, rank, range(3))
                checkpoint.save(3, model, optimizer)
            histories.append((model.history.compute_s, model.history.finished))
            outcomes.append(trained(module, model, optimizer, rank, range(3, 7)))
    same = all(torch.equal(a, b) for a, b in zip(*histories, strict=True))
    return outcomes, same, ends


def test_resumed_run_equals_an_uninterrupted_one_in_every_part_of_the_state(tmp_path):
    results = run_ranks(save_and_load, 2, tmp_path)
    for outcomes, same_history, ends in results:
        assert outcomes[0] == outcomes[1]
        assert same_history
        assert ends == [3]
    random_states = [outcomes[0][3] for outcomes, _, _ in results]
    assert random_states[0] != random_states[1]  # each rank has its own


def load(rank, directory):
    module = mlp()
    with staged(module, estimator=MovingAverage()) as model:
        return Checkpoint(directory).load(model, torch.optim.SGD(module.parameters(), lr=0.1))


def test_loading_what_is_not_there_is_refused(tmp_path):
    (outcome,) = run_ranks(load, 1, tmp_path / "nowhere", outcomes=True)
    assert "no checkpoint in" in outcome.message
    assert outcome.kind == "RefusedByAll"


def replaced(rank, directory, steps=2):
    checkpoint = Checkpoint(directory / "checkpoint")
    module = mlp()
    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(steps):
            trained(module, model, optimizer, rank, [step])
            checkpoint.save(step + 1, model, optimizer)
    return sorted(path.name for path in checkpoint.directory.iterdir())


def test_second_checkpoint_takes_the_place_of_the_first_and_leaves_nothing_else(tmp_path):
    assert run_ranks(replaced, 2, tmp_path)[0] == ["step2"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_two_complete_checkpoints_the_newer_one_is_taken_and_the_older_one_removed(tmp_path, world_size):
    run_ranks(replaced, world_size, tmp_path)
    run_ranks(replaced, world_size, tmp_path / "older", 1)
    os.replace(tmp_path / "older" / "checkpoint" / "step1", tmp_path / "checkpoint" / "step1")
    assert run_ranks(load, world_size, tmp_path / "checkpoint") == [2] * world_size
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step2"]


def damage(path):
    """As a bad disk would: a thousand bytes of it are others."""
    content = bytearray(path.read_bytes())
    content[-1000:] = os.urandom(min(1000, len(content)))
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["common", "rank1"])
@pytest.mark.parametrize("how", [damage, lambda path: os.truncate(path, path.stat().st_size // 2)])
def test_damaged_checkpoint_is_refused_on_all_ranks_with_file_and_step(tmp_path, name, how):
    run_ranks(replaced, 2, tmp_path)
    path = tmp_path / "checkpoint" / "step2" / f"{name}.pt"
    how(path)
    outcomes = run_ranks(load, 2, tmp_path / "checkpoint", outcomes=True)
    assert {outcome.kind for outcome in outcomes} == {"RefusedByAll"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert f"{path} of step 2 is damaged" in outcomes[0].message
    assert ("rank 1: " in outcomes[0].message) == (name == "rank1")


def test_older_checkpoint_that_is_whole_is_taken_where_the_newer_one_is_damaged(tmp_path):
    run_ranks(replaced, 2, tmp_path)
    run_ranks(replaced, 2, tmp_path / "older", 1)
    os.replace(tmp_path / "older" / "checkpoint" / "step1", tmp_path / "checkpoint" / "step1")
    damage(tmp_path / "checkpoint" / "step2" / "rank1.pt")  # which rank 0 does not read
    assert run_ranks(load, 2, tmp_path / "checkpoint") == [1, 1]


def load_own(rank, directory):
    return load(rank, directory / str(rank) / "checkpoint")


def test_ranks_that_do_not_see_the_same_checkpoint_are_refused(tmp_path):
    for rank, steps in enumerate((1, 2)):
        (tmp_path / str(rank)).mkdir()
        run_ranks(replaced, 2, tmp_path / str(rank), steps)
    outcomes = run_ranks(load_own, 2, tmp_path, outcomes=True)
    for outcome in outcomes:
        assert "rank 0: sees step 1 in step1; rank 1: sees step 2 in step2" in outcome.message
        assert "run_dir must be on storage that all ranks see" in outcome.message


def in_two_parts(rank, world_size, directory, num_samples, num_steps):
    """Train some steps of an epoch and save, or go on to its end; digests before, what was brought, and the history."""
    checkpoint = Checkpoint(directory / "checkpoint")
    module, brought = mlp(), []
    with staged(module, deadline=QuantileDeadline(0.5, warmup_steps=1000), estimator=MovingAverage()) as model:
        optimizer = torch.optim.AdamW(module.parameters())
        rebalance = Rebalance(model, total=2 * world_size)
        epochs = Epochs(model, num_samples=num_samples, batch_size=1, rebalance=rebalance)
        dealt = {"rebalance": rebalance, "epochs": epochs}
        first = checkpoint.load(model, optimizer, dealt) if checkpoint.exists() else 0
        begun = first, digest(module.parameters()), model.history.compute_s, model.history.finished
        for step in range(first, num_steps or 1000):
            samples = epochs.draw()
            with model.step():
                model(features(rank, step)).square().mean().backward()
            brought += [] if model.last_report.ranks[rank].idle else samples.tolist()
            optimizer.step()
            optimizer.zero_grad()
            if epochs.number:
                break
        if num_steps:
            checkpoint.save(num_steps, model, optimizer, dealt)
        history = model.history
        return begun, brought, (history.compute_s, history.finished), digest(module.parameters())


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4), (2, 1)])
def test_run_goes_on_with_another_number_of_ranks_and_has_each_sample_of_the_epoch_once(tmp_path, before, after):
    first = run_ranks(in_two_parts, before, before, tmp_path, 50, 3)
    again = run_ranks(in_two_parts, after, after, tmp_path, 50, 0)
    for (step, parameters, compute_s, finished), _, _, _ in again:
        assert (step, parameters) == (3, first[0][3])
        saved_s, saved_finished = first[0][2]
        both = min(before, after)
        assert compute_s.shape == finished.shape == (3, after)
        assert torch.equal(compute_s[:, :both], saved_s[:, :both])
        assert torch.equal(finished[:, :both], saved_finished[:, :both])
        assert compute_s[:, both:].isnan().all()
        assert not finished[:, both:].any()
    assert len({own[3] for own in again}) == 1
    assert sorted(sample for own in (*first, *again) for sample in own[1]) == list(range(50))


def load_other(rank, directory, width, kind):
    module = mlp(width=width)
    with staged(module, estimator=MovingAverage()) as model:
        Checkpoint(directory).load(model, kind(module.parameters()))


@pytest.mark.parametrize(("width", "kind"), [(9, torch.optim.SGD), (8, torch.optim.AdamW)])
def test_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path, width, kind):
    run_ranks(replaced, 2, tmp_path)
    for outcome in run_ranks(load_other, 2, tmp_path / "checkpoint", width, kind, outcomes=True):
        assert outcome.kind == "RefusedByAll"
        assert (
            f"{tmp_path / 'checkpoint' / 'step2'} of step 2 is of another model, optimizer or estimator"
            in outcome.message
        )


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def written_again(directory, name, write):
    """Give a complete checkpoint another file of this name, or take the file out of it, with the checksums of that."""
    (snapshot,), _ = durable.snapshots(directory)
    new = durable.begin(directory, snapshot.step)
    names = [own for own in snapshot.state["files"] if own != name]
    for own in names:
        shutil.copy(snapshot.directory / own, new / own)
    if write is not None:
        write(new / name)
        names.append(name)
    state = {key: value for key, value in snapshot.state.items() if key != "files"}
    durable.publish(new, state, {own: durable.seal(new / own) for own in names})


def test_file_that_would_run_code_is_refused_and_runs_none(tmp_path):
    run_ranks(replaced, 1, tmp_path)
    content = {"random": Harmful(tmp_path / "made")}
    written_again(tmp_path / "checkpoint", "rank0.pt", lambda path: torch.save(content, path))
    (outcome,) = run_ranks(load, 1, tmp_path / "checkpoint", outcomes=True)
    assert outcome.kind == "RefusedByAll"
    assert "Weights only load failed" in outcome.message
    assert not (tmp_path / "made").exists()


def test_checkpoint_without_the_files_of_this_version_is_refused(tmp_path):
    run_ranks(replaced, 1, tmp_path)
    written_again(tmp_path / "checkpoint", "common.pt", None)
    (outcome,) = run_ranks(load, 1, tmp_path / "checkpoint", outcomes=True)
    assert outcome.kind == "RefusedByAll"
    assert (
        f"{tmp_path / 'checkpoint' / 'step2.1'} of step 2 has no common.pt: another version wrote it" in outcome.message
    )


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), seen

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def save_and_load_extra_state(rank, directory):
    modules = Counting(("a", 3)), Counting(())
    for number, module in enumerate(modules):
        with staged(module) as model:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            if number:
                Checkpoint(directory).load(model, optimizer)
            else:
                with model.step():
                    model(torch.ones(1, 2)).sum().backward()
                Checkpoint(directory).save(1, model, optimizer)
    return modules[1].seen


def test_extra_state_of_a_module_comes_back(tmp_path):
    assert run_ranks(save_and_load_extra_state, 1, tmp_path / "checkpoint") == [("a", 3)]


def save_on_a_full_disk(rank, directory):
    """Rank 1 can write no file of more than 100 kB from the second checkpoint on, and can again in the third."""
    checkpoint = Checkpoint(directory / "checkpoint")
    module = mlp(width=200, depth=4)
    said = []
    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            trained(module, model, optimizer, rank, [step])
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if (rank, step) == (1, 1):
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            try:
                checkpoint.save(step + 1, model, optimizer)
            except NotSaved as error:
                said.append((str(error), sorted(path.name for path in checkpoint.directory.iterdir())))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            dist.barrier()
    return said, durable.snapshots(directory / "checkpoint")[0][0].step


def test_checkpoint_that_cannot_be_written_is_told_on_all_ranks_and_the_one_before_stays(tmp_path):
    for said, step in run_forked(save_on_a_full_disk, 2, tmp_path):
        ((sentence, left),) = said
        assert f"{tmp_path / 'checkpoint'} of step 2 not saved: rank 1: " in sentence
        assert "rank1.pt" in sentence
        assert "File too large" in sentence
        assert sentence.endswith("the last complete one is that of step 1")
        assert left == ["step1"]  # the half is gone, which makes room
        assert step == 3


def save_on_ones_own_disk(rank, directory):
    """Twice, where no rank sees what another writes; what is then said, and what is left on this rank's disk."""
    checkpoint = Checkpoint(directory / str(rank) / "checkpoint")
    module, said = mlp(), []
    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            trained(module, model, optimizer, rank, [step])
            try:
                checkpoint.save(step + 1, model, optimizer)
            except NotSaved as error:
                said.append(str(error))
    return said, list(checkpoint.directory.iterdir())


def test_checkpoint_on_disks_that_are_not_shared_is_refused_and_leaves_nothing_on_any(tmp_path):
    for said, left in run_forked(save_on_ones_own_disk, 2, tmp_path):
        assert len(said) == 2
        assert all("rank 0: " in sentence and "rank1.pt" in sentence for sentence in said)
        assert left == []


def save_behind(_rank, directory):
    """After the second step, a state that has the first one alone; then what it lacked."""
    checkpoint = Checkpoint(directory / "checkpoint", OneReplica())
    module = mlp()
    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trained(module, model, optimizer, 0, [0, 1])
        with pytest.raises(BehindPeers) as raised:
            checkpoint.save(1, model, optimizer)
        checkpoint.save(2, model, optimizer)
    return str(raised.value), durable.snapshots(checkpoint.directory)[0][0].step


def test_rank_that_has_not_applied_all_merged_steps_says_that_it_saves_nothing(tmp_path):
    ((sentence, step),) = run_ranks(save_behind, 1, tmp_path)
    assert sentence.startswith(
        f"checkpoint {tmp_path / 'checkpoint'} of step 1 not saved: its peers have merged 2 steps"
    )
    assert sentence.endswith("there is no complete one")
    assert step == 2


def test_unfinished_checkpoint_is_no_checkpoint(tmp_path):
    run_ranks(replaced, 1, tmp_path)
    (tmp_path / "checkpoint" / "step2" / "state.json").unlink()
    (outcome,) = run_ranks(load, 1, tmp_path / "checkpoint", outcomes=True)
    assert "no checkpoint in" in outcome.message


def die_while_saving(rank, directory, operation):
    """Saves after a step, and again after another; rank 0 dies before its file operation of this number then."""
    checkpoint = Checkpoint(directory / "checkpoint")
    module = mlp()
    left = [operation]

    def count(event, arguments):
        if arguments and str(arguments[0]).startswith(str(directory)):
            if left[0] == 0:
                die()
            left[0] -= 1

    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            trained(module, model, optimizer, rank, [step])
            if (rank, step) == (0, 1):
                sys.addaudithook(count)
            checkpoint.save(step + 1, model, optimizer)


@pytest.mark.slow
def test_rank_that_dies_at_any_file_operation_of_saving_leaves_a_checkpoint_that_loads(tmp_path):
    steps, died = [], True
    while died:
        folder = tmp_path / str(len(steps))
        outcomes = run_forked(die_while_saving, 2, folder, len(steps), outcomes=True)
        died = isinstance(outcomes[0], Raised) and outcomes[0].kind == "Killed"
        (step,) = set(run_ranks(load, 2, folder / "checkpoint"))
        steps.append(step)
    assert len(steps) > 20
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
