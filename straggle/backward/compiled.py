"""What `torch.compile` and CUDA graphs mean for a pass: no Python runs in it, and gradients come many at a time.

A hook inside of a compiled module is a part of its graph, so `torch.compiler.is_compiling` leaves it out. Hooks on
parameters run outside of all graphs, as does what is marked `not_compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_P = ParamSpec("_P")
_T = TypeVar("_T")
_BOUNDARY = "here a late rank is stopped: compile the module itself, with module.compile() or before it is wrapped"
_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # itself, and what it calls
_MOST_VIEWS = 8  # between an output and the graph that has computed it


def not_compiled(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark a function that is not compiled, nor what it calls: no graph takes it in.

    As ``torch.compiler.disable``, but without loading the compiler, and without a cost for each call.
    """
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _BOUNDARY
    set_code_exec_strategy(marked.__code__, _SKIPPED)
    return function


def come_at_once(outputs: Iterable[Tensor]) -> bool:
    """Whether backward has nothing to compute behind one node that gives all parameters their gradients.

    So it is if the module of these outputs is compiled as a whole, or replayed as one CUDA graph.
    """
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    return bool(nodes) and all(map(_ends_at_parameters, nodes))


def _ends_at_parameters(node: Any) -> bool:
    for _ in range(_MOST_VIEWS):
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if len(following) != 1 or _is_parameter(following[0]):
            break
        (node,) = following
    return all(map(_is_parameter, following))


def _is_parameter(node: object) -> bool:
    return type(node).__name__ == "AccumulateGrad"
