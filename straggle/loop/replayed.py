"""A run that is repeated: what this rank decided in each step, and what its coming back needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from straggle.loop.model_parts import Options
from straggle.merge.channel import Channel
from straggle.merge.coordinator import Coordinator
from straggle.merge.members.healing import Healing
from straggle.merge.members.recorded_groups import RecordedGroups
from straggle.merge.replay import Decision, Healed, RecordedMembers, Recording, no_leaves


class Replayed:
    """The recording that a model repeats, if it does; on the training thread.

    ``learned``: what the stages were planned from then; ``None``: that is not recorded.
    """

    def __init__(self, coordinator: Coordinator, channel: Channel, options: Options, module: nn.Module) -> None:
        self._coordinator, self._channel, self._options = coordinator, channel, options
        self._module = module
        self._decisions: Iterator[Decision] | None = None
        self.learned: tuple[list[int], list[float]] | None = None
        self._healed: Mapping[int, Healed] = {}
        self._givers: Mapping[int, Mapping[int, int]] = {}

    @property
    def is_on(self) -> bool:
        """Whether this run repeats another."""
        return self._decisions is not None

    def follow(self, recording: Recording, *, on_cuda: bool) -> None:
        """Decide as in this one, on all ranks alike. Raises ``ValueError`` for one that cannot be replayed so."""
        if (leaf := next((own for own in recording.decisions if own.leaves), None)) is not None:
            raise ValueError(no_leaves(leaf))
        self._decisions = iter(recording.decisions)
        self.learned = (list(recording.order), list(recording.seconds)) if recording.order else None
        self._coordinator.deadline.wait_for_all()
        if recording.members is not None:
            self._follow_members(recording.members, on_cuda=on_cuda)

    def _follow_members(self, members: RecordedMembers, *, on_cuda: bool) -> None:
        # all ranks refuse together: making the groups needs all of them
        why_not = _why_not(self._options, on_cuda=on_cuda)
        if whys := sorted(filter(None, set(self._channel.gather(why_not)))):
            raise ValueError(f"a run whose members came and went cannot be replayed so: {'; '.join(whys)}")
        self._healed, self._givers = members.healed, members.givers
        groups = RecordedGroups(members, rank=self._channel.rank, world_size=self._channel.world_size)
        self._coordinator.member.replay(groups)

    def decision(self) -> Decision | None:
        """The recorded decision of the step that is entered now."""
        if self._decisions is None:
            return None
        return next(self._decisions, Decision(self._coordinator.training.step, sys.maxsize, None, False))

    def begin_as_then(self, step: int) -> None:
        """Where the recorded rank had just taken the state of a peer before ``step``, go on as it did."""
        for rank, giver in sorted(self._givers.get(step, {}).items()):
            self._give_buffers(rank, giver)
        if (healed := self._healed.get(step)) is None:
            return
        torch.set_rng_state(healed.random)
        if healed.started:
            self._coordinator.begin_anew()
            self._options.estimator.forget_own()

    def _give_buffers(self, rank: int, giver: int) -> None:
        """The parameters are the same on all ranks; buffers that are not merged are each rank's own."""
        parameters = dict(self._module.named_parameters())
        for name, value in self._module.state_dict().items():
            if name not in parameters and isinstance(value, Tensor):
                given = value.detach().clone()
                self._channel.broadcast(given, giver, f"buffer {name}")
                if self._channel.rank == rank:
                    value.copy_(given)


class HealedRecorder:
    """Tells the recorder, if there is one, which steps this rank enters with the state of a peer."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._num_healed = 0  # states that were taken before the step that is entered now

    def enters(self, healing: Healing, step: int, *, started: bool) -> None:
        """The training thread enters ``step``; ``started``: it is the first one of its process."""
        num_healed, recorder = healing.report.num_states, self._coordinator.member.recorder
        if num_healed > self._num_healed and recorder is not None:
            recorder.healed(step, started=started, giver=healing.giver)
        self._num_healed = num_healed


def _why_not(options: Options, *, on_cuda: bool) -> str:
    """Why this rank cannot replay a run whose members came and went; empty: it can."""
    if options.members is not None:
        return "wrap the model without members; in a replay no rank leaves"
    if options.own_group:
        return "leave process_group out; members are ranks of the job"
    if on_cuda:
        return "the random state of a device is not recorded; replay on the CPU"
    return ""
