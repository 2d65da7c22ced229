"""In a simulated world torch's own code runs: `torch.distributed`, device meshes, FSDP2, and the loop's own calls."""

import logging
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from straggle import Elastic, StagedDataParallel
from straggle.lab.world.faults import Kill, Stall
from straggle.lab.world.run import run_world


def collectives(rank):
    """What each of torch's collectives gives."""
    me, size = torch.tensor([float(rank.number)]), dist.get_world_size()
    summed, largest, root = me.clone(), me.clone(), me.clone()
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.broadcast(root, 1)
    each = [torch.empty(1) for _ in range(size)]
    dist.all_gather(each, me)
    gathered, objects = torch.empty(size), [None] * size
    _named("all_gather_single", "all_gather_into_tensor")(gathered, me)
    dist.all_gather_object(objects, {"rank": rank.number})
    scattered, received = torch.empty(1), torch.empty(size)
    _named("reduce_scatter_single", "reduce_scatter_tensor")(scattered, torch.arange(float(size)))
    dist.all_to_all_single(received, 10.0 * rank.number + torch.arange(float(size)))
    pair = dist.new_group([0, 1])
    if rank.number < 2:
        dist.all_reduce(me, group=pair)
    dist.barrier()
    return [
        float(summed),
        float(largest),
        float(root),
        torch.cat(each).tolist(),
        gathered.tolist(),
        objects,
        float(scattered),
        received.tolist(),
        float(me),
    ]


def _named(new, old):
    """A collective by its name, which newer versions of torch have changed."""
    return getattr(dist, new if hasattr(dist, new) else old)


def test_collectives_of_a_loop_are_those_of_torch():
    everybody = [0.0, 1.0, 2.0]
    objects = [{"rank": rank} for rank in range(3)]
    of_pair = [1.0, 1.0, 2.0]
    for number, own in enumerate(run_world(collectives, ranks=3).results):
        received = [10.0 * rank + number for rank in range(3)]
        expected = [3.0, 2.0, 1.0, everybody, everybody, objects, 3.0 * number, received, of_pair[number]]
        assert own == expected, own


def own_process(rank):
    """Random numbers, what a handler heard, and how much time a sleep and a wait for the clock have taken."""
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("straggle.test").addHandler(handler)
    torch.manual_seed(rank.number)
    began, numbers = time.monotonic(), []
    for _ in range(3):
        numbers.append(float(torch.rand(())))
        time.sleep(10.0)
        logging.getLogger("straggle.test").warning("rank %d", rank.number)
    while time.monotonic() < began + 30.001:
        pass
    return numbers, heard, time.monotonic() - began


def test_each_process_has_random_numbers_and_log_handlers_of_its_own_and_the_clock_is_the_worlds():
    before, began, state = torch.get_rng_state(), time.monotonic(), random.getstate()
    for number, (numbers, heard, seconds) in enumerate(run_world(own_process, ranks=2).results):
        draw = torch.Generator().manual_seed(number)
        assert numbers == [float(torch.rand((), generator=draw)) for _ in range(3)]
        assert heard == [f"rank {number}"] * 3
        assert seconds == pytest.approx(30.0, abs=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == state
    assert time.monotonic() < began + 20.0  # half a minute of the world has taken a moment


def sharded(rank, **options):
    """Two replicas that FSDP2 shards over two ranks each: what was given, and the whole gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in net:
        layer.register_forward_hook(lambda *_: rank.work(0.01))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (*net, net):
        fully_shard(layer, mesh=mesh["shard"])
    model = StagedDataParallel(net, mesh=mesh["replicate"], **options)
    for _ in range(6):
        net.zero_grad()
        with model.step():
            model(torch.full((2, 4), 1.0 + rank.number)).square().mean().backward()
        rank.note(late=[own.late for own in model.last_report.ranks])
    model.close()
    return [own.grad.full_tensor() for own in net.parameters()]


def test_replicas_that_fsdp2_shards_train_and_one_that_stalls_is_late():
    quiet = run_world(sharded, ranks=4)
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    sum(net(torch.full((2, 4), 1.0 + number)).square().mean() / 4 for number in range(4)).backward()
    for own in quiet.results:
        for grad, parameter in zip(own, net.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)
    stalled = run_world(lambda rank: sharded(rank, deadline=0.05), ranks=4, faults=[Stall(1, 0.1, 0.15)])
    late = [note["late"] for note in stalled.notes[3]]
    assert [True, False] in late
    assert [False, False] in late[2:]
    assert all(one[1] is False for one in late)


class Mask(nn.Module):
    """Has state that is not averaged: each rank flips another element of it in its forward pass."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.layer = rank, nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))

    def forward(self, x):
        self.rank.work(0.005)
        self.mask[self.rank.number] ^= True
        return self.layer(x)


def masked(rank, steps=8):
    """With members; what there is of the state at the end."""
    torch.manual_seed(0)
    model = StagedDataParallel(Mask(rank), members=Elastic(min_ranks=1))
    step = model.register_state()
    while step < steps:
        with model.step():
            model(torch.ones(2, 4)).sum().backward()
        step = model.last_report.step + 1
    model.close()
    return model.module.mask.tolist()


def test_member_that_is_killed_while_state_is_sent_keeps_no_peer_waiting():
    """One of its peers had it, and was in the next step; the other sent it again, and waited for ``give_up_s``."""
    for number in (79, 93, 95, 131, *range(60, 78)):
        kill = Kill(2, 0.02 + 0.0005 * number)
        run = run_world(masked, ranks=3, seed=number, faults=[kill])
        assert run.results[0] == run.results[1], kill
        assert run.seconds < 10.0, kill
