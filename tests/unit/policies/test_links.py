"""What sending costs."""

from __future__ import annotations

import pytest

from straggle.policies.links import Link


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert Link(0.05, 1e6).seconds(2e6) == pytest.approx(2.05)
