"""Which keys the commands' configurations have, of which types, and which of their values go together.

A field of type ``Any`` is a part whose class, named by ``_target_``, checks what it is given when it is built.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.core.config_store import ConfigStore
    from omegaconf import MISSING, DictConfig, OmegaConf

from straggle.commands import durable

# the option `none` of groups, which needs no file
_NONE: dict[str, dict[str, Any]] = {
    "deadline": {"_target_": "straggle.WaitForAll"},
    "delays": {"_target_": "straggle.lab.simulate.delays.NoDelay"},
    "faults": {},
    "members": {},
    "metrics": {},
    "parallel": {},
    "network": {"_target_": "straggle.lab.simulate.communication.Constant", "seconds": 0.0},
    "rebalance": {},
}
_WORK = ("dealt", "pulled")


class ConfigurationError(ValueError):
    """A key or value that the configuration does not have; the message lists the valid ones."""


def check_at_least(least: dict[str, int], values: dict[str, Any]) -> None:
    """Raise `ConfigurationError` for an integer that is too small."""
    for key, bound in least.items():
        if not isinstance(value := values[key], int) or value < bound:
            raise ConfigurationError(f"{key}={value}: must be an integer of at least {bound}")


def check_work(work: str, num_microbatches: int) -> None:
    """Raise `ConfigurationError` for what ranks that draw a step's micro-batches cannot do."""
    if work not in _WORK:
        raise ConfigurationError(f"work={work}: choose one of {', '.join(_WORK)}")
    if work == "pulled" and num_microbatches < 2:
        raise ConfigurationError(
            "work=pulled needs num_microbatches above 1: ranks draw micro-batches, and with one for each there is "
            "nothing to draw"
        )


def _is_of(name: str, part: Any) -> bool:
    """Whether a part of the configuration builds this class."""
    return part is not None and str(part.get("_target_")).rpartition(".")[2] == name


@dataclass
class _Checked:
    """A configuration whose integers have a least value."""

    AT_LEAST: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        check_at_least(self.AT_LEAST, vars(self))


@dataclass
class Train(_Checked):
    """Of ``train``."""

    AT_LEAST: ClassVar[dict[str, int]] = {
        "steps": 1,
        "seed": 0,
        "batch_size": 1,
        "num_microbatches": 1,
        "checkpoint_every": 0,
        "collect_garbage_every": 0,
    }

    steps: int = MISSING
    seed: int = MISSING
    batch_size: int = MISSING
    num_microbatches: int = MISSING
    work: str = MISSING
    run_dir: str = MISSING
    resume: Any = MISSING
    replay: str | None = MISSING
    report: bool = MISSING
    checkpoint_every: int = MISSING
    collect_garbage_every: int = MISSING
    links: bool | None = MISSING
    stages: Any = MISSING
    workload: Any = MISSING
    deadline: Any = MISSING
    estimator: Any = MISSING
    faults: Any = MISSING
    optimizer: Any = MISSING
    metrics: Any = MISSING
    rebalance: Any = MISSING
    members: Any = MISSING
    parallel: Any = MISSING
    merge: Any = MISSING
    late_handling: Any = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_work(self.work, self.num_microbatches)
        if self.resume not in (None, True, False, "auto"):
            raise ConfigurationError(f"resume={self.resume}: choose one of true, false, auto")
        if self.replay is not None:
            self._check_replay(Path(self.replay))
        if self.resume is True and not durable.exists(Path(self.run_dir) / "checkpoint"):
            raise ConfigurationError(f"resume=true: there is no checkpoint in run_dir={self.run_dir}")
        if self.parallel:
            self._check_sharded()

    def _check_sharded(self) -> None:
        """What is there for ranks that each have a copy of the model is refused."""
        given = {
            "rebalance=by_speed": (self.rebalance, "samples are dealt out to ranks, and a replica is several"),
            "work=pulled": (self.work == "pulled", "micro-batches are drawn by ranks, and a replica is several"),
            "workload=paced": (_is_of("Paced", self.workload), "its sleeps are hooks on whole parameters"),
        }
        for key, (is_given, why) in given.items():
            self._refuse_sharded(key, why, is_given=bool(is_given))

    @staticmethod
    def _refuse_sharded(key: str, why: str, *, is_given: bool) -> None:
        if is_given:
            raise ConfigurationError(f"{key} and parallel=sharded exclude each other: {why}; leave {key} out")

    def _check_replay(self, source: Path) -> None:
        if self.members:
            raise ConfigurationError(
                "members=elastic and replay=... exclude each other: a replay is of steps in which no rank left, and "
                "its own processes stay; leave members out"
            )
        if not (source / "decisions").is_dir():
            raise ConfigurationError(f"replay={source}: no recorded run there; give the run_dir of an earlier one")
        if self.resume:
            raise ConfigurationError("resume=true and replay=... exclude each other: a replay begins at step 0")


@dataclass
class Method:
    """Of a method of ``compare``: what replaces the run's own parts."""

    job: Any = None
    deadline: Any = None
    estimator: Any = None
    late_handling: Any = None
    merge: Any = None
    optimizer: Any = None
    stages: Any = None
    rebalance: Any = None
    work: str | None = None


@dataclass
class Compare(Train):
    """Of ``compare``."""

    AT_LEAST: ClassVar[dict[str, int]] = Train.AT_LEAST | {"block": 1}
    ONLY_TRAIN: ClassVar[tuple[str, ...]] = ("resume", "replay", "report", "checkpoint_every", "metrics")

    block: int = MISSING
    methods: dict[str, Method] = field(default_factory=dict)
    scenarios: list[str] | None = MISSING

    def __post_init__(self) -> None:
        if wrong := [key for key in self.ONLY_TRAIN if getattr(self, key)]:
            raise ConfigurationError(f"{wrong[0]}: only train does that, compare does not")
        super().__post_init__()
        both = bool(self.members) and bool(self.parallel)
        self._refuse_sharded("members=elastic", "FSDP2's own replicas do not come back", is_given=both)
        for name, own in self.methods.items():
            is_given = bool(self.parallel) and _is_of("LocalSgdJob", own.job)
            self._refuse_sharded(name, "its ranks train alone, each with a copy", is_given=is_given)
            is_given = bool(self.parallel) and _is_of("WithoutJob", own.job)
            self._refuse_sharded(name, "it leaves out ranks, each with a copy", is_given=is_given)
        if "ddp" not in self.methods:
            raise ConfigurationError(f"methods={list(self.methods)}: ddp must be among them, for comparison")
        for name in self.scenarios or ():
            if name not in options_of("faults"):
                raise ConfigurationError(f"scenarios={self.scenarios}: choose of {', '.join(options_of('faults'))}")


@dataclass
class Simulate(_Checked):
    """Of ``simulate``."""

    AT_LEAST: ClassVar[dict[str, int]] = {"ranks": 1, "steps": 1, "seed": 0, "history_ranks": 1}

    ranks: int = MISSING
    steps: int = MISSING
    seed: int = MISSING
    history_ranks: int = MISSING
    pulled: bool = MISSING
    run_dir: str = MISSING
    deadline: Any = MISSING
    delays: Any = MISSING
    network: Any = MISSING
    work: Any = MISSING
    late_handling: Any = MISSING


SCHEMAS = {"train": Train, "compare": Compare, "simulate": Simulate}


# -- what conf/ has


def config_dir() -> Path:
    """``conf/`` of the checkout, or the copy that an installed wheel carries."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def options_of(group: str) -> list[str]:
    """The names that may be chosen in a group."""
    return sorted([path.stem for path in (config_dir() / group).glob("*.yaml")] + ["none"] * (group in _NONE))


def option(group: str, name: str) -> DictConfig:
    """What an option of a group has."""
    found = OmegaConf.create(_NONE[group]) if name == "none" else OmegaConf.load(config_dir() / group / f"{name}.yaml")
    assert isinstance(found, DictConfig)
    return found


def register() -> None:
    """Tell hydra of the options that have no file, and of values that follow from others.

    These follow from the number of ranks, or of replicas of several (at least 1), and from the run that is repeated.
    """
    for group, node in _NONE.items():
        ConfigStore.instance().store(group=group, name="none", node=node)
    OmegaConf.register_new_resolver("all_ranks_but", _all_ranks_but, replace=True)
    OmegaConf.register_new_resolver("more_than_half", _more_than_half, replace=True)
    OmegaConf.register_new_resolver("steps_of", _steps_of, replace=True)


def _all_ranks_but(number: int, *, _root_: DictConfig) -> int:
    if not isinstance(number, int) or number < 0:
        raise ConfigurationError(f"${{all_ranks_but:{number}}}: must be an integer of at least 0")
    return max(1, _num_ranks(_root_) - number)


def _more_than_half(*, _root_: DictConfig) -> int:
    return _num_ranks(_root_) // 2 + 1


def _steps_of(run_dir: str | None, otherwise: int) -> object:
    recorded = None if run_dir is None else Path(run_dir, "config.yaml")
    if recorded is None or not recorded.exists():
        return otherwise
    return OmegaConf.select(OmegaConf.load(recorded), "steps", default=otherwise)


def _num_ranks(root: DictConfig) -> int:
    """Those that may be late: replicas, if each is several ranks."""
    shards = OmegaConf.select(root, "parallel.shards", default=1)
    return int(os.environ.get("WORLD_SIZE") or 1) // int(shards)  # torchrun's
