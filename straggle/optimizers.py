"""Hooks around the steps of the optimizer that a model is trained by, whichever that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def around_steps(
    parameters: Iterable[Tensor], before: Callable[[], None], after: Callable[[], None]
) -> list[RemovableHandle]:
    """Call ``before()`` and ``after()`` around each step of an optimizer whose first parameter is one of these.

    Every optimizer of the process is looked at, also one that is made later; the parameters are not kept alive.
    """
    ids = {id(parameter) for parameter in parameters}

    def of_ours(call: Callable[[], None]) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            first = next((p for group in optimizer.param_groups for p in group["params"]), None)
            if id(first) in ids:
                call()

        return hook

    return [register_optimizer_step_pre_hook(of_ours(before)), register_optimizer_step_post_hook(of_ours(after))]
