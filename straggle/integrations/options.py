"""What `StagedDataParallel` is told where a framework wraps the model, and what of it no framework can keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from straggle.parallel import StagedDataParallel

OPTIONS = ("stages", "deadline", "estimator", "late_handling", "merge")


def take_options(words: dict[str, Any]) -> dict[str, Any]:
    """Those of a framework's keyword arguments that are `StagedDataParallel`'s; they are taken out of ``words``.

    Raises ``ValueError`` for ``members``: the frameworks gather from all ranks by themselves, absent ones too.
    """
    if words.get("members") is not None:
        raise ValueError(
            "members=Elastic() is for a loop of your own: this trainer's own collectives would wait for absent ranks"
        )
    words.pop("members", None)
    return {name: words.pop(name) for name in OPTIONS if name in words}


def wrapped(module: nn.Module, options: Mapping[str, Any]) -> StagedDataParallel:
    """The module as a replica of the job; one that is wrapped already is closed and wrapped again, as before a run."""
    if isinstance(module, StagedDataParallel):
        module.close()
        module = module.module
    return StagedDataParallel(module, **options)
