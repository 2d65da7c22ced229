"""What a deadline does to a step whose times are known: who is late, how far each rank comes, how long it takes.

`Shadow`, the simulator and the advice all ask this one model of a step. Times are tensors with any number of leading
dimensions (steps, say) before ranks and units.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from straggle.policies.deadline import Deadline, Granularity, LateHandling, grace_after

_MANY = 100  # parts of a stage


@dataclass(frozen=True)
class StopRules:
    """When the work of a step ends: the deadline, who must wait for it, and what becomes of the running unit.

    ``quorum`` ranks must have finished, ``after_quorum_s`` seconds ago. A late rank stops where it is; with
    ``finish_running`` (micro-batches) it first finishes its running unit, for ``grace_s`` seconds at most; with
    ``drop_all`` (steps) nothing of what it has comes in. A rank that has not entered ``grace_s`` seconds after the
    deadline is stood in for.

    ``after_quorum_s`` is a number, or a tensor that is broadcast to (..., 1). ``grace_s`` of ``None`` is a share of the
    deadline (`LateHandling`).

    ``checks``: the number of moments of each unit, evenly over its time (the ends of layers), at which a rank can stop.
    It is stood in for no later than ``grace_s`` seconds after the deadline. With 0 it can stop at any moment, as it
    always can in the unit that has the forward pass.
    """

    quorum: int
    after_quorum_s: float | Tensor = 0.0
    finish_running: bool = False
    grace_s: float | None = 0.0
    drop_all: bool = False
    checks: int = 0

    @staticmethod
    def of(policy: Deadline, late_handling: LateHandling, world_size: int, members: int | None = None) -> StopRules:
        """The rules that ``world_size`` ranks follow under a policy.

        ``members``: how many of them take part; the others are as ranks that have finished when the step begins.
        """
        quorum = late_handling.quorum_of(world_size, policy.quorum)
        if members is not None:
            quorum = late_handling.quorum_among(members, policy.quorum) + world_size - members
        granularity = late_handling.granularity
        return StopRules(
            quorum, policy.grace_s, granularity == "microbatch", late_handling.fixed_grace_s, granularity == "step"
        )


def parts_of(num_stages: int, granularity: Granularity, checks: int) -> list[int]:
    """For `Deadline.prepare`: in how many parts each stage comes, if ranks stop at so many ``checks`` of it.

    Of many it makes no difference how many they are, so as many stand for any moment.
    """
    return [checks or _MANY] * num_stages if granularity == "stage" else []


@dataclass(frozen=True)
class SimulatedStep:
    """``late`` and ``stood_in`` (..., ranks), and a rank can be both; ``reached`` (..., ranks, units).

    ``own_s`` (..., ranks): seconds of each rank's own work, from entering; 0 if it is stood in for. ``end_s``
    (..., ranks), and ``seconds`` (...) of the last rank: from the step's begin to the end of that work, or to standing
    in, without communication.
    """

    late: Tensor
    stood_in: Tensor
    own_s: Tensor
    end_s: Tensor
    reached: Tensor
    seconds: Tensor


def simulate_step(
    unit_s: Tensor,
    deadline_s: float | Tensor,
    rules: StopRules,
    entered_s: Tensor | None = None,
    behind: Tensor | None = None,
) -> SimulatedStep:
    """The step under a deadline of ``deadline_s`` seconds, a number or a tensor of shape (...), which is broadcast.

    ``unit_s``, (..., ranks, units): seconds from entering the step to the end of each unit of a rank's work, if it is
    not stopped. ``entered_s``, (..., ranks): when each rank enters, 0 for all if not given. ``behind``, (..., ranks):
    which ranks were stood in for in the step before, and are again as soon as a quorum waits, unless they enter before.
    Their deadline counts from the step's begin. What such a rank still has to do in the following steps is not in here.
    """
    if entered_s is not None:
        unit_s = unit_s + entered_s.unsqueeze(-1)
    whole_s = unit_s[..., -1]
    quorum_at = whole_s.kthvalue(rules.quorum, dim=-1).values.unsqueeze(-1) + rules.after_quorum_s
    deadline_at = torch.as_tensor(deadline_s, dtype=unit_s.dtype).unsqueeze(-1)
    grace_s = grace_after(deadline_at, rules.grace_s)
    stood_in = torch.zeros_like(whole_s, dtype=torch.bool)
    if entered_s is not None:
        stood_in_at = torch.maximum(deadline_at, quorum_at) + grace_s
        clock_from = entered_s
        if behind is not None:
            stood_in_at = torch.where(behind, quorum_at, stood_in_at)
            clock_from = entered_s.where(~behind, 0.0)
        stood_in = entered_s > stood_in_at  # so it reaches no unit before that
        deadline_at = torch.where(stood_in, stood_in_at, deadline_at + clock_from)
    stop_at = torch.maximum(deadline_at, quorum_at)
    late = whole_s > stop_at
    stop_at = stop_at.expand(late.shape)
    reached = unit_s <= stop_at.unsqueeze(-1)
    if rules.drop_all:
        reached = reached & ~late.unsqueeze(-1)
    end_s = torch.minimum(whole_s, stop_at)
    if rules.finish_running:
        running_s = unit_s.where(~reached, torch.inf).amin(-1)
        in_time = late & ~stood_in & (running_s <= stop_at + grace_s)
        end_s = torch.where(late & ~stood_in, torch.minimum(running_s, stop_at + grace_s), end_s)
        reached = reached | (in_time.unsqueeze(-1) & (unit_s == running_s.unsqueeze(-1)))
        late = late & ~reached[..., -1]  # it was the last one
    elif rules.checks and not rules.drop_all and bool(late.any()):
        end_s[late] = _next_check(
            unit_s.expand(reached.shape)[late], stop_at[late], rules.checks, grace_s.expand(late.shape)[late]
        )
        late, reached = late & (end_s < whole_s), unit_s <= end_s.unsqueeze(-1)
    own_s = end_s if entered_s is None else (end_s - entered_s).clamp(min=0.0)
    return SimulatedStep(late, stood_in, own_s, end_s, reached, end_s.amax(-1))


def _next_check(unit_s: Tensor, stop_at: Tensor, checks: int, grace_s: Tensor) -> Tensor:
    """When ranks (..., units) come to stop after ``stop_at`` (...), for ``grace_s`` (...) seconds at most."""
    running = (unit_s <= stop_at.unsqueeze(-1)).sum(-1, keepdim=True)
    end_s = unit_s.gather(-1, running).squeeze(-1)
    begin_s = unit_s.gather(-1, (running - 1).clamp(min=0)).squeeze(-1)
    between_s = (end_s - begin_s) / checks
    check_s = begin_s + ((stop_at - begin_s) / between_s).ceil() * between_s
    check_s = torch.where(check_s > end_s - between_s / 2, end_s, check_s)  # not a rounding error before it
    in_time = (running.squeeze(-1) > 0) & (check_s <= stop_at + grace_s)
    anywhere_s = torch.where(running.squeeze(-1) > 0, stop_at + grace_s, stop_at)
    return torch.where(in_time, check_s, torch.minimum(anywhere_s, end_s))


def computed_share(unit_s: Tensor, step: SimulatedStep, rules: StopRules, silent: Tensor | None = None) -> Tensor:
    """The share of each unit that comes in, (..., ranks, units): of the one that a late rank leaves, its part.

    ``silent``: see `part_computed`.
    """
    share = step.reached.to(unit_s.dtype)
    if not rules.finish_running and not rules.drop_all and bool(step.late.any()):
        share[step.late] = part_computed(unit_s[step.late], step.own_s[step.late].unsqueeze(-1), silent)
    return share


def by_stage(part: Tensor, unit_share: Tensor, num_stages: int, *, in_stages: bool) -> Tensor:
    """The share of each stage that each rank computed, (ranks, stages), from the ``part`` of each unit that came in.

    ``unit_share``, (ranks, units): each unit's share of the rank's gradient. ``in_stages``: the last units are stages;
    otherwise each unit has all stages alike.
    """
    given = part * unit_share
    if not in_stages:
        return given.sum(1, keepdim=True).expand(-1, num_stages)
    earlier = given[:, :-num_stages].sum(1, keepdim=True)
    return earlier + unit_share[:, -num_stages:].sum(1, keepdim=True) * part[:, -num_stages:]


def part_computed(unit_s: Tensor, stop_s: Tensor, silent: Tensor | None = None) -> Tensor:
    """The part of each unit that a rank has computed when it is stopped after ``stop_s`` seconds.

    ``silent`` (units,) is the share of each unit's time before its first gradient is finished, in a forward pass; if it
    is not given, all of the first unit, and nothing of the others.
    """
    if silent is None:
        silent = torch.zeros(unit_s.shape[-1], dtype=unit_s.dtype)
        silent[0] = 1.0
    begin_s = torch.cat([torch.zeros_like(unit_s[..., :1]), unit_s[..., :-1]], -1)
    first_s = begin_s + silent * (unit_s - begin_s)
    part = ((stop_s - first_s) / (unit_s - first_s).clamp(min=1e-9)).clamp(0, 1).where(unit_s > stop_s, 1.0)
    return part.nan_to_num(0.0)
