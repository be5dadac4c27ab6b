"""What becomes of a model's methods over a training: their schedules are followed, and the last steps may be exact."""

from __future__ import annotations

import contextlib
import math

from torch import nn

from .notes import log
from .rewrite import exact, follow_
from .untouched import applied_to


class Course:
    """Told of each step before it runs. Where a training stands is all that it goes by, so one that is resumed follows the same course.

    exact_tail  the last share of the steps with exact gradients, and all blocks recomputed, so that no more is held than before
    """

    def __init__(self, exact_tail: float = 0.0):
        self.exact_tail = exact_tail
        self._exact: contextlib.ExitStack | None = None

    def step(self, model: nn.Module, step: int, steps: float) -> None:
        if not self.exact_tail and not any(m.schedule for a in applied_to(model) for m in a.report.methods):
            return
        if not 0 < steps < math.inf:
            raise ValueError(
                f"halfback: a schedule and exact_tail are shares of a training, and this one has {steps} steps: give their number."
            )
        follow_(model, min(1.0, step / steps))
        if self.exact_tail and step >= round((1 - self.exact_tail) * steps, 6) and self._exact is None:  # 1 - 0.7 is a little more than 0.3
            self._exact = contextlib.ExitStack()
            self._exact.enter_context(exact(model, recompute=True))
            log.info("halfback: exact gradients, and all blocks recomputed, from step %d of %d on", step, steps)

    def end(self) -> None:
        if self._exact is not None:
            self._exact.close()
            self._exact = None
