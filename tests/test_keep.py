"""Which entries are kept: exactly as many as promised, the right ones, and the same ones again."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfback import codes, keep

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ratios = st.integers(1, 1000).map(lambda i: i / 1000)


def by_hand(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest by (magnitude, lower index), sorted in Python."""
    order = sorted(range(len(x)), key=lambda i: (-keep.keys(x)[i].item(), i))
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[order[:k]] = True
    return mask


@given(ratios, st.integers(0, 10**10))
def test_count_is_the_floor_of_keep_as_it_is_written(ratio, n):
    assert keep.count(ratio, n) == (max(1, Fraction(str(ratio)) * n // 1) if n else 0)


@pytest.mark.parametrize(("ratio", "n", "k"), [(0.1, 10, 1), (0.29, 100, 29), (0.57, 100, 57), (1, 7, 7), (0.001, 5, 1), (0.5, 0, 0)])
def test_count_where_floating_point_would_be_off(ratio, n, k):
    assert keep.count(ratio, n) == k


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.sampled_from([None, 1, 8, 32, 50]), ratios, st.sampled_from(keep.SELECTS), st.sampled_from(FLOATS))
def test_every_block_keeps_its_count(n, block, ratio, select, dtype):
    x = torch.arange(n).remainder(7).to(dtype)  # many ties
    mask = keep.elements(x, ratio, select, block, seed=n)
    assert mask.shape == x.shape
    for part in mask.split(block or max(1, n)):
        assert part.sum() == keep.count(ratio, len(part))
    assert mask.sum() == keep.total(ratio, n, block)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [None, 16])
def test_the_largest_are_kept_and_ties_go_to_the_lower_index(dtype, block):
    x = (torch.randn(70, generator=torch.Generator().manual_seed(0)) * 2).round().to(dtype)
    mask = keep.elements(x, 0.3, "largest", block)
    expected = [by_hand(part, keep.count(0.3, len(part))) for part in x.split(block or 70)]
    assert torch.equal(mask, torch.cat(expected))


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_kept_before_infinity_and_infinity_before_all(dtype):
    x = torch.tensor([1.0, -float("inf"), float("nan"), 3.0, -float("nan"), 5.0], dtype=dtype)
    assert keep.elements(x, 0.5, block=None).tolist() == [False, True, True, False, True, False]
    assert keep.elements(x, 0.34, block=None).tolist() == [False, False, True, False, True, False]


def test_zero_and_its_negative_tie():
    assert keep.elements(torch.tensor([0.0, -0.0, 0.0]), 0.4, block=None).tolist() == [True, False, False]


def test_counting_is_exact_beyond_two_to_the_24():
    n = 2**24 + 100
    x = torch.ones(n, dtype=torch.float16)  # all tie: the first k stay
    k = n - 3
    mask = keep.largest(keep.keys(x), k)
    assert mask.sum() == k
    assert mask[:k].all()


@pytest.mark.parametrize("block", [None, 64, 37])
def test_random_is_ours_and_repeats(block):
    x, state = torch.zeros(1000), torch.get_rng_state()
    first, again, other = (keep.elements(x, 0.2, "random", block, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, 2**63 - 1])
def test_hashes_are_32_bits_and_all_different(seed):
    noise = keep.noise(100_000, seed, "cpu")
    assert noise.min() >= 0
    assert noise.max() < 2**32
    assert noise.unique().numel() == 100_000
    assert abs(noise.double().mean() / 2**31 - 1) < 0.01


def test_mix_of_tensors_is_mix_of_integers():
    words = [0, 1, 2**32 - 1, 0x9E3779B9, 0x85EBCA6B]
    assert keep.mix(torch.tensor(words)).tolist() == [keep.mix(w) for w in words]
    assert keep.mix(1) == 0x514E28B7  # murmur3's finaliser


# Random elements: three blocks of 16 and one of 11

SEEDS, SIZE, BLOCKS, REST, RATIO = 6000, 16, 3, 11, 0.25
N = SIZE * BLOCKS + REST


@pytest.fixture(scope="module")
def masks():
    """(seeds, elements), as numbers."""
    return torch.stack([keep.elements(torch.zeros(N), RATIO, "random", SIZE, seed) for seed in range(SEEDS)]).double()


def deviations(found, chance):
    """How far frequencies over SEEDS are from their chances, in standard deviations."""
    return (found - chance) / (chance * (1 - chance) / SEEDS).sqrt()


def unremarkable(z):
    """None is beyond five deviations, and their squares are 1 on average, as those of normal numbers."""
    return z.abs().max() < 5 and abs(z.square().mean() - 1) < 5 * (2 / z.numel()) ** 0.5


def test_every_element_is_kept_equally_often(masks):
    chance = torch.cat([torch.full((SIZE * BLOCKS,), 4 / 16), torch.full((REST,), 2 / 11)]).double()
    assert unremarkable(deviations(masks.mean(0), chance))


def test_pairs_are_kept_as_if_every_block_were_drawn_by_itself(masks):
    together = masks.T @ masks / SEEDS
    head, tail = range(SIZE * BLOCKS), range(SIZE * BLOCKS, N)
    kinds = {
        "in a block": (4 * 3 / (16 * 15), [(i, j) for i in head for j in head if i < j and i // SIZE == j // SIZE]),
        "in two blocks": (4 / 16 * 4 / 16, [(i, j) for i in head for j in head if i < j and i // SIZE != j // SIZE]),
        "in the last": (2 * 1 / (11 * 10), [(i, j) for i in tail for j in tail if i < j]),
        "in the last and before": (4 / 16 * 2 / 11, [(i, j) for i in head for j in tail]),
    }
    for kind, (chance, pairs) in kinds.items():
        i, j = torch.tensor(pairs).T
        assert deviations(together[i, j], torch.tensor(chance)).abs().max() < 5, kind
        assert abs(deviations(together[i, j].mean(), torch.tensor(chance))) < 1, kind


def test_blocks_turn_one_pattern_by_offsets_of_their_own():
    pattern, offsets, tail = keep.drawn(1000, 0.3, 64, seed=3, device="cpu")
    blocks = keep.elements(torch.zeros(1000), 0.3, "random", 64, seed=3).split(64)
    assert (pattern.sum(), len(offsets), len(tail)) == (19, 15, 40)
    for block, offset in zip(blocks, offsets.tolist(), strict=False):
        assert block.tolist() == [bool(pattern[(i + offset) % 64]) for i in range(64)]
    assert torch.equal(blocks[-1], tail)


def test_offsets_and_patterns_differ_between_blocks_and_seeds():
    (pattern, offsets, _), (other, others, _) = (keep.drawn(2**20, 0.5, 1024, seed, "cpu") for seed in (0, 1))
    assert not torch.equal(pattern, other)
    assert len(offsets) == 1024 and 550 < len(offsets.unique()) < 750  # 1024 (1 - 1/e) = 647 of uniform ones
    assert (offsets == others).sum() < 10 and ((offsets - others) % 1024).unique().numel() > 550


@pytest.mark.parametrize("block", [None, 100, 64])
def test_a_lone_block_is_not_turned(block):
    pattern, offsets, tail = keep.drawn(64, 0.3, block, seed=5, device="cpu")
    assert torch.equal(pattern, keep.elements(torch.zeros(64), 0.3, "random", block, seed=5))
    assert len(offsets) == len(tail) == 0


@given(st.integers(1, 60), ratios, st.lists(st.integers(0, 1000), max_size=5))
@settings(max_examples=100, deadline=None)
def test_the_index_of_turned_patterns_is_where_they_are_true(size, ratio, offsets):
    k = keep.count(ratio, size)
    pattern = keep.largest(keep.noise(size, 1, "cpu"), k)
    turns = torch.tensor(offsets, dtype=torch.int64) % size
    found = keep.turned_index(pattern, turns, k)
    assert found.dtype == torch.int32
    assert found.tolist() == keep.turned(pattern, turns).reshape(-1).nonzero().squeeze(1).tolist()


# Channels and rows


@pytest.mark.parametrize("axis", [1, -1])
def test_channels_are_those_of_largest_norm(axis):
    x = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(1)).half()
    norms = x.float().movedim(axis, 0).flatten(1).norm(dim=1)
    index = keep.channels(x, 0.5, "largest", axis)
    assert index.dtype == torch.int32
    assert index.tolist() == norms.topk(len(index)).indices.sort().values.tolist()


def test_norms_do_not_overflow_in_fp16():
    x = torch.full((4, 3), 300.0, dtype=torch.float16)
    x[:, 2] = 301
    assert keep.channels(x, 0.4).tolist() == [2]


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 8), -1), ((2, 8, 3, 4), 1), ((24, 8), -1)])
def test_rows_are_positions_in_order(shape, axis):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    flat = x.movedim(axis, -1).reshape(24, 8)
    assert keep.rows(x, 0.25, "largest", axis).tolist() == flat.norm(dim=1).topk(6).indices.sort().values.tolist()


@given(st.integers(0, 4), st.integers(1, 9), ratios, st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_random_rows_keep_the_class_tokens(batch, tokens, ratio, always):
    x = torch.zeros(batch, tokens, 3)
    index = keep.rows(x, ratio, "random", -1, always, seed=5)
    fixed = [b * tokens + i for b in range(batch) for i in range(min(always, tokens))]
    assert len(index) == max(keep.count(ratio, batch * tokens), len(fixed))
    assert set(fixed) <= set(index.tolist())
    assert index.tolist() == sorted(set(index.tolist()))


def test_unknown_selections_and_dtypes_are_named():
    with pytest.raises(ValueError, match=r"select='best' is not known\. Allowed: 'largest', 'random'"):
        keep.elements(torch.zeros(3), 0.5, "best")
    with pytest.raises(TypeError, match=r"torch.int64 have no order by magnitude here\. Allowed: torch\.float64"):
        keep.elements(torch.arange(3), 0.5)


# The code of a derivative


@pytest.mark.parametrize("name", codes.ACTIVATIONS)
def test_the_derivative_is_autograds(name):
    x = torch.linspace(-8, 8, 201, dtype=torch.float64, requires_grad=True)
    f = torch.nn.functional.silu if name == "silu" else torch.nn.functional.gelu
    (f(x) if name != "gelu_tanh" else f(x, approximate="tanh")).sum().backward()
    assert torch.allclose(x.grad, torch.from_numpy(codes.derivative(name, x.detach().numpy())), atol=1e-12)


@pytest.mark.parametrize("name", codes.ACTIVATIONS)
def test_more_bits_are_better_and_four_are_close(name):
    assert codes.error(name, 4) < 0.023
    assert codes.error(name, 8) < codes.error(name, 4) / 14


@pytest.mark.parametrize("bits", [4, 8])
def test_no_edge_of_a_table_can_be_moved_to_gain(bits):
    edges, _ = codes.cells("gelu", bits)
    assert len(edges) == 2**bits - 1
    assert (edges[1:] > edges[:-1]).all()
    even = torch.linspace(-4, 4, 2**bits - 1).numpy()  # cells of equal width do worse
    x = torch.linspace(-12, 12, 4001).double().numpy()
    d, p = codes.derivative("gelu", x), codes.density(x)

    def error(edges):
        cell = torch.from_numpy(edges.searchsorted(x))
        mass, mean = (torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cell, torch.from_numpy(v)) for v in (p, p * d))
        return (torch.from_numpy(p) * (torch.from_numpy(d) - (mean / mass)[cell]) ** 2).sum().sqrt()

    assert error(edges) < 0.8 * error(even)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"no derivative of 'mish' is known\. Allowed: 'gelu', 'gelu_tanh', 'silu'"):
        codes.table("mish", 4)
    with pytest.raises(ValueError, match=r"16 or 256 cells .* found 32"):
        codes.table("gelu", 5)
