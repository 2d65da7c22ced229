"""Configurations made from one another: of a method, of a scenario."""

from __future__ import annotations

from pathlib import Path

from straggle.extras import needs_extra

with needs_extra("train"):
    from omegaconf import DictConfig, OmegaConf

from straggle.commands.config_schema import option
from straggle.lab.build import build_faults


def of_method(config: DictConfig, name: str) -> DictConfig:
    """``config`` with the parts that the method ``name`` of ``compare`` replaces, and without the methods."""
    own = OmegaConf.to_container(config.methods[name], resolve=True)
    assert isinstance(own, dict)
    merged = OmegaConf.masked_copy(config, [str(key) for key in config if key != "methods"])  # the copy takes its time
    OmegaConf.set_struct(merged, False)
    for key, part in own.items():
        if key != "job":
            replaces = not isinstance(part, dict) or "_target_" in part
            merged[key] = part if replaces else OmegaConf.merge(merged[key], part)
    return merged


def of_scenario(config: DictConfig, name: str) -> DictConfig:
    """``config`` under the faults of this name, with a separate folder for its files.

    Faults that have a pace get ``config``'s.
    """
    merged = config.copy()
    OmegaConf.set_struct(merged, False)
    merged.faults = option("faults", name)
    if "pace" in merged.faults and "pace" in config.faults:
        merged.faults.pace = config.faults.pace
    merged.run_dir = str(Path(config.run_dir) / name)
    return merged


def slows_ranks(config: DictConfig) -> bool:
    """Whether there are faults beside the pace; all ranks have the pace."""
    return bool(build_faults(config).keys() - {"pace"})
