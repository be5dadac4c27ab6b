"""Lean and DropIT in a model that is being compiled.

The compiler decides itself what a compiled model holds, with the whole graph before it. It will not compute again what a matrix product
reads, though: gelu(x) is held beside x. So Lean marks cheap functions as ones to compute again (torch's checkpoint around a single
function is such a mark, and costs nothing else), and the compiler fuses that with what it computes anyway.

DropIT's layers and activations become autograd.Functions, whose kernels are operators that the compiler leaves whole. Without a ledger, who
else holds a layer's input is told by what made it: the output of a norm, of an exact activation or of attention can be had exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .streams import Streams, _name, dispatch, find

# Elementwise functions whose output layers read, and norms. Not add: residual sums would be computed from the first on.
AGAIN = frozenset(
    "layer_norm rms_norm group_norm gelu silu relu leaky_relu relu6 elu hardswish mish softplus tanh sigmoid mul div pow square".split()
)


class Marking(TorchFunctionMode):
    """While a model is traced: cheap functions are marked as ones to compute again."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if find(args) is not None or find(tuple(kwargs.values())) is not None:
            with self:
                return dispatch(_name(func), func, args, kwargs)
        if _name(func) in AGAIN and not kwargs.get("inplace"):
            return checkpoint(func, *args, use_reentrant=False, **kwargs)
        return func(*args, **kwargs)
