"""The models and data that the commands train."""

from straggle.workloads.digits import Digits
from straggle.workloads.paced import Paced
from straggle.workloads.shard import Shard
from straggle.workloads.synthetic import Synthetic
from straggle.workloads.text import Text
from straggle.workloads.workload import Workload

__all__ = ["Digits", "Paced", "Shard", "Synthetic", "Text", "Workload"]
