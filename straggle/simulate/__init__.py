"""Many ranks without a cluster: what a deadline would be worth, by the library's own policies and model of a step."""

from straggle.simulate.communication import Constant, Network, Ring, Tree
from straggle.simulate.delays import (
    ByNode,
    Delays,
    DropCompute,
    Exponential,
    LogNormal,
    NoDelay,
    Normal,
    SlowRanks,
    Stalls,
)
from straggle.simulate.ranks import Simulation, simulate, simulate_times
from straggle.simulate.recorded import Recorded, Replay, read_times, recorded_times
from straggle.simulate.units import Units, Work

__all__ = [
    "ByNode",
    "Constant",
    "Delays",
    "DropCompute",
    "Exponential",
    "LogNormal",
    "Network",
    "NoDelay",
    "Normal",
    "Recorded",
    "Replay",
    "Ring",
    "Simulation",
    "SlowRanks",
    "Stalls",
    "Tree",
    "Units",
    "Work",
    "read_times",
    "recorded_times",
    "simulate",
    "simulate_times",
]
