"""Samplers: how many, which, how often."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfback import positions
from halfback.positions import Positions, count, dithered, draw, enlarge, keeps, offset, orders, starts, stride_of

grids = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
ratios = st.floats(0.01, 1.0)


def key(step=0, rank=0):
    return torch.tensor([rank, step])


@settings(deadline=None, max_examples=60)
@given(grids, ratios, st.integers(0, 3), st.sampled_from(["grid", "random", "fixed"]))
def test_a_draw_is_a_split_of_all_positions(grid, keep, always, sampler):
    (at,) = draw(key(), grid, [keep], always, sampler)
    assert at.n == always + math.prod(grid)
    n, s = math.prod(grid), 0 if sampler == "random" else stride_of([keep], grid)
    assert at.k == always + (n // s if s else max(1, round(keep * n)))
    kept, dropped = at.kept.tolist(), at.dropped.tolist()
    assert kept == sorted(kept) and dropped == sorted(dropped)
    assert sorted(kept + dropped) == list(range(at.n))
    assert kept[:always] == list(range(always))
    assert torch.equal(at.index[0][at.where], torch.arange(at.n))


@settings(deadline=None, max_examples=60)
@given(grids, ratios)
def test_over_all_phases_of_the_grid_every_position_is_kept_equally_often(grid, keep):
    n, k = math.prod(grid), count(keep, grid)
    step = starts(n, [k])
    seen = Counter(int(i) for s in range(0, n, step) for i in np.roll(dithered(grid), -s)[:k])
    assert set(seen.values()) == {k // step} and len(seen) == n


class Every:
    """A generator that gives each number in turn."""

    def __init__(self):
        self.next = -1

    def integers(self, n):
        self.next += 1
        return self.next % n


@pytest.mark.parametrize("s", [2, 3, 4])
@pytest.mark.parametrize("always", [0, 1])
def test_of_a_line_every_sth_position_is_kept(s, always):
    """Beside the leading ones, as many in every draw, from any offset that has room, and all equally often but some at the ends."""
    for m in range(s, 4 * s + 3):
        found = Counter()
        for step in range(100):
            (at,) = draw(key(step), (m,), [1 / s], always)
            first = int(at.kept[always]) - always
            assert at.stride == s and at.k == always + m // s
            assert at.kept.tolist() == [*range(always), *range(always + first, always + first + s * (m // s), s)]
            found[first] += 1
        assert set(found) == set(range(s + m % s))
        (fixed,) = draw(key(3), (m,), [1 / s], always, "fixed")
        assert fixed.stride == s and int(fixed.kept[always]) == always

        turns, ends = Every(), m % s
        firsts = [offset(m, s, turns) for _ in range(2 * s)]
        seen = Counter(first + s * i for first in firsts for i in range(m // s))
        assert [seen[p] for p in range(m)] == [1] * ends + [2] * (m - 2 * ends) + [1] * ends


def test_what_else_is_drawn_knows_no_stride():
    others = [
        draw(key(), (4, 4), [0.5]),
        draw(key(), (16,), [0.4]),
        draw(key(), (16,), [0.5, 0.25]),
        draw(key(), (16,), [0.5, 0.5], masks="disjoint"),
        draw(key(), (16,), [0.5], sampler="random"),
        draw(key(), (16,), [0.5], factors=[(2,)]),
        draw(key(), (1,), [0.5]),
        draw(key(), (16,), [1.0]),
    ]
    assert {at.stride for drawn in others for at in drawn} == {0}
    own = [draw(key(step), (16,), [0.5, 0.5, 0.5], masks="independent") for step in range(8)]
    assert {at.stride for drawn in own for at in drawn} == {2} and any(len({int(at.kept[0]) for at in drawn}) > 1 for drawn in own)


def test_half_of_an_image_is_a_checkerboard_and_a_quarter_a_stride():
    half, quarter = (set(dithered((6, 6))[:n].tolist()) for n in (18, 9))
    assert half == {6 * i + j for i in range(6) for j in range(6) if (i + j) % 2 == 0}
    assert quarter == {6 * i + j for i in range(0, 6, 2) for j in range(0, 6, 2)}


def test_half_of_a_video_is_a_checkerboard_in_three_dimensions():
    kept = set(dithered((4, 4, 4))[:32].tolist())
    assert kept == {16 * t + 4 * i + j for t in range(4) for i in range(4) for j in range(4) if (t + i + j) % 2 == 0}


def test_frames_are_kept_whole():
    (at,) = draw(key(), (8, 3, 3), [0.5], sampler="frames")
    frames = Counter(i // 9 for i in at.kept.tolist())
    assert len(frames) == 4 and set(frames.values()) == {9}


def test_a_draw_depends_on_seed_rank_and_step_alone():
    def kept(seed=0, **k):
        return draw(key(**k), (16, 16), [0.5], sampler="random", seed=seed)[0].kept.tolist()

    torch.manual_seed(0)
    first = kept()
    torch.manual_seed(1)
    assert kept() == first
    assert kept(step=1) != first and kept(rank=1) != first and kept(seed=1) != first


def test_tick_counts_steps():
    step = torch.zeros((), dtype=torch.int64)
    assert [positions.tick(step).tolist() for _ in range(3)] == [[0, 0], [0, 1], [0, 2]] and step == 3


def test_layers_with_fewer_positions_keep_some_of_those_with_more():
    few, more, most = draw(key(3), (7, 7), [0.25, 0.5, 0.75])
    assert set(few.kept.tolist()) < set(more.kept.tolist()) < set(most.kept.tolist())


def test_disjoint_masks_are_disjoint_and_independent_ones_differ():
    rng = np.random.default_rng(0)
    one, two = orders((8, 8), [32, 32], "grid", "disjoint", rng)
    assert not set(one[:32]) & set(two[:32]), "equation 10: nothing would flow through both layers"
    draws = orders((9, 7), [20] * 6, "grid", "independent", rng)
    assert len({tuple(sorted(o[:20])) for o in draws}) > 1


def test_ramps_are_the_papers():
    assert keeps(0.5, 8, "increasing") == pytest.approx([0.25, 0.32, 0.39, 0.46, 0.54, 0.61, 0.68, 0.75], abs=0.01)
    assert keeps(0.5, 8, "decreasing") == keeps(0.5, 8, "increasing")[::-1]
    assert keeps(0.5, 3) == [0.5] * 3 and max(keeps(0.9, 5, "increasing")) <= 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), ratios, st.integers(1, 3))
def test_an_enlarged_mask_keeps_whole_cells(grid, keep, f):
    factor = (f,) * len(grid)
    (at,) = draw(key(), grid, [keep], factors=[factor, factor])
    middle = at.coarse
    assert at.grid == tuple(g * f * f for g in grid) and middle.coarse.grid == grid and at.factor == factor
    for fine in (at, middle):
        assert torch.equal(fine.index[0][fine.where], torch.arange(fine.n))
        coarse = fine.coarse
        mask = torch.zeros(coarse.n, dtype=torch.bool)
        mask[coarse.kept] = True
        big = mask.reshape(coarse.grid)
        for axis in range(len(grid)):
            big = big.repeat_interleave(f, axis)
        want = big.reshape(-1).nonzero().flatten()
        assert fine.kept.sort().values.tolist() == want.tolist()
        cells = fine.index[0].reshape(coarse.n, -1)
        assert torch.equal(cells.min(1).values, torch.tensor([c.min() for c in positions._finer(coarse.grid, factor)])[coarse.index[0]])


def test_positions_by_hand():
    at = Positions.of([5, 1], (2, 3))
    assert at.kept.tolist() == [1, 5] and at.dropped.tolist() == [0, 2, 3, 4]
    with pytest.raises(ValueError, match=r"must lie in 0\.\.5"):
        Positions.of([6], (2, 3))
    assert enlarge(at.index.numpy(), (2, 3), (1, 1))[0].tolist() == [1, 5, 0, 2, 3, 4]


def test_the_ops_are_what_compilers_expect():
    torch.library.opcheck(torch.ops.halfback.tick.default, (torch.zeros((), dtype=torch.int64),))
    args = (key(), [4, 4], [2, 2], 0, [8], "grid", "shared", 0, 0, torch.device("cpu"), "")
    torch.library.opcheck(torch.ops.halfback.draw.default, args)


def test_no_cuda_graph_repeats_a_draw():
    """tests/test_cuda.py runs them; here is no GPU."""
    assert all(torch.Tag.cudagraph_unsafe in getattr(torch.ops.halfback, name).default.tags for name in ("tick", "draw"))
