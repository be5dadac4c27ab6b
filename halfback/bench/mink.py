"""The baseline: DropIT's Min-K as its released code does it, with values and an index for each.

    forward    y  = x W' + b          exact
    backward   dx = dy W              exact
               dW = dy' x_hat         approximate: x_hat has the largest elements of x, and zeros
Saved for backward: the largest `keep` of all elements of x by magnitude (one flat top-k), an int32 index for each, and W.

Every linear and convolutional layer, the first one too, and the two projections of nn.MultiheadAttention as torchvision's ViT calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def drop(x: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """The largest elements in the order of memory, and where they are."""
    flat = (x.movedim(1, -1) if channels_last(x) else x).reshape(-1)
    index = flat.abs().topk(int(keep * flat.numel()), sorted=False)[1]
    return flat[index], index.to(torch.int32)


def restore(values: Tensor, index: Tensor, shape: torch.Size, last: bool) -> Tensor:
    flat = values.new_zeros(shape.numel()).scatter_(0, index.long(), values)
    return flat.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last else flat.view(shape)


def channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, keep):
        ctx.shape = x.shape
        ctx.save_for_backward(*drop(x, keep), weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        values, index, weight = ctx.saved_tensors
        dx = dw = db = None
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
        if ctx.needs_input_grad[1]:
            dw = rows.mT @ restore(values, index, ctx.shape, False).view(-1, ctx.shape[-1])
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return dx, dw, db, None


class Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, keep, *geometry):
        ctx.shape, ctx.last, ctx.geometry = x.shape, channels_last(x), geometry
        ctx.save_for_backward(*drop(x, keep), weight)
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx, dy):
        values, index, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        x = restore(values, index, ctx.shape, ctx.last)
        grads = torch.ops.aten.convolution_backward(
            dy, x, weight, [weight.shape[0]], stride, padding, dilation, False, (0, 0), groups, ctx.needs_input_grad[:3]
        )
        return *grads, None, None, None, None, None


def linear(layer: nn.Linear, keep: float, x: Tensor) -> Tensor:
    return Linear.apply(x, layer.weight, layer.bias, keep)


def conv2d(layer: nn.Conv2d, keep: float, x: Tensor) -> Tensor:
    return Conv2d.apply(x, layer.weight, layer.bias, keep, layer.stride, layer.padding, layer.dilation, layer.groups)


def attention(layer: nn.MultiheadAttention, keep: float, x: Tensor, key: Tensor, value: Tensor, need_weights: bool) -> tuple[Tensor, None]:
    """Self-attention as torchvision's ViT calls it."""
    assert x is key is value and layer.batch_first and not need_weights
    projected = Linear.apply(x, layer.in_proj_weight, layer.in_proj_bias, keep)
    query, key, value = projected.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(query, key, value)
    return layer.out_proj(out.transpose(1, 2).flatten(2)), None


FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {nn.Linear: linear, nn.Conv2d: conv2d, nn.MultiheadAttention: attention}


def mink_(model: nn.Module, keep: float) -> None:
    """All layers of the model train this way from now on, in place."""
    for module in model.modules():
        for kind, forward in FORWARDS.items():
            if isinstance(module, kind):
                module.forward = partial(forward, module, keep)
