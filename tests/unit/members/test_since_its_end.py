"""How long a rank was away, as the process that came back in its place says it once."""

import pytest

from straggle.members.agents import ENDED_AT, IS_SPARE
from straggle.members.healed.healing import since_its_end
from straggle.members.views.membership import new_incarnation
from straggle.members.views.view import OF_A_SPARE


@pytest.mark.parametrize(("own", "what"), [({}, "it was started again"), ({IS_SPARE: "1"}, "a spare took its place")])
def test_it_says_how_long_ago_the_process_before_ended_but_only_once(own, what):
    environment = {**own, ENDED_AT: "10.5"}
    assert since_its_end(environment, 10.9) == f": {what}, and has the state 0.40 s after its end"
    assert since_its_end(environment, 99.0) == ""


def test_process_that_was_a_spare_has_it_in_its_name(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert OF_A_SPARE not in new_incarnation()
    monkeypatch.setenv(IS_SPARE, "1")
    assert new_incarnation().startswith(f"3{OF_A_SPARE}")
    assert int(new_incarnation().partition("-")[0]) == 3  # as the failure detector reads it
