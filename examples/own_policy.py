"""A deadline and an estimator of one's own.

torchrun --standalone --nproc-per-node 2 examples/own_policy.py
"""

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import straggle


class MedianOfFinished(straggle.Deadline):
    """A fifth more than the median time of the ranks that were not late."""

    window = 20  # steps of history that it wants to see

    def decide(self, history: straggle.History) -> float:
        times = history.compute_s[history.finished]
        return math.inf if history.num_steps < 5 or len(times) == 0 else 1.2 * times.median().item()


class HalfTheLastMerge(straggle.Estimator):
    """A late rank votes for half of the gradient that all ranks merged last."""

    def contribution(self, parameter: nn.Parameter) -> straggle.Estimate | None:
        last = self.memory.get(parameter)
        return None if last is None else straggle.Estimate(0.5 * last, weight=1.0)

    def observe(self, parameter: nn.Parameter, gradient: Tensor, *, merged: bool) -> None:
        if merged:
            self.memory[parameter] = gradient.clone()  # the tensor is only lent


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    if dist.get_rank() == 1:
        net[1].register_forward_hook(lambda *_: time.sleep(0.03))
    model = straggle.StagedDataParallel(net, deadline=MedianOfFinished(), estimator=HalfTheLastMerge())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for number in range(40):
        x = torch.randn(16, 8)
        with model.step():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and number % 10 == 9:
            report = model.last_report
            estimated = [stage.name for stage in report.stages if stage.estimated]
            print(f"step {number}: late {report.late_ranks}, estimated stages {estimated}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
