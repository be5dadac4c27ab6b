"""Running a model and leaving no trace: what profile, plan and audit do around a user's model."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def untouched(model: nn.Module, *tensors: Tensor) -> Iterator[Callable[[], None]]:
    """Whatever runs inside, in training mode, leaves no trace: not in gradients, buffers, training flags, random states, nor in where
    the methods' draws stand. Gives a function that puts the buffers back at once.

    The gradients of `tensors`, as a batch's, are left alone too. A model in training keeps its modules' own flags, as a BatchNorm that
    was put in eval mode; another is put in training mode.
    What a module keeps in Python attributes of its own is not seen.
    """
    gradients = [(p, p.grad) for p in (*model.parameters(), *(t for t in tensors if t.requires_grad and t.is_leaf))]
    buffers = [(m._buffers, name, b, _copied(b)) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    flags = [(m, m.training) for m in model.modules()]
    back = [*random_states(), *_draws(model), *_quieted(model)]

    def rewind() -> None:
        for owner, name, buffer, before in buffers:
            owner[name] = buffer
            if before is not None:
                buffer.data.copy_(before)  # data: a graph that saved it finds it as it was, so it must not find it marked as changed

    try:
        for p, _ in gradients:
            p.grad = None
        if not model.training:
            model.train()
        yield rewind
    finally:
        rewind()
        for module, flag in flags:
            module.training = flag
        for p, grad in gradients:
            p.grad = grad
        for undo in back:
            undo()


def _quieted(model: nn.Module) -> list[Callable[[], Any]]:
    """Hooks that run when a gradient is there, as an optimizer's step, are taken off meanwhile."""
    back: list[Callable[[], Any]] = []
    for p in model.parameters():
        hooks = p._post_accumulate_grad_hooks
        if hooks:
            back.append(functools.partial(hooks.update, dict(hooks)))
            hooks.clear()
    return back


def random_states() -> list[Callable[[], Any]]:
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    back: list[Callable[[], Any]] = [
        lambda: torch.set_rng_state(cpu),
        lambda: random.setstate(python),
        lambda: np.random.set_state(numpy),
    ]
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
        back.append(lambda: torch.cuda.set_rng_state_all(cuda))
    return back


def _draws(model: nn.Module) -> list[Callable[[], Any]]:
    """Where the methods' draws stand, what a forward that broke off would leave, and the report's account, which is of a whole batch."""
    back: list[Callable[[], Any]] = []
    for applied in applied_to(model):
        back.append(_fields(applied.report, "rows", "before", "after"))
        for state in applied.states:
            passing = ("open", "key", "current", "grids", "asked", "ledger", "told", "account", "accounted")
            back += [_fields(state, *passing), functools.partial(state.rewind, state.mark())]
    return back


def _fields(of: Any, *names: str) -> Callable[[], Any]:
    """Puts back those of these fields that there are."""
    before = {k: copy.copy(v) if isinstance(v, (dict, set)) else v for k, v in of.__dict__.items() if k in names}
    return lambda: of.__dict__.update(before)


def applied_to(model: nn.Module) -> list[Any]:
    """What `apply_` left on a model and its parts."""
    return [m.__dict__["_halfback"] for m in model.modules() if "_halfback" in m.__dict__]


def _copied(buffer: Tensor) -> Tensor | None:
    """None where there are no contents."""
    return None if buffer.is_meta or isinstance(buffer, FakeTensor) else buffer.detach().clone()
