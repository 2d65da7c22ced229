"""A folder is complete after a death at any moment of its writing, and what is damaged is refused by name."""

import json
import os
import signal
import sys

import pytest

from straggle.commands import durable

FILES = {"a": b"first" * 100, "b": b"second" * 100}
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def save(directory, step):
    new = durable.begin(directory)
    for name, content in FILES.items():
        (new / name).write_bytes(content + bytes([step]))
    durable.publish(directory, {"step": step}, {name: durable.seal(new / name) for name in FILES})


def killed_before(operation, work):
    """Whether ``work``, in a process of its own, was killed before its file operation of this number."""
    process = os.fork()
    if process:
        return os.WIFSIGNALED(os.waitpid(process, 0)[1])
    left = [operation]

    def count(event, _arguments):
        if event in OPERATIONS:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    try:
        sys.addaudithook(count)
        work()
    finally:
        os._exit(0)


def latest(directory):
    """The step of the latest folder whose every file is what was written."""
    for snapshot in durable.snapshots(directory)[0]:
        for name in FILES:
            assert snapshot.check(name).read_bytes() == FILES[name] + bytes([snapshot.step])
    return durable.snapshots(directory)[0][0].step


def moments_of_death(tmp_path, prepare, work):
    """A folder for each file operation of ``work``, which was killed before it."""
    operation, died = 0, True
    while died:
        directory = tmp_path / str(operation) / "checkpoint"
        directory.parent.mkdir()
        prepare(directory)
        died = killed_before(operation, lambda directory=directory: work(directory))
        yield directory, died
        operation += 1


def test_death_before_any_file_operation_of_writing_leaves_the_old_or_the_new_one(tmp_path):
    steps = []
    for directory, _died in moments_of_death(tmp_path, lambda it: save(it, 1), lambda it: save(it, 2)):
        steps.append(latest(directory))
        save(directory, 3)  # whatever was left is in no save's way
        assert latest(directory) == 3
        assert [path.name for path in directory.parent.iterdir()] == ["checkpoint"]
    assert len(steps) > 15
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def between_the_renames(directory):
    save(directory, 1)
    os.replace(directory, directory.with_name("whole"))
    save(directory, 2)
    os.replace(directory, directory.with_name("checkpoint.new"))
    os.replace(directory.with_name("whole"), directory.with_name("checkpoint.old"))


def test_death_while_the_latest_is_put_in_its_place_leaves_it(tmp_path):
    def adopt(directory):
        durable.adopt(durable.snapshots(directory)[0][0], directory)

    deaths = 0
    for directory, died in moments_of_death(tmp_path, between_the_renames, adopt):
        assert latest(directory) == 2
        deaths += died
    assert deaths > 3
    assert [path.name for path in directory.parent.iterdir()] == ["checkpoint"]


def test_first_one_that_was_broken_off_is_none(tmp_path):
    found = [
        (durable.exists(directory), len(durable.snapshots(directory)[0]), durable.snapshots(directory)[1])
        for directory, _died in moments_of_death(tmp_path, lambda _: None, lambda it: save(it, 1))
    ]
    assert found[0] == (False, 0, [])
    assert found[-1] == (True, 1, [])
    assert set(map(str, found)) == {str(found[0]), str(found[-1])}


@pytest.mark.parametrize("name", [*FILES, durable.STATE])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_damaged_file_is_refused_by_name_and_step(tmp_path, name, damage):
    directory = tmp_path / "checkpoint"
    save(directory, 7)
    path = directory / name
    content = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(content.replace(b"first", b"First").replace(b"second", b"Second").replace(b"7", b"8"))
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    found, damaged = durable.snapshots(directory)
    if name == durable.STATE:
        assert found == []
        assert damaged == [] if damage == "gone" else f"{path} is damaged" in damaged[0]
    else:
        words = {"flipped": "its SHA-256 is not", "cut": "bytes of", "gone": "cannot be read"}[damage]
        with pytest.raises(ValueError, match=f"{path} of step 7 .*{words}"):
            found[0].check(name)


def test_one_whose_files_have_not_all_come_is_not_published(tmp_path):
    directory = tmp_path / "checkpoint"
    save(directory, 1)
    new = durable.begin(directory)
    (new / "a").write_bytes(b"")
    seal = durable.seal(new / "a")
    with pytest.raises(FileNotFoundError):
        durable.publish(directory, {"step": 2}, {"a": seal, "rank1": seal})
    assert latest(directory) == 1


def test_what_was_there_before_is_kept_under_another_name_once(tmp_path):
    directory = tmp_path / "checkpoint"
    assert durable.set_aside(directory) is None
    for step in (1, 2):
        save(directory, step)
        kept = durable.set_aside(directory)
        assert not durable.exists(directory)
        assert json.loads((kept / durable.STATE).read_text())["step"] == step
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.earlier"]


def test_death_while_it_is_set_aside_leaves_it_somewhere(tmp_path):
    deaths = 0
    for directory, died in moments_of_death(tmp_path, between_the_renames, durable.set_aside):
        earlier = directory.with_name("checkpoint.earlier")
        assert latest(directory if durable.exists(directory) else earlier) == 2
        deaths += died
    assert deaths > 3
