"""Lean and DropIT in a model that is being compiled.

The compiler decides itself what a compiled model holds, with the whole graph before it. It will not compute again what a matrix product
reads, though: gelu(x) is held beside x. So Lean marks cheap functions as ones to compute again (torch's checkpoint around a single
function is such a mark, and costs nothing else), and the compiler fuses that with what it computes anyway. One product of matrices is
among them: attention's last layer, of which the trunk behind attention is the sum.

DropIT's layers and activations become autograd.Functions, whose kernels are operators that the compiler leaves whole, but for elementwise
ones, which it fuses with what is around them. There is no ledger to tell who else holds a layer's input, so a store takes it where nobody
can: after a ReLU that follows no norm, and after an activation that keeps a code of its derivative. Random selections are left exact: a
graph would draw the same ones in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from . import kernels
from .attention import cast, multi_head
from .gates import Gate, Gated
from .layers import Coded, StoredLinear, changes_in_place, code_name, is_gated
from .notes import uncompiled
from .stores import Layout, Signs
from .streams import _name, dispatch, find

NORMS = frozenset("layer_norm rms_norm group_norm batch_norm instance_norm".split())
# Elementwise functions and copies whose output layers read, and norms without statistics to update. Not add: residual sums would be
# computed from the first one on.
AGAIN = frozenset(
    "layer_norm rms_norm group_norm gelu silu relu leaky_relu relu6 elu hardswish mish softplus tanh sigmoid mul div pow square "
    "contiguous".split()
)


VIEWS = frozenset("transpose permute reshape flatten view contiguous".split())
PRODUCTS = ("mul", "__mul__", "__rmul__")
AWAITS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "detach_", "requires_grad_")
LAYERS = {"linear": 0, "addmm": 1}  # and which of their arguments is what they read

# For torch.compile(model, options=...) of a model with recomputed blocks. Left to itself, the compiler keeps a block's largest tensors when
# it is done with them, for the next block to write into, and beside the backward of attention they are half of what is alive.
OPTIONS = {"allow_buffer_reuse": False}


class SignedReLU(torch.autograd.Function):
    """A ReLU that remembers where its output was positive."""

    @staticmethod
    def forward(ctx, x: Tensor):
        out = F.relu(x)
        ctx.layout = Layout.of(out)
        ctx.save_for_backward(*Signs().compress(out))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        positive = ctx.layout.of_flat(kernels.unpack_bits(ctx.saved_tensors[0], ctx.layout.n))
        return torch.where(positive, grad, 0)


class StoredConvolution(torch.autograd.Function):
    """What layers.StoredLinear does, of a convolution, whose dx does not depend on x either."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple, store: Any, seed: int):
        ctx.store, ctx.layout, ctx.settings = store, Layout.of(x), settings
        ctx.save_for_backward(weight, *store.compress(x, 1, seed))
        return torch.ops.aten.convolution(x, weight, bias, *settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        weight, *held = ctx.saved_tensors
        x = ctx.store.restore(tuple(held), ctx.layout)
        needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        sizes = [weight.shape[0]] if needed[2] else None
        grads = torch.ops.aten.convolution_backward(grad, x, weight, sizes, *ctx.settings, needed)
        return *grads, None, None, None


class Marking(TorchFunctionMode):
    """While a model is traced: cheap functions are marked as ones to compute again, and DropIT's layers get their stores. What is inside of
    a checkpoint is computed again anyway, and a mark there would make the compiler hold what the marked function reads."""

    def __init__(self, watch: Any, checkpointed: bool = False):
        super().__init__()
        self.watch, self.checkpointed = watch, checkpointed
        self.marked: set[Tensor] = set()  # outputs of marked functions
        self.normed: list[Tensor] = []  # outputs of norms
        self.alone: list[Tensor] = []  # outputs that nobody needs but the layers that read them
        self.factors: list[tuple[Tensor, Tensor, Gate]] = []  # outputs of coded activations, and their inputs
        self.products: list[tuple[Tensor, Gate, list[Tensor]]] = []  # of such outputs, and what is held of the factors
        self.attended: list[Tensor] = []  # what attention gave, and views of it
        self.projected: list[Tensor] = []  # what a layer made of that, and views of it

    @uncompiled
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():  # between two graphs of a model that is not one, or beyond torch's limit of graphs
            if self.watch.ledger is None:
                return func(*args, **kwargs)
            with self.watch.ledger.back():
                return func(*args, **kwargs)
        if find(args) is not None or find(tuple(kwargs.values())) is not None:
            with self:
                return dispatch(_name(func), func, args, kwargs)
        name = _name(func)
        if name == "unflatten":  # the method is one of Python's, which cannot be traced here
            func = torch.unflatten
        self.forget(name, args, kwargs)
        if name == "multi_head_attention_forward":  # inside which a mode is off
            with self:
                out = multi_head(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if kwargs.get("inplace"):
            return self.in_place(func, args, kwargs) if name in AGAIN else func(*args, **kwargs)
        if self.watch.approximates:
            out = self.approximate(name, args, kwargs)
            if out is not None:
                return out
        if name == "linear" and len(args) > 1 and args[0].ndim > 2 and not args[0].is_contiguous():
            args = (self.again(Tensor.contiguous, args[:1], {}), *args[1:])  # which it would do itself, unmarked
        out = self.again(func, args, kwargs) if name in AGAIN or self.joins(name, args) else func(*args, **kwargs)
        if name in NORMS:
            self.normed.append(out)
        self.follow(name, args, kwargs, out)
        return out

    def forget(self, name: str, args: tuple, kwargs: dict) -> None:
        """What is known of tensors that a function changes, or that somebody waits at. Of torch.relu_ and its like, called by themselves, a
        mode hears nothing while a model is traced."""
        inplace = kwargs.get("inplace") or any([a is True for a in args])  # of a dropout it is the last of four
        if changes_in_place(name) or name in AWAITS or inplace or kwargs.get("out") is not None:
            self.factors, self.products = [], []  # of all, as they may be seen through views
        if name in ("add_", "__iadd__", "sub_", "mul_", "__isub__", "__imul__"):  # it is what the norm made no more
            self.normed = [t for t in self.normed if t is not args[0]]

    def in_place(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """What x becomes is written to it, and falls away if nobody reads it; the model goes on with what can be marked. That reads a copy,
        which falls away too: its backward may need x as it was."""
        with self:
            out = func(args[0].clone(), *args[1:], **{**kwargs, "inplace": False})
        args[0].copy_(out)
        self.factors, self.products = [], []
        return out

    def joins(self, name: str, args: tuple) -> bool:
        """Is it attention's last layer, or the sum that it goes into? Both can be computed again from what is held for others, so the sum
        is not held: a product with a matrix of the trunk's width, for one in ten of a block's tensors."""
        if name in LAYERS:
            return len(args) > LAYERS[name] and _among(args[LAYERS[name]], self.attended)
        return name in ("add", "__add__") and len(args) == 2 and any([_among(a, self.projected) for a in args])

    def follow(self, name: str, args: tuple, kwargs: dict, out: Any) -> None:
        if name == "scaled_dot_product_attention":
            self.attended.append(out)
        elif name in LAYERS and self.joins(name, args):
            if out.requires_grad:  # or the sum's parts would be held for the sum alone
                self.projected.append(out)
        elif len(args) > 0 and (name in VIEWS or (name == "dropout" and _does_nothing(args, kwargs))):
            for made in (self.attended, self.projected):
                if _among(args[0], made):
                    made.append(out)

    def again(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        """Run a function, marked. What one marked function makes and another reads would be held, as what stands between two
        checkpointed blocks is: silu(g) for silu(g) * u. Unless they are no neighbours, so views are put in between."""
        if self.checkpointed or not self.watch.computes:
            return func(*args, **kwargs)
        args = tuple([a.unsqueeze(0).squeeze(0) if isinstance(a, Tensor) and a in self.marked else a for a in args])
        out = checkpoint(func, *args, use_reentrant=False, **kwargs)
        if out.requires_grad:  # not inside an autograd.Function, where nothing is held, nor may be noted
            self.marked.add(out)
        return out

    def approximate(self, name: str, args: tuple, kwargs: dict) -> Tensor | None:
        """DropIT's way to run a function, if there is one."""
        bits = self.watch.activation_bits
        bits = bits and (4 if bits == 4 else 8)  # a number that stands here, as of a setting the compiler may make one that varies
        if not args:
            return None
        if name == "dropout" and _does_nothing(args, kwargs):
            return args[0]  # and so the one that a layer reads is the one that was made
        if name in ("gelu", "silu") and bits is not None and args[0].requires_grad:
            code = code_name(name, kwargs)
            out = Coded.apply(args[0], code, bits)
            if out.requires_grad:
                self.alone.append(out)
                self.factors.append((out, args[0], Gate(code, bits)))
            return out
        if name in PRODUCTS and len(args) == 2 and not kwargs:
            return self.product(*args)
        if name == "relu" and args[0].requires_grad and not _among(args[0], self.normed):
            out = SignedReLU.apply(args[0])
            self.alone.append(out)
            return out
        if name in ("linear", "conv1d", "conv2d", "conv3d") and len(args) > 1 and (self.watch.firm or _among(args[0], self.alone)):
            return self.layer(name, args, kwargs)
        return None

    def product(self, a: Any, u: Any) -> Tensor | None:
        """f(g) * u, of an activation that would hold a code: then nobody reads the code, and it falls away."""
        for made, g, gate in self.factors:
            other = u if a is made else a if u is made else None
            if is_gated(g, made, other):
                out, *held = Gated.apply(g, other, made.detach(), gate, a is made)
                self.alone.append(out)
                self.products.append((out, gate, held))
                return out
        return None

    def layer(self, name: str, args: tuple, kwargs: dict) -> Tensor | None:
        if self.watch.store is None or self.watch.draws() or not self.watch.wants(args[1]):
            return None
        x, weight, bias = cast(args[0]), cast(args[1]), cast(args[2] if len(args) > 2 else kwargs.get("bias"))
        axis = -1 if name == "linear" else 1
        for made, gate, held in self.products:
            if x is made and name == "linear":
                return StoredLinear.apply(x, weight, bias, gate, 0, *held)
        store, seed = self.watch.store_for(x, weight, axis), self.watch.method.seed
        if store.bytes(Layout.of(x), axis) >= x.numel() * x.itemsize:
            return None
        if name == "linear":
            return StoredLinear.apply(x, weight, bias, store, seed)
        settings = _settings(x.ndim - 2, args[3:], kwargs)
        return None if settings is None else StoredConvolution.apply(x, weight, bias, settings, store, seed)


def marks(watch: Any) -> bool:
    """Is a model being traced with a marking of this watch?"""
    return any([isinstance(mode, Marking) and mode.watch is watch for mode in _get_current_function_mode_stack()])


def _does_nothing(args: tuple, kwargs: dict) -> bool:
    """A dropout."""
    return _given(args, kwargs, 1, "p", 0.5) == 0 or not _given(args, kwargs, 2, "training", True)


def _given(args: tuple, kwargs: dict, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _among(x: Tensor, made: list[Tensor]) -> bool:
    return any([x is t for t in made])


def _settings(dims: int, args: tuple, kwargs: dict) -> tuple | None:
    """The arguments of a convolution as aten wants them; None where padding is given in words."""
    given = [1, 0, 1, 1]
    for i, key in enumerate(("stride", "padding", "dilation", "groups")):
        given[i] = args[i] if len(args) > i else kwargs.get(key, given[i])
    if isinstance(given[1], str):
        return None
    stride, padding, dilation = ([g] * dims if isinstance(g, int) else list(g) for g in given[:3])
    return stride, padding, dilation, False, [0] * dims, given[3]
