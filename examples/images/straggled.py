"""A small convolutional network on images, under straggle: a distributed sampler, validation on all ranks, resuming.

torchrun --standalone --nproc-per-node 2 examples/images/straggled.py --epochs 3
torchrun --standalone --nproc-per-node 2 examples/images/straggled.py --epochs 6 --resume images.pt
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import straggle


def images(number, seed):
    """Drawn images of four classes: a bar, which lies in one of two directions in one of two halves."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=draw)
    pictures = torch.randn(number, 1, 16, 16, generator=draw) * 0.5
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        at = int(torch.randint(8, (1,), generator=draw)) + 8 * (label % 2)
        picture[0, at if label < 2 else slice(None), slice(None) if label < 2 else at] += 1.0
    return TensorDataset(pictures, labels)


def network():
    def block(before, after, stride):
        convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())

    return nn.Sequential(
        block(1, 16, 1), block(16, 32, 2), block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-images", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("images.pt"))
    parser.add_argument("--resume", type=Path)
    given = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    train, held_out = images(given.num_images, 0), images(given.num_images // 4, 1)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, given.batch_size, sampler=sampler)
    held_out_loader = DataLoader(held_out, given.batch_size, sampler=DistributedSampler(held_out, shuffle=False))

    torch.manual_seed(0)
    net = network().to(device)
    model = straggle.StagedDataParallel(net, deadline=straggle.AutoDeadline())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    first = 0
    if given.resume:
        saved = torch.load(given.resume, map_location=device, weights_only=True)
        first = saved["epoch"]
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])

    @torch.no_grad()
    def validate():
        net.eval()
        right = torch.zeros(2, device=device)
        for x, y in held_out_loader:
            x, y = x.to(device), y.to(device)
            right += torch.tensor([(net(x).argmax(1) == y).sum(), len(y)], device=device)
        dist.all_reduce(right)
        net.train()
        return float(right[0] / right[1])

    for epoch in range(first, given.epochs):
        sampler.set_epoch(epoch)
        start, losses = time.monotonic(), []
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            with model.step() as step:
                loss = criterion(model(x), y)
                step.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            losses.append(model.last_report.scalars["loss"])
        scheduler.step()
        seconds = time.monotonic() - start
        with model.pause():
            accuracy, loss = validate(), torch.tensor(losses).nanmean()  # a GPU does not tell the first one: NaN
            if rank == 0:
                print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}, {seconds:.1f} s")
                state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, given.out)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
