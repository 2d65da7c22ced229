"""What a group of gloo holds of what was launched in it."""

import weakref

import torch
import torch.distributed as dist

from straggle.merge.groups import GlooGroup, is_over


class Running:
    """A collective that does not end."""

    def is_completed(self):
        return False


def test_group_holds_no_collective_that_is_over_and_all_that_are_not():
    group = GlooGroup(dist.HashStore(), 0, 1, 5.0, 5.0)
    works = [group.all_reduce(torch.ones(4)), group.barrier()]
    running = group._launched(Running())
    assert all(is_over(work, 5.0) for work in works)
    held = [weakref.ref(work) for work in (*works, running)]
    del works, running

    assert None not in [work() for work in held]
    group.forget_ended()

    assert [work() is None for work in held] == [True, True, False]
    group.drop()
