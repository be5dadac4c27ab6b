"""Time and peak memory of a training step: forward and backward.

    step_ms    median of CUDA events over steps that nobody waits for, as in training; with the 20th and 80th percentiles
    host_ms    what the CPU needs to send a step off to a GPU that has nothing else to do (a busy one lets it run ahead by some thousand
               operations and then stops it, which says nothing of the CPU): where it is near step_ms, the GPU waits for the CPU
    peak_gib   `max_memory_allocated` during a step above what is allocated before it: weights, gradients and the batch

On a CPU, which is for trying things out, times are of the clock, and there is no allocator to ask. Eager rows have the counted peak of
halfback/memory.py, compiled ones what is held when the forward ends; `memory` says which.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..memory import Held, Peak, gradients_there, known_tensors
from ..rewrite import Report

STEPS, WARMUP = 30, 5
FEWEST, SECONDS = 10, 8.0  # long steps are timed fewer times: about so long, but so many times
GIB = 2**30


def measure(model: nn.Module, run: Callable[[], Any], steps: int = STEPS) -> dict[str, float]:
    """Time and peak of run(); the peak with gradients already there, so that it is above them."""
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    steps = max(min(steps, FEWEST), min(steps, int(SECONDS / (time.perf_counter() - began))))
    peak = torch.cuda.max_memory_allocated() - base
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    for event in events[:-1]:  # as in training, the host runs ahead and gradients are made anew
        event.record()
        model.zero_grad(set_to_none=True)
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return {**percentiles([a.elapsed_time(b) for a, b in pairwise(events)]), "host_ms": sent(model, run), "peak_gib": peak / GIB}


def sent(model: nn.Module, run: Callable[[], Any]) -> float:
    """Milliseconds until run() returns, the median of three."""
    times = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return sorted(times)[1]


def percentiles(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    p20, p50, p80 = (times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
    return {"step_ms": p50, "step_ms_p20": p20, "step_ms_p80": p80}


def measure_cpu(
    model: nn.Module, run: Callable[[], Any], forward: Callable[[], Tensor] | None, batch: Any, steps: int = 3
) -> dict[str, Any]:
    """`forward` is given for compiled models, which cannot be counted from outside: what they hold is."""
    times = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - began))
    size = counted_peak(model, run, batch) if forward is None else held_by(model, forward)
    return {**percentiles(times), "host_ms": min(times), "peak_gib": size / GIB, "memory": "counted" if forward is None else "held"}


def counted_peak(model: nn.Module, run: Callable[[], Any], batch: Any) -> int:
    inputs = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    with gradients_there(model), Peak(*known_tensors(model, inputs)) as peak:
        run()
    return peak.most


def held_by(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    with Held(model) as held:
        loss = forward()
        size = held.bytes()
    del loss
    return size


# The arithmetic floor


def shares(model: nn.Module, forward: Callable[[], Any]) -> dict[str, float]:
    """The share of a forward's floating point operations that each module has, by name; the model is plain."""
    # Attention as the matrix products that it is: of some kernels torch counts none with fewer heads of keys than of queries.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
        by_name = _counted(model, forward, count)
    total = max(1, count.get_total_flops())
    return {name: flops / total for name, flops in by_name.items()}


def _counted(model: nn.Module, forward: Callable[[], Any], count: FlopCounterMode) -> dict[str, int]:
    """torch's own names are by class; ours are the model's."""
    began: dict[str, int] = {}
    found: dict[str, int] = {}
    handles = []
    for name, module in model.named_modules():

        def enter(m: nn.Module, args: Any, name: str = name) -> None:
            began[name] = count.get_total_flops()

        def leave(m: nn.Module, args: Any, out: Any, name: str = name) -> None:
            found[name] = found.get(name, 0) + count.get_total_flops() - began[name]

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def floor(report: Report, share: dict[str, float]) -> float:
    """The least time of a step relative to plain training, by arithmetic alone: forward 1, backward 2, over 3.

    Of blocks with a share s of the operations the backward is left out at positions that are not kept: 2 (1 - (1 - keep) s). SkipTokens
    leaves their forward out too. Recomputing adds a forward of what is recomputed, of kept positions alone.
    """
    streamed = next((m for m in report.methods if hasattr(m, "keep") and hasattr(m, "sampler")), None)
    dropped = sum(share.get(name, 0.0) for name in report.blocks) * (1 - streamed.keep) if streamed else 0.0
    again = sum(share.get(n, 0.0) * (streamed.keep if streamed and n in report.blocks else 1.0) for n in report.recomputed)
    forward = 1 - dropped if streamed and streamed.changes_forward else 1
    return (forward + 2 * (1 - dropped) + again) / 3
