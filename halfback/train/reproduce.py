"""Recipes are run: every arm with every seed, each in a process of its own in OUT/NAME/ID/. OUT/NAME/recipe.txt says whose they are.
Several recipes share one queue.

A run that is done is never trained again. One that was cut goes on from its checkpoint. Seeds are the outer loop, so that a cut leaves
whole pairs. What a recipe is stands in recipes.py, what comes out in results.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .pieces import usable
from .recipes import LOCAL, Recipe, Run, differing, find, finished, load, name_of, read_result, runs_folders
from .record import LOCK, check_drawing, locked, write_json, write_text
from .results import TIMES, collect, duration, listing, percent, told
from .results_page import PAGE, page
from .sets import set_of
from .settings import STOPPED
from .timed import time_arms

OUT = Path("out/runs")
POLL, TELL, GRACE = 0.2, 60.0, 20.0  # seconds between looks, between lines of progress, and from SIGTERM to SIGKILL

Say = Callable[[str], Any]


# Runs


@dataclass
class Task:
    """A run, where it trains, and where its result goes."""

    name: str  # as it is told
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
        other = differing(self.run.settings, json.loads(asked.read_text()), asked) if asked.exists() else ""
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
            self._look_again()

    def _look_again(self) -> None:
        """Another process may have ended, or its trainings, while others trained here."""
        for task in [t for t in self.left if _is_done(t)]:
            with contextlib.ExitStack() as stack:
                if locked(task.folder, stack) is not None:
                    self.left.remove(task)
                    self._take(task)

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.side_by_side:
            task = self.waiting.popleft()
            with contextlib.ExitStack() as stack:
                lock = locked(task.folder, stack)
                if lock is None:
                    self.say(f"{task.name}: another process trains it; left alone.")
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
        env = {**({} if self.side_by_side == 1 else {"OMP_NUM_THREADS": threads}), **os.environ, LOCK: str(lock)}
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
            result = read_result(task.folder / "result.json")
            other = differing(task.run.settings, result["settings"], task.folder / "result.json")
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
        self._tell(f"{task.name}: top-1 {percent(result['top1'])}, {duration(result.get('seconds'))}")

    def _fail(self, task: Task, why: str) -> None:
        self.failed.append(task)
        log = task.folder / "log.txt"
        lines = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
        self._tell("\n".join([f"{task.name} failed, {why}. The end of {log}:", *(f"  {line}" for line in lines)]))

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
            at = (f"{t.name} epoch {t.epochs()} of {t.run.settings.epochs}" for t in self.running)
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
        return f", about {duration(rest * (time.monotonic() - self.begun) / epochs)} to go"


def _is_done(task: Task) -> bool:
    """It ended when nobody looked: the result is there, and was not taken."""
    path = task.folder / "result.json"
    if not path.exists() or not (task.folder / "side_by_side").exists():
        return False
    try:
        return not differing(task.run.settings, read_result(path)["settings"], path)
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


@dataclass
class Work:
    """A recipe, what is asked of it, and what of that is not done."""

    path: Path
    recipe: Recipe
    folders: list[Path]
    chosen: list[Run]
    tasks: list[Task] = dataclasses.field(default_factory=list)
    served: list[Run] = dataclasses.field(default_factory=list)  # what another recipe of the queue trains for it

    def collect(self, into: Path | None, say: Say) -> None:
        results = collect(self.path, into=into)
        say("\n" + told(results) + f"\n\nWritten: {self.folders[-1].parent}/results.json and its figures")


def reproduce(
    recipe_paths: str | Path | Sequence[str | Path],
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
    timed: bool = False,
    graphs: bool = False,
    say: Say = print,
) -> int:
    """Train what is missing, and collect. 0: all of it is there; 1: something failed; 75: time was over, and the next call goes on.

    Several recipes share one queue, in the order in which they are given.
    `timed`: a few steps of each arm are timed instead, side by side only while they get ready.
    """
    _check_given({"side_by_side": side_by_side, "minutes": minutes}, {"out": out, "into": into})
    if timed and only is not None:
        raise ValueError("reproduce: --time times all arms in one call, so that they can be compared. Leave --only out.")
    check_drawing()
    paths = map(find, [recipe_paths] if isinstance(recipe_paths, (str, Path)) else recipe_paths)
    works = [_work(path, into, only, timed) for path in {path.resolve(): path for path in paths}.values()]
    _check_runs(works, only, graphs)
    given: dict[str, Any] = {k: v for k, v in (("root", root), ("device", device)) if v is not None}
    for work in works:
        work.chosen = [_with(r, **given, graphs=graphs and r.settings.compile) for r in work.chosen]
    if timed:
        check_needs([r for work in works for r in work.chosen])
        return max(_time(work, into, side_by_side, say) for work in works)
    for work in works:
        _queue(work, out or OUT, again, several=len(works) > 1)
    for work in works:
        _share(work, works)
    check_needs([t.run for work in works for t in work.tasks])
    for work in works:
        _check_whose(work)
    for work in works:
        _prepare(work, again)
        home, others = (out or OUT) / name_of(work.path), len(work.served)
        done = len(work.chosen) - len(work.tasks) - others
        shared = f", {others} trained for another recipe of this queue" if others else ""
        say(f"{work.recipe.title}: {len(work.chosen)} runs, {done} done{shared}. The rest trains in {home}/, {side_by_side} at a time.")
    pool = Pool([t for work in works for t in work.tasks], side_by_side, say, keep=keep)
    pool.train(minutes)
    for work in works:
        if finished(work.recipe, work.folders):
            work.collect(into, say)
    return _ended(pool, say)


def _ended(pool: Pool, say: Say) -> int:
    if pool.left:
        say(f"{len(pool.left)} runs are left. The same command goes on with them.")
    if pool.interrupted:
        raise KeyboardInterrupt
    if pool.failed:
        say(f"{len(pool.failed)} runs failed: {', '.join(t.name for t in pool.failed)}. The same command tries them again.")
        return 1
    return STOPPED if pool.left else 0


def _check_given(numbers: Mapping[str, float | None], folders: Mapping[str, Path | None]) -> None:
    for name, value in numbers.items():
        if value is not None and not value > 0:
            raise ValueError(f"reproduce: {name}={value} must be above 0.")
    for name, folder in folders.items():
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"reproduce: {name}={str(folder)!r} is a file. Give a folder.")


def _work(path: Path, into: Path | None, only: str | None, timed: bool) -> Work:
    recipe = load(path)
    return Work(path, recipe, runs_folders(path, into), recipe.timed() if timed else _chosen(recipe, only))


def _check_runs(works: Sequence[Work], only: str | None, graphs: bool) -> None:
    """What no run of any recipe is asked for by."""
    ids = [r.id for work in works for r in work.recipe.runs()]
    for glob in _globs(only):
        if not any(fnmatch.fnmatchcase(id, glob) for id in ids):
            raise ValueError(f"reproduce: only={glob!r} matches none of the {len(ids)} runs. Runs: {', '.join(ids)}.")
    if graphs and not any(r.settings.compile for work in works for r in work.chosen):
        found = ", ".join(str(work.path) for work in works)
        raise ValueError(f"reproduce: --graphs is for runs that are compiled, and none of {found} is. Leave it out.")


def check_needs(runs: Sequence[Run]) -> None:
    """What many runs need, before the first of them: it is told once, and not by each."""
    for device in {r.settings.device: r for r in runs}:
        if not (device.startswith("cuda") and torch.cuda.is_available()):  # asking a GPU that is there would take some of its memory
            usable(device)
    for settings in {(s.data, s.root, s.validation, s.size, s.seq): s for s in (r.settings for r in runs)}.values():
        set_of(settings)


def _queue(work: Work, out: Path, again: bool, several: bool) -> None:
    """What is to be trained."""
    name, folders = name_of(work.path), work.folders
    there = finished(work.recipe, folders, again=[r.id for r in work.chosen] if again else ())
    missing = [r for r in work.chosen if r.id not in there]
    work.tasks = [Task(f"{name}/{r.id}" if several else r.id, r, out / name / r.id, folders[-1] / f"{r.id}.json") for r in missing]


def _share(work: Work, works: Sequence[Work]) -> None:
    """What another recipe of the queue trains for this one is not trained twice, whichever comes first."""
    others = [t.run.settings for other in works if name_of(other.path) in work.recipe.beside for t in other.tasks]
    work.served = [t.run for t in work.tasks if not all(t.run.settings.differs(s) for s in others)]
    work.tasks = [t for t in work.tasks if t.run not in work.served]


def _check_whose(work: Work) -> None:
    """Trainings of another recipe of this name are not gone on with, nor deleted, unless that recipe is gone or was moved."""
    for home in {t.folder.parent for t in work.tasks}:
        own, whose = str(work.path.resolve()), home / "recipe.txt"
        other = whose.read_text(encoding="utf-8") if whose.exists() else own
        if other != own and Path(other).exists():
            raise ValueError(f"reproduce: {home} has the trainings of {other}, another recipe of this name. Give --out another folder.")


def _prepare(work: Work, again: bool) -> None:
    for task in work.tasks:
        task.prepare(again=again)
    for home in {t.folder.parent for t in work.tasks}:
        home.mkdir(parents=True, exist_ok=True)
        write_text(home / "recipe.txt", str(work.path.resolve()))


def _time(work: Work, into: Path | None, at_once: int, say: Say) -> int:
    arms, path = {r.arm.name for r in work.chosen}, work.folders[-1].parent / TIMES
    say(f"{work.recipe.title}: {len(arms)} arms, a few steps of each.")
    found = time_arms(work.chosen, path, at_once, say)
    if found:
        say(f"Written: {path}")
    if found and finished(work.recipe, work.folders):
        collect(work.path, into=into)
    return int(len(found) < len(arms))


def _with(run: Run, **given: Any) -> Run:
    return dataclasses.replace(run, settings=dataclasses.replace(run.settings, **given))


def _globs(only: str | None) -> list[str]:
    """Commas separate them; ids have none."""
    return [] if only is None else [glob.strip() for glob in only.split(",")]


def _chosen(recipe: Recipe, only: str | None) -> list[Run]:
    """The runs whose id matches one of the globs in `only`."""
    return [r for r in recipe.runs() if only is None or any(fnmatch.fnmatchcase(r.id, glob) for glob in _globs(only))]


# The command


def add_arguments(to: argparse.ArgumentParser) -> None:
    add = to.add_argument
    add("names", nargs="*", metavar="NAME", help="a folder of experiments/, or a path to a recipe.py; several share one queue, in order")
    add("--list", action="store_true", help="the recipes, what they take, and what came out")
    add("--page", action="store_true", help=f"write {PAGE} from all results")
    add(
        "--side-by-side",
        type=int,
        default=1,
        metavar="N",
        help="trainings at a time; with more than one, times are not reported, see --time",
    )
    add("--minutes", type=float, metavar="M", help="stop after so long; the same command goes on")
    add("--only", metavar="GLOBS", help="runs whose id, ARM_sSEED, matches one of these, as 'exact_s*,*-0.5_s0'")
    add("--root", "--data", metavar="DIR", help="where the data lies (default: $HALFBACK_DATA/NAME, or as the recipe says)")
    add("--device", metavar="D", help="cpu or cuda (default: as the recipe says)")
    add("--out", type=Path, default=OUT, metavar="DIR", help="where trainings run (default: %(default)s)")
    add("--into", type=Path, metavar="DIR", help="write results to DIR/NAME, not beside the recipe")
    add("--again", action="store_true", help="delete runs whose settings are not the recipe's any more, and train them anew")
    add("--time", action="store_true", help="train nothing: time a few steps of each arm, one at a time on the device")
    add("--keep", action="store_true", help="keep checkpoints of runs that are done")
    add("--graphs", action="store_true", help="launch what is compiled as CUDA graphs: faster where the GPU waits for the CPU")


def main(args: argparse.Namespace, say: Say = print) -> int:
    if not (args.names or args.list or args.page):
        raise ValueError("reproduce: give the NAME of a recipe, --list or --page.")
    code = 0
    if args.names:
        code = reproduce(
            args.names,
            side_by_side=args.side_by_side,
            minutes=args.minutes,
            out=args.out,
            root=args.root,
            device=args.device,
            only=args.only,
            into=args.into,
            again=args.again,
            keep=args.keep,
            timed=args.time,
            graphs=args.graphs,
            say=say,
        )
    if args.list:
        say(listing())
    if args.page:
        say(f"Written: {page()}")
    return code
