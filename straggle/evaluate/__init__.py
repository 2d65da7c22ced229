"""Estimators judged: against gradients that are known, and by what training comes to under each."""

from straggle.evaluate.lateness import Paced
from straggle.evaluate.runs import RunScore, train_once
from straggle.evaluate.task import Case, Task
from straggle.evaluate.truth import Judgement, judge

__all__ = ["Case", "Judgement", "Paced", "RunScore", "Task", "judge", "train_once"]
