"""What a Lightning Trainer may not do if its ranks leave and come back; its attributes are those of a real one."""

import enum
from types import SimpleNamespace

import pytest

from straggle.integrations.lightning_members import check_trainer


class Call(enum.Enum):
    FIT = "fit"
    TEST = "test"


class Callback:
    """Of any kind."""


class Timer(Callback):
    """As Lightning's is named."""


class OwnTimer(Timer):
    """Derived from it."""


def trainer(call=Call.FIT, automatic_optimization=True, **words):
    plain = {
        "accumulate_grad_batches": 1,
        "limit_train_batches": 1.0,
        "overfit_batches": 0.0,
        "callbacks": [Callback()],
    }
    return SimpleNamespace(
        state=SimpleNamespace(fn=call),
        lightning_module=SimpleNamespace(automatic_optimization=automatic_optimization),
        **{**plain, "reload_dataloaders_every_n_epochs": 0, **words},
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"call": Call.TEST}, r"its test\(\).* with devices=1"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4, .* a larger batch_size"),
        ({"automatic_optimization": False}, "use one optimizer with automatic optimization"),
        ({"limit_train_batches": 5}, "limit_train_batches=5, .* a smaller data set"),
        ({"overfit_batches": 1}, "overfit_batches=1, .* a smaller data set"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
        ({"callbacks": [Timer()]}, "Timer, .* leave it out"),
        ({"callbacks": [OwnTimer()]}, "Timer, .* leave it out"),
    ],
)
def test_what_ranks_that_come_back_could_not_follow_is_refused_with_what_to_do(words, says):
    with pytest.raises(ValueError, match=says):
        check_trainer(trainer(**words))
    check_trainer(trainer())
