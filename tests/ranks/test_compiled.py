"""A model that is compiled as a whole: no stage of it can be cut, and a late rank leaves between two micro-batches."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from ranks import digest, run_forked, staged
from torch import nn
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from training import Stopper, features, grads

import straggle
from straggle import LateHandling, Merge

pytestmark = pytest.mark.slow  # each rank compiles
NUM_MICROBATCHES = 4


class Normed(nn.Module):
    """Of a forward method of its own: torch does not compile a Sequential in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        for layer in self.between:
            x = x + torch.tanh(layer(x))
        return self.last(x)


def loss_of(model, x):
    return model(x).square().mean() / NUM_MICROBATCHES


def run_pass(model, x):
    loss_of(model, x).backward()


def as_it_is(anything):
    return anything


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", **options)


def compiled_in_place(module):
    module.compile(backend="aot_eager")
    return module


def pass_of_compiled_loss(run):
    loss = compiled(loss_of)
    return lambda model, x: loss(model, x).backward()


# what is done to the module, to the wrapped one, and to the function that runs a pass; and how many graphs that makes
WAYS = {
    "eager": (as_it_is, as_it_is, as_it_is, 0),
    "module": (partial(compiled, fullgraph=True), as_it_is, as_it_is, 1),
    "module in place": (compiled_in_place, as_it_is, as_it_is, 1),
    "wrapper": (as_it_is, compiled, as_it_is, 1),
    "wrapper in place": (as_it_is, compiled_in_place, as_it_is, 1),
    "loss": (as_it_is, as_it_is, pass_of_compiled_loss, 2),
    "pass": (as_it_is, as_it_is, compiled, 2),
}


def run_steps(rank, way, stops, granularity):
    """What each step leaves: how many passes the rank began and ended, weights, gradients and buffers."""
    torch.compiler.reset()
    counters.clear()
    input_codes.clear()
    torch.manual_seed(0)
    module = Normed()
    stopper = Stopper(module)
    of_module, of_model, of_pass, _ = WAYS[way]
    left, optimizer = [], torch.optim.SGD(module.parameters(), lr=0.1)
    options = {"late_handling": LateHandling(granularity=granularity), "merge": Merge(check_every=1)}
    with staged(of_module(module), **options) as straggled:
        model, run = of_model(straggled), of_pass(run_pass)
        for number, after in enumerate(stops):
            begun = ended = 0
            # the stages are planned after the first step, and nothing is compiled again
            with torch.compiler.set_stance("fail_on_recompile" if number else "default"), model.step(4) as step:
                for microbatch in range(NUM_MICROBATCHES):
                    if rank == 1 and after is not None and after[0] == microbatch:
                        stopper.arm(step, after[1])
                    begun += 1
                    run(model, features(rank, 10 * number + microbatch))
                    ended += 1
            report = straggled.last_report
            assert not report.different_ranks
            weights = [set(row.weights) for row in report.ranks]
            left.append((begun, ended, weights, grads(module), [buffer.clone() for buffer in module.buffers()]))
            optimizer.step()
            optimizer.zero_grad()
    return left, counters["stats"]["unique_graphs"], own_frames(), digest(module.state_dict().values())


def own_frames():
    """The functions of straggle that torch has tried to compile; the rest of a function has another name."""
    codes = [code for reference in input_codes.seen if (code := reference()) is not None]
    of_straggle = [code for code in codes if code.co_filename.startswith(str(Path(straggle.__file__).parent))]
    return {code.co_name for code in of_straggle if not code.co_name.startswith("torch_dynamo_resume_in_forward")}


def run_ways(rank, stops, granularity):
    return {way: run_steps(rank, way, stops, granularity) for way in WAYS}


BEFORE_A_MICROBATCH = [None, None, (2, 0), None, (0, 0), None]
AT_A_GRADIENT = [(1, 1), None]


@cache
def ran(granularity):
    """What both ranks have of all ways, in which each of them has compiled for seconds."""
    return run_forked(run_ways, 2, BEFORE_A_MICROBATCH + AT_A_GRADIENT, granularity)


@pytest.mark.parametrize("granularity", ["stage", "microbatch"])
def test_a_late_rank_of_a_compiled_model_leaves_before_its_next_micro_batch_and_merges_what_an_eager_one_does(
    granularity,
):
    first, second = ran(granularity)
    steps = len(BEFORE_A_MICROBATCH)
    eager, *_ = second["eager"]
    for way, (left, num_graphs, frames, end) in second.items():
        assert [step[:2] for step in left[:steps]] == [(4, 4), (4, 4), (3, 2), (4, 4), (1, 0), (4, 4)], way
        assert [step[2] for step in left[:steps]] == [[{1.0}, {share}] for share in (1.0, 1.0, 0.5, 1.0, 0.0, 1.0)], way
        torch.testing.assert_close([step[3:] for step in left[:steps]], [step[3:] for step in eager[:steps]])
        assert first[way][3] == end, way
        assert num_graphs == WAYS[way][3], way
        assert frames <= (set() if way.startswith("module") else {"forward"}), way


def test_gradients_that_come_at_once_all_count_if_the_rank_is_late_at_the_first_of_them():
    first, second = ran("stage")
    for way, (left, _, _, end) in second.items():
        cut, last = left[-2:]
        begun, ended, weights, *_ = cut
        assert (begun, ended) == ((2, 1) if way == "eager" else (3, 2)), way
        assert way == "eager" or weights == [{1.0}, {0.5}], way
        assert last[:3] == (4, 4, [{1.0}, {1.0}]), way
        assert first[way][3] == end, way


def run_compiled_steps(rank, is_compiled):
    torch.manual_seed(0)
    module, merged = Normed(), []
    with staged(module) as model:

        def run_step(number):
            with model.step(NUM_MICROBATCHES) as step:
                for microbatch in range(NUM_MICROBATCHES):
                    if rank == 1 and number == 1 and microbatch == 2:
                        step.stop()
                    loss_of(model, features(rank, microbatch)).backward()

        run = compiled(run_step) if is_compiled else run_step
        for number in range(3):
            run(number)
            merged.append((grads(module), model.last_report.ranks[1].weights[0]))
            module.zero_grad()
    return merged


def test_a_block_that_is_compiled_with_its_step_ends_as_it_does_otherwise():
    (first, second), (eager, _) = (
        run_forked(run_compiled_steps, 2, True),
        run_forked(run_compiled_steps, 2, False),
    )
    assert [weight for _, weight in second] == [1.0, 0.5, 1.0]
    torch.testing.assert_close(first, eager)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def run_in_one_graph(rank):
    with staged(Normed()) as model, pytest.raises(Unsupported, match="compile the module itself"), model.step():
        compiled(model, fullgraph=True)(features(rank, 0))


def test_a_wrapper_that_must_be_one_graph_is_refused_with_the_remedy():
    run_forked(run_in_one_graph, 1)
