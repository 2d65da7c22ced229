"""Links are measured if a job has members, or asks for it; any other job has no thread, no port and no pings for it."""

import os
import threading
from pathlib import Path

import pytest
from ranks import run_forked, staged
from training import features, mlp

from straggle import Elastic
from straggle.integrations.options import take_options

THREADS = ("straggle-ping", "straggle-ping-server")


def train(rank, options, measures):
    """Step two models until the one that was asked to has pinged, and this one if it ``measures``."""
    between, over, number = threading.Event(), False, 0
    before = set(threading.enumerate())  # a closed model's may still be there
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
        names = [thread.name for thread in set(threading.enumerate()) - before]
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
    found = run_forked(train, 2, options, measures)
    assert found == [([2, 2], True) if measures else ([1, 1], False)] * 2


def listening():
    """On how many ports this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


def ports_of_a_model(_rank):
    before = listening()
    with staged(mlp()):
        return listening() - before


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux' /proc/net")
def test_model_has_a_port_for_each_of_its_two_groups_and_no_other():
    assert run_forked(ports_of_a_model, 2) == [2, 2]


def test_integrations_take_the_word_too():
    words = {"links": True, "lr": 0.1}
    assert (take_options(words), words) == ({"links": True}, {"lr": 0.1})
