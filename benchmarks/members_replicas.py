"""Replicas of several ranks (FSDP2) of which ranks are killed and stopped; see `benchmarks/members.py`.

A turn hits one rank, or two of different replicas at once, or one more while its replica is healed. It is over when all
replicas take part again.
"""

import itertools
import random
import signal
import statistics
import time
from pathlib import Path

from members_job import End, Job, Lines, Tail

TURNS = ("kill", "kill", "heal", "kill", "stop", "two")
CHECK_EVERY = 20  # steps between two hashes
SUSPECT_S = 2.0
AHEAD = 40  # steps between saying where the end is and the end
LIMIT_S = 120.0  # for a turn


def rank_main(folder, sleep_s):
    """One rank: trains its shard, and leaves when each step ended, and hashes of what it has."""
    import logging

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import straggle

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    mesh, rank = straggle.replica_mesh(), dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 8))
    for block in net[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    model = straggle.StagedDataParallel(
        net,
        deadline=straggle.QuantileDeadline(0.9, slack=1.5),
        members=straggle.Elastic(min_ranks=1, suspect_s=SUSPECT_S),
        merge=straggle.Merge(check_every=CHECK_EVERY),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lines = Lines(folder, rank)
    step = model.register_state(optimizer=optimizer)
    lines.write("up", step)
    end = End(folder)
    while not end.reached(step):
        with model.step():
            time.sleep(sleep_s)
            inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(64 * step + rank))
            (model(inputs) - inputs[:, :8]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = model.last_report
        silent = [own.rank for own in report.ranks if own.absent or own.reach == 0]
        lines.write("step", report.step, silent, list(report.different_ranks or ()))
        step = report.step + 1
        if step % CHECK_EVERY == 0 and not report.ranks[model.rank].absent:  # otherwise it has an older state
            lines.write("hash", step, state_digest(net, optimizer))
    (folder / f"hash.{rank}").write_text(state_digest(net, optimizer))
    model.close()


def state_digest(net, optimizer):
    """A hash of this rank's shards of all parameters and of the optimizer's state."""
    import hashlib

    content = hashlib.sha256()
    of_optimizer = (value for own in optimizer.state.values() for value in own.values())
    for value in (*net.state_dict().values(), *of_optimizer):
        content.update((value.to_local() if hasattr(value, "to_local") else value).detach().numpy().tobytes())
    return content.hexdigest()[:16]


class Watched:
    """What the processes of all ranks have written until now."""

    def __init__(self, job, shards):
        self.job, self.shards = job, shards
        self.at, self.silent, self.hashes, self.different = {}, {}, {}, []
        self.up = {}  # by rank, the number of its last process that takes part, and from which step on
        self.durations = {}  # by step, the longest of any rank that made the step before as well
        self._tails, self._last = {}, {}

    def read(self):
        for rank in range(self.job.ranks):
            for start in range(self.job.starts(rank) + 1):
                tail = self._tails.setdefault((rank, start), Tail(self.job.folder / f"steps.{rank}.{start}"))
                for at, what, step, *values in tail.new():
                    self._take(rank, start, at, what, step, values)

    def _take(self, rank, start, at, what, step, values):
        if what == "up":
            self.up[rank] = start, step
        elif what == "hash":
            self.hashes.setdefault((step, rank % self.shards), set()).add(values[0])
        else:
            before_at, before = self._last.get((rank, start), (at, None))
            if before is not None:
                self.durations[step] = max(self.durations.get(step, 0.0), at - before_at)
            self._last[rank, start] = at, step
            self.at[rank], self.silent[rank] = (start, step), values[0]
            self.different += [(rank, step)] if values[1] else []

    @property
    def step(self):
        return max((step for _, step in self.at.values()), default=-1)

    def all_take_part(self, since):
        """Whether each rank has made a step after ``since`` to which all replicas gave."""
        made = [self.at.get(rank, (0, -1))[1] for rank in range(self.job.ranks)]
        return min(made) > since and not any(map(self.silent.get, range(self.job.ranks)))


def replicas(given):
    """Print what happened; 1 if the job did not end well."""
    script, shards = str(Path(__file__).with_name("members.py")), given.shards
    words = ["--sleep-s", str(given.sleep_s)]
    job = Job(
        given.replicas * shards, script, "replicas-rank", *words, preload=not given.no_preload, replica_size=shards
    )
    seen, chance = Watched(job, shards), random.Random(given.seed)
    kills, turns, longest, back = 0, 0, [], []
    try:
        _until(seen, lambda: seen.all_take_part(10), "all take part")
        for turn in itertools.cycle(TURNS):
            if kills >= given.kills and seen.step >= given.steps:
                break
            due = given.steps * turns * 0.9 / given.kills
            _until(seen, lambda due=due: seen.step >= due, f"step {due:.0f}")
            number, own_longest, own_back = _turn(seen, turn, chance)
            kills, turns = kills + number, turns + 1
            longest.append((own_longest, turn))
            back.append(own_back)
        job.end_at(seen.step + AHEAD)
        status = job.wait()
        seen.read()
        return _show(job, seen, status, kills, longest, back)
    finally:
        job.close()


def _until(seen, condition, what):
    until = time.time() + LIMIT_S
    while seen.read() or not condition():
        if seen.job.process.poll() is not None or time.time() > until:
            logs = "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in seen.job.logs().items() if text)
            raise SystemExit(f"not so within {LIMIT_S:g} s: {what}; {seen.job.words()}\n{logs}")
        time.sleep(0.02)


def _turn(seen, turn, chance):
    """Hit ranks; how many were killed, the longest step that this made, and after how long all took part again."""
    job, shards = seen.job, seen.shards
    victims = chance.sample(range(job.ranks // shards), 2 if turn == "two" else 1)
    ranks = [replica * shards + chance.randrange(shards) for replica in victims]
    hit, at, starts = seen.step, time.time(), {rank: job.starts(rank) for rank in ranks}
    for rank in ranks:
        job.signal(rank, signal.SIGSTOP if turn == "stop" else signal.SIGKILL)
    killed = len(ranks) if turn != "stop" else 0
    again = [(rank, start + 1) for rank, start in starts.items()]
    if turn == "heal":
        other = victims[0] * shards + (ranks[0] + 1) % shards
        _until(seen, lambda: job.pid(other) is not None and job.starts(other) > starts[ranks[0]], f"rank {other} is up")
        killed += job.signal(other, signal.SIGKILL)
        again = [(other, starts[ranks[0]] + 2)]
    _until(seen, lambda: all(seen.up.get(rank, (0, 0))[0] >= start for rank, start in again), f"ranks {again} are back")
    since = seen.step
    _until(seen, lambda: seen.all_take_part(since), "all take part again")
    print(f"step {hit}: {turn}, ranks {ranks}; all took part again in step {seen.step}, after {time.time() - at:.1f} s")
    return killed, max(own for step, own in seen.durations.items() if step >= hit), time.time() - at


def _show(job, seen, status, kills, longest, back):
    """Print it; 1 if anything is not as wanted."""
    ends = job.hashes()
    by_shard = [{text for rank, text in ends.items() if int(rank) % seen.shards == own} for own in range(seen.shards)]
    equal = len(ends) == job.ranks and all(len(own) == 1 for own in by_shard)
    differing = [key for key, own in seen.hashes.items() if len(own) > 1]
    usual = statistics.median(seen.durations.values())
    print(
        f"{seen.step + 1} steps, {kills} processes killed; status {status}; the usual step takes {1000 * usual:.0f} ms"
    )
    print(f"the longest step of a turn: {', '.join(f'{own:.2f} s ({turn})' for own, turn in longest)}")
    print(f"all took part again after {statistics.median(back):.1f} s ({min(back):.1f} to {max(back):.1f})")
    print(
        f"states at the end: {'equal' if equal else f'DIFFERENT: {ends}'}; compared at {len(seen.hashes)} other places"
    )
    print(f"of these different: {differing}; parameters that the ranks themselves found different: {seen.different}")
    if status or not equal:
        print(job.words()[-3000:])
    return int(bool(status or differing or seen.different or not equal))
