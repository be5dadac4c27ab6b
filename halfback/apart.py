"""Modules that treat each position by itself, as the experts of a mixture: run once for kept positions and once for dropped ones.

What such a module does inside, be it tables of indices, loops or a custom autograd.Function, then needs no row in the table of functions,
and the run for dropped positions is cut where the branch joins the trunk, as everything is (streams.py, rule 2).

What goes in: a kept part has as many of its axes as the whole tensor, of n positions k. What comes out has positions where the first
argument has them, or folded into the first axis, as (B * n, E); anything else is an error.

The first call in eager mode is compared with one of the whole tensor. A module that was named and looks at other positions is an error;
one that nobody named is left as it is then, and until it was compared: what it does is merged, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .blocks import matrices
from .recompute import Had, close
from .standins import Standin
from .streams import BRANCH, WHOLE, Streams, absent, find, merge_all, on_dropped, split_parts

OTHERS = (
    "SBP(apart=...): {} does not give the same for kept and dropped positions one after the other as for all of them at once: it looks at "
    "other positions, or counts them. Leave it out of apart=."
)
LOST = (
    "SBP(apart=...): {} was given {} positions and returned a tensor of shape {}, in which they cannot be told. Leave it out of apart=, or "
    "name a module inside of it."
)


class Apart(Standin):
    """The forward of a module that treats each position by itself."""

    def __init__(self, module: nn.Module, name: str, named: bool, own: Any = None):
        super().__init__(module, own)
        self.name, self.named = name, named
        self.fits: bool | None = named or None  # None: not known before it was compared
        self.compared = False

    def __call__(self, *args, **kwargs):
        x = find((*args, *kwargs.values()))
        if x is None or self.gone:
            return self.plain(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_streams)
        if not all([_alike(t, x) for t in leaves]):
            return self.plain(*args, **kwargs)

        def run(which: int) -> Any:
            a, kw = tree_unflatten([_part(t, which, x) for t in leaves], spec)
            return self.plain(*a, **kw)

        if absent(x):
            return self.joined(run(0), None, x)
        counted = isinstance(x.some, FakeTensor)  # has no contents; nearly all experts fit
        if not (self.compared or counted or torch.compiler.is_compiling()):
            self.compare(run, lambda: self.plain(*merge_all(args), **merge_all(kwargs)), x)
        if self.fits or (counted and self.fits is None and not torch.compiler.is_compiling()):
            return self.joined(run(0), on_dropped(run, 1), x)
        return self.plain(*args, **kwargs)

    def compare(self, run: Callable[[int], Any], whole: Callable[[], Any], x: Streams) -> None:
        """Once, without noise, and with the buffers that it has."""
        modes = [(m, m.training) for m in self.module.modules()]
        devices = [x.device.index or 0] if x.device.type == "cuda" else []
        error = None
        with torch.no_grad(), torch.random.fork_rng(devices), Had(self.module, ()).again():
            self.module.eval()
            try:
                pairs = zip(tree_leaves(merge_all(self.joined(run(0), run(1), x))), tree_leaves(whole()), strict=True)
                self.fits = all(close(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)
            except (RuntimeError, ValueError, TypeError, IndexError) as e:
                self.fits, error = False, e
            finally:
                for m, was in modes:
                    m.training = was
        self.compared = True
        if self.named and not self.fits:
            raise ValueError(str(error) if str(error).startswith("SBP(apart") else OTHERS.format(self.name)) from error

    def joined(self, kept: Any, dropped: Any, x: Streams) -> Any:
        leaves, spec = tree_flatten(kept)
        others = [None] * len(leaves) if dropped is None else tree_leaves(dropped)
        return tree_unflatten([self.join(k, d, x) for k, d in zip(leaves, others, strict=True)], spec)

    def join(self, kept: Any, dropped: Any, x: Streams) -> Any:
        if not isinstance(kept, Tensor):
            return kept
        role = BRANCH if matrices(self.module) and x.role != WHOLE else x.role
        size, lead, last = x.kept.shape[x.axis], x.kept.shape[: x.axis], x.axis + x.span - 1
        if kept.shape[: last + 1] == (*lead, *[1] * (x.span - 1), size):
            return x.like(kept.flatten(x.axis, last), None if dropped is None else dropped.flatten(x.axis, last), role=role)
        if x.axis == 1 == x.span and kept.ndim and kept.shape[0] == lead[0] * size:
            return x.like(kept, dropped, axis=0, outer=lead[0], role=role)
        raise ValueError(LOST.format(self.name, size, tuple(kept.shape)))


def _is_streams(x: Any) -> bool:
    return isinstance(x, Streams)


def _alike(t: Any, x: Streams) -> bool:
    """Can its parts be told, if it has any?"""
    if isinstance(t, Streams):
        return t.at.index is x.at.index and (t.axis, t.span, t.outer) == (x.axis, x.span, x.outer) and absent(t) == absent(x)
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
