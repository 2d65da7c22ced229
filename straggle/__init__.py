"""Synchronous data-parallel training that does not wait for its slowest worker.

model = straggle.StagedDataParallel(model, deadline=straggle.AutoDeadline())  # was: DDP(model)

for x, y in loader:
    with model.step():  # new
        loss = criterion(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from straggle.around import Anneal, DropBudget, Shadow
from straggle.backward import DeadlineReached
from straggle.channel import PeerFailed
from straggle.deadline import (
    Deadline,
    FirstK,
    FixedDeadline,
    MedianDeadline,
    Patience,
    QuantileDeadline,
    WaitForAll,
)
from straggle.estimators import (
    Abstain,
    Carry,
    ErrorFeedback,
    Estimate,
    Estimator,
    LastMerged,
    LastOwn,
    MovingAverage,
    OptimizerMomentum,
    Supplement,
    Zero,
)
from straggle.history import History, Progress
from straggle.measure import Reach, StageProfile, measure_stages
from straggle.merge import Merge
from straggle.parallel import StagedDataParallel
from straggle.rebalance import Rebalance
from straggle.report import BackwardReport, RankReport, ShadowReport, StageReport, StageTime, StepReport
from straggle.sampler import RequeueSampler
from straggle.staged import BackwardStep, FinishedStage, StagedBackward
from straggle.stages import BalancedByTime
from straggle.step import Step
from straggle.threshold import AutoDeadline
from straggle.watching import Watch, watch

__version__ = "0.1.0"

__all__ = [
    "Abstain",
    "Anneal",
    "AutoDeadline",
    "BackwardReport",
    "BackwardStep",
    "BalancedByTime",
    "Carry",
    "Deadline",
    "DeadlineReached",
    "DropBudget",
    "ErrorFeedback",
    "Estimate",
    "Estimator",
    "FinishedStage",
    "FirstK",
    "FixedDeadline",
    "History",
    "LastMerged",
    "LastOwn",
    "MedianDeadline",
    "Merge",
    "MovingAverage",
    "OptimizerMomentum",
    "Patience",
    "PeerFailed",
    "Progress",
    "QuantileDeadline",
    "RankReport",
    "Reach",
    "Rebalance",
    "RequeueSampler",
    "Shadow",
    "ShadowReport",
    "StageProfile",
    "StageReport",
    "StageTime",
    "StagedBackward",
    "StagedDataParallel",
    "Step",
    "StepReport",
    "Supplement",
    "WaitForAll",
    "Watch",
    "Zero",
    "measure_stages",
    "watch",
]
