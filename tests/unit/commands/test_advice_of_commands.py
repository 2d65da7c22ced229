"""The advice of errors about a command line can be followed: it is refused, and what the text says is accepted."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
from advice import pattern
from omegaconf import OmegaConf
from torch import nn
from training import TINY

from straggle.commands import report, watch
from straggle.commands.configuration import config as configurations
from straggle.commands.configuration.config import load
from straggle.commands.plain_args import Words
from straggle.commands.saved import run_dir
from straggle.commands.saved.replaying import recorded
from straggle.lab.sharding import Sharded, blocks_of
from straggle.lab.workloads.text import Text

pytestmark = pytest.mark.slow  # some fifty configurations are composed, a fifth of a second each


def train(*keys):
    """The command `train` with a small workload."""
    return lambda path: load("train", [*TINY, *(key.format(path) for key in keys)])


def compare(*keys):
    return lambda _: load("compare", [*TINY, *keys])


def checked(word):
    """The command `check`; its complaint as an error."""
    complaint = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(complaint):
        patch.setattr(sys, "argv", ["straggle", word])
        if configurations.main():
            raise ValueError(complaint.getvalue())


def with_a_checkpoint(path):
    (path / "checkpoint" / "step1").mkdir(parents=True)
    (path / "checkpoint" / "step1" / "state.json").write_text("{}")
    return train("resume=true", "run_dir={}")(path)


def repeat_of(path):
    return recorded(load("train", [*TINY, f"run_dir={path / 'again'}", f"replay={path / 'earlier'}"]))


def with_a_run(*keys, folder="decisions"):
    """In a folder with an earlier run, whose ``run_dir`` it is."""

    def way(path):
        (path / "earlier" / folder).mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create({"steps": 3}), path / "earlier" / "config.yaml")
        return train(*keys)(path)

    return way


def repeat(source, target):
    def way(path):
        with_a_run()(path)
        return recorded(load("train", [*TINY, f"run_dir={path / target}", f"replay={path / source}"]))

    return way


def repeat_of_sharded(path):
    with_a_run()(path)
    OmegaConf.save(OmegaConf.create({"steps": 3, "parallel": {"shards": 2}}), path / "earlier" / "config.yaml")
    return repeat_of(path)


def unwritable(place):
    def way(path):
        (path / "file").write_text("")
        run_dir.check_run_dir(path / place)

    return way


def words(words, *names):
    return lambda path: words([name.format(path) for name in names])


def script(path):
    (path / "train.py").write_text("")
    return watch.arguments([str(path / "train.py")])


COMMANDS = {
    "{} is no key=value, such as steps=10": (train("steps"), train("steps=10")),
    "unknown option {}; keys are written without dashes, such as steps=10": (train("--steps=10"), train("steps=10")),
    "run_dir=: give a folder, such as runs/mine": (train("run_dir="), train("run_dir=runs/mine")),
    "{}={}: must be a list of numbers, such as [0,1]": (
        train("faults.slow.ranks=3"),
        train("faults.slow.ranks=[0,1]"),
    ),
    "{}={}: must be a number": (train("faults.slow.factor=twice"), train("faults.slow.factor=2")),
    "no command {} with a configuration: choose one of {}": (
        lambda _: checked("run"),
        lambda _: checked("simulate"),
    ),
    "{}={}: must be an integer of at least {}": (train("steps=0"), train("steps=1")),
    "{}={}: must be {}": (train("report=3"), train("report=false")),
    "{} has no value: leave out what takes it away, such as ~{}": (train("~report"), train()),
    "methods.{}={}: must be parts, such as {deadline: {q: 0.5}}": (
        compare("+methods.other=3"),
        compare("deadline=quantile", "+methods.other={deadline: {q: 0.5}}"),
    ),
    "{}={}: choose one of {}": (train("deadline=soon"), train("deadline=fixed")),
    "${all_ranks_but:{}}: must be an integer of at least 0": (
        train("deadline=first_k", "deadline.k=${{all_ranks_but:-1}}"),
        train("deadline=first_k", "deadline.k=${{all_ranks_but:0}}"),
    ),
    "its own processes stay; leave members out": (
        with_a_run("members=elastic", "replay={}/earlier"),
        with_a_run("replay={}/earlier"),
    ),
    "replay={}: no recorded run there; give the run_dir of an earlier one": (
        train("replay={}/nowhere"),
        with_a_run("replay={}/earlier"),
    ),
    "resume=true and replay=... exclude each other: a replay begins at step 0": (
        with_a_run("resume=true", "replay={}/earlier"),
        with_a_run("replay={}/earlier"),
    ),
    "resume={}: choose one of true, false, auto": (
        train("resume=maybe"),
        train("resume=false"),
        train("resume=auto", "run_dir={}/new"),
    ),
    "work={}: choose one of {}": (train("work=given"), train("work=dealt")),
    "work=pulled needs num_microbatches above 1": (
        train("work=pulled", "num_microbatches=1"),
        train("work=pulled", "num_microbatches=2"),
    ),
    "{} and parallel=sharded exclude each other: {}; leave {} out": (
        train("parallel=sharded", "rebalance=by_speed"),
        train("parallel=sharded"),
    ),
    "start the run by ./launch.sh or by `straggle launch --replica-size {}`": (
        lambda _: Sharded(2).check_launched(1),
        lambda _: Sharded(2).check_launched(2),
    ),
    "shards is {}; give at least 2 ranks for a copy, or parallel=none": (
        train("parallel=sharded", "parallel.shards=1"),
        train("parallel=sharded", "parallel.shards=2"),
        train("parallel=none"),
    ),
    "{} ranks cannot be dealt out to replicas of {}: start {} (WORKERS), or set parallel.shards": (
        lambda _: Sharded(3).replicas(4),
        lambda _: (Sharded(3).replicas(6), Sharded(2).replicas(4)),
    ),
    "{} has no blocks to shard: choose workload=text, or parallel=none": (
        lambda _: blocks_of(nn.Linear(1, 1)),
        lambda _: blocks_of(Text().model()),
    ),
    "scenarios={}: choose of {}": (compare("scenarios=[nobody]"), compare("scenarios=[none,slow_rank]")),
    "methods={}: ddp must be among them, for comparison": (
        compare("methods=[straggle]"),
        compare("methods=[ddp,straggle]"),
    ),
    "replay={} is run_dir itself, which this run would overwrite: give another run_dir": (
        repeat("earlier", "earlier"),
        repeat("earlier", "again"),
    ),
    "replay={}: its model was sharded, which no replay is: give a run of parallel=none": (
        repeat_of_sharded,
        lambda path: (with_a_run()(path), repeat_of(path)),
    ),
    "replay={}: no recorded run; it is the run_dir of an earlier run": (
        lambda path: (with_a_run()(path), (path / "earlier" / "config.yaml").unlink(), repeat_of(path)),
        lambda path: (with_a_run()(path), repeat_of(path)),
    ),
    "resume=true: there is no checkpoint in run_dir={}": (
        train("resume=true", "run_dir={}/new"),
        with_a_checkpoint,
    ),
    "{}={}: must be a finite number from 0 on": (
        lambda _: load("simulate", ["network=constant", "network.seconds=-1"]),
        lambda _: load("simulate", ["network=constant", "network.seconds=0"]),
    ),
    "run_dir={} cannot be written ({}): give another run_dir": (unwritable("file/run"), unwritable("run")),
    "steps={}: {} is no step; give numbers such as steps=0,30": (
        words(report.arguments, "{}", "steps=first"),
        words(report.arguments, "{}", "steps=0,30"),
    ),
    "one RUN_DIR is needed, not {}; a second one is given as compare=RUN_DIR": (
        words(report.arguments, "{}", "{}/other"),
        words(report.arguments, "{}", "compare={}/other"),
    ),
    "{} is no file: give the script that torchrun would run, or -m and a module": (
        words(watch.arguments, "{}/train.py"),
        script,
        words(watch.arguments, "-m", "json.tool"),
    ),
    "-m {}: there is no such module here; give the one that torchrun would run": (
        words(watch.arguments, "-m", "no_package.train"),
        words(watch.arguments, "-m", "json.tool"),
    ),
    "{}={}: choose one of true, false": (
        lambda _: Words.of(["json=maybe"], ["json"]).flag("json"),
        lambda _: Words.of(["json=true"], ["json"]).flag("json"),
    ),
    "perfetto= and {}=: the trace has one run and all of its steps; leave {}= out": (
        words(report.arguments, "{}", "perfetto=trace.json", "steps=0"),
        words(report.arguments, "{}", "perfetto=trace.json"),
    ),
    "unknown option {}; options are written key=value, with keys {}": (
        words(report.arguments, "{}", "--steps"),
        words(report.arguments, "{}", "steps=0"),
    ),
}


@pytest.mark.parametrize("says", COMMANDS)
def test_command_line_that_the_text_allows_is_accepted(says, tmp_path):
    refused, *followed = COMMANDS[says]
    with pytest.raises(ValueError, match=pattern(says)):
        refused(tmp_path)
    for number, way in enumerate(followed):
        (folder := tmp_path / str(number)).mkdir()
        way(folder)
