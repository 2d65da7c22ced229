"""On a device that is a queue, buffers get the means that they get on the CPU, and the host reads nothing back."""

import random

import pytest
import torch
from host_reads import HostReads
from queued_device import RecordingDevice, queued_device
from torch import nn

from straggle.merge.state.averages import Averages
from straggle.merge.state.held import held_by
from straggle.merge.state.queued_averages import QueuedAverages

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.int32, torch.int64)
SHAPES = ((3,), (), (2, 2), (0,), (5,))
ALL = frozenset(range(len(DTYPES)))


class Rank:
    """The averages of one rank: a buffer of each dtype, the same on all ranks to begin with.

    ``first``: the first elements of the first buffers.
    """

    def __init__(self, kind, seed=0, first=()):
        draw = torch.Generator().manual_seed(seed)
        self.module = nn.Module()
        for number, dtype in enumerate(DTYPES):
            shape = SHAPES[number % len(SHAPES)]
            value = 10 * torch.randn(shape, generator=draw, dtype=torch.float64)
            self.module.register_buffer(f"own{number}", value.to(dtype))
        self.buffers = list(self.module.buffers())
        for number, value in enumerate(first):
            self.buffers[number].view(-1)[:1] = value
        self.averages = kind(held_by(self.module), CPU)

    def write(self, draw, odd):
        """Write some buffers, and now and then a number of ``odd`` into one that has a place for it."""
        for buffer in self.buffers:
            if draw.random() < 0.6:
                buffer += (
                    torch.tensor([draw.gauss(0, 5) for _ in range(buffer.numel())]).view(buffer.shape).to(buffer.dtype)
                )
            if buffer.is_floating_point() and buffer.numel() and draw.random() < 0.3:
                buffer.view(-1)[draw.randrange(buffer.numel())] = draw.choice(odd)


def merge(ranks, seed, *, odd, looks=False, kept=frozenset()):
    """One step of these ranks, as many of which take part as ``seed`` says."""
    messages = []
    for rank in ranks:
        rank.averages.begin()
    for number, rank in enumerate(ranks):
        draw = random.Random(f"{seed} {number}")
        rank.write(draw, odd)
        out = rank.averages.end(looks=looks)
        gives = frozenset(own for own in ALL if draw.random() < 0.6)
        messages.append(rank.averages.message(gives - out, ALL - gives - out)[0])
    for rank in ranks:
        rank.averages.apply(sum(messages), kept)


def bits(ranks):
    return [
        [bytes(buffer.contiguous().view(-1).view(torch.uint8).tolist()) for buffer in rank.buffers] for rank in ranks
    ]


@pytest.mark.parametrize("odd", [[1.0], [torch.nan, torch.inf, -torch.inf, 2.0, 3.0]], ids=["finite", "not finite"])
@pytest.mark.parametrize("seed", range(12))
def test_queued_means_are_those_of_the_cpu_and_the_same_on_all_ranks(odd, seed):
    own, queued = ([Rank(kind, seed, first=odd[:3]) for _ in range(3)] for kind in (Averages, QueuedAverages))
    for step in range(6):
        merge(own, f"{seed} {step}", odd=odd)
        merge(queued, f"{seed} {step}", odd=odd)
        for one, theirs in zip(own[0].buffers, queued[0].buffers, strict=True):
            # beside elements that are not finite, the CPU does not add up what 16 bits round away
            atol = 0.25 if one.is_floating_point() and one.itemsize == 2 and odd != [1.0] else 0
            torch.testing.assert_close(theirs, one, rtol=1e-6, atol=atol, equal_nan=True)
        assert bits(queued)[1:] == bits(queued)[:1] * 2


def test_host_reads_nothing_in_a_usual_step_nor_if_a_number_is_bad_or_a_module_did_not_run():
    with queued_device(RecordingDevice(behind=10**6)) as device:
        ranks = [Rank(QueuedAverages) for _ in range(2)]
        for gives in (ALL, ALL - {0, 5}, ALL - {0, 5}, frozenset()):
            with HostReads([buffer for rank in ranks for buffer in rank.buffers]) as reads:
                messages = []
                for rank in ranks:
                    rank.averages.left_out_before()
                    rank.averages.begin()
                    rank.buffers[0].add_(1.0)
                    rank.buffers[1].fill_(torch.nan)
                    assert rank.averages.end(looks=False) == frozenset()
                    messages.append(rank.averages.message(gives, ALL - gives)[0])
                for rank in ranks:
                    rank.averages.apply(messages[0] + messages[1], frozenset())
            assert reads.reads == []
    assert device.waits == 0


def test_buffer_left_out_for_a_bad_number_is_known_when_the_device_has_come_to_it():
    with queued_device(RecordingDevice()) as device:
        rank = Rank(QueuedAverages)
        step(rank, bad=[0])
        assert rank.averages.left_out_before() == {0}
        assert rank.averages.left_out_before() == frozenset()
        step(rank, bad=[])
        assert rank.averages.left_out_before() == frozenset()
        device.behind = 2
        step(rank, bad=[1])
        assert rank.averages.left_out_before() == frozenset()
        step(rank, bad=[2])
        assert rank.averages.left_out_before() == frozenset()
        assert rank.averages.left_out_before() == {1}
        step(rank, bad=[])
        assert rank.averages.left_out_before() == {2}  # while the first was on its way
        step(rank, bad=[0], gives=ALL - {0})
        assert rank.averages.left_out_before() == frozenset()  # it was not given anyway


def step(rank, bad, gives=ALL):
    """A step of a rank alone; returns to finite numbers."""
    rank.averages.begin()
    before = [buffer.clone() for buffer in rank.buffers]
    for number in bad:
        rank.buffers[number].view(-1)[0] = torch.nan
    rank.averages.end(looks=False)
    rank.averages.apply(rank.averages.message(gives, frozenset())[0], frozenset())
    for buffer, old in zip(rank.buffers, before, strict=True):
        assert torch.equal(buffer, old)


def test_integers_that_jump_are_without_a_mean_in_a_step_that_looks():
    rank = Rank(QueuedAverages)
    for looks in (False, True):
        rank.averages.begin()
        rank.buffers[6].fill_(2**62 if looks else -(2**62))
        assert rank.averages.end(looks=looks) == (frozenset({6}) if looks and rank.buffers[6].numel() else frozenset())


def test_small_changes_add_up_though_each_is_rounded_away():
    ranks = [Rank(QueuedAverages) for _ in range(2)]
    for rank in ranks:
        rank.buffers[2].fill_(256.0)  # bfloat16: the next one is 258
        rank.buffers[5].fill_(7)
    for _ in range(8):
        messages = []
        for rank in ranks:
            rank.averages.begin()
        ranks[0].buffers[2].add_(2.0)
        ranks[0].buffers[5].add_(1)
        for rank in ranks:
            rank.averages.end(looks=False)
            messages.append(rank.averages.message(ALL, frozenset())[0])
        for rank in ranks:
            rank.averages.apply(messages[0] + messages[1], frozenset())
    assert [float(one) for rank in ranks for one in rank.buffers[2].view(-1)] == [264.0] * 8
    assert [int(one) for rank in ranks for one in rank.buffers[5].view(-1)] == [11] * 6


def test_codes_and_buffers_elsewhere_are_not_averaged():
    assert QueuedAverages.take(torch.zeros(2), CPU)
    assert not QueuedAverages.take(torch.zeros(2), torch.device("cuda", 0))
    assert not QueuedAverages.take(torch.zeros(2, dtype=torch.uint8), CPU)
    assert not QueuedAverages.take(torch.zeros(2, dtype=torch.bool), CPU)
    assert not QueuedAverages.take(None, CPU)


def test_element_that_was_infinite_gets_its_first_finite_value():
    rank = Rank(QueuedAverages, first=[-torch.inf] * 3)
    step(rank, bad=[])
    for value in (5.0, 7.0):
        rank.averages.begin()
        for buffer in rank.buffers[:3]:
            buffer.view(-1)[0] = value
        rank.averages.end(looks=False)
        rank.averages.apply(rank.averages.message(ALL, frozenset())[0], frozenset())
        assert [float(buffer.view(-1)[0]) for buffer in rank.buffers[:3]] == [value] * 3
