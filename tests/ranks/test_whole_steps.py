"""`LateHandling(granularity="step")`: all of a rank's step goes into the merge, or nothing."""

import pytest
import torch
from ranks import run_ranks, staged
from training import Chain, Stopper

from straggle import LastOwn, LateHandling, StagedBackward, Zero
from straggle.backward import stages

WHOLE = LateHandling(granularity="step")


def merged(rank, stop_after, num_microbatches, estimator, bucket_bytes):
    """Rank r's gradients are (r + 1) times those of rank 0; the last rank stops its second step early."""
    stages.BUCKET_BYTES = bucket_bytes
    module = Chain()
    stopper = Stopper(module)
    last = torch.distributed.get_world_size() - 1
    with staged(module, late_handling=WHOLE, estimator=estimator) as model:
        for number in range(2):
            module.zero_grad()
            with model.step(num_microbatches=num_microbatches) as step:
                stopper.arm(step, stop_after if rank == last and number == 1 else None)
                for _ in range(num_microbatches):
                    (model(float(rank + 1)) / num_microbatches).backward()
        scale = [layer.weight.grad.unique().item() / (i + 1) for i, layer in enumerate(module.layers)]
        report = model.last_report
        return scale, [of.reach for of in report.ranks], [stage.weight for stage in report.stages], report.late_ranks


@pytest.mark.parametrize("bucket_bytes", [1, stages.BUCKET_BYTES], ids=["many messages", "one message"])
@pytest.mark.parametrize(("stop_after", "num_microbatches"), [(0, 1), (4, 1), (7, 3), (14, 3)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_of_a_late_ranks_step_is_merged(world_size, stop_after, num_microbatches, bucket_bytes):
    for scale, reach, weight, late in run_ranks(merged, world_size, stop_after, num_microbatches, None, bucket_bytes):
        assert scale == pytest.approx([sum(range(1, world_size)) / (world_size - 1)] * 5)
        assert reach == [1.0] * (world_size - 1) + [0.0]
        assert weight == [world_size - 1] * len(weight)
        assert late == (world_size - 1,)


@pytest.mark.parametrize(("stop_after", "num_microbatches"), [(None, 1), (5, 1), (15, 3)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_that_finished_its_step_counts_in_full(world_size, stop_after, num_microbatches):
    for scale, reach, _, late in run_ranks(merged, world_size, stop_after, num_microbatches, None, 1):
        assert scale == pytest.approx([(world_size + 1) / 2] * 5)
        assert reach == [1.0] * world_size
        assert late == ()


@pytest.mark.parametrize(("estimator", "expected"), [(Zero(), 1 / 2), (LastOwn(1.0), (1 + 2) / 2)], ids=["zero", "own"])
def test_estimate_stands_for_the_whole_step(estimator, expected):
    for scale, *_ in run_ranks(merged, 2, 3, 1, estimator, 1):
        assert scale == pytest.approx([expected] * 5)


def test_staged_backward_refuses_it():
    with pytest.raises(ValueError, match="granularity='step': choose one of stage, microbatch"):
        StagedBackward(Chain(), granularity="step")
