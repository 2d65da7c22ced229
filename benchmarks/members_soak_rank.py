"""One rank of `members_soak.py`: trains, writes what it sees, and makes its own stalls, NaN and errors."""

import collections
import os
import random
import signal
import time

from members_job import End, Lines, digest

CHECK_EVERY = 100  # steps between two hashes
SUSPECT_S = 1.5


class OrderedError(Exception):
    """Raised because the controller wanted it; ``ends`` the process, or is caught by the loop."""


class Orders:
    """What the controller wants raised, next time that the loop asks."""

    def __init__(self, folder, rank):
        self._path, self._open = folder / f"order.{rank}", False
        signal.signal(signal.SIGUSR1, lambda *_: self._came())

    def _came(self):
        self._open = True

    def next(self):
        if not self._open:
            return None
        self._open = False
        return self._path.read_text()

    def again(self):
        """The step was cut short before it came to what was ordered."""
        self._open = True


class Longest:
    """The longest step of the last ten in which nothing was wrong with this rank itself."""

    def __init__(self):
        self._since, self._longest = None, 0.0

    def over(self, own_fault):
        now = time.monotonic()
        if self._since is not None and not own_fault:
            self._longest = max(self._longest, now - self._since)
        self._since = now

    def forget(self):
        """What comes next is no step."""
        self._since = None

    def take(self):
        longest, self._longest = self._longest, 0.0
        return longest


def rank_main(given):
    """Train until the file ``end`` says that it is over; a rank that is out at the end has nothing to compare."""
    import straggle

    try:
        _train(given.folder, given.variant, given.pace_s)
    except straggle.JobDone as error:
        (given.folder / f"out.{os.environ['RANK']}").write_text(str(error))


def _train(folder, variant, pace_s):
    import faulthandler
    import logging

    import torch
    import torch.distributed as dist
    from torch import nn

    import straggle
    from straggle.observe.metrics import MetricsExporter
    from straggle.observe.metrics_endpoint import Targets

    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(64)] if variant == "norm" else []
    net = nn.Sequential(nn.Linear(32, 64), *norm, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    granularity = {"microbatches": "microbatch", "whole": "step"}.get(variant, "stage")
    model = straggle.StagedDataParallel(
        net,
        deadline=straggle.QuantileDeadline(0.9, slack=1.5),
        late_handling=straggle.LateHandling(max_lag=32, granularity=granularity),
        members=straggle.Elastic(min_ranks=1, suspect_s=SUSPECT_S),
    )
    num_microbatches = 3 if variant == "microbatches" else 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = model.register_state(optimizer=optimizer)
    orders, lines, chance = Orders(folder, rank), Lines(folder, rank), random.Random(f"{rank} {start}")
    model.register_members_hook(
        lambda report: lines.write("members", report.generation, dict(report.left), dict(report.joined))
    )
    done, longest = collections.Counter(), Longest()
    lines.write("up", step)
    end = End(folder)
    with MetricsExporter(model, targets=Targets(str(folder / "run" / "targets"))):
        while not end.reached(step):
            pause_s, order = _pause_s(chance, done, pace_s), None
            try:
                with model.step(num_microbatches):
                    order = orders.next()
                    if order == "data":
                        raise OrderedError("caught")
                    time.sleep(pause_s)
                    if order == "forward":
                        raise OrderedError("caught")
                    inputs = torch.randn(48, 32, generator=torch.Generator().manual_seed(64 * step + rank))
                    is_nan = chance.random() < 1 / 300
                    done["NaN"] += is_nan
                    for part in inputs.chunk(num_microbatches):
                        loss = (model(part) - part[:, :8]).square().mean() / num_microbatches
                        (loss * (float("nan") if is_nan else 1.0)).backward()
                    if order == "end":
                        raise OrderedError("caught")
                    if order == "exit":
                        raise OrderedError("ends")
            except OrderedError as error:
                if str(error) == "ends":
                    raise
                done["error"] += 1
            else:
                if order is not None:
                    orders.again()
            optimizer.step()
            optimizer.zero_grad()
            report = model.last_report
            assert report is not None
            step = report.step + 1
            if report.different_ranks:
                lines.write("different", report.step, list(report.different_ranks))
            own = report.ranks[rank]
            longest.over(own_fault=own.absent or pause_s > pace_s or order is not None)
            if step % CHECK_EVERY == 0 and not own.absent:
                finite = all(p.isfinite().all().item() for p in net.parameters())
                lines.write("hash", step, digest(net), finite, dict(done))
            if step % 10 == 0:
                lines.write("step", step, own.absent, longest.take())
            if chance.random() < 1 / 200:
                done["pause"] += 1
                with model.pause():
                    time.sleep(0.01)
                longest.forget()
        (folder / f"hash.{rank}").write_text(f"{step} {digest(net)}")
    model.close()


def _pause_s(chance, done, pace_s):
    """A few milliseconds, and now and then a stall."""
    number = chance.random()
    if number < 1 / 1500:
        done["long stall"] += 1
        return pace_s + chance.uniform(0.5, 2.0)
    if number < 1 / 100:
        done["short stall"] += 1
        return pace_s + chance.uniform(0.02, 0.2)
    return pace_s
