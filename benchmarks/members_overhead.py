"""What members cost where nothing happens: two models in one job, with members and without, in turns."""

import json
import random
import statistics
import time
from pathlib import Path

from members_job import Job
from paired import median_ratio

WARMUP, TURN = 20, 10  # steps


def overhead(ranks, steps, sleep_s, width):
    """A turn is 10 steps of the one and 10 of the other, in an order that is drawn; rank 0's times.

    CPU is of all threads of its process. That is less in doubt than the time where the cores do other work too.
    """
    script = str(Path(__file__).with_name("members.py"))
    job = Job(ranks, script, "overhead-rank", "--steps", str(steps), "--sleep-s", str(sleep_s), "--width", str(width))
    if status := job.wait(limit_s=900):
        print(job.words())
        return status
    times = json.loads((job.folder / "times.json").read_text())
    ratio, quartiles = median_ratio(times["on"], times["off"])
    on, off = (1e3 * statistics.median(times[kind]) for kind in ("on", "off"))
    cpu = {kind: 1e3 * statistics.median(times[f"{kind} CPU"]) for kind in ("on", "off")}
    print("| ranks | turns | members off | on | ratio (quartiles) | CPU of a step, off | on |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    numbers = f"{off:.1f} ms | {on:.1f} ms | {ratio} ({quartiles}) | {cpu['off']:.2f} ms | {cpu['on']:.2f} ms"
    print(f"| {ranks} | {len(times['on'])} | {numbers} |")
    job.close()
    return 0


def rank_main(folder, steps, sleep_s, width):
    """One rank: trains both models, and rank 0 leaves the mean seconds of a step in each turn, and its CPU seconds."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import straggle

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs, draw = torch.ones(2, width), random.Random(0)
    models = {}
    for name, members in (("off", None), ("on", straggle.Elastic())):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        model = straggle.StagedDataParallel(net, members=members)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        model.register_state(optimizer=optimizer)
        models[name] = (model, optimizer)

    def train(name, number):
        model, optimizer = models[name]
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            with model.step():
                time.sleep(sleep_s)
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / number, (time.process_time() - cpu) / number

    for name in models:
        train(name, WARMUP)
    times = {name: [] for name in (*models, *(f"{name} CPU" for name in models))}
    for _ in range(steps // TURN):
        for name in draw.sample(sorted(models), 2):  # alike on all ranks
            for model, _ in models.values():
                model.pause()
                model.resume()
            seconds, cpu_s = train(name, TURN)
            times[name].append(seconds)
            times[f"{name} CPU"].append(cpu_s)
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(times))
    for model, _ in models.values():
        model.close()
