"""Attention on two streams: an exact forward over all positions, and a backward through fewer.

    S = softmax(Q K' / sqrt(d)),  A = S V            exact in every mode but "skip"

    "query"   dQ of kept rows; dK, dV of all positions, summed over kept rows    holds Q_kept, K, V, A_kept
    "qkv"     dQ, dK, dV of kept positions; dQ summed over kept keys             holds Q, K, V, A of kept positions, and their LSE
    "heads"   dQ, dK, dV of all positions in the kept heads                      holds Q, K, V, A of kept heads
    "skip"    kept queries see kept keys only: the forward is changed            holds Q, K, V, A of kept positions

"qkv" rests on a property of fused attention: its backward needs of the forward only A and the log-sum-exp of each row. Given the
kept Q, K, V and the LSE over *all* keys, the fused backward computes exactly the kept-by-kept block of dM = S * (dS - rowsum(dA * A)).
Causal "query" rests on it too, and needs no mask of k x n. Where every s-th position is kept, keys that stand at the same place between
two kept rows are seen by rows in causal order, so s causal backwards of k x k do, each given the LSE over all keys: 1/s of the work. Keys
up to the first of these rows, which all of them see, are few and written out. Elsewhere rows of dA that are zero give nothing, whatever
Q, A and LSE are there, so those of dropped positions are not held but put in as zeros.

Shapes: B batch, H query heads, G key and value heads (H a multiple of G), n positions, k kept ones, d the head's width.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes

from .notes import constant, note, warn
from .streams import (
    BRANCH,
    TABLE,
    WHOLE,
    Merge,
    Split,
    Streams,
    asked,
    beyond,
    merge,
    merge_parts,
    on_dropped,
    same_layout,
    seen,
    split,
    split_parts,
    unfold,
)

MODES = ("query", "qkv", "heads")
SAMPLES = (
    "what is split stands where attention has samples. If this block takes (positions, samples, features), whole samples are kept and "
    "dropped: say {}(axis=0)"
)
# A causal backward of strided rows goes in parts, each a launch of its own, and a node of a compiled graph. They halve its arithmetic,
# which grows with the square of the keys. What is moved for them grows with the keys alone, and of few keys is more: about 2 KB a token
# and head, against 5 x keys x width operations. tests/test_cuda.py times both.
MOST_PARTS, FEWEST_KEYS = 8, 1024
aten = torch.ops.aten


# As autocast would, where autograd sees it


def run_dtype(x) -> torch.dtype:
    """The dtype in which layers and attention run on x: autocast's, where it is on, but for fp64, which it leaves alone."""
    kind = x.device.type
    if x.dtype is torch.float64 or not x.is_floating_point() or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def cast(x):
    """x, a tensor or Streams, in the dtype in which layers and attention run on it; None stays None."""
    if x is None or x.dtype == run_dtype(x):
        return x
    return TABLE["to"]("to", seen(Tensor.to), (x, run_dtype(x)), {}) if isinstance(x, Streams) else seen(Tensor.to)(x, run_dtype(x))


# Plain attention, in the forms needed here


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float | None) -> Tensor:
    """torch's own attention. Grouped queries (H > G) become more rows of the same head, which needs no copies of keys."""
    heads, groups = q.shape[1], k.shape[1]
    while mask is not None and mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if heads == groups:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale)
    each = heads // groups
    if causal:  # without copies of keys, and without a map of n x n, where a kernel takes fewer heads of keys
        grouped = _fused(q, v, None, dropout_p) in ("cudnn", "flash", "cpu")
        k, v = (k, v) if grouped else (_repeat(k, each), _repeat(v, each))
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, True, scale=scale, enable_gqa=grouped)
    rows = seen(torch.flatten)(unfold(q, 1, (groups, each)), 2, 3)
    if mask is not None and mask.shape[-2] != 1:
        if mask.ndim == 4 and mask.shape[1] == heads:
            mask = unfold(mask, 1, (groups, each)).flatten(2, 3)
        else:
            mask = mask.unsqueeze(-3).expand(*mask.shape[:-2], each, *mask.shape[-2:]).flatten(-3, -2)
    out = F.scaled_dot_product_attention(rows, k, v, mask, dropout_p, scale=scale)
    return unfold(out, 2, (each, q.shape[2])).flatten(1, 2)


def dense(x: Tensor) -> Tensor:
    """x in a storage of its own with its axes in the same order of strides, so that holding it does not hold a fused projection."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != expected:
            return seen(torch.clone)(x)
        expected *= size
    return x


def as_laid_out(x: Tensor, like: Tensor) -> Tensor:
    """A copy of x, laid out as `like`: what comes out of attention is then reshaped for the output projection without a copy."""
    if x.shape != like.shape:
        return x.contiguous()
    return torch.empty_like(like).copy_(x)


def _mask_rows(mask: Tensor | None, causal: bool, q: Streams, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask's rows for kept and for dropped queries."""
    if causal:
        order = torch.arange(keys, device=q.device)
        return q.at.kept.unsqueeze(1) >= order, q.at.dropped.unsqueeze(1) >= order
    if mask is None or mask.shape[-2] == 1:
        return mask, mask
    return split_parts(mask, q.at, mask.ndim - 2)


def join(x: Streams | Tensor, ordered: bool) -> Tensor:
    """All positions of (B, H, n, d), laid out by tokens. Where order does not matter (no mask, not causal), kept ones come first."""
    if not isinstance(x, Streams):
        return x
    kept, dropped = x.kept.transpose(1, 2), x.dropped.transpose(1, 2)
    rows = merge_parts(kept, dropped, x.at, 1) if ordered else seen(torch.cat)((kept, dropped), 1)
    return rows.transpose(1, 2)


# The modes


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention on Streams."""
    q = query
    if isinstance(q, Streams) and q.kept.ndim == 4 and q.axis == 0 and q.span == q.outer == 1:
        warn(q.site.owner, q.site.block, SAMPLES.format("SkipTokens" if q.site.attention == "skip" else "SBP"))
    if not isinstance(q, Streams) or q.kept.ndim != 4 or q.axis != 2 or q.span != 1 or q.outer != 1 or isinstance(attn_mask, Streams):
        return NotImplemented
    mode = q.site.attention
    together = isinstance(key, Streams) and isinstance(value, Streams) and same_layout(q, key) and same_layout(q, value)
    if mode == "skip":
        return _skip(q, key, value, attn_mask, dropout_p, is_causal, scale) if together else NotImplemented
    if not together and mode != "query":
        note(q.site.owner, q.site.block, "fell back", f'attention="{mode}" to "query": keys or values are not split at the same positions')
        mode = "query"
    if mode == "heads":
        return _heads(q, key, value, attn_mask, dropout_p, is_causal, scale)
    if mode == "qkv":
        fused = _fused(q.kept, value.kept, attn_mask, dropout_p)
        if fused is not None:  # of keys, too, some are left out of a query's gradient: it is not unweighed
            return _kept_only(fused, q, key, value, attn_mask, is_causal, scale).weighed()
        why = "dropout" if dropout_p else "this mask, dtype or width"
        note(
            q.site.owner,
            q.site.block,
            "fell back",
            f'attention="qkv" to constant dropped keys: {why} has no fused backward',
        )
        key = key.like(key.kept, key.dropped.detach())
        value = value.like(value.kept, value.dropped.detach())
    return _attend(q.weighed(inverse=True), key, value, attn_mask, dropout_p, is_causal, scale).weighed()


def _attend(q: Streams, key, value, attn_mask, dropout_p, is_causal, scale) -> Streams:
    """Kept queries, and dropped ones without gradient, over all keys."""
    ordered = is_causal or attn_mask is not None
    k, v = join(key, ordered), join(value, ordered)
    alike = _alike(q, k, v)
    fused = _fused(q.kept, v, attn_mask, dropout_p) if is_causal and alike and k.shape[2] == q.at.n else None
    if fused is not None:
        return _kept_rows(fused, q, k, v, scale)
    kept_mask, dropped_mask = _mask_rows(attn_mask, is_causal, q, k.shape[2])
    kernel = _fused(q.kept, v, None, dropout_p) if alike and kept_mask is None and is_compiling() else None
    if kernel is not None:
        kept = _steady(dense(q.kept), k, v, kernel, False, scale)
    else:
        kept = sdpa(dense(q.kept), k, v, kept_mask, dropout_p, False, scale)
    if beyond(q.device):
        return q.like(kept, None, role=BRANCH)
    if dropout_p:
        asked()
    dropped = on_dropped(sdpa, q.taken_apart()[1].detach(), k.detach(), v.detach(), dropped_mask, dropout_p, False, scale)
    return q.like(kept, dropped, role=BRANCH)


def _skip(q: Streams, k: Streams, v: Streams, mask, dropout_p, causal, scale) -> Streams:
    """Kept queries see kept keys; dropped ones, where they are carried along, see all and get no gradient."""
    kept_mask, dropped_mask = _mask_rows(mask, False, q, q.at.n)
    if kept_mask is not None and kept_mask.shape[-1] != 1:
        kept_mask = kept_mask.index_select(-1, q.at.kept)
    kept = sdpa(q.kept, k.kept, v.kept, kept_mask, dropout_p, causal, scale)
    dropped = None
    if q.dropped is not None and causal:
        whole = sdpa(merge(q).detach(), merge(k).detach(), merge(v).detach(), None, dropout_p, True, scale)
        dropped = whole.index_select(2, q.at.dropped)
    elif q.dropped is not None:
        dropped = sdpa(q.dropped.detach(), merge(k).detach(), merge(v).detach(), dropped_mask, dropout_p, False, scale)
    return q.like(kept, dropped, role=BRANCH)


def _heads(q: Streams, k: Streams, v: Streams, mask, dropout_p, causal, scale) -> Streams:
    """Some of the G key heads, with all their queries, get a gradient, at every position."""
    whole_q, whole_k, whole_v = merge(q), merge(k), merge(v)
    groups = whole_k.shape[1]
    each = whole_q.shape[1] // groups
    kept = max(1, round(groups * q.at.k / q.at.n))
    heads_in_order = torch.arange(groups, device=q.device)
    phase = 0 if q.at.noise is None else q.at.noise
    index = torch.stack(((heads_in_order + phase) % groups, (heads_in_order - phase) % groups))

    def heads(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        parts = Split.apply(unfold(x, 1, (groups, size)), index, kept, 1)
        return parts[0].flatten(1, 2), parts[1].flatten(1, 2)

    while mask is not None and mask.ndim < 4:
        mask = mask.unsqueeze(0)
    masks = (mask, mask)
    if mask is not None and mask.ndim == 4 and mask.shape[1] == groups * each:
        masks = heads(mask, each)
    (q1, q0), (k1, k0), (v1, v0) = heads(whole_q, each), heads(whole_k, 1), heads(whole_v, 1)
    with_grad = sdpa(q1, k1, v1, masks[0], dropout_p, causal, scale)
    without = sdpa(q0.detach(), k0.detach(), v0.detach(), masks[1], dropout_p, causal, scale)
    parts = unfold(with_grad, 1, (kept, each)), unfold(without, 1, (groups - kept, each))
    out = Merge.apply(*parts, index, kept, 1).flatten(1, 2)
    return split(out, q.at, 2, 1, WHOLE, q.site)


# "qkv", and causal "query": the fused backward with the LSE of full rows


def _fused(q: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float) -> str | None:
    """The kernel whose backward can be given its LSE, or None."""
    if dropout_p or v.shape[-1] != q.shape[-1] or (mask is not None and (mask.requires_grad or (mask.dtype == torch.bool and q.is_cuda))):
        return None
    dtype = run_dtype(q)
    if not q.is_cuda:
        return "cpu" if q.device.type == "cpu" and dtype != torch.float16 else None
    if mask is not None or q.shape[-1] % 8 or q.shape[2] < 2:  # not every kernel takes a single row
        return None
    return _chosen(q.device.index or 0, dtype, q.shape[-1])


@constant
def _chosen(index: int, dtype: torch.dtype, width: int) -> str | None:
    """The kernel that torch would choose for heads of this width. Without a GPU, as in counting, flash."""
    if not torch.cuda.is_available():
        return None if dtype == torch.float64 else "efficient" if dtype == torch.float32 else "flash"
    allowed = (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    return _choice(index, dtype, width, allowed, torch.are_deterministic_algorithms_enabled())


@functools.lru_cache(maxsize=64)
def _choice(index: int, dtype: torch.dtype, width: int, allowed: tuple[bool, ...], deterministic: bool) -> str | None:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        x = torch.empty((1, 1, 64, width), dtype=dtype, device=f"cuda:{index}", requires_grad=True)
        return {1: "flash", 2: "efficient", 3: "cudnn"}.get(torch._fused_sdp_choice(x, x, x, None, 0.0, True))


def _each(kernel: str, q: Tensor, k: Tensor) -> int:
    """How often keys have to be repeated for a kernel: flash and cudnn take fewer heads of them."""
    return 1 if kernel in ("flash", "cudnn") else q.shape[1] // k.shape[1]


def _forward(kernel: str, q, k, v, mask, causal: bool, scale) -> tuple[Tensor, Tensor]:
    """A and its LSE."""
    each = _each(kernel, q, k)
    k, v = _repeat(k, each), _repeat(v, each)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
    if kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out, lse.view(q.shape[:3])
    out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _backward(kernel: str, grad, q, k, v, out, lse, mask, causal: bool, scale) -> tuple[Tensor, Tensor, Tensor]:
    each = _each(kernel, q, k)
    k, v = _repeat(k, each), _repeat(v, each)
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif kernel == "flash":
        noise = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, noise, noise, scale=scale
        )
    elif kernel == "cudnn":
        noise = torch.zeros((), dtype=torch.int64, device=q.device)
        grad = grad if grad.stride() == out.stride() else as_laid_out(grad, out)  # its plans are kept by the strides of q, k and v alone
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), noise, noise, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
    else:
        noise = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = F.pad(lse, (0, -lse.shape[-1] % 32))
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, lse, noise, noise, 0.0, [True, True, True, False], causal, scale=scale
        )
    return dq, _fold(dk, each), _fold(dv, each)


@torch.library.custom_op("halfback::kept_attention", mutates_args=())
def kept_attention(
    q1: Tensor,
    k1: Tensor,
    v1: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    index: Tensor,
    kernel: str,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of all positions (q, k, v): A of the kept, A of the dropped, and the LSE of the kept rows. Gradients go to the kept parts
    q1, k1, v1 alone; beside them the backward is given A and LSE of the kept rows: nothing of the dropped is held. It is one op, so
    that checkpointing can keep its result instead of running it twice."""
    out, lse = _forward(kernel, q, k, v, mask, causal, scale)
    return _parts(out, lse, q1, q, index if causal or mask is not None else None)


def _parts(out: Tensor, lse: Tensor, q1: Tensor, q: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A of the kept, A of the dropped, and the LSE of the kept. Without an index kept ones come first."""
    kept, n = q1.shape[2], q.shape[2]
    if index is not None:
        of_kept, of_dropped = index[0].tensor_split((kept,))
        out1, out0, lse1 = out.index_select(2, of_kept), out.index_select(2, of_dropped), lse.index_select(2, of_kept)
    else:
        out1, out0, lse1 = out.narrow(2, 0, kept), out.narrow(2, kept, n - kept), lse.narrow(2, 0, kept)
    return as_laid_out(out1, q1), as_laid_out(out0, q.narrow(2, 0, n - kept)), lse1.contiguous()


@kept_attention.register_fake
def _(q1, k1, v1, q, k, v, mask, index, kernel, causal, scale):
    return _fake_parts(q1, v1, q)


def _fake_parts(q1: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, kept = q1.shape[:3]
    width = v.shape[3]
    out1 = torch.empty_like(q1) if q1.shape[3] == width else q1.new_empty((batch, heads, kept, width))
    exact = torch.float64 if q1.dtype == torch.float64 else torch.float32
    out0 = q.narrow(2, 0, q.shape[2] - kept)
    out0 = torch.empty_like(out0) if q.shape[3] == width else q.new_empty((*out0.shape[:3], width))
    return out1, out0, q1.new_empty(q1.shape[:3], dtype=exact)


def _save(ctx, inputs, output) -> None:
    q1, k1, v1, _, _, _, mask, index, kernel, causal, scale = inputs
    out1, _, lse1 = output
    ctx.save_for_backward(q1, k1, v1, out1, lse1, mask, index)
    ctx.kernel, ctx.causal, ctx.scale = kernel, causal, scale


def _restore(ctx, grad, _, __):
    q, k, v, out, lse, mask, index = ctx.saved_tensors
    if mask is not None:
        kept = index[0, : q.shape[2]]
        mask = mask.index_select(2, kept).index_select(3, kept)
    return *_backward(ctx.kernel, grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale), *[None] * 8


kept_attention.register_autograd(_restore, setup_context=_save)


class Direct(torch.autograd.Function):
    """An op of these without what it needs for the compiler's sake: that takes longer to call than it takes to run."""

    @staticmethod
    def forward(ctx, op, save, restore, *inputs):
        output = op._init_fn(*inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)
        ctx.restore = restore
        return output

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, *ctx.restore(ctx, *grads)


@torch.library.custom_op("halfback::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, kernel: str, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """torch's own attention, and its LSE. The compiler takes torch's op for a random one, for its dropout: where it is computed again, it
    runs, in both passes, apart from all others and on copies."""
    out, lse = _forward(kernel, q, k, v, None, causal, scale)
    as_expected = out.stride() == torch.empty_like(q, device="meta").stride()
    return out if as_expected else as_laid_out(out, q), lse.contiguous()


@attention.register_fake
def _(q, k, v, kernel, causal, scale):
    out, _, lse = _fake_parts(q, v, q)
    return out, lse


def _save_all(ctx, inputs, output) -> None:
    q, k, v, kernel, causal, scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.kernel, ctx.causal, ctx.scale = kernel, causal, scale


def _restore_all(ctx, grad, _):
    q, k, v, out, lse = ctx.saved_tensors
    return *_backward(ctx.kernel, grad, q, k, v, out, lse, None, ctx.causal, ctx.scale), None, None, None


attention.register_autograd(_restore_all, setup_context=_save_all)


@torch.library.custom_op("halfback::row_attention", mutates_args=())
def row_attention(
    q1: Tensor, k: Tensor, v: Tensor, q: Tensor, index: Tensor, stride: int, leading: int, kernel: str, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention of all positions: A of the kept, A of the dropped, and the LSE of the kept rows. Gradients go to the kept queries
    q1, and to all keys and values. With a stride, kept are `leading` positions and behind them every stride-th."""
    out, lse = _forward(kernel, q, k, v, None, True, scale)
    return _parts(out, lse, q1, q, index)


@row_attention.register_fake
def _(q1, k, v, q, index, stride, leading, kernel, scale):
    return _fake_parts(q1, v, q)


def _save_rows(ctx, inputs, output) -> None:
    q1, k, v, _, index, stride, leading, kernel, scale = inputs
    out1, _, lse1 = output
    ctx.save_for_backward(q1, k, v, out1, lse1, index)
    ctx.stride, ctx.leading, ctx.kernel, ctx.scale = stride, leading, kernel, scale


def _restore_rows(ctx, grad, _, __):
    q, k, v, out, lse, index = ctx.saved_tensors
    rows, keys = q.shape[2], k.shape[2]
    if 0 < ctx.stride <= MOST_PARTS and keys >= FEWEST_KEYS and rows - ctx.leading > 2:  # not every kernel takes a single row
        grads = _strided_backward(ctx.stride, ctx.leading, index[0, :rows], ctx.kernel, grad, q, k, v, out, lse, ctx.scale)
    else:
        grads = _zeros_backward(index, ctx.kernel, grad, q, k, v, out, lse, ctx.scale)
    return *grads, *[None] * 6


def _zeros_backward(index: Tensor, kernel: str, grad, q, k, v, out, lse, scale) -> tuple[Tensor, Tensor, Tensor]:
    """Kept rows in their places, zeros in the others: as if nothing had been dropped."""
    rows, keys = q.shape[2], k.shape[2]

    def whole(x: Tensor) -> Tensor:  # read from where it is, not written to where it goes: the compiler makes one pass of that
        return F.pad(x, (*[0] * (2 * (x.ndim - 3)), 0, keys - rows)).index_select(2, index[1])

    dq, dk, dv = _backward(kernel, whole(grad), whole(q), k, v, whole(out), whole(lse), None, True, scale)
    return dq.index_select(2, index[0, :rows]), dk, dv


def _strided_backward(s: int, leading: int, at: Tensor, kernel: str, grad, q, k, v, out, lse, scale) -> tuple[Tensor, Tensor, Tensor]:
    """The rows behind the first strided one, in s parts: to every s-th key from one of those right behind it. Keys after the last row are
    seen by nobody. Where the first row stands is known to the index alone, so that a compiled graph serves all draws."""
    first, behind = at[leading], leading + 1
    rows = q.shape[2] - behind
    few = k.shape[2] - s * rows  # the most keys that may stand up to the first row
    there = torch.arange(few, device=k.device) <= at.clamp(max=first).unsqueeze(1)
    dq, head_k, head_v = _few_keys(there, grad, q, k[:, :, :few], v[:, :, :few], out, lse, scale)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    dk[:, :, :few], dv[:, :, :few] = head_k, head_v
    # Copied once, and alike: a part of a tensor flash would copy every time, and for cudnn see there.
    row_grad, row_q, row_out = (as_laid_out(x[:, :, behind:], out[:, :, behind:]) for x in (grad, q, out))
    lse = lse[:, :, behind:].contiguous()
    for keys in (first + 1 + torch.arange(s * rows, device=k.device)).view(rows, s).unbind(1):
        part = _backward(kernel, row_grad, row_q, k.index_select(2, keys), v.index_select(2, keys), row_out, lse, None, True, scale)
        dq[:, :, behind:] += part[0]
        dk.index_copy_(2, keys, part[1])
        dv.index_copy_(2, keys, part[2])
        del part  # not beside the next
    return as_laid_out(dq, q), dk, dv


def _few_keys(there: Tensor, grad, q, k, v, out, lse, scale) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of attention to few keys, of which a row sees those that are `there` for it, in the LSE's dtype, as in the kernels:
    scores that are rounded to bf16 give other weights. dQ stays in it, for what is added."""
    groups, scale = k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    grad, q, k, v = (x.to(lse.dtype) for x in (grad, q, k, v))
    delta = (grad * out).sum(-1)
    grad, q, lse, delta = (unfold(x, 1, (groups, x.shape[1] // groups)) for x in (grad, q, lse, delta))
    k, v, lse, delta = k.unsqueeze(2), v.unsqueeze(2), lse.unsqueeze(-1), delta.unsqueeze(-1)
    with torch.autocast(q.device.type, enabled=False):  # of whoever calls backward in it
        p = torch.where(there, (q @ k.mT * scale - lse).exp(), 0)
        ds = p * (grad @ v.mT - delta) * scale
        return (ds @ k).flatten(1, 2), (ds.mT @ q).sum(2), (p.mT @ grad).sum(2)


row_attention.register_autograd(_restore_rows, setup_context=_save_rows)


def _repeat(x: Tensor, each: int) -> Tensor:
    return x if each == 1 else x.repeat_interleave(each, 1)


def _fold(x: Tensor, each: int) -> Tensor:
    return x if each == 1 else unfold(x, 1, (x.shape[1] // each, each)).sum(2)


def _steady(q: Tensor, k: Tensor, v: Tensor, kernel: str, causal: bool, scale) -> Tensor:
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in map(cast, (q, k, v))]
    out, _ = torch.ops.halfback.attention(q, k, v, kernel, causal, scale)
    return out


def steady(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention by an op that is not random."""
    if query.ndim != 4 or attn_mask is not None or not _alike(query, key, value) or (is_causal and query.shape[2] != key.shape[2]):
        return NotImplemented
    if query.shape[1] != key.shape[1] and not enable_gqa:  # an error of torch's
        return NotImplemented
    kernel = _fused(query, value, None, dropout_p)
    return NotImplemented if kernel is None else _steady(query, key, value, kernel, is_causal, scale)


def _alike(q: Tensor | Streams, k: Tensor, v: Tensor) -> bool:
    return k.shape[:3] == v.shape[:3] and k.shape[0] == q.shape[0] and q.shape[1] % k.shape[1] == 0


def _kept_rows(kernel: str, q: Streams, k: Tensor, v: Tensor, scale) -> Streams:
    q, k, v = cast(q), *(x if x.stride(-1) == 1 else x.contiguous() for x in (cast(k), cast(v)))
    whole = join(q.like(q.kept.detach(), q.dropped.detach()), ordered=True)
    inputs = dense(q.kept), k, v, whole, q.at.index, q.at.stride, q.at.always, kernel, scale
    op = torch.ops.halfback.row_attention
    kept, dropped, _ = op(*inputs) if is_compiling() else Direct.apply(row_attention, _save_rows, _restore_rows, *inputs)
    return q.like(kept, None if beyond(q.device) else dropped.detach(), role=BRANCH)


def _kept_only(kernel: str, q: Streams, k: Streams, v: Streams, mask, causal: bool, scale) -> Streams:
    q, k, v = cast(q), cast(k), cast(v)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device).masked_fill(mask.logical_not(), float("-inf"))
        mask = mask.to(q.dtype)
        while mask.ndim < 4:
            mask = mask.unsqueeze(0)
        mask = mask.expand(*mask.shape[:2], q.at.n, q.at.n)
    ordered = causal or mask is not None
    whole = [join(x.like(x.kept.detach(), x.dropped.detach()), ordered) for x in (q, k, v)]
    inputs = q.kept, k.kept, v.kept, *whole, mask, q.at.index, kernel, causal, scale
    op = torch.ops.halfback.kept_attention
    kept, dropped, _ = op(*inputs) if is_compiling() else Direct.apply(kept_attention, _save, _restore, *inputs)
    return q.like(kept, None if beyond(q.device) else dropped.detach(), role=BRANCH)


# torch's composite multi-head attention, written out so that its parts meet the table


def multi_head(
    query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn,
    dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None, need_weights=True, attn_mask=None,
    use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, static_k=None,
    static_v=None, average_attn_weights=True, is_causal=False,
):  # fmt: skip
    """F.multi_head_attention_forward, for self-attention whose weights nobody asked for. Inputs are (n, B, D)."""
    plain = query is key and key is value and bias_k is None and bias_v is None and static_k is None and static_v is None
    if not plain or need_weights or add_zero_attn or use_separate_proj_weight or query.ndim != 3:
        return NotImplemented
    n, batch, width = query.shape
    some = query.kept if isinstance(query, Streams) else query
    by_batch = some.stride(1) >= some.stride(0)  # as it lies in memory, nothing has to be moved
    x = query.transpose(0, 1) if by_batch else query
    if is_causal and key_padding_mask is None:
        attn_mask = None
    else:
        is_causal = False
    mask = _combined(attn_mask, key_padding_mask, batch, num_heads, query.dtype)
    lead = (batch, n) if by_batch else (n, batch)
    order = (0, 2, 1, 3) if by_batch else (1, 2, 0, 3)
    back = (0, 2, 1, 3) if by_batch else (2, 0, 1, 3)
    q, k, v = [part.reshape(*lead, num_heads, -1).permute(order) for part in _projected(x, in_proj_weight, in_proj_bias)]
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    out = F.linear(out.permute(back).reshape(*lead, width), out_proj_weight, out_proj_bias)
    return out.transpose(0, 1) if by_batch else out, None


def _projected(x, weight, bias):
    """q, k and v. Dropped queries have no gradient where keys and values do: on their own, nothing is computed backwards for them."""
    alone = isinstance(x, Streams) and x.site.attention == "query"
    if not alone:
        return F.linear(x, weight, bias).chunk(3, -1)
    width = weight.shape[1]
    biases = (None, None) if bias is None else (bias[:width], bias[width:])
    return F.linear(x, weight[:width], biases[0]), *F.linear(x, weight[width:], biases[1]).chunk(2, -1)


def _combined(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """One additive mask (B or 1, H or 1, n, n) of torch's two; True means "not seen" in both."""

    def additive(x: Tensor) -> Tensor:
        return x if x.dtype != torch.bool else torch.zeros_like(x, dtype=dtype).masked_fill(x, float("-inf"))

    if mask is not None:
        mask = additive(mask)
        mask = unfold(mask, 0, (batch, heads)) if mask.ndim == 3 else mask[None, None]
    if padding is not None:
        padding = additive(padding)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def attention_memory(n: int, d: int, keep: float, attention: str = "query", maps: bool = True) -> float:
    """Equation 13: what attention holds at ratio `keep`, relative to all of it. n tokens, heads of width d.

    `maps=True` is the paper's model, where the map is stored before and after softmax; fused attention stores none. For "qkv"
    the paper prints r (3 + 2 r d/n) / (3 + 2 d/n), which does not follow from its own terms (3 h d n r + 2 h n n r^2); this is
    what does.
    """
    whole = 3 * d * n + (2 * n * n if maps else 0)
    if attention == "query":
        part = 2 * d * n + keep * (d * n + (2 * n * n if maps else 0))
    elif attention == "qkv":
        part = 3 * d * n * keep + (2 * n * n * keep**2 if maps else 0)
    elif attention == "heads":
        part = keep * whole
    else:
        raise ValueError(f"attention_memory(): attention={attention!r} is none of {', '.join(MODES)}.")
    return part / whole
