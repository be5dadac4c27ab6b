"""What the loop is made of: the rate, the optimizer, averaged weights, the loss, and who watches memory, signals and progress."""

from __future__ import annotations

import atexit
import contextlib
import copy
import gc
import importlib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..batches import output_of
from ..models import line_of
from .settings import STOPPED, Settings
from .sharded import local

INTERRUPTED = 130  # exit code after Ctrl-C


def rate(settings: Settings, step: int, per_epoch: int) -> float:
    """The learning rate of a step."""
    total, warm = settings.epochs * per_epoch, settings.warmup * per_epoch
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, total - warm)
    if settings.schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * done)) / 2
    if settings.schedule == "step":
        return settings.lr * settings.fall ** sum(step / total >= m for m in settings.milestones)
    return settings.lr


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = trained if settings.decays == "all" else [p for p in trained if p.ndim > 1]
    others = [] if settings.decays == "all" else [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    fused = settings.device.startswith("cuda") and not (settings.optimizer == "sgd" and any(isinstance(p, DTensor) for p in trained))
    if settings.optimizer == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, settings.lr, momentum=settings.momentum, nesterov=nesterov, fused=fused)
    return torch.optim.AdamW(groups, settings.lr, betas=settings.betas, fused=fused)


class Averaged:
    """A moving average of the weights, in a model of its own."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))  # the first weights are soon forgotten
        own: Any = [local(p) for p in self.model.parameters()]
        new: Any = [local(p) for p in model.parameters()]
        torch._foreach_lerp_(own, new, 1 - decay)
        for a, b in zip(self.model.buffers(), model.buffers(), strict=True):
            if a.is_floating_point():  # statistics of the weights that are averaged, not of the last ones
                a.lerp_(b, 1 - decay)
            else:
                a.copy_(b)


def scores_of(model: Callable, x: Tensor) -> Tensor:
    return output_of(model(x))


def loss_from(scores: Tensor, y: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross entropy with classes or soft targets; of texts, over all tokens."""
    if scores.ndim == 3 and y.ndim == 2:
        scores, y = scores.flatten(0, 1), y.flatten()
    return F.cross_entropy(scores, y, label_smoothing=smoothing, reduction=reduction)


# Groups that are destroyed, held until the program ends. Whoever lets go of one last waits for gloo's threads, and those may wait for
# Python's lock, to free a tensor: DDP's reducer keeps the lock, and both wait for ever; a thread that is left to itself asks for the lock
# when Python is gone, which aborts the process. Only a name in Python lets go of the lock first.
_GROUPS: list[Any] = []


@atexit.register
def _let_go() -> None:
    gc.collect()  # DDP's reducers
    _GROUPS.clear()


class World:
    """The processes that train together: this one alone, or those that torchrun started."""

    def __init__(self) -> None:
        self.rank, self.size, self.local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))

    @property
    def first(self) -> bool:
        """Is this the process that writes and speaks?"""
        return self.rank == 0

    def device(self, device: str) -> str:
        return f"cuda:{self.local}" if device == "cuda" and self.size > 1 else device

    @contextlib.contextmanager
    def joined(self, device: str) -> Iterator[None]:
        if self.size == 1 or dist.is_initialized():
            yield
            return
        found = usable(self.device(device))
        if found.type == "cuda":
            torch.cuda.set_device(found)  # NCCL and Triton use the current one
        dist.init_process_group("cpu:gloo,cuda:nccl" if found.type == "cuda" else "gloo")
        try:
            yield
        finally:
            _GROUPS.append(dist.group.WORLD)
            dist.destroy_process_group()

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def total(self, t: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(t)
        return t

    def any(self, here: bool) -> bool:
        """Over gloo, so that nobody waits for a GPU."""
        return here if self.size == 1 else bool(self.total(torch.tensor(float(here))))

    def firsts(self, value: Any) -> Any:
        """What the first process has."""
        held = [value]
        if self.size > 1:
            dist.broadcast_object_list(held)
        return held[0]

    def align(self, model: nn.Module) -> None:
        """The first process's buffers in all: BatchNorm's statistics are of each one's own samples."""
        for buffer in model.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, 0)

    def portion(self, n: int) -> tuple[Tensor, int]:
        """This process's part of n samples, and how many of it count: all parts have one length, as all run a sharded model as often."""
        mine = torch.arange(n)[self.rank :: self.size]
        longest = -(-n // self.size)
        return torch.cat((mine, torch.zeros(longest - len(mine), dtype=torch.int64))), len(mine)

    def share(self, indices: Tensor, batch: int) -> Tensor:
        """This process's part of each batch."""
        return indices.view(-1, self.size, batch // self.size)[:, self.rank].reshape(-1)


class Peak:
    """On a GPU, the most that was allocated while training, above what stays there: weights, optimizer and data. Gradients go after each
    step, so at the peak, where the backward begins, there are none yet, or those of the parts before. CUDA graphs take their memory once,
    when they are recorded, and copies of their inputs with it: of them nothing is told."""

    def __init__(self, device: torch.device, graphs: bool = False):
        self.device, self.counts = device, device.type == "cuda" and not graphs
        self.most: int | None = None
        self.allocated: int | None = None  # with all that stays

    def __enter__(self) -> None:
        self.anew()

    def anew(self) -> None:
        """Forget what was: the first step of a process needs more, while cuDNN tries its algorithms."""
        if self.counts:
            torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, *exc: Any) -> None:
        if self.counts and not any(exc):
            self.allocated = torch.cuda.max_memory_allocated(self.device)
            self.most = self.allocated - torch.cuda.memory_allocated(self.device)


def usable(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"device {device!r} cannot be used: {line_of(e)} Devices: cpu, cuda.") from e
    if found.type == "meta":
        raise ValueError("device 'meta' cannot be used: its tensors have no contents. Devices: cpu, cuda.")
    return found


class Stop:
    """SIGTERM and the first Ctrl-C: the step that runs is finished, and saved. A second Ctrl-C stops at once.

    Python hands signals to the main thread alone; a training in another one cannot be told to stop.
    """

    def __init__(self) -> None:
        self.code = 0
        self.before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self.code != 0

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: Any) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.code == INTERRUPTED:
            raise KeyboardInterrupt
        self.code = INTERRUPTED if number == signal.SIGINT else self.code or STOPPED


@contextlib.contextmanager
def progress(total: int, done: int) -> Iterator[Any]:
    tqdm = importlib.import_module("tqdm").tqdm
    often = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file wants few lines
    with tqdm(total=total, initial=done, unit="step", mininterval=often, maxinterval=often) as bar:
        yield bar


@contextlib.contextmanager
def tuned() -> Iterator[None]:
    """Shapes do not change, so cuDNN may look for its fastest kernels."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
