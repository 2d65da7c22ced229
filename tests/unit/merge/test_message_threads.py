"""How many messages gloo has on their way at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from straggle.backward.stages import MIN_STAGES
from straggle.merge.groups import gloo_group
from straggle.policies.merge_time import MESSAGES_AT_A_TIME


def test_all_stages_of_a_model_that_has_the_least_of_them_are_on_their_way_at_a_time() -> None:
    group = gloo_group(dist.HashStore(), 0, 1, 5.0)
    assert getattr(group.options, "_threads") == MESSAGES_AT_A_TIME  # noqa: B009  (a name of torch's)
    assert MESSAGES_AT_A_TIME >= MIN_STAGES
    tensor = torch.ones(3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0] * 3
