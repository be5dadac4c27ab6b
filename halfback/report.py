"""A comparison as text and as a picture. It knows the entries that compare.py made, and nothing of training."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .files import write_bytes


def readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def rows(cells: list[list[str]], texts: int = 0) -> str:
    """Cells in columns: the first and the last `texts` to the left, numbers to the right, a line under the head."""
    count = len(cells[0])
    widths = [max(len(row[i]) for row in cells) for i in range(count)]
    left = [i == 0 or i >= count - texts for i in range(count)]

    def line(row: list[str]) -> str:
        return "  ".join(c.ljust(w) if at_left else c.rjust(w) for c, w, at_left in zip(row, widths, left, strict=True)).rstrip()

    return "\n".join([line(cells[0]), "-" * (sum(widths) + 2 * (count - 1)), *map(line, cells[1:])])


def table(entries: list[dict[str, Any]]) -> str:
    cells = [["method", "accuracy", "held", "ratio", "peak", "ratio", "step", "ratio"]]
    for e in entries:
        mean, std, ratio = e["mean"], e["std"], e["ratio"]
        spread = "" if std["accuracy"] is None else f" ± {100 * std['accuracy']:.1f}"
        cells.append([e["method"] + (" *" if e["changes_forward"] else ""), f"{100 * mean['accuracy']:.1f}{spread} %"])
        for name in ("held", "peak"):
            cells[-1] += [readable(mean[name]), f"{ratio[name]:.2f}"]
        cells[-1] += [f"{mean['step_ms']:.1f} ms", f"{ratio['step_ms']:.2f}"]
    return rows(cells)


def remarks(entries: list[dict[str, Any]], seeds: int, device: str) -> list[str]:
    """What a reader of the table has to know."""
    said = [f"Ratios are to {entries[0]['method']}. Held: alive when the forward ends. Peak: the most alive during forward and backward."]
    if seeds == 1:
        said.append("One seed: differences in accuracy may be chance. Use --seeds 3 or more before believing one.")
    else:
        said.append(f"Accuracy: mean ± standard deviation over {seeds} seeds; a seed's weights and batches are the same for all methods.")
    if any(e["changes_forward"] for e in entries):
        said.append("* changes the forward in training; the other methods change the backward only.")
    if device == "cpu":
        said.append("Step times are of this CPU and this model: they say nothing about a GPU or a larger model.")
        if any("dropit" in e["method"] for e in entries):
            said.append(
                "DropIT's kernels are fused on a GPU; on a CPU their reference runs, which is slower and has more alive for a moment."
            )
    return said


def picture(entries: list[dict[str, Any]], title: str, path: Path) -> None:
    """Memory against time, a point a method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for spot in (axes.axvline, axes.axhline):
        spot(1, color="0.85", zorder=0)
    texts = []
    for i, e in enumerate(entries):
        x, y = e["ratio"]["held"], e["ratio"]["step_ms"]
        axes.scatter(x, y, s=90, color=f"C{i}", zorder=3)
        label = f"{e['method']}\n{100 * e['mean']['accuracy']:.1f} % accuracy"
        texts.append(axes.annotate(label, (x, y), (10, 0), textcoords="offset points", va="center", fontsize=9, color=f"C{i}"))
    most = max(e["ratio"]["held"] for e in entries)
    axes.set_xlim(0, 1.45 * most)  # room for labels to the right of the points
    axes.margins(y=0.2)
    axes.set(
        xlabel=f"held for backward, relative to {entries[0]['method']}",
        ylabel=f"step time, relative to {entries[0]['method']}",
        title=title,
    )
    canvas.draw()
    apart(texts, canvas)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_bytes(path, content.getvalue())


def apart(texts: list[Any], canvas: Any) -> None:
    """Labels that overlap another, or a point, move up or down, or to the point's left, as little as is needed."""
    from matplotlib.transforms import Bbox

    taken = []
    for text in texts:
        x, y = text.axes.transData.transform(text.xy)
        taken.append(Bbox.from_extents(x - 8, y - 8, x + 8, y + 8))
    tries = sorted(((up, left) for up in range(-120, 121, 4) for left in (False, True)), key=lambda p: abs(p[0]) + 16 * p[1])
    for text in texts:
        away = text.get_position()[0]
        for up, left in tries:
            text.set(position=(-away if left else away, up), ha="right" if left else "left")
            box = text.get_window_extent(canvas.get_renderer())
            if box.x0 > 0 and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
