"""What an error's text advises: found in the source, run into, followed, and trained with.

`advising` finds every text in ``straggle/`` that says what to do. A `Case` runs into one of these errors and then does
what its text says; `follow` carries out many of them in one job, one after another.
"""

from __future__ import annotations

import ast
import copy
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from ranks import digest, logged, staged
from repository import ROOT
from torch import Tensor, nn
from training import features, mlp

from straggle import StagedDataParallel

_DO = (
    "use|write|call|leave|give|set|wrap|close|choose|copy|start|step after|clip|convert|move|register|begin|resume|"
    "remove|launch|run|load|enter|repeat|look|change|name|try|let|replay|make|log|install|go|add|keep|train|zero_grad"
)
# said to the reader, at the beginning or after a mark or an "or", "and" or "so"; or what a value has to be
_ADVICE = re.compile(
    rf"(?:^|[:;,.(] ?|\b(?:or|and|so) )(?:{_DO})\b|"
    "pip install|must (?:be|lie)|such as|needs|there are only|comes before",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Text:
    """A string of the source, with ``{}`` for each value in it; ``where``: its module."""

    where: str
    words: str


@cache
def advising() -> tuple[Text, ...]:
    """All strings of the package that say what to do and are no docstring."""
    found = []
    for path in sorted((ROOT / "straggle").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        where = str(path.relative_to(ROOT / "straggle"))
        strings = dict.fromkeys(_strings(tree, docstrings))
        found += [Text(where, words) for words in strings if len(words.split()) > 2 and _ADVICE.search(words)]
    return tuple(found)


def _strings(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    """The strings in it; the parts of one with values are one."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from _strings(part.value, docstrings)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child, docstrings)


# -- following it


@dataclass(frozen=True)
class Case:
    """``says``: words of the text. ``refused(rank)`` raises it, or gives it back if it is a warning.

    ``followed(rank)``: ways to do what it says, each of which trains and checks the result.
    """

    says: str
    refused: Callable[[int], str | None]
    followed: tuple[Callable[[int], nn.Module], ...]


def case(says: str, refused: Callable[[int], str | None], *followed: Callable[[int], nn.Module]) -> Case:
    return Case(says, refused, followed)


def follow(rank: int, cases: Mapping[str, Case]) -> dict[str, str]:
    """What went wrong in which case on this rank, if anything, and a hash of what each trained."""
    return {name: _outcome(rank, one) for name, one in cases.items()}


def _outcome(rank: int, one: Case) -> str:
    try:
        said = one.refused(rank)
    except Exception as error:
        said = str(error)
    by_rank: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, said)  # most warnings are one rank's
    if not any(re.search(pattern(one.says), words) for words in by_rank if words is not None):
        return f"failed: it was said: {by_rank}"
    try:
        return " ".join(digest(way(rank).parameters()) for way in one.followed)
    except Exception:
        return f"failed: {traceback.format_exc()}"


def pattern(says: str) -> str:
    """A regular expression for these words, with anything for each ``{}``."""
    return "(?s)" + ".*".join(map(re.escape, says.split("{}")))


def plain(model: StagedDataParallel, optimizer: Any, x: Tensor) -> None:
    """One step of an ordinary loop."""
    with model.step():
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(
    model: StagedDataParallel,
    rank: int,
    step: Callable[[StagedDataParallel, Any, Tensor], None] = plain,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    num_steps: int = 3,
    within: float = 1e-5,
) -> nn.Module:
    """Some steps, after which the parameters are what one process makes of all ranks' batches. Gives the module.

    ``within``: of which they may differ, where it trains in another precision.
    """
    alone = copy.deepcopy(model.module)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    of_one = torch.optim.SGD(alone.parameters(), lr=0.1)
    before = digest(model.module.parameters())
    for number in range(num_steps):
        step(model, optimizer, features(rank, number))
        of_one.zero_grad()
        for other in range(dist.get_world_size()):
            loss = alone(features(other, number).to(next(alone.parameters()).dtype)).square().mean()
            (loss / dist.get_world_size()).backward()
        of_one.step()
    assert digest(model.module.parameters()) != before, "it does not train"
    for (name, ours), theirs in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=within, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )
    return model.module


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def trains(
    build: Callable[[], nn.Module] = mlp,
    step: Callable[[StagedDataParallel, Any, Tensor], None] = plain,
    within: float = 1e-5,
    **options: Any,
) -> Callable[[int], nn.Module]:
    """A way that wraps a new module with these options and trains."""

    def way(rank: int) -> nn.Module:
        with staged(build(), **options) as model:
            return train(model, rank, step, within=within)

    return way


def wrapping(build: Callable[[], nn.Module] = mlp, **options: Any) -> Callable[[int], None]:
    """Wraps a module or options that are refused."""

    def refused(rank: int) -> None:
        with staged(build(), **options):
            pass

    return refused


def stepping(
    step: Callable[[StagedDataParallel, Any, Tensor], None],
    build: Callable[[], nn.Module] = mlp,
    logger: str = "straggle.loop.step_warnings",
    **options: Any,
) -> Callable[[int], str | None]:
    """Makes steps that are refused, or of which the log has something to say."""

    def refused(rank: int) -> str | None:
        with logged(logger) as warnings, staged(build(), **options) as model:
            optimizer = sgd(model)
            for number in range(3):
                step(model, optimizer, features(rank, number))
        return warnings[0] if warnings else None

    return refused


def check(first: Mapping[str, str], second: Mapping[str, str]) -> None:
    """Each case went well on both ranks, with the same parameters."""
    failed = {name: words for name, words in {**first, **second}.items() if words.startswith("failed")}
    assert not failed, "\n\n".join(f"{name}: {words}" for name, words in failed.items())
    assert first == second
