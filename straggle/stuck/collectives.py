"""What torch's Flight Recorder knows of the collectives of a process: which of the user's are not over, and where.

Read from a dump by pure functions. Tried with gloo's collectives; those of nccl have the same fields.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any

from straggle.merge.wire.groups import OWN_GROUP
from straggle.stuck.frames import Frame, place_in_block, text_of

_ENGINE = "pt_autograd"  # threads on which backward passes run


def newest_open(dump: Mapping[str, Any]) -> str:
    """The last collective that was begun and is not over, in words; empty if there is none. None of straggle's own."""
    entries = [entry for entry in dump.get("entries", ()) if _is_open(entry) and _is_users(entry)]
    return _words(max(entries, key=lambda entry: entry["record_id"])) if entries else ""


def _is_open(entry: Mapping[str, Any]) -> bool:
    """gloo only notes that a collective is ``retired``, and leaves its state as it was."""
    return entry.get("state") != "completed" and not entry.get("retired", False)


def _is_users(entry: Mapping[str, Any]) -> bool:
    """Some groups of straggle's are unknown to torch.distributed, and have no name."""
    name, description = _group(entry)
    return bool(name) and description != OWN_GROUP


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    name, description = entry.get("process_group", ("", ""))
    return str(name), str(description)


def _words(entry: Mapping[str, Any]) -> str:
    name, description = _group(entry)
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", "?")
    group = description if description not in ("", "undefined") else name
    sizes = " ".join(map(str, entry.get("input_sizes", ()))) or "no tensor"
    called = entry.get("profiling_name", "a collective")
    return f"{called} number {number} of group {group} ({sizes}, {entry.get('state', 'begun')})"


def called_in(begun: Mapping[str, range]) -> list[str] | None:
    """The calls of this thread that began these collectives, in words; ``None`` if torch has not recorded them.

    ``begun``: their numbers, by the name of their group. Those of threads beside the loop have no part in it.
    """
    return lines_of(_with_stacks(), begun, str(threading.get_ident()))


def lines_of(dump: Mapping[str, Any], begun: Mapping[str, range], thread: str) -> list[str] | None:
    """The same of a dump."""
    entries = [entry for entry in dump.get("entries", ()) if not entry.get("is_p2p") and _is_among(entry, begun)]
    own = [entry for entry in entries if entry.get("thread_id", thread) == thread or _is_of_engine(entry)]
    return list(dict.fromkeys(map(_line, own))) if entries else None


def _is_among(entry: Mapping[str, Any], begun: Mapping[str, range]) -> bool:
    return entry.get("collective_seq_id", -1) in begun.get(_group(entry)[0], ())


def _is_of_engine(entry: Mapping[str, Any]) -> bool:
    return str(entry.get("thread_name", "")).startswith(_ENGINE)


def _line(entry: Mapping[str, Any]) -> str:
    frames = [Frame(str(own["filename"]), int(own["line"]), str(own["name"])) for own in entry.get("frames", ())]
    called = str(entry.get("profiling_name", "a collective")).rpartition(":")[2]
    if (place := place_in_block(frames)) is None:
        return called
    return f"{place.collective or called} {place._replace(inner=place.own).words(text_of(place.own))}"


def _with_stacks() -> Mapping[str, Any]:
    """The Flight Recorder of this process; empty if torch has none."""
    dump = _recorder("_dump_fr_trace", "_dump_nccl_trace")
    read: dict[str, Any] = {} if dump is None else pickle.loads(dump(includeStackTraces=True, onlyActive=False))
    return read


def own_dump() -> Mapping[str, Any]:
    """The Flight Recorder of this process, without collectives that are over; empty if torch has none."""
    dump = _recorder("_dump_fr_trace_json", "_dump_nccl_trace_json")
    read: dict[str, Any] = {} if dump is None else json.loads(dump(includeCollectives=True, onlyActive=True))
    return read


def _recorder(*names: str) -> Callable[..., Any] | None:
    import torch._C._distributed_c10d as c10d

    return next((found for name in names if (found := getattr(c10d, name, None)) is not None), None)
