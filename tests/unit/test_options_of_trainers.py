"""Which words of a framework's constructor are `StagedDataParallel`'s."""

import pytest

from straggle import Elastic, FixedDeadline
from straggle.integrations.options import take_options


def test_options_are_taken_out_of_the_framework_s_words():
    deadline, members = FixedDeadline(1.0), Elastic()
    words = {"deadline": deadline, "members": members, "other": 1}
    assert take_options(words, members=True) == {"deadline": deadline, "members": members}
    assert words == {"other": 1}


@pytest.mark.parametrize("members", [True, False])
def test_members_that_are_none_are_no_option(members):
    words = {"members": None, "other": 1}
    assert take_options(words, members=members) == {}
    assert words == {"other": 1}


def test_members_are_refused_where_the_framework_would_wait_for_absent_ranks():
    with pytest.raises(ValueError, match="is for a loop of your own"):
        take_options({"members": Elastic()})
