"""The kernels: on CUDA the fused ones (Triton), anywhere else the reference that defines them.

Each is a torch operator, `halfback::select` and so on, so a compiled graph holds it as one node and fake tensors pass through it on
any device. Those that are elementwise are seen by a compiler as the reference instead: it makes one kernel of them and of what is around
them, without a pass over the tensor for them alone. Triton is imported by the first call on a CUDA tensor, never before.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import reference
from .reference import GROUP, code_bits

__all__ = [
    "GROUP", "code_bits", "copy_rows", "cross_entropy_", "dequantise", "encode", "gate", "gate_again", "gate_backward",
    "normalise_channels", "normalise_rows", "pack_bits", "quantise", "reference", "restore", "scale_by_code", "select", "signs",
    "unpack_bits",
]  # fmt: skip


# Kept with torch, which forgets operators whose library is gone: a second import of this module goes on with the first one's.
LIBRARY = vars(torch.library).setdefault("_halfback", torch.library.Library("halfback", "FRAGMENT"))


@functools.cache
def _fused() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from . import fused

    return fused


def _at(x: Tensor, dtype: torch.dtype | None = None) -> ModuleType:
    """`dtype`: of numbers that are computed with, for which fp32, as the fused kernels have it, must do."""
    return (_fused() if x.is_cuda and dtype is not torch.float64 else None) or reference


def _elementwise(f: Callable) -> Callable:
    """f as a torch operator, but for a compiler."""
    operator, seen = _operator(f), getattr(reference, f.__name__)

    @functools.wraps(f)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (seen if torch.compiler.is_compiling() else operator)(x, *args, **kwargs)

    return call


def _operator(f: Callable) -> Callable:
    """f as a torch operator, for graphs and fake tensors, whose outputs are the reference's: their shapes depend on no data. Called on real
    tensors it is f itself, which saves the 50 microseconds that an operator in Python costs. One that ends in _ writes to its first
    tensor."""
    name, writes = f.__name__.rstrip("_"), f.__name__.endswith("_")

    @functools.wraps(f)
    def there(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_cuda and x.get_device() != torch.cuda.current_device():  # Triton launches on the current one
            with torch.cuda.device(x.device):
                return f(x, *args, **kwargs)
        return f(x, *args, **kwargs)

    first = next(iter(inspect.signature(f).parameters))
    # Not torch.library.custom_op, which adds 8 us to a call where this adds 3: it looks after gradients, which come from the functions
    # that call these.
    if not hasattr(torch.ops.halfback, name):
        LIBRARY.define(name + torch.library.infer_schema(there, mutates_args=(first,) if writes else ()), tags=torch.Tag.pt2_compliant_tag)
        LIBRARY.impl(name, there, "CompositeExplicitAutograd")
        torch.library.register_fake(f"halfback::{name}", getattr(reference, f"{name}_fake" if writes else name), lib=LIBRARY)
    op = getattr(torch.ops.halfback, name).default

    @functools.wraps(f)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (op if torch.compiler.is_compiling() or type(x) is FakeTensor else there)(x, *args, **kwargs)

    return call


@_operator
def select(x: Tensor, keep: float, block: int | None) -> tuple[Tensor, Tensor]:
    return _at(x).select(x, keep, block)


@_operator
def restore(values: Tensor, bits: Tensor, n: int, keep: float, block: int | None) -> Tensor:
    return _at(values).restore(values, bits, n, keep, block)


@_elementwise
def pack_bits(mask: Tensor) -> Tensor:
    return _at(mask).pack_bits(mask)


@_elementwise
def unpack_bits(bits: Tensor, n: int) -> Tensor:
    return _at(bits).unpack_bits(bits, n)


@_elementwise
def signs(x: Tensor) -> Tensor:
    return _at(x).signs(x)


@_operator
def quantise(x: Tensor, bits: int, group: int = GROUP, seed: int | None = None) -> tuple[Tensor, Tensor]:
    return _at(x).quantise(x, bits, group, seed)


@_operator
def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, group: int = GROUP, dtype: torch.dtype = torch.float32) -> Tensor:
    return _at(codes).dequantise(codes, scales, n, bits, group, dtype)


@_operator
def gate(g: Tensor, u: Tensor, name: str, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _at(g, g.dtype).gate(g, u, name, bits)


@_operator
def gate_again(
    codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, n: int, name: str, bits: int, dtype: torch.dtype
) -> Tensor:
    return _at(codes_g, dtype).gate_again(codes_g, scales_g, codes_u, scales_u, n, name, bits, dtype)


@_operator
def gate_backward(
    grad: Tensor, codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, name: str, bits: int
) -> tuple[Tensor, Tensor]:
    return _at(grad, grad.dtype).gate_backward(grad, codes_g, scales_g, codes_u, scales_u, name, bits)


@_operator
def encode(x: Tensor, edges: Tensor) -> Tensor:
    return _at(x).encode(x, edges)


@_elementwise
def scale_by_code(grad: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    return _at(grad).scale_by_code(grad, codes, table)


@_operator
def normalise_channels(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    return _at(x).normalise_channels(x, mean, inverse, weight, bias, residual, relu)


@_operator
def normalise_rows(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _at(x).normalise_rows(x, mean, inverse, weight, bias)


@_operator
def copy_rows(x: Tensor) -> Tensor:
    return _at(x).copy_rows(x)


@_operator
def cross_entropy_(scores: Tensor, target: Tensor, ignored: int, smoothing: float, gradient: bool) -> Tensor:
    return _at(scores).cross_entropy_(scores, target, ignored, smoothing, gradient)
