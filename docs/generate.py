"""Writes configuration.md and metrics.md: the prose of the `.md.in` beside each, with tables of what is declared.

    .venv/bin/python docs/generate.py

A line `<<keys train>>` in the prose stands for the table that the function `keys` below returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import straggle
from straggle.commands.configuration.schema import config_dir, options_of
from straggle.observe.metric_series import COUNTERS, GAUGES, HISTOGRAMS, LABELS

DOCS = Path(__file__).parent
RULES = DOCS.parent / "deploy" / "prometheus" / "rules.yml"
PAGES = (DOCS / "configuration.md", DOCS / "metrics.md")
NOTE = "\n<!-- Written by docs/generate.py. Change the prose in {}, the tables where their facts are declared. -->\n"
KEY = re.compile(r"^( *)(\w+):(?: +([^#\s].*?))?(?: +# (.*))?$")
CALL = re.compile(r"^\{_target_: (?:\w+\.)*(\w+)(?:, )?(.*)\}$")
Row = tuple[str, str]


def content_of(path: Path) -> tuple[str, list[Row]]:
    """The first comment of a configuration file, and a row for each of its keys."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    head = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return comment(lines[:head]), list(rows_in(lines[head:]))


def rows_in(lines: list[str]) -> Iterator[Row]:
    """Each key with its default, and the comment that ends its line or stands above it; without Hydra's own keys."""
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    for line in lines:
        if line.lstrip().startswith("#"):
            above.append(line)
            continue
        if found := KEY.match(line):
            indent, name, value, text = len(found[1]), found[2], found[3], found[4] or comment(above)
            parents = [(column, parent) for column, parent in parents if column < indent]
            path = ".".join([*(parent for _, parent in parents), name])
            parents.append((indent, name))
            # an object is shown as a call of its class; without arguments there is nothing to set
            shown = CALL.sub(lambda call: f"{call[1]}({call[2]})", value or "")
            told = text or not path.startswith("inner.")  # else it is a key of another option, which has its text
            if name != "_target_" and not path.startswith("hydra") and value and told and not shown.endswith("()"):
                yield f"`{path}={shown}`", text
        above = []


def comment(lines: list[str]) -> str:
    """Lines of a comment as one."""
    return " ".join(line.lstrip(" #") for line in lines)


def table(header: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Markdown; its header has a bar between two titles."""
    titles = tuple(title.strip() for title in header.split("|"))
    lines = [titles, ("---",) * len(titles), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def keys(command: str) -> str:
    """The keys that the configuration of a command has itself."""
    return table("key=default | meaning", content_of(config_dir() / f"{command}.yaml")[1])


def group(name: str, none: str = "") -> str:
    """The options of a group, each with its keys below it; ``none``: what the option of that name is."""
    rows: list[Row] = []
    for option in options_of(name):
        text, own = (none, []) if option == "none" else content_of(config_dir() / name / f"{option}.yaml")
        if not text:
            raise SystemExit(f"conf/{name}/{option}.yaml: its first line must be a comment that describes the option")
        rows.append((f"**`{option}`**" + " (default)" * (option in defaults(name)), text))
        rows += [(key.replace(f"`{name}.", "`"), meaning) for key, meaning in own]
    return table("option, below it its keys | meaning", rows)


def defaults(name: str) -> list[str]:
    """The options of a group that a command has by default."""
    files = (config_dir() / f"{command}.yaml" for command in ("train", "simulate", "compare"))
    entries = (entry for file in files for entry in OmegaConf.load(file).defaults if entry != "_self_")
    chosen: Any = next((entry[name] for entry in entries if name in entry), ())
    return [chosen] if isinstance(chosen, str) else list(chosen)


def fields_of(module: str, name: str) -> str:
    """The fields of a dataclass, or of a dict of fields, as they are declared; a star: it stays as it is."""
    declaring: Any = getattr(import_module(module), name)
    found: Mapping[str, Mapping[str, Any]] = (
        {own.name: own.metadata for own in fields(declaring)} if is_dataclass(declaring) else declaring
    )
    if without := [own for own, metadata in found.items() if not metadata.get("text")]:
        raise SystemExit(f"{module}.{name}: {', '.join(without)} must be declared with number(...) or described(...)")
    rows = [(f"`{own}`" + " *" * metadata["stable"], metadata["text"]) for own, metadata in found.items()]
    return table("field | meaning", rows)


def metrics() -> str:
    """Rows of all metrics that a rank has; their table begins in the prose."""
    kinds = {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}
    rows = []
    for kind, texts in kinds.items():
        for name, text in texts.items():
            label, values = LABELS.get(name, ("", ()))
            cell = f"`{label}`" + (": " + ", ".join(values) if any(values) else "") if label else ""
            rows.append((f"`straggle_{name}{'_total' * (kind == 'counter')}`", kind, cell, text))
    return "\n".join(table("|||", rows).splitlines()[2:])


def rules() -> str:
    """The recording rules; those that follow one another have one comment."""
    rows: list[tuple[list[str], str]] = []
    for above, name in re.findall(r"((?:^ +# .*\n)*)^ +- record: (\S+)$", RULES.read_text(), re.MULTILINE):
        if above:
            rows.append(([], comment(above.splitlines())))
        rows[-1][0].append(f"`{name}`")
    return table("rule | meaning", [(", ".join(names), text) for names, text in rows])


TABLES: dict[str, Callable[..., str]] = {
    "keys": keys,
    "group": group,
    "fields": fields_of,
    "metrics": metrics,
    "rules": rules,
}


def written(page: Path) -> str:
    """A page as it is to be."""
    prose = page.with_suffix(".md.in")
    tables = re.compile(r"^<<(\w+) ?(.*)>>$", re.MULTILINE)
    replaced = tables.sub(lambda found: TABLES[found[1]](*filter(None, found[2].split(" | "))), prose.read_text())
    return replaced + NOTE.format(prose.name)


def refuse_another_checkout() -> None:
    """The tables are of the package that is imported: end, if that is not the one beside this file."""
    own, imported = Path(__file__).resolve().parents[1], Path(straggle.__file__).resolve().parents[1]
    if own != imported:
        raise SystemExit(f"{imported} would be documented, and not {own}: start this with PYTHONPATH={own}")


if __name__ == "__main__":
    refuse_another_checkout()
    for page in PAGES:
        page.write_text(written(page))
