"""What a late rank would save by skipping weight gradients while it goes on propagating, on one process.

Autograd fixes before the pass which gradients it computes (``inputs=``), so the choice is made at its beginning.

python benchmarks/weight_gradients.py
"""

import random
import statistics
import time

import torch
from torch import nn

from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import Text


def measure(name, workload, batch_size, rounds=40):
    torch.manual_seed(0)
    model = workload.model()
    batch = workload.batch(torch.arange(batch_size))
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    skippable = {id(weight) for weight in weights}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in skippable]
    choices = {
        "all gradients": None,
        "without every second weight": [*rest, *weights[::2]],
        "without three in four weights": [*rest, *weights[::4]],
        "without any weight": rest,
        "the first parameter alone": [next(iter(model.parameters()))],
    }
    seconds = {label: [] for label in choices}
    for number in range(rounds + 5):
        for label in random.sample(list(choices), len(choices)):
            model.zero_grad(set_to_none=True)
            loss = workload.loss(model, batch)
            begin = time.perf_counter()
            loss.backward(inputs=choices[label])
            if number >= 5:
                seconds[label].append(time.perf_counter() - begin)
    full = statistics.median(seconds["all gradients"])
    print(f"{name}, {batch_size} samples, {rounds} rounds")
    for label, own in seconds.items():
        print(f"  {label:30} {1000 * statistics.median(own):7.2f} ms, saves {1 - statistics.median(own) / full:6.1%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure("text", Text(), 16)
    measure("text", Text(), 64)
    measure("synthetic", Synthetic(), 64)
