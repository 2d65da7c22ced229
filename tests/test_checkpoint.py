"""A checkpoint brings everything back: model, optimizer, history, each rank's estimator memory and random state."""

import torch
from ranks import digest, run_ranks, staged
from training import features, mlp

from straggle import MovingAverage, QuantileDeadline
from straggle.checkpoint import Checkpoint


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
    with staged(module) as model:
        Checkpoint(directory).load(model, torch.optim.AdamW(module.parameters()))


def test_loading_what_is_not_there_is_refused(tmp_path):
    (outcome,) = run_ranks(load, 1, tmp_path / "nowhere", outcomes=True)
    assert "no checkpoint in" in outcome.message
    assert outcome.kind == "ValueError"


def replaced(rank, directory):
    checkpoint = Checkpoint(directory / "checkpoint")
    module = mlp()
    with staged(module, estimator=MovingAverage()) as model:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            trained(module, model, optimizer, rank, [step])
            checkpoint.save(step + 1, model, optimizer)
    return sorted(path.name for path in directory.iterdir())


def test_second_checkpoint_takes_the_place_of_the_first_and_leaves_nothing_else(tmp_path):
    assert run_ranks(replaced, 2, tmp_path)[0] == ["checkpoint"]


def test_unfinished_checkpoint_is_no_checkpoint(tmp_path):
    run_ranks(replaced, 1, tmp_path)
    (tmp_path / "checkpoint" / "state.json").unlink()
    (outcome,) = run_ranks(load, 1, tmp_path / "checkpoint", outcomes=True)
    assert "no checkpoint in" in outcome.message
