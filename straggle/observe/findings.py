"""What the numbers of a run mean, in sentences: each rule has what it found and, if known, what may help.

A rule without a finding gives no sentence. All numbers in the sentences are the run's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from straggle.links.network_event import TIMES
from straggle.observe.numbers.link_spells import long_merges
from straggle.observe.numbers.registry import seconds_shown
from straggle.observe.numbers.run import Run
from straggle.observe.numbers.run_numbers import RankInRun, RunNumbers, has_data_of
from straggle.observe.stuck import stuck_sentences

ALWAYS = 0.5  # a rank that is late in at least this share of its steps is persistently slow
SOMETIMES = 0.01  # below this share it is not worth a sentence
SLOWER = 1.5  # a rank's median compute time over the others' that is worth a sentence
BIAS = 0.1  # difference between the stages' shares that is
LITTLE = 0.02  # seconds saved, or gradients dropped, as a share, below which it is little
_LESS_TO_DO = "Give it less to do (straggle.DealtLoader, rebalance=by_speed), look"
_KEEP_MORE = (
    " A longer deadline would keep more of them: a larger slack or quantile, or more of least_gain for AutoDeadline; "
    "DropBudget puts a bound on it."
)
IN_A_ROW = 3  # steps that a rank was stood in for
WAITING = 0.2  # share of a step that ranks stand idle, above which that is worth a sentence
PLACES = {
    "outside": "between backward and the optimizer's step, or in an evaluation",
    "optimizer": "in the optimizer",
    "loop_end": "at the loop's end, after the optimizer's step (logging, saving)",
    "collective": "in a collective of the loop's own",
    "data": "while it loaded data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "error": "after an error in the backward pass that the loop caught",
    "skipped": "without a backward pass",
    "members": "as the members changed",
}


def advise(run: Run, numbers: RunNumbers) -> list[str]:
    """Plain sentences about the run, the most important first."""
    return [
        *stuck_sentences(run.stuck),
        *_replicas(run),
        *_different(run),
        *_without_store(run),
        *_not_written(run),
        *_bad_numbers(run, numbers),
        *_network(run),
        *_saved_little(numbers),
        *drawn(run, numbers),
        *_always_slow(run, numbers),
        *_sometimes(run, numbers),
        *_stood_in(run, numbers),
        *_depth(run, numbers),
        *(_dealt_unequally(run) if not numbers.pool_parts else ()),
        *_no_rank_late(run, numbers),
        *_waiting(run, numbers),
        *_out_of_data(run),
        *_absent(run, numbers),
    ]


def headline(run: Run, numbers: RunNumbers) -> str:
    """The run in a sentence: who was slow, what was dropped for not waiting, and what that brought."""
    if run.num_ranks == 1:
        return f"One {run.replicas.row}: there was nobody to wait for."
    who = "; ".join([_who_was_slow(run, numbers), *_away(run, numbers), *_left_out(run, numbers)])
    if not numbers.with_deadline:
        waited = f" {numbers.wait_share:.0%} of the time was waiting." if numbers.wait_share >= LITTLE else ""
        return f"{_begin(who)}, and all {run.replicas.rows} were waited for.{waited}"
    dropped = f"{numbers.dropped_share:.1%} of" if numbers.dropped_share > 0 else "none of"
    took = f", and took {numbers.own.mean_s / numbers.ddp.mean_s:.2f} of DDP's time" if numbers.ddp.mean_s > 0 else ""
    return f"{_begin(who)}; straggle dropped {dropped} the gradients{took}."


def _who_was_slow(run: Run, numbers: RunNumbers) -> str:
    of = run.replicas
    slow = [rank.rank for rank in numbers.ranks if rank.late_share >= ALWAYS or rank.slowness >= SLOWER]
    if 0 < len(slow) < len(numbers.ranks):
        return f"{_named(run, slow)} {'was' if len(slow) == 1 else 'were'} slow"
    if some := _late_ranks(numbers, SOMETIMES, 1.01):
        if some[0].late > numbers.late / 2:
            return f"{of.who(some[0].rank)} was late in {some[0].late_share:.0%} of its steps"
        often = "at times" if some[0].late_share < ALWAYS else "often"
        return f"{_named(run, [rank.rank for rank in some])} were late {often}"
    return f"hardly a {of.row} was late" if numbers.late else f"no {of.row} was slow"


def _away(run: Run, numbers: RunNumbers) -> Iterator[str]:
    away = [rank for rank in numbers.ranks if rank.absent]
    if len(away) == 1:
        yield f"{run.replicas.who(away[0].rank)} was away for {_steps(away[0].absent, run.num_steps)}"
    elif away:
        yield f"{_named(run, [rank.rank for rank in away])} were away for a time"


def _left_out(run: Run, numbers: RunNumbers) -> Iterator[str]:
    bad = [rank.rank for rank in numbers.ranks if rank.nonfinite_steps]
    if bad:
        yield f"gradients of {_named(run, bad)} were not finite and left out"


def _named(run: Run, ranks: list[int]) -> str:
    """As in "ranks 1 and 2", or "12 ranks"."""
    return run.replicas.all_of(ranks) if len(ranks) <= 4 else f"{len(ranks)} {run.replicas.rows}"


def facts(run: Run, numbers: RunNumbers) -> list[str]:
    """What happened in the run, beside who was slow in it and what to do about that."""
    return [
        *stuck_sentences(run.stuck),
        *_replicas(run),
        *_different(run),
        *_without_store(run),
        *_not_written(run),
        *_bad_numbers(run, numbers),
        *_network(run),
        *_saved(run, numbers),
        *_saved_little(numbers, advises=False),
        *drawn(run, numbers),
        *_out_of_data(run),
        *_absent(run, numbers),
    ]


def _replicas(run: Run) -> Iterator[str]:
    hashes = run.summary.get("parameters_sha256", [])
    if len(set(hashes)) > 1:
        yield "The ranks ended with different parameters. That must not happen: the run is not to be trusted."


def _different(run: Run) -> Iterator[str]:
    if not run.different:
        return
    ranks = sorted({rank for _, ranks, _ in run.different for rank in ranks})
    names = list(dict.fromkeys(name for _, _, names in run.different for name in names))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = f" ({', '.join(names[:3])}{more})" if names else ""
    yield (
        f"{_begin(_named(run, ranks))} had other parameters or buffers than most{what}, seen in "
        f"{len(run.different)} of {run.num_steps} steps, first in step {run.different[0][0]}. That must not happen: "
        "the run is not to be trusted from there on."
    )


def _without_store(run: Run) -> Iterator[str]:
    for rank, steps in sorted(run.without_store.items(), key=lambda own: -own[1])[:3]:
        yield (
            f"The job's store did not answer {run.replicas.who(rank)} in {_steps(steps, run.num_steps)}: no deadline "
            "held for it there."
        )


def _not_written(run: Run) -> Iterator[str]:
    steps = run.step.astype(int)
    # a step's attempts have numbers of their own, and its last one is in the trace
    attempts = zip(steps.tolist(), run.pool_attempts.astype(int).tolist(), strict=True)
    there = {step - before for step, all_of in attempts for before in range(max(1, all_of))}
    if lacking := sorted(set(range(int(steps[0]), int(steps[-1]))) - there):
        yield (
            f"The trace lacks {_steps(len(lacking), len(steps) + len(lacking))}, the first of them step {lacking[0]}: "
            "they could not be written, as on a full disk. What follows is about the others."
        )


def _bad_numbers(run: Run, numbers: RunNumbers) -> Iterator[str]:
    of = run.replicas
    if run.bad_loss.any():
        steps = f"{int(run.bad_loss.sum())} of {run.num_steps} steps"
        yield f"The loss was not finite in {steps}, first in step {run.step[run.bad_loss.argmax()]:.0f}."
    for rank in numbers.ranks:
        if rank.nonfinite_steps:
            yield (
                f"{_begin(of.who(rank.rank))} had gradients that were not finite in "
                f"{_steps(rank.nonfinite_steps, rank.steps)}. "
                f"Look at its data and its hardware, and at the learning rate if other {of.rows} have them too."
            )
    if numbers.skipped:
        steps = f"{numbers.skipped} of {run.num_steps} steps"
        yield f"In {steps} no {of.row} had finite gradients, and nothing was applied."


def _saved(run: Run, numbers: RunNumbers) -> Iterator[str]:
    if numbers.saved_share >= LITTLE:
        own, ddp = seconds_shown(numbers.own.mean_s), seconds_shown(numbers.ddp.mean_s)
        paid = f"for which {_dropped(numbers)}" if numbers.late else "and no gradient was dropped"
        yield (
            f"A step took {own} on average; DDP, with an equal share for each {run.replicas.row}, would have taken "
            f"about {ddp}. That is {numbers.saved_share:.0%} less time, {paid}."
        )


def _saved_little(numbers: RunNumbers, *, advises: bool = True) -> Iterator[str]:
    if numbers.saved_share < LITTLE and numbers.dropped_share >= LITTLE:
        own, ddp = seconds_shown(numbers.own.mean_s), seconds_shown(numbers.ddp.mean_s)
        yield (
            f"Not waiting saved little ({own} for a mean step, about {ddp} under DDP), but {_dropped(numbers)}."
            + (_KEEP_MORE if advises else "")
        )


def _dropped(numbers: RunNumbers) -> str:
    return f"{numbers.dropped_share:.1%} of the gradients were dropped"


def drawn(run: Run, numbers: RunNumbers) -> Iterator[str]:
    """Who drew how many micro-batches, and what became of those that were not computed."""
    if not numbers.pool_parts:
        return
    ranks = sorted((rank for rank in numbers.ranks if not math.isnan(rank.drawn)), key=lambda rank: rank.drawn)
    least, most, of = ranks[0], ranks[-1], run.replicas
    missing = f"{numbers.not_computed:,} of {numbers.pool_parts:,} micro-batches were not computed"
    lost = f"{missing}." if numbers.not_computed else "No micro-batch was left out."
    if least.drawn <= (1 - BIAS) * most.drawn:
        yield (
            f"The {of.rows} drew the micro-batches of a step: {of.who(least.rank)} computed {least.drawn:.1f} of them "
            f"on average and {of.who(most.rank)} {most.drawn:.1f}, because {of.row} {least.rank} had less time for "
            f"them. {lost}"
        )
    else:
        yield (
            f"The {of.rows} drew the micro-batches of a step, and each computed {least.drawn:.1f} to {most.drawn:.1f} "
            f"of them on average. {lost}"
        )
    for rank in sorted(ranks, key=lambda rank: -rank.put_back)[:3]:
        if rank.put_back:
            yield (
                f"{_begin(of.who(rank.rank))} was stuck with micro-batches that it had drawn, and gave "
                f"{rank.put_back:,} of them back: the others drew these."
            )


def _always_slow(run: Run, numbers: RunNumbers) -> Iterator[str]:
    slow = _late_ranks(numbers, ALWAYS, 1.01)
    less = "It has less to do already: look" if run.config.get("rebalance") else _LESS_TO_DO
    less = "Look" if run.replicas.slowest else less
    for rank in slow[:3]:
        yield (
            f"{_begin(run.replicas.who(rank.rank))} was late in {_steps(rank.late, rank.steps)}{_doing(rank)}: it is "
            f"persistently slow, not just sometimes. {rank.reach:.0%} of its gradients came in"
            f"{_last_stage(run, rank.rank)}. Its data count that much less than the others'. {less} at its machine, or "
            "choose an estimator that fills in for it, such as LastOwn."
        )
    if len(slow) > 3:
        yield f"{len(slow) - 3} more {run.replicas.rows} were late in at least half of their steps: {_list(slow[3:])}."


def _dealt_unequally(run: Run) -> Iterator[str]:
    if not run.config.get("rebalance"):
        return
    # the last step for which all ranks that were there had data: a row of another has no weight of its own
    has_data, absent = has_data_of(run), run.ranks["absent"] == 1
    whole = np.flatnonzero((has_data | absent | np.isnan(run.ranks["absent"])).all(axis=1) & has_data.any(axis=1))
    if not whole.size:
        return
    last = np.where(has_data, run.ranks["weight"], np.nan)[whole[-1]]
    share = last / np.nanmean(last)
    for rank in np.flatnonzero(share <= 1 - BIAS)[:3]:
        yield (
            f"{_begin(run.replicas.who(rank))} had {share[rank]:.0%} of the mean {run.replicas.row}'s samples in step "
            f"{run.step[whole[-1]]:.0f}, because it is slower. All samples count alike: step.weight is their number."
        )


def _sometimes(run: Run, numbers: RunNumbers) -> Iterator[str]:
    some = _late_ranks(numbers, SOMETIMES, ALWAYS)
    if not some:
        return
    most = _begin(run.replicas.who(some[0].rank))
    often = f"in {_steps(some[0].late, some[0].steps)}{_doing(some[0])}."
    if len(some) == 1:
        yield f"{most} was sometimes late: {often}"
    else:
        share = sum(rank.late for rank in some) / sum(rank.steps for rank in some)
        yield (
            f"{len(some)} {run.replicas.rows} were sometimes late, in {share:.1%} of their steps together. {most} was "
            f"most often: {often}"
        )


def _stood_in(run: Run, numbers: RunNumbers) -> Iterator[str]:
    for rank in sorted(numbers.ranks, key=lambda rank: -rank.stood_in)[:3]:
        row = _longest_row(run.ranks["stood_in"][:, rank.rank] == 1)
        if row >= IN_A_ROW:
            yield (
                f"{_begin(run.replicas.who(rank.rank))} was stuck where it could not stop by itself and was stood in "
                f"for, up to {row} steps in a row. Nothing from these steps counts unless it was finished before."
            )


def _depth(run: Run, numbers: RunNumbers) -> Iterator[str]:
    known = [share for share in numbers.stage_share if not math.isnan(share)]
    if len(known) > 1 and known[0] - known[-1] >= BIAS:
        micro = run.config.get("num_microbatches")
        advice = "Several micro-batches in a step would spread it: those that are finished reach all stages."
        yield (
            f"Stages near the input get less: {known[0]:.0%} of what the {run.replicas.rows} had to give came in for "
            f"the first stage of the backward pass, {known[-1]:.0%} for the last, because a late {run.replicas.row} "
            "stops before it comes there. " + (advice if micro == 1 else "")
        ).rstrip()


def _no_rank_late(run: Run, numbers: RunNumbers) -> Iterator[str]:
    if numbers.late or run.num_ranks == 1:
        return
    of = run.replicas
    if not numbers.with_deadline:
        yield f"There was no deadline in this run: all {of.rows} were waited for."
    else:
        same = "" if numbers.saved_share >= LITTLE else f": the run took what waiting for all {of.rows} takes"
        yield f"No {of.row} was late in {run.num_steps} steps{same}."
    for rank in numbers.ranks:
        if rank.slowness >= SLOWER:
            yield (
                f"{_begin(of.who(rank.rank))} took {rank.slowness:.1f} times as long as the others and was waited for "
                "all the same. AutoDeadline, or a quantile below the share of its times, such as q=0.5, would make it "
                "late."
            )


def _waiting(run: Run, numbers: RunNumbers) -> Iterator[str]:
    if numbers.late and numbers.wait_share >= WAITING:
        yield (
            f"With that, a {run.replicas.row} still stood idle for {numbers.wait_share:.0%} of the time, for others "
            "that were within their deadline or had to be stood in for. A shorter deadline would save more of it and "
            "drop more."
        )


_UNEXPLAINED = {
    True: "no link was known to be slow then, and a busy machine does that, too",
    False: "a busy machine does that, too, and StagedDataParallel(links=True) measures whose link is slow",
}


def _network(run: Run) -> Iterator[str]:
    spells, of = run.slow_links, run.replicas
    share = float(np.nansum(run.network_s) / np.nansum(run.seconds)) if np.nansum(run.seconds) else 0.0
    yield from (
        f"{spell.words(of.row)}. All {of.rows} wait for it in each merge: the merge on the network is {share:.0%} of "
        "the time."
        for spell in spells
    )
    if (long := long_merges(run.step, run.network_s)) is not None:
        then = [spell for spell in spells if spell.slow.since_step <= long.longest_step]
        then = [spell for spell in then if spell.until_step is None or long.longest_step <= spell.until_step]
        why = f"{of.row} {then[0].slow.rank}'s link was slow then" if then else _UNEXPLAINED[run.knows_links]
        yield (
            f"In {_steps(long.number, run.num_steps)} the merge took {TIMES:g} times as long on the network as usual "
            f"({seconds_shown(long.usual_s)}) or longer, though all {of.rows} had submitted: at most "
            f"{seconds_shown(long.longest_s)}, in step {long.longest_step}; {why}."
        )


def _out_of_data(run: Run) -> Iterator[str]:
    idle, absent = (np.nan_to_num(run.ranks[name]) == 1 for name in ("idle", "absent"))
    back = np.zeros_like(idle)  # a rank that comes back has data from when it takes part by itself
    for at in range(1, run.num_steps):
        back[at] = idle[at] & (absent[at - 1] | back[at - 1])
    idle &= ~back
    dealt = run.pool_parts == 0  # for a rank that came late to a pool, nothing was left
    uneven = idle.any(axis=1) & ~idle.all(axis=1) & dealt
    if uneven.any():
        first = int(uneven.argmax())
        yield (
            f"Not all {run.replicas.rows} had as much data: from step {int(run.step[first])} on some had none, the "
            f"first of them {run.replicas.who(int(idle[first].argmax()))}. "
            f"Fewer than all took part in {int(uneven.sum())} of {run.num_steps} steps."
        )


def _absent(run: Run, numbers: RunNumbers) -> Iterator[str]:
    for rank in sorted(numbers.ranks, key=lambda rank: -rank.absent)[:3]:
        if rank.absent:
            reasons = [change.left[rank.rank] for _, change in run.changes if rank.rank in change.left]
            often = f", {len(reasons)} times, first" if len(reasons) > 1 else ""
            why = f"{often}: {reasons[0]}" if reasons else ""
            yield (
                f"{_begin(run.replicas.who(rank.rank))} was absent in {_steps(rank.absent, run.num_steps)}{why}. The "
                "others went on without it."
            )


def _begin(who: str) -> str:
    """With a capital letter, as a sentence begins."""
    return who[:1].upper() + who[1:]


def _late_ranks(numbers: RunNumbers, least: float, below: float) -> list[RankInRun]:
    late = [rank for rank in numbers.ranks if rank.late and least <= rank.late_share < below]
    return sorted(late, key=lambda rank: -rank.late_share)


def _list(ranks: list[RankInRun]) -> str:
    """The ranks' numbers in words, at most ten of them."""
    return ", ".join(str(rank.rank) for rank in ranks[:10]) + (" and others" if len(ranks) > 10 else "")


def _doing(rank: RankInRun) -> str:
    """What a late rank was doing, with all its causes."""
    causes: Mapping[Any, int] = rank.causes
    if len(causes) == 1:
        return f", {PLACES[next(iter(causes))]}"
    if not causes:
        return ""
    first, *rest = causes
    others = ", ".join(f"{cause} {causes[cause]}" for cause in rest)
    return f", mostly {PLACES[first]} ({first} {causes[first]}, {others})"


def _last_stage(run: Run, rank: int) -> str:
    """How much of the stage next to the input came from this rank."""
    if len(run.stages) < 2 or math.isnan(share := float(run.stage_share[-1, rank])):
        return ""
    return f", and {share:.0%} of those next to the input"


def _longest_row(flags: Any) -> int:
    longest = row = 0
    for flag in flags.tolist():
        row = row + 1 if flag else 0
        longest = max(longest, row)
    return longest


def _steps(count: int, of: int) -> str:
    share = count / of
    return f"{share:.0%} of its steps ({count} of {of})" if share >= 0.01 else f"{count} of its {of} steps"
