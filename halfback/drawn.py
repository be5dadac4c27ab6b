"""What forwards drew, for checkpoints that run a part of one again.

A block that is run again in a backward pass splits once more what its forward split, and at the same positions. It is known by the
storage of that tensor, which the checkpoint holds until then, and by the checkpoint's own frame, to which the hooks that it sets for
saved tensors refer in both of its runs: one tensor may go through several forwards before any of their backwards (twice the same
batch, or what a model learned and starts from).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import _CheckpointFrame

from .positions import Positions

REMEMBERED = 64  # storages whose positions a checkpoint may still ask for, where their checkpoints are unknown
DEEP = 3  # a hook may be in a function that the compiler is told to leave alone
_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Ambiguous(Exception):
    """Several forwards split this tensor, each at positions of its own."""


class Kept(NamedTuple):
    frame: weakref.ref | None  # the checkpoint's
    drawn: list[Positions]
    key: Any  # of the forward's draws

    @property
    def alive(self) -> bool:
        return self.frame is None or self.frame() is not None


class Drawn:
    def __init__(self) -> None:
        self.found: OrderedDict[int, list[Kept]] = OrderedDict()
        self.room = REMEMBERED  # until it is looked for what nobody can ask for any more

    def keep(self, x: Tensor, drawn: list[Positions], key: Any) -> None:
        """In a forward. What ran in no checkpoint that is known, or whose checkpoint is gone, nobody asks for once there is another."""
        storage, frame = x.untyped_storage()._cdata, frame_now()
        others = [k for k in self.found.pop(storage, []) if k.frame is not None and k.frame() not in (None, frame)]
        self.found[storage] = [*others, Kept(None if frame is None else weakref.ref(frame), drawn, key)]
        if len(self.found) > self.room:
            self._forget()

    def _forget(self) -> None:
        last = set(list(self.found)[-REMEMBERED:])
        for storage, kept in list(self.found.items()):
            stay = [k for k in kept if k.alive and (k.frame is not None or storage in last)]
            if stay:
                self.found[storage] = stay
            else:
                del self.found[storage]
        self.room = 2 * len(self.found) + REMEMBERED

    def look_up(self, x: Tensor) -> tuple[list[Positions], Any] | None:
        """In a backward: what the forward of the checkpoint that runs now drew for this tensor."""
        frame = frame_now()
        there = [k for k in self.found.get(x.untyped_storage()._cdata, []) if k.alive]
        mine = [k for k in there if frame is not None and k.frame is not None and k.frame() is frame] or there
        if any(k.key is not mine[0].key for k in mine):
            raise Ambiguous
        return mine[-1][1:] if mine else None


def frame_now() -> Any:
    """The frame of torch's checkpoint that runs now, for the first time or again."""
    top = _hooks(False)
    return None if top is None else _frame_in(top[0], DEEP)


def _frame_in(function: Any, deep: int) -> Any:
    for cell in getattr(function, "__closure__", None) or ():
        value = cell.cell_contents
        value = value() if isinstance(value, weakref.ref) else value
        if deep and callable(value) and not isinstance(value, _CheckpointFrame):
            value = _frame_in(value, deep - 1)
        if isinstance(value, _CheckpointFrame):
            return value
    return None
