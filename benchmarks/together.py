"""Measurements and trainings on one GPU at a time: trainings go on while rows compile, and stand still while something is timed.

    python benchmarks/together.py --out DIR --rows FILE --alone COMMAND --beside COMMAND ...

--rows FILE      rows of `halfback bench` that are timed first, again if they were before; a line a row, as: vit-b | sbp + lean, or with a
                 method of one's own, as: vit-b | sbp(keep=0.25)+lean
--alone COMMAND  then this, with the GPU to itself, as "halfback reproduce finetune_sst2 --time"; may be given again, in order
--beside COMMAND a training that runs beside all that, as "halfback reproduce vit_main --side-by-side 8"; may be given again
--until FILE     trainings begin when this file is there, as data may still be on its way

bench.jsonl, and a log of each command, are written to DIR. Ends when all have ended. For Linux: who belongs to a training is told by its
environment, and it is stopped and continued by signals.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfback.bench.rows import Row, rows_of
from halfback.bench.run import Run
from halfback.bench.work import Place

MARK = "HALFBACK_BESIDE"
POLL = 0.2  # seconds
TIMED = threading.Lock()  # held while something is timed


def trainings() -> Iterator[int]:
    """The processes of all that runs beside, and of what they started."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={os.getpid()}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def send(number: signal.Signals) -> None:
    for pid in trainings():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    with TIMED:
        send(signal.SIGSTOP)
        try:
            yield
        finally:
            send(signal.SIGCONT)


@contextlib.contextmanager
def turns(path: Path) -> Iterator[None]:
    """While the rows of a folder get ready, trainings stand still while one of them has its turn."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL):
            if held_by_another(path):
                with alone():
                    while held_by_another(path) and not over.wait(POLL):
                        pass

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def held_by_another(path: Path) -> bool:
    import fcntl  # not on Windows

    try:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # its folder is gone
        pass
    return False


def rows(path: Path, place: Place) -> list[tuple[Any, list[Row]]]:
    """Of each model the rows that a file names, and the plain ones that they are compared to."""
    wanted: dict[str, list[str]] = defaultdict(list)
    for line in filter(None, map(str.strip, path.read_text().splitlines())):
        model, bar, method = (part.strip() for part in line.partition("|"))
        if not bar:
            raise SystemExit(f"together.py: {path}: {line!r} is no row; write it as: vit-b | sbp + lean")
        wanted[model].append(method)
    found = []
    for model, methods in wanted.items():
        spec = place.spec(model)
        known = rows_of(spec, "all")
        names = {r.method for r in known}
        if own := [m for m in methods if m not in names and "(" in m]:
            known += [r for r in rows_of(spec, texts=own) if not r.is_plain]
        if missing := set(methods) - {r.method for r in known}:
            raise SystemExit(
                f"together.py: {path}: {model} has no row {', '.join(sorted(missing))}. `halfback bench --list --set all` has them."
            )
        asked = [r for r in known if r.method in methods]
        found.append((spec, [r for r in known if r in asked or r.method in {a.plain for a in asked}]))
    return found


def started(command: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
    with log.open("w") as file:
        return subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **env})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--alone", action="append", default=[])
    parser.add_argument("--beside", action="append", default=[])
    parser.add_argument("--until", type=Path)
    parser.add_argument("--batch", type=int, help="of all rows; each model's own unless told")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a size for tests")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whatever ends it, trainings go on
    args.out.mkdir(parents=True, exist_ok=True)
    place = Place(args.device, args.tiny, args.batch)
    work = rows(args.rows, place) if args.rows else []

    def say(text: str) -> None:
        print(text, flush=True)

    beside: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        while args.until is not None and not args.until.exists():
            time.sleep(POLL)
        with TIMED:
            for i, command in enumerate(args.beside):
                beside.append(started(command, args.out / f"beside_{i}.log", **{MARK: str(os.getpid())}))

    beginning = threading.Thread(target=begin, daemon=True)  # an error ends all of it, and does not wait for a file
    beginning.start()

    class Politely(Run):
        """Trainings stand still while a row is timed, and while it is one's turn to get ready: beside them that took minutes."""

        def _batches(self, queue: Any, folder: Path, children: Any) -> None:
            with turns(folder / "turn"):
                super()._batches(queue, folder, children)

        def _time(self, *args: Any, **kwargs: Any) -> None:
            with alone():
                super()._time(*args, **kwargs)

    if work:
        Politely(place, args.out / "bench.jsonl", say, side_by_side=sum(len(r) for _, r in work), again=True).steps(work)
    failed = 0
    for i, command in enumerate(args.alone):
        with alone():
            code = started(command, args.out / f"alone_{i}.log").wait()
        say(f"{command}: exit code {code}")
        failed += code != 0
    beginning.join()
    for training in beside:
        training.wait()
    return int(failed > 0 or any(p.returncode for p in beside))


if __name__ == "__main__":
    sys.exit(main())
