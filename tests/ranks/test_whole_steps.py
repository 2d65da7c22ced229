"""`LateHandling(granularity="step")`: all of a rank's step goes into the merge, or nothing (see test_steps.py, too)."""

import pytest
from ranks import run_forked, staged
from training import Chain, Stopper

from straggle import LateHandling, StagedBackward


def stopped_at_its_end(rank, stop_after, num_microbatches):
    """Rank r's gradients are (r + 1) times those of rank 0; the last rank is asked to stop with its last gradient."""
    module = Chain()
    stopper = Stopper(module)
    with staged(module, late_handling=LateHandling(granularity="step")) as model:
        with model.step(num_microbatches=num_microbatches) as step:
            stopper.arm(step, stop_after if rank else None)
            for _ in range(num_microbatches):
                (model(float(rank + 1)) / num_microbatches).backward()
        scale = [layer.weight.grad.unique().item() / (i + 1) for i, layer in enumerate(module.layers)]
        return scale, [of.reach for of in model.last_report.ranks], model.last_report.late_ranks


@pytest.mark.parametrize(("stop_after", "num_microbatches"), [(5, 1), (15, 3)])
def test_rank_that_finished_its_step_counts_in_full(stop_after, num_microbatches):
    for scale, reach, late in run_forked(stopped_at_its_end, 2, stop_after, num_microbatches):
        assert scale == pytest.approx([3 / 2] * 5)
        assert reach == [1.0] * 2
        assert late == ()


def test_staged_backward_refuses_it():
    with pytest.raises(ValueError, match="granularity='step': choose one of stage, microbatch"):
        StagedBackward(Chain(), granularity="step")
