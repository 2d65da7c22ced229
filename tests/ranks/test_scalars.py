"""Scalars have the same names on all ranks, whichever rank logged them, and no two names are taken for one."""

from itertools import count

import pytest
from ranks import run_forked, staged
from training import Chain

from straggle.merge.rows.telemetry import ScalarNames, name_hash

pytestmark = pytest.mark.light

WITHIN_S = 30.0


def log_alone(rank, who):
    """Each step's scalars as this rank's report has them; ``who`` logs what, in which step."""
    reports = []
    with staged(Chain()) as model:
        for number in range(4):
            with model.step() as step:
                for name in who.get((rank, number), ()):
                    step.log(**{name: rank + 10.0 * number})
                model(1.0).backward()
            reports.append(list(model.last_report.scalars.items()))
    return reports


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_scalar_of_some_ranks_has_its_name_on_all_of_them(world_size):
    last = world_size - 1
    who = {(0, 0): ["accuracy"], (last, 1): ["seen", "accuracy"], (0, 1): ["accuracy"], (last, 3): ["seen"]}
    expected = [
        [("accuracy", 0.0)],
        [("accuracy", 10.0 + last / 2), ("seen", 10.0 + last)],
        [],
        [("seen", 30.0 + last)],
    ]
    results = run_forked(log_alone, world_size, who)
    assert [[sorted(scalars) for scalars in reports] for reports in results] == [expected] * world_size
    assert all(reports == results[0] for reports in results)  # in the same order, too


def colliding():
    """Two names with one hash."""
    seen = {}
    numbers = ((seen.setdefault(name_hash(f"scalar_{number}"), number), number) for number in count())
    first, second = next(pair for pair in numbers if pair[0] != pair[1])
    return f"scalar_{first}", f"scalar_{second}"


def test_names_that_cannot_be_told_apart_are_refused_on_all_ranks():
    first, second = colliding()
    ends = run_forked(log_alone, 2, {(0, 0): [first], (1, 1): [second]}, outcomes=True, timeout_s=WITHIN_S)
    words = f"scalars '{first}' and '{second}' have the same hash by chance: give one of them another name"
    assert (ends[1].kind, ends[1].message) == ("ValueError", words)
    assert ends[0].kind == "PeerFailed"
    assert "rank 1 raised in step 1" in ends[0].message
    assert words in ends[0].message


class Shelf:
    """A directory that notes what it is asked; gone, it is as a store whose host has died."""

    def __init__(self):
        self.names, self.asked, self.gone = {}, [], False

    def publish_name(self, key, name):
        return self._ask(name, lambda: self.names.setdefault(key, name))

    def published_name(self, key):
        return self._ask(key, lambda: self.names.get(key))

    def _ask(self, what, answer):
        self.asked.append(what)
        if self.gone:
            raise RuntimeError("Broken pipe")
        return answer()


def test_name_is_published_once_and_looked_up_once_by_who_did_not_log_it():
    shelf = Shelf()
    ours, theirs = ScalarNames(shelf), ScalarNames(shelf)
    key = name_hash("loss")
    for _ in range(3):
        ours.log(["loss"])
        assert ours.of([key])[key] == theirs.of([key])[key] == "loss"
    assert shelf.asked == ["loss", int(key)]


def test_without_the_store_a_rank_still_has_the_names_that_it_knows():
    shelf = Shelf()
    names = ScalarNames(shelf)
    names.log(["loss"])
    shelf.gone = True
    names.log(["accuracy"])
    assert names.of(map(name_hash, ["loss", "accuracy", "seen"])) == {
        name_hash("loss"): "loss",
        name_hash("accuracy"): "accuracy",
    }
