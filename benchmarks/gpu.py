"""What straggle costs on one GPU where no rank is late: a step beside DDP's, in turns, over NCCL with one rank.

python benchmarks/gpu.py text gpt2 --rounds 20            # GPT-2 small, 8 x 512 tokens, bfloat16; needs transformers
python benchmarks/gpu.py gpt2:16x1024                     # samples x tokens
python benchmarks/gpu.py text --profile                   # where the host waits for the device, and what that does
python benchmarks/gpu.py text --cprofile                  # straggle's functions on the host
python benchmarks/gpu.py gpt2 --half                      # the staged backward by itself, stopped at half of its stages
python benchmarks/gpu.py text --watched                   # beside DDP with straggle.watch, too

With one rank nothing travels: this is the cost of hooks, copies and host work beside the kernels. "Queued": when the
host has called all of a step; the rest of a step's time, the host is ahead of the device.
"""

import argparse
import copy
import cProfile
import gc
import pstats
import random
import re
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from device_calls import calls_of, print_calls, waiting_lines
from paired import median_ratio
from step_time import one_step
from torch.nn.parallel import DistributedDataParallel

import straggle
from straggle.lab.workloads.text import Text
from straggle.report import text_table

DEVICE = torch.device("cuda", 0)
WAYS = ("DDP", "DDP again", "straggle, no deadline", "straggle, a deadline")
WITH_WATCH = "DDP, watched"
WARMUP, PROFILED, WATCHED = 6, 10, 4  # steps
TURN_S, TURN_STEPS = 0.25, (4, 30)  # a turn's seconds, with at least and at most so many steps
WORKLOAD = re.compile(r"(text|gpt2)(?::(\d+)(?:x(\d+))?)?")


def model_and_loss(workload):
    """A model on the device, and its loss on a fixed batch as a function of the model."""
    name, samples, length = WORKLOAD.fullmatch(workload).groups()
    if name == "gpt2":
        return gpt2(int(samples or 8), int(length or 512))
    text = Text()
    batch = tuple(part.to(DEVICE) for part in text.batch(torch.arange(int(samples or 64))))
    return text.model().to(DEVICE), lambda model: text.loss(model, batch)


def gpt2(samples, length):
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(50257, (samples, length), device=DEVICE)
    with DEVICE:
        model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))

    def loss(model):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(tokens, labels=tokens).loss

    return model.to(DEVICE), loss


def wrapped(way, model):
    if way.startswith("DDP"):
        model = DistributedDataParallel(model)
        if way == WITH_WATCH:
            straggle.watch(model, tempfile.mkdtemp())
        return model
    return straggle.StagedDataParallel(model, deadline=60.0 if way.endswith("a deadline") else None)


def prepared(way, model, compute_loss):
    """A wrapped copy of the model, its step, and the memory that both take at most, in MiB: after some steps."""
    before = torch.cuda.memory_allocated()
    own = wrapped(way, copy.deepcopy(model))
    step = one_step(own, compute_loss, 1)
    for number in range(WARMUP):
        if number == WARMUP // 2:  # the stages are planned by then
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    return own, step, (torch.cuda.max_memory_allocated() - before) / 2**20


def seconds_of(step, num_steps):
    """Of a step: seconds until the host had queued it, and seconds with the device's work; after one to begin with."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    queued = time.perf_counter()
    torch.cuda.synchronize()
    return (queued - began) / num_steps, (time.perf_counter() - began) / num_steps


def in_turns(steps, rounds):
    """Of each way and round, what `seconds_of` gives; each round has an order of its own."""
    times, draw = {way: [] for way in steps}, random.Random(0)
    least, most = TURN_STEPS
    num_steps = max(least, min(most, round(TURN_S / seconds_of(steps["DDP"], least)[1])))
    for _ in range(rounds):
        for way in draw.sample(list(steps), len(steps)):
            times[way].append(seconds_of(steps[way], num_steps))
    print(f"{rounds} turns of {num_steps} steps of each")
    return times


def print_times(times, memory):
    rows = [("", "ms", "over DDP", "quartiles", "queued, ms", "memory, MiB")]
    base = [whole for _, whole in times["DDP"]]
    for way, own in times.items():
        queued, whole = zip(*own, strict=True)
        cells = (f"{1000 * statistics.median(whole):.3f}", *median_ratio(whole, base))
        rows.append((way, *cells, f"{1000 * statistics.median(queued):.3f}", f"{memory[way]:.0f}"))
    print(text_table(rows))


def print_profiles(steps):
    steps = {way: step for way, step in steps.items() if way != "DDP again"}
    calls_of(steps["DDP"], 1)  # the profiler itself begins slowly
    print_calls({way: calls_of(step, PROFILED) for way, step in steps.items()})
    for way, step in steps.items():
        for place, number in waiting_lines(step, WATCHED).items():
            print(f"  {way}: waits {number:g} times a step in {place}")


def print_host_profile(step):
    """By the function's own time; a backward pass's hooks are called in a thread of the device."""
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(2 * PROFILED):
            step()
    torch.cuda.synchronize()
    print(f"the host in {2 * PROFILED} steps without a deadline: all, and straggle's own")
    stats = pstats.Stats(profiler).sort_stats("tottime")
    stats.print_stats(15)
    stats.print_stats(r"straggle/\w+/|straggle/\w+\.py", 25)


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


def print_half(model, compute_loss, rounds):
    times = stopped_at_half(model, compute_loss, rounds)
    complete, half = (1000 * statistics.median(own) for own in times.values())
    ratio, quartiles = median_ratio(times["half"], times["complete"])
    print(f"a backward pass {complete:.3f} ms on the device; stopped at half {half:.3f}, {ratio} of it ({quartiles})")


def measure(name, options):
    began = time.perf_counter()
    torch.manual_seed(0)
    model, compute_loss = model_and_loss(name)
    ways = (*WAYS, WITH_WATCH) if options.watched else WAYS
    ready = {way: prepared(way, model, compute_loss) for way in ways}
    steps = {way: step for way, (_, step, _) in ready.items()}
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{name}: {size / 1e6:.1f} M parameters; ", end="")
    print_times(in_turns(steps, options.rounds), {way: memory for way, (_, _, memory) in ready.items()})
    if options.profile:
        print_profiles(steps)
    if options.cprofile:
        print_host_profile(steps["straggle, no deadline"])
    if options.half:
        print_half(model, compute_loss, options.rounds)
    for way in WAYS[2:]:
        ready[way][0].close()
    print(f"({time.perf_counter() - began:.0f} s)", flush=True)


def workload(text):
    if not WORKLOAD.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give text or gpt2, with a size such as gpt2:16x1024 if need be")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", type=workload, metavar="WORKLOAD[:SAMPLES[xTOKENS]]")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="count calls, copies and kernels, and name what waits")
    parser.add_argument("--cprofile", action="store_true", help="time straggle's functions on the host")
    parser.add_argument("--half", action="store_true", help="time the staged backward by itself")
    parser.add_argument("--watched", action="store_true", help="beside DDP with straggle.watch, too")
    options = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {straggle.__file__}")
    for name in options.workloads:
        measure(name, options)
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
