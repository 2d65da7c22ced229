"""The tail and the telemetry of a message as plain memory: the same numbers as by the tensor's own operations."""

from array import array

import pytest
import torch

from straggle.merge.round.memory import PlainNumbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_written_is_in_the_tensor_and_back(dtype):
    message = torch.full((7,), 9.0, dtype=dtype)
    numbers = PlainNumbers(message[2:6])
    numbers.fill(1.0)
    numbers.write(array("f", [0.5, -2.0]))
    assert message.tolist() == [9.0, 9.0, 0.5, -2.0, 1.0, 1.0, 9.0]
    message.mul_(2)
    assert numbers.tolist() == [1.0, -4.0, 2.0, 2.0]
    copied = numbers.copy(3)
    message.zero_()
    assert copied == array("f", [1.0, -4.0, 2.0])


def test_memory_lives_as_long_as_its_numbers():
    numbers = PlainNumbers(torch.tensor([1.0, 2.0]).repeat(2**16))
    others = [torch.zeros(2**17) for _ in range(4)]
    assert numbers.tolist() == [1.0, 2.0] * 2**16
    assert not any(map(torch.any, others))
