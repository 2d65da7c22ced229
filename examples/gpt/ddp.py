"""A small GPT on the characters of a file, under DDP: accumulation, prefetch, clipping, evaluation, saving.

torchrun --standalone --nproc-per-node 2 examples/gpt/ddp.py --text README.md --steps 200
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width=64, depth=4, heads=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]])))


def loss_of(logits, y):
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("gpt.pt"))
    given = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    text = given.text.read_text()
    vocabulary = sorted(set(text))
    tokens = torch.tensor([vocabulary.index(character) for character in text])
    train, held_out = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    draw = torch.Generator().manual_seed(rank)

    def get_batch(data, draw=draw):
        starts = torch.randint(len(data) - given.context, (given.batch_size,), generator=draw)
        windows = torch.stack([data[start : start + given.context + 1] for start in starts]).to(device)
        return windows[:, :-1], windows[:, 1:]

    torch.manual_seed(0)
    net = GPT(len(vocabulary), given.context).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))

    @torch.no_grad()
    def evaluate():
        net.eval()
        same = torch.Generator().manual_seed(0)
        loss = sum(float(loss_of(net(x), y)) for x, y in (get_batch(held_out, same) for _ in range(10))) / 10
        net.train()
        return loss

    x, y = get_batch(train)  # one batch ahead
    for number in range(given.steps):
        warm_up = min(1.0, (number + 1) / 20)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * warm_up * 0.5 * (1 + math.cos(math.pi * number / given.steps))
        for micro_batch in range(given.accumulate):
            model.require_backward_grad_sync = micro_batch == given.accumulate - 1
            loss = loss_of(model(x), y) / given.accumulate
            x, y = get_batch(train)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        if (number + 1) % given.evaluate_every == 0 and rank == 0:
            print(f"step {number + 1}: loss {loss * given.accumulate:.3f}, held out {evaluate():.3f}")
            torch.save(model.module.state_dict(), given.out)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
