"""The audit in a training loop: every so many steps, on a part of a batch, with a warning when something is wrong."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import Tensor, nn

from .audit import Runs, cosines, method_text, unwrapped
from .batches import check_batch, resized, size_of
from .page import finite
from .untouched import untouched


class Monitor:
    """The cheap form for a training loop: one mask, a part of the batch, every so many steps. Training goes on as if it were not there.

        monitor = hb.Monitor(model, every=100)
        for batch in loader:
            monitor(batch)
            ...

    every    which calls look; the others return at once
    share    of the batch: the exact backward of a quarter fits where the approximate one of the whole did. A function is used whole
    cosine   of all parameters: below this a warning says so
    scale    of all parameters: outside of these a warning says so

    Call it where the training's forward is, so also under its autocast. In a compiled model another batch size and exact gradients are
    compiled apart: give share=1, and a large `every`. With dropout the exact and the approximate gradient have different noise, which
    lowers the cosine.
    """

    VANISHED = 1e-3  # of the first exact norm

    def __init__(
        self, model: nn.Module, every: int = 100, share: float = 0.25, cosine: float = 0.5, scale: tuple[float, float] = (0.25, 4.0)
    ):
        self.model = unwrapped(model, "Monitor")
        if every < 1:
            raise ValueError(f"Monitor(): every={every} must be at least 1.")
        if not 0 < share <= 1:
            raise ValueError(f"Monitor(): share={share} must be in (0, 1]: the share of a batch that is looked at.")
        self.methods = method_text(self.model, "Monitor")
        self.every, self.share, self.cosine, self.scale = every, share, cosine, scale
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._norms: dict[str, list[tuple[int, float, float]]] = {}
        self._warned: set[str] = set()

    def __call__(self, batch: Any) -> dict[str, Any] | None:
        self.step += 1
        return None if self.step % self.every else self.look(batch)

    def look(self, batch: Any) -> dict[str, Any]:
        """Look now; what was found is also added to `history`."""
        check_batch(self.model, batch, "Monitor")
        method_text(self.model, "Monitor")
        with untouched(self.model) as rewind:
            runs = Runs(self.model, rewind)
            some = self._some(batch)
            (g, _), (h, _) = runs.exact(some, self.step), runs.approximate(some, self.step)
            layers = runs.layers
            square, own, along = layers.dots(g, g), layers.dots(h, h), layers.dots(h, g)
        found = self._note(layers.names, square, own, along)
        for kind, text in self._troubles(found).items():
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"halfback, step {self.step}: {text}", stacklevel=3)
        return found

    def _some(self, batch: Any) -> Any:
        size = size_of(batch)
        return batch if size is None else resized(batch, min(size, max(2, round(self.share * size))))

    def _note(self, names: list[str], square: Tensor, own: Tensor, along: Tensor) -> dict[str, Any]:
        cosine = cosines(along, own, square)
        known = [(float(c), name) for c, s, name in zip(cosine[:-1], square, names, strict=False) if s > 0]
        for name, wanted, got in zip(names, square.sqrt().tolist(), own.sqrt().tolist(), strict=False):
            self._norms.setdefault(name, []).append((self.step, wanted, got))
        zero = bool(square[-1] == 0)
        worst = min(known, default=(None, None))
        self.history.append(
            {
                "step": self.step,
                "cosine": None if zero else float(cosine[-1]),
                "scale": None if zero else float(along[-1] / square[-1]),
                "norm_exact": float(square[-1].sqrt()),
                "norm": float(own[-1].sqrt()),
                "worst": worst[1],
                "worst_cosine": worst[0],
            }
        )
        return self.history[-1]

    def _troubles(self, now: dict[str, Any]) -> dict[str, str]:
        """What is wrong, by kind."""
        if not math.isfinite(now["norm_exact"]):
            return {
                "finite": "the exact gradient is not finite, so it is not the method: look at the loss, the data and the learning rate."
            }
        if not math.isfinite(now["norm"]):
            return {"finite": f"the gradient of {self.methods} is not finite, and the exact one is. Train on with hb.exact(model)."}
        said, more = {}, "Keep more, or approximate fewer layers; hb.audit(model, batch) says where."
        first = next((h["norm_exact"] for h in self.history if h["norm_exact"]), 0.0)
        if now["norm_exact"] < self.VANISHED * first:
            fell = f"the exact gradient's norm fell from {first:.2g} to {now['norm_exact']:.2g}"
            said["vanished"] = f"{fell}. If the training has not converged, gradients vanish: monitor.norms() says in which layers."
        if now["cosine"] is not None and now["cosine"] < self.cosine:
            found = f"the cosine of {self.methods}'s gradient with the exact one is {now['cosine']:.2f}, below {self.cosine}"
            said["cosine"] = f"{found}; the worst layer is {now['worst']} with {now['worst_cosine']:.2f}. {more}"
        if now["scale"] is not None and not self.scale[0] <= now["scale"] <= self.scale[1]:
            found = f"{self.methods} gives {now['scale']:.2f} of the exact gradient, outside {self.scale[0]} to {self.scale[1]}"
            said["scale"] = f"{found}: a learning rate of its own, which AdamW hides and SGD does not. {more}"
        return said

    def norms(self) -> dict[str, list[tuple[int, float, float]]]:
        """For each layer (step, norm of the exact gradient, norm of the approximate one): do gradients vanish?"""
        return {name: list(seen) for name, seen in self._norms.items()}

    def to_json(self) -> dict[str, Any]:
        settings = {"model": type(self.model).__name__, "methods": self.methods, "every": self.every, "share": self.share}
        return finite({**settings, "steps": self.step, "history": self.history, "norms": self.norms()})
