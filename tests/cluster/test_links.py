"""A narrow link between hosts in network namespaces: it is named, a step's columns are all of it, its member leaves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from network import enter, made_network
from ranks import run_forked, staged
from torch import nn

from straggle import Elastic, JobDone, MembersReport
from straggle.members.slow.slow_members import AFTER_LOOKS
from straggle.observe.findings import advise
from straggle.observe.numbers.run import read_run
from straggle.observe.numbers.run_numbers import numbers_of
from straggle.observe.trace import TraceWriter

NARROW = 1
MB_PER_S = 1.0


def train(rank: int, names: list[str], folder: Path, num_steps: int) -> int:
    enter(names[rank])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512))
    with staged(model, links=True) as wrapped, TraceWriter(folder / f"{rank}" / "trace.jsonl") as trace:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        for _ in range(num_steps):
            with wrapped.step():
                wrapped(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.write(wrapped.last_report)
        return wrapped.ping_bytes


@pytest.mark.slow
def test_the_narrow_link_is_named_and_columns_add_up(tmp_path: Path) -> None:
    with made_network(3, {NARROW: {"rate": 8e6 * MB_PER_S}}) as network:
        # 1.6 MB of gradients: a ring of three sends 1.1 MB of each step over the narrow link, in both directions
        sent = run_forked(train, 3, list(network.names), tmp_path, 12, timeout_s=300.0)
    assert min(sent) > 0
    run = read_run(tmp_path / "0")
    own_s = sum(run.ranks[name] for name in ("outside_s", "optimizer_s", "data_s", "forward_s", "backward_s", "wait_s"))
    columns = (own_s.max(axis=1) + run.network_s)[1:] / run.seconds[1:]
    assert columns.min() > 0.95
    assert columns.max() < 1.05
    assert {spell.slow.rank for spell in run.slow_links} == {NARROW}
    (spell,) = run.slow_links
    assert {"up", "down"} >= set(spell.slow.slow) - {"latency"} != set()
    # on a busy machine a small message waits as long as a large one, and a link looks quicker than it is
    assert spell.slow.link.slower_bytes_per_s < 3e6 * MB_PER_S < 5e6 < spell.slow.others.slower_bytes_per_s
    assert any("Rank 1's link was slow from step" in sentence for sentence in advise(run, numbers_of(run)))


def train_until_it_is_out(rank: int, names: list[str]) -> list[tuple[int, str]]:
    """In which steps this rank saw that the one at half the rate was put out for its link, and why; all end then."""
    enter(names[rank])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512))
    seen: list[tuple[int, str]] = []

    def look(change: MembersReport) -> None:
        if (why := change.left.get(NARROW, "")).startswith("its link is slow: "):
            seen.append((change.step, why))

    with staged(model, members=Elastic()) as wrapped, contextlib.suppress(JobDone):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        wrapped.register_state(optimizer=optimizer)
        wrapped.register_members_hook(look)
        over = 0.0
        while not over:
            with wrapped.step() as step:
                step.log(over=float(bool(seen)))
                wrapped(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            over = wrapped.last_report.scalars.get("over", 0.0)
    return seen


@pytest.mark.slow
def test_member_at_half_the_rate_is_put_out_because_the_others_merge_more_without_it() -> None:
    rates = {**{host: 20.0 for host in range(4) if host != NARROW}, NARROW: 10.0}
    with made_network(4, {host: {"rate": 8e6 * rate} for host, rate in rates.items()}) as network:
        found = run_forked(train_until_it_is_out, 4, list(network.names), timeout_s=300.0)
    # all that see it see the same; one whose link looked slow, too, as on a busy machine, is out and sees nothing
    ((step, _),) = {own[0] for rank, own in enumerate(found) if rank != NARROW and own}
    assert step > AFTER_LOOKS
