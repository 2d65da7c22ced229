"""What ranks send each other of what their modules hold: from what each says of it, the same on all ranks."""

import pytest

from straggle.merge.rows.telemetry import UNCHANGED, UNFINISHED, UNSETTLED, must_exchange
from straggle.merge.state.exchange import Manifest, Transfer, different_tensors, transfers

FLOAT, FLAG, SHORT = ((2,), "torch.float32"), ((2,), "torch.bool"), ((3,), "torch.float32")


def rank(kind=FLOAT, digest=None, gives=True):
    """One that holds ``a``: with ``digest`` if it changed."""
    return Manifest({"a": kind}, {} if digest is None else {"a": digest}, ["a"] if gives else [])


NOT_THERE = Manifest()  # it was stood in for


@pytest.mark.parametrize(
    ("marks", "asked"),
    [
        ([UNCHANGED, UNCHANGED], False),
        ([UNCHANGED, UNFINISHED], False),
        ([7, 7, 7], False),
        ([7, 8], True),
        ([7, UNCHANGED], True),
        ([7, UNFINISHED], True),
        ([UNCHANGED, UNSETTLED], True),
    ],
)
def test_ranks_that_hold_something_different_exchange_it(marks, asked):
    assert must_exchange(marks) == asked


@pytest.mark.parametrize(
    ("manifests", "expected"),
    [
        ([rank(digest=1), rank(digest=1)], None),  # alike
        ([rank(digest=1), rank(digest=2)], Transfer("a", (0, 1), FLOAT, is_mean=True)),
        ([rank(digest=1), rank()], Transfer("a", (0, 1), FLOAT, is_mean=True)),  # it ran there, and changed nothing
        ([rank(FLAG, 1), rank(FLAG, 2)], Transfer("a", (0,), FLAG)),
        ([rank(FLAG), rank(FLAG, 2)], Transfer("a", (0,), FLAG)),
        ([rank(FLAG, gives=False), rank(FLAG, 2)], Transfer("a", (1,), FLAG)),  # it did not run on the first
        ([rank(digest=1), rank(SHORT, 2)], Transfer("a", (0,), FLOAT)),  # no mean of different shapes
        ([NOT_THERE, rank(digest=1), rank(digest=1)], Transfer("a", (1,), FLOAT)),
        ([rank(digest=1, gives=False), rank(gives=False)], Transfer("a", (1,), FLOAT)),  # back to what it was
        ([rank(digest=1, gives=False), NOT_THERE], Transfer("a", (0,), FLOAT)),  # who knows what it was
        ([rank(digest=1, gives=False), rank(digest=2)], Transfer("a", (1,), FLOAT)),
    ],
)
def test_a_tensor_is_averaged_or_taken_from_the_lowest_rank_that_gives_it(manifests, expected):
    assert transfers(dict(enumerate(manifests))) == ([] if expected is None else [expected])


def test_tensors_whose_sums_are_not_alike_are_named_in_their_order():
    one, other = Manifest(sums={"b": 1, "a": 2, "c": 3}), Manifest(sums={"b": 4, "a": 2, "c": 5})
    assert different_tensors([one, NOT_THERE, other]) == ("b", "c")
