"""The faults that `benchmarks/planted.py` plants: each still has its place in the library, and is one that runs."""

from collections import Counter

import pytest
from repository import ROOT

from benchmarks.planted_faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_has_its_place_and_compiles(fault):
    text = fault.place(ROOT / "straggle").read_text()
    planted = fault.into(text)
    assert planted != text
    compile(planted, fault.file, "exec")


def test_faults_are_enough_and_each_has_a_name_of_its_own():
    assert len(FAULTS) >= 44
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1
    assert max(Counter((fault.file, fault.old, fault.new) for fault in FAULTS).values()) == 1


@pytest.mark.parametrize(("text", "number"), [("a = 2\n", 0), ("a = 1\na = 1\n", 2)])
def test_fault_without_a_single_place_is_refused(text, number):
    with pytest.raises(ValueError, match=f"twice: what it replaces is {number} times in x.py, and not once"):
        Fault("twice", "x.py", "a = 1", "a = 3").into(text)


def test_file_that_has_moved_is_found_by_its_text(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "new.py").write_text("a = 1\n")
    fault = Fault("moved", "old.py", "a = 1", "a = 3")
    assert fault.place(tmp_path) == tmp_path / "room" / "new.py"
    (tmp_path / "other.py").write_text("a = 1\n")
    with pytest.raises(ValueError, match=r"moved: what it replaces is in 2 files, and not in old.py"):
        fault.place(tmp_path)
