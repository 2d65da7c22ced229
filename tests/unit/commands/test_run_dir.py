"""A run's folder is checked before anything is trained, and is one run's alone for as long as its process lives."""

import functools
import os
import signal
import socket
import time

import pytest

from straggle.commands.configuration.config import complain_and_exit
from straggle.commands.saved.run_dir import check_run_dir, one_run, one_run_of_members


@pytest.mark.parametrize("folder", ["file/run", "file/a/b", "/proc/run"])
def test_folder_that_cannot_be_written_is_refused(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"run_dir={tmp_path / folder} cannot be written .*give another run_dir"):
        check_run_dir(tmp_path / folder)
    with pytest.raises(ValueError, match="cannot be written"), one_run(tmp_path / folder):
        pass


@pytest.mark.parametrize("command", ["train", "compare", "simulate"])
def test_commands_refuse_it_before_any_worker_starts(tmp_path, command, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as ended:
        complain_and_exit(command, [f"run_dir={tmp_path / 'file' / 'run'}"])
    assert ended.value.code == 2
    assert "file/run cannot be written" in capsys.readouterr().err


def test_check_leaves_nothing_behind(tmp_path):
    check_run_dir(tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


def holder(run_dir, child=False, holds=one_run):
    """A process that ``holds(run_dir)``; with a ``child``, one that it has forked lives on when it is killed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        assert os.read(reader, 1) == b"."
        os.close(reader)
        return process
    try:
        with holds(run_dir):
            if child and not os.fork():
                os.close(writer)
                time.sleep(20)
                os._exit(0)
            os.write(writer, b".")
            signal.pause()
    finally:
        os._exit(1)


def end(process):
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_second_run_is_refused_with_the_first_ones_host_and_process(tmp_path):
    first = holder(tmp_path / "run")
    try:
        holds = f"run_dir={tmp_path / 'run'} is in use by process {first} on host {socket.gethostname()}"
        with pytest.raises(ValueError, match=holds):
            check_run_dir(tmp_path / "run")
        with pytest.raises(ValueError, match=holds), one_run(tmp_path / "run"):
            pass
    finally:
        end(first)


@pytest.mark.parametrize("child", [False, True])
def test_killed_run_holds_nothing_not_even_where_a_child_of_it_lives_on(tmp_path, child):
    end(holder(tmp_path / "run", child))
    check_run_dir(tmp_path / "run")
    with one_run(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()


def test_run_whose_first_rank_was_killed_keeps_others_out_while_any_of_its_ranks_is_there(tmp_path):
    run_dir = tmp_path / "run"
    first = holder(run_dir, holds=functools.partial(one_run_of_members, begins=True))
    second = holder(run_dir, holds=functools.partial(one_run_of_members, begins=False))
    end(first)
    with pytest.raises(ValueError, match=f"is in use by process {first} on host"):
        check_run_dir(run_dir)
    for other in (one_run(run_dir), one_run_of_members(run_dir, begins=True)):
        with pytest.raises(ValueError, match="is in use by"), other:
            pass
    with one_run_of_members(run_dir, begins=False):  # the first rank is back
        pass
    end(second)
    with one_run(run_dir):
        pass


def test_run_that_begins_is_refused_where_another_has_the_folder_and_so_is_who_joins_one(tmp_path):
    other = holder(tmp_path / "run")
    try:
        for begins in (True, False):
            with pytest.raises(ValueError, match="is in use by"), one_run_of_members(tmp_path / "run", begins=begins):
                pass
    finally:
        end(other)


def test_rank_0_that_comes_back_does_not_take_its_own_run_for_another(tmp_path, monkeypatch, capsys):
    """Even if it is its launcher's first start, with a store that knows of none: their machine was started again."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("STRAGGLE_ELASTIC", "1")
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    words = [f"run_dir={tmp_path / 'run'}"]
    peer = holder(tmp_path / "run", holds=functools.partial(one_run_of_members, begins=True))
    try:
        with pytest.raises(SystemExit):
            complain_and_exit("train", words)
        assert "is in use by" in capsys.readouterr().err
        complain_and_exit("train", [*words, "members=elastic"])
        monkeypatch.delenv("STRAGGLE_ELASTIC")
        with pytest.raises(SystemExit):  # launch.sh's own look, before it starts anything
            complain_and_exit("train", [*words, "members=elastic"])
    finally:
        end(peer)
