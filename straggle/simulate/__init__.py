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
    "Ring",
    "Simulation",
    "SlowRanks",
    "Stalls",
    "Tree",
    "Units",
    "Work",
    "simulate",
    "simulate_times",
]
