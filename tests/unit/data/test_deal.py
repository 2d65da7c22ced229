"""What of an epoch is dealt to whom, and again: each sample comes, whoever leaves and comes back."""

from collections import Counter

import pytest
import torch

from straggle.data.deal import Deal, Ledger, Parts


def ledger(num_samples, world_size, *, batch_size=2, max_repeats=3, shuffle=False):
    return Ledger(
        num_samples,
        batch_size=batch_size,
        world_size=world_size,
        seed=0,
        shuffle=shuffle,
        max_repeats=max_repeats,
    )


def of_step(own, world_size):
    return [own.of(rank).tolist() for rank in range(world_size)]


def parts(world_size, *, absent=(), stood_in=(), idle=(), missed=()):
    brought = tuple(rank not in {*absent, *stood_in, *idle, *missed} for rank in range(world_size))
    return Parts(brought, frozenset(absent), frozenset([*stood_in, *missed]), missed=frozenset(missed))


def epoch(own, world_size, parts_of):
    """How often each sample was brought, and steps, in the running epoch; ``parts_of(step)``."""
    seen, step, number = Counter(), 0, own.epoch
    while own.epoch == number:
        now = parts_of(step)
        for samples, brought in zip(of_step(own, world_size), now.brought, strict=True):
            seen.update(samples if brought else [])
        own.merged(now)
        step += 1
    return seen, step


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 5, 24, 25, 31])
def test_with_all_ranks_there_each_sample_comes_once_and_shares_are_equal(world_size, num_samples):
    own = ledger(num_samples, world_size)
    sizes = [[len(samples) for samples in of_step(own, world_size)]]
    seen, steps = epoch(own, world_size, lambda _: parts(world_size))
    assert seen == dict.fromkeys(range(num_samples), 1)
    assert steps == -(-num_samples // (2 * world_size))
    assert all(max(own) - min(own) <= 1 for own in sizes)


def test_last_step_is_dealt_as_evenly_as_it_can_be():
    deal = Deal(torch.arange(11), (2, 2, 2))
    assert [deal.of(1, rank).tolist() for rank in range(3)] == [[6], [7, 8], [9, 10]]
    assert [deal.of(2, rank).tolist() for rank in range(3)] == [[], [], []]
    assert Deal(torch.arange(1), (2, 2, 2)).of(0, 2).tolist() == [0]


def test_unequal_shares():
    deal = Deal(torch.arange(12), (3, 0, 1))
    assert [deal.of(0, rank).tolist() for rank in range(3)] == [[0, 1, 2], [], [3]]
    assert deal.num_steps == 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("away", [range(3, 6), range(3, 100), range(2)])
def test_samples_of_an_absent_rank_come_once_all_the_same(world_size, away):
    own = ledger(64, world_size)
    gone = world_size - 1
    seen, _ = epoch(own, world_size, lambda step: parts(world_size, absent=[gone] if step in away else []))
    assert seen == dict.fromkeys(range(64), 1)
    assert own.num_lost == 0


def test_absent_rank_has_no_share_and_one_that_comes_back_has_one_after_its_first_step():
    own = ledger(100, 3)
    own.merged(parts(3, absent=[1]))
    assert own.deal.shares == (2, 0, 2)
    own.merged(parts(3, stood_in=[1]))  # it is let in, and its state arrives
    assert own.deal.shares == (2, 0, 2)
    own.merged(parts(3, idle=[1]))
    assert own.deal.shares == (2, 2, 2)


def test_rank_that_is_only_stuck_keeps_its_share_and_its_samples_come_again_at_the_end():
    own = ledger(24, 2)
    seen, steps = epoch(own, 2, lambda step: parts(2, stood_in=[1] if step == 2 else []))
    assert seen == dict.fromkeys(range(24), 1)
    assert steps == 6 + 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rank_that_misses_steps_has_the_same_samples_until_it_is_in_time(world_size):
    own, late = ledger(world_size * 2 * 6, world_size), world_size - 1
    first = [own.deal.of(step, late).tolist() for step in range(6)]
    missed = {1, 2, 4}
    seen, had = Counter(), []
    for step in range(6):
        had.append(own.of(late).tolist())
        now = parts(world_size, missed=[late] if step in missed else [])
        for samples, brought in zip(of_step(own, world_size), now.brought, strict=True):
            seen.update(samples if brought else [])
        own.merged(now)
    assert had == [first[place] for place in (0, 1, 1, 1, 2, 2)]
    assert sorted(own.deal.samples.tolist()) == sorted(n for samples in first[3:] for n in samples)  # for all ranks
    rest, steps = epoch(own, world_size, lambda _: parts(world_size))
    assert seen + rest == dict.fromkeys(range(world_size * 2 * 6), 1)
    assert steps == -(-6 // (2 * world_size))
    assert own.num_lost == 0


def test_rank_that_leaves_has_its_samples_dealt_to_the_others_from_the_first_step_that_it_missed():
    own = ledger(64, 2)
    seen, _ = epoch(own, 2, lambda step: parts(2, missed=[1] if step == 2 else [], absent=[1] if step > 3 else []))
    assert seen == dict.fromkeys(range(64), 1)
    assert own.num_lost == 0


def test_epoch_ends_although_a_rank_misses_all_of_its_steps():
    own = ledger(24, 2, max_repeats=2)
    seen, _ = epoch(own, 2, lambda _: parts(2, missed=[1]))
    assert set(seen.values()) == {1}
    assert own.num_lost == 24 - len(seen) > 0


def test_samples_that_a_present_rank_never_brings_are_given_up():
    own = ledger(8, 2, max_repeats=2)
    seen, _ = epoch(own, 2, lambda _: parts(2, idle=[1]))
    assert set(seen.values()) == {1}
    assert own.num_lost == 8 - len(seen) > 0


def test_no_rank_takes_part_by_itself_and_shares_stay():
    own = ledger(24, 2)
    own.merged(parts(2, absent=[0], stood_in=[1]))
    own.merged(parts(2, stood_in=[0, 1]))
    assert sum(own.deal.shares) > 0


def test_epochs_have_orders_of_their_own():
    own = ledger(50, 1, shuffle=True)
    first = own.deal.samples
    epoch(own, 1, lambda _: parts(1))
    assert own.position == (1, 0, 0)
    assert sorted(own.deal.samples.tolist()) == sorted(first.tolist()) != own.deal.samples.tolist()


@pytest.mark.parametrize("after", range(14))
def test_saved_ledger_goes_on_alike(after):
    def of(step):
        missed = [1] if step in (1, 8, 9) else []
        return parts(3, absent=[2] if 2 <= step < 5 else [], stood_in=[1] if step == 6 else [], missed=missed)

    own, loaded = ledger(50, 3, shuffle=True), ledger(50, 3, shuffle=True)
    for step in range(after):
        own.merged(of(step))
    loaded.load_state_dict(own.state_dict())
    for step in range(after, 20):
        assert (loaded.position, of_step(loaded, 3)) == (own.position, of_step(own, 3))
        own.merged(of(step))
        loaded.merged(of(step))


def test_saved_ledger_is_dealt_anew_to_another_number_of_ranks():
    own, loaded = ledger(60, 4), ledger(60, 2)
    seen = Counter()
    for step in range(3):
        now = parts(4, stood_in=[3] if step == 1 else [], missed=[2] if step == 2 else [])
        for samples, brought in zip(of_step(own, 4), now.brought, strict=True):
            seen.update(samples if brought else [])
        own.merged(now)
    loaded.load_state_dict(own.state_dict())
    rest, _ = epoch(loaded, 2, lambda _: parts(2))
    assert seen + rest == dict.fromkeys(range(60), 1)


def test_state_of_other_data_is_refused():
    with pytest.raises(ValueError, match="of 60 samples, not of 61"):
        ledger(61, 2).load_state_dict(ledger(60, 2).state_dict())
