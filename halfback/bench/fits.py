"""What users buy: within so much memory the largest batch with each method, and how fast it trains; and at batch 1, where micro-batches
cannot help, the largest image or the longest text.

A step is forward, backward and AdamW's, in eager mode: every size would compile anew. The allocator is limited to the room less what CUDA
itself takes. What is told was run, and a twentieth more was not possible.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..planner import CONTEXT
from .measure import GIB, counted_peak, percentiles
from .models import Spec
from .rows import Row
from .work import Place, Step, Turn, give_memory_back

ROOMS = (16.0, 24.0, 40.0, 80.0)  # GiB
ALONE = (16.0, 24.0)  # at batch 1; attention's time grows with the square of what fits
TIMED = 5
CPU_ROOMS = (0.02, 0.04)  # for tests
CHUNKED = ("llama", "gpt2", "text")
METHODS = (
    ("plain", "plain", False),
    ("checkpointing", "recompute", False),
    ("lean", "lean", True),
    ("lean + recompute", "lean+recompute(sparing=True)", True),
    ("sbp", "sbp(keep=0.5)", True),
    ("sbp + lean", "sbp(keep=0.5)+lean", True),
    ("sbp + recompute", "sbp(keep=0.5)+recompute", True),
    ("sbp + lean + recompute", "sbp(keep=0.5)+lean+recompute(sparing=True)", True),
)
STAGED = ("convnext", "detector")


def rows_of(spec: Spec) -> list[Row]:
    """For large vocabularies each also with chunkedloss, for stages SBP on the paper's layers."""
    found = []
    for name, text, ours in METHODS:
        if "sbp" in text and spec.kind in ("resnet", "bare"):
            continue
        if spec.kind in STAGED:
            text = text.replace("sbp(keep=0.5)", "sbp(layers='paper')")
        found.append(Row(name, text, False, ours))
        if spec.kind in CHUNKED and text != "plain" and ("recompute" in text or "lean" in text):
            found.append(Row(f"{name} + chunkedloss", f"{text}+chunkedloss", False, ours or text == "recompute"))
    return found


def asked_of(spec: Spec, rooms: Sequence[float], alone: Sequence[float]) -> list[dict[str, Any]]:
    what = "seq" if spec.unit == "tokens" else "size"
    sized = [] if spec.kind in ("swin", "patches", "other", "text", "bare") else [{"largest": what, "room_gib": r} for r in alone]
    return [*({"largest": "batch", "room_gib": r} for r in rooms), *sized]


def largest(fits: Callable[[int], bool], start: int, step: int, factor: float) -> int:
    """The largest multiple of `step` that was seen to fit, to a twentieth; 0: none does. From the start on by a factor, up or down, until
    one fits and one does not, which are then bisected."""

    def times(n: int, by: float) -> int:
        return max(1, round(n * by / step)) * step

    low, high, n = 0, 0, times(start, 1)
    while not high and fits(n):
        low, n = n, max(n + step, times(n, factor))
    high = n
    while not low and high > step:
        n = min(high - step, times(high, 1 / factor))
        if fits(n):
            low = n
        else:
            high = n
    while high - low > max(step, low // 20):
        middle = times(low + high, 0.5)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


class Trial:
    """Training steps of one method with any batch, or of one sample of any size, within a room."""

    def __init__(self, spec: Spec, row: Row, place: Place, what: str):
        self.spec, self.row, self.place, self.what = spec, row, place, what
        self.room, self.why = 0.0, ""
        self.step: Step | None = None
        self.optimizer: Any = None
        self.seen: dict[int, float] = {}  # bytes that fitted, by what is sought

    def limit(self, room: float) -> None:
        self.room = room
        if self.place.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (room * GIB - CONTEXT) / total))

    def start(self) -> tuple[int, float]:
        """Where to seek, and by which factor. Memory is linear in samples, tokens and pixels, so two that fitted tell about where."""
        power = 2 if self.what == "size" else 1
        known = sorted(self.seen)[-2:]
        if len(known) < 2:
            return (max(known) if known else self.spec.batch // 8 if self.what == "batch" else self.spec.size), 2.0
        (a, b), (x, y) = known, (self.seen[n] for n in known)
        slope = (y - x) / (b**power - a**power)
        if slope <= 0:
            return b, 2.0
        guess = (b**power + (self.room * GIB - y) / slope) ** (1 / power) if self.room * GIB > y else b
        return int(0.95 * guess), 1.1

    def at(self, n: int) -> Spec:
        return dataclasses.replace(self.spec, batch=n) if self.what == "batch" else dataclasses.replace(self.spec, batch=1, size=n)

    def run(self, n: int, timed: int = 0) -> dict[str, float] | None:
        """Figures of so many steps; None: it does not fit."""
        found = None
        try:
            found = self._trained(n, timed)
        except RuntimeError as e:  # torch.OutOfMemoryError is one; others are told, as they end the search too
            self.why = next(iter(str(e).splitlines()), "")[:200]
            print(f"{self.what} {n}: {self.why}", flush=True)
        if found is None or self.what != "batch":
            self.step = self.optimizer = None  # and all that they hold
        give_memory_back()
        return found

    def _trained(self, n: int, timed: int) -> dict[str, float] | None:
        on_gpu = self.place.device == "cuda"
        if self.step is None:
            self.step = Step(self.at(n), self.row, self.place, Turn(None))
            weights = [p for p in self.step.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=on_gpu)
        self.step.feed(self.at(n).batch)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif self._counted(n) > self.room * GIB:
            return None
        times = []
        for _ in range(2 + timed):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            self.step()
            self.optimizer.step()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - began))
        if on_gpu:
            self.seen[n] = torch.cuda.max_memory_reserved() + CONTEXT
        return percentiles(times[2:] or times)

    def _counted(self, n: int) -> int:
        assert self.step is not None
        weights = sum(p.numel() * p.element_size() for p in self.step.model.parameters())
        total = 4 * weights + counted_peak(self.step.model, self.step, self.step.batch)
        self.seen[n] = total
        return total


def work(spec: Spec, row: Row, place: Place, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    trials: dict[str, Trial] = {}
    for asked in given["asked"]:
        what = asked["largest"]
        if what not in trials:
            trials.clear()  # its model goes
            trials[what] = Trial(spec, row, place, what)
        trial = trials[what]
        trial.limit(asked["room_gib"])
        start, factor = trial.start()
        n = largest(lambda n, trial=trial: trial.run(n) is not None, start, 1 if what == "batch" else spec.step, factor)  # type: ignore[misc]
        found = (trial.run(n, TIMED) if n else None) or {}
        at = trial.at(n) if n else spec
        per_s = 1000 * at.batch / found["step_ms"] if found else 0.0
        speed = {"tokens_per_s": per_s * at.size} if spec.unit == "tokens" else {"images_per_s": per_s}
        yield {"at": n, "batch": at.batch if n else 0, "size": at.size, **found, **speed, "stopped_by": trial.why}


def told(line: dict[str, Any]) -> str:
    speed = f"{line['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in line else f"{line['images_per_s']:.1f} images/s"
    return f"{line['room_gib']:g} GiB: largest {line['largest']} {line['at']}, {speed}"


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    cells = [["method", "room", "largest", "", "step ms", "a second"]]
    for r in results:
        speed = r.get("tokens_per_s", r.get("images_per_s", 0.0))
        shown = f"{r['step_ms']:.1f}" if "step_ms" in r else ""
        cells.append(
            [("* " if r["ours"] else "  ") + r["method"], f"{r['room_gib']:g} GiB", r["largest"], str(r["at"]), shown, f"{speed:.1f}"]
        )
    return cells
