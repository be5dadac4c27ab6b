"""What a training leaves behind, in its folder.

    metrics.jsonl   a row an epoch, on the disk when the epoch ends
    result.json     the figures of a training that is done; summary.csv has the main ones in a line
    curves.png      loss and accuracy over epochs
    report.html     all of it, as a page that opens from a file and needs no network

A file is whole or not there: it is written beside its place and then moved into it. metrics.jsonl alone is appended to. Its last
line may be torn where a training was killed, and is then left out when the training goes on. The file `lock` is empty: who trains in the
folder holds a lock on it.
"""

from __future__ import annotations

import contextlib
import csv
import html
import io
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ..compare import surroundings
from ..extras import install
from ..files import write_bytes, write_text, writing
from ..page import finite
from ..report import readable
from .settings import Settings

CURVES = ("epoch", "train_loss", "test_loss", "top1", "lr")
COLUMNS = ("name", "method", "seed", "top1", "top5", "train_loss", "test_loss", "held", "peak", "step_ms", "seconds")
FIGURES = ("top1", "top5", "test_loss", "train_loss", "best_top1", "epochs", "steps", "seconds", "step_ms", "held", "peak", "parameters")
NEEDED = (*FIGURES, "methods", "report")  # of a result; a figure that is not known is None
LOCK = "HALFBACK_LOCK"  # names, to a process that inherits a lock, the number of its open file

Row = dict[str, Any]


# Files


def write_json(path: Path, data: Any) -> None:
    """JSON with null for what is not finite, and with a list of numbers on one line."""
    text = json.dumps(finite(data), indent=1, allow_nan=False, ensure_ascii=False)
    # A line's end is never inside of a text in JSON, so this finds lists without texts, lists and objects in them.
    text = re.sub(r'\[\n\s*([^\[\]{}"]*?)\n\s*\]', lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
    write_text(path, text + "\n")


def locked(folder: Path, stack: contextlib.ExitStack) -> int | None:
    """The lock of a folder: the number of its open file, or None where another process has it.

    It ends with the stack, or with the process, however that ends; but for a process that inherited it, which has it all along.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    number = _inherited(path)
    if number is None:
        number = stack.enter_context(path.open("w")).fileno()
    try:
        import fcntl

        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except (ImportError, OSError):  # Windows has no such locks, nor have some file systems: then two must not train in a folder
        pass
    return number


def _inherited(path: Path) -> int | None:
    """The open file of the lock, where who started this process has handed it on. A number alone may mean any file by now."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        number = int(os.environ[LOCK])
        if os.path.samestat(os.fstat(number), path.stat()):
            return number
    return None


def read_rows(path: Path) -> list[Row]:
    """Rows of a metrics.jsonl, without a torn last one."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "epoch": int(row["epoch"]), "step": int(row["step"])})
        except (ValueError, TypeError, KeyError) as e:  # a text that is no UTF-8 is a ValueError too
            if i < len(lines):
                raise ValueError(
                    f"{path}, line {i} is no row of a training: {line[:60]!r}. Remove that file, and --resume goes on without its curves."
                ) from e
    return rows


def summary(path: Path, results: Iterable[Row]) -> None:
    """A line for each result, which has a name and a method beside its figures."""
    text = io.StringIO()
    lines = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    lines.writeheader()
    lines.writerows(results)
    write_text(path, text.getvalue())


# The recorder


class Recorder:
    """Keeps metrics.jsonl, and at the end writes what is made of it.

    resume_at   the step that a training goes on after: later rows are dropped. None: a new training; old rows are dropped.
    """

    def __init__(self, folder: Path, settings: Settings, *, resume_at: int | None = None, tensorboard: bool = False) -> None:
        check_drawing()
        self.folder, self.settings = Path(folder), settings
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "metrics.jsonl"
        self.rows: list[Row] = [] if resume_at is None else [r for r in read_rows(self.path) if r["step"] <= resume_at]
        self.board = _board(self.folder / "tensorboard", resume_at) if tensorboard else None
        text = "".join(_line(row) for row in self.rows)
        if (self.path.read_bytes() if self.path.exists() else b"") != text.encode():
            write_text(self.path, text)

    def epoch(self, *, epoch: int, step: int, **row: Any) -> None:
        """A row more: on the disk when this returns."""
        new: Row = finite({"epoch": epoch, "step": step, **row})
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(new))
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(new)
        if self.board is not None:
            for name, value in _scalars(new):
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def lacks(self, epochs: int) -> str:
        """Which of the first epochs have no row, as "epochs 2 to 4, 7": lines were lost. Empty: none."""
        lost = sorted(set(range(1, epochs + 1)) - {row["epoch"] for row in self.rows})
        spans = [[n for _, n in span] for _, span in groupby(enumerate(lost), lambda pair: pair[1] - pair[0])]
        told = ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)
        return f"epoch{'s' * (len(lost) > 1)} {told}" if lost else ""

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Writes result.json, summary.csv, curves.png and report.html; returns the result with all that was added to it.

        result.json is the last: where it is, all of them are.
        """
        missing = [name for name in NEEDED if name not in result]
        if missing:
            raise ValueError(f"Recorder.finish(): the result lacks {', '.join(missing)}. Needed: {', '.join(NEEDED)}.")
        s = self.settings
        found = surroundings(s.device)
        curves = {name: [row.get(name) for row in self.rows] for name in CURVES}
        whole = finite({"settings": s.to_json(), "seed": s.seed, "done": True, **result, **found, "curves": curves})
        summary(self.folder / "summary.csv", [{**whole, "name": self.folder.name, "method": method_of(s)}])
        draw(self.rows, self.folder / "curves.png", title_of(s))
        write_text(self.folder / "report.html", report(whole, self.rows))
        write_json(self.folder / "result.json", whole)
        if self.board is not None:
            self.board.close()
        return whole


def method_of(s: Settings) -> str:
    return s.method if s.budget is None else f"budget {s.budget}"


def title_of(s: Settings) -> str:
    return f"{s.model} on {s.data}, {method_of(s)}, seed {s.seed}"


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _scalars(row: Row, under: str = "") -> Iterable[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{under}{name}/")
        elif isinstance(value, (int, float)) and name not in ("epoch", "step"):
            yield under + name, value


def _board(folder: Path, resume_at: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise ValueError("tensorboard=True needs a package that is not there: pip install tensorboard, or leave it out.") from e
    return SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)


# The picture


def check_drawing() -> None:
    """Known before a training, not at its end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ValueError(f"A training draws its curves with matplotlib: {install('matplotlib')}.") from e


SERIES = (
    ("loss", (("train_loss", "training"), ("test_loss", "test"))),
    ("accuracy, %", (("top1", "top-1"), ("top5", "top-5"))),
)


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Loss and accuracy over epochs. What is not known is a gap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, wrap=True, fontsize=11)
    for axes, (label, series) in zip(figure.subplots(1, 2), SERIES, strict=True):
        axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="0.9")
        for i, (key, name) in enumerate(series):
            points = _points(rows, key)
            if any(math.isfinite(value) for _, value in points):
                axes.plot(*zip(*points, strict=True), color=f"C{i}", marker="o", markersize=3, label=name)
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="0.5")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_bytes(Path(path), content.getvalue())


def _points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """Epochs and values; epochs that were not tested have none."""
    return [(row["epoch"], _known(row[key])) for row in rows if key in row]


def _known(value: Any) -> float:
    return math.nan if value is None else float(value)


# The page

STYLE = """\
:root { --paper: #fff; --tile: #f6f7f8; --ink: #1b1f24; --soft: #57606a; --line: #d5dade; --first: #0b62b0; --second: #b4520a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --tile: #1d2125; --ink: #e8eaed; --soft: #a3abb3; --line: #3a4148; --first: #62aef5; --second: #f0a04b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 960px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 1rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .5rem; margin: 0; }
.tiles div { background: var(--tile); border-radius: 6px; padding: .5rem .75rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--soft); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { stroke: var(--first); color: var(--first); } .c1 { stroke: var(--second); color: var(--second); } .dot { fill: currentColor; }
.key { font-weight: 600; margin-right: .75rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th { white-space: nowrap; }
th, td { text-align: left; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.numbers th, .numbers td { text-align: right; white-space: nowrap; }
pre { font-size: .8rem; line-height: 1.4; margin: 0; overflow-wrap: normal; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
"""
SAFE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def report(result: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page of one training."""
    s = Settings.from_json(result["settings"])
    parts = [f"<h1>{_e(title_of(s))}</h1>", _tiles(result)]
    parts += ['<h2>Curves</h2><div class="charts">', *(chart(rows, label, series) for label, series in SERIES), "</div>"]
    parts += [f"<details><summary>Epochs as a table</summary>{_epochs(rows)}</details>"] if rows else []
    changed, every = s.changed(), s.to_json()
    parts += ["<h2>Settings</h2>", _pairs(changed) if changed else "<p>All as by default.</p>"]
    same = {k: v for k, v in every.items() if k not in changed}
    parts += [f"<details><summary>Settings as by default</summary>{_pairs(same)}</details>"]
    if result["methods"]:
        parts += ["<h2>Methods</h2>", f'<div class="wide"><pre>{_e(result["methods"])}</pre></div>']
    if result["report"]:
        parts += ["<h2>What they did to the model</h2>", f'<div class="wide"><pre>{_e(result["report"])}</pre></div>']
    made = [result["date"], result["device_name"], *(f"{k} {v}" for k, v in result["versions"].items()), result["commit"]]
    parts += [f"<footer>{' · '.join(_e(m) for m in made if m)}</footer>"]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{_e(title_of(s))}</title>'
    head += f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{SAFE}">'
    head += f'<link rel="icon" href="data:,"><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body>\n</html>\n"


def _e(value: Any) -> str:
    return html.escape(str(value))


def _tiles(r: dict[str, Any]) -> str:
    shown = {
        "top-1": _number(r["top1"], " %"),
        "top-5": _number(r["top5"], " %"),
        "test loss": _number(r["test_loss"]),
        "training loss": _number(r["train_loss"]),
        "held": "–" if r["held"] is None else readable(r["held"]),
        "peak": "–" if r["peak"] is None else readable(r["peak"]),
        "a step": _number(r["step_ms"], " ms"),
        "training": _number(r["seconds"], " s"),
    }
    return '<dl class="tiles">' + "".join(f"<div><dt>{k}</dt><dd>{v}</dd></div>" for k, v in shown.items()) + "</dl>"


def _number(value: Any, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:.4g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"


def _pairs(values: dict[str, Any]) -> str:
    lines = (f"<tr><th>{_e(k)}</th><td>{_e(_value(v))}</td></tr>" for k, v in values.items())
    return f"<table>{''.join(lines)}</table>"


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if value is None:
        return "–"
    return str(value) if not isinstance(value, bool) else "yes" if value else "no"


def _epochs(rows: Sequence[Row]) -> str:
    names = [k for k in rows[-1] if not isinstance(rows[-1][k], dict)]
    head = "".join(f"<th>{_e(k)}</th>" for k in names)
    lines = ("<tr>" + "".join(f"<td>{_cell(row.get(k))}</td>" for k in names) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="numbers"><tr>{head}</tr>{"".join(lines)}</table></div>'


def _cell(value: Any) -> str:
    return _number(value) if value is None or isinstance(value, float) else _e(value)


# Curves as SVG, whose colours follow the page's

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 220, 44, 10, 10, 28


def chart(rows: Sequence[Row], label: str, series: Sequence[tuple[str, str]]) -> str:
    known = [v for key, _ in series for _, v in _points(rows, key) if math.isfinite(v)]
    if not known:
        return f"<figure><figcaption>{_e(label)}: not known</figcaption></figure>"
    ticks = nice(min(known), max(known))
    first, last = rows[0]["epoch"], rows[-1]["epoch"]

    def x(epoch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((epoch - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    parts = []
    for t in ticks:
        parts += [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>']
        parts += [f'<text x="{LEFT - 6}" y="{y(t) + 4:.1f}" text-anchor="end">{t:g}</text>']
    for epoch in sorted({first, last}):
        anchor = "middle" if first == last else "start" if epoch == first else "end"
        parts += [f'<text x="{x(epoch):.1f}" y="{HEIGHT - 10}" text-anchor="{anchor}">epoch {epoch}</text>']
    for i, (key, _) in enumerate(series):
        parts += _curve([(x(epoch), y(value)) for epoch, value in _points(rows, key)], i)
    keys = "".join(f'<span class="key c{i}">{_e(name)}</span>' for i, (_, name) in enumerate(series))
    drawn = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_e(label)} over epochs">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{keys}{_e(label)}</figcaption>{drawn}</figure>"


def _curve(points: Sequence[tuple[float, float]], colour: int) -> list[str]:
    """A line through neighbours that are known; a dot for one that has none."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    drawn = []
    for stretch in filter(None, stretches):
        if len(stretch) == 1:
            drawn.append(f'<circle class="dot c{colour}" cx="{stretch[0][0]:.1f}" cy="{stretch[0][1]:.1f}" r="3"/>')
        else:
            drawn.append(f'<polyline class="curve c{colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in stretch)}"/>')
    return drawn


def nice(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    size = 10.0 ** math.floor(math.log10(span / count))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= span / count)
    begin, end = math.floor(low / step), math.ceil(high / step)
    return [float(f"{i * step:.12g}") for i in range(begin, max(end, begin + 1) + 1)]
