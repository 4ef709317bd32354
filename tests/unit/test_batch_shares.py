"""The cut of a batch by the speeds of data ranks, and what the key refuses."""

import itertools
import random
from fractions import Fraction

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ranks.shares import SharesOfPass, Speeds, compute_enough_examples, cut_examples


def drawn_shares(draw: random.Random, ranks: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(draw.randint(1, 12), draw.choice((1, 2, 5))) for _ in range(ranks))


def ends(cut: tuple[int, ...], shares: tuple[Fraction, ...]) -> Fraction:
    """When the last rank is done, if rank r computes shares[r] examples in a unit of time."""
    return max(count / share for count, share in zip(cut, shares, strict=True))


def test_no_cut_ends_earlier():
    draw = random.Random(4)
    for _ in range(300):
        ranks, examples = draw.randint(2, 4), draw.randint(1, 12)
        shares = drawn_shares(draw, ranks)
        cut = cut_examples(examples, shares)
        assert sum(cut) == examples
        every = itertools.product(range(examples + 1), repeat=ranks)
        assert ends(cut, shares) == min(ends(one, shares) for one in every if sum(one) == examples)


def test_a_batch_in_which_every_rank_has_an_example():
    draw = random.Random(5)
    for _ in range(300):
        shares = drawn_shares(draw, draw.randint(2, 6))
        assert min(cut_examples(compute_enough_examples(shares) * len(shares), shares)) > 0


@pytest.mark.parametrize(
    ("shares", "cut"),
    [("3:3:2:1", (11, 11, 7, 3)), ("1:1:1:0.5", (10, 9, 9, 4)), ("7x4", (8, 8, 8, 8)), ("3x2:2:1", (11, 11, 7, 3))],
)
def test_cuts_of_32_examples(shares, cut):
    assert cut_examples(32, ParallelConfig.parse(f"batch_shares={shares}").shares) == cut


def test_what_does_not_fit_goes_to_other_ranks():
    """Against every cut that keeps within what fits; where all are full, shares decide."""
    draw = random.Random(6)
    for _ in range(200):
        shares = drawn_shares(draw, 3)
        most = tuple(draw.randint(1, 6) for _ in shares)
        examples = draw.randint(3, sum(most))
        cut = cut_examples(examples, shares, 1, most)
        every = itertools.product(*(range(1, one + 1) for one in most))
        assert ends(cut, shares) == min(ends(one, shares) for one in every if sum(one) == examples)
    assert cut_examples(9, (Fraction(2), Fraction(1)), 1, (2, 2)) == (6, 3)


@pytest.mark.parametrize(
    ("spec", "ranks", "words", "works"),
    [
        ("batch_shares=2:1", 4, "2 shares for 4 data ranks", "batch_shares=2:2:2:1"),
        ("tp=2,batch_shares=2:2:2:1", 4, "4 shares for 2 data ranks", "batch_shares=2:1"),
        ("batch_shares=2:0", 2, "above 0", "batch_shares=even"),
        ("batch_shares=2:-1", 2, "above 0", "batch_shares=even"),
        ("batch_shares=fast", 2, "not numbers", "batch_shares=even"),
        ("batch_shares=1:x", 2, "not numbers", "batch_shares=even"),
        ("batch_shares=2:1x0", 2, "not numbers", "batch_shares=even"),
        ("batch_shares=2x1:1x", 2, "not numbers", "batch_shares=even"),
        ("batch_shares=2:1x2", 2, "3 shares for 2 data ranks", "batch_shares=2:1"),
        ("batch_shares=2:1/0", 2, "not numbers", "batch_shares=even"),
        ("tp=2,batch_shares=1", 2, "one data rank", "batch_shares=even"),
        ("batch_shares=auto,pack_tokens=64", 2, "pack_tokens=64 deals an epoch before", "batch_shares=even"),
    ],
)
def test_refused(spec, ranks, words, works):
    with pytest.raises(SpecError, match=f"^batch_shares=.*{words}.*; {works} works$"):
        ParallelConfig.parse(spec).resolve(ranks)
    key = works.partition("=")[0]
    kept = [part for part in spec.split(",") if part.partition("=")[0] != key]
    ParallelConfig.parse(",".join([*kept, works])).resolve(ranks)


def test_shares_in_a_file(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("dp_shard: 2\nbatch_shares: 3:2\n")
    assert ParallelConfig.parse(str(path)).shares == (3, 2)


# ---- batch_shares=auto: readings of seconds per example -----------------------------------------------------------

EVEN = (Fraction(1),) * 4


def changes(seconds_of, looks: int = 20, noise: float = 0.0) -> list[tuple[int, tuple[int, ...]]]:
    """After which looks the cut of 32 examples changes, and to what, from an even one on."""
    draw, speeds, shares, found = random.Random(3), Speeds(), EVEN, []
    for look in range(1, looks + 1):
        seconds = [one * draw.uniform(1 - noise, 1 + noise) for one in seconds_of(look)]
        better = speeds.look(seconds, 32, shares)
        if better is not None:
            shares = better
            speeds.forget()
            found.append((look, cut_examples(32, shares, 1)))
    return found


def test_a_slow_rank_is_followed_after_four_readings():
    assert changes(lambda look: (1, 1, 1, 2)) == [(4, (10, 9, 9, 4))]
    assert changes(lambda look: (1, 1, 1, 1 if look < 10 else 3)) == [(12, (10, 10, 9, 3))]


def test_noise_moves_little():
    assert changes(lambda look: (1, 1, 1, 1), noise=0.04) == []
    assert len(changes(lambda look: (1, 1, 1, 2), noise=0.1)) <= 2


def test_a_rank_without_room_gets_fewer_at_once():
    """At the first reading where the cut in force is too large; else when it is worth it, and within what fits."""
    speeds = Speeds()
    shares = speeds.look((1, 1, 1, 1), 32, EVEN, (32, 32, 32, 5))
    assert cut_examples(32, shares, 1) == (9, 9, 9, 5)
    assert speeds.look((1, 1, 1, 1), 32, shares, (32, 32, 32, 5)) is None
    speeds, most = Speeds(), (11, 32, 32, 32)
    found = [speeds.look((1, 2, 2, 2), 32, EVEN, most) for _ in range(4)]
    assert found[:3] == [None] * 3
    assert cut_examples(32, found[3], 1) == (11, 7, 7, 7)  # 13 by speed alone


def test_a_rank_keeps_an_example_however_slow_it_is():
    assert changes(lambda look: (1, 1, 1, 500))[0][1][3] == 1


def test_a_change_holds_from_a_micro_step_that_was_not_drawn():
    old, new = (Fraction(1), Fraction(1)), (Fraction(2), Fraction(1))
    of_pass = SharesOfPass(old)
    draws = of_pass.draw_all()
    drawn = [next(draws) for _ in range(3)]  # one of them skipped, one trained on, one ahead
    of_pass.take(skipped=1)
    of_pass.change(4, new)
    drawn += [next(draws) for _ in range(3)]
    taken = []
    for _ in range(4):
        of_pass.take(skipped=1)
        taken.append(of_pass.in_hand)
    assert (drawn, taken) == ([old] * 4 + [new] * 2, [old] * 2 + [new] * 2)
    assert next(of_pass.draw_all()) == new
