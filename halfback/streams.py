"""One tensor held as two streams, and how torch functions reach it.

A `Streams` stands for a tensor whose positions (tokens, pixels, frames) are split in two parts, `kept` and `dropped`. The
model's own code runs on it unmodified: it answers to torch's function protocol, so every torch function that meets one is
looked up by name in a table (ops.py). Its forward is the model's own; what it changes is who gets a gradient.

NOTE [five rules]
 1. Every op runs on both parts, as it is. Nothing is special-cased by model.
 2. Where a branch joins the trunk (an add), the dropped part of the branch is detached. A layer with weights, or attention,
    makes a branch; norms, dropout and scaling keep a trunk a trunk. The input of every chosen block is trunk, whatever
    made it. So the residual path of every position stays exact, and autograd frees what the dropped branch had saved.
 3. Attention computes its exact forward over all positions; its dropped queries are detached (attention.py).
 4. Merging is always exact, and reported. What is not understood is merged. Cuts happen only at joins, in attention, and
    at the output of a convolution that is split again: never at a merge.
 5. Streams end where the chosen blocks end: the exit of the last one merges, uncut (rewrite.py).

NOTE [weights]
Of n positions k are kept, and a kept one stands for n / k of them; one that is always kept, for itself. With `scale`, what a kept
position passes back to others (through attention's keys and values, through a depthwise convolution) counts that often: so those gradients
are right in the mean over masks. What it passes back to itself is exact as it is, and must not be scaled: kept positions are the same in
all layers, and factors would pile up. So gradients are weighed where attention or the convolution ends, which also cuts dropped positions
there, and unweighed for queries (attention.py) and for the middle of the kernel (ops.py). Other convolutions are left as they are: of
a full one the middle would cost a layer of its own.

NOTE [again]
Behind the attention of a block, dropped positions are computed for the forward alone: their branches are cut. So when a recomputed block
runs again, in the backward, they are left out there. torch's checkpoint counts what a block saves, though, and wants the same from both
runs: what dropped positions save behind an attention goes past it, and is held by those who saved it until they are cut. A block that
asked for dropped positions there (a merge), has a compiled function there, or drew random numbers, runs again as a whole; so does one of
which that is not known, from an earlier run of it or of another of its kind, and one in which something that went past was not cut (a norm
on the trunk, as BERT's). torch compares the shapes of what both runs save, and that the second saves enough. A block that keeps as many
positions as it drops, which shapes do not tell apart, runs again to its end, past where all is there: so it may not save more either.

NOTE [layout]
The whole tensor has shape (a..., P..., b...), where P are the `span` adjacent axes that positions lie on: one for tokens,
(H, W) for images. A part holds them flattened: (a..., p, b...), with p at `axis`. Where code folded the batch into the
positions, as (B * n, D), `outer` says how many sequences lie behind each other: a part is then (outer * p, D).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from .notes import constant, note
from .positions import Positions

TRUNK, BRANCH, WHOLE = "trunk", "branch", "whole"  # WHOLE: a branch that is approximated already, and not cut again


@dataclass(frozen=True)
class Site:
    """Where Streams come from: the block that they are in, who hears of merges, and how attention treats them."""

    block: str = ""
    owner: str = ""
    attention: str = "query"
    scale: bool = False


# Blocks that run again: NOTE [again]


_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Past:
    """What a dropped position saved, past the checkpoint."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Call:
    """One run of a recomputed block, and its second one."""

    def __init__(self, short: bool) -> None:
        self.short = short  # dropped positions are left out of the second one
        self.attentions = 0  # so far
        self.last: int | None = None  # how many there were; None in the first run
        self.asked = False  # for dropped positions, behind the last of them
        self.noise: list[bytes] = []  # the states of random generators there
        self.hooks = 0  # the id of the checkpoint's: they hold, by it and what it runs again, this
        self.past: list[weakref.ref[Past]] = []
        self.holds = False  # something that went past the checkpoint, after the first run

    def starts(self) -> None:
        self.attentions, self.hooks = 0, id(_hooks(False)[0])

    def alone(self) -> bool:
        """Is nobody between us and the checkpoint but Lean or DropIT? One inside the block counts too, and runs again by itself."""
        top = _hooks(False)
        return top is not None and (id(top[0]) == self.hooks or hasattr(getattr(top[0], "__self__", None), "stands_aside"))

    def pack(self, x: Tensor) -> Past:
        held = Past(x.detach())  # an output itself would close a cycle through its grad_fn
        if self.last is None:
            self.past.append(weakref.ref(held))
        return held

    @property
    def leaves_out(self) -> bool:
        return self.short and self.attentions == self.last and not self.asked

    def ended(self, device: torch.device) -> bool:
        """After the first run: could the second be short?"""
        self.last = self.attentions
        self.holds = any([p() is not None for p in self.past])
        self.past.clear()
        self.asked = self.asked or self.holds or (self.last > 0 and self.noise != _noise(device))
        return self.last > 0 and not self.asked


class Running(threading.local):
    call: Call | None = None


RUNNING = Running()


def running() -> Call | None:
    """The recomputed block that runs now, in eager mode."""
    return None if is_compiling() else RUNNING.call


def _noise(device: torch.device) -> list[bytes]:
    generators = [torch.default_generator, *(torch.cuda.default_generators[device.index or 0 :][:1] if device.type == "cuda" else ())]
    return [g.get_state().numpy().tobytes() for g in generators]


def beyond(device: torch.device) -> bool:
    """An attention's kept rows are there. Are its dropped ones to be left out, and all that follows of them?"""
    call = running()
    if call is None:
        return False
    call.attentions += 1
    if call.last is None:
        call.asked, call.noise = False, _noise(device)
    return call.leaves_out


def on_dropped(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """func of dropped parts; None where they are left out."""
    call = running()
    if call is None or not call.attentions:
        return func(*args, **kwargs)
    if call.leaves_out:
        return None
    alone = call.alone()
    if not alone:
        asked()
    if not (alone and call.short):
        return func(*args, **kwargs)
    with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
        return func(*args, **kwargs)


def _unpack(held: Past) -> Tensor:
    return held.tensor


def asked() -> None:
    """Somebody wants dropped positions, or draws random numbers for them."""
    call = running()
    if call is not None and call.last is None:
        call.asked = True


# Splitting and merging: every backward is a gather or a copy, never an addition


def interleave(kept: Tensor | None, dropped: Tensor | None, index: Tensor, k: int, dim: int) -> Tensor:
    """The whole axis from its two parts; a part that is None counts as zeros."""
    if kept is None or dropped is None:
        some: Any = kept if kept is not None else dropped
        shape = list(some.shape)
        shape[dim] = k if kept is None else index.shape[1] - k
        zeros = some.new_zeros(shape)
        kept, dropped = (zeros, dropped) if kept is None else (kept, zeros)
    return torch.cat((kept, dropped), dim).index_select(dim, index[1])  # type: ignore[arg-type]


def unfold(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """x.unflatten(dim, sizes), which Dynamo cannot trace under a torch function mode (`Route`)."""
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


class Split(torch.autograd.Function):
    """x -> (kept, dropped) along `dim`."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, k: int, dim: int):
        ctx.save_for_backward(index)
        ctx.k, ctx.dim = k, dim
        ctx.set_materialize_grads(False)
        kept, dropped = index[0].tensor_split((k,))
        return x.index_select(dim, kept), x.index_select(dim, dropped)

    @staticmethod
    def backward(ctx, grad_kept, grad_dropped):
        (index,) = ctx.saved_tensors
        if grad_kept is None and grad_dropped is None:
            return None, None, None, None
        return interleave(grad_kept, grad_dropped, index, ctx.k, ctx.dim), None, None, None


class Merge(torch.autograd.Function):
    """(kept, dropped) -> x along `dim`."""

    @staticmethod
    def forward(ctx, kept: Tensor, dropped: Tensor, index: Tensor, k: int, dim: int):
        ctx.save_for_backward(index)
        ctx.k, ctx.dim = k, dim
        return interleave(kept, dropped, index, k, dim)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        grad_kept = grad_dropped = None
        if ctx.needs_input_grad[0]:
            grad_kept = grad.index_select(ctx.dim, index[0, : ctx.k])
        if ctx.needs_input_grad[1]:
            grad_dropped = grad.index_select(ctx.dim, index[0, ctx.k :])
        return grad_kept, grad_dropped, None, None, None


class Weigh(torch.autograd.Function):
    """x, whose gradient is multiplied by `weight` along `dim`, but for the first `ones` there, of each of `outer` sequences."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: float, ones: int, dim: int, outer: int):
        ctx.settings = weight, ones, dim, outer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        weight, ones, dim, outer = ctx.settings
        weighed = grad * weight
        if ones:
            for to, of in zip(weighed.tensor_split(outer, dim), grad.tensor_split(outer, dim), strict=True):
                to.narrow(dim, 0, ones).copy_(of.narrow(dim, 0, ones))
        return weighed, None, None, None, None


class OwnPath(torch.autograd.Function):
    """y, a depthwise convolution of x: what goes back to the same position, through the kernel's middle, and `factor` times it."""

    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor, middle: Tensor, factor: float):
        ctx.save_for_backward(middle)
        ctx.factor = factor
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        (middle,) = ctx.saved_tensors
        return grad, grad * (ctx.factor * middle), None, None


def split_parts(x: Tensor, at: Positions, dim: int) -> tuple[Tensor, Tensor]:
    """Both parts of x along `dim`. Rows are gathered: where positions come last (channels first), the axis before them is what a row
    holds, and the parts lie in memory with channels last."""
    if x.ndim > 2 and dim == x.ndim - 1:
        kept, dropped = Split.apply(x.transpose(1, dim), at.index, at.k, 1)
        return kept.transpose(1, dim), dropped.transpose(1, dim)
    return Split.apply(x, at.index, at.k, dim)


def merge_parts(kept: Tensor, dropped: Tensor, at: Positions, dim: int) -> Tensor:
    run = Merge.apply if kept.requires_grad or dropped.requires_grad else interleave
    if kept.ndim > 2 and dim == kept.ndim - 1:
        return run(kept.transpose(1, dim), dropped.transpose(1, dim), at.index, at.k, 1).transpose(1, dim)
    return run(kept, dropped, at.index, at.k, dim)


@dataclass(eq=False)
class Streams:
    """One tensor as two parts, or as the whole that they are split from when somebody asks for them: a trunk that only convolutions
    and joins use is never taken apart. A dropped part of None was left out of the forward (SkipTokens); `rest` is what it was then."""

    parts: tuple[Tensor, Any] | None
    whole: Any  # a Tensor, or None where there are parts
    at: Positions
    axis: int
    span: int
    outer: int
    role: str
    site: Site
    rest: Any = None
    view_of_another: bool = False
    traced: bool = field(default_factory=is_compiling)  # made by a compiled function, maybe inside an eager block: NOTE [again]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return dispatch(_name(func), func, args, kwargs or {})

    def like(
        self,
        kept: Tensor,
        dropped: Tensor | None,
        axis: int | None = None,
        span: int | None = None,
        outer: int | None = None,
        role: str | None = None,
    ) -> Streams:
        """The same positions, other contents."""
        return Streams(
            (kept, dropped),
            None,
            self.at,
            self.axis if axis is None else axis,
            self.span if span is None else span,
            self.outer if outer is None else outer,
            self.role if role is None else role,
            self.site,
            self.rest,
        )

    @property
    def weight(self) -> float:
        """How many positions a kept one stands for: NOTE [weights]."""
        at = self.at
        return (at.n - at.always) / (at.k - at.always) if self.site.scale and at.k > at.always else 1.0

    def weighed(self, inverse: bool = False) -> Streams:
        """The same, whose kept positions count that often in the backward."""
        if self.weight == 1:
            return self
        kept, dropped = self.taken_apart()
        weight = 1 / self.weight if inverse else self.weight
        return self.like(Weigh.apply(kept, weight, self.at.always, self.axis, self.outer), dropped)

    def entering(self, site: Site) -> Streams:
        """The same contents as the trunk of another block (rule 2)."""
        return Streams(self.parts, self.whole, self.at, self.axis, self.span, self.outer, TRUNK, site, self.rest)

    def taken_apart(self) -> tuple[Tensor, Any]:
        if self.traced:
            asked()
        if self.parts is None and not torch.is_grad_enabled():  # they are kept for who wants gradients
            with torch.enable_grad():
                return self.taken_apart()
        if self.parts is None:
            self.parts = split_parts(self.whole.flatten(self.axis, self.axis + self.span - 1), self.at, self.axis)
        return self.parts

    @property
    def kept(self) -> Tensor:
        return self.taken_apart()[0]

    @property
    def dropped(self) -> Any:
        asked()
        return self.taken_apart()[1]

    @property
    def some(self) -> Tensor:
        """A tensor of its kind."""
        return self.parts[0] if self.parts is not None else self.whole

    @property
    def part_ndim(self) -> int:
        return self.parts[0].ndim if self.parts is not None else self.whole.ndim - self.span + 1

    # What a tensor says of itself

    @property
    def extents(self) -> tuple[int, ...]:
        """The sizes of the position axes of the whole tensor."""
        return (self.outer * self.at.n,) if self.span == 1 else self.at.grid

    @property
    def shape(self) -> torch.Size:
        if self.parts is None:
            return self.whole.shape
        part = self.parts[0].shape
        return torch.Size((*part[: self.axis], *self.extents, *part[self.axis + 1 :]))

    @property
    def ndim(self) -> int:
        return self.part_ndim + self.span - 1

    @property
    def dtype(self) -> torch.dtype:
        return self.some.dtype

    @property
    def device(self) -> torch.device:
        return self.some.device

    @property
    def is_cuda(self) -> bool:
        return self.some.is_cuda

    @property
    def is_nested(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        parts = (self.whole,) if self.parts is None else self.parts
        return any([p is not None and p.requires_grad for p in parts])

    @property
    def grad_fn(self):
        return self.some.grad_fn

    @property
    def mT(self):
        return dispatch("transpose", torch.transpose, (self, -1, -2), {})

    def size(self, dim: int | None = None):
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def ndimension(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.some.is_floating_point()

    def is_complex(self) -> bool:
        return self.some.is_complex()

    def get_device(self) -> int:
        return self.some.get_device()

    def is_contiguous(self, memory_format=torch.contiguous_format) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Streams(shape={tuple(self.shape)}, dtype={self.dtype}, {self.at.k} of {self.at.n} positions kept, {self.role})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise RuntimeError(
            f"{self.site.block}: halfback cannot assign to a part of streams. Use torch.where or masked_fill, or name the module in "
            "opaque=[...]."
        )

    @property
    def T(self):
        return dispatch("permute", torch.permute, (self, list(reversed(range(self.ndim)))), {})

    @property
    def data(self):
        return dispatch("detach", torch.detach, (self,), {})

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return iter(dispatch("unbind", torch.unbind, (self,), {}))


def _flatten(s: Streams):
    return (s.parts, s.whole, s.rest, s.at), (s.axis, s.span, s.outer, s.role, s.site)


def _unflatten(children, context) -> Streams:
    parts, whole, rest, at = children
    axis, span, outer, role, site = context
    asked()  # what was done to the parts meanwhile, nobody saw
    return Streams(parts, whole, at, axis, span, outer, role, site, rest)


pytree.register_pytree_node(Streams, _flatten, _unflatten, serialized_type_name="halfback.Streams")


def split(x: Tensor, at: Positions, axis: int, span: int, role: str, site: Site) -> Streams:
    """The two streams of a tensor whose positions lie on `span` axes from `axis` on. The trunk of a grid, which convolutions may want
    whole, is taken apart when needed; a branch at once, or what saves it would save all of it."""
    s = Streams(None, x, at, axis, span, 1, role, site)
    if role != TRUNK or span == 1:
        s.taken_apart()
        s.whole = None
    return s


def merge(s: Streams) -> Tensor:
    """The whole tensor, exactly (rule 4)."""
    if s.parts is None:
        return s.whole
    asked()
    (kept, dropped), axis = s.parts, s.axis
    if dropped is None and s.site.attention != "skip":  # NOTE [again]
        raise RuntimeError(
            f"{s.site.block}: an activation put aside while Recompute computed the block again has no dropped positions. Detach it "
            "where it is put aside, or look at it before the backward."
        )
    if dropped is None:
        raise RuntimeError(
            f"SkipTokens: {s.site.block} runs an operation that needs all positions, and the dropped ones are not there. "
            "Use SBP here, which keeps the forward exact, or leave this block out of layers=."
        )
    if s.outer != 1:
        kept = unfold(kept, axis, (s.outer, kept.shape[axis] // s.outer))
        dropped = unfold(dropped, axis, (s.outer, dropped.shape[axis] // s.outer))
        return merge_parts(kept, dropped, s.at, axis + 1).flatten(axis, axis + 1)
    whole = merge_parts(kept, dropped, s.at, axis)
    return whole if s.span == 1 else unfold(whole, axis, s.at.grid)


def merge_all(tree: Any) -> Any:
    """A nest of arguments or results with every Streams merged."""
    if isinstance(tree, Streams):
        return merge(tree)
    if tree is None or isinstance(tree, functools.partial):  # of which torch 2.11's compiler cannot tell that it is no dataclass
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[merge_all(x) for x in tree])
    if isinstance(tree, (list, tuple)):
        return type(tree)([merge_all(x) for x in tree])
    if isinstance(tree, dict):
        changed = {k: merge_all(v) for k, v in tree.items() if contains(v)}
        if not changed:
            return tree
        if type(tree) is dict:
            return {**tree, **changed}
        for k, v in changed.items():  # a dict with a class of its own, as transformers' outputs are
            tree[k] = v
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Positions)):
        for f in dataclasses.fields(tree):
            if contains(getattr(tree, f.name)):
                object.__setattr__(tree, f.name, merge_all(getattr(tree, f.name)))
    return tree


def contains(tree: Any) -> bool:
    if isinstance(tree, Streams):
        return True
    if tree is None or isinstance(tree, functools.partial):
        return False
    if isinstance(tree, (list, tuple)):
        return any([contains(x) for x in tree])
    if isinstance(tree, dict):
        return any([contains(x) for x in tree.values()])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Positions)):
        return any([contains(getattr(tree, f.name)) for f in dataclasses.fields(tree)])
    return False


# The dispatch

TABLE: dict[str, Callable] = {}  # name of a torch function -> its row; filled by ops.py


@constant
def _name(func: Callable) -> str:
    return func.__name__


ASKING = ("size", "dim", "requires_grad_")
REFUSED = frozenset("register_hook retain_grad backward register_post_accumulate_grad_hook set_".split())
LEADING = {"addmm": ("input", "mat1", "mat2"), "bmm": ("input", "mat2"), "conv1d": ("input", "weight")}
LEADING["where"] = ("condition", "input", "other")
LEADING |= {"conv2d": LEADING["conv1d"], "conv3d": LEADING["conv1d"]}
VIEWS = frozenset(
    "view reshape view_as reshape_as flatten unflatten permute transpose swapaxes swapdims t movedim moveaxis squeeze unsqueeze "
    "expand expand_as getitem chunk split tensor_split narrow unbind select detach".split()
)


class Aside(threading.local):
    """The mode that is set aside while a row runs."""

    mode: Any = None


ASIDE = Aside()


def dispatch(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run one torch function that met Streams: by its row in the table, or merged.

    A mode would be called for every shape that a row looks at. One that wants to (ledger.py) is set aside meanwhile, and asked how the
    functions on the parts are run."""
    modes = 0 if is_compiling() else torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(modes - 1) if modes else None
    if mode is None or not getattr(mode, "stands_aside", False):
        result = _by_row(name, func, args, kwargs)
    else:
        before, ASIDE.mode = ASIDE.mode, torch._C._pop_torch_function_stack()
        try:
            result = _by_row(name, func, args, kwargs)
        finally:
            ASIDE.mode = before
            torch._C._push_on_torch_function_stack(mode)
    if result is not NotImplemented:
        return result
    first: Any = find((*args, *kwargs.values()))
    note(first.site.owner, first.site.block, "merged", name)
    return seen(func)(*merge_all(args), **merge_all(kwargs))


def seen(func: Callable) -> Callable:
    """A function on a part, run as a mode that was set aside would have it."""
    mode = None if is_compiling() else ASIDE.mode
    return func if mode is None else mode.seen(func)


def _by_row(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    if name in REFUSED:
        _refuse(name, find((*args, *kwargs.values())))
    if not torch.is_grad_enabled() and name not in ASKING and (found := _constant(name, func, args, kwargs)) is not NotImplemented:
        return found
    plain, reverse, inplace, handler, func = (_way if is_compiling() else _known_way)(name, func)
    inplace = inplace or bool(kwargs and kwargs.get("inplace"))
    target = args[0] if args else None
    if inplace and not isinstance(target, Streams):  # of a plain tensor: it is changed itself
        return NotImplemented
    if handler is not None:
        if kwargs:
            args, kwargs = _positional(plain, args, kwargs)
        if reverse:
            args = (args[1], args[0])
        if inplace and "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        result = handler(plain, seen(func), args, kwargs)
        if result is not NotImplemented:
            if plain in VIEWS:
                _mark(result)
            return _assign(target, result, name) if inplace else result
    if inplace:
        raise _in_place(name, target)
    return NotImplemented


def _in_place(name: str, x: Any) -> RuntimeError:
    return RuntimeError(
        f"{x.site.block}: halfback cannot run {name}() in place on streams. Use its out-of-place form, or name the module in opaque=[...]."
    )


def _constant(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """With gradients switched off, by no_grad: it has none in the plain model either, and is a tensor from here on. A custom Function
    switches them off, too, and would lose them."""
    first: Any = find((*args, *kwargs.values()))
    if is_compiling() or _in_function():
        raise RuntimeError(
            f"{first.site.block or 'a block'} calls {name}() on activations with gradients switched off: in a custom autograd.Function, "
            "reentrant checkpointing, or compiled code, halfback cannot see what becomes of their gradients. Name the module in "
            "SBP(opaque=[...]) so that it gets plain tensors; for checkpointing use use_reentrant=False."
        )
    plain, _, inplace = _plain_name(name)
    if isinstance(kwargs.get("out"), Streams) or (args and isinstance(args[0], Streams) and (inplace or kwargs.get("inplace"))):
        raise _in_place(name, first)
    if plain in VIEWS:  # which somebody may change in place
        return NotImplemented
    return seen(func)(*merge_all(args), **merge_all(kwargs))


def _in_function() -> bool:
    """Does a custom Function run, of which this may be the forward?"""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not APPLY:
        frame = frame.f_back
    return frame is not None


APPLY = torch.autograd.Function.apply.__code__


def _way(name: str, func: Callable) -> tuple[str, bool, bool, Callable | None, Callable]:
    """Of a function: its plain name, whether it is reversed and in place, its row, and what is run on the parts."""
    plain, reverse, inplace = _plain_name(name)
    handler = TABLE.get(plain)
    return plain, reverse, inplace, handler, func if handler is None or plain == name else _functional(plain, func)


_known_way = functools.cache(_way)


def _refuse(name: str, first: Any) -> None:
    """What would lose hooks without a word."""
    raise RuntimeError(
        f"{first.site.block or 'a block'}: {name}() on an activation inside a chosen block would never be called: it is held as two "
        "streams. Name the module in SBP(opaque=[...]), or leave its block out of layers=."
    )


def _positional(plain: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Leading arguments that were given by name, in their places."""
    names = LEADING.get(plain, ("input", "other"))
    for key in names[len(args) :]:
        if key not in kwargs:
            break
        args = (*args, kwargs[key])
        kwargs = {k: v for k, v in kwargs.items() if k != key}
    return args, kwargs


def _mark(result: Any) -> None:
    for s in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(s, Streams):
            s.view_of_another = True


def find(args: Sequence) -> Streams | None:
    for a in args:
        if isinstance(a, Streams):
            return a
        if isinstance(a, (list, tuple)):
            found = find(a)
            if found is not None:
                return found
    return None


def _plain_name(name: str) -> tuple[str, bool, bool]:
    """`__radd__` -> ("add", reversed, not in place), `add_` -> ("add", not reversed, in place)."""
    if name[-1] != "_":
        return name, False, False
    if name.startswith("__"):
        bare = name.strip("_")
        if bare in REVERSED:
            return bare[1:], True, False
        if bare in INPLACE:
            return bare[1:], False, True
        return bare, False, False
    return (name, False, False) if name == "requires_grad_" else (name[:-1], False, True)


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
REVERSED = frozenset(f"r{o}" for o in OPERATORS)
INPLACE = frozenset(f"i{o}" for o in OPERATORS)
SPELLED = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
SPELLED |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}


def _functional(plain: str, func: Callable) -> Callable:
    name = SPELLED.get(plain, plain)
    return getattr(torch, name, None) or getattr(F, name, None) or getattr(Tensor, name, None) or func


def _assign(target: Any, result: Streams, name: str) -> Streams:
    """What an in-place operation leaves behind: the object that was named, with the new contents in its old dtype."""
    if target.view_of_another:
        raise RuntimeError(
            f"{target.site.block}: halfback cannot run {name}() in place on a view of streams: what it is a view of would not change. "
            "Use its out-of-place form, or name the module in opaque=[...]."
        )
    dtype = target.dtype
    if result.dtype != dtype:
        result = TABLE["to"]("to", seen(Tensor.to), (result, dtype), {})
    target.parts, target.whole, target.role = result.parts, result.whole, result.role
    target.axis, target.span, target.outer = result.axis, result.span, result.outer
    return target


def absent(s: Streams) -> bool:
    """Was the dropped part left out of the forward?"""
    return s.parts is not None and s.parts[1] is None


def same_layout(a: Streams, b: Streams) -> bool:
    """Do two lie alike, counted from the last axis, as broadcasting counts?"""
    return (
        (a.at is b.at or a.at.index is b.at.index)
        and a.part_ndim - a.axis == b.part_ndim - b.axis
        and a.span == b.span
        and a.outer == b.outer
        and (absent(a) == absent(b) or left_out())
    )


def left_out() -> bool:
    call = running()
    return call is not None and call.leaves_out


class Route(torch.overrides.TorchFunctionMode):
    """While a model is being compiled: Dynamo does not see the protocol on objects inside a tuple, as in cat((-b, a))."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for a in args:
            if isinstance(a, (list, tuple)) and find(a) is not None:
                return dispatch(_name(func), func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


ROUTE = Route()


def _method(name: str) -> Callable:
    func = getattr(Tensor, name)

    def method(self, *args, **kwargs):
        return dispatch(name, func, (self, *args), kwargs)

    method.__name__ = name
    return method


def _give_methods() -> None:
    """Every tensor method that Streams do not answer themselves goes through the dispatch."""
    unary = ("neg", "abs", "invert", "getitem", "eq", "ne", "lt", "le", "gt", "ge")
    operators = [f"__{o}__" for o in (*OPERATORS, *REVERSED, *INPLACE, *unary)]
    ordinary = [m for m in dir(Tensor) if not m.startswith("_")]
    for name in ordinary + operators:
        member = getattr(Tensor, name, None)
        callable_ = isinstance(member, (types.MethodDescriptorType, types.FunctionType))
        if member is not None and (name in operators or (callable_ and name not in FIELDS and not hasattr(Streams, name))):
            setattr(Streams, name, _method(name))


FIELDS = {f.name for f in dataclasses.fields(Streams)}
_give_methods()


@functools.cache
def _tell(einops: types.ModuleType) -> type:
    class Backend(einops.TorchBackend):  # type: ignore[name-defined]
        framework_name = __name__

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, Streams)

    return Backend


def tell_einops() -> None:
    """einops works on tensors that one of its backends knows, and looks for these among the subclasses of its own."""
    if "einops._backends" in sys.modules:
        _tell(sys.modules["einops._backends"])


class Through(torch.overrides.TorchFunctionMode):
    """A mode that sees the functions on the parts of Streams as it sees those on tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for kind in types:
            if not issubclass(kind, Tensor):
                with self:
                    return kind.__torch_function__(func, types, args, kwargs or {})
        return self.see(func, args, kwargs or {})

    def see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError
