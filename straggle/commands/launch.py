"""Start the workers of a job, and start each that dies again, while the others go on.

straggle launch --nproc-per-node 4 train.py --steps 1000
straggle launch --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 --nproc-per-node 8 -m my.training
straggle launch --store-only --port 29500
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from straggle.commands.launching.agent import Agent, Worker, say
from straggle.commands.launching.launch_options import PIDS_DIR, arguments, port_number
from straggle.commands.launching.launcher import Events, Launcher, Nodes, next_event, serve_until_signal, signals_into
from straggle.commands.launching.restarting import RestartRules
from straggle.commands.launching.spares import Node, Spares
from straggle.commands.launching.stopped_process import SilentWorkers, StoppedWorkers
from straggle.commands.launching.store_host import LOOPBACK, StoreAddress, connect, no_answer, serve_store
from straggle.commands.launching.together import Together
from straggle.commands.launching.worker_process import ForkServer, Program, SpareStarter, Starter, new_process
from straggle.members import agents
from straggle.members.replica_mesh import REPLICA_SIZE
from straggle.merge.wire import launcher_words
from straggle.merge.wire.store import JobStore, StoreUnreachable

OF_ONE_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK")  # of a node's workers; the rest of their environment is the same
_COUNT = "TORCHELASTIC_RESTART_COUNT"  # but for this, which the agent adds
_JOIN_POLL_S = 0.5
_SAY_EVERY_S = 60.0


@dataclass(frozen=True)
class LaunchedJob:
    """The job as one node sees it."""

    nproc_per_node: int
    num_nodes: int
    node_rank: int
    endpoint: StoreAddress
    run_id: str
    max_restarts: int
    replica_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.num_nodes * self.nproc_per_node


def worker_environment(job: LaunchedJob, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a worker finds: torchrun's variables, and those of straggle; the agent adds the number of the start.

    ``inherited`` is the launcher's own environment. The number of threads and of glibc's heaps,
    and how nccl and gloo behave, are as they stand there.
    """
    rank = job.node_rank * job.nproc_per_node + local_rank
    cores = max(1, _num_cores() // job.nproc_per_node)
    of_torchrun = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.nproc_per_node,
        "GROUP_RANK": job.node_rank,
        "GROUP_WORLD_SIZE": job.num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": job.world_size,
        "MASTER_ADDR": job.endpoint.host,
        "MASTER_PORT": job.endpoint.port,
        "TORCHELASTIC_RUN_ID": job.run_id,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # torch connects to the launcher's store instead of serving its own
    }
    unless_given = {
        "OMP_NUM_THREADS": cores,
        "MALLOC_ARENA_MAX": max(2, cores),  # fewer heaps grow as threads come and go with the members
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "TORCH_GLOO_LAZY_INIT": 1,  # a worker that comes back connects to no peer until it is used: none awaits it
    }
    if job.replica_size > 1:
        of_torchrun[REPLICA_SIZE] = job.replica_size
    named = {name: str(value) for name, value in of_torchrun.items()}
    return {**{name: str(value) for name, value in unless_given.items()}, **inherited, **named, "STRAGGLE_ELASTIC": "1"}


def launch(given: argparse.Namespace, start: Starter = new_process, spare_start: SpareStarter | None = None) -> int:
    """Serve or find the store, and run the workers; returns the exit status.

    ``start``: how a worker's process is started if no module is to be loaded before; ``spare_start``: a spare's, by
    default as a fork of an empty Python.
    """
    events: Events = SimpleQueue()
    with signals_into(events):
        endpoint = near = given.rdzv_endpoint or StoreAddress(LOOPBACK, 0)
        hosts = given.node_rank == 0 and not given.external_store
        if hosts:
            served = serve_store(endpoint)  # kept until the end
            near, endpoint = served.near, StoreAddress(endpoint.host, served.near.port)
        elif (number := _find(near, events)) is not None:
            return 128 + number
        store = JobStore(
            lambda: connect(near),
            f"the job's store at {near}",
            who=f"straggle launch, node {given.node_rank}",
            without="workers that end are started again, but the others are not told",
            watched=(f"{agents.PREFIX}/started/0",),
        )
        try:
            return _run(given, endpoint, store, events, start, spare_start, serves=hosts)
        finally:
            store.close()


def main(start: Starter = new_process, spare_start: SpareStarter | None = None) -> int:
    """The command; returns its exit status."""
    words = sys.argv[1:]
    try:
        return _store_only(words) if words[:1] == ["--store-only"] else launch(arguments(words), start, spare_start)
    except OSError as error:
        say(str(error))
        return 2


def _run(
    given: argparse.Namespace,
    endpoint: StoreAddress,
    store: JobStore,
    events: Events,
    start: Starter,
    spare_start: SpareStarter | None,
    *,
    serves: bool,
) -> int:
    run_id = given.rdzv_id or (str(uuid.uuid4()) if given.nnodes == 1 else "none")  # as torchrun does
    job = LaunchedJob(
        given.nproc_per_node, given.nnodes, given.node_rank, endpoint, run_id, given.max_restarts, given.replica_size
    )
    environments = [worker_environment(job, rank, os.environ) for rank in range(job.nproc_per_node)]
    of_all = {name: value for name, value in environments[0].items() if name not in OF_ONE_RANK}
    with contextlib.ExitStack() as stack:
        starter, forks = start, spare_start
        if given.preload or (given.spares and forks is None):
            forks = server = stack.enter_context(contextlib.closing(ForkServer(given.preload, of_all)))
            while not server.wait_ready(_JOIN_POLL_S):
                if isinstance(event := next_event(events, 0.0), signal.Signals):
                    return 128 + event
            starter = server if given.preload else start
        program = Program(given.script, tuple(given.arguments), given.module)
        log_dir, pids_dir = _new_log_folder(given), _folder(_pids_dir(given))
        rules, spares = RestartRules(given.max_restarts, given.restart_delay_s), None
        if given.spares and forks is not None:
            node = Node(program, of_all, (*OF_ONE_RANK, _COUNT), forks, log_dir)
            spares = stack.enter_context(
                contextlib.closing(Spares(given.spares, node, rules, say, partial(_why_no_spare, store)))
            )
            spares.start()
        workers = [
            Worker(int(environment["RANK"]), program, environment, starter, log_dir, pids_dir, spares)
            for environment in environments
        ]
        replicas = [Together(given.grace_s) for _ in range(0, len(workers), given.replica_size)]
        started = [
            Agent(worker, rules, store, world_size=job.world_size, ended=events, together=replica)
            for worker, replica in zip(workers, _each(replicas, given.replica_size), strict=True)
        ]
        for watch in (SilentWorkers(started, store), StoppedWorkers(started, store)):
            stack.enter_context(contextlib.closing(watch)).start()
        launcher = Launcher(
            started,
            events,
            Nodes(store, node_rank=job.node_rank, num_nodes=job.num_nodes),
            grace_s=given.grace_s,
            before_stop=partial(_post_all_told, store) if serves or job.num_nodes == 1 else lambda: None,
        )
        return launcher.run(serves=serves)


def _why_no_spare(store: JobStore) -> str:
    """Why a spare could never take a place in this job; nothing while it could."""
    with contextlib.suppress(StoreUnreachable):
        if store.ask(launcher_words.needs_all):
            return "this job trains with all of its ranks or not at all, so there are none: write members=Elastic()"
    return ""


def _post_all_told(store: JobStore) -> None:
    """Let each worker know, before it gets SIGTERM, that all are to end: there is no other node, or soon no store."""
    with contextlib.suppress(StoreUnreachable):
        store.ask(agents.post_all_told)


def _each(replicas: Sequence[Together], times: int) -> list[Together]:
    return [replica for replica in replicas for _ in range(times)]


def _store_only(words: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="straggle launch --store-only", allow_abbrev=False)
    options.add_argument("--port", type=port_number, required=True, help="served on all IPv4 addresses of this machine")
    port = options.parse_args(words[1:]).port
    events: Events = SimpleQueue()
    with signals_into(events):
        served = serve_store(StoreAddress("0.0.0.0", port))
        say(f"serves a job's store on port {served.near.port}, until SIGTERM or SIGINT")
        return serve_until_signal(events)


def _find(endpoint: StoreAddress, events: Events) -> int | None:
    """Wait until the store is there; a signal that comes meanwhile is returned."""
    said_at = -math.inf
    while why := no_answer(endpoint):
        if time.monotonic() - said_at >= _SAY_EVERY_S:  # the first node may come up later, and its name with it
            said_at = time.monotonic()
            say(f"waits for the job's store at {endpoint}: {why}")
        if isinstance(event := next_event(events, _JOIN_POLL_S), signal.Signals):
            return event
    return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pids_dir(given: argparse.Namespace) -> Path | None:
    if given.run_dir is not None:
        return Path(given.run_dir, "pids")
    return Path(os.environ[PIDS_DIR]) if os.environ.get(PIDS_DIR) else None


def _new_log_folder(given: argparse.Namespace) -> Path | None:
    """One for each launcher, so that no earlier one's logs are lost, nor those of a job that still runs."""
    if given.log_dir is None:
        return None
    for number in count():
        path: Path = given.log_dir / f"node{given.node_rank}.launch{number}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    say(f"the workers' output is in {path}")
    return path


def _folder(path: Path | None) -> Path | None:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    return path
