"""What the server that ranks are forked from loads of this folder, as each rank would do otherwise (`ranks.py`)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import straggle
from straggle.building import load_optional_parts

sys.path.insert(0, str(Path(__file__).parent))  # the server has not the path that pytest has

for name in ("job_loop", "ranks", "recorded", "stores", "training"):
    importlib.import_module(name)
for name in straggle.__all__:
    getattr(straggle, name)
load_optional_parts()
