"""The parts of a run, built as its configuration names them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.utils import get_class, instantiate
    from omegaconf import DictConfig, ListConfig
from torch import nn
from torch.optim import Optimizer

from straggle.backward.stages import BalancedByTime
from straggle.lab.faults import Fault
from straggle.members.views.view import Elastic
from straggle.policies.estimators import Estimator


def build_faults(config: DictConfig) -> dict[str, Fault]:
    """The faults by name, without those that ``null`` switches off."""
    parts = config.get("faults") or {}
    return {str(name): instantiate(part) for name, part in parts.items() if part is not None}


def build_optimizer(config: DictConfig, model: nn.Module) -> Optimizer:
    """The optimizer over all parameters of ``model``."""
    optimizer: Optimizer = instantiate(config.optimizer, params=model.parameters(), _convert_="all")
    return optimizer


def build_estimator(config: DictConfig, optimizer: Optimizer) -> Estimator:
    """The estimator; one that takes an optimizer is given the run's own."""
    wanted = inspect.signature(get_class(config.estimator._target_)).parameters
    given: dict[str, Any] = {"optimizer": optimizer} if "optimizer" in wanted else {}
    estimator: Estimator = instantiate(config.estimator, **given)
    return estimator


def build_members(config: DictConfig, num_members: int) -> Elastic | None:
    """The rules by which so many members come and go; ``None`` if they do not, as in a replay.

    Of replicas there are few: the job goes on with half of them, if the configuration gives no number.
    """
    if not config.get("members") or config.get("replay"):
        return None
    members: Elastic = instantiate(config.members)
    if config.get("parallel") and members.min_ranks is None:
        return replace(members, min_ranks=max(1, (num_members + 1) // 2))
    return members


def stages_of(stages: int | ListConfig | DictConfig | None) -> int | list[str] | BalancedByTime | None:
    """The key ``stages`` as the library's argument."""
    if isinstance(stages, DictConfig):
        by_time: BalancedByTime = instantiate(stages)
        return by_time
    return [str(name) for name in stages] if isinstance(stages, ListConfig) else stages
