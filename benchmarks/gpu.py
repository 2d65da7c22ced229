"""What straggle costs on one GPU where no rank is late: a step beside DDP's, in turns, over NCCL with one rank.

python benchmarks/gpu.py text --rounds 40
python benchmarks/gpu.py gpt2 --rounds 20         # GPT-2 small, 8 x 512 tokens, bfloat16; needs transformers
python benchmarks/gpu.py gpt2 --samples 16 --tokens 1024 --rounds 10

With one rank nothing travels: this is the cost of hooks, copies and host work beside the kernels. The last lines are of
the staged backward by itself: device time of a pass that is stopped at half of its stages.
"""

import argparse
import copy
import statistics
import time

import torch
import torch.distributed as dist
from paired import in_turns, median_ratio
from step_time import one_step
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.workloads.text import Text

WARMUP = 5
STEPS = 10  # in a turn


def model_and_loss(name, samples=None, length=512):
    """A model on the device, and its loss on a fixed batch as a function of the model."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        tokens = torch.randint(50257, (samples or 8, length), device="cuda")
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).cuda()

        def loss(model):
            with torch.autocast("cuda", torch.bfloat16):
                return model(tokens, labels=tokens).loss

        return model, loss
    workload = Text()
    batch = tuple(part.cuda() for part in workload.batch(torch.arange(samples or 64)))
    return workload.model().cuda(), lambda model: workload.loss(model, batch)


def wrapped(way, model):
    if way.startswith("DDP"):
        return DistributedDataParallel(model)
    return straggle.StagedDataParallel(model, deadline=60.0 if way.endswith("deadline") else None)


def turn_of(step):
    """A function that makes a turn of steps, and gives the seconds of one of them with the device's work."""

    def turn():
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    return turn


def table(seconds, base):
    for way, own in seconds.items():
        ratio, quartiles = median_ratio(own, seconds[base])
        milliseconds = 1000 * statistics.median(own)
        print(f"  {way:28} {milliseconds:8.3f} ms, median of ratios {ratio} (quartiles {quartiles})")


def stopped_at_half(model, compute_loss, rounds):
    """Seconds on the device of complete passes and of those stopped at half of the stages."""
    finished = []

    def on_stage(stage):
        finished.append(stage.name)
        if half and 2 * len(finished) >= len(staged.stages):
            stage.stop()

    staged, half, times = straggle.StagedBackward(model, on_stage=on_stage), False, {"complete": [], "half": []}
    for number in range(WARMUP + rounds):
        for name in ("complete", "half"):
            half = name == "half" and number > 0
            model.zero_grad()
            loss = compute_loss(model)
            finished.clear()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            staged.backward(loss, budget_s=60.0)
            end.record()
            end.synchronize()
            if number >= WARMUP:
                times[name].append(begin.elapsed_time(end) / 1000)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["text", "gpt2"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--samples", type=int, help="of a step; default: 64, and 8 of gpt2")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample of gpt2")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    model, compute_loss = model_and_loss(options.workload, options.samples, options.tokens)
    ways = ("DDP", "DDP again", "straggle, no deadline", "straggle, a deadline")
    turns = {way: turn_of(one_step(wrapped(way, copy.deepcopy(model)), compute_loss, 1)) for way in ways}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    device = torch.cuda.get_device_name()
    print(f"{options.workload}: {parameters / 1e6:.1f} M parameters, {device}, torch {torch.__version__}")
    table(in_turns(turns, options.rounds, 1), "DDP")
    print("the staged backward by itself, milliseconds on the device")
    table(stopped_at_half(model, compute_loss, options.rounds), "complete")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
