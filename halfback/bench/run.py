"""Rows are measured: each in a process of its own, several compile side by side, then they are timed one after the other, plain first and
last. A row is written as soon as it is known, and what is written is not measured again, so it can be cut at any moment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import results
from .models import Spec
from .results import AGAIN, append, finished, key, read, rounded
from .rows import Row
from .work import Place, task

POLL = 0.05
TAIL = 1500  # characters of a log
Say = Callable[[str], Any]


class Child:
    """The process of a row."""

    def __init__(self, folder: Path, model: str, row: Row, place: Place, threads: int, **more: Any):
        self.row = row
        self.stem = folder / re.sub(r"\W+", "_", row.method)  # without dots, as suffixes follow
        self.turn = 0
        file = self.stem.with_suffix(".json")
        task(file, model, row, place, **more)
        env = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}
        with self.stem.with_suffix(".log").open("w") as log:
            command = [sys.executable, "-m", "halfback.bench", str(file)]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)

    def wait(self, suffix: str, until: float) -> dict[str, Any] | None:
        """What it wrote there; None: it ended, or did not in time."""
        path = self.stem.with_suffix(suffix)
        while not path.exists():
            if self.process.poll() is not None and not path.exists():
                return None
            if time.monotonic() > until:
                return None
            time.sleep(POLL)
        return json.loads(path.read_text())

    def measured(self, until: float) -> dict[str, Any] | None:
        self.stem.with_suffix(f".go{self.turn}").touch()
        self.turn += 1
        return self.wait(f".done{self.turn - 1}", until)

    def why(self) -> str | None:
        """Why it failed; None: it was only slow."""
        path = self.stem.with_suffix(".failed")
        if path.exists():
            return json.loads(path.read_text())["failed"]
        return None if self.process.poll() is None else f"exit code {self.process.returncode}"

    def log(self) -> str:
        return self.stem.with_suffix(".log").read_text(errors="replace")[-TAIL:]

    def stop(self) -> None:
        self.stem.with_suffix(".stop").touch()
        self.process.kill()
        self.process.wait()


@dataclass
class Run:
    """What one call does."""

    place: Place
    out: Path
    say: Say = print
    minutes: float | None = None
    limit: float = 400  # seconds for the rows that compile side by side, and for one that is timed
    side_by_side: int = 8
    again: bool = False
    began: float = field(default_factory=time.monotonic)
    left: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.here = results.here(self.place.device)
        self.done = {} if self.again else {key(r): r for r in read(self.out)}
        self.longest = 0.0  # seconds from the start of a batch of rows to its end

    def is_over(self) -> bool:
        """No time for one more batch of rows, as long as those before."""
        return self.minutes is not None and time.monotonic() - self.began + self.longest > 60 * self.minutes

    def common(self, spec: Spec, row: Row, part: str = "step", **more: Any) -> dict[str, Any]:
        about = {"part": part, "model": spec.name, "about": spec.about, "method": row.method, "compiled": row.compiled}
        return {**about, "batch": spec.batch, "size": spec.size, "unit": spec.unit, **more, **self.here}

    def write(self, spec: Spec, row: Row, figures: dict[str, Any], part: str = "step", **more: Any) -> dict[str, Any]:
        line = {**self.common(spec, row, part, **more), **figures, "date": results.now()}
        append(self.out, line)
        self.done[key(line)] = line
        return line

    def missing(self, spec: Spec, rows: Sequence[Row]) -> list[Row]:
        return [r for r in rows if key(self.common(spec, r)) not in self.done]

    def fail(self, spec: Spec, child: Child, part: str = "step", **more: Any) -> None:
        """Said with the end of its log, and written, so that it is not tried again; one that was only slow is."""
        self.failed += 1
        why = child.why()
        self.say(f"{spec.name}: {child.row.method} failed: {why or 'it took too long'}\n{child.log()}")
        if why is not None:
            row = child.row
            self.write(spec, row, {"text": row.text, "ours": row.ours, "note": row.note, "failed": why}, part, **more)

    # The rows of a model

    def steps(self, spec: Spec, rows: Sequence[Row]) -> None:
        missing = self.missing(spec, rows)
        if not missing:
            return
        kinds = {r.plain for r in missing}
        plains = [r for r in rows if r.is_plain and r.method in kinds]
        others = [r for r in missing if not r.is_plain]
        self.say(f"{spec.name}: {spec.about}, batch {spec.batch}, {spec.size} {unit_of(spec)}: {len(others)} rows and plain")
        folder = Path(tempfile.mkdtemp(prefix="halfback-bench-"))
        children: list[Child] = []
        try:
            self._batches(spec, plains, others, folder, children)
        finally:
            for child in children:
                child.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def _batches(self, spec: Spec, plains: list[Row], others: list[Row], folder: Path, children: list[Child]) -> None:
        first = max(1, self.side_by_side - len(plains))
        cuts = [0, *range(first, len(others), self.side_by_side), len(others)] if others else [0, 0]
        plain: dict[str, dict[str, Any]] = {}
        standing: list[Child] = []
        for i, (start, end) in enumerate(pairwise(cuts)):
            if self.is_over():
                self.left += max(1, len(others) - start)
                break
            began = time.monotonic()
            batch = self._start(spec, [*(plains if i == 0 else []), *others[start:end]], folder, children)
            for child in self._ready(spec, batch, began):
                keeps = child.row.is_plain
                if keeps or child.row.plain in plain:
                    self._time(spec, child, plain)
                else:
                    self.say(f"{spec.name}: {child.row.method} is left out, as {child.row.plain} failed.")
                if keeps:
                    standing.append(child)
                else:
                    child.stop()
            self.longest = max(self.longest, time.monotonic() - began)
        for child in standing:
            if child.row.method in plain:
                self._time(spec, child, plain, again=True)

    def _start(self, spec: Spec, rows: list[Row], folder: Path, children: list[Child]) -> list[Child]:
        threads = max(1, (os.cpu_count() or 1) // max(1, len(rows)))
        batch = [Child(folder, spec.name, row, self.place, threads) for row in rows]
        children += batch
        return batch

    def _ready(self, spec: Spec, batch: list[Child], began: float) -> list[Child]:
        """Those that compiled; who hangs leaves time for the others."""
        ready = []
        for child in batch:
            if child.wait(".ready", began + self.limit) is None:
                self.fail(spec, child)
                child.stop()
            else:
                ready.append(child)
        self.say(f"{spec.name}: {len(ready)} of {len(batch)} ready after {time.monotonic() - began:.0f} s")
        return ready

    def _time(self, spec: Spec, child: Child, plain: dict[str, dict[str, Any]], again: bool = False) -> None:
        row = child.row
        figures = child.measured(time.monotonic() + self.limit)
        if figures is None:
            self.fail(spec, child)
            return
        if row.is_plain and not again:
            plain[row.method] = figures
        line = self.write(spec, row, finished(row, figures, plain, again))
        both = f" ({line['time_ratio_compiled']:.3f} of compiled)" if "time_ratio_compiled" in line else ""
        self.say(
            f"{spec.name:12} {row.method + AGAIN * again:38} {line['step_ms']:9.2f} ms {line['peak_gib']:8.3f} GiB   "
            f"time {line['time_ratio']:.3f}{both}, peak {line['peak_ratio']:.3f}"
        )

    # Parts whose processes answer several times, alone on the GPU

    def alone(self, spec: Spec, row: Row, part: str, asked: Sequence[dict[str, Any]], told: Callable[[dict[str, Any]], str]) -> None:
        """One process for all that is asked of a row; `asked` are the fields that tell its results apart, in order."""
        missing = [a for a in asked if key(self.common(spec, row, part, **a)) not in self.done]
        if not missing:
            return
        if self.is_over():
            self.left += len(missing)
            return
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="halfback-bench-"))
        child = Child(folder, spec.name, row, self.place, os.cpu_count() or 1, part=part, asked=missing)
        try:
            for n, a in enumerate(missing):
                found = child.wait(f".done{n}", time.monotonic() + self.limit)
                if found is None:
                    self.fail(spec, child, part, **a)
                    break
                line = self.write(spec, row, {"text": row.text, "ours": row.ours, "note": row.note, **rounded(found)}, part, **a)
                self.say(f"{spec.name:12} {row.method:34} {told(line)}")
        finally:
            child.stop()
            shutil.rmtree(folder, ignore_errors=True)
        self.longest = max(self.longest, time.monotonic() - began)


def unit_of(spec: Spec) -> str:
    return "tokens" if spec.unit == "tokens" else "pixels"
