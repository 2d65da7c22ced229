"""A merged step comes into the model: gradients into ``p.grad``, other state into its tensors, alike on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from straggle.loop.by_hand import Unreached
from straggle.loop.in_step import InStep
from straggle.loop.uneven import Joins
from straggle.merge.round.buffers import Share
from straggle.merge.round.rank_parts import RankParts
from straggle.merge.round.round import Round
from straggle.merge.state.module_state import ModuleState
from straggle.policies.estimators import FillIn
from straggle.source.source import GradientSource


class Placing:
    """Of one wrapped model; on its training thread, at the end of a step, and while its buckets travel.

    ``fills``: what no rank has computed is zeros until an optimizer looks at it (`Unreached`).
    """

    def __init__(
        self, source: GradientSource, *, state: ModuleState, fill_in: FillIn, rank: RankParts, fills: bool
    ) -> None:
        self._source, self._slots = source, source.slots
        self._state, self._fill_in = state, fill_in
        self._rank, self._vote = rank, rank.replica.vote
        self._loops = Joins()
        self.unreached, self._fills = Unreached(), fills

    def follow_loops(self, loops: Joins) -> None:
        """These are the loops over `StagedDataParallel.join`, of which the ranks of a replica tell each other."""
        self._loops = loops

    def step_early(self, now: InStep, current: Round) -> None:
        """Step the parameters of buckets that are merged while others travel.

        Not if their gradients are to be added to kept ones or observed in the order of the parameters, and not those
        of a bucket in which no rank has anything for one: what becomes of that is known at the end. One that no rank's
        graph has used is not stepped here, nor is said to have been: other ranks of the replica look at the end.
        """
        if not now.kept.decided or now.kept.gradients or self._fill_in.reads_merged or self._source.copied:
            return
        early = now.early
        assert early is not None
        part: dict[int, Tensor] = {}
        for bucket in current.merged_early()[early.num_buckets :]:
            early.looked_at()
            shares = current.buffers.normalize_bucket(bucket)
            if all(share.weight > 0 for share in shares.values()):
                part |= {index: current.buffers.views[index] for index, share in shares.items() if share.present}
        if part:
            early.step({*part}, self._source.of_parameters(part))

    def put_in_place(self, now: InStep, merged: Round) -> None:
        """Give every parameter its merged gradient, and every buffer its merged value: the same on every rank."""
        kept, views = now.kept.gradients, merged.buffers.views
        if merged.buffers.is_queued:
            # before the first kernel that reads the buffers, in the order of this thread's queue
            merged.come_after(self._rank.channel, self._rank.where(merged.step))
        self.apply_state(merged)
        if not merged.table.is_usual and merged.table.nothing_to_apply():
            own = [view.copy_(kept[index]) if index in kept else None for index, view in enumerate(views)]
            self._hand_out(now, merged, own)
            self._fill(now, merged, range(len(views)))
            return
        shares = merged.buffers.normalize()
        plain = not (kept or now.stepped_early or self._fill_in.reads_merged)
        if plain and shares[0].weight > 0 and shares[0].present and shares.count(shares[0]) == len(shares):
            self._hand_out(now, merged, views)
        else:
            self._hand_out(now, merged, self._merged_gradients(now, views, shares))
            self._fill(now, merged, [index for index, share in enumerate(shares) if share.weight == 0])

    def apply_state(self, merged: Round) -> None:
        """Give every buffer its merged value."""
        if self._state.held:
            # a rank that was out has given nothing to the means
            took_part = self._rank.replica.place not in merged.table.absent_ranks()
            self._state.apply(merged.buffers.state, merged, took_part=took_part)

    def _fill(self, now: InStep, merged: Round, unreached: Iterable[int]) -> None:
        """Put zeros in the place of these gradients, but for frozen parameters, and if the optimizer steps later."""
        if not self._fills or now.early is not None:
            return
        needed = [index for index in unreached if self._slots[index].parameter.requires_grad]
        memory = {index: merged.buffers.views[index] for index in needed}
        for (parameter, gradient), own in zip(self._source.of_parameters(memory), memory.values(), strict=True):
            self.unreached.fill(parameter, gradient, own)

    def _hand_out(self, now: InStep, merged: Round, gradients: Sequence[Tensor | None]) -> None:
        """Place them. Where another rank of the replica has a gradient, so has this one: no shard skips its step."""
        if self._vote is not None:
            early = now.stepped_early
            own = [gradient is not None or index in early for index, gradient in enumerate(gradients)]
            copied = self._source.copied
            weights = [merged.buffers.weight_of(index) for index in copied]
            # all ranks of the replica call it in each step, or none does: it is a collective
            tells = self._loops.tell(merged, self._rank.training.joins_over)
            agreed = self._vote.agree(own, merged.table.column("inside_wait_s"), weights, merged.table.scalars(), tells)
            self._loops.told(agreed.told)
            merged.correct(replace(merged.record, slowest_ranks=agreed.slowest, scalars=agreed.scalars))
            found = zip(agreed.present, own, merged.buffers.views, gradients, strict=True)
            gradients = [view.zero_() if any_has and not has else gradient for any_has, has, view, gradient in found]
            if copied and not agreed.alike:
                there = [(gradients[i], weight) for i, weight in zip(copied, weights, strict=True) if agreed.present[i]]
                if there:
                    self._vote.average(*zip(*there, strict=True))
        self._source.place(gradients)

    def _merged_gradients(self, now: InStep, views: Sequence[Tensor], shares: Sequence[Share]) -> list[Tensor | None]:
        """For each slot its gradient; none of what no rank has, and of what is stepped already."""
        kept, fill_in, gradients = now.kept.gradients, self._fill_in, list[Tensor | None]()
        early = now.stepped_early
        for index, (slot, view, share) in enumerate(zip(self._slots, views, shares, strict=True)):
            gradient: Tensor | None = None
            if index in early:
                gradients.append(None)
                continue
            if share.weight > 0:
                gradient = view if share.present else None
                if fill_in.reads_merged and share.present:
                    fill_in.merged(slot.parameter, view)
            elif slot.parameter.requires_grad and (substitute := fill_in.substitute(slot.parameter)) is not None:
                gradient = view.copy_(substitute)  # no rank has anything
            if index in kept:
                # in the buffer in any case: by that the next step knows it from what a loop has put there
                gradient = view.copy_(kept[index]) if gradient is None else gradient.add_(kept[index])
            gradients.append(gradient)
        return gradients
