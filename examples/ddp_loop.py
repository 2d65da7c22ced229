"""A DDP loop in which two lines were changed; its last rank is slow.

torchrun --standalone --nproc-per-node 2 examples/ddp_loop.py
python examples/ddp_loop.py                                        # a single process, with no other rank to wait for
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import straggle


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    loader = [(x, x.sum(1, keepdim=True)) for x in torch.randn(60, 16, 8)]
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    if 0 < rank == world_size - 1:
        net[1].register_forward_hook(lambda *_: time.sleep(0.1))

    model = straggle.StagedDataParallel(net, deadline=straggle.QuantileDeadline(0.25))  # was: DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for x, y in loader:
        with model.step() as step:  # new
            loss = nn.functional.mse_loss(model(x), y)
            step.log(loss=loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        report = model.last_report
        if rank == 0 and report.step % 10 == 9:
            loss = report.scalars["loss"]
            print(f"step {report.step}: loss {loss:.3f}, {report.seconds:.3f} s, late: {report.late_ranks}")

    same = torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).sum()
    sums = [torch.zeros_like(same) for _ in range(world_size)]
    dist.all_gather(sums, same)
    print(f"rank {rank}: parameters {'identical' if len({s.item() for s in sums}) == 1 else 'DIFFERENT'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
