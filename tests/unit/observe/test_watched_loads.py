"""Loading is told from the rest of a watched loop by a ``DataLoader``, if the loop trains with what that loads."""

import gc

import torch
from torch import nn
from torch.utils.data import DataLoader

import straggle
from straggle.advise.timings import read_timings

LOAD_S, LOG_S, EPOCHS, STEPS = 4.0, 2.0, 3, 8


class Clock:
    now_s = 100.0


class Samples(torch.utils.data.Dataset):
    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return STEPS

    def __getitem__(self, number):
        if number == STEPS:
            raise IndexError
        self.clock.now_s += LOAD_S
        return torch.ones(4)


def train(folder, load):
    """Phases of each step of a loop that loads so, and evaluates after each epoch."""
    clock, model = Clock(), nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with straggle.Watch(model, folder, clock=lambda: clock.now_s):
        for _ in range(EPOCHS):
            for x in load(Samples(clock)):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                clock.now_s += LOG_S
                gc.collect(0)  # takes no time by this clock
            with torch.no_grad():
                for x in DataLoader(torch.ones(2, 4)):
                    model(x)
    return {name: values[:, 0].tolist() for name, values in read_timings(folder).phases.items() if values.any()}


def test_loader_of_the_evaluation_does_not_make_other_loading_the_end_of_the_loop(tmp_path):
    phases = train(tmp_path, iter)  # of what is no DataLoader
    assert set(phases["data"]) == {LOG_S + LOAD_S, LOG_S}  # what comes after an evaluation is none of its step's
    assert "loop_end" not in phases


def test_end_of_the_loop_is_told_from_what_a_loader_loads_for_the_passes(tmp_path):
    phases = train(tmp_path, DataLoader)
    assert set(phases["data"]) == {LOAD_S}
    assert set(phases["loop_end"]) == {LOG_S}
