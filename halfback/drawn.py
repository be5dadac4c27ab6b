"""What forwards drew, for checkpoints that run a part of one again.

A block that is run again in a backward pass splits once more what its forward split, and at the same positions. Whose forward that was,
the checkpoint tells: the hooks that it sets for saved tensors refer to one frame of its own in both of its runs. A checkpoint inside of
another has a new frame when that one runs again, and some are not torch's: there a forward is known by the storage of what it split,
which the checkpoint holds until then. What several forwards could have drawn is not guessed.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import _CheckpointFrame

from .positions import Positions

ROOM = 64  # storages, until it is looked for which are gone
DEEP = 3  # a hook may be in a function that the compiler is told to leave alone
_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Ambiguous(Exception):
    """Several forwards, each at positions of its own."""


class Kept(NamedTuple):
    frame: weakref.ref | None  # the checkpoint's; None: it was not known
    storage: StorageWeakRef  # as long as there is one, its address is not given to another
    drawn: list[Positions]
    key: Any  # of the forward's draws

    @property
    def alive(self) -> bool:
        return not self.storage.expired() and (self.frame is None or self.frame() is not None)


class Drawn:
    def __init__(self) -> None:
        self.frames: weakref.WeakKeyDictionary[Any, list[Kept]] = weakref.WeakKeyDictionary()
        self.storages: dict[int, list[Kept]] = {}
        self.room = ROOM

    def keep(self, x: Tensor, drawn: list[Positions], key: Any) -> None:
        """In a forward."""
        storage, frame = x.untyped_storage(), frame_now()
        kept = Kept(None if frame is None else weakref.ref(frame), StorageWeakRef(storage), drawn, key)
        if frame is not None:
            self.frames[frame] = _with(kept, self.frames.get(frame, []))
        framed = [k for k in self.storages.get(storage._cdata, []) if k.frame is not None and k.alive]
        self.storages[storage._cdata] = _with(kept, framed)  # of those that are not known, nobody asks for any but the last
        if len(self.storages) > self.room:
            self.storages = {address: kept for address, kept in self.storages.items() if any(k.alive for k in kept)}
            self.room = 2 * len(self.storages) + ROOM

    def look_up(self, x: Tensor) -> tuple[list[Positions], Any] | None:
        """In a backward: what the forward drew of which a part runs again."""
        frame, found = frame_now(), []
        if frame is not None:
            found = self.frames.get(frame, [])
        if not found:
            there = self.storages.get(x.untyped_storage()._cdata, [])
            found = [k for k in there if k.alive and (k.frame is None) == (frame is None)]
        if any(k.key is not found[0].key for k in found):
            raise Ambiguous
        if frame is not None and found:
            self.frames[frame] = found  # which may run again, too
        return (found[-1].drawn, found[-1].key) if found else None


def _with(kept: Kept, others: list[Kept]) -> list[Kept]:
    return [*(k for k in others if k.key is not kept.key or k.frame != kept.frame), kept]


def frame_now() -> Any:
    """The frame of torch's checkpoint that runs now, for the first time or again."""
    top = _hooks(False)
    return None if top is None else _frame_in(top[0], DEEP)


def _frame_in(function: Any, deep: int) -> Any:
    for cell in (function.__closure__ or ()) if type(function) is types.FunctionType else ():
        value = None
        with contextlib.suppress(ValueError):  # nothing is in it yet
            value = cell.cell_contents
        value = value() if isinstance(value, weakref.ref) else value
        found = value if isinstance(value, _CheckpointFrame) else _frame_in(value, deep - 1) if deep else None
        if found is not None:
            return found
    return None
