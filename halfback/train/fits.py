"""Out of memory: what would have fitted, counted on tensors without contents."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import memory, planner, rewrite
from ..models import line_of
from ..report import readable

if TYPE_CHECKING:
    from .loop import Training


def what_fits(t: Training) -> str:
    """After an out of memory: what would have fitted."""
    s = t.settings
    told = f"out of memory on {s.device} with {s.batch} samples" + (f" in {s.accumulate} parts" if s.accumulate > 1 else "") + "."
    advice = "Give a larger --accumulate, a smaller --batch, or --budget."
    if t.device.type != "cuda" or t.sharded:  # counting would run a model that waits for the other processes
        return f"{told} {advice}"
    try:
        return f"{told} {'; '.join(counted(t)) or advice.rstrip('.')}."
    except Exception as e:  # whatever a model does that tensors without contents cannot
        return f"{told} {advice} (What fits could not be counted: {line_of(e)})"


def counted(t: Training) -> list[str]:
    """What fits, of the real step and its autocast, on tensors without contents. The training is over: it gives its memory back."""
    s = t.settings
    t.optimizer.zero_grad(set_to_none=True)
    t.optimizer.state.clear()
    rewrite.remove_(t.model)
    t.run = t.model
    gc.collect()
    torch.cuda.empty_cache()
    x, y = t._batch(torch.arange(t.micro) % len(t.data.train), 0)
    # counted are weights and CUDA itself as well, which are there already
    room = torch.cuda.mem_get_info(t.device)[0] + sum(v.nbytes for v in t.model.state_dict().values()) + planner.CONTEXT
    counting = planner.Planner(t.model, lambda: t._loss(x, y), optimizer=s.optimizer)
    most = _most(t, (x, y), counting.needs, room)
    if most == t.micro:
        return [f"counted, they fit into the {readable(room)} that are free now: did others use the device? Else give --accumulate 2"]
    said = []
    if most:
        parts = next(n for n in range(2, s.batch + 1) if s.batch % n == 0 and s.batch // n <= most)
        said.append(f"{most} fit at once with {' + '.join(map(str, t.methods)) or 'plain training'}: give --accumulate {parts}")
    with contextlib.suppress(planner.Impossible):
        plan = planner.plan_with(counting, room)
        how = f"{'exact' if plan.exact else 'approximate'} gradients, by {_named(plan.methods)}"
        said.append(f"--budget {room // 2**20}MiB, instead of a --method, fits {t.micro} at once with {how}")
    return said


def _named(methods: tuple[Any, ...]) -> str:
    return " + ".join(type(m).__name__ for m in methods) or "plain training"


def _most(t: Training, batch: tuple[Tensor, Tensor], needs: Callable[[int], int], room: int) -> int:
    """The most samples at once with the training's methods."""
    x, y = batch

    def need(n: int) -> int:
        found = memory.profile(t.model, lambda: t._loss(x[:n], y[:n]), optimizer=t.settings.optimizer)
        return planner.total_of(found, needs(found.peak))

    if t.methods:
        rewrite.apply_(t.model, *t.methods)
    try:
        return planner.largest(need, room, 1, max(1, len(x) // 2), most=len(x))[0] or 0
    finally:
        rewrite.remove_(t.model)
