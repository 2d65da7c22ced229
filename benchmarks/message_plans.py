"""How much earlier the last message of a step could be merged by another plan: by the model, nothing is measured.

python benchmarks/message_plans.py

Each row is the mean and the largest of many cases: when the last message is merged, over the same by the best plan
found. Cases: 5, 20, 100 and 1000 MB of gradients in 48 layers, all alike or with 30 % of them in the first or the last
one; 4 and 16 ranks; 10 MB/s, 125 MB/s and 1.25 GB/s; 0.1, 1, 10 and 50 ms; backward 0.2, 0.7, 1.5 and 4 times as long
as the bytes need. A message costs 0.05 ms of a core for each of its 2 (p - 1) rounds. The best plan is the best of
about 45: one message, one for each layer, equal parts, parts that are smaller at both ends, cut or not; and what
joining and dividing its messages improves on it. Below the table: over the best choice of which of its stages share a
message, which is all that a plan can choose while the stages stay.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product
from statistics import mean

from straggle.backward.stages import BUCKET_BYTES, MIN_STAGES, STAGE_BYTES
from straggle.policies.links import Link
from straggle.policies.merge_time import MESSAGES_AT_A_TIME, Message, largest_message_bytes, merged_at
from straggle.report import text_table

MB = 2**20
LAYERS = 48
ROUND_S = 5e-5
SHARE = 0.3  # of a large layer

MEGABYTES, RANKS = (5, 20, 100, 1000), (4, 16)
RATES, LATENCIES = (10e6, 125e6, 1250e6), (1e-4, 1e-3, 1e-2, 5e-2)
LARGE = {None: "no large", 0: "large last", LAYERS - 1: "large first"}  # by its place in the order of backward
BACKWARD = (0.2, 0.7, 1.5, 4.0)


@dataclass(frozen=True)
class Case:
    """``backward``: its time, over that which the bytes need; ``large``: which layer is, in the order of backward."""

    megabytes: int
    bytes_per_s: float
    latency_s: float
    ranks: int
    large: int | None
    backward: float

    @property
    def sizes(self):
        total = self.megabytes * MB
        if self.large is None:
            return [total / LAYERS] * LAYERS
        sizes = [(1 - SHARE) * total / (LAYERS - 1)] * LAYERS
        sizes[self.large] = SHARE * total
        return sizes

    @property
    def ready(self):
        bytes_s = 2 * (self.ranks - 1) / self.ranks * self.megabytes * MB / self.bytes_per_s
        return [self.backward * bytes_s * (number + 1) / LAYERS for number in range(LAYERS)]

    def last_s(self, groups, *, cut, at_a_time=MESSAGES_AT_A_TIME):
        """When the last message is merged; ``groups``: how many layers each has."""
        sizes, ready, messages, end = self.sizes, self.ready, [], 0
        for count in groups:
            end += count
            num_bytes = sum(sizes[end - count : end])
            parts = math.ceil(num_bytes / largest_message_bytes(self.ranks)) if cut else 1
            messages += [Message(num_bytes / parts, ready[end - 1])] * parts
        links = [Link(self.latency_s, self.bytes_per_s)] * self.ranks
        return max(merged_at(messages, links, startup_s=2 * (self.ranks - 1) * ROUND_S, at_a_time=at_a_time))


def divided(sizes, parts):
    """How many layers are in each of consecutive parts of about these bytes."""
    ends, groups, reached, part = list(accumulate(parts)), [0], 0.0, 0
    for size in sizes:
        if groups[-1] and reached + size / 2 > ends[part]:
            while part < len(ends) - 1 and reached + size / 2 > ends[part]:
                part += 1
            groups.append(0)
        groups[-1] += 1
        reached += size
    return groups


def joined(sizes, groups, limits):
    """Consecutive groups share a message until it has the bytes of its limit; the last limit is that of the rest."""
    found, reached, end = [0], 0.0, 0
    for count in groups:
        if found[-1] and reached >= limits[min(len(found), len(limits)) - 1]:
            found.append(0)
            reached = 0.0
        found[-1] += count
        reached += sum(sizes[end : end + count])
        end += count
    return found


def by_rule(sizes):
    count = max(MIN_STAGES, math.ceil(sum(sizes) / STAGE_BYTES))
    return joined(sizes, divided(sizes, [sum(sizes) / count] * count), [BUCKET_BYTES])


def best_shared_s(case):
    """By the best choice of which of the rule's stages, eight at most, share a message."""
    sizes, found = case.sizes, []
    stages = divided(sizes, [sum(sizes) / MIN_STAGES] * MIN_STAGES)
    for count in range(len(stages)):
        for cuts in combinations(range(1, len(stages)), count):
            groups = [sum(stages[begin:end]) for begin, end in pairwise((0, *cuts, len(stages)))]
            found.append(case.last_s(groups, cut=True))
    return min(found)


def by_ddp(sizes):
    return joined(sizes, [1] * LAYERS, [MB, 25 * MB])


def tapered(total, smallest, largest):
    """Parts that double from both ends up to the largest."""
    head, tail, size, left = [], [], smallest, total
    while left > 0:
        for end in (head, tail):
            part = min(size, left)
            end += [part] if part else []
            left -= part
        size = min(2 * size, largest)
    return head + tail[::-1]


def best_s(case):
    sizes = case.sizes
    total = sum(sizes)
    plans = [[LAYERS], [1] * LAYERS, by_rule(sizes), by_ddp(sizes)]
    plans += [divided(sizes, [total / count] * count) for count in (2, 3, 4, 6, 8, 12, 16, 24)]
    ends = ((s, m) for s in (12, 24, 48, 96) for m in (4, 8, 16) if s > m)
    plans += [divided(sizes, tapered(total, total / smallest, total / largest)) for smallest, largest in ends]
    seconds, groups, cut = min((case.last_s(plan, cut=cut), plan, cut) for plan in plans for cut in (True, False))
    at = 0
    while at < len(groups) - 1:  # two messages may be better as one
        other = [*groups[:at], groups[at] + groups[at + 1], *groups[at + 2 :]]
        found = case.last_s(other, cut=cut)
        seconds, groups, at = (found, other, at) if found < seconds else (seconds, groups, at + 1)
    at = 0
    while at < len(groups):  # or one as two
        half = groups[at] // 2
        other = [*groups[:at], half, groups[at] - half, *groups[at + 1 :]]
        found = case.last_s(other, cut=cut) if half else seconds
        seconds, groups, at = (found, other, at) if found < seconds else (seconds, groups, at + 1)
    return seconds


WAYS = {
    "one message": lambda case: case.last_s([LAYERS], cut=False),
    "DDP": lambda case: case.last_s(by_ddp(case.sizes), cut=False, at_a_time=2),
    "straggle, not cut": lambda case: case.last_s(by_rule(case.sizes), cut=False),
    "straggle": lambda case: case.last_s(by_rule(case.sizes), cut=True),
}


ROWS = {
    "all": lambda _: True,
    **{f"{own} MB": lambda case, own=own: case.megabytes == own for own in MEGABYTES},
    **{f"{own / 1e6:g} MB/s": lambda case, own=own: case.bytes_per_s == own for own in RATES},
    **{f"{1000 * own:g} ms": lambda case, own=own: case.latency_s == own for own in LATENCIES},
    **{f"{own} ranks": lambda case, own=own: case.ranks == own for own in RANKS},
    **{f"{words} layer": lambda case, own=own: case.large == own for own, words in LARGE.items()},
    **{f"backward {own:g}": lambda case, own=own: case.backward == own for own in BACKWARD},
}


def main():
    found = []
    for case in (Case(*own) for own in product(MEGABYTES, RATES, LATENCIES, RANKS, LARGE, BACKWARD)):
        best = best_s(case)
        found.append((case, {way: last_s(case) / best for way, last_s in WAYS.items()}))
    rows = [("cases", "number", *WAYS, "straggle above 1.02")]
    for words, belongs in ROWS.items():
        ratios = [own for case, own in found if belongs(case)]
        cells = [f"{mean(own[way] for own in ratios):.2f} ({max(own[way] for own in ratios):.2f})" for way in WAYS]
        above = sum(own["straggle"] > 1.02 for own in ratios) / len(ratios)
        rows.append((words, str(len(ratios)), *cells, f"{100 * above:.0f} %"))
    print(text_table(rows))
    for megabytes in MEGABYTES[:-1]:  # more have more stages
        ratios = [WAYS["straggle"](case) / best_shared_s(case) for case, _ in found if case.megabytes == megabytes]
        print(f"{megabytes} MB, over the best sharing of the same stages: {mean(ratios):.3f} ({max(ratios):.2f})")


if __name__ == "__main__":
    main()
