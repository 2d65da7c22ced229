"""Synchronous data-parallel training that does not wait for its slowest worker.

model = straggle.StagedDataParallel(model, deadline=straggle.QuantileDeadline(0.5, slack=1.2))  # was: DDP(model)

for x, y in loader:
    with model.step():  # new
        loss = criterion(model(x), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from straggle.backward import DeadlineReached
from straggle.channel import PeerFailed
from straggle.deadline import Deadline, FixedDeadline, History, Patience, QuantileDeadline, WaitForAll
from straggle.estimators import (
    Abstain,
    Estimate,
    Estimator,
    LastMerged,
    LastOwn,
    MovingAverage,
    OptimizerMomentum,
    Zero,
)
from straggle.measure import Reach, StageProfile, measure_stages
from straggle.merge import Merge
from straggle.parallel import StagedDataParallel, Step
from straggle.report import BackwardReport, RankReport, StageReport, StageTime, StepReport
from straggle.sampler import RequeueSampler
from straggle.staged import BackwardStep, FinishedStage, StagedBackward
from straggle.stages import BalancedByTime

__version__ = "0.1.0"

__all__ = [
    "Abstain",
    "BackwardReport",
    "BackwardStep",
    "BalancedByTime",
    "Deadline",
    "DeadlineReached",
    "Estimate",
    "Estimator",
    "FinishedStage",
    "FixedDeadline",
    "History",
    "LastMerged",
    "LastOwn",
    "Merge",
    "MovingAverage",
    "OptimizerMomentum",
    "Patience",
    "PeerFailed",
    "QuantileDeadline",
    "RankReport",
    "Reach",
    "RequeueSampler",
    "StageProfile",
    "StageReport",
    "StageTime",
    "StagedBackward",
    "StagedDataParallel",
    "Step",
    "StepReport",
    "WaitForAll",
    "Zero",
    "measure_stages",
]
