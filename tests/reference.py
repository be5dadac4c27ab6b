"""SBP done by hand: plain tensors, the same kept indices, detach written out. Slow, straightforward, and for tests only.

Each block is copied from its model's published forward, with one rule: the dropped rows of a branch are detached where it joins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def weighed(x: Tensor, weight: Tensor | float) -> Tensor:
    """x, to the bit, with its gradient times a weight."""
    return x.detach() + weight * (x - x.detach())


class Cut:
    """Which positions keep a gradient, and the helpers that a hand-written block needs.

    scale: a kept position counts for dropped ones in what it passes to others; the first `always`, which stand for themselves, count once.
    """

    def __init__(self, kept: Tensor, n: int, scale: bool = False, always: int = 0):
        self.mask = torch.zeros(n, dtype=torch.bool)
        self.mask[kept] = True
        self.weight = torch.ones(n, 1, dtype=torch.float64)
        if scale:
            self.weight[always:] = (n - always) / (len(kept) - always)

    def rows(self, x: Tensor) -> Tensor:
        """x (B, n, D) with the dropped rows constant."""
        return torch.where(self.mask[None, :, None], x, x.detach())

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mode: str, causal: bool, scale: float | None = None) -> Tensor:
        """(B, H, n, d) by the definition, with the gradient that the mode says."""
        n, groups = q.shape[2], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if mode == "query":
            q = weighed(q, 1 / self.weight)
        m = q @ k.mT * scale
        if causal:
            m = m.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        rows = self.mask[None, None, :, None]
        if mode == "query":
            return weighed(torch.where(rows, m.softmax(-1) @ v, (m.softmax(-1) @ v).detach()), self.weight)
        return weighed(QKV.apply(q, k, v, m.detach(), self.mask, scale), self.weight)


class QKV(torch.autograd.Function):
    """Exact forward; dM = S * (dA V' - rowsum(dA * A)) restricted to kept rows and kept columns, dV to kept rows of both."""

    @staticmethod
    def forward(ctx, q, k, v, m, mask, scale):
        s = m.softmax(-1)
        a = s @ v
        ctx.save_for_backward(q, k, v, s, a, mask)
        ctx.scale = scale
        return a

    @staticmethod
    def backward(ctx, grad):
        q, k, v, s, a, mask = ctx.saved_tensors
        block = (mask[:, None] & mask[None, :])[None, None]
        grad = grad * mask[None, None, :, None]
        dm = s * (grad @ v.mT - (grad * a).sum(-1, keepdim=True)) * block
        return dm @ k * ctx.scale, dm.mT @ q * ctx.scale, (s * block).mT @ grad, None, None, None


def heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def unheads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def vit_block(block: nn.Module, x: Tensor, cut: Cut, mode: str) -> Tensor:
    at, width = block.attention, block.attention.head_dim
    h = block.layernorm_before(x)
    q, k, v = (heads(p(h), width) for p in (at.q_proj, at.k_proj, at.v_proj))
    x = x + cut.rows(at.o_proj(unheads(cut.attention(q, k, v, mode, False))))
    return x + cut.rows(block.mlp(block.layernorm_after(x)))


def bert_block(block: nn.Module, x: Tensor, cut: Cut, mode: str) -> Tensor:
    at = block.attention
    q, k, v = (heads(p(x), at.self.attention_head_size) for p in (at.self.query, at.self.key, at.self.value))
    branch = at.output.dense(unheads(cut.attention(q, k, v, mode, False)))
    x = at.output.LayerNorm(cut.rows(branch) + x)
    branch = block.output.dense(block.intermediate(x))
    return block.output.LayerNorm(cut.rows(branch) + x)


def llama_block(block: nn.Module, x: Tensor, cut: Cut, mode: str, rope: tuple[Tensor, Tensor]) -> Tensor:
    at = block.self_attn
    h = block.input_layernorm(x)
    q, k, v = (heads(p(h), at.head_dim) for p in (at.q_proj, at.k_proj, at.v_proj))

    def turn(t: Tensor) -> Tensor:
        half = t.shape[-1] // 2
        return t * rope[0].unsqueeze(1) + torch.cat((-t[..., half:], t[..., :half]), -1) * rope[1].unsqueeze(1)

    x = x + cut.rows(at.o_proj(unheads(cut.attention(turn(q), turn(k), v, mode, True))))
    return x + cut.rows(block.mlp(block.post_attention_layernorm(x)))


def convnext_block(block: nn.Module, x: Tensor, keep: Tensor, weight: float = 1.0) -> Tensor:
    """keep: (H, W) bool. Dropped outputs of the convolution get no gradient, nor does the branch. Kept ones count `weight` times, but for
    what goes back through the kernel's middle to the same position."""
    y = block.dwconv(x)
    own = x * block.dwconv.weight[:, :, 3:4, 3:4].detach().squeeze(1)
    y = weighed(y, weight) + (1 - weight) * (own - own.detach())
    y = torch.where(keep, y, y.detach()).permute(0, 2, 3, 1)
    y = block.pwconv2(block.act(block.pwconv1(block.layernorm(y)))) * block.layer_scale_parameter
    y = y.permute(0, 3, 1, 2)
    return x + torch.where(keep, y, y.detach())
