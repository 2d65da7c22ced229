"""The tool that counts host reads of a device finds each way to read, and lets pass what waits for nothing."""

import ctypes

import pytest
import torch
from host_reads import HostReads
from queued_device import RecordingDevice, queued_device

from straggle.backward import device as of_straggle
from straggle.merge.round.memory import PlainNumbers
from straggle.merge.wire.contents import digest, fingerprint

DEVICE = torch.device("cpu")  # what a tensor of the fake device has
READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum() * 2),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if x.sum() > 3 else 2,
    "tolist": lambda x: (x + 1).tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "nonzero": lambda x: x.nonzero(),
    "masked select": lambda x: torch.masked_select(x, x > 0),
    "index by a mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "lengths": lambda x: x.repeat_interleave(x.long()),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu", non_blocking=True),
    "to cpu by keyword": lambda x: x.to(device="cpu"),
    "copy to the host": lambda x: torch.zeros(4).copy_(x),
    "raw memory": lambda x: (ctypes.c_char * x.nbytes).from_address(x.data_ptr()),
    "plain numbers": lambda x: PlainNumbers(torch.zeros(4, device=DEVICE).copy_(x)).tolist(),
    "digest": digest,
    "fingerprint": lambda x: fingerprint([("x", x)]),
    "numbers of the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE),
    "tensor of the host": lambda x: x + torch.ones(4).to(DEVICE),
    "written by the host": lambda x: x.copy_(torch.ones(4)),
    "written by a kernel": lambda x: _added_to(torch.zeros(4, device=DEVICE), x).tolist(),
    "list": lambda x: _copied([torch.zeros(4, device=DEVICE)], [x])[0].tolist(),
    "gradient": lambda x: _gradient(x).tolist(),
}
NONE = {
    "kernels": lambda x: torch.where(x > 2, x / x.sum(), 0.0).cumsum(0),
    "shape": lambda x: (x.shape, x.dtype, x.device, x._version, x.data_ptr(), len(x), x.numel()),
    "views": lambda x: [part.view(2, 1) for part in torch.split(x, [2, 2])],
    "to its own device": lambda x: x.to(DEVICE),
    "of the host": lambda _x: torch.ones(4).sum().item() + torch.tensor([2.0]).tolist()[0],
    "number to a kernel": lambda x: x.add_(2.0).masked_fill_(x > 4, 0.0),
    "to the device without blocking": lambda x: x + torch.ones(4).to(DEVICE, non_blocking=True),
    "lengths that are known": lambda x: x.repeat_interleave(x.long(), output_size=10),
    "copy": lambda x: RecordingDevice().copy_to_host(x).tolist(),
    "backward": lambda x: torch.nn.functional.batch_norm(x.view(2, 2), None, None, training=True).sum(),
}


def _added_to(total, x):
    return total.add_(x)


def _copied(to, x):
    torch._foreach_copy_(to, x)
    return to


def _gradient(x):
    own = x.clone().requires_grad_()
    own.square().sum().backward()
    return own.grad


def found(read):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with HostReads([x]) as reads:
        read(x)
    return reads.reads


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_way_to_wait_for_a_tensor_is_counted_once_with_its_place(read):
    one, *more = found(read)
    assert not more
    assert "test_host_reads.py" in one


@pytest.mark.parametrize("work", NONE.values(), ids=NONE)
def test_what_waits_for_nothing_is_not_counted(work):
    assert found(work) == []


def test_nothing_is_counted_after_the_block():
    x = torch.ones(1)
    with HostReads([x]) as reads:
        pass
    x.tolist()
    x.item()
    assert reads.reads == []


def test_backward_pass_and_its_hooks_are_followed():
    x, found = torch.ones(2, requires_grad=True), []
    x.register_post_accumulate_grad_hook(lambda own: found.extend([own.grad.tolist(), own.grad.sum().item()]))
    with HostReads([x]) as reads:
        x.square().sum().backward()
    assert found == [[2.0, 2.0], 4.0]
    assert [one.partition(":")[0] for one in reads.reads] == ["tolist", "_local_scalar_dense"]


def test_copy_is_unknown_to_the_host_until_a_mark_behind_it_is_ready():
    device, x = RecordingDevice(behind=2), torch.arange(2.0)
    early = device.mark()
    copy = device.copy_to_host(x)
    mark = device.mark()
    x.zero_()  # the device copied before
    assert [device.ready(early), device.ready(mark), copy.isnan().all().item()] == [False, False, True]
    assert device.ready(early)
    assert copy.isnan().all()
    assert device.ready(mark)
    assert copy.tolist() == [0.0, 1.0]
    assert device.waits == 0
    device.copy_to_host(x)
    device.wait(device.mark())
    assert device.waits == 1


def test_fake_device_is_asked_in_its_block_alone():
    with queued_device() as device:
        assert of_straggle.device_of(torch.device("cpu")) is device
    assert isinstance(of_straggle.device_of(torch.device("cpu")), of_straggle.Host)
