"""A run as a trace that Perfetto opens: what is drawn is what the rows say, of a run with faults and of odd ones."""

import gzip
import json
import math
from collections import defaultdict

import pytest
import torch
from pages import ODD, a_rank, a_step, write_run

import straggle
from straggle.commands.report import arguments, report
from straggle.lab.world.faults import Kill, Stall
from straggle.lab.world.run import run_world
from straggle.observe.members import HandedOnTrace, MembersWriter, read_members
from straggle.observe.numbers.reader import Trace
from straggle.observe.perfetto import JOB, RANKS, run_events, write_perfetto
from straggle.report import PHASES

NUM_RANKS, STEPS, KILLED, STALLED = 3, 90, 2, 1


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A job of three ranks: one is killed and comes back, one stalls; each writes what it would of a real one."""
    folder = tmp_path_factory.mktemp("run")

    def loop(rank):
        module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        for layer in module:
            layer.register_forward_hook(lambda *_: rank.work(0.01))
        model = straggle.StagedDataParallel(
            module, deadline=0.05, members=straggle.Elastic(min_ranks=1, suspect_s=0.5), links=False
        )
        state, trace = model.register_state(), HandedOnTrace(rank.number, folder / "trace.jsonl")
        step = state or 0
        with MembersWriter(model, folder):
            while step < STEPS:
                with model.step():
                    model(torch.ones(2, 4)).sum().backward()
                trace.add(model.last_report)
                step = model.last_report.step + 1
            model.close()
        trace.close()

    run_world(
        loop, ranks=NUM_RANKS, seed=7, faults=[Stall(STALLED, at_s=0.3, for_s=0.2), Kill(KILLED, at_s=0.9, back_s=0.7)]
    )
    return folder


def events_of(path):
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["traceEvents"]


def check_format(events):
    """The documented fields of each kind of event; slices of a track lie in one another, or one behind the other."""
    tracks = defaultdict(list)
    for event in events:
        fields = {"M": {"args"}, "X": {"ts", "dur", "cat"}, "i": {"ts", "s", "cat"}, "C": {"ts", "args"}}[event["ph"]]
        assert {"ph", "pid", "tid", "name", *fields} <= event.keys()
        assert all(isinstance(event.get(name, 0), int) and event.get(name, 0) >= 0 for name in ("ts", "dur"))
        assert event.get("s", "t") == "t"
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def slices(events, process, track):
    return [own for own in events if own["ph"] == "X" and (own["pid"], own["tid"]) == (process, track)]


def test_slices_of_a_run_lie_in_their_steps_and_add_up_to_its_rows(run_dir, tmp_path):
    events = events_of(write_perfetto(run_dir, tmp_path / "trace.json"))
    reports = list(Trace(run_dir / "trace.jsonl").reports())
    assert any(rank.late for own in reports for rank in own.ranks)
    assert any(own.absent_ranks == (KILLED,) for own in reports)
    check_format(events)
    steps = slices(events, JOB, 1)
    assert [own["name"] for own in steps] == [f"step {own.step}" for own in reports]
    assert [own["dur"] for own in steps] == pytest.approx([1e6 * own.seconds for own in reports], abs=1.0)
    for rank in range(NUM_RANKS):
        own = slices(events, RANKS, rank + 1)
        outer = [part for part in own if part["name"].startswith("step ")]
        assert [(part["ts"], part["dur"]) for part in outer] == [(part["ts"], part["dur"]) for part in steps]
        for step, made in zip(outer, reports, strict=True):
            row = made.ranks[rank]
            inner = [part for part in own if part is not step and _lies_in(part, step)]
            seconds = {part["name"]: part["dur"] / 1e6 for part in inner}
            assert sum(seconds.values()) == pytest.approx(made.seconds, abs=2e-6)
            if row.absent:
                assert seconds.keys() == {"absent"}
                continue
            assert step["args"]["reach"] == pytest.approx(row.reach)
            of_row = {name: getattr(row, f"{name}_s") for name in (*PHASES, "wait")}
            if math.fsum(value for value in of_row.values() if value == value) <= made.seconds:
                known = {name: value for name, value in of_row.items() if value > 1e-5}  # NaN is not
                assert {name: seconds.get(name, 0.0) for name in known} == pytest.approx(known, abs=2e-6)
                if all(value == value for value in of_row.values()):
                    assert seconds.get("merge", 0.0) == pytest.approx(made.network_s, abs=2e-6)
        assert len(own) == len(outer) + sum(
            1 for part in own for step in outer if part is not step and _lies_in(part, step)
        )


def _lies_in(part, step):
    return not part["name"].startswith("step ") and (
        step["ts"] <= part["ts"] + part["dur"] / 2 < step["ts"] + step["dur"]
    )


def test_cuts_and_views_are_marked_on_the_tracks_of_their_ranks(run_dir, tmp_path):
    events = events_of(write_perfetto(run_dir, tmp_path / "trace.json.gz"))
    tracks = {own["tid"]: own["args"]["name"] for own in events if own["name"] == "thread_name" and own["pid"] == RANKS}
    assert tracks == {rank + 1: f"rank {rank}" for rank in range(NUM_RANKS)}
    marks = defaultdict(list)
    for own in events:
        if own["ph"] == "i":
            marks[own["tid"] - 1].append(own["name"])
    reports = list(Trace(run_dir / "trace.jsonl").reports())
    for rank in range(NUM_RANKS):
        cuts = [name for name in marks[rank] if name.startswith(("cut in", "stood in for"))]
        late = [own.ranks[rank] for own in reports if own.ranks[rank].late]
        assert cuts == [f"{'stood in for' if own.stood_in else 'cut'} in {own.cause}" for own in late]
    assert [name.partition(":")[0] for name in marks[KILLED] if name.startswith(("left", "joined"))] == [
        "left",
        "joined",
    ]
    views = slices(events, JOB, 2)
    changes = read_members(run_dir)
    assert [own["name"].partition(":")[0] for own in views] == [f"view {own.generation}" for _, own in changes]
    steps = {own["name"]: own for own in slices(events, JOB, 1)}
    for view, (_, change) in zip(views, changes, strict=True):  # in the step that was being merged, or at its edge
        step = steps[f"step {change.step}"]
        assert step["ts"] - 1e5 <= view["ts"] + view["dur"] <= step["ts"] + step["dur"] + 1e5


def test_a_break_between_two_steps_is_a_gap():
    steps = [(a_step(step, [a_rank(0)], seconds=1.0), 100.0 + step + 50.0 * (step >= 3)) for step in range(5)]
    begins = [own["ts"] for own in run_events(steps) if own["ph"] == "X" and own["pid"] == JOB]
    assert begins == [0.0, 1e6, 2e6, 53e6, 54e6]


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_are_traces_too(name, tmp_path):
    events = events_of(write_perfetto(write_run(tmp_path, ODD[name]), tmp_path / "out" / "trace.json"))
    check_format(events)
    assert len(slices(events, JOB, 1)) == len(ODD[name])


def test_command_writes_a_trace_in_either_spelling(tmp_path, capsys):
    write_run(tmp_path, ODD["one step"])
    for number, words in enumerate((["--perfetto", str(tmp_path / "0.json")], [f"perfetto={tmp_path}/1.json"])):
        assert report([str(tmp_path), *words]) == 0
        assert f"trace: {tmp_path}/{number}.json (0.0 MB)" in capsys.readouterr().out
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/a", "perfetto=a.json", "steps=3"], "one run and all of its steps; leave steps= out"),
        (["runs/a", "perfetto="], "perfetto=: a path is needed"),
        (["runs/a", "--perfetto"], "perfetto=: a path is needed"),
    ],
)
def test_what_a_trace_cannot_have_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        arguments(words)


def test_run_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace.jsonl: no such file; give the run_dir"):
        write_perfetto(tmp_path, tmp_path / "trace.json")
