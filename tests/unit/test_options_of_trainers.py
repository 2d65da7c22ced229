"""Which words of a framework's constructor are `StagedDataParallel`'s."""

from straggle import Elastic, FixedDeadline
from straggle.integrations.options import take_options


def test_options_are_taken_out_of_the_framework_s_words():
    deadline, members = FixedDeadline(1.0), Elastic()
    words = {"deadline": deadline, "members": members, "other": 1}
    assert take_options(words) == {"deadline": deadline, "members": members}
    assert words == {"other": 1}


def test_members_that_are_none_are_no_option():
    words = {"members": None, "other": 1}
    assert take_options(words) == {}
    assert words == {"other": 1}
