"""A run in which ranks were killed, stopped and started again is repeated bit for bit from what each rank wrote."""

import time

import pytest
import torch
from members import run_job
from ranks import digest, run_ranks
from recorded import LAST, MIDDLE, Noisy, Stops, Stuck, kill_in_backward, put_out_in_backward
from training import features

from straggle import Abstain, Elastic, LastOwn, LateHandling, Merge, StagedDataParallel
from straggle.backward import stages
from straggle.observe.members_recording import MembersRecorder, read_members_recording


def loop(rank, module, model, steps, end, num_parts=0, stops=None):
    """Trains from the step that the job is in; the loss of each step that this rank made.

    ``num_parts``: of each step's pool, from which the ranks draw; 0: there is none.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses, step = {}, model.register_state(optimizer=optimizer)
    while step < end():
        with model.step() as opened:
            if stops is not None:
                stops.entered(opened)
            for part in opened.pull(range(num_parts)) if num_parts else [rank]:
                loss = model(features(part, step)).square().mean()
                opened.log(loss=loss.item())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        if not report.ranks[rank].absent:
            losses[report.step] = report.scalars.get("loss")
        step = report.step + 1
        if stops is not None:
            stops.left(report)
        steps(step)
    state = digest([*module.parameters(), *map(momentum(optimizer), module.parameters())])
    return state, digest([torch.get_rng_state(), *module.buffers()]), losses


def momentum(optimizer):
    return lambda parameter: optimizer.state[parameter]["momentum_buffer"]


def wrapped(rank, choice, budget_s, members):
    """``choice``: an estimator, or how gradients are weighted."""
    stages.BUCKET_BYTES = 1  # a layer is a bucket of its own
    torch.manual_seed(0)
    module = Noisy()
    torch.manual_seed(rank)
    options = {} if budget_s is None else {"deadline": budget_s, "late_handling": LateHandling(grace_s=0.02)}
    options |= {"merge" if isinstance(choice, Merge) else "estimator": choice}
    return module, lambda: StagedDataParallel(module, members=members, **options)


def record(rank, board, folder, choice, budget_s, num_parts=0):
    module, wrap = wrapped(rank, choice, budget_s, Elastic(min_ranks=1))
    for layer in (MIDDLE, LAST):
        Stuck(module, folder, rank, layer)
    stops = Stops(module, folder, rank)
    model = wrap()

    def made(step):
        time.sleep(0.01)
        board.note(rank, step)

    with MembersRecorder(model, folder):
        return loop(rank, module, model, made, lambda: board.end, num_parts, stops)


def again(rank, folder, choice, budget_s, end, num_parts):
    module, wrap = wrapped(rank, choice, budget_s, None)
    model = wrap()
    model.replay(read_members_recording(folder, rank, model.world_size))
    return loop(rank, module, model, lambda _: None, lambda: end, num_parts)


def check(folder, outcomes, choice, budget_s, world_size, num_parts=0):
    end = max(max(losses) for _, _, losses in outcomes) + 1
    replayed = run_ranks(again, world_size, folder, choice, budget_s, end, num_parts)
    assert {state for state, _, _ in outcomes} == {state for state, _, _ in replayed}
    assert [own for _, own, _ in outcomes] == [own for _, own, _ in replayed]
    again_of = {step: loss for _, _, losses in replayed for step, loss in losses.items()}  # the ranks' mean, on each
    for _, _, losses in outcomes:
        # what a stopped rank makes of the step in which its peers put it out is no step of the job
        sure = {step: loss for step, loss in losses.items() if step + 1 in losses or step + 1 == end}
        assert sure == {step: again_of[step] for step in sure}
    return [read_members_recording(folder, rank, world_size) for rank in range(world_size)]


@pytest.mark.slow
def test_run_with_killed_stopped_and_restarted_ranks_is_replayed_bit_for_bit(tmp_path):
    with run_job(4, record, tmp_path, Abstain(), None) as job:
        job.walk(10)
        kill_in_backward(job, tmp_path, 2)
        job.walk(10, [0, 1, 3])
        job.start(2)
        job.walk(10)
        job.stop(0)
        job.walk(10, [1, 2, 3])
        job.resume(0)
        job.walk(10)
        kill_in_backward(job, tmp_path, 1, 3)  # two at once
        job.walk(10, [0, 2])
        job.start(1)
        job.start(3)
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    recordings = check(tmp_path, outcomes, Abstain(), None, 4)
    members = recordings[0].members
    sizes = {len(ranks) for step in members.steps for ranks in step.buckets}
    assert sizes >= {2, 3, 4}  # and fewer, where a rank was slow to be heard of
    # some buckets of a step were merged before the change, and others after it
    assert any(len(set(step.buckets)) > 1 for step in members.steps)
    assert [own.started for own in recordings[0].members.healed.values()] == [False]
    assert [own.started for own in recordings[2].members.healed.values()] == [True]


@pytest.mark.slow
def test_rank_that_was_late_before_it_was_killed_gives_the_same_in_the_replay(tmp_path):
    with run_job(3, record, tmp_path, LastOwn(0.5), 0.05) as job:
        job.walk(20)
        kill_in_backward(job, tmp_path, 2)  # its stand-in has submitted what was finished
        job.walk(10, [0, 1])
        job.start(2)
        job.walk(20)
        job.stop(1)
        job.walk(10, [0, 2])
        job.resume(1)
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    recordings = check(tmp_path, outcomes, LastOwn(0.5), 0.05, 3)
    assert any(decision.stood_in and decision.num_gradients > 0 for decision in recordings[2].decisions)


@pytest.mark.slow
def test_rank_that_was_put_out_within_a_pass_remembers_in_the_replay_what_it_had_computed(tmp_path):
    with run_job(3, record, tmp_path, LastOwn(0.5), None) as job:
        job.walk(20)
        with put_out_in_backward(job, tmp_path, 1, [0, 2]):
            (tmp_path / "stops1").touch()  # before it has computed anything again
        job.wait(lambda: not (tmp_path / "stops1").exists(), "it was late in a step that counted")
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    recordings = check(tmp_path, outcomes, LastOwn(0.5), None, 3)
    (healed,) = recordings[1].members.healed
    own = recordings[1].decisions
    assert any(decision.left_at and 0 < decision.num_gradients < 14 for decision in own[:healed])
    assert any(decision.left_at and 0 < decision.num_gradients < 14 for decision in own[healed:])


@pytest.mark.slow
def test_rank_that_comes_back_has_the_buffers_of_its_peer(tmp_path):
    merge = Merge(buffers="local")
    with run_job(3, record, tmp_path, merge, None) as job:
        job.walk(20)
        with put_out_in_backward(job, tmp_path, 1, [0, 2], LAST):  # where nothing asks any more whether it is late
            pass
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    recordings = check(tmp_path, outcomes, merge, None, 3)
    (healed,) = recordings[1].members.healed
    assert any(own.left_at is None and 0 < own.num_gradients < 14 for own in recordings[1].decisions[:healed])


@pytest.mark.slow
@pytest.mark.parametrize(("num_parts", "estimator"), [(3, Abstain()), (8, LastOwn(0.5))], ids=["3", "8"])
def test_pool_of_which_a_killed_or_stopped_rank_had_drawn_is_replayed(tmp_path, num_parts, estimator):
    with run_job(3, record, tmp_path, estimator, None, num_parts) as job:
        job.walk(20)
        kill_in_backward(job, tmp_path, 2)  # of three micro-batches each rank has one, of which some is merged then
        job.walk(10, [0, 1])
        job.start(2)
        job.walk(10)
        with put_out_in_backward(job, tmp_path, 1, [0, 2]):
            pass
        job.walk(10)
        job.meet()
        outcomes = job.finish()
    recordings = check(tmp_path, outcomes, estimator, None, 3, num_parts)
    drawn = [sum(len(own.decisions[step].drawn or ()) for own in recordings) for step in range(20)]
    assert max(drawn) == num_parts
