"""One rank of `benchmarks/peers.py`, under each system: the same model, work and faults, and lines in the same form.

A line says: a step; of how many ranks gradients were computed for what came out of it; how many of these are not in
it; and how many ranks gave any (0 between two means of several steps). A rank is slow while there is a file
``slow.RANK``: its layers take twice as long.
"""

import logging
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

RANKS, WIDTH, LAYERS = 4, 256, 5
WORK_S = 0.2
BATCH = 4
SAVE_EVERY = 20  # steps of DDP between two checkpoints
SUSPECT_S = 2.0  # ours, and torchft's lighthouse's
SYNC_EVERY = 4  # steps of local SGD between two means
EPOCH = 25  # steps of hivemind between two means


def begin(folder, rank):
    """Say which process this is; the model, its optimizer, and where lines go."""
    import torch
    from members_job import End, Lines
    from sleeping import sleeping_net

    pids = folder / "pids"
    pids.mkdir(exist_ok=True)
    partial = pids / f"partial.{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(pids / f"rank{rank}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = sleeping_net(WIDTH, LAYERS, WORK_S)
    return net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9), Lines(folder, rank), End(folder)


class Work:
    """A rank's batches."""

    def __init__(self, folder, rank, net):
        self._slow, self._layers, self._rank = folder / f"slow.{rank}", list(net)[1:], rank

    def __call__(self, model, step):
        """The loss of this rank's batch of a step."""
        import torch

        seconds = WORK_S / LAYERS * (2 if self._slow.exists() else 1)
        for layer in self._layers:
            layer.seconds = seconds
        generator = torch.Generator().manual_seed(RANKS * step + self._rank)
        return model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean()


def straggle_rank(folder):
    """As docs/members.md has it."""
    import torch.distributed as dist

    import straggle

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, optimizer, lines, end = begin(folder, rank)
    model = straggle.StagedDataParallel(net, deadline=straggle.AutoDeadline(), members=straggle.Elastic())
    step, work = model.register_state(optimizer=optimizer), Work(folder, rank, net)
    while not end.reached(step):
        with model.step():
            work(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        if not report.ranks[rank].absent:
            useful = sum(stage.weight * stage.numel for stage in report.stages)
            useful /= sum(stage.numel for stage in report.stages)
            computed = [own for own in report.ranks if own.reach > 0 or own.cause == "members"]
            giving = sum(own.reach > 0 for own in report.ranks)
            lines.write(report.step, len(computed), max(0.0, len(computed) - useful), giving)
        step = report.step + 1
    model.close()


def ddp_rank(folder):
    """DDP under torchrun, which begins again at its last checkpoint."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    net, optimizer, lines, end = begin(folder, rank)
    dist.init_process_group("gloo")
    step, saved, work = 0, folder / "checkpoint", Work(folder, rank, net)
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    while not end.reached(step):
        work(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.write(step, RANKS, 0, RANKS)
        step += 1
        if rank == 0 and step % SAVE_EVERY == 0:
            partial = saved.with_suffix(".partial")
            torch.save({"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, partial)
            partial.rename(saved)
    dist.destroy_process_group()


def _managed(folder):
    """A rank under torchft's manager, with the numbers of its own example of DDP."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    rank = int(os.environ["REPLICA"])
    net, inner, lines, end = begin(folder, rank)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load_state_dict(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def manager(**options):
        return Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
            load_state_dict=load_state_dict,
            state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=1,
            timeout=timedelta(seconds=30),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            replica_id=f"replica_{rank}",
            hostname="127.0.0.1",
            **options,
        )

    return rank, net, inner, lines, end, manager


def torchft_rank(folder):
    """torchft, one replica group a rank."""
    from torchft import DistributedDataParallel, Optimizer

    rank, net, inner, lines, end, made = _managed(folder)
    manager = made()
    model, optimizer, work = DistributedDataParallel(manager, net), Optimizer(manager, inner), Work(folder, rank, net)
    while not end.reached(step := manager.current_step()):
        optimizer.zero_grad()
        work(model, step).backward()
        optimizer.step()
        number, now = manager.num_participants(), manager.current_step()
        lines.write(step, number, 0 if now > step else number, number)
    os._exit(0)  # a manager's threads wait for peers that have ended


def local_rank(folder):
    """Local SGD under torchft's manager, as its own test has it: ranks step alone, then parameters are averaged."""
    from torchft.local_sgd import LocalSGD

    rank, net, optimizer, lines, end, made = _managed(folder)
    manager = made(use_async_quorum=False)
    work, step, number = Work(folder, rank, net), 0, 0
    with LocalSGD(manager, net, optimizer, sync_every=SYNC_EVERY):
        while not end.reached(manager.current_step() * SYNC_EVERY):
            before = manager.current_step()
            optimizer.zero_grad()
            work(net, step).backward()
            optimizer.step()
            step += 1
            if step % SYNC_EVERY == 0:
                number = manager.num_participants()
            # parameters of a round that failed stay this rank's own, and are averaged in the next
            lines.write(step, number, 0, number if manager.current_step() > before else 0)
    os._exit(0)


class Heard(logging.Handler):
    """How many peers hivemind's last mean of gradients was over, by the words that its documentation names."""

    def __init__(self):
        super().__init__()
        self.peers = 0

    def emit(self, record):
        words = record.getMessage()
        if found := re.search(r"Averaged gradients with (\d+) peers", words):
            self.peers = int(found[1])
        elif "Proceeding with local gradients" in words:
            self.peers = 1


def hivemind_rank(folder):
    """hivemind by its configuration guide: a large batch, and the times that it gives for small local runs."""
    import hivemind
    import torch

    rank = int(os.environ["REPLICA"])
    net, _, lines, end = begin(folder, rank)
    heard = Heard()
    hivemind.utils.logging.get_logger("hivemind.optim.optimizer").addHandler(heard)
    dht = hivemind.DHT(initial_peers=[os.environ["FIRST_PEER"]], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=BATCH,
        target_batch_size=EPOCH * RANKS * BATCH,
        params=net.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        matchmaking_time=3.0,
        averaging_timeout=15.0,
        verbose=True,
    )
    work, step, expected = Work(folder, rank, net), 0, 1
    optimizer.load_state_from_peers()
    while not end.reached(step):
        epoch = optimizer.local_epoch
        optimizer.zero_grad()
        work(net, step).backward()
        optimizer.step()
        step += 1
        if optimizer.local_epoch > epoch:  # of what all have computed since the last mean
            expected = max(1, optimizer.tracker.global_progress.num_peers)
            lost = EPOCH * RANKS * max(0.0, 1 - heard.peers / expected)
            lines.write(step, EPOCH * RANKS, lost, heard.peers)
        else:
            lines.write(step, 0, 0, 0)
    os._exit(0)


def first_peer(folder):
    """The peer whose address the others of hivemind are given."""
    import hivemind

    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    _say(folder, str(dht.get_visible_maddrs()[0]))


def lighthouse(folder):
    """torchft's coordinator, until it is ended."""
    from torchft.coordination import LighthouseServer

    suspect_ms = int(1000 * SUSPECT_S)
    server = LighthouseServer("[::]:0", 1, suspect_ms, 100, suspect_ms)
    _say(folder, server.address())


def _say(folder, address):
    partial = folder / "address.partial"
    partial.write_text(address)
    partial.rename(folder / "address")
    while True:
        time.sleep(60)


WHAT = {
    "straggle": straggle_rank,
    "ddp": ddp_rank,
    "torchft": torchft_rank,
    "local": local_rank,
    "hivemind": hivemind_rank,
    "lighthouse": lighthouse,
    "first_peer": first_peer,
}

if __name__ == "__main__":
    WHAT[sys.argv[1]](Path(sys.argv[-1]))
