"""Gumbel noise: the same bits everywhere, uniform, and unrelated across ids, positions and seeds."""

import numpy as np
import pytest
import torch
from scipy import stats

from peregrine.kernels.sampling import noise
from peregrine.kernels.sampling.noise import gumbel, random_bits

WORD = (1 << 64) - 1


def splitmix64(seed, number):
    """Output `number` (the first is 1) of SplitMix64, in Python's own integers."""
    word = (seed + number * 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def bits_at(seeds, positions, ids):
    """random_bits on lists, as numpy [R, T, V]."""
    return random_bits(torch.tensor(seeds), torch.tensor(positions), torch.tensor(ids)).numpy()


def assert_uniform(values):
    """Chi-square of 32-bit words over 256 bins, by upper and by lower bits."""
    for part in (values >> 24, values & 255):
        assert stats.chisquare(np.bincount(part.ravel(), minlength=256)).pvalue > 1e-4


def assert_unrelated(left, right):
    """Chi-square of pairs of 32-bit words over 16 x 16 bins, by upper and by lower bits."""
    for a, b in [(left >> 28, right >> 28), (left & 15, right & 15)]:
        assert stats.chisquare(np.bincount((a * 16 + b).ravel(), minlength=256)).pvalue > 1e-4


def test_reference_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, number) for number in range(1, 5)] == published


def test_bits_are_splitmix64_of_position_and_id():
    seeds = [0, 1, 7, 2**63 - 1, -1, -(2**63), 0x1234_5678_9ABC_DEF0]
    positions, ids = [0, 1, 2, 4095, 2**31, 2**40], [0, 1, 2, 3, 127, 151_935, 2**31 + 5]
    got = bits_at(seeds, [positions] * len(seeds), ids)
    for row, seed in enumerate(seeds):
        for column, position in enumerate(positions):
            key = splitmix64(seed & WORD, position)
            expected = [splitmix64(key, token) >> 32 for token in ids]
            # The last fold of SplitMix64 is left out; of the upper half it touches the lowest bit only.
            assert [word >> 1 for word in got[row, column].tolist()] == [word >> 1 for word in expected]


def test_uniform_along_every_axis():
    many = list(range(20_000))
    assert_uniform(bits_at([3], [[5]], many))
    assert_uniform(bits_at([3], [many], [5]))
    assert_uniform(bits_at(many, [[3]] * len(many), [5]))


@pytest.mark.parametrize("step", [1, 2, 64, 4096])
def test_neighbours_are_unrelated(step):
    some = list(range(150))
    near = bits_at(some, [some] * 150, some)
    assert_unrelated(near, bits_at([s + step for s in some], [some] * 150, some))
    assert_unrelated(near, bits_at(some, [[p + step for p in some]] * 150, some))
    assert_unrelated(near, bits_at(some, [some] * 150, [i + step for i in some]))
    # Moving one axis up and another down is no way back to the same bits.
    assert_unrelated(near, bits_at(some, [[p + step for p in some]] * 150, [i - step for i in some]))
    assert_unrelated(near, bits_at([s + step for s in some], [[p - step for p in some]] * 150, some))


def test_words_collide_as_rarely_as_chance():
    words = bits_at(list(range(64)), [list(range(64))] * 64, list(range(64))).ravel()
    # 2^18 words in 2^32 places: 8 collisions expected.
    assert len(words) - len(np.unique(words)) < 30


def test_every_bit_of_the_input_moves_half_the_output():
    rng = np.random.default_rng(0)
    triples = rng.integers(0, 2**20, (400, 3))
    base = np.array([bits_at([s], [[p]], [i])[0, 0, 0] for s, p, i in triples.tolist()])
    for axis in range(3):
        for bit in range(18):
            moved = triples.copy()
            moved[:, axis] ^= 1 << bit
            other = np.array([bits_at([s], [[p]], [i])[0, 0, 0] for s, p, i in moved.tolist()[:100]])
            flips = np.bitwise_count(base[:100] ^ other).mean() / 32
            assert 0.42 < flips < 0.58


def test_noise_is_gumbel():
    values = gumbel(torch.arange(100), torch.arange(50).expand(100, 50), torch.arange(40)).numpy().ravel()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-4
    # The tails too: of 200,000 draws, as many beyond each point as there should be.
    for point in (-2.0, 5.0, 8.0):
        upper = point > 0
        chance = stats.gumbel_r.sf(point) if upper else stats.gumbel_r.cdf(point)
        beyond = int(((values > point) if upper else (values < point)).sum())
        assert stats.binomtest(beyond, len(values), chance).pvalue > 1e-4


def test_noise_is_finite_at_the_ends(monkeypatch):
    ends = torch.tensor([0, 1, 2**32 - 129, 2**32 - 1])
    monkeypatch.setattr(noise, "random_bits", lambda *_: ends)
    values = gumbel(ends, ends, ends).double().numpy()
    v = np.array([0.5, 1.5, 2**32 - 256, 2**32 - 256]) / 2**32  # the last is the largest float32 below 1
    assert values == pytest.approx(-np.log(-np.log1p(-v)), rel=1e-6)
    assert values.max() < 22.9
    assert values.min() > -2.82


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1003])
def test_noise_does_not_depend_on_batch_or_order(vocab_size):
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(0, 2**62, (5,), generator=generator)
    positions = torch.randint(0, 2**20, (5, 6), generator=generator)
    ids = torch.randperm(vocab_size, generator=generator)
    together = gumbel(seeds, positions, torch.arange(vocab_size))
    assert torch.equal(gumbel(seeds, positions, ids), together[:, :, ids])
    for row in range(5):
        for node in range(6):
            alone = gumbel(seeds[row : row + 1], positions[row : row + 1, node : node + 1], torch.arange(vocab_size))
            assert torch.equal(alone[0, 0], together[row, node])
