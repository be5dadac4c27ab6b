"""What every kernel computes, in plain torch. fused.py has the same functions for a GPU.

All tensors are flat and contiguous; n is how many elements there are.

    bits     uint8, ceil(n / 8): element i is bit i % 8 of byte i // 8
    values   the kept elements, in their order
    codes    uint8; of 4 bits two a byte, the even element in the low half; of 8 bits one
    scales   bf16 (groups, 2): the lowest point and the step of each group of `group` elements

Few bits: x_hat = low + step * code. `low` is rounded down to bf16 and `step` up, so no element falls outside the 2**bits points and none is
clipped; with noise in [0, 1) instead of 1/2, E[x_hat] = x. A group that holds NaN or infinity has step NaN, and comes back as NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import keep as _keep

# Relative error of dW = dy' x_hat, for a norm's, an attention's and a GELU's output (bytes an element, 4 bits, to the nearest):
#   low and step, groups of  32  0.625   0.091 0.084 0.068        largest |x| alone, 32  0.563   0.120 0.108 0.152
#                            64  0.563   0.110 0.099 0.079                           64  0.531   0.141 0.124 0.173
#                           128  0.531   0.130 0.119 0.089                          128  0.516   0.161 0.146 0.187
# Low and step in groups of 64 is the better at equal bytes, by far behind a GELU, which uses hardly half of a symmetric range.
# 8 bits: 0.007 0.006 0.005. By noise instead of to the nearest: 1.4 times as much, without bias.
# The largest elements in bf16, keep 0.25 (0.625 bytes): 0.44 0.47 0.17.
GROUP = 64
TINY = 2.0**-126  # 1 / step would be infinite below
ACTIVE: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
INACTIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # their backward
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}
AT_ONCE = 2**22  # elements of scores that cross_entropy_ widens at a time


def select(x: Tensor, keep: float, block: int | None) -> tuple[Tensor, Tensor]:
    """(values, bits) of the largest elements of each block."""
    mask = _keep.elements(x, keep, "largest", block)
    return take(x, mask, _keep.total(keep, x.numel(), block)), pack_bits(mask)


def take(x: Tensor, mask: Tensor, k: int) -> Tensor:
    """The k elements of x where mask is True."""
    return x.index_select(0, _keep.index(mask, k))


def restore(values: Tensor, bits: Tensor, n: int, keep: float, block: int | None) -> Tensor:
    """Dense x_hat: the kept values where they were, zero elsewhere."""
    return values.new_zeros(n).masked_scatter_(unpack_bits(bits, n), values)


def pack_bits(mask: Tensor) -> Tensor:
    bytes_ = _padded(mask, 8).view(-1, 8).to(torch.uint8)
    return (bytes_ << _shifts(8, 1, mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    return ((bits[:, None] >> _shifts(8, 1, bits.device)) & 1).to(torch.bool).view(-1)[:n]


def signs(x: Tensor) -> Tensor:
    """The bits of not x <= 0: all that ReLU's backward needs, which lets gradients through where x is NaN."""
    return pack_bits(~(x <= 0))


def quantise(x: Tensor, bits: int, group: int = GROUP, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scales) of x, to the nearest point, or with a seed to one of the two beside it, by noise."""
    n, top = x.numel(), 2**bits - 1
    if n == 0:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty((0, 2), dtype=torch.bfloat16)
    grid = _grouped(x.to(torch.float32), group)
    low, step, inverse = _range(grid, top)
    at = (grid - low[:, None]) * inverse[:, None]
    at = at.round() if seed is None else (at + _uniform(grid.numel(), seed, x.device).view_as(grid)).floor()
    # The clamp is for 15 + 0.99999994 = 16. Where a step is NaN, codes are 0.
    codes = torch.where(step.isnan()[:, None], 0.0, at).view(-1)[:n].clamp(0, top).to(torch.uint8)
    return pack_codes(codes, bits), torch.stack([low, step], -1).to(torch.bfloat16)


def _range(grid: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """(low, step, 1 / step) of each group; the last is 0 where all elements are the same, or nearly."""
    low = _down(grid.amin(-1))
    span = grid.amax(-1) - low
    step = _up(span * (1.0 / top))
    step = torch.where(span.isfinite(), step, float("nan"))  # amin and amax hand NaN on
    return low, step, torch.where(step > TINY, 1.0 / step, 0.0)


def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, group: int = GROUP, dtype: torch.dtype = torch.float32) -> Tensor:
    if n == 0:
        return codes.new_empty(0, dtype=dtype)
    code = _padded(unpack_codes(codes, n, bits), group).view(-1, group).to(torch.float32)
    low, step = scales.to(torch.float32).unbind(-1)
    return (code * step[:, None] + low[:, None]).to(dtype).view(-1)[:n]


def gate(g: Tensor, u: Tensor, name: str, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """f(g) * u, and both factors in few bits; of any shape, contiguous."""
    return ACTIVE[name](g) * u, *quantise(g.view(-1), bits), *quantise(u.view(-1), bits)


def gate_again(
    codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, n: int, name: str, bits: int, dtype: torch.dtype
) -> Tensor:
    """The product of two factors in few bits, flat."""
    g, u = (dequantise(*held, n, bits, dtype=dtype) for held in ((codes_g, scales_g), (codes_u, scales_u)))
    return ACTIVE[name](g) * u


def gate_backward(
    grad: Tensor, codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, name: str, bits: int
) -> tuple[Tensor, Tensor]:
    """The gradients of two factors in few bits, from their product's, which is contiguous."""
    pairs = ((codes_g, scales_g), (codes_u, scales_u))
    g, u = (dequantise(*held, grad.numel(), bits, dtype=grad.dtype).view(grad.shape) for held in pairs)
    return INACTIVE[name](grad * u, g), grad * ACTIVE[name](g)


def encode(x: Tensor, edges: Tensor) -> Tensor:
    """The cell in which each x lies, of the cells between 15 or 255 sorted edges: how many edges x is above (all of them, for NaN)."""
    cells = torch.bucketize(x.to(torch.float32), edges, out_int32=True)
    return pack_codes(cells.to(torch.uint8), code_bits(edges.numel() + 1))


def scale_by_code(grad: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    """grad * table[code]: the backward of an activation whose derivative was kept as a code."""
    code = unpack_codes(codes, grad.numel(), code_bits(table.numel()))
    return (grad.to(torch.float32) * table.to(torch.float32)[code.to(torch.int32)]).to(grad.dtype)


def code_bits(cells: int) -> int:
    """4 or 8: as wide as codes of so many cells are held."""
    if cells not in (16, 256):
        raise ValueError(f"codes have 16 or 256 cells (15 or 255 edges), found {cells}. Make them with codes.table(name, bits=4 or 8).")
    return 4 if cells == 16 else 8


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    pairs = _padded(codes, 2).view(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def unpack_codes(codes: Tensor, n: int, bits: int) -> Tensor:
    if bits == 8:
        return codes
    return ((codes[:, None] >> _shifts(2, 4, codes.device)) & 15).view(-1)[:n]


def _shifts(n: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(0, n * step, step, dtype=torch.uint8, device=device)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """With zeros behind, to a multiple."""
    missing = -x.numel() % multiple
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


def _grouped(x: Tensor, group: int) -> Tensor:
    """(groups, group); the last element fills up the last group, whose range stays its own."""
    missing = -x.numel() % group
    return (torch.cat([x, x[-1:].expand(missing)]) if missing else x).view(-1, group)


def _uniform(n: int, seed: int, device: torch.device) -> Tensor:
    """[0, 1) in steps of 2**-24: the hash's high bits, which fp32 holds exactly."""
    return (_keep.noise(n, seed, device) >> 8).to(torch.float32) * 2.0**-24


def _down(x: Tensor) -> Tensor:
    """To the next bf16 at or below: cut for positive x, cut and one further out for negative x."""
    word = x.view(torch.int32)
    return ((word + ((word >> 31) & 0xFFFF)) & -65536).view(torch.float32)


def _up(x: Tensor) -> Tensor:
    """To the next bf16 at or above, of x >= 0."""
    return ((x.view(torch.int32) + 0xFFFF) & -65536).view(torch.float32)


# Norms, computed again from their statistics


def normalise_channels(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    """What a batch norm made of x (N, C, ...), from the mean and inverse deviation (C,) that it found; then + residual; then ReLU. Each
    step is rounded to x's dtype, as three functions would."""
    wide = torch.promote_types(x.dtype, mean.dtype)
    shape = (1, -1, *[1] * (x.ndim - 2))
    factor = inverse.to(wide) if weight is None else inverse.to(wide) * weight
    shift = -mean * factor if bias is None else bias - mean * factor
    out = (x * factor.view(shape) + shift.view(shape)).to(x.dtype)
    if residual is not None:
        out = out + residual
    return out.relu() if relu else out


def normalise_rows(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What a layer norm made of the rows of x (A, B, C), from their mean and inverse deviation (A, B); contiguous, whatever x is."""
    out = (x.to(mean.dtype) - mean[..., None]) * inverse[..., None]
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.to(x.dtype).contiguous()


def copy_rows(x: Tensor) -> Tensor:
    """x (A, B, C), contiguous."""
    return x.clone(memory_format=torch.contiguous_format)


# Cross entropy, whose gradient takes the place of the scores


def cross_entropy_(scores: Tensor, target: Tensor, ignored: int, smoothing: float, gradient: bool) -> Tensor:
    """The cross entropy (N,) of each row of scores (N, C), 0 where the target is `ignored`. With `gradient`, that of their sum is in scores
    afterwards. A few rows at a time: what is computed on the way is wider than scores of 16 bits."""
    rows = max(1, AT_ONCE // max(1, scores.shape[1]))
    parts = zip(scores.split(rows), target.split(rows), strict=True)
    return torch.cat([_cross_entropy_(s, t, ignored, smoothing, gradient) for s, t in parts])


def cross_entropy_fake(scores: Tensor, target: Tensor, ignored: int, smoothing: float, gradient: bool) -> Tensor:
    """What a graph and a count of memory see of it: nothing but the losses is made, as by the fused one."""
    return scores.new_empty(len(scores), dtype=torch.promote_types(scores.dtype, torch.float32))


def _cross_entropy_(scores: Tensor, target: Tensor, ignored: int, smoothing: float, gradient: bool) -> Tensor:
    counts = target != ignored
    at = torch.where(counts, target, 0)[:, None]
    logs = scores.log_softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    loss = -logs.gather(1, at)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * logs.mean(-1, keepdim=True)
    if gradient:
        flowing = logs.exp_()
        if smoothing:
            flowing -= smoothing / scores.shape[1]
        flowing.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=logs.dtype))
        scores.copy_(flowing.mul_(counts[:, None]))
    return torch.where(counts, loss[:, 0], 0)
