"""Synchronous data-parallel training that does not wait for its slowest worker.

model = straggle.StagedDataParallel(model, deadline=straggle.AutoDeadline())  # was: DDP(model)

for x, y in loader:
    with model.step():  # new
        loss = criterion(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from straggle.version import __version__ as __version__

if TYPE_CHECKING:
    from straggle.backward.hooks import DeadlineReached
    from straggle.backward.stage_profile import Reach, StageProfile, measure_stages
    from straggle.backward.staged import BackwardStep, FinishedStage, StagedBackward
    from straggle.backward.stages import BalancedByTime
    from straggle.data.dealt_loader import DealtLoader
    from straggle.data.epochs import Epochs
    from straggle.data.late_loader import LateLoader
    from straggle.data.micro_batches import MicroBatches
    from straggle.data.rebalance import Rebalance
    from straggle.garbage import CollectGarbage
    from straggle.members.own.participants import MembersChanged
    from straggle.members.replica_mesh import ReplicaPlace, init_replica, replica_mesh
    from straggle.members.views.membership import JobDone
    from straggle.members.views.view import Elastic
    from straggle.merge.options import Merge
    from straggle.merge.wire.channel import PeerFailed
    from straggle.observe.watch.watch import Watch, watch
    from straggle.parallel import StagedDataParallel
    from straggle.policies.auto_deadline import AutoDeadline
    from straggle.policies.deadline import (
        Deadline,
        FirstK,
        FixedDeadline,
        LateHandling,
        NextDeadline,
        QuantileDeadline,
        WaitForAll,
    )
    from straggle.policies.estimators import (
        Abstain,
        Estimate,
        Estimator,
        LastMerged,
        LastOwn,
        MovingAverage,
        OptimizerMomentum,
        Zero,
    )
    from straggle.policies.history import History, Progress
    from straggle.policies.wrappers import DropBudget, Shadow
    from straggle.report import MembersReport, RankReport, StageReport, StepReport
    from straggle.step import Step

# where each name is: its module is loaded when the name is first asked for, so a job loads the parts that it uses
_PLACES = {
    "backward.hooks": "DeadlineReached",
    "backward.stage_profile": "Reach StageProfile measure_stages",
    "backward.staged": "BackwardStep FinishedStage StagedBackward",
    "backward.stages": "BalancedByTime",
    "data.dealt_loader": "DealtLoader",
    "data.epochs": "Epochs",
    "data.late_loader": "LateLoader",
    "data.micro_batches": "MicroBatches",
    "data.rebalance": "Rebalance",
    "garbage": "CollectGarbage",
    "members.views.membership": "JobDone",
    "members.own.participants": "MembersChanged",
    "members.replica_mesh": "ReplicaPlace init_replica replica_mesh",
    "members.views.view": "Elastic",
    "merge.options": "Merge",
    "merge.wire.channel": "PeerFailed",
    "observe.watch.watch": "Watch watch",
    "parallel": "StagedDataParallel",
    "policies.auto_deadline": "AutoDeadline",
    "policies.deadline": "Deadline FirstK FixedDeadline LateHandling NextDeadline QuantileDeadline WaitForAll",
    "policies.estimators": "Abstain Estimate Estimator LastMerged LastOwn MovingAverage OptimizerMomentum Zero",
    "policies.history": "History Progress",
    "policies.wrappers": "DropBudget Shadow",
    "report": "MembersReport RankReport StageReport StepReport",
    "step": "Step",
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = [
    "Abstain",
    "AutoDeadline",
    "BackwardStep",
    "BalancedByTime",
    "CollectGarbage",
    "Deadline",
    "DeadlineReached",
    "DealtLoader",
    "DropBudget",
    "Elastic",
    "Epochs",
    "Estimate",
    "Estimator",
    "FinishedStage",
    "FirstK",
    "FixedDeadline",
    "History",
    "JobDone",
    "LastMerged",
    "LastOwn",
    "LateHandling",
    "LateLoader",
    "MembersChanged",
    "MembersReport",
    "Merge",
    "MicroBatches",
    "MovingAverage",
    "NextDeadline",
    "OptimizerMomentum",
    "PeerFailed",
    "Progress",
    "QuantileDeadline",
    "RankReport",
    "Reach",
    "Rebalance",
    "ReplicaPlace",
    "Shadow",
    "StageProfile",
    "StageReport",
    "StagedBackward",
    "StagedDataParallel",
    "Step",
    "StepReport",
    "WaitForAll",
    "Watch",
    "Zero",
    "init_replica",
    "measure_stages",
    "replica_mesh",
    "watch",
]


if not TYPE_CHECKING:  # or any name would be right for a type checker

    def __getattr__(name: str) -> Any:
        """A public name that nobody has asked for so far."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'straggle' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"straggle.{_MODULE_OF[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
