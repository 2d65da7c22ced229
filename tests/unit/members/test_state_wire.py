"""A training state goes from rank to rank and training goes on from it, bit for bit; what comes can run no code."""

import io
import math
import os
import reprlib
import struct
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import timedelta
from enum import IntEnum

import numpy
import pytest
import torch
import torch.distributed as dist
from clock import Clock
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import SequentialSampler

from straggle import LastOwn
from straggle.members.healed.state_wire import CHUNK_BYTES, MAX_DEPTH, Encoded, break_off, decode, encode, receive, send
from straggle.policies.history import History, HistoryWindow

DTYPES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


def content(value):
    """What makes a state the same, bit for bit, with the types of all that is in it."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return value.dtype, value.shape, value.stride(), bytes(raw.tolist())
    if isinstance(value, dict):
        return type(value), [(key, content(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [content(item) for item in value]
    if isinstance(value, float):
        return type(value), "nan" if math.isnan(value) else struct.pack("d", value)
    return type(value), value


def there(state):
    encoded = encode(state)
    return decode(encoded.header, encoded.data)


# -- values


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63,
        -(2**64),
        0.0,
        -0.0,
        0.1,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        1.0,
        "",
        "ä\n\x00\ud800",
        "dict",
        bytes(range(256)),
        [],
        (),
        {},
        [True, False],
        ((1, 2.0), [3, ()]),
        {1: "int", "1": "str", -1: [None], "": {}, "not a name": (), 2**70: 0},
        Counter({3: 2, 5: 1}),
        {"a"},
        1j,
        torch.float32,
        torch.Size([2, 3]),
    ],
    ids=reprlib.repr,
)
def test_plain_values_come_back_exactly_and_of_their_type(value):
    assert content(there(value)) == content(value)
    assert content(there({"in": [value]})) == content({"in": [value]})


def test_values_that_are_read_back_as_plain_ones():
    came = there([OrderedDict(b=1, a=2), nn.Parameter(torch.ones(2)), numpy.float64(0.1)])
    assert content(came) == content([{"b": 1, "a": 2}, torch.ones(2), 0.1])
    assert not came[1].requires_grad


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_each_dtype_and_form_come_back_bit_for_bit(name):
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    raw = torch.randint(256, (4 * 6 * dtype.itemsize,), dtype=torch.uint8)
    whole = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(4, 6)
    forms = [whole, whole.t(), whole[:, ::2], whole[1:3, 2:5], whole[1, 1], whole[:0], whole[:, :1].expand(4, 6)]
    state = {"before": torch.tensor([True]), **dict(enumerate(forms))}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    assert content(there(state)) == content(expected)


def test_all_dtypes_lie_in_one_piece_of_data_without_gaps():
    tensors = [torch.zeros(3, dtype=getattr(torch, name)) for name in DTYPES if name != "complex32"]
    encoded = encode([*tensors, *reversed(tensors)])
    assert len(encoded.data) == 2 * sum(tensor.nbytes for tensor in tensors)
    assert (encoded.data.dtype, encoded.data.dim(), encoded.data.device.type) == (torch.uint8, 1, "cpu")
    assert content(decode(encoded.header, encoded.data)) == content([*tensors, *reversed(tensors)])


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 1, 3, 3), (8, 4, 1, 1), (1, 1, 1, 1), (2, 0, 3, 3)])
def test_tensor_in_channels_last_stays_so(shape):
    tensor = torch.randn(shape).to(memory_format=torch.channels_last)
    assert content(there(tensor)) == content(tensor)


def test_views_that_are_computed_on_reading_come_back_as_their_values():
    numbers = torch.complex(torch.randn(3), torch.randn(3))
    came = there([numbers.conj(), numbers.conj().imag])
    assert content(came) == content([numbers.conj().resolve_conj(), -numbers.imag])


def test_what_is_encoded_is_a_snapshot():
    tensor = torch.arange(5.0)
    encoded = encode({"weight": tensor})
    tensor.zero_()
    assert decode(encoded.header, encoded.data)["weight"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_bytes", "is_used"), [(0, False), (39, False), (40, True), (100, True)])
def test_state_is_encoded_into_memory_that_is_there_where_that_is_enough(num_bytes, is_used):
    state, room = {"a": torch.arange(8.0), "b": torch.ones(1, dtype=torch.int64)}, torch.full((num_bytes,), 7).byte()
    encoded = encode(state, room)
    assert torch.equal(encoded.data, encode(state).data)
    assert (encoded.data.data_ptr() == room.data_ptr()) == is_used
    assert content(decode(encoded.header, encoded.data)) == content(state)


def test_what_is_decoded_has_memory_of_its_own():
    encoded = encode([torch.arange(5.0), torch.arange(3.0)])
    first, second = decode(encoded.header, encoded.data)
    encoded.data.zero_()
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])
    assert [tensor.untyped_storage().nbytes() for tensor in (first, second)] == [20, 12]


def test_data_may_lie_anywhere_in_memory():
    encoded = encode([torch.arange(5.0)])
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), encoded.data])[1:]
    assert decode(encoded.header, shifted)[0].tolist() == [0, 1, 2, 3, 4]


def test_state_stays_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        came = there([torch.zeros(3, device="cpu"), b"bytes"])
    assert content(came) == content([torch.zeros(3), b"bytes"])


# -- refusals


class Level(IntEnum):
    LOW = 1


class Scaled(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")
REFUSED = {
    "a function": lambda: len,
    "an object": object,
    "a named tuple": lambda: Pair(1, 2),
    "an enum": lambda: Level.LOW,
    "a deque": lambda: deque([1]),
    "a defaultdict": lambda: defaultdict(list),
    "an array": lambda: numpy.ones(2),
    "a set of objects": lambda: {object()},
    "an integer of 6000 digits": lambda: 1 << 20_000,
    "numpy's float32": lambda: numpy.float32(0.1),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a tensor without values": lambda: torch.empty(2, device="meta"),
    "a quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a tensor subclass": lambda: torch.ones(2).as_subclass(Scaled),
    "a lazy parameter": lambda: nn.LazyLinear(2).weight,
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_value_that_cannot_be_sent_is_named_with_its_place_and_the_remedy(make):
    state = {"optimizer": {"state": {3: {"hook": make()}}}}
    with pytest.raises(TypeError, match=r"^optimizer\.state\[3\]\.hook is a .*cannot be sent: .*state_dict\(\)"):
        encode(state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (len, "the state is a builtins.builtin_function_or_method"),
        ([0, (len,)], r"\[1\]\[0\] is a"),
        ({"layers.0.weight": len}, r"\['layers.0.weight'\] is a"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\), which cannot be sent: let its keys be str or int"),
        ({"a": {True: 3}}, "a has the key True"),
        ({None: 3}, "the state has the key None"),
    ],
)
def test_place_of_what_is_refused_reads_as_python(state, said):
    with pytest.raises(TypeError, match=f"^{said}"):
        encode(state)


def nested(depth):
    state = []
    for _ in range(depth - 1):
        state = [state]
    return state


def test_state_may_be_as_deep_as_the_limit_and_no_deeper():
    assert there(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(TypeError, match=r"is more than 50 deep.*is the state in itself\?"):
        encode(nested(MAX_DEPTH + 1))
    loop = {}
    loop["loop"] = loop
    with pytest.raises(TypeError, match=r"loop\.loop\.loop.* is more than 50 deep"):
        encode(loop)


class Runs:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def header_of(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_header_that_would_run_code_is_refused_and_runs_none(tmp_path):
    torch.load(io.BytesIO(header_of(Runs(tmp_path / "made"))), weights_only=False)
    assert (tmp_path / "made").exists()  # as pickle does
    with pytest.raises(ValueError, match=r"^the state that came cannot be read, because of a UnpicklingError"):
        decode(header_of((False, [], [Runs(tmp_path / "another")])), torch.zeros(0, dtype=torch.uint8))
    assert not (tmp_path / "another").exists()


FLOATS = (torch.float32, (2, 3), (3, 1))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"9" * 5000,
        header_of(0),
        header_of((True, [], [])),
        header_of((True, [FLOATS, FLOATS], [])),
        header_of(([True, True], [FLOATS], [])),
        header_of((True, [(torch.float32, (3, 3), (3, 1))], [])),
        header_of((True, [(torch.float32, (2, 3), (30, 1))], [])),
        header_of((True, [(torch.float32, (-2, -3), (3, 1))], [])),
        header_of((True, [("float32", (2, 3), (3, 1))], [])),
        header_of((True, [FLOATS], []))[:-1],
        header_of((True, [FLOATS], []))[:300],
    ],
    ids=lambda header: f"{len(header)} bytes",
)
def test_header_that_is_cut_or_not_of_its_data_is_refused(header):
    with pytest.raises(ValueError, match=r"^the state that came cannot be read, because of a \w+"):
        decode(header, torch.zeros(24, dtype=torch.uint8))


def test_data_that_is_cut_is_refused():
    encoded = encode([torch.arange(5.0), torch.arange(3)])
    with pytest.raises(ValueError, match=r"^the state that came cannot be read"):
        decode(encoded.header, encoded.data[:-1])


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2**59), (0, 0)])
def test_empty_tensor_may_have_any_shape_that_torch_takes(shape):
    assert there(torch.empty(shape)).shape == shape


# -- training goes on


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, x):
        return self.linear(torch.relu(self.norm(self.conv(x))).flatten(1).double())


class Training:
    """All that changes while a model is trained; ``make_scheduler`` and ``make_optimizer`` as a user writes them."""

    def __init__(self, seed, make_optimizer, make_scheduler=None):
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.losses = []

    def run(self, first, last):
        for step in range(first, last):
            torch.manual_seed(1000 + step)
            x, y = torch.randn(6, 2, 4, 4), torch.randn(6, 3, dtype=torch.float64)
            loss = self._step(lambda x=x, y=y: (self.model(x) - y).square().mean())
            self.losses.append(loss)
            self.scheduler.step(*([loss] if isinstance(self.scheduler, ReduceLROnPlateau) else []))
        return self

    def _step(self, compute):
        def closure():
            self.optimizer.zero_grad()
            loss = compute()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return self.optimizer.step(closure).item()
        self.optimizer.zero_grad()
        loss = compute()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def _parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}

    def state(self):
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load(self, state):
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        return self


def goes_on_as_the_original(*makers):
    original = Training(0, *makers).run(0, 5)
    encoded = encode(original.state())
    original.losses.clear()
    original.run(5, 10)
    successor = Training(1, *makers).run(0, 2).load(decode(encoded.header, encoded.data))
    successor.losses.clear()
    successor.run(5, 10)
    assert successor.losses == original.losses
    assert content(successor.state()) == content(original.state())


def sgd(model):
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "SGD": sgd,
    "SGD with nesterov, maximize and foreach": lambda model: SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, maximize=True, foreach=True
    ),
    "Adam with amsgrad": lambda model: Adam(model.parameters(), amsgrad=True),
    "Adam fused": lambda model: Adam(model.parameters(), fused=True),
    "AdamW with groups": lambda model: AdamW(
        [
            {"params": model.conv.parameters(), "lr": 0.01, "name": "conv"},
            {"params": model.norm.parameters(), "weight_decay": 0.0},
            {"params": [], "betas": (0.8, 0.9)},
            {"params": model.linear.parameters()},
        ],
        lr=0.02,
    ),
    "AdamW with names": lambda model: AdamW(model.named_parameters()),
    "AdamW with a tensor for the rate": lambda model: AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False),
    "LBFGS": lambda model: torch.optim.LBFGS(
        [*model.linear.parameters()], lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
    ),
    "RMSprop": lambda model: RMSprop(model.parameters(), centered=True, momentum=0.5),
    "Adagrad": lambda model: Adagrad(model.parameters()),
    # torch casts its scalars to the parameter's dtype on loading: float64 would go on with more digits
    "NAdam": lambda model: NAdam([*model.conv.parameters(), *model.norm.parameters()]),
    "Adafactor": lambda model: Adafactor(model.parameters()),
}
SCHEDULERS = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "LambdaLR of numpy": lambda optimizer: LambdaLR(optimizer, lambda epoch: numpy.cos(epoch / 10)),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [2, 6, 6, 8]),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer), StepLR(optimizer, 3), MultiStepLR(optimizer, [1, 2])], [3, 7]
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_bit_for_bit_with_each_optimizer(make):
    goes_on_as_the_original(make)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # SequentialLR's own
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_training_goes_on_bit_for_bit_with_each_scheduler(make):
    goes_on_as_the_original(sgd, make)


def test_callable_of_a_scheduler_goes_as_its_state():
    class Warmup:
        def __init__(self, steps):
            self.steps = steps

        def __call__(self, step):
            return min(1.0, (step + 1) / self.steps)

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    other = LambdaLR(optimizer, Warmup(3))
    other.load_state_dict(there(LambdaLR(optimizer, Warmup(7)).state_dict()))
    assert other.lr_lambdas[0].steps == 7


def test_state_of_straggle_comes_back():
    window = HistoryWindow(8, 3)
    for step in range(5):
        history = window.append([0.1 * step, math.nan, 0.3], [True, False, True])
    state = {"ranks": 3, "stages": "8", **{f"history.{name}": t for name, t in history.tensors().items()}}
    came = there(state)
    assert content(came) == content(state)
    read = History.from_tensors({name.removeprefix("history."): came[name] for name in came if "." in name})
    assert read.num_steps == 5
    parameter = nn.Parameter(torch.zeros(3))
    estimator, other = LastOwn(), LastOwn()
    estimator.observe(parameter, torch.arange(3.0), merged=False)
    assert list(estimator.state_dict({parameter: "weight"})) == ["weight"]
    other.load_state_dict(there(estimator.state_dict({parameter: "weight"})), {"weight": parameter})
    assert content(other.state_dict({parameter: "weight"})) == content(estimator.state_dict({parameter: "weight"}))


def test_sampler_without_a_state_dict_is_refused_as_a_whole():
    refused = r"^sampler is a torch\.utils\.data\.sampler\.SequentialSampler, .*a state_dict\(\) of"
    with pytest.raises(TypeError, match=refused):
        encode({"sampler": SequentialSampler(range(10))})


def test_state_of_a_random_generator_comes_back():
    generator = torch.Generator().manual_seed(5)
    torch.rand(7, generator=generator)
    other = torch.Generator()
    other.set_state(there({"rng": generator.get_state()})["rng"])
    assert torch.equal(torch.rand(9, generator=other), torch.rand(9, generator=generator))


# -- between two ranks


def between(sender, receiver, limit_s=60):
    """What both give or raise, each in a thread with its own end of a group of two."""
    store, ends = dist.HashStore(), {}

    def work(rank, act):
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=limit_s))
        try:
            ends[rank] = act(group)
        except (ValueError, RuntimeError) as error:
            ends[rank] = error.with_traceback(None)  # whose frames would keep the group, and its connection

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((sender, receiver))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends[0], ends[1]


def test_state_of_30_mb_arrives_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(10)))
    optimizer = Adam(model.parameters())
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    state = {"module": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 1}
    encoded = encode(state)
    num_bytes = len(encoded.header) + len(encoded.data)
    assert num_bytes > 30e6
    sent, came = between(lambda group: send(encoded, group, 1), lambda group: receive(group, 0, max_bytes=num_bytes))
    assert sent is None
    assert content(came) == content(state)


LEAST, _ = CHUNK_BYTES


@pytest.mark.parametrize(("num_bytes", "num_chunks"), [(0, 0), (LEAST, 1), (LEAST + 1, 2), (512 * LEAST, 256)])
def test_data_may_be_empty_or_longer_than_one_message(num_bytes, num_chunks):
    tensor = torch.arange(num_bytes // 8 + 1).view(torch.uint8)[:num_bytes]
    encoded, pauses = encode([tensor]), []
    sent, came = between(
        lambda group: send(encoded, group, 1, lambda *chunk: pauses.append(chunk), now=Clock()),
        lambda group: receive(group, 0, max_bytes=2**31),
    )
    assert sent is None
    assert torch.equal(came[0], tensor)
    sizes = [own for own, _ in pauses]
    assert len(sizes) == num_chunks  # one follows the header, and none the last chunk
    assert sizes[:1] in ([], [len(encoded.header)])
    assert num_bytes - LEAST * 2 <= sum(sizes[1:]) < max(1, num_bytes)


class Over:
    """A message that has been taken."""

    def wait(self):
        return True


class Calls:
    """An end of a group that notes what it is asked for: what it sends is taken by the system at once.

    An answer comes ``latency_s`` after all bytes that were sent before it have come, of which ``bytes_a_second`` do.
    """

    def __init__(self, latency_s=0.0, bytes_a_second=1e9):
        self.noted = []
        self.clock = Clock()
        self._latency_s, self._bytes_a_second = latency_s, bytes_a_second
        self._on_their_way = 0

    def send(self, tensors, _peer, _tag):
        self.noted.append(("send", tensors[0].nbytes))
        self._on_their_way += tensors[0].nbytes
        return Over()

    def recv(self, tensors, _peer, _tag):
        self.noted.append(("recv", tensors[0].nbytes))
        self.clock.advance(self._latency_s + self._on_their_way / self._bytes_a_second)
        self._on_their_way = 0
        return Over()


def test_a_chunk_was_on_its_way_until_the_peer_says_that_it_has_it():
    calls, encoded = Calls(), encode([torch.zeros(2 * LEAST + 1, dtype=torch.uint8)])
    send(encoded, calls, 1, lambda num_bytes, _seconds: calls.noted.append(("pause", num_bytes)), now=calls.clock)
    noted = [("send", 3 * 8), ("recv", 1)]
    for size in (len(encoded.header), LEAST, LEAST, 1):
        noted += [("send", 8), ("send", size), ("recv", 1), ("pause", size)]
    assert calls.noted == noted[:-1]


@pytest.mark.parametrize(
    ("latency_s", "bytes_a_second", "longer"),
    [
        (0.0002, 50e6, 1.05),  # as within a rack: gradients get their turn after each quarter of a MB
        (0.05, 50e6, 1.75),
        (0.05, 1e9, 10.0),  # a MB is nothing to such a network: 16 MB and the answer
        (0.2, 20e6, 1.75),
    ],
)
def test_latency_does_not_slow_down_a_state_by_much(latency_s, bytes_a_second, longer):
    calls, encoded = Calls(latency_s, bytes_a_second), encode([torch.zeros(64_000_000, dtype=torch.uint8)])
    began_at, chunks = calls.clock(), []
    send(encoded, calls, 1, lambda *chunk: chunks.append(chunk), now=calls.clock)
    assert calls.clock() - began_at < longer * len(encoded.data) / bytes_a_second
    assert max(seconds for _, seconds in chunks) < max(0.01, 8 * latency_s)


def test_states_follow_one_another_in_both_directions():
    def sender(group):
        for number in range(3):
            send(encode({"number": number}), group, 1)
        return receive(group, 1, max_bytes=10_000)

    def receiver(group):
        came = [receive(group, 0, max_bytes=10_000) for _ in range(3)]
        send(encode(("thanks", torch.ones(2))), group, 0)
        return came

    thanks, came = between(sender, receiver)
    assert content(thanks) == content(("thanks", torch.ones(2)))
    assert came == [{"number": number} for number in range(3)]


def test_state_over_the_limit_is_refused_with_what_was_announced_and_the_sender_ends():
    encoded = Encoded(encode(0).header, torch.zeros(50_000_000, dtype=torch.uint8))
    sent, came = between(
        lambda group: send(encoded, group, 1), lambda group: receive(group, 0, max_bytes=50_000_000), limit_s=600
    )
    assert isinstance(came, ValueError)
    assert str(came) == (
        f"rank 0 announced a header of {len(encoded.header)} bytes and data of 50000000 bytes, "
        "more than max_bytes=50000000"
    )
    assert isinstance(sent, RuntimeError)


def announce(numbers):
    return lambda group: group.send([torch.tensor(numbers)], 1, 0x5747).wait()


def test_peer_that_sends_something_else_is_refused():
    magic = int.from_bytes(b"straggl\x05", "big")
    for numbers, said in [
        ([1, 2, 3], "rank 0 sends no state of this version: it began with 0x1, not 0x7374726167676c05"),
        ([magic + 1, 2, 3], "rank 0 sends no state of this version: it began with 0x7374726167676c06"),
        ([magic, 0, 3], "rank 0 announced a header of 0 bytes and data of 3 bytes, which no state has"),
        ([magic, -1, 3], "rank 0 announced a header of -1 bytes"),
        ([magic, 1, -3], "data of -3 bytes, which no state has"),
        ([magic, 2**62, 2**62], f"{2**62} bytes, more than max_bytes=10000"),
    ]:
        _, came = between(announce(numbers), lambda group: receive(group, 0, max_bytes=10_000))
        assert isinstance(came, ValueError)
        assert said in str(came)


@pytest.mark.parametrize("size", [0, -1, 11, 2**62])
def test_chunk_that_is_no_part_of_what_was_announced_is_refused(size):
    magic, has_it = int.from_bytes(b"straggl\x05", "big"), torch.zeros(1, dtype=torch.uint8)

    def sender(group):
        announce([magic, 10, 1000])(group)
        group.recv([has_it], 1, 0x5747).wait()
        announce([size])(group)

    _, came = between(sender, lambda group: receive(group, 0, max_bytes=10_000))
    assert isinstance(came, ValueError)
    assert str(came) == (
        f"rank 0 announced a header of 10 bytes and data of 1000 bytes, and a chunk of {size} bytes where 10 are left"
    )


def test_peer_that_ends_in_the_middle_is_an_error_at_once():
    magic = int.from_bytes(b"straggl\x05", "big")
    _, came = between(announce([magic, 10, 1000]), lambda group: receive(group, 0, max_bytes=10_000), limit_s=600)
    assert isinstance(came, RuntimeError)


def test_another_thread_breaks_off_what_is_on_its_way_and_both_ends_have_an_error():
    def receiver(group):
        threading.Timer(0.1, break_off, (group, 0)).start()
        return receive(group, 0, max_bytes=100)

    gave, came = between(lambda group: group.recv([torch.zeros(1)], 1, 1).wait(), receiver)
    assert isinstance(gave, RuntimeError)
    assert isinstance(came, RuntimeError)
