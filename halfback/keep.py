"""Which entries of a tensor are kept.

    elements   of a flat tensor: the k of largest magnitude of all of it (Min-K, block=None), or of each block of consecutive
               elements by itself (Parallel Min-K); or k random ones of as many
    channels   the k with the largest L2 norm over everything else, or k random ones
    rows       the same of positions: one row is all channels at one place of one sample

k is count(keep, n), for every selection and everywhere, so that what is held has a size known beforehand.

NOTE [one order]
 1. Magnitudes are compared as integers: the bits of |x| without the sign order like |x|, and NaN stands above infinity. So NaN is kept and
    reaches the weight gradient, the order is total, and counting is exact at any size.
 2. Among equal keys the lower index is kept.
 3. Random means largest by a hash of (seed, index), never torch's generator: the user's random streams are neither read nor advanced,
    and a kernel can compute the same.
 4. Nothing here waits for the device, and no shape depends on data.

NOTE [random elements]
 1. One pattern of k out of a block is drawn, and each block turns it by an offset of its own: element i of block b is kept where
    pattern[(i + offset_b) % block] is. The shorter last block has a pattern of its own. So noise is made for a block and for the number
    of blocks, not for every element.
 2. Whatever the pattern is, the offset alone gives every element of a block the chance k / block.
 3. Over seeds two elements are kept together as often as if every block were drawn by itself: in one block because the pattern is
    random, in two because their offsets are independent. So the mean and the variance of anything linear in the kept elements, as a
    weight gradient is, are those of blocks drawn by themselves.
 4. Three and more are not. Within one draw all blocks keep elements at the same distances, so where x repeats with a period, a draw is
    worse or better in all blocks at once: errors of single draws spread more around the same variance.
 5. One block (block=None, or a tensor no longer than that) keeps the pattern as it is drawn.

Paper: "DropIT: Dropping Intermediate Tensors for Memory-Efficient DNN Training", ICLR 2023 (Min-K; Parallel Min-K is its blocked form).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

SELECTS = ("largest", "random")
OF = ("elements", "channels", "rows")
# A warp holds 1024 elements in registers, so the fused selection needs no shared memory. Smaller blocks select worse, larger ones slower.
BLOCK = 1024

_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_DECIMALS = 10**9

Word = TypeVar("Word", int, Tensor)


# How many


def count(keep: float, n: int) -> int:
    """max(1, floor(keep * n)), of keep as it is written: 0.29 of 100 is 29, though 0.29 * 100 is 28.999999999999996 in floating point.

    Integers of nine decimals, not a Fraction: torch.compile follows them, with a symbolic n too."""
    if n == 0:
        return 0
    return max(1, round(keep * _DECIMALS) * n // _DECIMALS)


def counts(keep: float, n: int, block: int | None) -> tuple[int, int, int, int]:
    """(full blocks, kept in each, elements of the shorter last block, kept of those) of n elements."""
    size = max(1, n if block is None else min(block, n))
    full, rest = n // size, n % size
    return full, count(keep, size) if full else 0, rest, count(keep, rest)


def total(keep: float, n: int, block: int | None) -> int:
    """How many of n elements are kept."""
    full, each, _, last = counts(keep, n, block)
    return full * each + last


# In which order


def keys(x: Tensor) -> Tensor:
    """The bits of |x| as integers of the same width. See rule 1."""
    integer = _INTEGERS.get(x.dtype)
    if integer is None:
        allowed = ", ".join(str(d) for d in _INTEGERS)
        raise TypeError(f"keep.keys(): entries of {x.dtype} have no order by magnitude here. Allowed: {allowed}.")
    return x.view(integer) & torch.iinfo(integer).max


def mix(h: Word) -> Word:
    """murmur3's finaliser: a bijection of 32-bit words, held in integers of 64 (products wrap, and their low half is right)."""
    h = h & 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def salt(seed: int) -> int:
    """32 bits of a seed of any size. Neighbouring seeds are far apart."""
    return mix(seed ^ mix((seed >> 32) + 0x9E3779B9))


def noise(n: int, seed: int, device: torch.device | str) -> Tensor:
    """A 32-bit hash of (seed, index) for n indices, as int64. Below 2**32 indices no two are equal."""
    return mix(torch.arange(n, device=device) * 0x9E3779B1 + salt(seed))


# Which


def largest(keys: Tensor, k: int) -> Tensor:
    """True at the k largest of each row (the last axis). See rule 2."""
    if k == 0 or keys.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = keys.topk(k, sorted=False).values.amin(-1, keepdim=True)
    above, equal = keys > threshold, keys == threshold
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))


def index(mask: Tensor, k: int) -> Tensor:
    """Where a 1-D mask of exactly k True is True, sorted, int32 if it fits. (`nonzero_static` knows its size and does not wait.)"""
    found = torch.nonzero_static(mask, size=k).squeeze(1)
    return found.to(torch.int32) if mask.numel() <= 2**31 else found


def elements(x: Tensor, keep: float, select: str = "largest", block: int | None = BLOCK, seed: int = 0) -> Tensor:
    """A mask over flat x: count(keep, size) of each block."""
    if _checked(select) == "random":
        pattern, offsets, tail = drawn(x.numel(), keep, block, seed, x.device)
        head = turned(pattern, offsets).view(-1) if len(offsets) else pattern
        return torch.cat([head, tail]) if len(tail) else head
    order = keys(x)
    full, each, rest, last = counts(keep, x.numel(), block)
    if rest == 0:
        return largest(order.view(max(1, full), -1), each).view(-1)
    head, tail = order.split([order.numel() - rest, rest])
    return torch.cat([largest(head.view(full, -1), each).view(-1), largest(tail, last)])


def drawn(n: int, keep: float, block: int | None, seed: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """(pattern of a block, offset of each full block, pattern of the last block), of n elements. One block has no offset. See
    NOTE [random elements]."""
    full, each, rest, last = counts(keep, n, block)
    size, blocks = (n - rest) // max(1, full), full if full > 1 else 0
    head, tail, turns = noise(size + rest + blocks, seed, device).split([size, rest, blocks])
    return _top(head, each), turns % max(1, size), _top(tail, last)


def _top(noise: Tensor, k: int) -> Tensor:
    """`largest` of keys that are all different: a third of its kernels."""
    return noise >= noise.topk(k, sorted=False).values.amin(-1, keepdim=True) if k else noise.to(torch.bool)


def turned(line: Tensor, offsets: Tensor) -> Tensor:
    """(offsets, line): the line from each offset on, and around."""
    return torch.cat([line, line]).unfold(0, len(line), 1).index_select(0, offsets)


def turned_index(pattern: Tensor, offsets: Tensor, k: int) -> Tensor:
    """Where turned(pattern, offsets) is True, of all of it, sorted, int32 if it fits. Goes through what is kept, not through all."""
    size, n = len(pattern), len(pattern) * len(offsets)
    at = index(pattern, k)
    offsets = offsets.to(at.dtype)
    first = torch.searchsorted(at, offsets)  # the first kept one from the offset on is the block's first
    found = torch.cat([at, at + size]).unfold(0, k, 1).index_select(0, first)
    start = torch.arange(0, n, size, dtype=torch.int32 if n <= 2**31 else torch.int64, device=pattern.device)
    return found.to(start.dtype).add_((start - offsets)[:, None]).view(-1)


def channels(x: Tensor, keep: float, select: str = "largest", axis: int = -1, seed: int = 0) -> Tensor:
    """The kept channels' index, sorted."""
    n = x.shape[axis]
    if _checked(select) == "random":
        order = noise(n, seed, x.device)
    else:
        others = [d for d in range(x.dim()) if d != axis % x.dim()]
        order = keys(_norm(x, others))
    k = count(keep, n)
    return index(largest(order, k), k)


def rows(x: Tensor, keep: float, select: str = "largest", axis: int = -1, always: int = 0, seed: int = 0) -> Tensor:
    """The kept rows' index, sorted. Random rows are drawn over the whole batch, behind those that `fixed_rows` counts."""
    n = row_count(x.shape, axis)
    if _checked(select) == "largest":
        k = count(keep, n)
        return index(largest(keys(_norm(x, [axis])).reshape(-1), k), k)
    period, first = fixed_rows(x.shape, axis, always)
    order = noise(n, seed, x.device)
    if first:
        order = torch.where(torch.arange(n, device=x.device) % period < first, 2**32, order)
    k = random_rows(x.shape, keep, axis, always)
    return index(largest(order, k), k)


def row_count(shape: torch.Size, axis: int = -1) -> int:
    n = 1
    for d, size in enumerate(shape):
        n = n if d == axis % len(shape) else n * size
    return n


def fixed_rows(shape: torch.Size, axis: int, always: int) -> tuple[int, int]:
    """(rows of a sample, the first so many of which are always kept): class tokens, in (batch, ..., tokens, channels) only."""
    if len(shape) < 3 or axis % len(shape) != len(shape) - 1:
        return 1, 0
    period = row_count(shape[1:])
    return max(1, period), min(always, period)


def random_rows(shape: torch.Size, keep: float, axis: int, always: int) -> int:
    """How many rows a random selection keeps: as many as any other, unless more are always kept."""
    return max(count(keep, row_count(shape, axis)), _fixed(shape, axis, always))


def row_scale(shape: torch.Size, keep: float, axis: int, always: int) -> float:
    """What makes randomly kept rows an unbiased sample of those that were not kept anyway. (1 where only those are kept: their sum
    is then biased, and more has to be kept.)"""
    fixed = _fixed(shape, axis, always)
    drawn = random_rows(shape, keep, axis, always) - fixed
    return (row_count(shape, axis) - fixed) / drawn if drawn else 1.0


def _fixed(shape: torch.Size, axis: int, always: int) -> int:
    _, first = fixed_rows(shape, axis, always)
    return first * shape[0] if first else 0


def _norm(x: Tensor, axes: list[int]) -> Tensor:
    """L2 norms, accumulated in fp32 or wider: squares of fp16 overflow."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not axes:  # vector_norm reads an empty list as "all"
        return x.to(wide).abs()
    return torch.linalg.vector_norm(x, dim=axes, dtype=wide)


def _checked(select: str) -> str:
    if select not in SELECTS:
        raise ValueError(f"select={select!r} is not known. Allowed: {', '.join(map(repr, SELECTS))}.")
    return select
