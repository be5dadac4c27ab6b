"""What users buy: within so much memory the largest batch with each method, and how fast it trains; and at batch 1, where micro-batches
cannot help, the largest image or the longest text.

A step is forward, backward and AdamW's, in eager mode: every size would compile anew. The allocator is limited to the room less what CUDA
itself takes, and has expandable segments. What is told was run, and a thirtieth more was not possible. Larger samples take longer,
attention's time with the square of the tokens, so at batch 1 a step is also timed of what checkpointing fits.
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
TIMED, FEWEST, SECONDS = 5, 3, 10.0  # steps; no more than the fewest are begun after so long
FINE = 30  # sought to a thirtieth
MEASURE = "checkpointing"  # whose largest sample the others are timed at
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


def beside(asked: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked, with the sample that checkpointing fits where that was `measured`."""
    known = {(r["largest"], r["room_gib"]): r["at"] for r in measured if r["method"] == MEASURE and r["largest"] != "batch" and r.get("at")}
    return [{**a, **({"timed_at": known[where]} if (where := (a["largest"], a["room_gib"])) in known else {})} for a in asked]


def largest(fits: Callable[[int], bool], start: int, step: int, factor: float) -> int:
    """The largest multiple of `step` that was seen to fit, to a thirtieth; 0: none does. From the start on by a factor, up or down, until
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
    while high - low > max(step, low // FINE):
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

    def first(self) -> tuple[int, int]:
        """Two that are cheap to try."""
        n = max(1, self.spec.batch // 8) if self.what == "batch" else self.spec.size * (4 if self.what == "size" else 2)
        return n, 2 * n

    def start(self) -> tuple[int, float]:
        """Where to seek, and by which factor. Memory is linear in samples, tokens and pixels, so two that fitted tell about where."""
        power = 2 if self.what == "size" else 1
        known = sorted(self.seen)[-2:]
        if len(known) < 2:
            return (max(known) if known else self.first()[0]), 2.0
        (a, b), (x, y) = known, (self.seen[n] for n in known)
        slope = (y - x) / (b**power - a**power)
        if slope <= 0:
            return b, 2.0
        guess = (b**power + (self.room * GIB - y) / slope) ** (1 / power) if self.room * GIB > y else b
        return int(0.97 * guess), 1.05

    def at(self, n: int) -> Spec:
        return dataclasses.replace(self.spec, batch=n) if self.what == "batch" else dataclasses.replace(self.spec, batch=1, size=n)

    def run(self, n: int, timed: int = 0) -> dict[str, float] | None:
        """Figures of so many steps; None: it does not fit."""
        found = None
        try:
            found = self._trained(n, timed)
        except RuntimeError as e:  # without memory libraries have errors of their own beside torch.OutOfMemoryError
            if not (self.seen or isinstance(e, torch.OutOfMemoryError)):
                raise  # that is not why
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
            for p in weights:  # its state is there before the first step, which then has the peak of any other
                p.grad = torch.zeros_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step.feed(self.at(n).batch)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        elif self._counted(n) > self.room * GIB:
            return None
        times: list[float] = []
        while len(times) < 1 + timed and (len(times) < 1 + FEWEST or sum(times) < 1000 * SECONDS):  # the first to warm up
            began = time.perf_counter()
            self.step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - began))
        found = {**percentiles(times[1:] or times), "timed": len(times) - 1}
        if on_gpu:
            self.seen[n] = torch.cuda.max_memory_reserved() + CONTEXT
            found |= {"allocated_gib": torch.cuda.max_memory_allocated() / GIB, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        return found

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
        if not trial.seen:
            all(trial.run(n) for n in trial.first())
        start, factor = trial.start()
        step = 1 if what == "batch" else spec.step
        n = largest(lambda n, trial=trial: trial.run(n) is not None, start, step, factor)  # type: ignore[misc]
        why = trial.why
        found: dict[str, float] = {}
        while n and not (found := trial.run(n, TIMED) or {}):  # some steps more than in the search, and one did not fit
            n -= max(1, n // FINE // step) * step
        at = trial.at(n) if n else spec
        per_s = 1000 * at.batch / found["step_ms"] if found else 0.0
        speed = {"tokens_per_s": per_s * at.size} if spec.unit == "tokens" else {"images_per_s": per_s}
        also = asked.get("timed_at", 0)
        again = found if also == n else (trial.run(also, TIMED) or {}) if also and found else {}
        more = {"step_ms_there": again["step_ms"]} if again else {}
        yield {"at": n, "batch": at.batch if n else 0, "size": at.size, **found, **speed, **more, "stopped_by": why}


def told(line: dict[str, Any]) -> str:
    speed = f"{line['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in line else f"{line['images_per_s']:.1f} images/s"
    there = f", {line['step_ms_there']:.0f} ms a step at {line['timed_at']}" if "step_ms_there" in line else ""
    return f"{line['room_gib']:g} GiB: largest {line['largest']} {line['at']}, {speed}{there}"


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    cells = [["method", "room", "largest", "", "step ms", "a second", "step ms at what checkpointing fits"]]
    for r in results:
        speed = f"{r.get('tokens_per_s', r.get('images_per_s', 0.0)):.1f}"
        shown, there = (f"{r[k]:.1f}" if k in r else "" for k in ("step_ms", "step_ms_there"))
        cells.append(
            [("* " if r["ours"] else "  ") + r["method"], f"{r['room_gib']:g} GiB", r["largest"], str(r["at"]), shown, speed, there]
        )
    return cells
