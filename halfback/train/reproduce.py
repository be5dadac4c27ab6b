"""Recipes: trainings that belong together, run, collected and put on a page.

    experiments/NAME/recipe.py      RECIPE: arms, seeds, and what a paper says
    experiments/NAME/runs/ID.json   what one run gave; a run is one arm with one seed
    experiments/NAME/results.json   all of them: means, and differences paired by seed; figure.png draws them
    docs/results.md                 every results.json, as a page

    difference   d_s = arm_s - against_s for each seed s that both have: the same batches in the same order
    interval     mean(d) ± t(0.975, n - 1) sd(d) / √n, Student's, for 95 %
    a *          the interval is without zero. With three seeds that is 4.3 standard errors; results.json tells those beyond two as well

A run trains in a process of its own in OUT/NAME/ID/. It is done when ID.json is there with the settings that the recipe has now, and is
then never trained again. One that was cut goes on from its checkpoint. Seeds are the outer loop, so that a cut leaves whole pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import io
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report import readable, rows
from .record import check_drawing, write_bytes, write_json, write_text
from .settings import PATHS, Settings

EXPERIMENTS, OUT, PAGE = Path("experiments"), Path("out/runs"), Path("docs/results.md")
MEASURES = ("top1", "top5", "train_loss", "test_loss", "held", "peak", "step_ms")
PAIRED = ("top1", "top5", "train_loss", "test_loss")
RATIOS = ("held", "peak", "step_ms")
STOPPED = 75  # exit code of a training that was told to stop and has saved where it stands
POLL, TELL, GRACE = 0.2, 60.0, 20.0  # seconds between looks, between lines of progress, and from SIGTERM to SIGKILL
LOCAL = ("root", "tensorboard")  # settings of one machine, not kept with a result

Say = Callable[[str], Any]
Result = dict[str, Any]


# Recipes


@dataclass(frozen=True)
class Arm:
    """One way to train.

    changes   settings that differ from the recipe's base
    paper     top-1 in the paper, in percent
    group     arms of a group stand together
    against   another arm than the recipe's that differences are taken to
    """

    name: str
    method: str = "exact"
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None
    group: str = ""
    against: str | None = None

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")


@dataclass(frozen=True)
class Run:
    id: str
    arm: Arm
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Recipe:
    """Arms that are trained with the same seeds.

    against   the arm that differences are taken to
    differs   what is not as in the paper
    minutes   that it takes, on what is told in `on`
    order     its place on the page
    verdict   whether the paper's claim holds: a text, or a function that computes one from results.json
    """

    title: str
    about: str
    paper: str
    base: Settings
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    against: str = "exact"
    differs: tuple[str, ...] = ()
    minutes: float | None = None
    on: str = ""
    order: int = 0
    verdict: str | Callable[[Result], str] | None = None

    def __post_init__(self) -> None:
        for name in ("arms", "seeds", "differs"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"Recipe: {name} is the text {value!r}; give a tuple, as ({value!r},).")
            object.__setattr__(self, name, tuple(value))
        self._check_arms()
        self._check_seeds()
        self.runs()

    def _check_arms(self) -> None:
        names = [a.name for a in self.arms]
        for a in self.arms:
            alike = [b.name for b in self.arms if b.slug == a.slug]
            if len(alike) > 1:
                raise ValueError(f"Recipe: arms {alike[0]!r} and {alike[1]!r} would both be kept as {a.slug!r}; give one another name.")
            if not 0 < len(a.slug) <= 80:
                raise ValueError(f"Recipe: arm {a.name!r} would be kept as {a.slug!r}; its name needs 1 to 80 letters and digits.")
        for who, against in (("the recipe", self.against), *((f"arm {a.name!r}", a.against) for a in self.arms)):
            if against is not None and against not in names:
                raise ValueError(f"Recipe: {who} is against {against!r}, which is no arm. Arms: {', '.join(names) or 'none'}.")
        for what, given in (("method", self.base.method != "exact"), ("seed", self.base.seed != 0)):
            if given or any(what in a.changes for a in self.arms):
                raise ValueError(f"Recipe: {what} is neither a setting of the base nor a change; give arms a method, and the recipe seeds.")

    def _check_seeds(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not all(isinstance(s, int) and s >= 0 for s in self.seeds):
            raise ValueError(f"Recipe: seeds {self.seeds} must be different whole numbers from 0 on.")

    def runs(self) -> list[Run]:
        return [Run(f"{a.slug}_s{seed}", a, seed, self.settings(a, seed)) for seed in self.seeds for a in self.arms]

    def settings(self, arm: Arm, seed: int) -> Settings:
        missing = [k for k in ("lr", "weight_decay") if "optimizer" in arm.changes and k not in arm.changes]
        if missing:
            raise ValueError(f"Recipe: arm {arm.name!r}: optimizer changes, so give {' and '.join(missing)} too; the base has the other's.")
        try:
            return dataclasses.replace(self.base, method=arm.method, seed=seed, **arm.changes)
        except (TypeError, ValueError) as e:
            raise ValueError(f"Recipe: arm {arm.name!r}: {e}") from e

    def against_of(self, arm: Arm) -> str | None:
        """None for the arm that the others are taken to."""
        against = arm.against or self.against
        return None if against == arm.name else against


def find(name: str | Path, experiments: Path | None = None) -> Path:
    """The recipe of a name, or of a path to recipe.py or its folder."""
    experiments = experiments or EXPERIMENTS
    for path in (Path(name), Path(name) / "recipe.py", experiments / name / "recipe.py"):
        if path.name == "recipe.py" and path.is_file():
            return path
    known = ", ".join(p.parent.name for p in recipes(experiments)) or "none"
    raise ValueError(f"There is no recipe {str(name)!r}. In {experiments}/: {known}. A path to a recipe.py is taken too.")


def recipes(experiments: Path | None = None) -> list[Path]:
    return sorted((experiments or EXPERIMENTS).glob("*/recipe.py"))


def load(path: Path) -> Recipe:
    """A recipe is a Python file, and is run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.resolve().parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        told = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"{path}: {told}") from e
    found = getattr(module, "RECIPE", None)
    if not isinstance(found, Recipe):
        raise ValueError(f"{path} has no RECIPE = Recipe(...); found {type(found).__name__}.")
    return found


# What is done


def name_of(path: Path) -> str:
    return path.resolve().parent.name


def runs_folders(path: Path, into: Path | None) -> list[Path]:
    """Where results are looked for; they are written to the last."""
    return [path.parent / "runs", *([] if into is None else [into / name_of(path) / "runs"])]


def finished(recipe: Recipe, folders: Sequence[Path], *, again: bool = False) -> dict[str, Result]:
    """Results by id. One with other settings than the recipe's is an error, or with `again` is deleted."""
    runs = {r.id: r for r in recipe.runs()}
    found: dict[str, Result] = {}
    for path in (p for folder in folders for p in sorted(folder.glob("*.json"))):
        run = runs.get(path.stem)
        if run is None:
            raise ValueError(f"{path} is of no run of the recipe. Delete it, or give the recipe its arm and seed back.")
        result = _read(path)
        other = _other(run.settings, result["settings"], path)
        if not other:
            found.setdefault(run.id, result)
        elif again:
            path.unlink()
        else:
            raise ValueError(
                f"{path} was trained with other settings: {other}. --again deletes it and trains anew; or change the recipe back."
            )
    return found


def _read(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: {e}.") from e
    missing = [
        k
        for k in ("settings", "done", "device_name", "versions", "commit", "date", *MEASURES)
        if not isinstance(result, dict) or k not in result
    ]
    if missing:
        raise ValueError(f"{path} is no result of a training: it lacks {', '.join(missing)}. Delete it, and train anew.")
    return result


def _other(settings: Settings, there: Any, where: Path) -> str:
    """How settings of a file differ; nothing if they do not."""
    different = settings.differs(Settings.from_json(there, str(where)))
    return ", ".join(f"{k} {theirs!r} there, {mine!r} in the recipe" for k, (mine, theirs) in different.items())


# Runs


@dataclass
class Task:
    """A run, where it trains, and where its result goes."""

    run: Run
    folder: Path
    result: Path
    process: subprocess.Popen[bytes] | None = None
    since: float = 0.0

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def epochs(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def prepare(self, *, again: bool) -> None:
        """A folder of a training with other settings is an error too, or goes."""
        asked = self.folder / "asked.json"
        other = _other(self.run.settings, json.loads(asked.read_text()), asked) if asked.exists() else ""
        if other and not again:
            raise ValueError(f"{self.folder} has a training with other settings: {other}. --again deletes it; or change the recipe back.")
        if other:
            shutil.rmtree(self.folder)


def command(settings: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "halfback", "train", "--settings", str(settings), "--out", str(folder), "--resume"]


class Pool:
    """Trains tasks in their processes, so many at a time.

    The lock of a folder is inherited by the process that trains in it, and lasts as long: a second call leaves that run alone, even
    where the first call was killed and its trainings go on.
    """

    def __init__(self, tasks: Sequence[Task], side_by_side: int, say: Say, *, keep: bool = False) -> None:
        self.waiting, self.side_by_side, self.say, self.keep = deque(tasks), side_by_side, say, keep
        self.tasks, self.running = list(tasks), list[Task]()
        self.done, self.failed, self.left = list[Task](), list[Task](), list[Task]()
        self.interrupted = False
        self.begun = self.told = time.monotonic()
        self.before = sum(t.epochs() for t in tasks)

    def train(self, minutes: float | None) -> None:
        until = math.inf if minutes is None else self.begun + 60 * minutes
        try:
            with _terminate_as_interrupt():
                while self.waiting or self.running:
                    if time.monotonic() >= until:
                        self.say(f"{minutes:g} minutes are over; {len(self.running)} running are told to save and stop.")
                        break
                    self._fill()
                    self._reap()
                    self._tell_at_times()
                    time.sleep(POLL)
        except KeyboardInterrupt:
            self.interrupted = True
            self.say(f"Stopping; {len(self.running)} running are told to save. Again kills them.")
        finally:
            self._stop()
            self.left += self.waiting
            self.waiting.clear()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.side_by_side:
            task = self.waiting.popleft()
            with contextlib.ExitStack() as stack:
                lock = _locked(task.folder, stack)
                if lock is None:
                    self.say(f"{task.run.id}: another process trains it; left alone.")
                    self.left.append(task)
                elif _is_done(task):
                    self._take(task)
                else:
                    self._start(task, lock)

    def _start(self, task: Task, lock: int) -> None:
        asked, beside = task.folder / "asked.json", task.folder / "side_by_side"
        write_json(asked, task.run.settings.to_json())
        was = int(beside.read_text()) if beside.exists() else 1
        write_text(beside, str(max(was, self.side_by_side)))
        threads = str(max(1, (os.cpu_count() or 1) // self.side_by_side))  # or all of them would want every core
        env = os.environ if self.side_by_side == 1 else {"OMP_NUM_THREADS": threads, **os.environ}
        with (task.folder / "log.txt").open("ab") as log:
            task.process = subprocess.Popen(
                command(asked, task.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
            )
        task.since = time.monotonic()
        self.running.append(task)

    def _reap(self, stopping: bool = False) -> None:
        for task in [t for t in self.running if t.running.poll() is not None]:
            self.running.remove(task)
            code = task.running.returncode
            if code == 0:
                self._take(task)
            elif code == STOPPED or (stopping and code < 0):
                self.left.append(task)
            else:
                self._fail(task, f"exit code {code}")

    def _take(self, task: Task) -> None:
        """The result of a training that ended goes to its place; what could go on with it goes."""
        try:
            result = _read(task.folder / "result.json")
            other = _other(task.run.settings, result["settings"], task.folder / "result.json")
            if not result["done"] or other:
                raise ValueError(other or "it is not done")
        except (OSError, ValueError) as e:
            self._fail(task, f"no result.json to take ({e})")
            return
        settings = {k: v for k, v in result["settings"].items() if k not in LOCAL}
        small = {k: v for k, v in result.items() if k != "report"}
        told = {"arm": task.run.arm.name, "side_by_side": int((task.folder / "side_by_side").read_text())}
        task.result.parent.mkdir(parents=True, exist_ok=True)
        write_json(task.result, {**told, **small, "settings": settings})
        if not self.keep:
            shutil.rmtree(task.folder / "checkpoints", ignore_errors=True)
            (task.folder / "best.safetensors").unlink(missing_ok=True)
        self.done.append(task)
        self._tell(f"{task.run.id}: top-1 {_percent(result['top1'])}, {_time(result.get('seconds'))}")

    def _fail(self, task: Task, why: str) -> None:
        self.failed.append(task)
        log = task.folder / "log.txt"
        lines = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
        self._tell("\n".join([f"{task.run.id} failed, {why}. The end of {log}:", *(f"  {line}" for line in lines)]))

    def _stop(self) -> None:
        """SIGTERM, so that they save; SIGKILL for those that take too long, with the processes that read for them."""
        try:
            for task in self.running:
                task.running.terminate()
            until = time.monotonic() + GRACE
            while self.running and time.monotonic() < until:
                self._reap(stopping=True)
                time.sleep(min(POLL, 0.1))
        except KeyboardInterrupt:
            self.interrupted = True
        for task in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.running.pid, signal.SIGKILL)
            task.running.wait()
        self._reap(stopping=True)

    def _tell_at_times(self) -> None:
        if time.monotonic() - self.told >= TELL:
            at = (f"{t.run.id} epoch {t.epochs()} of {t.run.settings.epochs}" for t in self.running)
            self._tell("; ".join(at))

    def _tell(self, what: str) -> None:
        self.told = time.monotonic()
        counts = f"{len(self.done)} of {len(self.tasks)} done, {len(self.running)} running, {len(self.failed)} failed"
        self.say(f"{what}\n  [{counts}{self._to_go()}]")

    def _to_go(self) -> str:
        """By epochs, which are taken to cost the same in all arms."""
        over = [t for t in self.tasks if t not in self.done and t not in self.failed]
        epochs = sum(t.epochs() for t in self.tasks) - self.before
        rest = sum(max(0, t.run.settings.epochs - t.epochs()) for t in over)
        if not over or epochs <= 0:
            return ""
        return f", about {_time(rest * (time.monotonic() - self.begun) / epochs)} to go"


def _locked(folder: Path, stack: contextlib.ExitStack) -> int | None:
    """A lock that ends with the stack, but for a process that inherited it. None: someone else has it."""
    import fcntl  # not on Windows, where recipes can still be read

    folder.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((folder / "lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock.fileno()


def _is_done(task: Task) -> bool:
    """It ended when nobody looked: the result is there, and was not taken."""
    path = task.folder / "result.json"
    if not path.exists() or not (task.folder / "side_by_side").exists():
        return False
    try:
        return not _other(task.run.settings, _read(path)["settings"], path)
    except ValueError:
        return False  # training goes on, and writes it anew


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM stops as Ctrl-C does. Signals are the main thread's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reproduce(
    recipe_path: str | Path,
    *,
    side_by_side: int = 1,
    minutes: float | None = None,
    out: Path | None = None,
    root: str | None = None,
    device: str | None = None,
    only: str | None = None,
    into: Path | None = None,
    again: bool = False,
    keep: bool = False,
    say: Say = print,
) -> int:
    """Train what is missing, and collect. 0: all of it is there; 1: something failed; 75: time was over, and the next call goes on."""
    if side_by_side < 1 or (minutes is not None and not minutes > 0):
        raise ValueError(f"reproduce: side_by_side={side_by_side} and minutes={minutes} must be above 0.")
    check_drawing()
    path = find(recipe_path)
    recipe, folders = load(path), runs_folders(path, into)
    chosen = _chosen(recipe, only)
    given: dict[str, Any] = {k: v for k, v in (("root", root), ("device", device)) if v is not None}
    chosen = [dataclasses.replace(r, settings=dataclasses.replace(r.settings, **given)) for r in chosen]
    there = finished(recipe, folders, again=again)
    home = (out or OUT) / name_of(path)
    tasks = [Task(r, home / r.id, folders[-1] / f"{r.id}.json") for r in chosen if r.id not in there]
    for task in tasks:
        task.prepare(again=again)
    say(f"{recipe.title}: {len(chosen)} runs, {len(chosen) - len(tasks)} done. The others train in {home}/, {side_by_side} at a time.")
    pool = Pool(tasks, side_by_side, say, keep=keep)
    pool.train(minutes)
    if there or pool.done:
        results = collect(path, into=into)
        say("\n" + told(results) + f"\n\nWritten: {folders[-1].parent}/results.json, figure.png")
    if pool.left:
        say(f"{len(pool.left)} runs are left. The same command goes on with them.")
    if pool.interrupted:
        raise KeyboardInterrupt
    if pool.failed:
        say(f"{len(pool.failed)} runs failed: {', '.join(t.run.id for t in pool.failed)}. The same command tries them again.")
        return 1
    return STOPPED if pool.left else 0


def _chosen(recipe: Recipe, only: str | None) -> list[Run]:
    runs = recipe.runs()
    if only is None:
        return runs
    found = [r for r in runs if fnmatch.fnmatchcase(r.id, only) or fnmatch.fnmatchcase(r.arm.name, only)]
    if not found:
        raise ValueError(f"reproduce: only={only!r} matches none of the {len(runs)} runs. Runs: {', '.join(r.id for r in runs)}.")
    return found


# Statistics


def student(freedom: int) -> float:
    """The 0.975 quantile of Student's t for whole degrees of freedom: A(θ) = 0.95 of the finite series, t = √ν tan θ."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < 0.95 else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _inside(angle: float, freedom: int) -> float:
    """P(|t| < √ν tan θ): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def spread(values: Sequence[float | None]) -> Result:
    """Mean, deviation (n - 1) and 95 % interval of the mean. Not known where a value is not."""
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return {"mean": None, "deviation": None, "interval": None}
    mean = statistics.fmean(known)
    if len(known) == 1:
        return {"mean": mean, "deviation": None, "interval": None}
    deviation = statistics.stdev(known)
    half = student(len(known) - 1) * deviation / math.sqrt(len(known))
    return {"mean": mean, "deviation": deviation, "interval": [mean - half, mean + half]}


def paired(ours: Mapping[int, float | None], theirs: Mapping[int, float | None]) -> Result:
    """Differences over the seeds that both have; None where one seed cannot tell.

    difference   the mean is beyond two standard errors
    clear        its 95 % interval is without zero
    """
    both = {s: (a, theirs.get(s)) for s, a in ours.items()}
    known = {s: a - b for s, (a, b) in both.items() if a is not None and b is not None}
    found = spread(list(known.values()))
    beyond = clear = None
    if found["deviation"] is not None:
        beyond = abs(found["mean"]) > 2 * found["deviation"] / math.sqrt(len(known))
        clear = found["interval"][0] > 0 or found["interval"][1] < 0
    return {"seeds": list(known), "differences": list(known.values()), **found, "difference": beyond, "clear": clear}


# Results


def collect(recipe_path: str | Path, *, into: Path | None = None) -> Result:
    """Writes results.json and figure.png from the runs that are done."""
    path = find(recipe_path)
    recipe, folders = load(path), runs_folders(path, into)
    done = finished(recipe, folders)
    if not done:
        raise ValueError(f"{folders[0]} has no runs yet: halfback reproduce {name_of(path)} trains them.")
    results = results_of(recipe, name_of(path), done)
    results["verdict"] = _verdict(recipe, results, path)
    write_json(folders[-1].parent / "results.json", results)
    figure(results, folders[-1].parent / "figure.png")
    return json.loads((folders[-1].parent / "results.json").read_text(encoding="utf-8"))


def results_of(recipe: Recipe, name: str, done: Mapping[str, Result]) -> Result:
    runs = [done[r.id] for r in recipe.runs() if r.id in done]
    by_arm = {a.name: {r.seed: done[r.id] for r in recipe.runs() if r.arm is a and r.id in done} for a in recipe.arms}
    versions = {k: sorted({r["versions"][k] for r in runs if k in r["versions"]}) for k in sorted({k for r in runs for k in r["versions"]})}
    return {
        "name": name,
        "order": recipe.order,
        "title": recipe.title,
        "about": " ".join(recipe.about.split()),
        "paper": recipe.paper,
        "differs": list(recipe.differs),
        "minutes": recipe.minutes,
        "on": recipe.on,
        "against": recipe.against,
        "seeds": list(recipe.seeds),
        "runs": {"done": len(runs), "of": len(recipe.runs())},
        "base": {k: v for k, v in recipe.base.to_json().items() if k not in LOCAL},
        "changed": {k: v for k, v in recipe.base.changed().items() if k not in PATHS},
        "arms": [_arm(recipe, a, by_arm) for a in recipe.arms],
        "devices": sorted({r["device_name"] for r in runs}),
        "versions": versions,
        "commits": sorted({r["commit"] for r in runs if r["commit"]}),
        "dates": sorted({r["date"][:10] for r in runs}),
    }


def _arm(recipe: Recipe, arm: Arm, by_arm: Mapping[str, Mapping[int, Result]]) -> Result:
    runs = by_arm[arm.name]
    values = {m: [r[m] for r in runs.values()] for m in MEASURES}
    spreads = {m: spread(v) for m, v in values.items()}
    against = recipe.against_of(arm)
    return {
        "name": arm.name,
        "method": arm.method,
        "changes": dict(arm.changes),
        "group": arm.group,
        "paper": arm.paper,
        "seeds": list(runs),
        "values": values,
        **{k: {m: spreads[m][k] for m in MEASURES} for k in ("mean", "deviation", "interval")},
        "alone": bool(runs) and all(r["side_by_side"] == 1 for r in runs.values()),
        "against": None if against is None else _against(against, runs, by_arm[against]),
    }


def _against(name: str, ours: Mapping[int, Result], theirs: Mapping[int, Result]) -> Result:
    """Ratios are of means over common seeds, on one device; of times only where every run was alone on it."""
    seeds = [s for s in ours if s in theirs]
    pairs = {m: paired({s: r[m] for s, r in ours.items()}, {s: r[m] for s, r in theirs.items()}) for m in PAIRED}
    used = [runs[s] for runs in (ours, theirs) for s in seeds]
    same = len({r["device_name"] for r in used}) == 1
    alone = all(r["side_by_side"] == 1 for r in used)
    ratio: dict[str, float | None] = dict.fromkeys(RATIOS)
    for m in RATIOS:
        mine, its = (spread([runs[s][m] for s in seeds])["mean"] for runs in (ours, theirs))
        if mine is not None and its and same and (alone or m != "step_ms"):
            ratio[m] = mine / its
    return {"arm": name, "seeds": seeds, **pairs, "ratio": ratio}


def _verdict(recipe: Recipe, results: Result, path: Path) -> str | None:
    """Computed once all runs are there."""
    if results["runs"]["done"] < results["runs"]["of"] or recipe.verdict is None:
        return None
    if isinstance(recipe.verdict, str):
        return recipe.verdict
    try:
        said = recipe.verdict(results)
    except Exception as e:
        raise ValueError(f"{path}: verdict failed with {type(e).__name__}: {e}") from e
    if not isinstance(said, str):
        raise ValueError(f"{path}: verdict must return a text; it returned {type(said).__name__}.")
    return said


# As text


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _mean(arm: Result, measure: str, digits: int) -> str:
    mean, deviation = arm["mean"][measure], arm["deviation"][measure]
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def _difference(arm: Result, results: Result) -> str:
    pair = arm["against"] and arm["against"]["top1"]
    if not pair or pair["mean"] is None:
        return ""
    said = _signed(pair["mean"])
    if pair["interval"] is not None:
        said += f" ({_signed(pair['interval'][0])} to {_signed(pair['interval'][1])})"
    said += " *" if pair["clear"] else ""
    return said if arm["against"]["arm"] == results["against"] else f"{said} to {arm['against']['arm']}"


def _size(arm: Result, results: Result, measure: str) -> str:
    """The ratio, with a † where it is to another arm than most; for an arm that is against none, the figure itself."""
    if arm["against"] is not None:
        ratio = arm["against"]["ratio"][measure]
        return "" if ratio is None else f"{ratio:.2f}" + ("" if arm["against"]["arm"] == results["against"] else " †")
    mean = arm["mean"][measure]
    if mean is None or (measure == "step_ms" and not arm["alone"]):
        return ""
    return f"{mean:.1f} ms" if measure == "step_ms" else readable(mean)


TABLE: tuple[tuple[str, Callable[[Result, Result], str]], ...] = (
    ("arm", lambda a, r: a["name"]),
    ("seeds", lambda a, r: "" if a["seeds"] == r["seeds"] else str(len(a["seeds"]))),
    ("top-1, %", lambda a, r: _mean(a, "top1", 2)),
    ("difference", _difference),
    ("paper", lambda a, r: "" if a["paper"] is None else f"{a['paper']:g}"),
    ("top-5, %", lambda a, r: _mean(a, "top5", 2)),
    ("training loss", lambda a, r: _mean(a, "train_loss", 3)),
    ("held", lambda a, r: _size(a, r, "held")),
    ("peak", lambda a, r: _size(a, r, "peak")),
    ("step", lambda a, r: _size(a, r, "step_ms")),
)


def table(results: Result) -> list[list[str]]:
    """Cells; columns of which nothing is known are left out."""
    cells = [[fill(arm, results) for _, fill in TABLE] for arm in results["arms"]]
    shown = [i for i in range(len(TABLE)) if any(row[i] for row in cells)]
    return [[TABLE[i][0] for i in shown], *([row[i] for i in shown] for row in cells)]


def told(results: Result) -> str:
    """For a terminal."""
    count = results["runs"]
    head = f"{results['title']}, {count['done']} of {count['of']} runs"
    note = f"Differences and ratios are to {results['against']}, seed by seed, with a 95 % interval; a * is one without zero."
    if any(a["against"] and a["against"]["arm"] != results["against"] for a in results["arms"]):
        note += " A † is to the arm that the difference names."
    return f"{head}\n\n{rows(table(results))}\n\n{note}" + (f"\n{results['verdict']}" if results["verdict"] else "")


def listing(experiments: Path | None = None) -> str:
    """Every recipe, what it takes, and what came out."""
    found = recipes(experiments)
    if not found:
        raise ValueError(f"There are no recipes in {experiments or EXPERIMENTS}/: go where that folder is, or give a path to a recipe.py.")
    cells = [["name", "runs", "minutes", "top-1 measured", "what", "paper"]]
    for path in found:
        cells.append([name_of(path), *_listed(path)])
    return rows(cells, texts=3)


def _listed(path: Path) -> list[str]:
    try:
        recipe = load(path)
        done = finished(recipe, runs_folders(path, None))
    except ValueError as e:
        return ["–", "–", "", _short(str(e), 90), ""]
    measured = _measured(results_of(recipe, name_of(path), done)) if done else ""
    minutes = "–" if recipe.minutes is None else f"{recipe.minutes:g}" + (f", {recipe.on}" if recipe.on else "")
    return [f"{len(done)}/{len(recipe.runs())}", minutes, measured, _short(recipe.title, 50), _short(recipe.paper, 70)]


def _measured(results: Result) -> str:
    base = next((a["mean"]["top1"] for a in results["arms"] if a["name"] == results["against"]), None)
    apart = [a["against"]["top1"]["mean"] for a in results["arms"] if a["against"] and a["against"]["top1"]["mean"] is not None]
    said = f"{results['against']} {_percent(base)}"
    if not apart:
        return said
    low, high = _signed(min(apart)), _signed(max(apart))
    return f"{said}, others {low}" + (f" to {high}" if high != low else "")


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


# The page

INTRODUCTION = """\
# Results

Everything on this page is written by `halfback reproduce --page` from the files that trainings left in `experiments/`; nothing is
edited by hand. `halfback reproduce NAME` trains a recipe anew.

Figures are means ± standard deviation over seeds. For one seed all arms start from the same weights and see the same batches in the same
order, so a difference is taken seed by seed; in brackets is its 95 % interval by Student's t, and a \\* marks one without
zero. Held is what is alive for the backward pass when the forward ends, peak the most that is alive; both, and the time of a step, are
ratios, but for the arm that the others are compared with; a † is to the arm that the difference names. Times are left out where
trainings ran side by side.
"""


def page_text(experiments: Path | None = None, page: Path | None = None) -> str:
    """The page from every results.json, by `order` and then name."""
    experiments, page = experiments or EXPERIMENTS, page or PAGE
    found = [(p, json.loads(p.read_text(encoding="utf-8"))) for p in sorted(experiments.glob("*/results.json"))]
    if not found:
        raise ValueError(f"There is no results.json in {experiments}/*/: halfback reproduce NAME makes one.")
    found.sort(key=lambda f: (f[1]["order"], f[1]["name"]))
    parts = [INTRODUCTION, *(_section(r, os.path.relpath(p.with_name("figure.png"), page.parent)) for p, r in found)]
    return "\n".join(parts)


def page(experiments: Path | None = None, page: Path | None = None) -> Path:
    text, path = page_text(experiments, page), page or PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def _section(r: Result, drawn: str) -> str:
    missing = r["runs"]["of"] - r["runs"]["done"]
    parts = [f"## {r['title']}", r["about"], f"**The paper:** {r['paper']}"]
    parts += [f"**Not complete:** {missing} of {r['runs']['of']} runs are missing."] if missing else []
    parts += ["**Here:**", _markdown(r)]
    parts += [f"**Does it hold?** {r['verdict']}"] if r["verdict"] else []
    parts += ["What differs from the paper:", "\n".join(f"- {d}" for d in r["differs"])] if r["differs"] else []
    parts += [f"![{r['title']}: top-1 of every arm]({Path(drawn).as_posix()})", _made(r)]
    return "\n\n".join(parts) + "\n"


def _markdown(r: Result) -> str:
    head, *body = table(r)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    group = ""
    for arm, cells in _grouped(list(zip(r["arms"], body, strict=True))):
        if arm["group"] != group:
            group = arm["group"]
            lines.append([f"**{_cell(group)}**"] + [""] * (len(head) - 1))
        told = _settings({**({} if arm["method"] == arm["name"] else {"method": arm["method"]}), **arm["changes"]})
        lines.append([_cell(cells[0]) + (f"<br>{told}" if told else ""), *map(_cell, cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _grouped(arms: Sequence[tuple[Result, Any]]) -> list[tuple[Result, Any]]:
    """Arms of a group together, where the first of them stands."""
    groups = list(dict.fromkeys(arm["group"] for arm, _ in arms))
    return sorted(arms, key=lambda pair: groups.index(pair[0]["group"]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _settings(values: Mapping[str, Any]) -> str:
    """The method as it is written, and settings as name=value, as code."""
    said = [str(v) if k == "method" else f"{k}={v}" for k, v in values.items()]
    return ", ".join(f"`{text}`" for text in said).replace("|", "\\|")


def _made(r: Result) -> str:
    versions = ", ".join(f"{k} {' and '.join(v)}" for k, v in r["versions"].items())
    dates = r["dates"][0] + (f" to {r['dates'][-1]}" if len(r["dates"]) > 1 else "")
    seeds = ", ".join(map(str, r["seeds"]))
    minutes = "" if r["minutes"] is None else f" About {r['minutes']:g} minutes" + (f", {r['on']}." if r["on"] else ".")
    made = f"Seeds {seeds}. {' and '.join(r['devices'])}; {versions}; {dates}."
    commits = [re.sub("([0-9a-f]{10})[0-9a-f]+", "\\1", c) for c in r["commits"]]  # "-dirty" stays
    made += f" Commit {', '.join(commits)}." if commits else ""
    base = {"model": r["base"]["model"], "data": r["base"]["data"], **r["changed"]}
    return f"`halfback reproduce {r['name']}`.{minutes} {made} Settings of all arms: {_settings(base)}."


def figure(results: Result, path: Path) -> None:
    """Top-1 by arm: seeds as dots, and their mean. What an arm is compared with is a line, and the bar is the paired 95 % interval of
    the difference to it, so that a bar that misses the line is a clear difference. The paper's figures are open marks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = [arm for arm, _ in _grouped([(a, None) for a in results["arms"]])]
    means = {a["name"]: a["mean"]["top1"] for a in arms}
    groups = list(dict.fromkeys(a["group"] for a in arms))
    places = [i + 0.6 * groups.index(a["group"]) for i, a in enumerate(arms)]
    drawn = Figure(figsize=(9, 1.5 + 0.42 * (places[-1] + 1)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    for y, arm in zip(places, arms, strict=True):
        _draw_arm(axes, y, arm, f"C{groups.index(arm['group']) % 10}", means)
    labels = [a["name"] if not a["group"] else f"{a['group']}: {a['name']}" for a in arms]
    axes.set_yticks(places, [_short(text, 60) for text in labels])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.margins(x=0.08)
    axes.set(xlabel="top-1, %: seeds and their mean; the bar is the 95 % interval of the difference, seed by seed")
    axes.set_title(results["title"], fontsize=11, wrap=True)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    _legend(drawn, results)
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=150, metadata={"Software": None})
    write_bytes(path, content.getvalue())


def _draw_arm(axes: Any, y: float, arm: Result, colour: str, means: Mapping[str, float | None]) -> None:
    mean, pair = arm["mean"]["top1"], arm["against"] and arm["against"]["top1"]
    base = means[arm["against"]["arm"]] if arm["against"] else mean
    if base is not None:
        axes.plot([base, base], [y - 0.5, y + 0.5], color="0.55", linestyle="--", linewidth=1, zorder=1)
    values = [v for v in arm["values"]["top1"] if v is not None]
    axes.scatter(values, [y] * len(values), s=14, color=colour, alpha=0.6, linewidths=0, zorder=3)
    if base is not None and pair and pair["interval"]:
        half = (pair["interval"][1] - pair["interval"][0]) / 2
        axes.errorbar(base + pair["mean"], y, xerr=half, color=colour, capsize=4, zorder=2)
    if mean is not None:
        axes.scatter(mean, y, s=42, color=colour, zorder=3)
    if arm["paper"] is not None:
        axes.scatter(arm["paper"], y, s=60, marker="D", facecolors="none", edgecolors="0.2", zorder=4)


def _legend(drawn: Any, results: Result) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], color="0.55", linestyle="--", linewidth=1, label=f"compared with ({_short(results['against'], 30)})")]
    if any(a["paper"] is not None for a in results["arms"]):
        marks.append(Line2D([], [], color="0.2", marker="D", linestyle="", fillstyle="none", markersize=7, label="in the paper"))
    drawn.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=9)


# The command


def add_arguments(to: argparse.ArgumentParser) -> None:
    add = to.add_argument
    add("name", nargs="?", metavar="NAME", help="a folder of experiments/, or a path to a recipe.py")
    add("--list", action="store_true", help="the recipes, what they take, and what came out")
    add("--page", action="store_true", help=f"write {PAGE} from all results")
    add("--side-by-side", type=int, default=1, metavar="N", help="trainings at a time; with more than one, times are not reported")
    add("--minutes", type=float, metavar="M", help="stop after so long; the same command goes on")
    add("--only", metavar="GLOB", help="runs whose id or arm matches, as '*_s0'")
    add("--data", metavar="DIR", help="where the data lies (default: as the recipe says)")
    add("--device", metavar="D", help="cpu or cuda (default: as the recipe says)")
    add("--out", type=Path, default=OUT, metavar="DIR", help="where trainings run (default: %(default)s)")
    add("--into", type=Path, metavar="DIR", help="write results to DIR/NAME, not beside the recipe")
    add("--again", action="store_true", help="delete runs whose settings are not the recipe's any more, and train them anew")
    add("--keep", action="store_true", help="keep checkpoints of runs that are done")


def main(args: argparse.Namespace, say: Say = print) -> int:
    if not (args.name or args.list or args.page):
        raise ValueError("reproduce: give the NAME of a recipe, --list or --page.")
    code = 0
    if args.name:
        code = reproduce(
            args.name,
            side_by_side=args.side_by_side,
            minutes=args.minutes,
            out=args.out,
            root=args.data,
            device=args.device,
            only=args.only,
            into=args.into,
            again=args.again,
            keep=args.keep,
            say=say,
        )
    if args.list:
        say(listing())
    if args.page:
        say(f"Written: {page()}")
    return code
