"""The baseline: Algorithm 1 of the SBP paper as the paper writes it, on the last blocks of torchvision's ViT.

    outputs = zeros
    outputs[keep] = f(inputs[keep])            with gradient
    outputs[drop] = f(inputs[drop])            without

for f = attention as a function of its queries, and f = MLP. Masks are fresh in every step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def sbp_f(f, inputs: Tensor, keep: Tensor, drop: Tensor) -> Tensor:
    outputs = torch.zeros_like(inputs)
    outputs[:, keep] = f(inputs[:, keep])
    with torch.no_grad():
        outputs[:, drop] = f(inputs[:, drop])
    return outputs


class Masks:
    """One checkerboard mask a step, the class token always kept."""

    def __init__(self, side: int, device: str):
        cells = torch.arange(side * side, device=device)
        colour = (cells // side + cells % side) % 2
        self.halves = [cells[colour == c] + 1 for c in (0, 1)]
        self.first = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = 0

    def draw(self) -> tuple[Tensor, Tensor]:
        self.step += 1
        one, other = self.halves[self.step % 2], self.halves[1 - self.step % 2]
        return torch.cat((self.first, one)), other


class Algorithm1(nn.Module):
    """A block of torchvision's ViT under Algorithm 1."""

    def __init__(self, block: nn.Module, masks: dict[str, Tensor]):
        super().__init__()
        self.block = block
        self.masks = masks

    def forward(self, x: Tensor) -> Tensor:
        keep, drop = self.masks["keep"], self.masks["drop"]
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
