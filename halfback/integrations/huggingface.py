"""transformers' Trainer: methods applied when training begins, figures in its logs, the same masks after a resume.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[HalfbackCallback("sbp(keep=0.5)+lean")])

`hb.apply_(model, ...)` before the Trainer is made works as well; the callback adds what only the Trainer knows:

    budget      methods are planned from the first batch, when training begins; a dataset that can be read only once has lost that batch
    logs        held (bytes for the backward), allocated (the most on the GPU, of everything), and of `monitor` cosine and scale
    checkpoint  which methods, and where their draws stand, in trainer_state.json
    exact_tail  the last share of the steps with exact gradients

Reporters that come with the Trainer are told before callbacks that are given to it, so figures reach its log history but not them;
`HalfbackCallback(...).attach(trainer)` puts the callback first, and they reach all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..extras import install
from ..methods import Method, from_json
from ..untouched import random_states
from .shared import Attached, inner

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as e:
    raise ImportError(f"halfback.integrations.huggingface needs transformers: {install('transformers')}.") from e


class HalfbackCallback(TrainerCallback, ExportableState):
    """Methods in a Trainer.

    methods     methods, or their text as "sbp(keep=0.5)+recompute"; none with a budget, or where the model has them already
    budget      "16GiB" in all on the device, or 0.4 of the peak of plain training
    monitor     steps between comparisons with the exact gradient, which cost about three steps of a quarter of the batch; 0: never
    exact_tail  the last share of the steps with exact gradients, and all blocks recomputed, so that no more is held
    """

    def __init__(
        self, *methods: str | Method, budget: str | float | None = None, prefer: str = "exact", monitor: int = 0, exact_tail: float = 0.0
    ):
        self.own = Attached(methods, budget, prefer, monitor, exact_tail)
        self.saved: dict[str, Any] | None = None  # of the checkpoint that training goes on from

    @property
    def report(self) -> Any:
        return self.own.report

    @property
    def held(self) -> int | None:
        return self.own.held

    def attach(self, trainer: Any) -> HalfbackCallback:
        """As the first of a trainer's callbacks, so that its figures reach every reporter."""
        trainer.callback_handler.callbacks.insert(0, self)
        self.on_init_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Before the Trainer wraps or compiles the model, which FSDP needs."""
        if self.own.budget is None and model is not None:
            self.own.apply(inner(model), self.own.methods)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **kwargs: Any) -> None:
        own, saved = self.own, self._saved(state)
        if own.model is not inner(model):  # none yet, or that of another Trainer
            own.apply(inner(model), self._chosen(inner(model), saved, train_dataloader, args))
        if saved:
            own.restore(saved)
        own.begin(args.device, counts=not args.torch_compile)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.own.step_begins(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.own.step_ends(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        figures = self.own.figures(args.device)
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.own.end()

    def state(self) -> dict[str, Any]:
        """What is saved with a checkpoint, in trainer_state.json."""
        own = self.own
        options = {"budget": own.budget, "prefer": own.prefer, "monitor": own.every, "exact_tail": own.exact_tail}
        return {"args": options, "attributes": {"saved": own.state()}}

    def _saved(self, state: Any) -> dict[str, Any]:
        """What the checkpoint says that training goes on from. (The Trainer gives it back itself only if it is told to.)"""
        found = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        found = found[0] if isinstance(found, list) else found
        given, self.saved = self.saved, None
        return given or (found or {}).get("attributes", {}).get("saved") or {}

    def _chosen(self, model: Any, saved: dict[str, Any], loader: Any, args: Any) -> tuple[Any, ...]:
        if self.own.budget is None:
            return self.own.methods
        if saved:
            return tuple(from_json(m) for m in saved["applied"])
        if loader is None:
            raise ValueError("HalfbackCallback: a budget is planned from the first batch, and the Trainer has no train_dataset.")
        return self.own.plan(model, _first(loader, args.device))


def _first(loader: Any, device: torch.device) -> dict[str, Any]:
    """The first batch of a loader, without disturbing the training's random numbers. A stream that can be read once has lost it."""
    back = random_states()
    try:
        batch = next(iter(loader))
    finally:
        for undo in back:
            undo()
    return tree_map_only(Tensor, lambda t: t.to(device), dict(batch))
