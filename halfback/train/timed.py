"""How long a step of each arm takes: a few steps of every arm, one arm at a time on the device, all in one call.

Trainings side by side say nothing of time. So every arm gets ready in a process of its own, several at once, and the steps are timed by
whoever has the lock alone: a process shares it from its start until it is ready.

    experiments/NAME/times.json   milliseconds a step, samples or tokens a second, what is held and the peak, by arm
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..cli import in_a_line
from ..compare import surroundings
from .loop import Training
from .pieces import tuned
from .recipes import LOCAL, Run
from .record import write_json
from .sets import batches, order
from .settings import Settings

WARMUP, ROUNDS, STEPS = 5, 5, 6
SECONDS = 5.0  # no round begins after so long
POLL = 0.1  # seconds


def hold(lock: int, *, alone: bool) -> None:
    """Wait for the lock, as one of several or alone. It ends with the process that has it."""
    import fcntl  # not on Windows

    fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)


def time_steps(settings: Settings, lock: int, home: Path) -> dict[str, Any]:
    """The median over rounds of some steps each, fewer where they take long. Training goes on as usual, but saves and tests nothing.
    The lock is shared when this begins."""
    with tuned():
        training = Training(settings, home, say=lambda text: None)
        wanted = (WARMUP + 1 + ROUNDS * STEPS) * settings.batch
        data = training.data.train
        indices = order(len(data), settings.seed, 0).repeat(-(-wanted // len(data)))[:wanted]
        coming = batches(data, indices, settings.batch, epoch=0)
        _steps(training, coming, WARMUP)
        _give_memory_back(training)
        hold(lock, alone=True)
        since = time.time()
        _steps(training, coming, 1)  # memory is there again
        began, times = time.perf_counter(), list[float]()
        with training.peak:
            while len(times) < ROUNDS and (not times or time.perf_counter() - began < SECONDS):
                times.append(_steps(training, coming, STEPS) / STEPS)
        alone = [since, time.time()]
    step = statistics.median(times)
    kept = {k: v for k, v in settings.to_json().items() if k not in LOCAL}
    size = settings.batch * (data.batch(torch.arange(1), epoch=0)[0].numel() if training.data.kind == "text" else 1)
    unit = "tokens" if training.data.kind == "text" else "samples"
    return {
        "step_ms": 1000 * step,
        "least_ms": 1000 * min(times),
        "most_ms": 1000 * max(times),
        "per_s": size / step,
        "unit": unit,
        "held": training.held,
        "peak": training.peak.most,
        "alone": alone,
        "settings": kept,
    }


def _steps(training: Training, coming: Iterator[Any], n: int) -> float:
    _wait(training)
    began = time.perf_counter()
    for x, y in islice(coming, n):
        training.train_step(x, y)
    _wait(training)
    return time.perf_counter() - began


def _wait(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.synchronize()


def _give_memory_back(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.empty_cache()


def time_arms(runs: Sequence[Run], path: Path, at_once: int, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Of every arm one run, written to `path` when all are known. What fails is told, and left out."""
    waiting = list(runs)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="halfback-times-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}

        @stack.callback
        def stop() -> None:
            for _, process in running.values():
                process.kill()

        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                running[run.id] = run, _started(run, home)
            for run, process in [r for r in running.values() if r[1].poll() is not None]:
                del running[run.id]
                answer = home / f"{run.id}.out"
                if process.returncode or not answer.exists():
                    end = (home / f"{run.id}.log").read_text(errors="replace").splitlines()[-6:]
                    say("\n  ".join([f"{run.arm.name} was not timed, exit code {process.returncode}:", *end]))
                    continue
                found[run.arm.name] = told = json.loads(answer.read_text())
                say(f"{run.arm.name}: {told['step_ms']:.1f} ms a step, {told['per_s']:.0f} {told['unit']} a second")
            time.sleep(POLL)
    if found:
        about = surroundings(runs[0].settings.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"arms": {r.arm.name: found[r.arm.name] for r in runs if r.arm.name in found}, **about})
    return found


def _started(run: Run, home: Path) -> subprocess.Popen[bytes]:
    """Its process, which has the lock from its first moment: none starts while another is timed."""
    write_json(home / f"{run.id}.json", run.settings.to_json())
    with (home / f"{run.id}.log").open("w") as log, (home / "lock").open("w") as lock:
        hold(lock.fileno(), alone=False)
        command = [sys.executable, "-m", __name__, str(home), run.id, str(lock.fileno())]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(lock.fileno(),))


def main(home: Path, name: str, lock: int) -> int:
    settings = Settings.load(home / f"{name}.json")
    write_json(home / f"{name}.out", time_steps(settings, lock, home / name))
    return 0


if __name__ == "__main__":
    sys.exit(in_a_line(lambda: main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
