"""The table of torch functions that run on Streams: a row for each way in which functions treat positions.

A row is a function of (name, func, args, kwargs) that returns a result, or NotImplemented where it cannot tell where the positions go:
the dispatch then merges, exactly, and reports it. To add an operation, add its name to the row that treats positions as it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import attend, multi_head
from .notes import note
from .streams import (
    BRANCH,
    TABLE,
    TRUNK,
    WHOLE,
    OwnPath,
    Streams,
    absent,
    asked,
    find,
    merge,
    on_dropped,
    same_layout,
    seen,
    split,
    split_parts,
    unfold,
)


def streams_in(args: Sequence) -> list[Streams]:
    out: list[Streams] = []
    for a in args:
        if isinstance(a, Streams):
            out.append(a)
        elif isinstance(a, (list, tuple)):
            out.extend(streams_in(a))
    return out


def _share(t: Tensor, like: Streams) -> tuple[Tensor, Tensor] | None:
    """The two parts of a plain tensor that is broadcast against Streams; None where that cannot be told."""
    after = like.part_ndim - like.axis - 1
    if t.ndim <= after:
        return t, t
    while t.ndim < after + like.span:
        t = t.unsqueeze(0)
    first = t.ndim - after - like.span
    sizes = tuple(t.shape[first : first + like.span])
    if all([s == 1 for s in sizes]):
        t = t.flatten(first, first + like.span - 1)
        return t, t
    if like.outer != 1:  # the batch is folded into the positions
        if sizes != tuple(like.extents):
            return None
        parts = split_parts(unfold(t, first, (like.outer, like.at.n)), like.at, first + 1)
        return parts[0].flatten(first, first + 1), parts[1].flatten(first, first + 1)
    if sizes != tuple(like.extents):
        t = t.expand(*t.shape[:first], *like.extents, *t.shape[first + like.span :])
    return split_parts(t.flatten(first, first + like.span - 1), like.at, first)


def _parts(args: Any, like: Streams) -> tuple[Any, Any] | None:
    """Arguments for the kept and for the dropped part."""
    if isinstance(args, Streams):
        return args.taken_apart() if args is like or same_layout(args, like) else None
    if isinstance(args, Tensor):
        return _share(args, like)
    if not isinstance(args, (list, tuple)):
        return args, args
    kept, dropped = [], []
    for a in args:
        pair = _parts(a, like)
        if pair is None:
            return None
        kept.append(pair[0])
        dropped.append(pair[1])
    return type(args)(kept), type(args)(dropped)


def _role(streams: Sequence[Streams], weights: bool = False) -> str:
    roles = [s.role for s in streams]
    if WHOLE in roles:
        return WHOLE
    return BRANCH if weights or BRANCH in roles else TRUNK


def both(s: Streams, f: Callable, axis: int | None = None, span: int | None = None, outer: int | None = None, role=None) -> Any:
    """f on each part (rule 1). f may return a tensor or a sequence of them."""
    kept, dropped = s.taken_apart()
    return _zip(s, f(kept), None if dropped is None else on_dropped(f, dropped), axis, span, outer, role)


def _zip(s: Streams, kept: Any, dropped: Any, axis=None, span=None, outer=None, role=None) -> Any:
    if isinstance(kept, (list, tuple)):
        pairs = zip(kept, dropped if dropped is not None else [None] * len(kept), strict=True)
        return tuple([_zip(s, k, d, axis, span, outer, role) for k, d in pairs])
    return s.like(kept, dropped, axis, span, outer, role)


def part_axis(s: Streams, dim: int) -> int | None:
    """An axis of the whole tensor as an axis of its parts; None for a position axis."""
    dim = dim % s.ndim
    if s.axis <= dim < s.axis + s.span:
        return None
    return dim if dim < s.axis else dim - s.span + 1


def _argument(args: tuple, kwargs: dict, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# The rows


def pointwise(name, func, args, kwargs):
    """Each position by itself, broadcasting."""
    if name == "where" and len(args) == 1:  # nonzero's indices
        return NotImplemented
    streams = streams_in((*args, *kwargs.values()) if kwargs else args)
    like = streams[0]
    for other in streams[1:]:
        if other.part_ndim > like.part_ndim:
            like = other
    if name == "add" and len(args) == 2 and not kwargs:
        joined = _whole_join(*args)
        if joined is not None:
            return joined
    joins = name in JOINS and len(streams) > 1 and any([s.role == TRUNK for s in streams]) and all([same_layout(s, like) for s in streams])
    pairs = _parts([_branch(a) if isinstance(a, Streams) else a for a in args] if joins else args, like)
    named = {key: _parts(value, like) for key, value in kwargs.items()} if kwargs else kwargs
    if pairs is None or any([pair is None for pair in named.values()]):
        return NotImplemented
    (kept_args, dropped_args), role = pairs, TRUNK if joins else _role(streams)
    kept = func(*kept_args, **{key: pair[0] for key, pair in named.items()}) if named else func(*kept_args)
    dropped = None
    if not absent(like):
        dropped = on_dropped(func, *dropped_args, **{key: pair[1] for key, pair in named.items()})
    return like.like(kept, dropped, axis=kept.ndim - like.part_ndim + like.axis, role=role)


TWICE = (
    "halfback: double backward (create_graph=True) through SBP is not supported: its gradient is none of a function. Use hb.exact(model)."
)
JOINS = ("add", "sub", "addcmul")


def _whole_join(x: Any, y: Any) -> Streams | None:
    """A trunk that is still whole, joined by a branch or by a plain tensor, stays whole: one pass instead of two adds and a merge."""
    for trunk, other in ((x, y), (y, x)):
        if not isinstance(trunk, Streams) or trunk.parts is not None or trunk.role != TRUNK:
            continue
        if isinstance(other, Streams):
            if other.role == TRUNK or not same_layout(trunk, other) or other.shape != trunk.shape:
                return None
            other = merge(_branch(other))
        elif not isinstance(other, Tensor) or other.shape != trunk.shape:
            return None
        whole = seen(torch.add)(trunk.whole, other)
        return Streams(None, whole, trunk.at, trunk.axis, trunk.span, 1, TRUNK, trunk.site)
    return None


def _branch(s: Streams) -> Streams:
    """Rule 2: where trunk and branch meet, the branch's dropped part is a constant."""
    if s.role != BRANCH:
        return s
    note(s.site.owner, s.site.block, "cut", "")
    kept, dropped = s.taken_apart()
    if kept.requires_grad and s.site.attention != "skip" and not torch.compiler.is_compiling():
        kept.register_hook(_once)
    return s.like(kept, None if dropped is None else dropped.detach())


def _once(grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(TWICE)


def per_part(name, func, args, kwargs):
    """Functions of one tensor that do not care for its shape. Of another argument (type_as, to) only dtype and device count."""
    rest = [a.some if isinstance(a, Streams) else a for a in args[1:]]
    keyword = {k: v.some if isinstance(v, Streams) else v for k, v in kwargs.items()}
    if not isinstance(args[0], Streams):
        return func(args[0], *rest, **keyword)
    if name == "detach" or (name in RANDOM and _draws(name, args, kwargs)):  # detached: for somebody who may look at it later
        asked()
    return both(args[0], lambda part: func(part, *rest, **keyword))


RANDOM = ("dropout", "native_dropout", "rrelu")


def _draws(name: str, args: tuple, kwargs: dict) -> bool:
    if name == "rrelu":
        return bool(_argument(args, kwargs, 3, "training", False))
    return _argument(args, kwargs, 1, "p", 0.5) != 0 and bool(_argument(args, kwargs, 2, "training", kwargs.get("train", True)))


def blank(name, func, args, kwargs):
    """New tensors made in the likeness of Streams are whole, plain tensors."""
    s = args[0]
    likeness = s.some.new_empty(()).expand(s.shape)
    return func(likeness, *args[1:], **kwargs)


def linear(name, func, args, kwargs):
    """Layers on the last axis: y = x W' + b."""
    x = args[0]
    if not isinstance(x, Streams) or x.axis == x.part_ndim - 1 or find((*args[1:], *kwargs.values())) is not None:
        return NotImplemented
    return both(x, lambda part: func(part, *args[1:], **kwargs), role=_role([x], weights=True))


def addmm(name, func, args, kwargs):
    """A bias and a linear layer in one, as transformers' Conv1D has it."""
    bias, x, weight = args
    if not isinstance(x, Streams) or x.axis != 0 or x.span != 1 or isinstance(bias, Streams) or bias.ndim > 1:
        return NotImplemented
    return both(x, lambda part: func(bias, part, weight, **kwargs), role=_role([x], weights=True))


def matmul(name, func, args, kwargs):
    """Rows of the first factor are positions; a second factor that has them too is merged, exactly."""
    x, y = args
    if not isinstance(x, Streams) or x.ndim < 2 or x.span != 1 or x.axis != x.part_ndim - 2:
        return NotImplemented
    if isinstance(y, Streams):
        note(y.site.owner, y.site.block, "merged", f"second factor of {name}")
        y = merge(y)
    if y.ndim < 2 or y.ndim > x.ndim:
        return NotImplemented
    return both(x, lambda part: func(part, y, **kwargs), role=_role([x], weights=True))


def norm(name, func, args, kwargs):
    """layer_norm and rms_norm: over the last axes."""
    x = args[0]
    shape = _argument(args, kwargs, 1, "normalized_shape")
    if not isinstance(x, Streams) or x.ndim - len(shape) < x.axis + x.span:
        return NotImplemented
    return both(x, lambda part: func(part, *args[1:], **kwargs))


def along(name, func, args, kwargs):
    """Reductions and softmaxes over axes that are not positions."""
    x = args[0]
    dim = _argument(args, kwargs, 1, "dim")
    if not isinstance(x, Streams) or dim is None or isinstance(dim, bool):
        return NotImplemented
    dims = [part_axis(x, d) for d in ([dim] if isinstance(dim, int) else dim)]
    if not dims or None in dims:
        return NotImplemented
    place = dims[0] if isinstance(dim, int) else dims
    keyword = {k: v for k, v in kwargs.items() if k != "dim"}
    gone = 0
    if name in REDUCTIONS and not _argument(args, kwargs, 2, "keepdim", False):
        gone = len([d for d in dims if d < x.axis])
    return both(x, lambda part: func(part, place, *args[2:], **keyword), axis=x.axis - gone)


REDUCTIONS = ("mean", "sum", "amax", "amin", "logsumexp", "prod")
KEEPING = ("softmax", "log_softmax", "cumsum", "cumprod")


class Chosen(NamedTuple):
    values: Any
    indices: Any


CHOOSING = {  # what their arguments are called, behind the first
    "topk": ("k", "dim", "largest", "sorted"),
    "sort": ("dim", "descending"),
    "argsort": ("dim", "descending"),
    "max": ("dim", "keepdim"),
    "min": ("dim", "keepdim"),
    "argmax": ("dim", "keepdim"),
    "argmin": ("dim", "keepdim"),
    "gather": ("dim", "index"),
}


def choosing(name, func, args, kwargs):
    """Along an axis that is no position: which values are largest, and values by such indices."""
    x, names = args[0], CHOOSING[name]
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    dim = given.get("dim", -1 if name in ("topk", "sort", "argsort") else None)
    if not isinstance(x, Streams) or not isinstance(dim, int) or isinstance(dim, bool) or len(args) > len(names) + 1 or "out" in given:
        return NotImplemented
    given["dim"] = axis = part_axis(x, dim)
    if axis is None:
        return NotImplemented
    if name == "gather":
        index = _parts(given.pop("index"), x)
        if index is None or (index[1] is None) != absent(x):
            return NotImplemented
        (kept, dropped), (at_kept, at_dropped) = x.taken_apart(), index
        made = func(kept, index=at_kept, **given)
        return x.like(made, None if absent(x) else on_dropped(lambda: func(dropped, index=at_dropped, **given)))
    gone = name in ("max", "min", "argmax", "argmin") and not given.get("keepdim", False) and axis < x.axis
    made = both(x, lambda part: func(part, **given), axis=x.axis - gone)
    return Chosen(*made) if isinstance(made, tuple) else made


def vector_norm(name, func, args, kwargs):
    """Over all positions: the norm of both parts' norms. Their merged copy would be held beside them."""
    x, order = args[0], _argument(args, kwargs, 1, "p" if name == "norm" else "ord", 2)
    order = 2 if order == "fro" else order
    dim = _argument(args, kwargs, 2, "dim")
    dims = [] if dim is None or not isinstance(x, Streams) else sorted(d % x.ndim for d in ([dim] if isinstance(dim, int) else dim))
    others = len(args) > 4 or kwargs.get("dtype") is not None or kwargs.get("out") is not None
    if not dims or order not in (1, 2, math.inf) or x.outer != 1 or absent(x) or others:
        return NotImplemented
    if dims != list(range(x.axis, x.axis + x.span)):
        return NotImplemented
    norms = torch.stack([torch.linalg.vector_norm(part, order, x.axis) for part in (x.kept, x.dropped)])
    out = torch.linalg.vector_norm(norms, order, 0)
    for d in dims if _argument(args, kwargs, 3, "keepdim", False) else ():
        out = out.unsqueeze(d)
    return out


def pieces(name, func, args, kwargs):
    """chunk, split, tensor_split, narrow: along an axis that is no position."""
    x = args[0]
    where = 1 if name == "narrow" else 2
    dim = _argument(args, kwargs, where, "dim", 0)
    axis = part_axis(x, dim) if isinstance(x, Streams) else None
    if axis is None:
        return NotImplemented
    keyword = {k: v for k, v in kwargs.items() if k != "dim"}
    if name == "narrow":
        return both(x, lambda part: func(part, axis, *args[2:], **keyword))
    return both(x, lambda part: func(part, *args[1:2], dim=axis, **keyword))


def unbind(name, func, args, kwargs):
    """unbind and select: the axis goes."""
    x = args[0]
    axis = part_axis(x, _argument(args, kwargs, 1, "dim", 0))
    if axis is None:
        return NotImplemented
    index = (_argument(args, kwargs, 2, "index"),) if name == "select" else ()
    return both(x, lambda part: func(part, axis, *index), axis=x.axis - (axis < x.axis))


def repeat_interleave(name, func, args, kwargs):
    """Along an axis that is no position, as of key and value heads."""
    x, repeats = args[0], _argument(args, kwargs, 1, "repeats")
    dim = _argument(args, kwargs, 2, "dim")
    axis = None if dim is None else part_axis(x, dim)
    if axis is None or not isinstance(repeats, int):
        return NotImplemented
    return both(x, lambda part: func(part, repeats, dim=axis))


def cat(name, func, args, kwargs):
    """cat and stack along an axis that is no position."""
    tensors = _argument(args, kwargs, 0, "tensors")
    dim = _argument(args, kwargs, 1, "dim", 0)
    if name in ("cat", "concat"):  # torch ignores empty vectors here, and so do growing caches
        tensors = [t for t in tensors if isinstance(t, Streams) or t.shape != (0,)]
        if len(tensors) == 1:
            return tensors[0]
    streams = streams_in(tensors)
    like = streams[0]
    ndim = like.ndim + (name == "stack")
    dim = dim % ndim
    inside = like.axis < dim < like.axis + like.span if name == "stack" else like.axis <= dim < like.axis + like.span
    if inside or any([t.ndim != like.ndim for t in tensors]):
        return NotImplemented
    pairs = _parts(list(tensors), like)
    if pairs is None:
        return NotImplemented
    axis = dim if dim <= like.axis else dim - like.span + 1
    kept = func(pairs[0], axis)
    dropped = None if absent(like) else on_dropped(func, pairs[1], axis)
    moved = 1 if name == "stack" and axis <= like.axis else 0
    return like.like(kept, dropped, axis=like.axis + moved, role=_role(streams))


# Views


def _sizes(args: Sequence) -> list:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple, torch.Size)) else list(args)


def reshaped(s: Streams, shape: Sequence[int], func: Callable) -> Any:
    """A view whose position axes can still be told from the others; else NotImplemented."""
    shape, part, n = [int(x) if isinstance(x, Tensor) else x for x in shape], s.kept.shape, s.at.n
    before = math.prod(part[: s.axis]) * s.outer
    if -1 in shape:
        known = math.prod([x for x in shape if x != -1])
        shape[shape.index(-1)] = before * n * math.prod(part[s.axis + 1 :]) // known if known else 0
    count = 1
    for i, extent in enumerate(shape):
        if count == before and extent != 1:
            span, product = 1, extent
            while product < n and i + span < len(shape):
                product *= shape[i + span]
                span += 1
            spread = tuple(shape[i : i + span])
            if product == n and (span == 1 or spread == s.at.grid):
                return _viewed(s, shape, i, span, 1, func)
            return NotImplemented
        if count < before and count * extent == before * n and before % count == 0:
            return _viewed(s, shape, i, 1, before // count, func)
        count *= extent
    return NotImplemented


def _viewed(s: Streams, shape: list[int], axis: int, span: int, outer: int, func: Callable) -> Streams:
    front, back = shape[:axis], shape[axis + span :]
    kept, dropped = s.taken_apart()
    kept = func(kept, (*front, outer * s.at.k, *back))
    if dropped is not None:
        dropped = on_dropped(func, dropped, (*front, outer * (s.at.n - s.at.k), *back))
    return s.like(kept, dropped, axis, span, outer)


def reshape(name, func, args, kwargs):
    """Views in which the positions can still be told from the rest."""
    x = args[0]
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        return both(x, lambda part: func(part, args[1]))
    if name.endswith("_as"):
        shape: Sequence = args[1].shape
    else:
        shape = _sizes(args[1:]) if len(args) > 1 else kwargs.get("shape", kwargs.get("size"))
    if not isinstance(x, Streams):
        return NotImplemented
    return reshaped(x, shape, seen(torch.reshape))  # a part need not be contiguous where the whole tensor was


def flatten(name, func, args, kwargs):
    """As a view."""
    x = args[0]
    start = _argument(args, kwargs, 1, "start_dim", 0) % x.ndim
    end = _argument(args, kwargs, 2, "end_dim", -1) % x.ndim
    shape = list(x.shape)
    return reshaped(x, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]], seen(torch.reshape))


def unflatten(name, func, args, kwargs):
    """As a view."""
    x = args[0]
    dim = _argument(args, kwargs, 1, "dim") % x.ndim
    sizes = list(_argument(args, kwargs, 2, "sizes"))
    shape = list(x.shape)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // math.prod([z for z in sizes if z != -1])
    return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]], seen(torch.reshape))


def permute(name, func, args, kwargs):
    """The positions go where their axis goes."""
    dims = _sizes(args[1:]) if len(args) > 1 else list(kwargs["dims"])
    return _permuted(args[0], [d % len(dims) for d in dims])


def _permuted(x: Streams, dims: list[int]) -> Any:
    group = list(range(x.axis, x.axis + x.span))
    axis = dims.index(x.axis)
    if dims[axis : axis + x.span] != group:
        return NotImplemented
    order = [d if d <= x.axis else d - x.span + 1 for d in dims if d not in group[1:]]
    return both(x, lambda part: part.permute(order), axis=axis)


def transpose(name, func, args, kwargs):
    """As permute."""
    x = args[0]
    first, second = (0, 1) if name == "t" else (_argument(args, kwargs, 1, "dim0"), _argument(args, kwargs, 2, "dim1"))
    dims = list(range(x.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(x, dims)


def movedim(name, func, args, kwargs):
    """As permute."""
    x, source, target = args[0], _argument(args, kwargs, 1, "source"), _argument(args, kwargs, 2, "destination")
    if not isinstance(source, int) or not isinstance(target, int):
        return NotImplemented
    dims = list(range(x.ndim))
    dims.insert(target % x.ndim, dims.pop(source % x.ndim))
    return _permuted(x, dims)


def squeeze(name, func, args, kwargs):
    """An axis that is no position goes."""
    x = args[0]
    dim = _argument(args, kwargs, 1, "dim")
    axis = part_axis(x, dim) if isinstance(dim, int) else None
    if axis is None:
        return NotImplemented
    gone = axis < x.axis and x.kept.shape[axis] == 1
    return both(x, lambda part: part.squeeze(axis), axis=x.axis - gone)


def unsqueeze(name, func, args, kwargs):
    """A new axis, not among the positions."""
    x = args[0]
    dim = _argument(args, kwargs, 1, "dim") % (x.ndim + 1)
    if x.axis < dim < x.axis + x.span:
        return NotImplemented
    axis = dim if dim <= x.axis else dim - x.span + 1
    return both(x, lambda part: part.unsqueeze(axis), axis=x.axis + (axis <= x.axis))


def expand(name, func, args, kwargs):
    """Along axes that are no positions."""
    x = args[0]
    sizes = list(args[1].shape) if name == "expand_as" else _sizes(args[1:])
    if not isinstance(x, Streams):
        return x.expand(sizes)
    extra = len(sizes) - x.ndim
    start = x.axis + extra
    for size, extent in zip(sizes[start : start + x.span], x.extents, strict=True):
        if size not in (-1, extent):
            return NotImplemented
    part = [*sizes[:start], -1, *sizes[start + x.span :]]
    return both(x, lambda p: p.expand(part), axis=start)


def getitem(name, func, args, kwargs):
    """Slices, numbers, None and ... on axes that are no positions."""
    x, index = args
    if not isinstance(x, Streams):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if not all([i is None or i is Ellipsis or (isinstance(i, (int, slice)) and not isinstance(i, bool)) for i in items]):
        return NotImplemented
    used = len([i for i in items if i is not None and i is not Ellipsis])
    if Ellipsis not in items:
        items.append(Ellipsis)
    whole: list = []
    for i in items:
        whole.extend([slice(None)] * (x.ndim - used) if i is Ellipsis else [i])
    part, axis, at = [], 0, 0
    for i in whole:
        if i is None:
            if x.axis < at < x.axis + x.span:
                return NotImplemented
            axis += at <= x.axis
            part.append(i)
            continue
        if x.axis <= at < x.axis + x.span:
            if not (isinstance(i, slice) and i == slice(None)):
                return NotImplemented
            if at == x.axis:
                part.append(i)
        else:
            axis += at < x.axis and not isinstance(i, int)
            part.append(i)
        at += 1
    return both(x, lambda p: p[tuple(part)], axis=axis)


# Convolutions


def convolution(name, func, args, kwargs):
    """1 x 1: each position by itself. kernel = stride: each cell of the coarser grid by itself. With neighbours: the input is
    merged, the convolution runs dense, and its output is split again at the same positions, as a branch: its dropped
    outputs get no gradient, which is the paper's rule (section 3.2.2)."""
    x, weight = args[0], args[1]
    bias, stride = _argument(args, kwargs, 2, "bias"), _argument(args, kwargs, 3, "stride", 1)
    padding, groups = _argument(args, kwargs, 4, "padding", 0), _argument(args, kwargs, 6, "groups", 1)
    dilation = _argument(args, kwargs, 5, "dilation", 1)
    solid = dilation == 1 or (not isinstance(dilation, int) and all([d == 1 for d in dilation]))
    if not isinstance(x, Streams) or isinstance(weight, Streams):
        return NotImplemented
    n = weight.ndim - 2
    kernel = tuple(weight.shape[2:])
    stride = (stride,) * n if isinstance(stride, int) else tuple(stride)
    flat = padding == 0 or (not isinstance(padding, str) and not isinstance(padding, int) and not any(padding))
    role = _role([x], weights=True)
    on_grid = x.axis == 2 and x.span == n and x.ndim == n + 2 and x.outer == 1
    if on_grid and flat and math.prod(kernel) == 1 and math.prod(stride) == 1:
        return both(x, lambda part: seen(F.conv1d)(part, weight.flatten(2), bias, groups=groups), role=role)
    if on_grid and flat and solid and groups == 1 and kernel == stride == x.at.factor:
        return _patches(x, weight, bias, role)
    merged = merge(x)
    whole = func(merged, weight, bias, *args[3:], **{k: v for k, v in kwargs.items() if k != "bias"})
    spatial = tuple(whole.shape[2:])
    at = x.at if spatial == x.at.grid else x.at.coarse
    if not on_grid or at is None or at.grid != spatial:
        note(x.site.owner, x.site.block, "merged", name)
        return whole
    if x.site.attention == "skip":
        raise ValueError(
            f"{x.site.block}: SkipTokens leaves positions out, and a convolution needs its neighbours, so nothing would be left out here. "
            "Use SBP, or leave such blocks out of layers=."
        )
    note(x.site.owner, x.site.block, "dense", name)
    depthwise = groups == whole.shape[1] == x.shape[1] and at is x.at and solid and all([k % 2 for k in kernel])
    if not depthwise or role == WHOLE or x.weight == 1:
        return split(whole, at, 2, n, role, x.site)
    middle = weight[(slice(None), slice(None), *[slice(k // 2, k // 2 + 1) for k in kernel])].detach().transpose(0, 1)
    out = split(OwnPath.apply(whole, merged, middle, 1 / x.weight - 1), at, 2, n, role, x.site).weighed()
    kept, dropped = out.taken_apart()
    return out.like(kept, dropped.detach())  # NOTE [weights]


def _patches(x: Streams, weight: Tensor, bias: Tensor | None, role: str) -> Streams:
    """kernel = stride. A cell's sub-positions lie together, so this is a linear layer on (positions, sub-positions * channels)."""
    cells = math.prod(x.at.factor)
    matrix = seen(torch.flatten)(weight.flatten(2).transpose(1, 2), 1)

    def patches(part: Tensor) -> Tensor:
        rows = part.transpose(1, 2)
        rows = seen(torch.reshape)(rows, (rows.shape[0], rows.shape[1] // cells, cells * rows.shape[2]))
        return seen(F.linear)(rows, matrix, bias).transpose(1, 2)

    coarse: Any = x.at.coarse
    return Streams((patches(x.kept), patches(x.dropped)), None, coarse, 2, x.span, 1, role, x.site)


def _attention(name, func, args, kwargs):
    """The forward over all positions, exact; the backward as `attention=` says."""
    return (attend if name == "scaled_dot_product_attention" else multi_head)(*args, **kwargs)


POINTWISE = """
add sub rsub mul div truediv floor_divide floordiv remainder mod pow neg abs exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal
square sin cos tan tanh sinh cosh atan atan2 sigmoid erf erfc relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish
hardsigmoid softplus softsign logsigmoid tanhshrink softshrink hardshrink threshold clamp clamp_min clamp_max clip maximum minimum
where masked_fill lerp addcmul addcdiv sign floor ceil round trunc frac nan_to_num isnan isinf isfinite logical_not logical_and
logical_or bitwise_not bitwise_and bitwise_or bitwise_xor invert and or xor eq ne lt le gt ge logaddexp xlogy heaviside copysign
""".split()
PER_PART = """
contiguous clone to type float double half bfloat16 long int bool type_as detach dropout native_dropout rrelu positive cpu cuda
requires_grad_
""".split()
BLANK = """
new_empty new_zeros new_ones new_full new_tensor zeros_like ones_like empty_like full_like rand_like randn_like
""".split()

TABLE |= {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(PER_PART, per_part),
    **dict.fromkeys(BLANK, blank),
    **dict.fromkeys(REDUCTIONS + KEEPING, along),
    **dict.fromkeys(CHOOSING, choosing),
    **dict.fromkeys(["norm", "linalg_vector_norm"], vector_norm),
    **dict.fromkeys(["layer_norm", "rms_norm"], norm),
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], convolution),
    **dict.fromkeys(["matmul", "bmm"], matmul),
    **dict.fromkeys(["chunk", "split", "tensor_split", "narrow"], pieces),
    **dict.fromkeys(["unbind", "select"], unbind),
    **dict.fromkeys(["cat", "concat", "stack"], cat),
    **dict.fromkeys(["view", "reshape", "view_as", "reshape_as"], reshape),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "t"], transpose),
    **dict.fromkeys(["movedim", "moveaxis"], movedim),
    **dict.fromkeys(["expand", "expand_as"], expand),
    **dict.fromkeys(["scaled_dot_product_attention", "multi_head_attention_forward"], _attention),
    "linear": linear,
    "addmm": addmm,
    "flatten": flatten,
    "unflatten": unflatten,
    "permute": permute,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "repeat_interleave": repeat_interleave,
    "getitem": getitem,
}
