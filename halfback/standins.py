"""Forwards that stand before a module's own, set on the instance: `remove_` takes them off again."""

from __future__ import annotations

import inspect
import re
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

STRANGER = re.compile(r"found type 'Streams'|\bnot Streams\b")  # what C++ says of an argument that it does not know


def in_transform() -> bool:
    """Does torch.func run this? Its tensors have no storages, and it refuses hooks on what is saved."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


class Standin:
    """A forward that stands before a module's own. It does not keep the module alive, which keeps it: no cycle."""

    def __init__(self, module: nn.Module, own: Any = None):
        self._module = weakref.ref(module)
        self.own = own  # a forward that the instance had already
        self.gone = False  # removed, where others may have put it into a forward of theirs, as Accelerate does
        self.__name__ = "forward"
        self.__signature__ = inspect.signature(module.forward)  # which trainers look at

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "its forward outlived a module"
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_module": weakref.ref(state["_module"])})

    def idle(self) -> bool:
        return self.gone or not (self.module.training and torch.is_grad_enabled()) or in_transform()

    def plain(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self._run(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except (RuntimeError, TypeError) as e:
            if STRANGER.search(str(e)):
                raise RuntimeError(self._told(e)) from e
            if "opaque=[...]" in str(e) and (name := self._running(e)):
                e.args = (str(e).replace("opaque=[...]", f"opaque=['*.{name}']"),)
            raise

    def _run(self, *args, **kwargs):
        return self.own(*args, **kwargs) if self.own is not None else type(self.module).forward(self.module, *args, **kwargs)

    def _running(self, error: BaseException) -> str:
        """Which module called what cannot be called with streams: the innermost one that was running, if not this one itself."""
        names = {id(m): name for name, m in self.module.named_modules()}
        running = [id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        return next((names[i] for i in reversed(running) if names.get(i)), "")

    def _told(self, error: BaseException) -> str:
        name = self._running(error)
        how = f"Name that module, as SBP(opaque=['*.{name}']), so that it gets plain tensors" if name else "Call it in a module of its own"
        return (
            f"{type(self.module).__name__}{'.' if name else ''}{name} calls a scripted function or an extension, which cannot be handed "
            f"streams. {how}; or leave its block out of layers=."
        )


def standins(model: nn.Module) -> Iterator[Standin]:
    for module in model.modules():
        forward = module.__dict__.get("forward")
        while isinstance(forward, Standin):
            yield forward
            forward = forward.own


class Known(Standin):
    """The forward that a block with hooks has anyway. The compiler does not ask a module for its hooks when it looks for a graph that fits,
    but it does ask for a forward of its own: without one, a plain model's graph would be run, and nothing be approximated."""

    def __call__(self, *args, **kwargs):
        return self.plain(*args, **kwargs)
