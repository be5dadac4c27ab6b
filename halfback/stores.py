"""How a layer holds its input until backward: one interface, whatever is kept.

    held  = store.compress(x, axis, seed)     the tensors to hold; axis is the channel axis of the layer's input
    x_hat = store.restore(held, layout)       dense, with the strides that x had
    store.bytes(layout, axis)                 exactly what compress would hold, without computing it

    Elements   the kept values and one bit an element          keep * size + n / 8
    Channels   the kept channels and their index               keep * size + 4 C keep
    Rows       the kept rows and their index                   keep * size + 4 N keep
    FewBits    all elements, in 4 or 8 bits, scaled by groups  n * (bits + 32 / group) / 8
    Signs      one bit an element: not x <= 0                  n / 8

Shapes: n elements, C channels, N rows (all axes but the channel axis).

NOTE [what x_hat is]
 1. Largest entries come back as they were, all others as zero: biased towards zero, with the least error for the entries held.
 2. Random entries come back divided by the chance that they had of being kept (n / k), so that E[x_hat] = x. Rows that are always kept are
    not divided. They are held divided, in x's dtype.
 3. All but Rows go through x in the order of memory, so channels_last costs no copy. An x that is not dense (expanded, sliced) is made
    contiguous first, and `Layout.of` describes it as it is then.
 4. No store looks whether it holds less than x itself: whoever chooses asks `bytes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import keep as _keep
from . import kernels
from .keep import BLOCK

Held = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """What has to be known of a tensor to make another like it, without holding it."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Layout:
        stride = x.stride() if is_dense(x) else torch.empty(x.shape, device="meta").stride()
        return Layout(x.shape, tuple(stride), x.dtype, x.device)

    @staticmethod
    def contiguous(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Layout:
        return Layout(torch.Size(size), tuple([math.prod(size[i + 1 :]) for i in range(len(size))]), dtype, device)

    @property
    def n(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.n * self.dtype.itemsize

    @property
    def order(self) -> list[int]:
        """The axes, from the one with the longest stride to the one with the shortest."""
        return sorted(range(len(self.size)), key=lambda i: (-self.stride[i], -self.size[i]))

    def of_flat(self, flat: Tensor) -> Tensor:
        """Elements in the order of memory, in this layout: a view."""
        if torch.compiler.is_compiling():  # which cannot see through as_strided
            order = self.order
            return flat.view([self.size[i] for i in order]).permute([order.index(i) for i in range(len(order))])
        return flat.as_strided(self.size, self.stride)

    def zeros(self) -> Tensor:
        return self.of_flat(torch.zeros(self.n, dtype=self.dtype, device=self.device))


def is_dense(x: Tensor) -> bool:
    """Whether x fills one piece of memory, each element once, in some order of its axes."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if size == 0:
            return x.is_contiguous()
        if stride != expected:
            return False
        expected *= size
    return True


def flat(x: Tensor) -> Tensor:
    """x in the order of memory: a view if x is dense, else a copy."""
    x = x.detach() if is_dense(x) else x.detach().contiguous()
    return x.as_strided((x.numel(),), (1,))


def _around(x: Tensor, axis: int) -> Tensor:
    """(A, C, B) in the order of memory: what lies before, in, and behind an axis. A view if x is dense, else a copy."""
    channels, n = x.shape[axis], x.numel()
    behind = Layout.of(x).stride[axis] if n and channels > 1 else 1
    return flat(x).view(n // (channels * behind) if n else 0, channels, behind)


@dataclass(frozen=True)
class Elements:
    keep: float
    select: str = "largest"
    block: int | None = BLOCK

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> Held:
        x = flat(x)
        if self.select == "largest":
            return tuple(kernels.select(x, self.keep, self.block))
        full, each, rest, last = counts = _keep.counts(self.keep, x.numel(), self.block)
        if full > 1 and (x.numel() - rest) // full % 8 == 0:
            values, bits = self._by_blocks(x, seed, *counts[1:])
        else:
            mask = _keep.elements(x, self.keep, self.select, self.block, seed)
            values, bits = kernels.reference.take(x, mask, full * each + last), kernels.pack_bits(mask)
        if full:
            values[: full * each].mul_((x.numel() - rest) / (full * each))
        if last:  # a block of its own: n / k differs by rounding
            values[full * each :].mul_(rest / last)
        return values, bits

    def _by_blocks(self, x: Tensor, seed: int, each: int, rest: int, last: int) -> Held:
        """What keep.elements says, without a mask of all of x: only its kept elements are gone through, and its bits are written."""
        pattern, offsets, tail = _keep.drawn(x.numel(), self.keep, self.block, seed, x.device)
        eights = torch.cat([pattern, pattern]).unfold(0, 8, 1)  # a byte of bits may begin at any place of the pattern
        bytes_ = kernels.pack_bits(eights.reshape(-1)).unfold(0, len(pattern) - 7, 1)[:, ::8]  # (offset, byte of the block)
        index, bits = _keep.turned_index(pattern, offsets, each), bytes_.index_select(0, offsets).view(-1)
        if last:
            index = torch.cat([index, _keep.index(tail, last) + (x.numel() - rest)])
            bits = torch.cat([bits, kernels.pack_bits(tail)])
        return x.index_select(0, index), bits

    def restore(self, held: Held, layout: Layout) -> Tensor:
        values, bits = held
        return layout.of_flat(kernels.restore(values, bits, layout.n, self.keep, self.block))

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        return _keep.total(self.keep, layout.n, self.block) * layout.dtype.itemsize + -(-layout.n // 8)


@dataclass(frozen=True)
class Channels:
    """Held: (kept channels, their index). The kept channels are (A, k, B): A elements of axes before the channels in memory, B behind.
    channels_last, and channels in the last axis, have B = 1."""

    keep: float
    select: str = "largest"

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> Held:
        index = _keep.channels(x.detach(), self.keep, self.select, axis, seed)
        values = _around(x, axis).index_select(1, index)
        if self.select == "random":
            values.mul_(x.shape[axis] / max(1, index.numel()))
        return values, index

    def restore(self, held: Held, layout: Layout) -> Tensor:
        values, index = held
        if layout.n == 0:
            return layout.zeros()
        before, _, behind = values.shape
        x_hat = values.new_zeros(before, layout.n // (before * behind), behind)
        return layout.of_flat(x_hat.index_copy_(1, index.long(), values))

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        channels = layout.size[axis]
        row = _keep.row_count(layout.size, axis) * layout.dtype.itemsize
        return _keep.count(self.keep, channels) * (row + _index_size(channels))


@dataclass(frozen=True)
class Rows:
    """Held: (kept rows, their index). The rows are (k, C) and as many axes of size 1 as x had behind its channels.

    `always` counts the first rows of each sample that a random selection keeps anyway (class tokens)."""

    keep: float
    select: str = "largest"
    always: int = 1

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> Held:
        x = x.detach()
        index = _keep.rows(x, self.keep, self.select, axis, self.always, seed)
        values = x.movedim(axis, -1).reshape(_keep.row_count(x.shape, axis), x.shape[axis]).index_select(0, index)
        if self.select == "random":
            values = self._unbiased(values, index, x.shape, axis)
        return values.view(*values.shape, *[1] * (x.dim() - 1 - axis % x.dim())), index

    def _unbiased(self, values: Tensor, index: Tensor, shape: torch.Size, axis: int) -> Tensor:
        period, first = _keep.fixed_rows(shape, axis, self.always)
        scaled = values * _keep.row_scale(shape, self.keep, axis, self.always)
        return torch.where((index % period < first)[:, None], values, scaled)

    def rows(self, held: Held, layout: Layout) -> Held:
        """(values (k, C), index (k,)): a linear layer's dW needs these rows of dy and no others."""
        values, index = held
        return values.flatten(1), index

    def restore(self, held: Held, layout: Layout) -> Tensor:
        values, index = self.rows(held, layout)
        size, axis = list(layout.size), len(layout.size) + 1 - held[0].dim()
        channels = size.pop(axis)
        dense = values.new_zeros(math.prod(size), channels).index_copy_(0, index.long(), values)
        x_hat = dense.view(*size, channels).movedim(-1, axis)
        return x_hat if x_hat.stride() == layout.stride else layout.zeros().copy_(x_hat)

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        n = _keep.row_count(layout.size, axis)
        k = _keep.random_rows(layout.size, self.keep, axis, self.always) if self.select == "random" else _keep.count(self.keep, n)
        return k * (layout.size[axis] * layout.dtype.itemsize + _index_size(n))


@dataclass(frozen=True)
class FewBits:
    """All elements in `bits` bits. `stochastic` rounds by noise, so that E[x_hat] = x."""

    bits: int = 4
    stochastic: bool = False

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> Held:
        return tuple(kernels.quantise(flat(x), self.bits, kernels.GROUP, seed if self.stochastic else None))

    def restore(self, held: Held, layout: Layout) -> Tensor:
        codes, scales = held
        return layout.of_flat(kernels.dequantise(codes, scales, layout.n, self.bits, kernels.GROUP, layout.dtype))

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        return -(-layout.n * self.bits // 8) + 4 * -(-layout.n // kernels.GROUP)


@dataclass(frozen=True)
class Signs:
    """Which elements are positive; they come back as 1, all others as 0: all that ReLU's backward needs."""

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> Held:
        return (kernels.signs(flat(x)),)

    def restore(self, held: Held, layout: Layout) -> Tensor:
        return layout.of_flat(kernels.unpack_bits(held[0], layout.n).to(layout.dtype))

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        return -(-layout.n // 8)


Store = Elements | Channels | Rows | FewBits | Signs


def _index_size(n: int) -> int:
    """Bytes of one index below n, as keep.index makes it."""
    return 4 if n <= 2**31 else 8
