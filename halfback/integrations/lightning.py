"""Lightning: methods applied when fitting begins, figures in its logs, the same masks after a resume.

    trainer = L.Trainer(callbacks=[HalfbackCallback("sbp(keep=0.5)+lean")])

The methods go to the network inside of the LightningModule, whose own forward Lightning need not call: to its only child with nearly all of
the parameters, or to the one that `module` names.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..extras import install
from ..methods import Method
from .shared import Attached, inner

try:
    import lightning.pytorch as L
except ImportError:
    try:
        import pytorch_lightning as L  # type: ignore[no-redef]
    except ImportError as e:
        raise ImportError(f"halfback.integrations.lightning needs lightning: {install('lightning')}.") from e

MOST = 0.9  # of the parameters


class HalfbackCallback(L.Callback):
    """Methods in a Lightning Trainer.

    methods     methods, or their text as "sbp(keep=0.5)+recompute"; none where the network has them already
    module      the name of the network in the LightningModule, as "model"; None: the child with nearly all of the parameters
    exact_tail  the last share of the steps with exact gradients, and all blocks recomputed, so that no more is held
    """

    def __init__(self, *methods: str | Method, module: str | None = None, exact_tail: float = 0.0):
        self.own = Attached(methods, None, "exact", 0, exact_tail)
        self.module = module
        self.saved: dict[str, Any] | None = None

    @property
    def report(self) -> Any:
        return self.own.report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before a strategy wraps the module."""
        if stage == "fit":
            self.own.apply(inner(network(pl_module, self.module)), self.own.methods)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.saved is not None:
            self.own.restore(self.saved)
            self.saved = None
        self.own.begin(pl_module.device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.own.step_begins(trainer.global_step, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        own = self.own
        if own.held is None and own.report is not None:
            own.held = own.report.after  # of Lean and DropIT, known after the first step
        figures = own.figures(pl_module.device)
        if figures:
            pl_module.log_dict({k: float(v) for k, v in figures.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.own.end()

    def state_dict(self) -> dict[str, Any]:
        return self.own.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = dict(state_dict) or None


def network(module: nn.Module, name: str | None) -> nn.Module:
    """The network in a LightningModule."""
    children = dict(module.named_children())
    if name is not None:
        found = dict(module.named_modules()).get(name)
        if found is None:
            raise ValueError(f"HalfbackCallback(): module={name!r} is no module of {type(module).__name__}. It has: {', '.join(children)}.")
        return found
    sizes = {k: sum(p.numel() for p in c.parameters()) for k, c in children.items()}
    whole = sum(p.numel() for p in module.parameters())
    large = [k for k, n in sizes.items() if n >= MOST * whole]
    if len(large) != 1:
        told = ", ".join(f"{k} ({n} parameters)" for k, n in sizes.items())
        raise ValueError(f"HalfbackCallback(): which part of {type(module).__name__} is the network? Give module=NAME, one of: {told}.")
    return children[large[0]]
