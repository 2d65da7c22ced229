"""What sending costs."""

from __future__ import annotations

import pytest

from straggle.policies.links import Link, ring_seconds


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert Link(0.05, 1e6).seconds(2e6) == pytest.approx(2.05)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    fast, slow = Link(0.001, 1e8), Link(0.05, 1e6)
    assert ring_seconds(4e6, [fast, fast, slow, fast]) == pytest.approx(6 * (2 * 0.05 + 1.0))
    assert ring_seconds(4e6, [fast]) == 0
