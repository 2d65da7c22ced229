"""A recorded run's folder may be another user's: what its configuration builds, and what ours shows of our secrets."""

import pytest
from omegaconf import OmegaConf
from repository import ROOT
from training import TINY

from straggle import LateHandling
from straggle.advise.answer import configured_late_handling
from straggle.commands.configuration.checks import check_targets
from straggle.commands.configuration.config import load
from straggle.commands.configuration.schema import ConfigurationError
from straggle.commands.saved.replaying import decisions_of, recorded


def replay_of(tmp_path, changed, *own):
    """The configuration with which a folder is replayed, whose recorded one was ``changed``."""
    source = tmp_path / "theirs"
    decisions_of(source).mkdir(parents=True)
    theirs = OmegaConf.create(OmegaConf.to_container(load("train", TINY)))
    OmegaConf.save(OmegaConf.merge(theirs, changed), source / "config.yaml")
    return recorded(load("train", [f"replay={source}", f"run_dir={tmp_path / 'run'}", *own]))


@pytest.mark.parametrize(
    ("changed", "key", "target"),
    [
        ({"deadline": {"_target_": "os.system"}}, "deadline", "os.system"),
        (
            {"workload": {"_target_": "straggle.commands.train.os.system"}},
            "workload",
            "straggle.commands.train.os.system",
        ),
        ({"workload": {"_target_": "straggle.commands.train.Path"}}, "workload", "straggle.commands.train.Path"),
        ({"workload": {"_target_": "straggle.commands.train.train"}}, "workload", "straggle.commands.train.train"),
        ({"optimizer": {"_target_": "torch.load"}}, "optimizer", "torch.load"),
        ({"optimizer": {"_target_": "torch.optim.adam.Tensor"}}, "optimizer", "torch.optim.adam.Tensor"),
        ({"merge": {"buffers": {"_target_": "subprocess.Popen"}}}, "merge.buffers", "subprocess.Popen"),
        ({"stages": [{"a": {"_target_": "shutil.rmtree"}}]}, "stages.0.a", "shutil.rmtree"),
        ({"deadline": "${oc.create:${text}}", "text": "{_target_: os.remove}"}, "deadline", "os.remove"),
        ({"unused": {"_target_": "os.remove"}, "deadline": "${unused}"}, "deadline", "os.remove"),
    ],
)
def test_replay_builds_no_class_of_others(tmp_path, changed, key, target):
    with pytest.raises(ConfigurationError) as refused:
        replay_of(tmp_path, changed)
    assert f"theirs: {key}._target_={target}: only classes of straggle and torch.optim" in str(refused.value)
    assert f"name it on the command line too: {key}._target_={target}" in str(refused.value)


@pytest.mark.parametrize(("own", "steps"), [((), 600), (("steps=4",), 4), (("steps=700",), 600)])
def test_replay_has_the_steps_of_the_recorded_run_unless_it_is_to_have_fewer(tmp_path, own, steps):
    assert replay_of(tmp_path, {"steps": 600}, *own).steps == steps


def test_replay_of_a_run_that_another_version_recorded_says_so(tmp_path):
    with pytest.raises(ConfigurationError, match="repeat a run with its own version"):
        replay_of(tmp_path, {"workload": {"_target_": "straggle.workloads.DigitsWorkload"}})


def test_replay_builds_what_its_own_command_line_names(tmp_path):
    own = ("deadline=fixed", "deadline._target_=fractions.Fraction", "~deadline.budget_s", "~deadline.warmup_steps")
    changed = {"deadline": {"_target_": "fractions.Fraction"}}
    assert replay_of(tmp_path, changed, *own).deadline._target_ == "fractions.Fraction"


def test_classes_of_every_option_of_ours_are_built():
    own = OmegaConf.create({})
    files = [path for path in (ROOT / "conf").glob("*/*.yaml") if "${" not in path.read_text()]
    assert len(files) > 30
    for path in files:
        check_targets(OmegaConf.create({"part": OmegaConf.load(path)}), own, "replay=theirs")


def test_replay_sends_its_metrics_where_its_own_command_says(tmp_path):
    changed = {"metrics": {"targets": {"address": "elsewhere"}, "port": 1}}
    metrics = replay_of(tmp_path, changed).metrics
    assert (metrics.targets.address, metrics.port) == (None, 9640)


def test_replay_of_what_cannot_be_resolved_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"theirs: .*STRAGGLE_NOT_SET"):
        replay_of(tmp_path, {"seed": "${oc.env:STRAGGLE_NOT_SET}"})


def test_advice_leaves_out_what_only_the_run_knew(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "late_handling: {_target_: straggle.LateHandling, quorum: '${oc.env:Q}', grace_s: 0.5}"
    )
    assert configured_late_handling(tmp_path) == LateHandling(grace_s=0.5)
