"""What a limit on glibc's heaps (``MALLOC_ARENA_MAX``) costs threads that allocate, on Linux, in turns.

OMP_NUM_THREADS=1 python benchmarks/heaps.py                    # threads that prepare samples, as a loader's do
OMP_NUM_THREADS=1 python benchmarks/heaps.py --bare             # that do nothing but allocate, in C; needs `cc`
OMP_NUM_THREADS=1 python benchmarks/heaps.py --limits 0 2 4 16  # 0: glibc's own, 8 for each core
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from straggle.report import text_table

ITEMS = 1500  # samples of one timing
BARE = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
enum { BLOCKS = 64, TIMES = 3000000 };
static size_t least, most;
static void *run(void *number) {
  unsigned drawn = (unsigned)(long)number + 1;
  char *blocks[BLOCKS] = {0};
  for (long i = 0; i < TIMES; i++) {
    drawn = drawn * 1103515245u + 12345u;
    int k = (drawn >> 8) % BLOCKS;
    free(blocks[k]);
    blocks[k] = malloc(least + (drawn >> 12) % (most - least));
    blocks[k][0] = 1;
  }
  for (int k = 0; k < BLOCKS; k++) free(blocks[k]);
  return 0;
}
int main(int count, char **words) {
  (void)count;
  long threads = atol(words[1]);
  pthread_t ids[64];
  struct timespec from, to;
  least = atol(words[2]), most = atol(words[3]);
  clock_gettime(CLOCK_MONOTONIC, &from);
  for (long i = 0; i < threads; i++) pthread_create(ids + i, 0, run, (void *)i);
  for (long i = 0; i < threads; i++) pthread_join(ids[i], 0);
  clock_gettime(CLOCK_MONOTONIC, &to);
  printf("%g\n", ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / TIMES / threads);
}
"""


def prepared(packed):
    """A sample as a loader makes it: unpacked, scaled, flipped and resized."""
    import torch

    picture = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)[:30_000]
    picture = picture.float().mul_(1 / 255).reshape(1, 3, 100, 100).sub_(0.5).abs_().flip(-1)
    return torch.nn.functional.interpolate(picture, size=(64, 64))


def samples(threads):
    """Print the median microseconds that a sample takes with so many threads."""
    packed = [zlib.compress(os.urandom(20_000) * 5, 1)] * ITEMS
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(6):
            began = time.perf_counter()
            list(pool.map(prepared, packed))
            times.append(time.perf_counter() - began)
    print(1e6 * statistics.median(times[1:]) / ITEMS)


def measured(command, limit):
    """The number that ``command`` prints with this limit."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if limit:
        environment["MALLOC_ARENA_MAX"] = str(limit)
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="threads that do nothing but allocate")
    parser.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.samples:
        samples(given.samples)
        return
    with tempfile.TemporaryDirectory() as folder:
        jobs = {f"sample, {n} threads, us": [sys.executable, __file__, "--samples", str(n)] for n in given.threads}
        if given.bare:
            Path(folder, "bare.c").write_text(BARE)
            subprocess.run(["cc", "-O2", "-pthread", "bare.c", "-o", "bare"], cwd=folder, check=True)
            sizes = (16, 900), (1100, 8000), (8000, 100_000)
            jobs = {
                f"{least} to {most} bytes, {n} threads, ns": [f"{folder}/bare", *map(str, (n, least, most))]
                for least, most in sizes
                for n in given.threads
            }
        found = {(name, limit): [] for name in jobs for limit in given.limits}
        for _ in range(given.rounds):
            for (name, limit), values in found.items():
                values.append(measured(jobs[name], limit))
    heads = ["", *(f"{limit} heaps" if limit else "glibc's own" for limit in given.limits)]
    cell = "{:.0f} ({:.0f} to {:.0f})".format
    rows = [
        [name, *(cell(statistics.median(v), min(v), max(v)) for v in (found[name, limit] for limit in given.limits))]
        for name in jobs
    ]
    print(text_table([heads, *rows]))


if __name__ == "__main__":
    main()
