"""`StagedTrainer` beside the Trainer under DDP: the real one, on ranks over gloo."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import as_launched
from loaded import ranks_with
from ranks import Raised, digest
from torch import nn

pytestmark = [
    pytest.mark.slow,  # transformers takes its seconds to load
    # asked for, not imported: each test process collects this file
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
NUM_RANKS, FOUR = 2, 4


@pytest.fixture(scope="module")
def run_loaded():
    with ranks_with("transformers.trainer", "transformers.models.gpt2.modeling_gpt2") as run:
        yield run


def tiny_gpt():
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 12}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))


class Sentences(torch.utils.data.Dataset):
    """Of 12 tokens; where they are ``uneven``, some are padding that no loss is taken of."""

    def __init__(self, uneven):
        tokens = torch.randint(0, 32, (40, 12), generator=torch.Generator().manual_seed(1))
        self.tokens, self.labels = tokens, tokens.clone()
        if uneven == "masked":  # every second has no label
            self.labels[::2] = -100
        elif uneven:
            for number in range(40):
                self.labels[number, 12 - number % 7 :] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return {"input_ids": self.tokens[number], "labels": self.labels[number]}


def arguments(folder, **changes):
    import transformers

    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**given, **changes})


def made(kind, folder, uneven=False, **changes):
    """A trainer of this class; the words that are not arguments' are the trainer's own."""
    own = {name: changes.pop(name) for name in ("deadline", "callbacks", "eval_dataset") if name in changes}
    return kind(tiny_gpt(), arguments(folder, **changes), train_dataset=Sentences(uneven), **own)


def trained(kind, folder, uneven=False, resume=None, **changes):
    """The same after its steps."""
    trainer = made(kind, folder, uneven, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def state(trainer):
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "parameters": digest(trainer.model.parameters()),
        "values": torch.cat([parameter.detach().reshape(-1) for parameter in trainer.model.parameters()]).tolist(),
        "logs": [{name: entry[name] for name in ("loss", "grad_norm", "learning_rate")} for entry in logs],
        "extra": [sorted(name for name in entry if name.startswith("straggle/")) for entry in logs],
        "steps": trainer.state.global_step,
    }


def beside_ddp(rank, folder):
    as_launched(rank)
    from transformers import Trainer

    from straggle.integrations.transformers import StagedTrainer

    runs = {}
    for name, uneven, average in (("even", False, True), ("tokens", True, True), ("ranks", True, False)):
        runs[name] = [
            state(trained(kind, folder, uneven, average_tokens_across_devices=average))
            for kind in (Trainer, StagedTrainer)
        ]
    # an epoch whose last step has fewer micro-batches than the others, with an evaluation and a checkpoint in between
    more = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4, "eval_steps": 2, "save_steps": 2}
    runs["epoch"] = [
        state(trained(kind, f"{folder}/{kind.__name__}", eval_strategy="steps", save_strategy="steps",
                      eval_dataset=Sentences(False), **more))
        for kind in (Trainer, StagedTrainer)
    ]  # fmt: skip
    return runs


def test_trains_as_under_ddp(tmp_path, run_loaded):
    for rank, runs in enumerate(run_loaded(beside_ddp, NUM_RANKS, str(tmp_path), timeout_s=240)):
        for name, (ddp, staged) in runs.items():
            assert ddp["steps"] == staged["steps"] > 0
            if name != "tokens":  # weights that are not alike are summed in another order
                assert staged["parameters"] == ddp["parameters"], (rank, name)
            assert staged["values"] == pytest.approx(ddp["values"], abs=1e-4), (rank, name)
            assert len(staged["logs"]) == len(ddp["logs"]) > 0
            for own, theirs in zip(staged["logs"], ddp["logs"], strict=True):
                assert own == pytest.approx(theirs, rel=1e-4), (rank, name)
            assert all("straggle/late_ranks" in names for names in staged["extra"])


def resumed_in_an_epoch(kind, folder):
    """After its first step, for three epochs of three steps, the last of which has fewer micro-batches."""
    words = {"gradient_accumulation_steps": 4, "max_steps": -1, "save_strategy": "steps", "save_steps": 1}
    trained(kind, folder, num_train_epochs=1, **words)
    return state(trained(kind, folder, resume=f"{folder}/checkpoint-1", num_train_epochs=3, **words))


def resumed(rank, folder):
    as_launched(rank)
    from transformers import Trainer

    from straggle.integrations.transformers import StagedTrainer

    words = {"save_strategy": "steps", "save_steps": 2, "deadline": 100.0}
    straight = trained(StagedTrainer, folder, **words)
    files = sorted(path.name for path in Path(folder, "checkpoint-2").iterdir() if path.name.startswith("straggle"))
    again = trained(StagedTrainer, folder, resume=f"{folder}/checkpoint-2", **words)
    ones = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 8}
    masked = trained(StagedTrainer, folder, uneven="masked", **ones)
    in_an_epoch = [resumed_in_an_epoch(kind, f"{folder}/{kind.__name__}") for kind in (Trainer, StagedTrainer)]
    return state(straight), state(again), files, state(masked), in_an_epoch


def test_resumes_as_if_it_never_stopped(tmp_path, run_loaded):
    ranks = run_loaded(resumed, NUM_RANKS, str(tmp_path), timeout_s=240)
    for straight, again, files, masked, (ddp, staged) in ranks:
        assert staged["parameters"] == ddp["parameters"]
        assert staged["steps"] == ddp["steps"] == 9
        assert again["parameters"] == straight["parameters"]
        assert again["logs"][-1] == pytest.approx(straight["logs"][-1])
        assert files == [f"straggle_{rank}.pt" for rank in range(NUM_RANKS)]
        # a rank that has no label in a step takes part with nothing
        assert torch.tensor(masked["values"]).isfinite().all()
        assert masked["parameters"] == ranks[0][3]["parameters"]


def with_a_late_rank(rank, folder):
    """The last rank is stopped in the first micro-batch of a step, and in the backward pass of a second one."""
    as_launched(rank, FOUR)
    from straggle.integrations.transformers import StagedTrainer

    class Stops(StagedTrainer):
        num_calls = 0

        def compute_loss(self, model, *positional, **words):
            self.num_calls += 1
            if rank == FOUR - 1 and self.num_calls == 3:
                model.open_step.stop()  # its forward pass is the first thing that is not done
            loss = super().compute_loss(model, *positional, **words)
            if rank == FOUR - 1 and self.num_calls == 6:
                model.open_step.stop()
            return loss

    seen = []

    class Watches(__import__("transformers").TrainerCallback):
        def on_optimizer_step(self, *_, model, **__):
            gradients = [parameter.grad for parameter in model.parameters()]
            seen.append(digest(gradients))

    trainer = trained(Stops, folder, deadline=100.0, callbacks=[Watches()])
    assert isinstance(trainer.model, nn.Module)
    report = [entry for entry in trainer.state.log_history if "loss" in entry]
    return state(trainer), seen, [(entry["straggle/late_ranks"], entry["straggle/dropped"]) for entry in report]


def test_a_late_rank_ends_its_micro_batches_and_all_apply_the_same(tmp_path, run_loaded):
    ranks = run_loaded(with_a_late_rank, FOUR, str(tmp_path), timeout_s=240)
    first, gradients, logged = ranks[0]
    for own, seen, _ in ranks[1:]:
        assert own["parameters"] == first["parameters"]
        assert seen == gradients
        assert own["logs"] == first["logs"]
    assert first["steps"] == 4
    assert [late for late, _ in logged] == [0.5, 0.5]
    assert all(0 < dropped < 1 / FOUR for _, dropped in logged)


def programs():
    """What leaves an epoch or an accumulation in the middle; each is given a trainer's class and its words."""
    import transformers

    class At(transformers.TrainerCallback):
        """Does something after some micro-batches; ``trainer`` is set later."""

        def __init__(self, does, *numbers):
            self.does, self.numbers, self.seen, self.trainer = does, numbers, 0, None

        def on_substep_end(self, _arguments, _state, control, **_):
            self.seen += 1
            if self.seen in self.numbers:
                self.does(self, control)

        on_step_end = on_substep_end

    def stop_epoch(_, control):
        control.should_epoch_stop = True

    def stop(_, control):
        control.should_training_stop = True

    def evaluate(at, _):
        at.trainer.evaluate()

    def epoch_stopped(kind, words):
        """In the middle of a step, which the next epoch goes on with; evaluated and saved between."""
        words = {**words, "eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 3}
        return trained(kind, callbacks=[At(stop_epoch, 2, 8)], eval_dataset=Sentences(False), **words)

    def stopped(kind, words):
        """In the middle of a step; then it trains again."""
        trainer = trained(kind, callbacks=[stops := At(stop, 6)], **words)
        trainer.evaluate(Sentences(False))
        trainer.remove_callback(stops)
        trainer.train()
        return trainer

    def evaluated(kind, words):
        """By a callback, in the middle of a step."""
        words = {**words, "eval_dataset": Sentences(False)}
        trainer = made(kind, callbacks=[at := At(evaluate, 2, 5)], **words)
        at.trainer = trainer
        trainer.train()
        return trainer

    def early(kind, words):
        words = {**words, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        words |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        stopping = transformers.EarlyStoppingCallback(1, early_stopping_threshold=10.0)
        return trained(kind, callbacks=[stopping], eval_dataset=Sentences(False), **words)

    return epoch_stopped, stopped, evaluated, early


def in_the_middle(rank, folder):
    """Ends of each under DDP and under straggle, and where the last rank is late in some micro-batches."""
    as_launched(rank)
    from transformers import Trainer

    from straggle.integrations.transformers import StagedTrainer

    class Stops(StagedTrainer):
        num_calls = 0

        def compute_loss(self, model, *positional, **words):
            self.num_calls += model.training
            if rank and model.training and self.num_calls in (2, 7):
                model.open_step.stop()
            return super().compute_loss(model, *positional, **words)

    class Unwraps(StagedTrainer):
        def compute_loss(self, model, *positional, **words):
            return super().compute_loss(self.accelerator.unwrap_model(model), *positional, **words)

    ends = {}
    for program in programs():
        ends[program.__name__] = []
        for kind in (Trainer, StagedTrainer, Stops, *([Unwraps] if len(ends) == 1 else [])):
            words = {"folder": f"{folder}/{program.__name__}{kind.__name__}", "gradient_accumulation_steps": 4}
            words |= {"max_steps": -1, "num_train_epochs": 2}
            if kind is Stops:
                words["deadline"] = 100.0
            end = state(program(kind, words))
            ends[program.__name__].append((end["parameters"], end["steps"], end["logs"]))
    return ends


def test_what_ddp_does_with_an_epoch_that_is_left_in_the_middle(tmp_path, run_loaded):
    first, second = run_loaded(in_the_middle, NUM_RANKS, str(tmp_path), timeout_s=240)
    assert first == second
    for name, (ddp, staged, late, *unwrapped) in first.items():
        assert all(end[:2] == ddp[:2] for end in (staged, *unwrapped)), name
        assert late[0] != ddp[0], name
        assert late[1] == ddp[1], name
        for own, theirs in zip(staged[2], ddp[2], strict=True):
            assert own == pytest.approx(theirs, rel=1e-4), name
    assert [ends[0][1] for ends in first.values()] == [4, 6, 6, 2]


def one_that_fails(rank, folder):
    as_launched(rank)
    from straggle.integrations.transformers import StagedTrainer

    class Fails(StagedTrainer):
        def compute_loss(self, model, *positional, **words):
            if rank == 1 and self.state.global_step == 1:
                raise ArithmeticError("a bad batch")
            return super().compute_loss(model, *positional, **words)

    trained(Fails, folder)


def test_an_error_on_one_rank_is_told_to_the_others(tmp_path, run_loaded):
    first, second = run_loaded(one_that_fails, NUM_RANKS, str(tmp_path), timeout_s=120, outcomes=True)
    assert isinstance(first, Raised)
    assert first.kind == "PeerFailed"
    assert "a bad batch" in first.message
    assert second.kind == "ArithmeticError"


def refused(rank, folder):
    as_launched(rank)
    import straggle
    from straggle.integrations.transformers import StagedTrainer

    said = []
    for own, changes in (
        ({"members": straggle.Elastic()}, {}),  # with two micro-batches a step
        ({"members": straggle.Elastic()}, {"gradient_accumulation_steps": 1, "metric_for_best_model": "loss"}),
        ({}, {"include_num_input_tokens_seen": "all"}),
        ({}, {"auto_find_batch_size": True}),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            StagedTrainer(tiny_gpt(), arguments(folder, **changes), train_dataset=Sentences(False), **own)
        said.append(str(caught.value))
    return json.dumps(said)


def test_what_would_wait_for_a_stuck_rank_is_refused_with_what_to_do(tmp_path, run_loaded):
    members, best, tokens, size = json.loads(run_loaded(refused, NUM_RANKS, str(tmp_path), timeout_s=120)[0])
    assert "leave it out, and set a larger per_device_train_batch_size" in members
    assert "leave them out, or members=" in best
    assert "leave it out" in tokens
    assert "per_device_train_batch_size" in size


def labels_on_a_device(rank, folder, members):
    """Where the number of labels is that are on a device, which no host can read, and of some on the host."""
    as_launched(rank)
    from straggle import Elastic
    from straggle.integrations import transformers as own

    own.send_to_device = lambda batch, *_, **__: batch
    options = {"members": Elastic()} if members else {}
    changes = {"gradient_accumulation_steps": 1, "average_tokens_across_devices": False}
    trainer = own.StagedTrainer(tiny_gpt(), arguments(folder, **changes), train_dataset=Sentences(False), **options)
    drawn = []
    for place in ("meta", "cpu"):
        batch = {"labels": torch.ones(2, 12, device=place, dtype=torch.int64)}
        drawn.append(trainer.get_batch_samples(iter([batch]), 1, torch.device(place))[1].device.type)
    return drawn


@pytest.mark.parametrize("members", [True, False])
def test_labels_on_a_device_are_counted_there(members, tmp_path, run_loaded):
    assert run_loaded(labels_on_a_device, 2, str(tmp_path), members) == [["meta", "cpu"]] * 2
