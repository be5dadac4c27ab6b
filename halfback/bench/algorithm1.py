"""The baseline: Algorithm 1 of the SBP paper as the paper writes it, on the blocks that the paper chooses.

    outputs = zeros
    outputs[keep] = f(inputs[keep])            with gradient
    outputs[drop] = f(inputs[drop])            without

for f = attention as a function of its queries, and f = what works position by position (an MLP; of ConvNeXt with the norm before it).
Masks are fresh in every step: half of the positions, as the black or the white fields of a board, and class tokens always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blocks import choose, find_blocks

Masks = dict[int, tuple[Tensor, Tensor]]  # of each number of positions: which are kept, which are dropped


def sbp_f(f: Callable[[Tensor], Tensor], inputs: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
    outputs = torch.zeros_like(inputs)
    outputs[:, keep] = f(inputs[:, keep])
    with torch.no_grad():
        outputs[:, drop] = f(inputs[:, drop])
    return outputs


class Half(nn.Module):
    """A block under Algorithm 1."""

    def __init__(self, block: Any, masks: Masks):
        super().__init__()
        self.block = block
        self.masks = masks


class ViTHalf(Half):
    """torchvision's EncoderBlock."""

    def forward(self, x: Tensor) -> Tensor:
        keep, drop = self.masks[x.shape[1]]
        block, attention = self.block, self.block.self_attention
        heads, width = attention.num_heads, attention.embed_dim
        weight, bias = attention.in_proj_weight, attention.in_proj_bias

        def by_head(y: Tensor) -> Tensor:
            return y.unflatten(-1, (heads, -1)).transpose(1, 2)

        normed = block.ln_1(x)
        key, value = (by_head(y) for y in F.linear(normed, weight[width:], bias[width:]).chunk(2, -1))

        def attend(rows: Tensor) -> Tensor:
            query = by_head(F.linear(rows, weight[:width], bias[:width]))
            out = F.scaled_dot_product_attention(query, key, value)
            return attention.out_proj(out.transpose(1, 2).flatten(2))

        x = x + sbp_f(attend, normed, keep, drop)
        return x + sbp_f(block.mlp, block.ln_2(x), keep, drop)


class ConvNeXtHalf(Half):
    """torchvision's CNBlock: the depthwise convolution stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        layers = self.block.block
        y = layers[0](x).permute(0, 2, 3, 1)
        keep, drop = self.masks[y.shape[1] * y.shape[2]]
        done = sbp_f(layers[2:6], y.flatten(1, 2), keep, drop).view_as(y)
        return x + self.block.layer_scale * done.permute(0, 3, 1, 2)


class LlamaHalf(Half):
    """transformers' LlamaDecoderLayer."""

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], **others: Any) -> Tensor:
        n = x.shape[1]
        keep, drop = self.masks[n]
        block, attention = self.block, self.block.self_attn
        cos, sin = position_embeddings

        def by_head(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

        def turned(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            one, other = y.chunk(2, -1)
            return y * cos[:, None] + torch.cat((-other, one), -1) * sin[:, None]

        normed = block.input_layernorm(x)
        key, value = turned(by_head(attention.k_proj(normed)), cos, sin), by_head(attention.v_proj(normed))
        # with a mask, a GPU's fast kernels take as many keys' heads as queries'
        key, value = (y.repeat_interleave(attention.num_key_value_groups, 1) for y in (key, value))

        def attend(at: Tensor) -> Tensor:
            query = turned(by_head(attention.q_proj(normed[:, at])), cos[:, at], sin[:, at])
            seen = at[:, None] >= torch.arange(n, device=x.device)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
            return attention.o_proj(out.transpose(1, 2).flatten(2))

        out = torch.zeros_like(x)
        out[:, keep] = attend(keep)
        with torch.no_grad():
            out[:, drop] = attend(drop)
        x = x + out
        return x + sbp_f(block.mlp, block.post_attention_layernorm(x), keep, drop)


HALVES: dict[str, type[Half]] = {"vit": ViTHalf, "convnext": ConvNeXtHalf, "llama": LlamaHalf}
SHRINKS = {"vit": (1,), "convnext": (1, 2, 4)}  # a mask of the coarsest grid serves the finer ones, enlarged


def board(side: int, larger: int, device: str) -> list[Tensor]:
    """The fields of either colour, each enlarged."""
    cells = torch.arange(side, device=device)
    colour = ((cells[:, None] + cells) % 2).repeat_interleave(larger, 0).repeat_interleave(larger, 1).flatten()
    return [(colour == c).nonzero().flatten() for c in (0, 1)]


def boards(kind: str, size: int, patch: int, device: str) -> dict[int, list[Tensor]]:
    """By the number of positions: the halves to choose from."""
    if kind == "llama":
        return {size: [torch.arange(c, size, 2, device=device) for c in (0, 1)]}
    coarsest = size // (patch * SHRINKS[kind][-1])
    found = [board(coarsest, larger, device) for larger in SHRINKS[kind]]
    return {sum(map(len, halves)): halves for halves in found}


def algorithm1_(model: nn.Module, kind: str, size: int, patch: int, device: str) -> Callable[[], None]:
    """Blocks are replaced, in place; what is returned draws masks and runs before each forward."""
    halves = boards(kind, size, patch, device)
    classes = torch.zeros(1 if kind == "vit" else 0, dtype=torch.int64, device=device)
    masks: Masks = {}
    steps = [0]

    def draw() -> None:
        steps[0] += 1
        for n, pair in halves.items():
            keep, drop = (h + len(classes) for h in (pair[steps[0] % 2], pair[1 - steps[0] % 2]))
            masks[n + len(classes)] = torch.cat((classes, keep)), drop

    draw()
    for name in choose(model, find_blocks(model), "paper"):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, HALVES[kind](model.get_submodule(name), masks))
    return draw
