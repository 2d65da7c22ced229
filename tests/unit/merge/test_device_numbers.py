"""What a device tells of a step goes into a later row, as soon as it has arrived, and nothing of it twice."""

import logging

import pytest
import torch
from queued_device import RecordingDevice

from straggle.merge.rows.device_numbers import NOTHING_ARRIVED, Arrived, Counts, DeviceNumbers


def counts(*left_out, unusable=0, sizes=(3, 4), num_ranks=2):
    return Counts(torch.tensor([*left_out, unusable], dtype=torch.float32), sizes, num_ranks)


def scalars(**own):
    return {name: torch.tensor(value) for name, value in own.items()}


def test_nothing_is_taken_before_the_device_has_come_to_it():
    numbers = DeviceNumbers(RecordingDevice(behind=2))
    numbers.add(4, counts(0, 1), scalars(loss=2.0))
    assert [numbers.take(step) for step in (5, 6)] == [NOTHING_ARRIVED] * 2
    assert numbers.take(7) == Arrived(3, 4, False, {"loss": 2.0})
    assert numbers.take(8) == NOTHING_ARRIVED


def test_nothing_is_copied_of_a_step_of_which_the_device_alone_knows_nothing():
    device = RecordingDevice()
    numbers = DeviceNumbers(device)
    numbers.add(0, None, {})
    assert (numbers.take(1), device.copies) == (NOTHING_ARRIVED, 0)


def test_scalars_come_without_counts_and_counts_without_scalars():
    numbers = DeviceNumbers(RecordingDevice())
    numbers.add(0, None, scalars(one=1.0, other=2))
    assert numbers.take(1) == Arrived(1, 0, False, {"one": 1.0, "other": 2.0})
    numbers.add(1, counts(1, 1, unusable=2), {})
    assert numbers.take(2) == Arrived(1, 7, True, {})


def test_of_several_steps_that_arrive_together_counts_are_summed_and_scalars_averaged():
    numbers = DeviceNumbers(RecordingDevice())
    numbers.add(2, counts(1, 0, unusable=2), scalars(loss=1.0, first=7.0))
    numbers.add(3, counts(0, 1, unusable=1), scalars(loss=3.0))
    assert numbers.take(4) == Arrived(2, 7, True, {"loss": 2.0, "first": 7.0})


def test_step_is_skipped_if_all_ranks_have_nothing_usable_and_not_if_one_has():
    assert [counts(0, 1).read([0.0, 1.0, unusable])[1] for unusable in (0.0, 1.0, 2.0)] == [False, False, True]


def test_scalars_for_which_a_row_has_no_room_come_in_the_next_one():
    numbers = DeviceNumbers(RecordingDevice())
    numbers.add(0, counts(1, 0), scalars(a=1.0, b=2.0, c=3.0))
    first = numbers.take(1, room=1)
    numbers.add(1, counts(0, 0), scalars(a=5.0))
    second = numbers.take(2, room=0)
    third = numbers.take(3, room=8)
    assert (len(first.scalars), first.nonfinite, dict(second.scalars), second.nonfinite) == (1, 3, {}, 0)
    assert (first.behind, third.behind) == (1, 3)
    assert {**third.scalars, **first.scalars} == {"a": 3.0 if "a" not in first.scalars else 1.0, "b": 2.0, "c": 3.0}
    assert numbers.take(4) == NOTHING_ARRIVED


def test_step_that_was_restored_is_one_behind_at_least():
    numbers = DeviceNumbers(RecordingDevice())
    numbers.add(9, counts(1, 0), {})
    assert numbers.take(3).behind == 1


@pytest.mark.parametrize("behind", [0, 5])
def test_bad_numbers_that_no_row_has_are_named_at_the_end(behind, caplog):
    device = RecordingDevice(behind)
    numbers = DeviceNumbers(device)
    numbers.add(6, counts(1, 0), scalars(loss=1.0))
    numbers.add(7, counts(0, 1), {})
    with caplog.at_level(logging.WARNING):
        numbers.close(3)
    assert "rank 3, since step 6: 7 gradients were not finite" in caplog.text
    assert device.waits == (behind > 0)


def test_nothing_is_named_at_the_end_if_all_was_finite(caplog):
    numbers = DeviceNumbers(RecordingDevice())
    numbers.add(6, counts(0, 0), {})
    numbers.close(3)
    DeviceNumbers(RecordingDevice()).close(3)
    assert not caplog.text
