"""For twelve kinds of graphs and every cut, the staged backward pass is the plain one, bit for bit."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from torch.utils.checkpoint import checkpoint

from straggle import BackwardStep, FinishedStage, StagedBackward

NUM_CUTS = 6


# -- models: for each case a module, and the loss that a pass begins with


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(rows: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(seed))


def on_features(model, *shape: int):
    return model, lambda model: model(random(*(shape or (6, 8)))).square().mean()


def gpt2(**changes):
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    made = import_module("transformers.models.gpt2.modeling_gpt2")  # by slow tests only: it takes seconds to load
    model = made.GPT2LMHeadModel(made.GPT2Config(**sizes, **dropout, **changes))
    assert model.lm_head.weight is model.transformer.wte.weight
    return model, lambda model: model(input_ids=tokens(), labels=tokens(seed=1)).loss


def gpt2_checkpointed():
    model, loss = gpt2(use_cache=False)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    return model, loss


def gpt2_in_bfloat16():
    model, loss = gpt2()

    def loss_in_bfloat16(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model)

    return model, loss_in_bfloat16


class Experts(nn.Module):
    """Sends each row to the best of its experts; with few rows, most experts get none and have no gradient."""

    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(8, num_experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, weight[rows, None] * self.experts[number](x[rows]))
        return x + out


def mixture_of_experts():
    return on_features(nn.Sequential(nn.Linear(8, 8), Experts(), nn.Tanh(), Experts(), nn.Linear(8, 2)), 2, 8)


class UNet(nn.Module):
    """Two levels down and up again; what was before each level is concatenated to what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ConvTranspose2d(16, 4, 2, stride=2)])

    def forward(self, x: Tensor) -> Tensor:
        skips = [torch.relu_(self.enter(x))]
        for down in self.down:
            skips.append(torch.relu(down(skips[-1])))
        out = skips.pop()
        for up in self.up:
            out = torch.cat([skips.pop(), torch.relu(up(out))], 1)
        return self.leave(out)


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and a head that also reads the last cell state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(32, 8), nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.embedding(ids), state)
        return self.head(torch.cat([out[:, -1], state[1][-1]], 1)), state


def lstm():
    return Recurrent(), lambda model: model(tokens())[0].square().mean()


def layers(*widths: int) -> nn.Sequential:
    """Linear layers of these widths with Tanh between them."""
    pairs = [(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def siamese():
    """The loss calls the entire model twice."""
    return layers(8, 16, 16, 4), lambda model: cosine_similarity(
        model(random(4, 8)), model(random(4, 8, seed=1))
    ).mean()


class LowRank(nn.Module):
    """A frozen layer with a trained correction of rank 2."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features))
        self.b = nn.Parameter(torch.randn(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def adapters():
    """Frozen layers below, between and above the trained ones."""
    frozen = nn.Linear(8, 8).requires_grad_(False)
    below = nn.Sequential(frozen, nn.BatchNorm1d(8).requires_grad_(False).eval(), nn.Tanh())
    adapted = [module for _ in range(4) for module in (LowRank(nn.Linear(8, 8)), nn.Tanh())]
    return on_features(nn.Sequential(below, *adapted, nn.LayerNorm(8), nn.Linear(8, 3).requires_grad_(False)))


def checkpointed_from_outside():
    """The loop computes the entire model again: reentrant, all of it is a pass within the pass."""
    head = nn.Linear(2, 2)

    def loss(model):
        x = random(6, 8).requires_grad_()
        return head(checkpoint(model, x, use_reentrant=True)).square().mean()

    return layers(8, 16, 16, 2), loss


class SharedBlock(nn.Module):
    """As in ALBERT: one block is called three times, and computed again each time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(8, 8), layers(8, 16, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.leave(x)


def normalized_weights():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).eval()  # else each forward pass changes it
    weight = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return on_features(nn.Sequential(nn.Linear(8, 8), weight, spectral, nn.Linear(8, 2)))


def sparse_embedding():
    bag = nn.EmbeddingBag(32, 8, sparse=True)
    return nn.Sequential(bag, layers(8, 8, 8, 2)), lambda model: model(tokens()).square().mean()


def gradient_penalty_on_parameters():
    """The squared norm of the loss's own gradient is a part of the loss."""

    def loss(model):
        plain = model(random(6, 8)).square().mean()
        slopes = torch.autograd.grad(plain, list(model.parameters()), create_graph=True)
        return plain + sum(slope.square().sum() for slope in slopes)

    return layers(8, 16, 16, 2), loss


# -- cutting, and comparing bit for bit


class Cutter:
    """Stops a step at one of its gradients. Make it before the `StagedBackward`: its hooks then run first."""

    def __init__(self, module: nn.Module) -> None:
        self.finished: list[str] = []
        self._step: BackwardStep | None = None
        self._after: int | None = None
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._finished, name))

    def arm(self, step: BackwardStep | None, after: int | None) -> None:
        """Stop ``step`` after this many gradients; 0 is before its first forward pass, and ``None`` is never."""
        self.finished, self._step, self._after = [], step, after
        if step is not None and after == 0:
            step.stop()

    def _finished(self, name: str, _parameter: Tensor) -> None:
        self.finished.append(name)
        if self._step is not None and len(self.finished) == self._after:
            self._step.stop()


def take_step(
    staged: StagedBackward, cutter: Cutter, loss: Callable[[nn.Module], Tensor], after: int | None
) -> BackwardStep:
    """A step of one pass that is stopped after this many gradients."""
    with staged.step() as step:
        cutter.arm(step, after)
        loss(staged.module).backward()
    return step


def cuts(total: int) -> list[int]:
    """Numbers of finished gradients, spread evenly from none to all."""
    return [round(number * total / (NUM_CUTS - 1)) for number in range(NUM_CUTS)]


CASES = {
    "GPT-2, bfloat16 autocast": gpt2_in_bfloat16,  # tied embeddings, and casts that are shared
    "GPT-2, reentrant checkpointing": gpt2_checkpointed,
    "experts without rows": mixture_of_experts,
    "U-Net": lambda: on_features(UNet(), 2, 3, 8, 8),
    "LSTM": lstm,
    "siamese": siamese,
    "adapters": adapters,
    "reentrant checkpoint outside": checkpointed_from_outside,
    "shared checkpointed block": lambda: on_features(SharedBlock()),
    "normalized weights": normalized_weights,
    "sparse embedding": sparse_embedding,
    "gradient penalty on parameters": gradient_penalty_on_parameters,
}


def of_slow(names):
    """Those that load transformers are slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name.startswith("GPT-2") else ()) for name in names]


def bits(gradient: Tensor | None) -> bytes | None:
    if gradient is None:
        return None
    return gradient.detach().to_dense().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def gradients(module: nn.Module) -> dict[str, bytes | None]:
    return {name: bits(parameter.grad) for name, parameter in module.named_parameters()}


def differing(ours: dict[str, bytes | None], theirs: dict[str, bytes | None]) -> list[str]:
    """The parameters that do not have the same bits, or one has a gradient and the other none."""
    assert ours.keys() == theirs.keys()
    return [name for name in ours if ours[name] != theirs[name]]


def trained_names(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def hold(module: nn.Module, before: bool) -> None:
    """What ``p.grad`` holds when a step begins: nothing, or the same random numbers each time."""
    for number, parameter in enumerate(module.parameters()):
        own = before and parameter.requires_grad
        parameter.grad = random(*parameter.shape, seed=number).to(parameter) if own else None


def build(case: Callable):
    """The module of a case and its loss, the same ones each time."""
    torch.manual_seed(0)
    return case()


# -- one pass


@pytest.mark.parametrize("before", [False, True], ids=["no gradients before", "gradients before"])
@pytest.mark.parametrize("case", of_slow(CASES))
def test_gradients_are_those_of_plain_backward_at_every_cut_and_in_the_next_whole_step(case, before):
    (module, loss), (plain, plain_loss) = build(CASES[case]), build(CASES[case])
    ours, theirs = Cutter(module), Cutter(plain)
    staged = StagedBackward(module)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (module, plain)]
    for number in range(NUM_CUTS):
        hold(plain, before)
        held = gradients(plain)
        theirs.arm(None, None)
        plain_loss(plain).backward()
        full = gradients(plain)
        assert set(differing(held, full)) <= set(theirs.finished)
        after = cuts(len(theirs.finished))[number]

        hold(module, before)
        report = take_step(staged, ours, loss, after).report
        kept = ours.finished
        assert kept == theirs.finished[:after]
        assert not differing(gradients(module), held | {name: full[name] for name in kept})
        assert report.truncated
        assert sorted(report.missing) == sorted(trained_names(module) - set(kept))

        hold(module, before)
        report = take_step(staged, ours, loss, after=None).report
        assert not differing(gradients(module), full)
        assert not report.truncated
        assert report.missing == ()
        assert {name for name, passes in report.passes.items() if passes} == set(ours.finished)
        for optimizer in optimizers:
            optimizer.step()
    assert any(any(gradient) for gradient in full.values() if gradient)


@pytest.mark.parametrize("case", of_slow(CASES))
def test_every_gradient_is_shown_by_one_stage_with_the_value_that_it_keeps(case):
    (module, loss), (plain, plain_loss) = build(CASES[case]), build(CASES[case])
    plain_loss(plain).backward()
    full = {name: gradient for name, gradient in gradients(plain).items() if gradient is not None}
    shown: list[tuple[str, bytes | None]] = []

    def look(stage: FinishedStage) -> None:
        shown.extend((name, bits(parameter.grad)) for name, parameter in stage.parameters.items())

    staged = StagedBackward(module, on_stage=look)
    for _planned in ("by size", "in the order of the first step"):
        module.zero_grad()
        shown.clear()
        staged.backward(loss(module))
        assert sorted(shown) == sorted(full.items())


@pytest.mark.parametrize("case", of_slow(["GPT-2, reentrant checkpointing", "shared checkpointed block", "U-Net"]))
def test_stop_in_any_call_of_a_module_even_one_that_computes_again_keeps_whole_gradients_only(case):
    (module, loss), (plain, plain_loss) = build(CASES[case]), build(CASES[case])
    plain_loss(plain).backward()
    full = gradients(plain)
    calls: list[str] = []
    stop_at: list[int] = []

    def called(_module, _inputs, _output):
        calls.append("")
        if [len(calls)] == stop_at:
            staged.stop()

    for child in module.modules():
        child.register_forward_hook(called)
    staged = StagedBackward(module)
    staged.backward(loss(module))
    num_kept = set()
    for number in range(1, len(calls) + 1):
        module.zero_grad()
        calls.clear()
        stop_at[:] = [number]
        with staged.step() as step:
            loss(module).backward()
        kept = {name: gradient for name, gradient in gradients(module).items() if gradient is not None}
        assert kept.items() <= full.items()
        assert sorted(step.report.missing) == sorted(full.keys() - kept.keys())
        num_kept.add(len(kept))
    assert 0 in num_kept
    assert len(num_kept) > 1


# -- several passes, several models


def microbatches(model):
    """Three batches for GPT-2, one loss after the other."""
    for seed in range(3):
        yield model(input_ids=tokens(seed=seed), labels=tokens(seed=seed)).loss


def chunks(model):
    """Truncated back-propagation through time: the state goes on to the next chunk, its gradient does not go back."""
    state = None
    for ids in tokens(length=12).chunk(3, 1):
        out, state = model(ids, state)
        yield out.square().mean()
        state = tuple(part.detach() for part in state)


def routed(model):
    """Batches of one row: each goes to other experts."""
    for seed in range(3):
        yield model(random(1, 8, seed=seed)).square().mean()


ACCUMULATING = {
    "GPT-2": (gpt2, microbatches),
    "LSTM": (lstm, chunks),
    "experts": (mixture_of_experts, routed),
}


@pytest.mark.parametrize("granularity", ["stage", "microbatch"])
@pytest.mark.parametrize("name", of_slow(ACCUMULATING))
def test_late_step_of_several_passes_keeps_those_and_the_layers_that_it_finished(name, granularity):
    case, losses = ACCUMULATING[name]
    (module, _), (plain, _) = build(case), build(case)
    ours, theirs = Cutter(module), Cutter(plain)
    staged = StagedBackward(module, granularity=granularity)
    theirs.arm(None, None)
    accumulated, ends = [gradients(plain)], []
    for loss in losses(plain):
        loss.backward()
        accumulated.append(gradients(plain))
        ends.append(len(theirs.finished))
    starts = [0, *ends[:-1]]
    held_after = {name: [accumulated[0][name]] for name in accumulated[0]}  # this many of its passes
    for end, start, held in zip(ends, starts, accumulated[1:], strict=True):
        for name in theirs.finished[start:end]:
            held_after[name].append(held[name])
    for after in [*cuts(ends[-1]), *ends, None]:
        module.zero_grad()
        with staged.step() as step:
            ours.arm(step, after)
            for loss in losses(module):
                loss.backward()
        reached = ends[-1] if after is None else after
        if granularity == "microbatch":
            reached = next(end for end in [0, *ends] if end >= reached)
        passes = Counter(theirs.finished[:reached])
        assert ours.finished == theirs.finished[:reached]
        assert step.report.passes == {name: passes[name] for name in held_after}
        assert not differing(gradients(module), {name: held[passes[name]] for name, held in held_after.items()})
        begun = max(1, sum(start < reached for start in starts))
        behind = {name for name in held_after if passes[name] < begun}
        # with complete micro-batches, nothing is left to stop in the last one
        assert step.report.truncated == (after is not None and (granularity == "stage" or reached < ends[-1]))
        assert set(step.report.missing) == (behind if step.report.truncated else set())


# -- compiled models


class Residual(nn.Module):
    """Of a forward method of its own: torch does not compile a Sequential in place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def compiled(as_a_whole: bool):
    """Compiled is the model, so that all gradients come at the end of one node, or each block in place."""
    blocks = [Residual(layers(8, 16, 8)) for _ in range(4)]
    module = Residual(nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8)))
    for part in [module] if as_a_whole else blocks:
        part.compile(backend="aot_eager", fullgraph=True)
    return on_features(module)


def node_names(loss: Tensor) -> set[str]:
    """The names of all nodes of its graph."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.slow
@pytest.mark.parametrize("as_a_whole", [False, True])
def test_compiled_model_keeps_the_gradients_that_it_has_compiled_without_stages(as_a_whole):
    """As in the test of the cases, but from the first gradient on: compiled code is not left in the forward pass."""
    torch.compiler.reset()
    (module, loss), (plain, plain_loss) = [build(partial(compiled, as_a_whole)) for _ in range(2)]
    plain_loss(plain).backward()
    full = gradients(plain)
    cutter = Cutter(module)
    staged = StagedBackward(module)
    assert "CompiledFunctionBackward" in node_names(loss(module))
    for number, after in enumerate([None, *cuts(len(full))[1:], None]):
        module.zero_grad()
        # the first complete step plans the stages again; from then on nothing is compiled again
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            report = take_step(staged, cutter, loss, after).report
        kept = cutter.finished
        assert len(kept) == (len(full) if after is None else after)
        assert not differing(gradients(module), {name: full[name] if name in kept else None for name in full})
        assert sorted(report.missing) == sorted(full.keys() - set(kept))
        assert report.truncated == (after is not None)
