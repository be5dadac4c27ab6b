"""Running a model without its memory, and without leaving a trace.

Fake tensors have shapes, dtypes and storages, and no contents. A model runs on them as it is, with its real parameters in place:
what they would compute is never computed. A model whose parameters are on the meta device gets fake ones for as long.

NOTE [integers are real]
Positions, masks and lengths are small, and models ask for their values (is nothing padded? then no mask is needed). So what is made
of integers and booleans alone is computed; a batch's token ids and labels stay what they are. All that has to do with floating point
numbers, which is nearly all of the memory and of the time, is fake.

NOTE [as a GPU would]
A laptop's tensors are CPU tensors, fake or not, and a few functions save other things on a CPU than on a GPU. `AsOnGPU` calls what a
GPU would call: dropout keeps a mask of bytes, attention with dropout stays fused, an RMS norm is one function.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .layers import opened
from .streams import Through

MOST_INTEGERS = 2**26  # more of them are fake
UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@contextlib.contextmanager
def weightless(model: nn.Module, on_gpu: bool = False) -> Iterator[FakeTensorMode]:
    """Within it, whatever the model computes is computed on fake tensors. `on_gpu`: as if they were on a GPU."""
    tensors = [*model.parameters(), *model.buffers()]
    own = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    mode = own or FakeTensorMode()
    mode.allow_non_fake_inputs = True  # parameters, and the counter of our draws, stay what they are
    with mode, _off_meta(model), RealIntegers(), AsOnGPU() if on_gpu else contextlib.nullcontext():
        try:
            yield mode
        except (*UNKNOWN, RuntimeError) as e:
            if re.search(r"\b(meta(,| and) cpu|cpu(,| and) meta)\b", str(e)):
                raise ValueError(
                    "tensors that the function given as batch closes over are on the meta device, and the model is not then. Make them "
                    "on the CPU, or give them as the batch."
                ) from e
            if not isinstance(e, UNKNOWN) and "not supported for tensor subclasses" not in str(e):
                raise
            asked = getattr(e, "func", e)
            raise ValueError(
                f"{type(model).__name__} asks for the value of a tensor ({asked}), which a tensor without contents does not have. "
                "Run it for real, as hb.profile(model, batch, real=True), or keep that part of the model out of the forward."
            ) from e


def faked(mode: FakeTensorMode, batch: Any, device: torch.device | str = "cpu") -> Any:
    """A batch as fake tensors; a function as it is. NOTE [integers are real]"""

    def fake(t: Tensor) -> Tensor:
        if isinstance(t, FakeTensor) or _known(t):
            return t
        if t.is_meta and not _floating(t):
            return torch.zeros(t.shape, dtype=t.dtype, device=device)
        if t.is_meta:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        return mode.from_tensor(t)

    return tree_map_only(Tensor, fake, batch)


@contextlib.contextmanager
def _off_meta(model: nn.Module) -> Iterator[None]:
    """Parameters and buffers on the meta device are fake ones on the CPU for a while; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    swapped: list[tuple[Any, str, Tensor]] = []
    for module in model.modules():
        for owner in (module._parameters, module._buffers):
            for name, t in owner.items():  # type: ignore[attr-defined]
                if t is None or not t.is_meta:
                    continue
                if id(t) not in made:
                    fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
                    made[id(t)] = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
                swapped.append((owner, name, t))
    try:
        for owner, name, t in swapped:
            owner[name] = made[id(t)]
        yield
    finally:
        for owner, name, t in swapped:
            owner[name] = t


class RealIntegers(TorchDispatchMode):
    """NOTE [integers are real]"""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(_known(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            return func(*args, **kwargs)
        try:
            out = func(*args, **kwargs)
        except UNKNOWN:  # somebody asks for a value, which is known
            out = None
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if any(_floating(t) for t in made) or sum(t.numel() for t in made) > MOST_INTEGERS:
            return out
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _floating(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _known(t: Tensor) -> bool:
    return not (isinstance(t, FakeTensor) or _floating(t) or t.is_meta)


class AsOnGPU(Through):
    """NOTE [as a GPU would]"""

    def see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in (F.dropout, torch.dropout):
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.rms_norm:
            return self._rms_norm(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return opened(func)(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(func, input, p=0.5, training=True, inplace=False, train=None):
        training = training if train is None else train
        if not training or inplace or not 0 < p < 1:
            return func(input, p, training)
        return torch.native_dropout(input, p, True)[0]

    @staticmethod
    def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **kwargs)

    @staticmethod
    def _rms_norm(input, normalized_shape, weight=None, eps=None):
        return torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


def backward(loss: Tensor) -> None:
    """loss.backward(), which as a torch function would run with all modes of functions off."""
    torch.autograd.graph._engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
