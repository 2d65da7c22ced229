"""A job whose ranks are hit while they compute, and recorded: a model, and ways to stop a rank where it matters."""

import contextlib
import time

from torch import nn

WIDTH = 32
EARLY, MIDDLE, LAST = 8, 5, 0  # layers, as a backward pass comes to them


class Noisy(nn.Module):
    """Dropout and BatchNorm, whose results depend on how far a forward pass came."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)]
        for _ in range(3):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 2))

    def forward(self, x):
        return self.layers(x)


class Stuck:
    """While a file says so, the backward pass of a rank stands still in a layer, and says so in another file."""

    def __init__(self, module, folder, rank, layer):
        self._wanted, self._reached = files_of(folder, rank, layer)
        module.layers[layer].weight.register_post_accumulate_grad_hook(self._look)

    def _look(self, _parameter):
        while self._wanted.exists():
            self._reached.touch()
            time.sleep(0.01)


def files_of(folder, rank, layer):
    return folder / f"stuck{layer}.{rank}", folder / f"reached{layer}.{rank}"


class Stops:
    """When a file says so, a rank is late early in its backward pass, until it was so in a step that counted."""

    def __init__(self, module, folder, rank):
        self._rank, self._wanted, self._step = rank, folder / f"stops{rank}", None
        module.layers[EARLY].weight.register_post_accumulate_grad_hook(self._look)

    def _look(self, _parameter):
        if self._wanted.exists():
            self._step.stop()

    def entered(self, step):
        self._step = step

    def left(self, report):
        own = report.ranks[self._rank]
        if self._wanted.exists() and own.late and not own.stood_in:
            self._wanted.unlink()


@contextlib.contextmanager
def stuck(job, folder, rank, layer=MIDDLE):
    """In this block a rank's backward pass stands still in a layer; it has come to it when the block begins."""
    wanted, reached = files_of(folder, rank, layer)
    wanted.touch()
    job.wait(reached.exists, f"rank {rank} is in layer {layer}")
    yield
    wanted.unlink()
    reached.unlink()


def kill_in_backward(job, folder, *ranks):
    """Kill ranks when one of them stands in the middle of a backward pass, and its peers have what can be merged."""
    files = [files_of(folder, rank, MIDDLE) for rank in ranks]
    for wanted, _ in files:
        wanted.touch()
    job.wait(lambda: any(reached.exists() for _, reached in files), "one is in the middle")
    time.sleep(0.3)
    job.kill(*ranks)
    for wanted, reached in files:
        wanted.unlink()
        reached.unlink(missing_ok=True)
