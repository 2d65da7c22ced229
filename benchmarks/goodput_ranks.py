"""One rank of `benchmarks/members.py goodput`, of each system: the same model and work, and lines in the same form.

A line says: a step, how many ranks' gradients are in what came out of it, and how many ranks computed in it.
"""

import os
import sys
import time
from pathlib import Path

RANKS = 8
WIDTH = 256
WORK_S = 0.1
SAVE_EVERY = 20
LEAST = RANKS // 2 + 1
SUSPECT_S = 2.0


def straggle_rank(folder):
    """As docs/members.md has it."""
    import torch.distributed as dist

    import straggle

    dist.init_process_group("gloo")
    net, optimizer = _model()
    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=LEAST, suspect_s=SUSPECT_S))
    rank, step = dist.get_rank(), model.register_state(optimizer=optimizer)
    lines, end = _lines(folder, rank)
    while not end.reached(step):
        with model.step():
            _work(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        assert report is not None
        if not report.ranks[rank].absent:
            useful = sum(stage.weight * stage.numel for stage in report.stages)
            useful /= sum(stage.numel for stage in report.stages)
            computed = [own for own in report.ranks if own.reach > 0 or own.cause == "members"]  # the latter: lost
            lines.write(report.step, useful, len(computed))
        step = report.step + 1
    _end(folder, rank, step, net)
    model.close()


def ddp_rank(folder):
    """DDP that begins at its last checkpoint."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    _begin(folder, int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    net, optimizer = _model()
    rank, step, saved = dist.get_rank(), 0, Path(folder, "checkpoint")
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    lines, end = _lines(folder, rank)
    while not end.reached(step):
        _work(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        lines.write(step, RANKS, RANKS)
        step += 1
        if rank == 0 and step % SAVE_EVERY == 0:
            partial = saved.with_suffix(".partial")
            torch.save({"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, partial)
            partial.rename(saved)
    _end(folder, rank, step, net)
    dist.destroy_process_group()


def torchft_rank(folder):
    """torchft as its own example of DDP has it, one replica group a rank."""
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank = int(os.environ["REPLICA"])
    net, inner = _model()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state_dict():
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state):
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=LEAST,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    lines, end = _lines(folder, rank)
    while not end.reached(step := manager.current_step()):
        optimizer.zero_grad()
        _work(model, step, rank)
        optimizer.step()
        number, now = manager.num_participants(), manager.current_step()
        lines.write(now, number if now > step else 0, number)
    _end(folder, rank, manager.current_step(), net)
    until = time.monotonic() + 20
    while time.monotonic() < until and len(list(Path(folder).glob("hash.*"))) < RANKS:
        time.sleep(0.1)
    os._exit(0)  # a manager's threads wait for peers that have ended


def lighthouse(folder):
    """torchft's coordinator, until it is ended."""
    from torchft.coordination import LighthouseServer

    suspect_ms = int(1000 * SUSPECT_S)
    server = LighthouseServer("[::]:0", LEAST, suspect_ms, 50, suspect_ms)
    partial = Path(folder, "lighthouse.partial")
    partial.write_text(server.address())
    partial.rename(Path(folder, "lighthouse"))
    while True:
        time.sleep(60)


def ddp_forked(folder):
    """torchrun's agent, whose workers are forks of a process that has loaded torch: they start at no cost."""
    import multiprocessing
    import uuid

    from goodput_ranks import ddp_rank as function  # of a module, for the workers to find it
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "torch.distributed"])
    config = LaunchConfig(
        1, 1, RANKS, run_id=str(uuid.uuid4()), rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        max_restarts=100000, monitor_interval=0.1, start_method="forkserver",
    )  # fmt: skip
    elastic_launch(config, function)(folder)


def _begin(folder, rank):
    """Say which process this is, and let it have been up for as long as a start takes elsewhere."""
    pids = Path(folder, "pids")
    pids.mkdir(exist_ok=True)
    partial = pids / f"partial.{rank}"
    partial.write_text(str(os.getpid()))
    partial.rename(pids / f"rank{rank}")


def _model():
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    time.sleep(max(0.0, float(os.environ["START_S"]) - _age_s()))
    return net, optimizer


def _age_s():
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def _work(model, step, rank):
    import torch

    time.sleep(WORK_S)
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(RANKS * step + rank))
    model(inputs).square().mean().backward()


def _lines(folder, rank):
    from members_job import End, Lines

    return Lines(Path(folder), rank), End(Path(folder))


def _end(folder, rank, step, net):
    from members_job import digest

    Path(folder, f"hash.{rank}").write_text(f"{step} {digest(net)}")


if __name__ == "__main__":
    _what, _folder = sys.argv[1], sys.argv[-1]
    if _what == "torchft":
        _begin(_folder, int(os.environ["REPLICA"]))
    {
        "straggle": straggle_rank,
        "ddp": ddp_rank,
        "ddp-forked": ddp_forked,
        "torchft": torchft_rank,
        "lighthouse": lighthouse,
    }[_what](_folder if _what != "straggle" else Path(_folder))
