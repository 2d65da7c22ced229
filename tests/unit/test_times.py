"""The table of what tests took, from the XML of a run."""

from __future__ import annotations

from pathlib import Path

from times import read, table

XML = """<testsuites><testsuite>
<testcase classname="tests.unit.merge.test_row" name="test_quick" time="0.25"/>
<testcase classname="tests.ranks.test_merge" name="test_long[2]" time="4.0"><properties>
<property name="cpu_s" value="3.5"/><property name="fixture:folder" value="1.5"/></properties></testcase>
<testcase classname="tests.ranks.test_merge" name="test_other" time="1.0"><properties>
<property name="cpu_s" value="0.5"/><property name="fixture:folder" value="0.5"/></properties></testcase>
<testcase classname="tests.cluster.test_gpu" name="test_skipped" time="0.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_table_has_folders_fixtures_and_the_slowest_tests_first(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(XML)
    lines = [" ".join(line.split()) for line in table(read(tmp_path / "junit.xml"))]
    assert lines[1:4] == ["4.0 5.2 3 all", "4.0 5.0 2 tests.ranks", "0.0 0.2 1 tests.unit"]
    assert "2.0 folder" in lines
    assert lines[-3] == "3.5 4.0 tests.ranks.test_merge::test_long[2]"
    assert not any("skipped" in line for line in lines)
