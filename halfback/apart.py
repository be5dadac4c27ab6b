"""Modules that treat each position by itself, as the experts of a mixture: run once for kept positions and once for dropped ones.

What such a module does inside, be it tables of indices, loops or a custom autograd.Function, then needs no row in the table of functions,
and the run for dropped positions is cut where the branch joins the trunk, as everything is (streams.py, rule 2).

What goes in: a kept part has as many of its axes as the whole tensor, of n positions k. What comes out has positions where the first
argument has them, or folded into the first axis, as (B * n, E); anything else is an error.

Only a user can know that a module is one. The first call in eager mode looks for what speaks against it: both runs, and one of the whole,
on copies and without noise, have to return the same, and to leave the same in buffers and attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .blocks import matrices
from .standins import Standin
from .streams import BRANCH, WHOLE, Streams, absent, find, left_out, merge, on_dropped, split_parts

OTHERS = (
    "SBP(apart=...): {} does not do the same for kept and dropped positions one after the other as for all of them at once: {}. Leave it "
    "out of apart=."
)
LOST = "it was given {} positions and returned a tensor of shape {}, in which they cannot be told"
LOOSE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest value; others 0.02


class Apart(Standin):
    """The forward of a module that treats each position by itself."""

    def __init__(self, module: nn.Module, name: str, own: Any = None):
        super().__init__(module, own)
        self.name = name
        self.compared = False

    def __call__(self, *args, **kwargs):
        x = find((*args, *kwargs.values()))
        if x is None or self.gone:
            return self.plain(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_streams)
        if not all([_alike(t, x) for t in leaves]):
            raise ValueError(OTHERS.format(self.name, "its arguments do not have the same positions"))

        def run(given: list) -> Any:
            a, kw = tree_unflatten(given, spec)
            return self.plain(*a, **kw)

        if not (self.compared or absent(x) or torch.compiler.is_compiling() or type(x.some) is not Tensor or x.some.is_meta):
            self.compare(run, leaves, x)
        kept = run([_part(t, 0, x) for t in leaves])
        return self.joined(kept, None if absent(x) else on_dropped(lambda: run([_part(t, 1, x) for t in leaves])), x)

    def compare(self, run: Callable[[list], Any], leaves: list, x: Streams) -> None:
        with torch.no_grad():  # a checkpoint counts what is saved
            parts = [_copies([_part(t, which, x) for t in leaves]) for which in (0, 1)]
            whole = _copies([merge(t) if isinstance(t, Streams) else t for t in leaves])
        versions = [(t, t._version) for given in (*parts, whole) for t in given if isinstance(t, Tensor)]
        with self.steady(x):
            once = tree_leaves(run(whole))
            left = self.state()
        with self.steady(x):
            try:
                both = [run(given) for given in parts]
            except Exception as e:
                raise ValueError(OTHERS.format(self.name, f"{type(e).__name__}: {e}")) from e
            same = len(left) == len(self.state()) and all(map(_close, left, self.state()))
        if any(t._version != was for t, was in versions):
            raise ValueError(OTHERS.format(self.name, "it changes an argument in place"))
        if not same:
            raise ValueError(OTHERS.format(self.name, "it leaves something else in its buffers or attributes"))
        with torch.no_grad():
            found = [merge(t) if isinstance(t, Streams) else t for t in tree_leaves(self.joined(both[0], both[1], x), is_leaf=_is_streams)]
        if len(found) != len(once) or not all(map(_close, found, once)):
            raise ValueError(OTHERS.format(self.name, "what it returns differs, so it looks at other positions"))
        self.compared = True

    @contextlib.contextmanager
    def steady(self, x: Streams) -> Iterator[None]:
        """Without gradients and noise; what it leaves in the module is taken off again."""
        modules = list(self.module.modules())
        had = [dict(m.__dict__) for m in modules]
        buffers = [(m._buffers, dict(m._buffers)) for m in modules]
        devices = [x.device.index or 0] if x.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                for m, (own, _) in zip(modules, buffers, strict=True):
                    m.__dict__["training"] = False  # whoever defines train() may do more in it
                    own.update({k: b if b is None else b.clone() for k, b in own.items()})
                yield
        finally:
            for (own, was), m, attributes in zip(buffers, modules, had, strict=True):
                own.clear()
                own.update(was)
                m.__dict__.clear()
                m.__dict__.update(attributes)

    def state(self) -> list[Tensor]:
        modules = list(self.module.modules())
        return [
            t.clone()
            for m in modules
            for t in (*m._buffers.values(), *tree_leaves([v for k, v in m.__dict__.items() if not k.startswith("_")]))
            if isinstance(t, Tensor)
        ]

    def joined(self, kept: Any, dropped: Any, x: Streams) -> Any:
        leaves, spec = tree_flatten(kept)
        others = [None] * len(leaves) if dropped is None else tree_leaves(dropped)
        return tree_unflatten([self.join(k, d, x) for k, d in zip(leaves, others, strict=True)], spec)

    def join(self, kept: Any, dropped: Any, x: Streams) -> Any:
        if not isinstance(kept, Tensor):
            return kept
        role = BRANCH if matrices(self.module) and x.role != WHOLE else x.role
        part = x.taken_apart()[0]
        size, lead, last = part.shape[x.axis], part.shape[: x.axis], x.axis + x.span - 1
        if kept.shape[: last + 1] == (*lead, *[1] * (x.span - 1), size):
            return x.like(kept.flatten(x.axis, last), None if dropped is None else dropped.flatten(x.axis, last), role=role)
        if x.axis == 1 == x.span and kept.ndim and kept.shape[0] == lead[0] * size:
            return x.like(kept, dropped, axis=0, outer=lead[0], role=role)
        raise ValueError(OTHERS.format(self.name, LOST.format(size, tuple(kept.shape))))


def _is_streams(x: Any) -> bool:
    return isinstance(x, Streams)


def _alike(t: Any, x: Streams) -> bool:
    """Can its parts be told, if it has any?"""
    if isinstance(t, Streams):
        same = t.at.index is x.at.index and (t.axis, t.span, t.outer) == (x.axis, x.span, x.outer)
        return same and (absent(t) == absent(x) or left_out())
    return not _has_positions(t, x) or x.outer == 1


def _has_positions(t: Any, x: Streams) -> bool:
    return isinstance(t, Tensor) and t.shape[: x.axis + x.span] == x.shape[: x.axis + x.span]


def _part(t: Any, which: int, x: Streams) -> Any:
    if isinstance(t, Streams):
        part = t.taken_apart()[which]
    elif _has_positions(t, x):
        part = split_parts(t.flatten(x.axis, x.axis + x.span - 1), x.at, x.axis)[which]
    else:
        return t
    return part.reshape(*part.shape[: x.axis], *[1] * (x.span - 1), *part.shape[x.axis :])


def _copies(given: list) -> list:
    return [t.detach().clone() if isinstance(t, Tensor) else t for t in given]


def _close(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b or a == b
    if not a.is_floating_point():
        return torch.equal(a, b)
    largest = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=LOOSE.get(a.dtype, 0.02) * largest, equal_nan=True)
