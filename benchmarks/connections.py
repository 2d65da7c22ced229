"""What clients of the metrics cost training: steps a second without and with many connections, in turns.

python benchmarks/connections.py                      # 200 clients that scrape again and again
python benchmarks/connections.py silent --number 50   # that connect and say nothing; unread: that read no answer
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time

import torch
from torch import nn

import straggle
from straggle.lab.jobs import process_group
from straggle.observe.metrics import MetricsExporter

REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"
TURN_S = 3.0


async def stay_connected(kind, host, port, answered):
    """One client, which connects again when it is dropped, a tenth of a second later."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, limit=1024)
            with contextlib.closing(writer):
                if kind != "silent":
                    writer.write(REQUEST)
                while kind == "unread":
                    await asyncio.sleep(0.1)
                while content := await reader.read(1 << 16):
                    answered[0] += content.startswith(b"HTTP/1.0 200")
        await asyncio.sleep(0.1)


def clients(kind, number, address, connection):
    async def run():
        answered = [0]
        _ = [asyncio.create_task(stay_connected(kind, *address, answered)) for _ in range(number)]
        await asyncio.sleep(1.0)
        connection.send("all are there")
        begin, before = time.perf_counter(), answered[0]
        await asyncio.get_running_loop().run_in_executor(None, connection.recv)
        connection.send((answered[0] - before) / (time.perf_counter() - begin))

    asyncio.run(run())


@contextlib.contextmanager
def connected(context, kind, number, exporter, answers):
    own, other = context.Pipe()
    process = context.Process(
        target=clients, args=(kind, number, (exporter.endpoint.host, exporter.endpoint.port), other)
    )
    process.start()
    own.recv()
    try:
        yield
    finally:
        own.send(None)
        answers.append(own.recv())
        process.terminate()
        process.join()


def measure(kind, number, rounds):
    module = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())))
    model = straggle.StagedDataParallel(module)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(32, 512)

    def steps_per_second():
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() < begin + TURN_S:
            with model.step():
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        return steps / (time.perf_counter() - begin)

    alone, crowded, answers = [], [], []
    with MetricsExporter(model) as exporter:
        context = multiprocessing.get_context("spawn")
        steps_per_second()
        for _ in range(rounds):
            alone.append(steps_per_second())
            with connected(context, kind, number, exporter, answers):
                crowded.append(steps_per_second())
    model.close()
    print(f"alone {statistics.median(alone):.1f} steps/s", end="; ")
    print(f"{number} clients, {kind}: {statistics.median(crowded):.1f} steps/s", end=", ")
    print(f"{statistics.median(answers):.0f} answers/s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", default="scrape", choices=["scrape", "silent", "unread"])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with process_group():
        measure(given.kind, given.number, given.rounds)
