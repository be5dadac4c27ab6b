"""One row, in its own process: build, compile, say so, wait for the word, measure.

Processes of several rows compile at the same time, but a step is never run beside another one: whoever runs has the lock, and gives the
memory back before it lets go of it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compiled import OPTIONS
from ..heads import compile_
from ..methods import parse
from ..rewrite import Report, apply_
from .measure import GIB, STEPS, floor, measure, measure_cpu, shares
from .models import Spec, find
from .peers import Applied, apply_peer_, is_peer
from .rows import Row

POLL = 0.05  # seconds
TURN = 120  # seconds; who takes longer hangs, and ends, as others wait


@dataclass(frozen=True)
class Place:
    """Where rows run, and on what."""

    device: str = "cuda"
    small: bool = False
    batch: int | None = None
    size: int | None = None
    seq: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def backend(self) -> str:
        return "aot_eager" if self.small else "inductor"

    def spec(self, name: str) -> Spec:
        return find(name, self.batch, self.size, self.seq, self.small)


# One at a time


class Turn:
    """The right to use the GPU; needed until the word comes, which comes to one process at a time. Without a file: it is ours alone."""

    def __init__(self, path: Path | None):
        self.path, self.needed = path, path is not None
        self.file: Any = None

    def take(self) -> None:
        if self.path is not None and self.needed and self.file is None:
            import fcntl  # not on Windows

            self.file = self.path.open("w")
            fcntl.flock(self.file, fcntl.LOCK_EX)
            signal.alarm(TURN)

    def give(self) -> None:
        give_memory_back()
        if self.file is not None:
            signal.alarm(0)
            self.file.close()
            self.file = None


def give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def compile_first(model: nn.Module, backend: str, turn: Turn, fullgraph: bool, options: dict[str, Any]) -> Any:
    """torch.compile, which takes its turn when it has compiled and begins to run. Options are inductor's."""
    inner: Any = torch._dynamo.lookup_backend(backend)

    # The backward too, which would wait for the first backward pass, and so be compiled in our turn.
    early = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[attr-defined]

    def outer(graph: Any, inputs: Any) -> Any:
        with early, torch._inductor.config.patch(options):
            compiled = inner(graph, inputs)

        def run(*args: Any) -> Any:
            turn.take()
            return compiled(*args)

        return run

    return compile_(model, backend=outer, fullgraph=fullgraph, dynamic=False)


# A step


class Step:
    """A model with its method, and the step that is measured."""

    def __init__(self, spec: Spec, row: Row, place: Place, turn: Turn, with_floor: bool = False):
        self.spec, self.row, self.place, self.turn = spec, row, place, turn
        device, dtype = place.device, place.dtype
        turn.take()
        self.model = spec.build(device, dtype)  # in float32 at first
        turn.give()
        self.share: dict[str, float] = {}
        self.report: Report | None = None
        self.applied = Applied()
        self.batch: Any = None
        if with_floor and not is_peer(row.text):
            self.share = self._shares()
        if is_peer(row.text):
            self.applied = apply_peer_(self.model, row.text, spec, device)
        else:
            self.report = apply_(self.model, *parse(row.text))
        self.forward: Any = self.model
        self.feed(spec.batch)
        self.fullgraph = row.compiled

    def feed(self, n: int) -> None:
        """Batches of so many samples from now on."""
        self.batch = None  # gone before there is another
        self.batch = self.spec.samples(n // self.applied.parts, self.place.device, self.place.dtype)

    def _shares(self) -> dict[str, float]:
        self.turn.take()
        few = self.spec.samples(2, self.place.device, self.place.dtype)
        found = shares(self.model, partial(self.spec.run, self.model, few, self.place.device))
        self.turn.give()
        return found

    def loss(self) -> Tensor:
        self.applied.before()
        with self.applied.around():
            return self.spec.run(self.forward, self.batch, self.place.device)

    def __call__(self) -> None:
        for _ in range(self.applied.parts):
            (self.loss() / self.applied.parts).backward()

    def warm_up(self) -> dict[str, Any]:
        """Compile, run twice, and tell what is known then."""
        began = time.time()
        if self.row.compiled:
            self._compile()
        self.turn.take()
        self()
        told = self._told()
        self()
        self.model.zero_grad(set_to_none=True)
        self.turn.give()
        self.turn.needed = False
        return {**told, "compile_s": round(time.time() - began, 1)}

    def _compile(self) -> None:
        options = OPTIONS if "recompute" in self.row.text else {}
        self.forward = compile_first(self.model, self.place.backend, self.turn, True, options)
        try:
            self()
        except torch._dynamo.exc.Unsupported as e:
            print(f"not in one graph: {e}", file=sys.stderr, flush=True)
            self.fullgraph = False
            torch._dynamo.reset()
            self.forward = compile_first(self.model, self.place.backend, self.turn, False, options)

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"fullgraph": self.fullgraph} if self.row.compiled else {}
        if self.report is None:
            return told
        if self.share:
            told["time_floor"] = floor(self.report, self.share)
        if self.report.before and self.report.after is not None and len(self.report.methods) == 1:
            # beside SBP the report starts from what SBP holds, not from plain training
            told |= {"held_before_gib": self.report.before / GIB, "held_after_gib": self.report.after / GIB}
        return told

    def measured(self, steps: int = STEPS) -> dict[str, Any]:
        try:
            if self.place.device == "cuda":
                return measure(self.model, self, steps)
            return measure_cpu(self.model, self, self.loss if self.row.compiled else None, self.batch)
        finally:
            self.model.zero_grad(set_to_none=True)
            give_memory_back()


# The process


def write(path: Path, figures: dict[str, Any]) -> None:
    part = path.with_suffix(path.suffix + "~")
    part.write_text(json.dumps(figures))
    part.rename(path)


def commands(stem: Path, parent: int) -> Iterator[Path]:
    """The words that come, until the parent has no more of them, or is gone: where the answer goes."""
    for turn in range(1000):
        while not stem.with_suffix(f".go{turn}").exists():
            if stem.with_suffix(".stop").exists() or os.getppid() != parent:
                return
            time.sleep(POLL)
        yield stem.with_suffix(f".done{turn}")


def task(path: Path, model: str, row: Row, place: Place, **more: Any) -> None:
    write(path, {"model": model, "row": asdict(row), "place": asdict(place), "parent": os.getpid(), **more})


def work(path: Path) -> None:
    """What a process does with its task."""
    given = json.loads(path.read_text())
    row, place = Row(**given["row"]), Place(**given["place"])
    stem = path.with_suffix("")
    if given.get("part", "step") != "step":
        from . import fits, growth

        part: Callable[..., Iterator[dict[str, Any]]] = {"fits": fits.work, "growth": growth.work}[given["part"]]
        for n, found in enumerate(part(place.spec(given["model"]), row, place, given)):
            write(stem.with_suffix(f".done{n}"), found)
        return
    step = Step(place.spec(given["model"]), row, place, Turn(path.parent / "turn"), with_floor=True)
    told = step.warm_up()
    write(stem.with_suffix(".ready"), told)
    for answer in commands(stem, given["parent"]):
        write(answer, {**step.measured(), **told})


@contextlib.contextmanager
def failing(path: Path) -> Iterator[None]:
    """Why it failed, in a line, for the parent; the traceback goes to the log."""
    try:
        yield
    except BaseException as e:
        first = next((line for line in str(e).splitlines() if line.strip()), "")
        write(path.with_suffix(".failed"), {"failed": f"{type(e).__name__}: {first}"[:300]})
        raise
