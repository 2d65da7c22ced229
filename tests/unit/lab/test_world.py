"""The simulated world: one order of events for each seed, and what must hold in all of them is found if it does not."""

import ast
import gc
import math
import re
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from schedules import Schedule, directed, draw, problems_of
from schedules import main as sweep
from torch import nn

import straggle
from straggle import Elastic, StagedDataParallel, world
from straggle.lab.world.faults import Clock, Cut, Freeze, Kill, Notice, Stall, StoreAway
from straggle.lab.world.run import Broken, parameters_of, run_world
from straggle.merge.late.sides import MergeSide

PACKAGE = Path(straggle.__file__).parent
OUTSIDE = ("lab", "commands", "observe", "integrations")  # these are not part of a simulated rank
WAIT_OR_TELL_TIME = {
    "time": {"monotonic", "sleep", "time"},
    "threading": {"Barrier", "Condition", "Event", "Lock", "RLock", "Semaphore", "Thread", "Timer"},
}


def small(rank, steps=4, **options):
    """A loop of a user's; its steps take 70 ms, and the parameters are those at its end."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in module:
        layer.register_forward_hook(lambda *_: rank.work(0.01))
        layer.weight.register_hook(lambda _: rank.work(0.01))
    model = StagedDataParallel(module, deadline=0.15, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = model.register_state(optimizer=optimizer)
    while step < steps:
        rank.work(0.01)
        with model.step():
            model(torch.full((2, 4), float(rank.number + step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step = model.last_report.step + 1
        rank.note(step=step, parts=[own.reach for own in model.last_report.ranks])
    model.close()
    return parameters_of(module)


def test_seed_is_a_schedule_and_another_seed_is_another():
    runs = [run_world(small, ranks=2, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].schedule != runs[2].schedule
    assert runs[0].results == runs[2].results  # nobody is late


def test_minute_of_a_stall_passes_in_moments_and_the_peers_go_on():
    run = run_world(small, ranks=3, faults=[Stall(1, at_s=0.1, for_s=60.0)])
    assert len(set(run.results)) == 1
    assert 60 < run.seconds < 70
    assert all(note["at"] < 2.0 for note in run.notes[0])
    assert any(note["parts"][1] < 1 for note in run.notes[0])


def test_rank_that_is_killed_and_one_that_is_frozen_come_back_as_members():
    faults = [Kill(1, at_s=0.4, back_s=3.0), Freeze(2, at_s=4.5, for_s=4.0)]

    def loop(rank):
        return small(rank, 150, members=Elastic(min_ranks=1), links=False)

    run = run_world(loop, ranks=3, faults=faults)
    assert len(set(run.results)) == 1
    assert run.notes[1][-1]["step"] == run.notes[2][-1]["step"] == 150


@pytest.mark.parametrize("fault", [Kill(1, at_s=1.45), Freeze(1, at_s=1.54, for_s=100.0)])
def test_state_of_which_nobody_waits_for_the_rest_is_not_on_its_way_any_more(fault):
    """Nor is it for a newcomer that is gone before it has come for it: the threads end with the job."""

    def loop(rank):
        return small(rank, 40, members=Elastic(min_ranks=1), links=False)

    run = run_world(loop, ranks=3, seed=1, faults=[Kill(1, at_s=0.4, back_s=1.0), fault], end_s=20.0)
    assert run.results[0] == run.results[2] is not None


def test_peers_of_a_rank_that_is_killed_end_with_an_error_that_names_it():
    run = run_world(small, ranks=3, faults=[Kill(1, at_s=0.2)])
    assert run.results[1] is None
    for result in (run.results[0], run.results[2]):
        assert isinstance(result, straggle.PeerFailed)
        assert "no answer from ranks [1]" in str(result)
    assert run.seconds < 30


def test_model_that_is_not_closed_ends_with_its_loop_as_with_a_process():
    def loop(rank):
        with StagedDataParallel(nn.Linear(2, 2)).step():
            rank.work(0.01)

    assert run_world(loop, ranks=2).seconds < 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 2, "faults": [Kill(2, at_s=0.1)]}, r"Kill\(rank=2, .*there is no rank 2 of 2"),
    ],
)
def test_world_of_no_ranks_and_faults_of_ranks_that_are_not_there_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        run_world(small, **arguments)


@pytest.mark.parametrize("word", ["bad", "seeds=abc", "nosuch=3", "minutes="])
def test_sweep_refuses_a_word_that_it_does_not_know(word, capsys):
    assert sweep([word]) == 2
    assert capsys.readouterr().out.startswith(f"{word}: give seeds=N")


def test_faults_of_one_kind_that_overlap_end_with_the_last():
    run = run_world(
        small, ranks=2, faults=[Freeze(1, 0.1, 5.0), Freeze(1, 0.2, 0.1), Cut(0, 0.3, 9.0), Cut(0, 0.4, 0.1)]
    )
    assert len(set(run.results)) == 1
    assert run.seconds > 9.3


def _waits_with_a_lock(_rank):
    with world.Lock():
        world.dist.distributed_c10d._get_default_store().check(["key"])


def _asks_for_another_sum(rank):
    group = world.dist.new_group(range(rank.size), timedelta(seconds=10), "gloo")
    group.allreduce([torch.zeros(1 + rank.number)]).wait()


def _waits_for_nobody(_rank):
    world.Event().wait()


def _has_a_thread_that_fails(_rank):
    world.Thread(target=lambda: [].pop(), name="failing").start()
    world.sleep(1.0)


def _leaves_a_thread(_rank):
    world.Thread(target=lambda: world.sleep(1000.0), name="left").start()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (_waits_with_a_lock, "asks the store while it holds a lock"),
        (_asks_for_another_sum, "on one rank and"),
        (_waits_for_nobody, "no thread can go on, and no timer is left"),
        (_has_a_thread_that_fails, "thread failing ended by IndexError"),
        (_leaves_a_thread, "threads are left 60 s after all loops were over"),
    ],
)
def test_what_must_never_be_breaks_the_world_with_each_threads_place(loop, words):
    with pytest.raises(Broken, match=words) as caught:
        run_world(loop, ranks=2)
    assert "rank 0, " in str(caught.value)


def _breaks(seed):
    try:
        run_world(small, ranks=2, seed=seed, faults=[Stall(1, at_s=0.1, for_s=0.163)], longest_s=30.0)
    except Broken:
        return True
    return False


def test_notification_that_is_missing_is_found_in_the_order_that_needs_it(monkeypatch):
    def merged(self, current):
        own = self.step_merged
        self.step_merged = type("Silent", (), {"notify_all": lambda _: None})()
        before(self, current)
        self.step_merged = own

    before = MergeSide.merged
    monkeypatch.setattr(MergeSide, "merged", merged)
    assert any(map(_breaks, range(60)))


@pytest.mark.parametrize("seed", [1, 2, 3, 7, 16])  # the last one is of members over nccl
def test_what_must_hold_does_in_schedules_that_are_drawn(seed):
    schedule = replace(draw(seed), steps=6)
    assert problems_of(schedule) == []


@pytest.mark.parametrize("number", [-7, -21, -31])
def test_what_must_hold_does_in_some_schedules_that_are_written_by_hand(number):
    assert problems_of(directed(number)) == []


FOUND: list[Schedule] = [
    # gradients are kept over two steps: who comes back, as a new process or in place, has those of its peers, too
    Schedule(1, 3, 12, True, zero_every=3, faults=(Kill(1, 0.4, 0.5),)),
    Schedule(2, 3, 30, True, max_lag=2, zero_every=3, faults=(Stall(1, 0.4, 2.0),)),
    Schedule(3, 3, 30, True, zero_every=5, faults=(Freeze(1, 0.6, 3.0),)),
    # all rows were sent before any first backward pass: who decided later what it keeps, did otherwise than who did not
    Schedule(
        281873071,
        4,
        4,
        True,
        "0.05",
        granularity="microbatch",
        check_every=1,
        num_microbatches=3,
        in_buckets=False,
        slow=(1.0, 1.0, 4.0, 1.5),
        leaves=((1, 1),),
        zero_every=3,
        absence_gain=1.0,
        faults=(Cut(0, 1.121, 8.0),),
    ),
    # not up to date when all loops end: its stand-in has begun the step after the last, and is left alone in it
    Schedule(
        2,
        4,
        12,
        True,
        "0.05",
        "Abstain",
        num_parts=5,
        joins=True,
        nan=0.05,
        slow=(4.0, 1.0, 4.0, 1.0),
        away=((2, 1, 3.0),),
        faults=(Freeze(0, 0.203, 2.2), Freeze(0, 1.018, 0.251)),
    ),
    # let in again, its stand-in waits for the view after the last step when the loop is over: it ends with the model
    Schedule(
        5135,
        3,
        12,
        True,
        "None",
        num_microbatches=3,
        slow=(1.0, 1.0, 1.5),
        away=((0, 10, 0.5),),
        faults=(Cut(0, 2.429, 3.0), Freeze(0, 0.069, 2.2, turns=119)),
    ),
    # the store comes back empty: who had a share of the pool is not known there, and is not asked for ever
    Schedule(
        5213,
        2,
        6,
        True,
        "FirstK",
        "LastMerged",
        max_lag=1,
        num_parts=5,
        joins=True,
        away=((0, 1, 0.1), (1, 1, 0.5)),
        faults=(Cut(0, 0.854, 0.086), Freeze(1, 0.411, 0.867), StoreAway(1.438, 1.0, empties=True)),
    ),
    # no rank has merged anything for a layer whose gradient is kept: in the step after it is still a kept one
    Schedule(5124, 3, 25, deadline="0.05", num_parts=8, joins=True, nan=0.05, zero_every=3),
    # killed while it ended, with all others gone, and started again: it is no live member for itself
    Schedule(
        700134,
        2,
        25,
        True,
        "0.15",
        "MovingAverage",
        "microbatch",
        wire_dtype="bfloat16",
        num_microbatches=3,
        weighs=True,
        in_buckets=False,
        slow=(1.0, 1.0),
        faults=(Kill(0, 0.979, 0.5), Kill(0, 7.332, 0.5)),
    ),
    # cut off in the first step, which its peer makes again without it: other histories are no reason to end
    Schedule(
        300033,
        2,
        6,
        True,
        "0.05",
        "MovingAverage",
        wire_dtype="bfloat16",
        check_every=1,
        weighs=True,
        slow=(1.0, 4.0),
        away=((0, 0, 3.0),),
        faults=(Cut(0, 0.019, 8.0), Freeze(0, 0.299, 1.9)),
    ),
    # cut off in its first step, rank 0 comes back when all others have ended: JobDone, not min() of no members
    Schedule(
        100046,
        3,
        12,
        True,
        "0.15",
        "LastMerged",
        max_lag=1,
        joins=True,
        slow=(1.5, 1.0, 1.0),
        faults=(Cut(0, 0.429, 8.0), Freeze(0, 1.083, 0.01), Freeze(1, 0.036, 1.9)),
    ),
    # let in again, but with no state yet, while its stand-in merges six steps: their deadlines are its peers'
    Schedule(
        229737379,
        3,
        12,
        True,
        "FirstK",
        "MovingAverage",
        wire_dtype="bfloat16",
        check_every=1,
        num_microbatches=3,
        weighs=True,
        joins=True,
        slow=(4.0, 1.0, 1.0),
        away=((0, 3, 20.0), (1, 10, 3.0)),
        buffers="mean",
        faults=(Kill(1, 0.143, 6.0), Stall(0, 1.034, 15.0), Stall(1, 1.67, 1.794)),
    ),
    # its own code raises while the store is empty: its thread that leaves ends with a word, and with no error
    Schedule(
        31000001,
        2,
        12,
        True,
        "None",
        "LastMerged",
        "step",
        check_every=1,
        weighs=True,
        joins=True,
        slow=(1.0, 4.0),
        away=((1, 2, 0.1), (0, 10, 0.5)),
        raises=(0, 6),
        buffers="rank0",
        faults=(StoreAway(1.604, 1.0, empties=True),),
    ),
    # what rank 0 had given when it was killed was half of its micro-batches: whoever checks it knew the whole alone
    Schedule(
        1156,
        4,
        17,
        True,
        "Auto",
        max_lag=0,
        wire_dtype="bfloat16",
        num_microbatches=2,
        slow=(1.5, 1.5, 1.0, 1.0),
        absence_gain=math.inf,
        give_up_s=18.0,
        backend="cuda:nccl2",
        faults=(Kill(0, 3.356, 6.0, turns=183),),
    ),
    # rank 3 has not seen the view in which rank 1 left because it was too far behind: it is not called silent there
    Schedule(
        9266,
        4,
        6,
        True,
        "Auto",
        "LastMerged",
        max_lag=2,
        wire_dtype="bfloat16",
        check_every=1,
        slow=(1.0, 1.0, 1.0, 4.0),
        away=((1, 2, 20.0),),
        faults=(
            Freeze(2, 0.688, 1.9),
            Cut(0, 2.27, 3.0, turns=79),
            Kill(0, 0.055, 0.01),
            Kill(0, 2.205, 2.0),
            Freeze(3, 1.549, 0.091),
        ),
    ),
    # the store was emptied when rank 2 had seen that all are there, and before it asked for their names: it waited
    Schedule(
        91000139,
        4,
        12,
        True,
        deadline="0.15",
        estimator="LastMerged",
        check_every=1,
        num_parts=4,
        weighs=True,
        slow=(1.5, 1.0, 1.0, 1.0),
        away=((1, 1, 0.5),),
        in_buckets=False,
        collectives_every=3,
        zero_every=2,
        grace_s=0.02,
        absence_gain=math.inf,
        give_up_s=18.0,
        faults=(Freeze(2, 0.005, 1.278), StoreAway(1.112, 0.05, empties=True)),
    ),
    # peers had merged a step before the newcomer had any deadline from them: its report of it had none
    Schedule(
        62000742,
        3,
        12,
        True,
        deadline="0.15",
        estimator="MovingAverage",
        max_lag=2,
        check_every=3,
        num_parts=8,
        joins=True,
        slow=(1.0, 1.0, 4.0),
        away=((1, 3, 3.0), (0, 11, 3.0)),
        collectives_every=1,
        zero_every=1,
        grace_s=0.02,
        suspect_s=2.0,
        absence_gain=1.1,
        give_up_s=18.0,
        faults=(
            StoreAway(0.327, 12.0, empties=False),
            Kill(0, 2.538, 0.5, turns=57),
            StoreAway(2.806, 12.0, empties=False),
            StoreAway(1.1400000000000001, 0.05, empties=True),
        ),
    ),
    # a newcomer's report of the step that was merged when its state came had the deadline's shadow as it knew it before
    Schedule(
        62000743,
        3,
        25,
        True,
        deadline="Shadow",
        max_lag=8,
        joins=True,
        slow=(1.0, 4.0, 4.0),
        suspect_s=0.5,
        faults=(Kill(0, 0.37981811481550787, 0.3, turns=52),),
    ),
    # what the last member had on its way was lost in a step whose gradients are kept over several: none or zeros, alike
    Schedule(1, 2, 8, True, "None", estimator="Zero", zero_every=3, faults=(Kill(0, 0.3, 2.0),)),
    Schedule(2, 2, 8, True, "None", estimator="Zero", zero_every=3, faults=(Kill(0, 0.3, 2.0),)),
    # the only member was told to end: ranks that were out heard that the job had done all its work
    Schedule(
        3622,
        3,
        25,
        True,
        "0.12",
        slow=(4.0, 4.0, 1.0),
        away=((2, 2, 20.0),),
        faults=(Freeze(0, 1.2, 5.0), Notice(1, 0.7)),
    ),
    # a thread that was to give its rank's state waited for a view though the model was closed
    Schedule(
        92000893,
        3,
        6,
        True,
        deadline="0.05",
        estimator="MovingAverage",
        max_lag=2,
        wire_dtype="bfloat16",
        num_parts=8,
        in_buckets=False,
        slow=(1.0, 4.0, 1.0),
        raises=(1, 3),
        zero_every=1,
        backend="cuda:nccl2",
        faults=(
            Stall(1, 0.464, 3.0, turns=64),
            Kill(0, 1.514, 0.01),
            Clock(0, 4525.782, 1.0000591579757465),
            Clock(1, 59244.694, 1.0000299049783652),
            Clock(2, 20666.202, 1.0000344667243712),
        ),
    ),
    # the members' loops ended just after the store was restarted: they left it empty, and rank 2 heard of nobody
    *(
        Schedule(
            92000372,
            3,
            12,
            True,
            deadline="0.05",
            max_lag=2,
            weighs=True,
            in_buckets=False,
            slow=(1.0, 4.0, 1.0),
            away=((2, 11, 20.0), (2, 3, 20.0)),
            buffers="mean",
            faults=(
                Freeze(0, 1.193, 0.172),
                Clock(0, 86516.352, 1.0000547300202192),
                Clock(1, 15395.412, 0.9999886461882453),
                Clock(2, 812.964, 1.0000370836029104),
                StoreAway(at_s, 0.05, empties=True),
            ),
        )
        for at_s in (1.58, 1.679, 1.7)
    ),
]


@pytest.mark.parametrize("schedule", FOUND, ids=lambda schedule: f"{schedule.seed}")
def test_what_was_found_stays_mended(schedule):
    assert problems_of(schedule) == []


@pytest.mark.parametrize("with_it", [(), (Cut(1, 0.02, 3.0),), (Freeze(1, 0.02, 3.0),)], ids=["alone", "cut", "frozen"])
@pytest.mark.parametrize("at_s", [0.005, 0.01, 0.02, 0.03, 0.04])
def test_job_begins_though_its_store_is_restarted_while_its_ranks_wrap_the_model(at_s, with_it):
    faults = (StoreAway(at_s, 1.0, empties=True), *(replace(fault, at_s=at_s) for fault in with_it))
    schedule = Schedule(7, 2, 5, True, "Auto", wire_dtype="bfloat16", zero_every=3, give_up_s=18.0, faults=faults)
    assert problems_of(schedule) == []


def test_nothing_is_left_of_a_rank_that_was_killed():
    ranks = []

    def loop(rank):
        layer = torch.nn.Linear(4, 4)
        layer.weight.register_hook(lambda gradient: rank.work(0.01) or gradient)
        model = straggle.StagedDataParallel(layer, members=straggle.Elastic(min_ranks=1))
        ranks.append(weakref.ref(rank))
        for _ in range(8):
            with model.step():
                model(torch.ones(2, 4)).sum().backward()
        model.close()

    run_world(loop, ranks=2, seed=1, faults=[Kill(1, at_s=0.04)])
    gc.collect()
    assert [rank() for rank in ranks] == [None, None]


def test_example_of_the_readme_runs():
    (block,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "lab/world/README.md").read_text(), re.DOTALL)
    names = {"torch": torch, "straggle": straggle}
    exec(block, names)
    assert names["run"].results == (None, None, None)
    assert names["run"].seconds > 2.9


@pytest.mark.parametrize("moment", range(0, 12, 3))
def test_example_of_the_page_on_schedules_holds_at_each_moment(moment):
    (block,) = re.findall(
        r"```python\n(.*?)```", (PACKAGE.parent / "tests/support/SCHEDULES.md").read_text(), re.DOTALL
    )
    names = {"torch": torch, "straggle": straggle, "pytest": pytest, "run_world": run_world, "Kill": Kill}
    exec(block, names)
    names["test_peers_of_a_rank_that_is_killed_go_on"](moment)


def _uses(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module in WAIT_OR_TELL_TIME:
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_waits_or_tells_time_asks_the_world():
    """A room that asks the clock or makes a thread by itself would stand still in a simulated world, or never end."""
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in OUTSIDE]
    found = {
        f"{path.relative_to(PACKAGE)}: {module}.{name}"
        for path in files
        if path.name != "world.py"
        for module, name in _uses(path)
        if name in WAIT_OR_TELL_TIME.get(module, ())
    }
    assert len(files) > 100
    assert not found


WAYS = {  # by its kind, what a wait is called on; `straggle/waits.py` says when each is the one to take
    "a condition": {"wait": {"_wakes", "step_merged"}, "wait_for": {"_changed", "step_merged"}},
    "an event that ends or wakes a thread": {"wait": {"_closing", "_stopping", "_wake", "_turn", "_come"}},
    "a collective": {
        "wait": {"work", "_work", "local", "all_gather()", "all_reduce()", "send()", "recv()"}
        | {"channel", "_channel", "self", "_completion", "_calls", "barrier()", "reconfigure()"}
    },
    "a device": {"wait": {"_device"}},
    "an answer": {"result": {"_answer", "answer", "launched", "_launch()", "ahead", "submit()"}},
    "draws of a pool, on the training thread": {"wait": {"draws"}},
}


def _receiver(node):
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=func):
            return f"{_receiver(func)}()"
    return ""


def _waits_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, name = _receiver(node.func.value), node.func.attr
            of_text = isinstance(node.func.value, ast.Constant) or of == "path"
            if name in ("wait", "wait_for", "result") or (name == "join" and not of_text) or of == "world":
                yield of, name


def test_what_waits_waits_in_one_of_few_ways():
    """Another loop that sleeps, or joins a thread without a limit, is one more place where a rank may wait for ever."""
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in OUTSIDE]
    found = [(path, *own) for path in files if path.name not in ("world.py", "waits.py") for own in _waits_of(path)]
    waits = [own for own in found if own[1] != "world" or own[2] in ("sleep", "pause")]
    strange = [own for own in waits if not any(own[1] in ways.get(own[2], ()) for ways in WAYS.values())]
    assert len(waits) > 40
    assert not strange
