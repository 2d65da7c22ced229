"""A folder is complete after a death at any moment of its writing, and what is damaged is refused by name."""

import os
import shutil
import signal
import sys

import pytest

from straggle.commands.saved import durable

FILES = {"a": b"first" * 100, "b": b"second" * 100}
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def save(directory, step):
    durable.publish(*written(directory, step))


def written(directory, step):
    """A folder that is ready to be published."""
    new = durable.begin(directory, step)
    for name, content in FILES.items():
        (new / name).write_bytes(content + bytes([step]))
    return new, {"step": step}, {name: durable.seal(new / name) for name in FILES}


def copied(directory, step):
    """Complete the folder of another step beside those that there are."""
    save(elsewhere := directory.with_name("elsewhere"), step)
    shutil.move(elsewhere / f"step{step}", directory / f"step{step}")
    elsewhere.rmdir()


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
        assert [path.name for path in directory.iterdir()] == ["step3"]
    assert len(steps) > 15
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def two_complete(directory):
    save(directory, 1)
    copied(directory, 2)


def test_death_while_all_but_the_latest_are_removed_leaves_it(tmp_path):
    deaths = 0
    for directory, died in moments_of_death(tmp_path, two_complete, lambda it: durable.keep_only(it / "step2")):
        assert latest(directory) == 2
        deaths += died
    assert deaths > 3
    assert [path.name for path in directory.iterdir()] == ["step2"]


def test_same_step_is_written_again_beside_the_first(tmp_path):
    for _ in range(3):
        (tmp_path / "checkpoint" / "notes").mkdir(parents=True, exist_ok=True)  # of the user's own
        save(tmp_path / "checkpoint", 4)
        assert latest(tmp_path / "checkpoint") == 4
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step4", "notes"}


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
    path = directory / "step7" / name
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
    new, state, files = written(directory, 2)
    with pytest.raises(FileNotFoundError):
        durable.publish(new, state, {**files, "rank1": files["a"]})
    assert latest(directory) == 1


def test_what_was_there_before_is_kept_under_another_name_once(tmp_path):
    directory = tmp_path / "checkpoint"
    assert durable.set_aside(directory) is None
    for step in (1, 2):
        save(directory, step)
        kept = durable.set_aside(directory)
        assert not durable.exists(directory)
        assert latest(kept) == step
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.earlier"]


def one_aside_already(directory):
    save(directory, 0)
    durable.set_aside(directory)
    two_complete(directory)


def test_death_while_it_is_set_aside_leaves_it_somewhere(tmp_path):
    deaths = 0
    for directory, died in moments_of_death(tmp_path, one_aside_already, durable.set_aside):
        earlier = directory.with_name("checkpoint.earlier")
        assert latest(directory if durable.exists(directory) else earlier) == 2
        deaths += died
    assert deaths > 3
