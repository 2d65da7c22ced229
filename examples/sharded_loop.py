"""Four workers as two replicas of two shards each (FSDP2); the last worker is slow, so its replica is late as a whole.

torchrun --standalone --nproc-per-node 4 examples/sharded_loop.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import straggle


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    loader = [(x, x.sum(1, keepdim=True)) for x in torch.randn(30, 16, 8)]
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)]
    net = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1))
    if rank == 3:
        net[2].register_forward_hook(lambda *_: time.sleep(0.1))
    for block in net:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(net, mesh=mesh["dp_shard"])

    deadline = straggle.QuantileDeadline(0.25)
    model = straggle.StagedDataParallel(net, mesh=mesh["dp_replicate"], deadline=deadline)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for x, y in loader:
        with model.step() as step:
            loss = nn.functional.mse_loss(model(x), y)
            step.log(loss=loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        report = model.last_report
        if rank == 0 and report.step % 10 == 9:
            late = [f"{replica} by rank {report.slowest_ranks[replica]}" for replica in report.late_ranks]
            print(f"step {report.step}: loss {report.scalars['loss']:.3f}, {report.seconds:.3f} s, late: {late}")

    own = torch.cat([parameter.to_local().flatten() for parameter in net.parameters()])
    replicas = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(replicas, own, group=mesh["dp_replicate"].get_group())
    print(f"rank {rank}: shards {'identical' if torch.equal(*replicas) else 'DIFFERENT'} in both replicas")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
