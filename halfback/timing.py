"""How long the operations of a training step take on a GPU.

    seconds of an operation = max(FLOPs / matrix rate, bytes in and out / bandwidth) + launch

Where there is a GPU, each distinct operation (name, shapes, strides, dtypes) is run there on tensors of its own and timed instead: a
step of a ViT has about a hundred. Only one operation's tensors are in memory at a time. What matters is the ratio of two steps, so a
GPU that is not there is stood for by a usual one.

A step takes no less than the CPU needs to send it off. That is timed too, where there is a GPU: a step of a few samples, which the GPU
is done with before the CPU is. And a choice that was made is tried: how CPU and GPU wait for each other within a step, no sum tells.
"""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_unflatten

REPEATS = 5
HOST_STEPS = 7
WARM_UP, STEPS = 5, 20
BUSY = 3_000_000  # cycles, about two milliseconds


@dataclass(frozen=True)
class Rates:
    """What a GPU can do. The default is about an A100 at what training reaches."""

    flops: float = 180e12  # a second, bf16 and fp16 with tensor cores
    flops_fp32: float = 60e12  # TF32
    bandwidth: float = 1.4e12  # bytes a second
    launch: float = 4e-6  # seconds

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        from torch.utils.flop_counter import flop_registry  # which imports Triton

        tensors = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, Tensor)]
        moved = sum({t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors}.values())
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        rate = self.flops_fp32 if any(t.dtype is torch.float32 for t in tensors) else self.flops
        return max(flops / rate, moved / self.bandwidth) + self.launch


@dataclass(frozen=True)
class Like:
    """What is needed of a tensor to make another one for the same operation."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, device: torch.device | None, bound: int) -> Tensor:
        length = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) if all(self.shape) else 0
        t = torch.empty(length, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point:
            t.normal_()
        elif self.dtype is torch.bool:
            t.fill_(True)
        else:
            t.random_(0, 256 if self.dtype is torch.uint8 else bound)
        return t.as_strided(self.shape, self.stride)


def moves_nothing(func: Any, out: Any) -> bool:
    """Views, and questions about a tensor, take no time on a device."""
    return func.is_view or not any(isinstance(t, Tensor) for t in tree_flatten(out)[0])


class Clock:
    """Seconds of operations: timed on `device` where it is a GPU, else by its rates."""

    def __init__(self, device: torch.device | None = None, rates: Rates | None = None):
        self.device = device if device is not None and device.type == "cuda" else None
        self.rates = rates or Rates()
        self.known: dict[Any, float] = {}
        self.failed: set[str] = set()  # operations that could not be run by themselves

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        if moves_nothing(func, out):
            return 0.0
        if self.device is None:
            return self.rates.seconds(func, args, kwargs, out)
        leaves, spec = tree_flatten((args, kwargs))
        likes = [Like(tuple(a.shape), tuple(a.stride()), a.dtype) if isinstance(a, Tensor) else a for a in leaves]
        key = (func, spec, tuple(map(_hashable, likes)))
        if key not in self.known:
            self.known[key] = self._timed(func, likes, spec, functools.partial(self.rates.seconds, func, args, kwargs, out))
        return self.known[key]

    def _timed(self, func: Any, likes: list[Any], spec: Any, estimate: Any) -> float:
        bound = min([s for like in likes if isinstance(like, Like) for s in like.shape if s > 1], default=1)
        with unset_fake_temporarily(), torch.no_grad(), _modes_off():
            try:
                leaves = [like.make(self.device, bound) if isinstance(like, Like) else _there(like, self.device) for like in likes]
                args, kwargs = tree_unflatten(leaves, spec)
                return _time(functools.partial(func, *args, **kwargs))
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                self.failed.add(str(func))
                return estimate()


def _hashable(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x if x.__hash__ is not None else repr(x)


def _there(x: Any, device: Any) -> Any:
    return device if isinstance(x, torch.device) and x.type == "cpu" else x


@contextlib.contextmanager
def _modes_off() -> Any:
    """The operation alone, seen by nobody."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def time_of_host(forward: Any) -> float:
    """What the CPU needs to send a step off, when the GPU has little to do: the shortest of a few."""
    times = []
    for _ in range(HOST_STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        forward().backward()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return min(times[2:])


def time_of_step(forward: Any, clear: Any) -> float:
    """A real step, as in training: the CPU runs ahead, and gradients are made anew. The median of a few."""
    for _ in range(WARM_UP):
        clear()
        forward().backward()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    for event in events[:-1]:
        event.record()
        clear()
        forward().backward()
    events[-1].record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(events))[STEPS // 2] / 1000


def _time(run: Any) -> float:
    """The median of a few; the first one is not counted. The GPU is kept busy until all are sent off, or it would wait for the CPU."""
    run()
    torch.cuda._sleep(BUSY)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[REPEATS // 2] / 1000
