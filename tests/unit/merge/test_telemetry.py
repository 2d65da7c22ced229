"""What all ranks read of a step: ways between ranks that one measured, and whether the step was usual."""

from __future__ import annotations

import math
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from telemetry_rows import ALL_COLUMNS, row_of

from straggle.backward.clocks import Stopwatch
from straggle.links.job_pings import JobPings, merged_step
from straggle.members.rows import is_last, leaving_ranks
from straggle.merge.rows.table import Table
from straggle.merge.rows.telemetry import MAX_SCALARS, MAX_WAYS, UNCHANGED, absent_row, means_of, name_hash
from straggle.policies.network.merge_time import Link
from straggle.policies.network.rank_links import Way
from straggle.source.kept import NONE


def encoded(*ways: Way) -> torch.Tensor:
    return row_of(ways=ways).encode()


@pytest.mark.parametrize("count", range(MAX_WAYS + 2))
def test_ways_that_a_rank_measured_are_in_its_row(count: int) -> None:
    ways = [Way(1, target, Link(0.25, 2.0**20 * (target + 1)), 0.5) for target in range(count)]
    table = Table(torch.stack([encoded(), encoded(*ways), absent_row(0)]), 0)
    assert table.ways() == ways[:MAX_WAYS]


def test_links_come_from_the_rows_of_all_ranks() -> None:
    table = Table(torch.stack([encoded(Way(0, 1, Link(0.25, 64.0))), encoded(Way(1, 0, Link(0.5, 8.0)))]), 0)
    assert [link.up_bytes_per_s for link in table.links()] == [64.0, 8.0]
    assert [link.down_bytes_per_s for link in table.links()] == [8.0, 64.0]
    assert [link.latency_s for link in table.links()] == [0.25, 0.25]


def test_a_way_ages_from_when_it_was_measured() -> None:
    channel: Any = SimpleNamespace(rank=0, world_size=2, store=None)
    rank: Any = SimpleNamespace(
        channel=channel, merging=SimpleNamespace(on_its_way=None), stopwatch=Stopwatch(lambda: 100.5)
    )
    pings = JobPings(rank, merged_bytes=1, begins=False, out=frozenset, on_long=None)
    current: Any = None
    row = row_of()
    assert pings.submit(current, row) is row
    pings.measure(((98.0, Way(0, 1, Link(0.25, 64.0))),))
    assert pings.submit(current, row).ways == (Way(0, 1, Link(0.25, 64.0), 2.5),)


@pytest.mark.parametrize(
    ("takes_part_from", "members", "out"),
    [(0, (0, 1), (2,)), (5, (0, 1), (2,)), (6, (), ()), (sys.maxsize, (), ())],  # put out after step 5, and not back
)
def test_a_rank_that_has_been_put_out_pings_none(takes_part_from: int, members: tuple[int, ...], out: object) -> None:
    table = Table(torch.stack([encoded(), encoded(), absent_row(0), absent_row(0)]), 0)
    merged = merged_step(5, 0.5, table, {1, 2}, takes_part_from=takes_part_from)
    assert (merged.step, merged.seconds, merged.members, merged.out) == (5, 0.5, members, out)


USUAL = {"stepped": 1.0, "kept": NONE, "frozen": NONE, "state": UNCHANGED, "compute_s": 0.5}


@pytest.mark.parametrize(
    "unusual",
    [
        *(
            {name: True}
            for name in ("late", "stood_in", "idle", "absent", "failed", "replans", "without_store", "admits")
        ),
        *({"stepped": stepped} for stepped in (0.0, 2.0, math.nan)),
        *({name: 1} for name in ("kept", "frozen", "fingerprint", "state", "pool_parts", "nonfinite", "leaves")),
        {"cause": 0},
        {"cost": 3.0},
    ],
    ids=str,
)
def test_a_step_is_usual_only_if_no_row_tells_anything_else(unusual: dict[str, float]) -> None:
    rows = [row_of(**USUAL).encode(ALL_COLUMNS), row_of(**USUAL).encode(ALL_COLUMNS)]
    assert Table(torch.stack(rows), 0, ALL_COLUMNS).is_usual
    rows[1] = row_of(**{**USUAL, **unusual}).encode(ALL_COLUMNS)
    assert not Table(torch.stack(rows), 0, ALL_COLUMNS).is_usual


def test_numbers_of_wings_are_where_their_columns_say_and_zeros_in_a_job_without_that_wing() -> None:
    said: dict[str, float] = {column.name: number + 1.0 for number, column in enumerate(ALL_COLUMNS.of_wings)}
    rows = [row_of(**USUAL, computed=(0.5,), stage_s=(0.25,), estimated=(0.0,), **own) for own in ({}, said)]
    table = Table(torch.stack([row.encode(ALL_COLUMNS) for row in rows]), 1, ALL_COLUMNS)
    assert {column.name: table.told(column)[1] for column in ALL_COLUMNS.of_wings} == said
    assert all(table.told(column)[0] == 0.0 for column in ALL_COLUMNS.of_wings)
    assert table.rows[:, table.of_stages.computed].tolist() == [[0.5], [0.5]]
    without = Table(rows[0].encode().unsqueeze(0), 1)
    assert {without.told(column) for column in ALL_COLUMNS.of_wings} == {(0.0,)}
    assert without.rows[:, without.of_stages.computed].tolist() == [[0.5]]


def test_row_that_says_what_no_column_is_there_for_is_refused() -> None:
    with pytest.raises(AssertionError):
        row_of(leaves=1).encode()


@pytest.mark.parametrize(
    ("rows", "leaving", "ends"),
    [
        ([{}, {}, {"leaves": 2}], {2}, False),
        ([{}, {"leaves": 2}, {"leaves": 2}], (), True),  # each could go, but not both
        ([{}, {"absent": True}, {"leaves": 2}], (), True),
        ([{"leaves": 1}, {"leaves": 1}, {}], {0, 1}, False),
        ([{"leaves": 3}, {}, {}], (), True),  # all were told to end, and this one heard it first
        ([{"stood_in": True}, {"stood_in": True}, {"leaves": 2}], (), False),  # later: who stays may lack the state
        ([{"stood_in": True}, {}, {"leaves": 2, "stood_in": True}], {2}, False),
        ([{}, {}, {}], (), False),
        ([{"late": True}, {}, {}], (), False),
    ],
)
def test_ranks_that_are_to_end_leave_if_the_others_go_on_without_them_and_otherwise_all_end(
    rows: list[dict[str, float]], leaving: set[int], ends: bool
) -> None:
    table = Table(torch.stack([row_of(**{**USUAL, **own}).encode(ALL_COLUMNS) for own in rows]), 0, ALL_COLUMNS)
    assert (leaving_ranks(table), is_last(table)) == (frozenset(leaving), ends)


# what a rank has of a scalar in a step: nothing, a value, none yet because only its device knows it; or it is absent
HAS = {
    "nothing": {},
    "1": {"scalars": {"loss": 1.0}},
    "4": {"scalars": {"loss": 4.0}},
    "awaited": {"awaited": ("loss",)},
}


@pytest.mark.parametrize("of_ranks", [*product([*HAS, "absent"], repeat=3)], ids="-".join)
def test_scalar_is_the_mean_of_the_values_that_are_there_and_known_to_come_if_none_is(of_ranks: list[str]) -> None:
    rows = [absent_row(0) if own == "absent" else row_of(**HAS[own]).encode() for own in of_ranks]
    found, key = Table(torch.stack(rows), 0).scalars(), name_hash("loss")
    values = [float(own) for own in of_ranks if own.isdigit()]
    if values:
        assert found == {key: sum(values) / len(values)}
    elif "awaited" in of_ranks:
        assert [*found] == [-key]
        assert math.isnan(found[-key])
    else:
        assert found == {}


def test_a_row_has_room_for_values_of_the_step_before_beside_names_of_this_one() -> None:
    old, new = ([f"{kind}{one}" for one in range(MAX_SCALARS)] for kind in ("old", "new"))
    row = row_of(scalars=dict.fromkeys(old, 2.0), awaited=tuple(new))
    found = Table(row.encode().unsqueeze(0), 0).scalars()
    assert found.keys() == {*map(name_hash, old), *(-name_hash(name) for name in new)}


def test_mean_that_is_not_a_number_is_not_taken_for_one_that_is_to_come() -> None:
    means = means_of([[7.0, math.nan, -9.0, math.nan], [7.0, 1.0, 9.0, 3.0], [0.0, 0.0, -11.0, math.nan]])
    assert [*means] == [7.0, 9.0, -11.0]
    assert math.isnan(means[7.0])
    assert means[9.0] == 3.0
