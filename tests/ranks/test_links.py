"""Links are measured if a job has members, or asks for it; any other job has no thread, no port and no pings for it."""

import threading

import pytest
from ranks import run_ranks, staged
from training import features, mlp

from straggle import Elastic

THREADS = ("straggle-ping", "straggle-ping-server")


def train(rank, options, measures):
    """Step two models until the one that was asked to has pinged, and this one if it ``measures``."""
    between, over, number = threading.Event(), False, 0
    with staged(mlp(), links=True) as asked, staged(mlp(), **options) as model:
        while not over:
            has_pinged = asked.ping_bytes > 0 and (model.ping_bytes > 0 or not measures)
            for own in (asked, model):
                with own.step() as step:
                    step.log(pinged=float(has_pinged))
                    own(features(rank, number)).square().mean().backward()
                own.zero_grad()
            over, number = asked.last_report.scalars["pinged"] == 1, number + 1
            between.wait(0.02)
        names = [thread.name for thread in threading.enumerate()]
        return [names.count(name) for name in THREADS], model.ping_bytes > 0


@pytest.mark.parametrize(
    ("options", "measures"),
    [
        ({}, False),
        ({"links": True}, True),
        ({"members": Elastic()}, True),
        ({"members": Elastic(), "links": False}, False),
    ],
    ids=["as it is", "links", "members", "members without links"],
)
def test_links_are_measured_beside_members_or_if_it_is_asked_for(options, measures):
    found = run_ranks(train, 2, options, measures)
    assert found == [([2, 2], True) if measures else ([1, 1], False)] * 2
