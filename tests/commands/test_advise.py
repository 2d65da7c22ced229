"""The command that advises: what it prints and what it refuses."""

from __future__ import annotations

import json

import pytest
from ranks import run_command
from watched import when, write_trace, write_watch

from straggle.advise.answer import answer
from straggle.advise.gain import candidates
from straggle.commands.advise import arguments


@pytest.mark.slow
def test_command_prints_sentences_or_json(tmp_path):
    write_watch(tmp_path, extra=when(1, range(1000), backward=0.2))
    assert "Rank 1 is always slow, from the first step on" in run_command("advise", 1, ".", folder=tmp_path)
    content = json.loads(run_command("advise", 1, "json=true", ".", folder=tmp_path))
    assert content["slow_ranks"][0]["rank"] == 1
    assert content["slow_ranks"][0]["named"] == ["backward"]
    assert {policy["code"] for policy in content["policies"]} == {one.code for one in candidates(4)}
    assert content["best"]["keys"].startswith("deadline=")


def test_one_watched_process_is_told_where_its_time_goes(tmp_path):
    given = answer(write_watch(tmp_path, ranks=1, extra=when(0, range(1000), data=0.1)))
    said = " ".join(str(given).split())
    assert "steps of one rank, which waits for no other" in said
    assert "50% while it loaded data, 29% in the backward pass, 14% in the forward pass, 2% in the" in said
    assert json.loads(given.as_json())["policies"] == []


def test_wrong_input_is_refused_with_the_remedy(tmp_path):
    def refusal(path):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            answer(path)
        return str(error.value)

    assert "no such file" in refusal(tmp_path / "none.jsonl")
    assert "neither trace.jsonl nor watch/rank*.jsonl" in refusal(tmp_path)
    write_watch(tmp_path / "short", steps=5)
    assert "5 steps are too few" in refusal(tmp_path / "short")
    one = write_trace(tmp_path / "one", 9.0, ranks=1) / "trace.jsonl"
    assert "one rank waits for no other" in refusal(one)
    folder = write_watch(tmp_path / "three") / "watch"
    assert "give the folder" in refusal(folder / "rank0.jsonl")
    (folder / "rank2.jsonl").unlink()
    assert "rank 2 is missing" in refusal(folder)
    (folder / "rank1.jsonl").write_text('{"loss": 1}\n')
    assert "not written by straggle.watch" in refusal(folder)
    lines = (folder / "rank0.jsonl").read_text().splitlines(keepends=True)
    for rank in range(4):
        (folder / f"rank{rank}.jsonl").write_text(lines[0].replace('"rank": 0', f'"rank": {rank}'))
    assert "no step yet that all ranks have made" in refusal(folder)
    for rank in range(4):
        (folder / f"rank{rank}.jsonl").write_text(lines[0].replace('"rank": 0', f'"rank": {rank}') + '{"step": 0}\n')
    assert "not written by straggle.watch: KeyError('seconds')" in refusal(folder)
    (tmp_path / "trace.jsonl").write_text('{"loss": 1}\n')
    assert "line 1 is no step" in refusal(tmp_path)
    write_trace(tmp_path, 1.0)
    idle = (tmp_path / "trace.jsonl").read_text().replace('"idle": false', '"idle": true')
    (tmp_path / "trace.jsonl").write_text(idle)
    assert "no step in which all ranks had data" in refusal(tmp_path)
    (tmp_path / "trace.jsonl").write_text("loss 1\n")
    assert "no JSON" in refusal(tmp_path)
    for words, told in (([], "one PATH"), (["a", "b"], "one PATH"), (["a", "--json"], "options are written key=value")):
        with pytest.raises(ValueError, match=told):
            arguments(words)
    assert "no such file" in run_command("advise", 1, "none.jsonl", folder=tmp_path, status=2)
