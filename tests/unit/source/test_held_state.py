"""What a module holds, past the hooks of its ``state_dict``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from straggle.source.held_state import held_state, hold_state


class Fused(nn.Module):
    """It saves its weight as two, as fused attention does, and counts in a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.calls = 0
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        state[f"{prefix}one"], state[f"{prefix}other"] = state.pop(f"{prefix}both").chunk(2)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_state_past_the_hooks_that_rename_and_split_it_is_held_by_another_module() -> None:
    torch.manual_seed(0)
    one, other = (checkpoint_wrapper(nn.Sequential(Fused(), nn.BatchNorm1d(3))) for _ in range(2))
    of_one = one[0]
    of_one.calls = 7
    state = held_state(one)
    hold_state(other, state)
    for own, taken in zip([*one.parameters(), *one.buffers()], [*other.parameters(), *other.buffers()], strict=True):
        assert torch.equal(own, taken) != (own is of_one.cache)  # what is not saved stays each one's own
    assert other[0].calls == 7
    assert sum("both" in name for name in state) == 1


def test_state_of_another_module_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"the state of Linear is of another module: bias is in one of them"):
        hold_state(nn.Linear(2, 2), held_state(nn.Linear(2, 2, bias=False)))
