"""torchtitan's own trainer and its Llama debug model on four CPU ranks: two replicas of two FSDP shards.

pip install torchtitan==0.3.0 triton      # Python 3.11 or later; torchtitan imports triton on CPUs, too
straggle launch --nproc-per-node 4 --replica-size 2 examples/torchtitan/train.py --slow 1 --kill 3
torchrun --nproc-per-node 4 examples/torchtitan/train.py --plain --slow 1  # torchtitan's replicas, which wait

--slow RANK: each of its layers sleeps for --slow-s; --kill RANK: SIGKILL once, in step --kill-at.
"""

import argparse
import math
import os
import signal
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import cpu  # before any other part of torchtitan
import torch
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

import straggle


class StraggledTrainer(Trainer):
    """Each replica is a torchtitan of its own, whose gradients are merged with those of the other replicas."""

    def init_distributed(self):
        self.place = straggle.init_replica()  # in place of torchtitan's own, over all ranks
        self.config.dataloader.replica, self.config.dataloader.num_replicas = (
            self.place.replica,
            self.place.num_replicas,
        )
        self.config.checkpoint.load_only = self.place.replica > 0  # one replica saves for all
        self.config.checkpoint.exclude_from_loading = ["dataloader"]  # see `batch_generator`
        return ParallelDims.from_config(self.config.parallelism, torch.distributed.get_world_size())

    def train(self):
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        self.checkpointer.load = lambda **_: False  # a replica that comes back gets a newer state below
        model = self.model_parts[0]
        self.straggled = straggle.StagedDataParallel(
            model, deadline=straggle.QuantileDeadline(0.25), members=straggle.Elastic(min_ranks=1)
        )
        for unit in model.modules():
            if isinstance(unit, FSDPModule):  # the mean over all ranks: `train_step` gives each rank's own mean
                unit.set_gradient_divide_factor(self.place.num_replicas * torch.distributed.get_world_size())
        states = {"trainer": self, "optimizers": self.optimizers, "lr_schedulers": self.lr_schedulers}
        if self.straggled.register_state(**states):
            self.step -= 1  # another replica's state, as it was in a step that it had begun to count
        super().train()
        self.straggled.close()

    def batch_generator(self, data_iterable):
        batches = super().batch_generator(data_iterable)
        for _ in range(self.step * self.gradient_accumulation_steps):  # trained on before, or missed
            next(batches)
        return batches

    def train_step(self, data_iterator):
        self.optimizers.zero_grad()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        num_tokens = sum((labels != IGNORE_INDEX).sum() for _, labels in batches)
        with self.straggled.step(num_microbatches=len(batches)) as step:
            step.weight = float(num_tokens)  # so nobody waits for a sum over all ranks: each loss is of own tokens
            losses = [
                self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=num_tokens)
                for inputs, labels in batches
            ]
            step.log(loss=sum(losses).detach())
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        grad_norm = dist_utils.clip_grad_norm_(parameters, self.config.training.max_norm, foreach=True)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        report = self.straggled.last_report
        loss = report.scalars.get("loss", math.nan)  # the mean over the ranks that came so far
        if report.late_ranks:
            logger.info(f"step {self.step}: replicas {report.late_ranks} were late, {report.dropped_share:.1%} dropped")
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(self.step, loss, loss, float(grad_norm), self.lr_schedulers.get_metrics())


class Text(HuggingFaceTextDataLoader):
    """torchtitan's text, of which each rank of each replica has a part."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        replica: int = 0
        num_replicas: int = 1

    def __init__(self, config, *, dp_world_size, dp_rank, **rest):
        dp_rank, dp_world_size = config.replica * dp_world_size + dp_rank, config.num_replicas * dp_world_size
        super().__init__(config, dp_world_size=dp_world_size, dp_rank=dp_rank, **rest)


class Bytes(BaseTokenizer):
    """A token is a byte: torchtitan's wheel has no tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):  # noqa: ARG002
        super().__init__()

    def encode(self, text, **_):
        return [*text.encode()]

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self):
        return 256


def sources(path):
    """Python's own sources: torchtitan's wheel has no text."""
    return Dataset.from_list([{"text": file.read_text(errors="ignore")} for file in sorted(Path(path).glob("*.py"))])


DATASETS["sources"] = DatasetConfig(
    path=sysconfig.get_paths()["stdlib"], loader=sources, sample_processor=lambda sample: sample["text"]
)


def config_of(given):
    """torchtitan's debug model, as small as two cores need it."""
    config = cpu.on_cpu(llama3_debugmodel())
    config.tokenizer, config.dataloader = Bytes.Config(), Text.Config(dataset="sources")
    config.training.steps, config.training.local_batch_size, config.training.seq_len = given.steps, 1, 64
    config.parallelism.data_parallel_replicate_degree = 2 if given.plain else 1
    config.debug.seed = 0  # otherwise all ranks take rank 0's
    config.dump_folder, config.checkpoint.enable = given.out, given.checkpoint > 0
    config.checkpoint.interval = given.checkpoint or 1
    config.debug.enable_structured_logging = False
    return config


def add_faults(trainer, given):
    """One rank is slow, one dies: the same for both kinds of trainer."""
    rank, is_first_start = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def sleep(*_):
        time.sleep(given.slow_s)

    def die(*_):
        if trainer.step == given.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == given.slow:
        for layer in trainer.model_parts[0].layers.values():
            layer.register_forward_pre_hook(sleep)
    if rank == given.kill and is_first_start:
        trainer.model_parts[0].layers["3"].register_forward_pre_hook(die)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--slow-s", type=float, default=0.1)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=20)
    parser.add_argument("--checkpoint", type=int, default=0, help="every so many steps")
    parser.add_argument("--out", default="runs/torchtitan")
    given = parser.parse_args()
    init_logger()
    trainer = (Trainer if given.plain else StraggledTrainer)(config_of(given))
    add_faults(trainer, given)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
