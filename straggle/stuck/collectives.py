"""What torch's Flight Recorder knows of the collectives of a process: which of the user's are not over.

Read from a dump as JSON, by a pure function. Tried with gloo's collectives; those of nccl have the same fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from straggle.merge.groups import OWN_GROUP


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


def own_dump() -> Mapping[str, Any]:
    """The Flight Recorder of this process, without collectives that are over; empty where torch has none."""
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    read: dict[str, Any] = json.loads(dump(includeCollectives=True, onlyActive=True))
    return read
