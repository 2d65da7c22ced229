"""What is trained, under which methods and circumstances: plain values, so that another process can build them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch.optim import Optimizer

from straggle.lab.build import estimator_from
from straggle.lab.estimators.lateness import Paced
from straggle.lab.learning.learning import Setting, Treatment
from straggle.lab.learning.samples import samples_of
from straggle.lab.learning.weighting import weighting_of
from straggle.lab.workloads.workload import Workload
from straggle.merge.options import Merge
from straggle.policies.estimators import Estimator


@dataclass(frozen=True)
class Case:
    """Which ranks are late, and which data they have.

    ``own_data``: each rank has samples of a different kind, and the same ranks are late in every step. Otherwise
    samples are shuffled, and other ranks are late in each step.
    """

    late_share: float
    own_data: bool


@dataclass(frozen=True)
class Task:
    """A workload, its optimizer and the methods to compare, as configuration; ``name`` is for the tables."""

    name: str
    workload: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    methods: Mapping[str, Mapping[str, Any]]
    ranks: int
    batch_size: int
    steps: int
    num_stages: int

    def setting(self, own_data: bool, seed: int) -> Setting:
        """What is trained."""
        workload = _workload(json.dumps(OmegaConf.to_container(OmegaConf.create(dict(self.workload)))))
        share = 1.0 if own_data else None
        samples = samples_of(workload, self.ranks, self.batch_size, seed=seed, sorted_share=share)
        make = partial(instantiate, OmegaConf.create(dict(self.optimizer)), _convert_="all")
        return Setting(workload, lambda parameters: make(params=parameters), samples, self.steps, seed, self.num_stages)

    def estimator(self, method: str, optimizer: Optimizer) -> Estimator:
        """A rank's estimator."""
        return estimator_from(OmegaConf.create(dict(self.methods[method]["estimator"])), optimizer)

    def treatment(self, method: str, case: Case, optimizer: Optimizer | None = None) -> Treatment:
        """Which ranks are late, and what the method does then; ``optimizer``: of its estimators, if not its own."""
        merge = Merge(weighting=self.methods[method].get("weighting", "count"))

        def make(own: Optimizer) -> Estimator:
            return self.estimator(method, optimizer or own)

        return Treatment(
            Paced(round(case.late_share * self.ranks), always=case.own_data, finishes_late=self._finishes_late(method)),
            weighting_of(merge),
            make,
        )

    def _finishes_late(self, method: str) -> bool:
        return bool(getattr(get_class(self.methods[method]["estimator"]["_target_"]), "finishes_late", False))


@lru_cache(maxsize=4)
def _workload(config: str) -> Workload:
    """The workload, read once in a process."""
    workload: Workload = instantiate(json.loads(config))
    return workload
