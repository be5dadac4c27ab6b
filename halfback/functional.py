"""Stochastic backpropagation of a single operation.

forward    y = f(x)                               exact
backward   dy_dropped = 0, so dx and dW come from kept positions alone    approximate
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .positions import Positions
from .streams import Merge, Split, split_parts, unfold


def sbp(f: Callable[[Tensor], Tensor], x: Tensor, positions: Positions, dim: int = 1, pointwise: bool = True) -> Tensor:
    """The paper's Algorithm 1 for an operation f that keeps positions, which lie on axis `dim` of x and of f(x).

    `pointwise=True`: f treats positions independently, so it runs on the kept ones with gradient and on the dropped ones without; what it
    saves for them is never held. `pointwise=False` is section 3.2.2, for an f that mixes positions (a convolution, over positions given
    on `len(positions.grid)` axes): f runs on all of x, and the gradients of its dropped outputs are zero.
    """
    span = 1 if pointwise else len(positions.grid)
    found = tuple(x.shape[dim : dim + span])
    if found != ((positions.n,) if pointwise else positions.grid):
        raise ValueError(
            f"sbp(): positions are of {positions.grid}, {positions.n} in all; x of shape {tuple(x.shape)} has {found} at dim={dim}."
        )
    positions = Positions(positions.index.to(x.device), positions.k, positions.grid, positions.always)
    if pointwise:
        kept, dropped = split_parts(x, positions, dim)
        with torch.no_grad():
            without = f(dropped)
        return Merge.apply(f(kept), without, positions.index, positions.k, dim)
    y = f(x)
    kept, dropped = Split.apply(y.flatten(dim, dim + span - 1), positions.index, positions.k, dim)
    return unfold(Merge.apply(kept, dropped.detach(), positions.index, positions.k, dim), dim, positions.grid)
