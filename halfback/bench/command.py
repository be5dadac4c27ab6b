"""`halfback bench`: its options, and what it does."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..extras import install
from ..report import rows as columns
from . import fits, growth, results
from .measure import GIB
from .models import MODELS, REQUIRED, Spec
from .picture import picture
from .promises import PROMISES, ahead, kept
from .results import OUT, file_name, in_full, key, newest, read, table
from .rows import SETS, Row, rows_of
from .run import Run, unit_of
from .work import Place

PARTS = ("step", "fits", "growth")
LEFT = 75  # exit code: time is over, and the same command goes on
Say = Callable[[str], Any]


def main(args: argparse.Namespace, say: Say = print) -> int:
    _check(args)
    place = Place(args.device, args.tiny, args.batch, args.size, args.seq)
    names = args.model or models_of(args)
    specs = [place.spec(name) for name in names]
    run = Run(place, args.out, say, args.minutes, args.limit, args.side_by_side or at_once(args.device), args.again)
    work = [(spec, chosen(spec, args)) for spec in specs]
    if not any(rows for _, rows in work):
        raise ValueError(f"bench: no row of {', '.join(names)} has {' or '.join(map(repr, args.only or [args.part]))}; --list shows them.")
    if args.list:
        say("\n\n".join(listing(run, spec, rows, args) for spec, rows in work))
        return 0
    if args.part == "step":
        run.steps(work)
    for spec, rows in work if args.part != "step" else ():
        for row in rows:
            asked = asked_of(spec, row, args)
            if args.part == "fits":
                asked = fits.beside(asked, mine(spec, run, args.part))
            run.alone(spec, row, args.part, asked, {"fits": fits.told, "growth": growth.told}[args.part])
    shown = [r for spec in specs for r in show(spec, run, args, say)]
    if len(promised := kept(r for r in shown if in_full(r))) > 1:
        say(f"\n{columns(promised, texts=1)}")
    if run.failed:
        say(f"{run.failed} rows failed, as said above. What failed is written too, and not tried again; --again tries it.")
    if run.left:
        say(f"{run.left} rows are left. The same command goes on with them.")
    return LEFT if run.left else int(run.failed > 0)


def _check(args: argparse.Namespace) -> None:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench: no GPU found; time and peak are measured on one. --device cpu --tiny tries the command out.")
    for name, value in (("--minutes", args.minutes), ("--limit", args.limit), ("--side-by-side", args.side_by_side)):
        if value is not None and not value > 0:
            raise ValueError(f"bench: {name} {value} must be above 0.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"bench needs matplotlib: {install('matplotlib')}.")
    if args.method and args.part != "step":
        raise ValueError(f"bench: --method is for --part step; --part {args.part} has its own.")
    for name, value in (("--rooms", args.rooms), ("--largest", args.largest)):
        if value and args.part != "fits":
            raise ValueError(f"bench: {name} is for --part fits; this is --part {args.part}.")


def at_once(device: str) -> int:
    """How many rows may compile side by side: one a core, and on a GPU one for each 8 GiB, as all of them have their weights there."""
    cores = os.cpu_count() or 1
    return cores if device == "cpu" else max(2, min(cores, torch.cuda.get_device_properties(0).total_memory // (8 * GIB)))


def models_of(args: argparse.Namespace) -> list[str]:
    """Those that a set has rows of, and of other parts the required ones."""
    if args.part != "step":
        return list(REQUIRED)
    return list(MODELS) if args.set == "all" else list(dict.fromkeys((*REQUIRED, *(p.model for p in PROMISES))))


def set_of(spec: Spec, args: argparse.Namespace) -> str:
    """Of models that are there for a promise alone, no more than that, unless they are asked for."""
    if spec.name not in MODELS:
        return "all"
    return args.set if args.model or args.set == "all" or spec.name in REQUIRED else "promised"


def chosen(spec: Spec, args: argparse.Namespace) -> list[Row]:
    """The rows that are asked for, and the plain ones that they are compared to."""
    if args.part == "step":
        rows = rows_of(spec, set_of(spec, args), args.method or ())
    else:
        rows = {"fits": fits, "growth": growth}[args.part].rows_of(spec)
    if not args.only:
        return rows
    asked = [r for r in rows if any(o in r.method for o in args.only)]
    plains = {r.plain for r in asked} if args.part == "step" else set()
    return [r for r in rows if r in asked or r.method in plains]


def asked_of(spec: Spec, row: Row, args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.part == "growth":
        return growth.asked_of(row)
    return [a for a in _fits(spec, args) if args.largest in (None, "batch" if a["largest"] == "batch" else "sample")]


def _fits(spec: Spec, args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.device == "cpu":
        return fits.asked_of(spec, args.rooms or fits.CPU_ROOMS, args.rooms or fits.CPU_ROOMS[:1])
    has = torch.cuda.get_device_properties(0).total_memory / GIB
    if args.rooms and max(args.rooms) > has:
        raise ValueError(f"bench: --rooms {max(args.rooms):g}: this GPU has {has:.1f} GiB. Give at most that.")
    rooms, alone = ([r for r in args.rooms or usual if r <= has] for usual in (fits.ROOMS, fits.ALONE))
    return fits.asked_of(spec, rooms, alone)


def listing(run: Run, spec: Spec, rows: Sequence[Row], args: argparse.Namespace) -> str:
    """Every row, with what came out of it where it is done."""
    cells = [["row", "what is applied", "done"]]
    for row in rows:
        for asked in [{}] if args.part == "step" else asked_of(spec, row, args):
            line = run.done.get(key(run.common(spec, row, args.part, **asked)))
            more = ", ".join(f"{v:g} GiB" if k == "room_gib" else str(v) for k, v in asked.items())
            cells.append([f"{row.method}{', ' + more if more else ''}", row.text, _outcome(line)])
    return f"{spec.name}: {spec.about}, batch {spec.batch}, {spec.size} {unit_of(spec)}\n{columns(cells, texts=2)}"


def _outcome(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    return f"failed: {line['failed']}" if "failed" in line else f"done {line['date']}"


def mine(spec: Spec, run: Run, part: str) -> list[dict[str, Any]]:
    """What is known of a model, here and at this commit."""
    same = ("gpu", "torch", "commit", "device")
    return newest([r for r in read(run.out) if r["model"] == spec.name and all(r.get(k) == run.here[k] for k in same)], part)


def show(spec: Spec, run: Run, args: argparse.Namespace, say: Say) -> list[dict[str, Any]]:
    """The table of what is known of a model, here and at this commit, and its pictures; returned, too."""
    found = mine(spec, run, args.part)
    if args.part == "step":
        found = [r for r in found if (r["batch"], r["size"]) == (spec.batch, spec.size)]
    if not found:
        return []
    where = run.here["gpu"] if args.device == "cuda" else "a CPU"
    title = f"{spec.about}, batch {spec.batch}, {spec.size} {unit_of(spec)}, on {where}, torch {run.here['torch']}"
    if args.part != "step":
        say(f"\n{title}\n{columns({'fits': fits, 'growth': growth}[args.part].table(found))}")
        return found
    say(f"\n{title}\n{table(found)}")
    for compiled, more in ((True, ""), (False, "_eager")):
        shown = [r for r in found if r["compiled"] is compiled and not r["method"].endswith(results.AGAIN)]
        if len(shown) > 1:
            path = run.out.with_name(f"{run.out.stem}_{file_name(spec.name)}{more}.png")
            picture(shown, f"{title}, {'compiled' if compiled else 'eager'}", path)
            peers = sum(not (r["ours"] or r["note"] or r["text"] == "plain") for r in shown)
            best = "; ".join(ahead(shown)) or "none"
            say(
                f"{'Compiled' if compiled else 'Eager'}, faster than plain at less memory, and not beaten by the {peers} peers here: {best}"
            )
            say(f"Written: {path}")
    return found


# The command


def add_arguments(to: argparse.ArgumentParser) -> None:
    add = to.add_argument
    add(
        "--model",
        action="append",
        metavar="MODEL",
        help=f"{', '.join(MODELS)}, or your own, see below; may be given again (default: {', '.join(REQUIRED)})",
    )
    add(
        "--part",
        choices=PARTS,
        default="step",
        help="step: time and peak; fits: the largest that fits; growth: how cost grows (default: %(default)s)",
    )
    add("--set", choices=SETS, default="required", help="which rows, and models if none is given (default: %(default)s)")
    add("--only", action="append", metavar="TEXT", help="rows whose name contains this; plain is measured beside them")
    add(
        "--method",
        action="append",
        metavar="METHOD",
        help='this instead, as "sbp(keep=0.25)+lean", see below, or "accumulate 4", see --list; may be given again',
    )
    add("--batch", type=int, metavar="N", help="samples of a batch (default: the model's own)")
    add("--size", type=int, metavar="N", help="pixels a side of an image (default: the model's own)")
    add("--seq", type=int, metavar="N", help="tokens of a text (default: the model's own)")
    add("--rooms", type=float, nargs="+", metavar="GIB", help="of --part fits: memory to fit in, in GiB (default: 16 24 40 80)")
    add(
        "--largest", choices=("batch", "sample"), help="of --part fits: the largest batch, or at batch 1 the largest sample (default: both)"
    )
    add("--out", type=Path, default=OUT, metavar="FILE", help="where rows are added, and pictures written beside (default: %(default)s)")
    add("--minutes", type=float, metavar="M", help="start no rows that would take longer; the same command goes on")
    add(
        "--limit",
        type=float,
        default=400,
        metavar="S",
        help="seconds for rows to get ready, and for one to be timed (default: %(default)s)",
    )
    add("--side-by-side", type=int, metavar="N", help="rows that compile at once (default: what cores and memory allow)")
    add("--again", action="store_true", help="measure what is done, too")
    add("--list", action="store_true", help="the rows, and which are done")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the command out (default: %(default)s)")
    add("--tiny", action="store_true", help="models of a size for tests")
