"""What the staged backward costs and saves on one process, against plain ``loss.backward()``, in turns.

python benchmarks/staged_backward.py synthetic                  # 10 M parameters, 12 blocks, 64 samples
python benchmarks/staged_backward.py text --rounds 100
python benchmarks/staged_backward.py gpt2 --rounds 10           # GPT-2 small shapes; needs transformers
"""

import argparse
import copy
import random
import statistics
import time

import torch
from paired import median_ratio

from straggle import StagedBackward
from straggle.lab.workloads.synthetic import Synthetic
from straggle.lab.workloads.text import Text


def model_and_loss(name):
    """A model, and its loss on a fixed batch as a function of the model."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        tokens = torch.randint(50257, (1, 64))
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        return model, lambda model: model(tokens, labels=tokens).loss
    workload, batch_size = (Synthetic(), 64) if name == "synthetic" else (Text(), 16)
    batch = workload.batch(torch.arange(batch_size))
    return workload.model(), lambda model: workload.loss(model, batch)


def stop_at_half(stage, finished, num_stages):
    finished.append(stage.name)
    if 2 * len(finished) >= num_stages:
        finished.clear()
        stage.stop()


def variants(model):
    """For each way to run backward, a copy of the model and a function that runs it on a loss."""
    plain = copy.deepcopy(model)
    yield "loss.backward()", plain, lambda loss: loss.backward()
    again = copy.deepcopy(model)
    yield "the same again", again, lambda loss: loss.backward()
    bare = copy.deepcopy(model)
    yield "staged", bare, StagedBackward(bare).backward
    watched = copy.deepcopy(model)
    yield "staged, on_stage", watched, StagedBackward(watched, on_stage=lambda _: None).backward
    half, finished = copy.deepcopy(model), []
    staged = StagedBackward(half, on_stage=lambda stage: stop_at_half(stage, finished, len(staged.stages)))
    yield "stopped at half of the stages", half, staged.backward


def measure(name, rounds, warmup=5):
    torch.manual_seed(0)
    model, compute_loss = model_and_loss(name)
    ways = list(variants(model))
    seconds = {label: [] for label, _, _ in ways}
    for number in range(warmup + rounds):
        for label, own, run in random.sample(ways, len(ways)):  # in turns, in an order that changes
            own.zero_grad(set_to_none=True)
            loss = compute_loss(own)
            begin = time.perf_counter()
            run(loss)
            if number >= warmup:
                seconds[label].append(time.perf_counter() - begin)
    plain = seconds["loss.backward()"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters / 1e6:.1f} M parameters in {len(list(model.parameters()))} tensors, {rounds} rounds")
    for label, own in seconds.items():
        ratio, quartiles = median_ratio(own, plain)
        of_medians = statistics.median(own) / statistics.median(plain)
        print(
            f"  {label:30} {1000 * statistics.median(own):8.2f} ms, ratio of medians {of_medians:.3f}, "
            f"median of ratios {ratio} (quartiles {quartiles})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["synthetic", "text", "gpt2"])
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(arguments.workload, arguments.rounds)
