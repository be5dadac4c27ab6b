"""What the callbacks share: methods applied to a model once, figures for logs, and what a checkpoint has to know of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .. import memory, planner, rewrite
from ..course import Course
from ..methods import Method, from_json, parse
from ..monitor import Monitor
from ..notes import log
from ..untouched import applied_to


class Attached:
    """Methods, or a budget, on their way to a model, and what becomes of them.

    methods     methods, or their text as "sbp(keep=0.5)+recompute"; none with a budget, or where the model has them already
    budget      "16GiB" in all on the device, or 0.4 of the peak of plain training
    every       steps between comparisons with the exact gradient; 0: never
    exact_tail  the last share of the steps with exact gradients, and all blocks recomputed, so that no more is held
    """

    def __init__(self, methods: tuple[str | Method, ...], budget: Any, prefer: str, every: int, exact_tail: float):
        self.methods: tuple[Any, ...] = tuple(m for given in methods for m in (parse(given) if isinstance(given, str) else (given,)))
        if budget is not None and self.methods:
            raise ValueError(f"HalfbackCallback(): budget={budget!r} chooses the methods itself; leave {len(self.methods)} methods out.")
        if not 0 <= exact_tail <= 1:
            raise ValueError(f"HalfbackCallback(): exact_tail={exact_tail} must be in [0, 1].")
        if every < 0:
            raise ValueError(f"HalfbackCallback(): monitor={every} must not be below 0.")
        self.budget, self.prefer, self.every, self.exact_tail = budget, prefer, every, exact_tail
        self.model: Any = None
        self.report: Any = None
        self.held: int | None = None
        self.monitor: Monitor | None = None
        self.batch: Any = None  # that the monitor will look at
        self.wanted = False  # a look, in this step
        self.counts = False  # what is held, in the first step
        self.course = Course(exact_tail)
        self._hook: Any = None

    # Methods

    def apply(self, model: nn.Module, methods: tuple[Any, ...]) -> None:
        """Once, and not at all where the model has methods already."""
        first = self.model is None
        if model is not self.model:
            self.model, self.report, self.held = model, None, None
        there = applied_to(model)
        if there and (not methods or not first):
            self.report = there[0].report
        elif methods:
            self.report = rewrite.apply_(model, *methods)
            log.info("%s", self.report)

    def _check(self) -> None:
        """Methods that the model got after the trainer count too; none at all is a mistake, unless a budget wants none."""
        there = applied_to(self.model)
        if self.report is None and there:
            self.report = there[0].report
        if self.report is None and self.budget is None:
            raise ValueError(
                f"HalfbackCallback(): no methods were given, and {type(self.model).__name__} has none. "
                'Give methods, as HalfbackCallback("lean"), or a budget.'
            )

    def plan(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        plan = planner.plan(model, batch, self.budget, prefer=self.prefer)
        log.info("%s", plan)
        return plan.methods

    def count(self, batch: Any) -> None:
        """Bytes held, counted on tensors without contents; None where the model cannot be run on those, as one that is sharded."""
        try:
            self.held = memory.profile(self.model, batch, optimizer="none").held
        except Exception as e:
            log.warning("halfback: what is held could not be counted: %s", e)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: which methods, and where their draws stand."""
        if self.model is None:
            return {}
        applied = [m.to_json() for m in self.report.methods] if self.report is not None else []
        return {"draws": [s.mark() for a in applied_to(self.model) for s in a.states], "applied": applied}

    def restore(self, saved: dict[str, Any]) -> None:
        """On with the draws of a checkpoint, which has to be one of the same methods."""
        self._check()
        now = tuple(self.report.methods) if self.report is not None else ()
        before = tuple(from_json(m) for m in saved.get("applied", ()))
        if before != now:
            was, have = (" + ".join(map(str, m)) or "none" for m in (before, now))
            raise ValueError(
                f"HalfbackCallback: the checkpoint was trained with {was}, and the model now has {have}. Give the same methods."
            )
        for s, mark in zip([s for a in applied_to(self.model) for s in a.states], saved["draws"], strict=True):
            s.rewind(mark)

    # Steps

    def begin(self, device: torch.device, counts: bool = False) -> None:
        """A training that broke off, as at an out of memory, did not end."""
        self.end()
        self._check()
        self.counts = counts
        self.monitor = Monitor(self.model, every=1) if self.every and self.report is not None else None
        if self.monitor is not None or counts:
            self._hook = self.model.register_forward_pre_hook(self._see, with_kwargs=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def step_begins(self, step: int, steps: float) -> None:
        self.course.step(self.model, step, steps)
        self.wanted = self.monitor is not None and (step + 1) % self.every == 0

    def step_ends(self, step: int) -> None:
        batch, self.batch = self.batch, None
        if batch is None:
            return
        counts, wanted, self.counts, self.wanted = self.counts, self.wanted, False, False  # their own forwards are not to be seen
        if counts:
            self.count(batch)
        if wanted and self.monitor is not None:
            self.monitor.step = step
            self.monitor.look(batch)
        if self.monitor is None and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def end(self) -> None:
        self.batch, self.wanted, self.counts = None, False, False
        self.course.end()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def figures(self, device: torch.device) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.held is not None:
            found["halfback_held"] = self.held
        if device.type == "cuda":
            found["halfback_allocated"] = torch.cuda.max_memory_allocated(device)
        if self.monitor is not None and self.monitor.history:
            last = self.monitor.history[-1]
            found |= {f"halfback_{k}": last[k] for k in ("cosine", "scale") if last[k] is not None}
        return found

    def _see(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.batch is None and (self.wanted or self.counts) and module.training:
            batch = dict(kwargs) if not args else args[0] if len(args) == 1 and not kwargs else None
            self.batch = tree_map_only(Tensor, Tensor.detach, batch)


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


def inner(model: Any) -> Any:
    """The model inside of what a trainer wraps it in."""
    while type(model).__name__ in WRAPPERS:
        model = model._orig_mod if type(model).__name__ == "OptimizedModule" else model.module
    return model
