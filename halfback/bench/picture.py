"""Time against memory, a picture a model: what is down and to the left is better.

An arrow down from one of ours ends at its arithmetic floor: the time that the operations left of it would take, at plain training's speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..report import apart

STYLES = (  # who, the mark, the colour
    ("peers", "o", "0.35"),
    ("ours", "*", "C3"),
    ("ours, which change the forward", "*", "C1"),
    ("peers that change the forward, or train something else", "X", "0.6"),
)


WIDE = 1.8


def style_of(row: dict[str, Any]) -> int:
    return (2 if row["note"] else 1) if row["ours"] else (3 if row["note"] else 0)


def picture(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """Results of one model and one mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in (axes.axvline, axes.axhline):
        line(1, color="0.85", zorder=0)
    texts, floors = [], False
    for kind, (label, mark, colour) in enumerate(STYLES):
        own = [r for r in results if style_of(r) == kind]
        if own:
            x, y = [r["peak_ratio"] for r in own], [r["time_ratio"] for r in own]
            axes.scatter(x, y, s=150 if mark == "*" else 70, marker=mark, color=colour, label=label, zorder=3)
        for r in own:
            at = r["peak_ratio"], r["time_ratio"]
            shown = r["method"].removesuffix(", eager")
            texts.append(axes.annotate(shown, at, (10, 0), textcoords="offset points", va="center", fontsize=9, color=colour))
            if r["ours"] and "time_floor" in r and r["time_floor"] < r["time_ratio"]:
                axes.plot([at[0]] * 2, [r["time_floor"], at[1]], color=colour, linewidth=0.8, linestyle=":", zorder=1)
                axes.scatter(at[0], r["time_floor"], marker="_", s=90, color=colour, zorder=2, label="" if floors else "arithmetic floor")
                floors = True
    axes.set_xlim(0, 1.3 * max(r["peak_ratio"] for r in results))  # room for labels
    axes.margins(y=0.12)
    if max(r["time_ratio"] for r in results) > WIDE:  # one slow method would press all others together
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks("{x:g}")
    axes.set(xlabel="peak memory of a step, relative to plain", ylabel="time of a step, relative to plain", title=title)
    axes.legend(loc="upper right", fontsize=9)
    canvas.draw()
    apart(texts, canvas)
    figure.savefig(path, dpi=120)
