"""Four workers as two replicas of two shards each (FSDP2), which leave and come back as a whole: rank 3 dies once.

straggle launch --nproc-per-node 4 --replica-size 2 examples/replicas_loop.py
"""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import straggle
from straggle.observe.numbers.goodput import Uses


def main() -> None:
    mesh = straggle.replica_mesh()  # in place of init_process_group() and init_device_mesh()
    rank, is_first_start = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(rank)
    loader = [(x, x.sum(1, keepdim=True)) for x in torch.randn(100, 16, 8)]
    net = nn.Sequential(
        nn.Linear(8, 64), *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)), nn.Linear(64, 1)
    )
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)

    model = straggle.StagedDataParallel(net, members=straggle.Elastic(min_ranks=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model.register_state(optimizer=optimizer)  # 0, or the step that the other replica is in
    uses = Uses()
    model.register_step_hook(lambda record: uses.add(record.report))
    if rank == 0:
        model.register_members_hook(lambda report: print(f"step {report.step}: {report}", flush=True))

    for x, y in loader[first:]:
        if rank == 3 and is_first_start and model.last_report is not None and model.last_report.step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        with model.step():
            time.sleep(0.1)
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    size = float(sum(parameter.detach().to_local().norm() for parameter in net.parameters()))
    print(f"rank {rank}: trained from step {first} on, size of its shards {size:.6f}", flush=True)
    if rank == 0:
        print(f"goodput {uses.goodput().share:.1%}; lost to: {uses.goodput().lost()}", flush=True)
    model.close()


if __name__ == "__main__":
    main()
