"""``stuck.jsonl``: who was stuck, where, for how long, and what is said of it."""

from dataclasses import replace

from straggle.observe.stuck import FILE, StuckWriter, read_stuck, stuck_sentences
from straggle.report import StuckReport

BEGAN = StuckReport(
    3, 120, False, 10.2, "in load (train.py:41: next(it))", "load (train.py:41)", ("load", "main"), (0, 1)
)
OVER = replace(BEGAN, seconds=37.4, over=True)
STOOD_IN = replace(BEGAN, seconds=0.0, stood_in=1)


class Told:
    """A model that is stuck when a test says so."""

    def register_stuck_hook(self, hook):
        self.stuck = hook
        return self

    def remove(self):
        self.stuck = None


def test_reports_come_back_as_they_were_and_a_line_of_another_rank_stays(tmp_path):
    models = Told(), Told()
    with StuckWriter(models[0], tmp_path, begins=True), StuckWriter(models[1], tmp_path):
        models[0].stuck(BEGAN)
        models[1].stuck(STOOD_IN)
        models[0].stuck(OVER)
    assert [report for _, report in read_stuck(tmp_path)] == [BEGAN, STOOD_IN, OVER]
    assert models[0].stuck is None
    with StuckWriter(models[0], tmp_path, begins=True):
        assert read_stuck(tmp_path) == []


def test_a_rank_that_closes_the_file_goes_on(tmp_path):
    model = Told()
    with StuckWriter(model, tmp_path):
        model.stuck(BEGAN)
    (_, began), (_, over) = read_stuck(tmp_path)
    assert (began.over, over.over, over.seconds >= BEGAN.seconds) == (False, True, True)


def test_a_file_that_cannot_be_written_is_said_once(tmp_path, caplog):
    model = Told()
    StuckWriter(model, tmp_path / "gone")
    model.stuck(BEGAN)
    model.stuck(OVER)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"{tmp_path}/gone/{FILE} cannot be written"
    ]


def test_sentences_say_how_long_and_whether_it_went_on():
    assert list(stuck_sentences([BEGAN])) == [
        "Rank 3 was stuck for 10 s, last before step 120: in load (train.py:41: next(it)). Ranks 0, 1 waited. As far "
        "as this file goes, it did not go on."
    ]
    again = replace(OVER, step=140, entered=True, seconds=12.6)
    assert list(stuck_sentences([BEGAN, OVER, again])) == [
        "Rank 3 was stuck 2 times, for 50 s in all, last in step 140: in load (train.py:41: next(it)). Ranks 0, 1 "
        "waited."
    ]


def test_sentences_name_the_longest_first_and_how_often_a_rank_was_stood_in_for():
    short = replace(OVER, rank=1, seconds=11.0, waiting=())
    often = replace(STOOD_IN, stood_in=64)
    said = list(stuck_sentences([short, STOOD_IN, BEGAN, OVER, often]))
    assert [sentence[:30] for sentence in said[:2]] == [
        "Rank 3 was stuck for 37 s, las",
        "Rank 1 was stuck for 11 s, las",
    ]
    assert said[2:] == ["Rank 3 was stood in for at least 64 times while it was in load (train.py:41: next(it))."]
    assert list(stuck_sentences([])) == []
