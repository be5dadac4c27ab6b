"""transformers' Trainer: methods applied when training begins, figures in its logs, the same masks after a resume.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[HalfbackCallback("sbp(keep=0.5)+lean")])

`hb.apply_(model, ...)` before the Trainer is made works as well; the callback adds what only the Trainer knows:

    budget      methods are planned from the first batch, when training begins
    logs        held (bytes for the backward), peak (of the GPU, above what stays), and of `monitor` cosine and scale of the gradient
    checkpoint  which methods, and where their draws stand, in trainer_state.json
    exact_tail  the last share of the steps with exact gradients

Reporters that come with the Trainer are told before callbacks that are given to it, so figures reach its log history but not them;
`HalfbackCallback(...).attach(trainer)` puts the callback first, and they reach all.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .. import memory, planner, rewrite
from ..methods import Method, from_json, parse
from ..monitor import Monitor
from ..untouched import applied_to

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as e:
    raise ImportError("halfback.integrations.huggingface needs transformers: pip install halfback[hf].") from e

log = logging.getLogger(__name__)


class HalfbackCallback(TrainerCallback, ExportableState):
    """Methods in a Trainer.

    methods     methods, or their text as "sbp(keep=0.5)+recompute"; none with a budget, or where the model has them already
    budget      "16GiB" in all on the device, or 0.4 of the peak of plain training
    monitor     steps between comparisons with the exact gradient, which cost about three steps of a quarter of the batch; 0: never
    exact_tail  the last share of the steps with exact gradients
    """

    def __init__(
        self, *methods: str | Method, budget: str | float | None = None, prefer: str = "exact", monitor: int = 0, exact_tail: float = 0.0
    ):
        self.methods: tuple[Any, ...] = tuple(m for given in methods for m in (parse(given) if isinstance(given, str) else (given,)))
        if budget is not None and self.methods:
            raise ValueError(f"HalfbackCallback(): budget={budget!r} chooses the methods itself; leave {len(self.methods)} methods out.")
        if not 0 <= exact_tail <= 1:
            raise ValueError(f"HalfbackCallback(): exact_tail={exact_tail} must be in [0, 1].")
        if monitor < 0:
            raise ValueError(f"HalfbackCallback(): monitor={monitor} must not be below 0.")
        self.budget, self.prefer, self.every, self.exact_tail = budget, prefer, monitor, exact_tail
        self.draws: list[int] | None = None  # where to go on, after a resume
        self.planned: list[dict[str, Any]] | None = None  # what a budget was planned to be
        self.report: Any = None
        self.held: int | None = None
        self._model: Any = None
        self._monitor: Monitor | None = None
        self._batch: Any = None
        self._hook: Any = None
        self._exact = contextlib.ExitStack()
        self._floor = 0

    def attach(self, trainer: Any) -> HalfbackCallback:
        """As the first of a trainer's callbacks, so that its figures reach every reporter."""
        trainer.callback_handler.callbacks.insert(0, self)
        self.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
        return self

    # What the Trainer calls

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the Trainer wraps or compiles the model, which FSDP needs."""
        if self.budget is None and model is not None:
            self._apply(model, self.methods)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any) -> None:
        model = _inner(model)
        self._restore(state)
        if self._model is None:
            self._apply(model, self._planned(model, train_dataloader, args) if self.budget is not None else self.methods)
        self._rewind()
        self.held = self._count(model, train_dataloader, args)
        if self.every:
            self._monitor = Monitor(self._model, every=1)
            self._hook = self._hook or self._model.register_forward_pre_hook(self._see, with_kwargs=True)
        self._wanted = False
        if torch.cuda.is_available() and args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.exact_tail and state.max_steps and state.global_step >= (1 - self.exact_tail) * state.max_steps and not self._is_exact:
            self._is_exact = True
            self._exact.enter_context(rewrite.exact(self._model))
            log.info("halfback: exact gradients from step %d of %d on", state.global_step, state.max_steps)
        self._wanted = bool(self.every) and (state.global_step + 1) % self.every == 0

    _is_exact = False
    _wanted = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._batch is not None and self._monitor is not None:
            batch, self._batch = self._batch, None
            self._monitor.step = state.global_step
            self._monitor.look(batch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        figures = self.figures(args.device)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._exact.close()
        self._is_exact = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state(self) -> dict[str, Any]:
        """What is saved with a checkpoint, and what a resume begins with."""
        options = {"budget": self.budget, "prefer": self.prefer, "monitor": self.every, "exact_tail": self.exact_tail}
        draws = None if self._model is None else [s.mark() for a in applied_to(self._model) for s in a.states]
        applied = [m.to_json() for m in self.report.methods] if self.report is not None else []
        return {
            "args": options,
            "attributes": {"draws": draws, "planned": applied if self.budget is not None else None, "applied": applied},
        }

    # What it does

    applied: Any = None  # the methods of the checkpoint that training goes on from

    def figures(self, device: torch.device) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.held is not None:
            found["halfback_held"] = self.held
        if device.type == "cuda":
            found["halfback_peak"] = torch.cuda.max_memory_allocated(device)
        if self._monitor is not None and self._monitor.history:
            last = self._monitor.history[-1]
            found |= {f"halfback_{k}": last[k] for k in ("cosine", "scale") if last[k] is not None}
        return found

    def _apply(self, model: nn.Module, methods: tuple[Any, ...]) -> None:
        """Once, and not at all where the model has methods already."""
        model = _inner(model)
        self._model = model
        there = applied_to(model)
        if there and not methods:
            self.report = there[0].report
        elif methods and not (there and self.report is not None):
            self.report = rewrite.apply_(model, *methods)
            log.info("%s", self.report)

    def _restore(self, state: Any) -> None:
        """What the checkpoint says that training goes on from. (The Trainer gives it back itself only if it is told to.)"""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step and state.stateful_callbacks else None
        saved = saved[0] if isinstance(saved, list) else saved
        for name, value in (saved or {}).get("attributes", {}).items():
            setattr(self, name, value)

    def _rewind(self) -> None:
        """After a resume: on with the draws of the checkpoint, which has to be one of the same methods."""
        if self.draws is None:
            return
        now = tuple(self.report.methods) if self.report is not None else ()
        before = None if self.applied is None else tuple(from_json(m) for m in self.applied)
        if before is not None and before != now:
            was, have = (" + ".join(map(str, m)) or "none" for m in (before, now))
            raise ValueError(
                f"HalfbackCallback: the checkpoint was trained with {was}, and the model now has {have}. Give the same methods."
            )
        states = [s for a in applied_to(self._model) for s in a.states]
        for s, mark in zip(states, self.draws, strict=True):
            s.rewind(mark)
        self.draws = None

    def _planned(self, model: nn.Module, loader: Any, args: Any) -> tuple[Any, ...]:
        if self.planned is not None:
            return tuple(from_json(m) for m in self.planned)
        plan = planner.plan(model, _first(loader, args.device), self.budget, prefer=self.prefer)
        log.info("%s", plan)
        return plan.methods

    def _count(self, model: nn.Module, loader: Any, args: Any) -> int | None:
        """Bytes held, counted on tensors without contents; None where the model cannot be run on those, as one that is sharded."""
        if args.torch_compile or loader is None:
            return None
        try:
            return memory.profile(self._model, _first(loader, args.device), optimizer="none").held
        except Exception as e:
            log.warning("halfback: what is held could not be counted: %s", e)
            return None

    def _see(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The batch of a step that the monitor will look at."""
        if self._wanted and module.training and not args:
            self._wanted = False
            self._batch = tree_map_only(Tensor, Tensor.detach, dict(kwargs))


def _inner(model: Any) -> Any:
    """The model inside of what a Trainer wraps it in."""
    for name in ("module", "_orig_mod"):
        while isinstance(getattr(model, name, None), nn.Module) and type(model).__name__ in WRAPPERS:
            model = getattr(model, name)
    return model


WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "OptimizedModule")


def _first(loader: Any, device: torch.device) -> dict[str, Any]:
    """The first batch of a loader, without disturbing the training's random numbers."""
    if loader is None:
        raise ValueError("HalfbackCallback: a budget is planned from the first batch, and the Trainer has no train_dataset.")
    with torch.random.fork_rng():
        batch = next(iter(loader))
    return tree_map_only(Tensor, lambda t: t.to(device), dict(batch))
