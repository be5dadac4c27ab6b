"""Rows are measured: each in a process of its own, several compile side by side, then they are timed one after the other, plain first and
last. A row is written as soon as it is known, and what is written is not measured again, so it can be cut at any moment.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import results
from .models import Spec
from .results import AGAIN, append, finished, key, read, rounded
from .rows import Row
from .work import TURN, Place, task

POLL = 0.05
TAIL = 1500  # characters of a log
Say = Callable[[str], Any]


class Child:
    """The process of a row."""

    def __init__(self, folder: Path, spec: Spec, row: Row, place: Place, threads: int, **more: Any):
        self.spec, self.row = spec, row
        self.stem = folder / re.sub(r"\W+", "_", f"{spec.name} {row.method}")  # without dots, as suffixes follow
        self.turn = 0
        file = self.stem.with_suffix(".json")
        task(file, spec.name, row, place, **more)
        env = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(threads), **os.environ}
        if more.get("part") == "fits":  # as torch advises where memory is short; else what lies unused between tensors decides
            env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **env}
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
        code = self.process.poll()
        return None if code is None else f"its turn took more than {TURN} s" if code == -signal.SIGALRM else f"exit code {code}"

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
    side_by_side: int = 2
    again: bool = False
    began: float = field(default_factory=time.monotonic)
    left: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.here = results.here(self.place.device)
        self.done = {} if self.again else {key(r): r for r in read(self.out)}
        self.longest = 0.0  # seconds from the start of a batch of rows to its end

    def is_over(self, so_far: float = 0.0) -> bool:
        """No time for one more batch of rows, as long as those before."""
        return time.monotonic() + max(self.longest, so_far) > self.ends

    @property
    def ends(self) -> float:
        return math.inf if self.minutes is None else self.began + 60 * self.minutes

    def getting_ready(self) -> float:
        """Seconds for rows to get ready from now on; the last quarter of the time that is left is for timing those that are."""
        return min(self.limit, 0.75 * (self.ends - time.monotonic()))

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

    def fail(self, child: Child, part: str = "step", **more: Any) -> None:
        """Said with the end of its log, and written, so that it is not tried again; one that was only slow is."""
        self.failed += 1
        spec, why = child.spec, child.why()
        self.say(f"{spec.name}: {child.row.method} failed: {why or 'it took too long'}\n{child.log()}")
        if why is not None:
            row = child.row
            self.write(spec, row, {"text": row.text, "ours": row.ours, "note": row.note, "failed": why}, part, **more)

    # Steps

    def steps(self, work: Sequence[tuple[Spec, Sequence[Row]]]) -> None:
        """Of each model the rows that are missing, and plain of their kind; models share the processes that compile side by side."""
        queue = [(spec, row) for spec, rows in work for row in self._needed(spec, rows)]
        folder = Path(tempfile.mkdtemp(prefix="halfback-bench-"))
        children: list[Child] = []
        try:
            self._batches(queue, folder, children)
        finally:
            for child in children:
                child.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def _needed(self, spec: Spec, rows: Sequence[Row]) -> list[Row]:
        missing = self.missing(spec, rows)
        kinds = {r.plain for r in missing}
        needed = [r for r in rows if r in missing or (r.is_plain and r.method in kinds)]
        if needed:
            self.say(f"{spec.name}: {spec.about}, batch {spec.batch}, {spec.size} {unit_of(spec)}: {len(needed)} rows, plain among them")
        return needed

    def _batches(self, queue: list[tuple[Spec, Row]], folder: Path, children: list[Child]) -> None:
        plain: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # by model
        standing: list[Child] = []
        while queue and not self.is_over():
            began = time.monotonic()
            batch, queue = queue[: self.side_by_side], queue[self.side_by_side :]
            for child in self._ready(self._start(batch, folder, children)):
                self._first(child, plain[child.spec.name])
                if child.row.is_plain:
                    standing.append(child)
                else:
                    child.stop()
            going_on = {spec.name for spec, _ in queue} if not self.is_over(time.monotonic() - began) else set()
            for child in [c for c in standing if c.spec.name not in going_on]:
                if child.row.method in plain[child.spec.name]:
                    self._time(child, plain[child.spec.name], again=True)
                child.stop()
                standing.remove(child)
            self.longest = max(self.longest, time.monotonic() - began)
        self.left += sum(key(self.common(spec, row)) not in self.done for spec, row in queue)

    def _start(self, batch: Sequence[tuple[Spec, Row]], folder: Path, children: list[Child]) -> list[Child]:
        threads = max(2, (os.cpu_count() or 1) // len(batch))
        started = [Child(folder, spec, row, self.place, threads) for spec, row in batch]
        children += started
        return started

    def _ready(self, batch: list[Child]) -> list[Child]:
        """Those that compiled in time. Who had less than the limit, as the call ends, is left for the next."""
        ready = []
        began, seconds = time.monotonic(), self.getting_ready()
        for child in batch:
            if child.wait(".ready", began + seconds) is not None:
                ready.append(child)
                continue
            if child.why() is None and seconds < self.limit:
                self.left += 1
                self.say(f"{child.spec.name}: {child.row.method} was not ready in time and is left.")
            else:
                self.fail(child)
            child.stop()
        self.say(f"{len(ready)} of {len(batch)} rows ready after {time.monotonic() - began:.0f} s")
        return ready

    def _first(self, child: Child, plain: dict[str, dict[str, Any]]) -> None:
        """Its time and peak, unless it is too late, or there is nothing to compare them to."""
        if time.monotonic() > self.ends:
            self.left += 1
        elif child.row.is_plain or child.row.plain in plain:
            self._time(child, plain)
        else:
            self.say(f"{child.spec.name}: {child.row.method} is left out, as {child.row.plain} was not measured.")

    def _time(self, child: Child, plain: dict[str, dict[str, Any]], again: bool = False) -> None:
        spec, row = child.spec, child.row
        figures = child.measured(time.monotonic() + self.limit)
        if figures is None:
            self.fail(child)
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
        child = Child(folder, spec, row, self.place, os.cpu_count() or 1, part=part, asked=missing)
        try:
            for n, a in enumerate(missing):
                found = child.wait(f".done{n}", min(time.monotonic() + self.limit, self.ends))
                if found is None and child.why() is None and time.monotonic() > self.ends:
                    self.left += len(missing) - n
                    break
                if found is None:
                    self.fail(child, part, **a)
                    break
                line = self.write(spec, row, {"text": row.text, "ours": row.ours, "note": row.note, **rounded(found)}, part, **a)
                self.say(f"{spec.name:12} {row.method:34} {told(line)}")
        finally:
            child.stop()
            shutil.rmtree(folder, ignore_errors=True)
        self.longest = max(self.longest, time.monotonic() - began)


def unit_of(spec: Spec) -> str:
    return "tokens" if spec.unit == "tokens" else "pixels"
