"""Which positions keep their backward pass.

A *grid* is the shape in which positions lie: (n,) for text, (H, W) for an image, (T, H, W) for a video. In front
of the grid may stand `always` tokens (class, distillation, register) that are kept in every step.

A *sampler* puts the n positions of a grid in an order, anew in every step; a layer that keeps k of them keeps the first
k. So layers with different ratios are nested, and one draw serves a whole forward.

    grid     the order of ordered dithering (Bayer), entered at a random phase: half of it is a checkerboard, a quarter
             every second row and column. Over all phases every position is kept equally often, exactly.
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

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SAMPLERS = ("grid", "random", "frames", "fixed")
RAMPS = ("uniform", "increasing", "decreasing")
MASKS = ("shared", "independent", "disjoint")


@dataclass(frozen=True)
class Positions:
    """A split of n positions in two.

    index   (3, n) int64. Row 0: the kept positions, then the dropped ones. Row 1: where each position stands in row 0.
            Row 2: random numbers of this draw, for whatever else has to be chosen (attention heads).
    coarse  the same split on a grid that is `factor` times coarser; each of its cells owns adjacent entries of row 0.
    """

    index: Tensor
    k: int
    grid: tuple[int, ...]
    always: int = 0
    coarse: Positions | None = None
    factor: tuple[int, ...] = ()

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

    def enlarged(self, factor: tuple[int, ...]) -> Positions:
        """The split of a grid `factor` times finer: a cell's sub-positions are kept with it and stay together."""
        fine = tuple(g * f for g, f in zip(self.grid, factor, strict=True))
        cells = math.prod(factor)
        device = self.index.device

        def coordinates(flat: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
            out = []
            for extent in reversed(shape):
                out.append(flat % extent)
                flat = flat // extent
            return out[::-1]

        def flat(coordinate: list[Tensor], shape: tuple[int, ...]) -> Tensor:
            out = coordinate[0]
            for c, extent in zip(coordinate[1:], shape[1:], strict=True):
                out = out * extent + c
            return out

        cell = coordinates(self.index[0].unsqueeze(1), self.grid)
        sub = coordinates(torch.arange(cells, device=device).unsqueeze(0), factor)
        order = flat([c * f + s for c, f, s in zip(cell, factor, sub, strict=True)], fine).reshape(-1)
        position = coordinates(torch.arange(math.prod(fine), device=device), fine)
        owner = flat([p // f for p, f in zip(position, factor, strict=True)], self.grid)
        within = flat([p % f for p, f in zip(position, factor, strict=True)], factor)
        where = self.index[1].index_select(0, owner) * cells + within
        return Positions(torch.stack((order, where, self.index[2].repeat_interleave(cells))), self.k * cells, fine, 0, self, factor)

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
    return (p.index, p.coarse), (p.k, p.grid, p.always, p.factor)


def _unflatten(children, context) -> Positions:
    index, coarse = children
    k, grid, always, factor = context
    return Positions(index, k, grid, always, coarse, factor)


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


def orders(grid: tuple[int, ...], counts: Sequence[int], sampler: str, masks: str, rng: np.random.Generator) -> list[np.ndarray]:
    """For each count an order of the grid's positions whose first `count` are kept."""
    n = math.prod(grid)
    if sampler == "random":
        base, step = rng.permutation(n), 1
    elif sampler == "frames":
        frame = n // grid[0]
        base = (dithered(grid[:1])[:, None] * frame + np.arange(frame)[None, :]).reshape(-1)
        step = frame * starts(grid[0], [c // frame for c in counts])
    else:
        base, step = dithered(grid), starts(n, counts)

    def phase() -> int:
        return 0 if sampler == "fixed" else int(rng.integers(n // step)) * step

    first = phase()
    shifts = [first] * len(counts)
    if masks == "independent":
        shifts = [phase() for _ in counts]
    elif masks == "disjoint":
        shifts = [first + sum(counts[:i]) for i in range(len(counts))]
    return [np.roll(base, -(s % n)) for s in shifts]


def _pack(order: np.ndarray, k: int, rng: np.random.Generator | None = None) -> np.ndarray:
    order = np.concatenate([np.sort(order[:k]), np.sort(order[k:])])
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    noise = rng.integers(2**31, size=len(order)) if rng is not None else np.zeros_like(order)
    return np.stack([order, where, noise])


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@torch.library.custom_op("halfback::tick", mutates_args=("step",))
def tick(step: Tensor) -> Tensor:
    """The key of this step's draws, and on to the next step. Both are CPU tensors."""
    key = torch.tensor([_rank(), int(step)])
    step += 1
    return key


@tick.register_fake
def _(step):
    return torch.empty(2, dtype=torch.int64)


@torch.library.custom_op("halfback::draw", mutates_args=())
def _draw(
    key: Tensor,
    grid: Sequence[int],
    always: int,
    counts: Sequence[int],
    sampler: str,
    masks: str,
    seed: int,
    device: torch.device,
) -> Tensor:
    rng = np.random.default_rng([seed % 2**63, *key.tolist()])
    front = np.arange(always)
    rows = [
        _pack(np.concatenate([front, always + order]), always + c, rng)
        for order, c in zip(orders(tuple(grid), counts, sampler, masks, rng), counts, strict=True)
    ]
    drawn = torch.from_numpy(np.stack(rows))
    if device.type == "cuda":
        drawn = drawn.pin_memory()
    return drawn.to(device, non_blocking=True)


@_draw.register_fake
def _(key, grid, always, counts, sampler, masks, seed, device):
    n = always + math.prod(grid)
    return torch.empty((len(counts), 3, n), dtype=torch.int64, device=device)


def draw(
    key: Tensor,
    grid: tuple[int, ...],
    ratios: Sequence[float],
    always: int = 0,
    sampler: str = "grid",
    masks: str = "shared",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Positions]:
    """One split for each keep ratio, drawn together: a pure function of its arguments."""
    counts = [count(r, grid, sampler) for r in ratios]
    packed = torch.ops.halfback.draw(key, list(grid), always, counts, sampler, masks, seed, torch.device(device))
    return [Positions(packed[i], always + c, tuple(grid), always) for i, c in enumerate(counts)]
