"""Which positions keep their backward pass.

A *grid* is the shape in which positions lie: (n,) for text, (H, W) for an image, (T, H, W) for a video. In front
of the grid may stand `always` tokens (class, distillation, register) that are kept in every step.

A *sampler* puts the n positions of a grid in an order, anew in every step; a layer that keeps k of them keeps the first
k. So layers with different ratios are nested, and one draw serves a whole forward.

    grid     the order of ordered dithering (Bayer), entered at a random phase: half of it is a checkerboard, a quarter
             every second row and column. Over all phases every position is kept equally often, exactly. On a line, as of
             text, a ratio of 1/s that all layers share keeps every s-th position, see `offset`.
    random   a random permutation
    frames   whole frames of a (T, H, W) grid, spread as `grid` spreads them
    fixed    always the same order, for experiments

NOTE [masks are ours]
 1. A draw depends on (seed, rank, step) alone. The user's random streams are neither read nor advanced.
 2. The step lives in a CPU tensor that the op `halfback::tick` advances, so a compiled graph draws afresh each time it runs. The op
    `halfback::draw` is a pure function of what `tick` returned: a recomputed block draws what its forward drew.
 3. Kept indices are sorted: a causal mask among kept tokens is still causal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .notes import LISTENERS, rank

SAMPLERS = ("grid", "random", "frames", "fixed")
RAMPS = ("uniform", "increasing", "decreasing")
MASKS = ("shared", "independent", "disjoint")


@dataclass(frozen=True)
class Positions:
    """A split of n positions in two.

    index   (2, n) int64. Row 0: the kept positions, then the dropped ones. Row 1: where each position stands in row 0.
    noise   one random number of this draw, for whatever else has to be chosen (attention heads)
    stride  behind those that are always kept, every stride-th position is kept, from any on; 0: that is not known
    coarse  the same split on a grid that is `factor` times coarser; each of its cells owns adjacent entries of row 0.
    """

    index: Tensor
    k: int
    grid: tuple[int, ...]
    always: int = 0
    coarse: Positions | None = None
    factor: tuple[int, ...] = ()
    noise: Tensor | None = None
    stride: int = 0

    @property
    def n(self) -> int:
        return self.always + math.prod(self.grid)

    @property
    def kept(self) -> Tensor:
        return self.index[0, : self.k]

    @property
    def dropped(self) -> Tensor:
        return self.index[0, self.k :]

    @property
    def where(self) -> Tensor:
        """Where each position stands in (kept, dropped)."""
        return self.index[1]

    @staticmethod
    def of(kept: Sequence[int], grid: Sequence[int], always: int = 0) -> Positions:
        """The split that keeps these positions, given by hand."""
        grid = tuple(grid)
        n = always + math.prod(grid)
        chosen = np.unique(np.asarray(kept, dtype=np.int64))
        if chosen.size == 0 or chosen[0] < 0 or chosen[-1] >= n:
            raise ValueError(f"Positions.of(): kept positions must lie in 0..{n - 1} and be at least one, found {list(kept)[:8]}.")
        order = np.concatenate([chosen, np.setdiff1d(np.arange(n), chosen)])
        return Positions(torch.from_numpy(_pack(order, len(chosen))), len(chosen), grid, always)


def _flatten(p: Positions):
    return (p.index, p.coarse, p.noise), (p.k, p.grid, p.always, p.factor, p.stride)


def _unflatten(children, context) -> Positions:
    index, coarse, noise = children
    k, grid, always, factor, stride = context
    return Positions(index, k, grid, always, coarse, factor, noise, stride)


pytree.register_pytree_node(Positions, _flatten, _unflatten, serialized_type_name="halfback.Positions")


# How many


def keeps(keep: float, layers: int, ramp: str = "uniform") -> list[float]:
    """The keep ratio of each of `layers` layers: all the same, or the paper's linear ramps around the mean."""
    if ramp == "uniform" or layers == 1:
        return [keep] * layers
    half = min(keep, 1 - keep) / 2
    up = [keep - half + 2 * half * i / (layers - 1) for i in range(layers)]
    return up if ramp == "increasing" else up[::-1]


def count(keep: float, grid: Sequence[int], sampler: str = "grid") -> int:
    """How many of the grid's positions are kept: keep * n, rounded, at least one (whole frames for `frames`)."""
    if sampler == "frames":
        return max(1, round(keep * grid[0])) * math.prod(grid[1:])
    return max(1, round(keep * math.prod(grid)))


def stride_of(ratios: Sequence[float], grid: Sequence[int], sampler: str = "grid", masks: str = "shared") -> int:
    """s, where every s-th position of a line is kept, n // s of them (one more would leave some offsets no room, and so positions that
    are never kept); else 0."""
    s = round(1 / ratios[0])
    line = len(grid) == 1 and grid[0] >= s > 1 and sampler in ("grid", "fixed") and masks != "disjoint"
    return s if line and all(abs(s * r - 1) < 1e-6 for r in ratios) else 0


# Which


@functools.lru_cache(maxsize=64)
def dithered(grid: tuple[int, ...]) -> np.ndarray:
    """The positions of a grid in the order of n-dimensional ordered dithering: any first part of it is spread evenly."""
    coordinates = np.indices(grid).reshape(len(grid), -1)
    mixed = [np.bitwise_xor.reduce(coordinates[d:], axis=0) for d in range(len(grid))]
    value = np.zeros(coordinates.shape[1], dtype=np.int64)
    for level in range(max(1, (max(grid) - 1).bit_length())):
        for axis in mixed:
            value = value * 2 + ((axis >> level) & 1)
    return np.argsort(value, kind="stable")


def starts(n: int, counts: Sequence[int]) -> int:
    """The phases at which `grid` may enter its order: multiples of this. Over all of them each position is kept equally often."""
    return math.gcd(n, *counts)


def offset(n: int, stride: int, rng: np.random.Generator) -> int:
    """The first of n // stride positions, `stride` apart: any place in a stride alike, and where the line has room to begin there or one
    stride later, either alike; so all are kept equally often, but the n % stride at each end, which are kept half as often."""
    later, place = divmod(int(rng.integers(2 * stride)), stride)
    return place + stride * later if place < n % stride else place


def progression(n: int, c: int, stride: int, first: int) -> np.ndarray:
    """An order of n positions that begins with c of them, `stride` apart."""
    kept = first + stride * np.arange(c)
    return np.concatenate([kept, np.setdiff1d(np.arange(n), kept)])


def phases(grid: tuple[int, ...], counts: Sequence[int], sampler: str, masks: str, rng: np.random.Generator, stride: int = 0) -> list[int]:
    """For each count where it enters the sampler's order; with a stride, its first position."""
    n = math.prod(grid)
    if sampler == "random":
        step = 1
    elif sampler == "frames":
        frame = n // grid[0]
        step = frame * starts(grid[0], [c // frame for c in counts])
    else:
        step = starts(n, counts)

    def phase() -> int:
        if sampler == "fixed":
            return 0
        return offset(n, stride, rng) if stride else int(rng.integers(n // step)) * step

    first = phase()
    if masks == "independent":
        return [first, *(phase() for _ in counts[1:])]
    return [(first + sum(counts[:i])) % n if masks == "disjoint" else first for i in range(len(counts))]


def base_order(grid: tuple[int, ...], sampler: str, rng: np.random.Generator) -> np.ndarray:
    if sampler == "random":
        return rng.permutation(math.prod(grid))
    if sampler == "frames":
        frame = math.prod(grid[1:])
        return (dithered(grid[:1])[:, None] * frame + np.arange(frame)[None, :]).reshape(-1)
    return dithered(grid)


def orders(grid: tuple[int, ...], counts: Sequence[int], sampler: str, masks: str, rng: np.random.Generator) -> list[np.ndarray]:
    """For each count an order of the grid's positions whose first `count` are kept."""
    shifts = phases(grid, counts, sampler, masks, rng)
    base = base_order(grid, sampler, rng)
    return [np.roll(base, -s) for s in shifts]


def _pack(order: np.ndarray, k: int) -> np.ndarray:
    order = np.concatenate([np.sort(order[:k]), np.sort(order[k:])])
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    return np.stack([order, where])


# Draws are made anew by every step. A CUDA graph (torch.compile(mode="reduce-overhead")) would record one, and repeat it.
ANEW = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("halfback::tick", mutates_args=("step",), tags=ANEW)
def tick(step: Tensor) -> Tensor:
    """The key of this step's draws, and on to the next step. Both are CPU tensors."""
    key = torch.tensor([rank(), int(step)])
    step += 1
    return key


@tick.register_fake
def _(step):
    return torch.empty(2, dtype=torch.int64)


@functools.lru_cache(maxsize=64)
def _finer(grid: tuple[int, ...], factor: tuple[int, ...]) -> np.ndarray:
    """For each cell of a grid the positions that it owns on the grid `factor` times finer."""
    fine = [g * f for g, f in zip(grid, factor, strict=True)]
    split = [x for pair in zip(grid, factor, strict=True) for x in pair]
    axes = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return np.arange(math.prod(fine)).reshape(split).transpose(axes).reshape(math.prod(grid), -1)


def enlarge(packed: np.ndarray, grid: tuple[int, ...], factor: tuple[int, ...]) -> np.ndarray:
    """The split of a grid `factor` times finer: a cell's positions are kept with it and stay together."""
    order = _finer(grid, factor)[packed[0]].reshape(-1)
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    return np.stack([order, where])


@torch.library.custom_op("halfback::draw", mutates_args=(), tags=ANEW)
def _draw(
    key: Tensor,
    grid: Sequence[int],
    factors: Sequence[int],
    always: int,
    counts: Sequence[int],
    sampler: str,
    masks: str,
    stride: int,
    seed: int,
    device: torch.device,
    owner: str,
) -> Tensor:
    listener = LISTENERS.get(owner)
    if listener is not None:
        listener.drew(tuple(grid), _grouped(factors, len(grid)), always, counts)
    rng = np.random.default_rng([seed % 2**63, *key.tolist()])
    layout = (tuple(grid), tuple(factors), always)
    noise = int(rng.integers(2**31))
    if sampler == "random":
        rows = [_all_levels(order, c, *layout) for order, c in zip(orders(layout[0], counts, sampler, masks, rng), counts, strict=True)]
        drawn = torch.from_numpy(np.stack(rows))
        drawn = (drawn.pin_memory() if device.type == "cuda" else drawn).to(device, non_blocking=True)
    else:
        shifts = phases(layout[0], counts, sampler, masks, rng, stride)
        drawn = torch.stack([_on_device(c, s, sampler, stride, *layout, device) for c, s in zip(counts, shifts, strict=True)])
    drawn[:, -1] = noise
    return drawn


def _all_levels(order: np.ndarray, c: int, grid: tuple[int, ...], factors: tuple[int, ...], always: int) -> np.ndarray:
    """A split and its enlargements, one behind the other, and a place for the noise."""
    levels, size = [_pack(np.concatenate([np.arange(always), always + order]), always + c)], grid
    for factor in _grouped(factors, len(size)):
        levels.append(enlarge(levels[-1], size, factor))
        size = tuple(g * f for g, f in zip(size, factor, strict=True))
    return np.concatenate([*(level.reshape(-1) for level in levels), [0]])


@functools.lru_cache(maxsize=256)
def _on_device(c: int, shift: int, sampler: str, stride: int, grid, factors, always: int, device: torch.device) -> Tensor:
    """Orders that differ by a phase only are few, so they stay where they are used. (Half of a grid has two, of a line up to three.)"""
    if stride:
        order = progression(grid[0], c, stride, shift)
    else:
        order = np.roll(base_order(grid, sampler, np.random.default_rng(0)), -shift)
    return torch.from_numpy(_all_levels(order, c, grid, factors, always)).to(device)


def _grouped(factors: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(factors[i : i + n]) for i in range(0, len(factors), n)]


def _levels(grid: tuple[int, ...], factors: Sequence[tuple[int, ...]], always: int) -> list[int]:
    """How many positions each level has, from the grid that is drawn to the finest."""
    sizes = [always + math.prod(grid)]
    for factor in factors:
        sizes.append(sizes[-1] * math.prod(factor))
    return sizes


@_draw.register_fake
def _(key, grid, factors, always, counts, sampler, masks, stride, seed, device, owner):
    n = 2 * sum(_levels(tuple(grid), _grouped(factors, len(grid)), always)) + 1
    return torch.empty((len(counts), n), dtype=torch.int64, device=device)


def draw(
    key: Tensor,
    grid: tuple[int, ...],
    ratios: Sequence[float],
    always: int = 0,
    sampler: str = "grid",
    masks: str = "shared",
    seed: int = 0,
    device: torch.device | str = "cpu",
    factors: Sequence[tuple[int, ...]] = (),
    owner: str = "",
) -> list[Positions]:
    """One split for each keep ratio, drawn together: a pure function of its arguments. With `factors` it is enlarged by them, one
    after the other, and the splits of all grids hang together by `coarse`."""
    stride = 0 if factors else stride_of(ratios, grid, sampler, masks)
    counts = [grid[0] // stride if stride else count(r, grid, sampler) for r in ratios]
    flat = [f for factor in factors for f in factor]
    packed = torch.ops.halfback.draw(key, list(grid), flat, always, counts, sampler, masks, stride, seed, torch.device(device), owner)
    sizes = _levels(grid, factors, always)
    drawn: list[Any] = []
    for i, c in enumerate(counts):
        at, size, k, start = None, tuple(grid), always + c, 0
        for level, n in enumerate(sizes):
            if level:
                size = tuple([g * f for g, f in zip(size, factors[level - 1], strict=True)])
                k = k * math.prod(factors[level - 1])
            index = packed[i, start : start + 2 * n].view(2, n)
            factor = tuple(factors[level - 1]) if level else ()
            at = Positions(index, k, size, always if level == 0 else 0, at, factor, packed[i, -1], stride)
            start += 2 * n
        drawn.append(at)
    return drawn
