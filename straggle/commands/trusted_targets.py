"""A configuration that is not the user's own, such as that of a run to repeat: which classes it may build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from straggle.extras import needs_extra

with needs_extra("train"):
    from hydra.utils import get_class
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

from straggle.commands.config_schema import ConfigurationError


def check_targets(config: DictConfig, own: DictConfig, where: str) -> None:
    """Raise `ConfigurationError` if a configuration that is not the user's own builds what it should not.

    It may build classes of this project and of ``torch.optim``, and classes that this run's ``own`` configuration
    names.
    """
    try:
        theirs, ours = (OmegaConf.to_container(each, resolve=True) for each in (config, own))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{where}: {str(error).splitlines()[0]}") from None
    trusted = {target for _, target in _targets(ours, "")}
    for key, target in _targets(theirs, ""):
        if target in trusted:
            continue
        module = _module_of(target)
        if not f"{module}.".startswith(("straggle.", "torch.optim.")):
            unknown = module is None and target.startswith("straggle.")
            raise ConfigurationError(
                f"{where}: {key}={target}: only classes of straggle and torch.optim are built from there; if you trust "
                f"this one, name it on the command line too: {key}={target}"
                + ("; this version of straggle has none of that name: repeat a run with its own version" * unknown)
            )


def _targets(config: Any, key: str) -> Iterator[tuple[str, str]]:
    """The keys that name what is built, and the names."""
    parts = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for name, part in parts:
        at = f"{key}.{name}" if key else str(name)
        if name == "_target_":
            yield at, str(part)
        yield from _targets(part, at)


def _module_of(target: str) -> str | None:
    """The module that defines a class, which straggle or ``torch.optim`` may only import; ``None`` for other classes.

    Imports nothing else. ``None``, too, if there is no such class.
    """
    if not target.startswith(("straggle.", "torch.optim.")):
        return None
    try:
        return str(get_class(target).__module__)
    except Exception:
        return None
