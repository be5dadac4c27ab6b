"""What a recipe's page shows: every arm with its seeds, arms against memory, and the course of trainings.

figure.png    the measure of every arm, its seeds, and the interval of the difference
memory.png    the measure against the peak, or against what is held, where that is known
curves.png    the loss of the training and the measure by epochs, of the arms that the recipe names: means over seeds
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .recipes import JUDGED, Result
from .record import write_bytes

FIGURE, MEMORY, CURVES = "figure.png", "memory.png", "curves.png"
COURSE = {"train_loss": "training loss", **JUDGED}


def _sheet(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, list(drawn.subplots(1, columns, squeeze=False)[0])


def _save(drawn: Any, path: Path) -> None:
    content = io.BytesIO()
    drawn.savefig(content, format="png", dpi=150, metadata={"Software": None})
    write_bytes(path, content.getvalue())


def grouped(arms: Sequence[tuple[Result, Any]]) -> list[tuple[Result, Any]]:
    """Arms of a group together, where the first of them stands."""
    groups = list(dict.fromkeys(arm["group"] for arm, _ in arms))
    return sorted(arms, key=lambda pair: groups.index(pair[0]["group"]))


def short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def figure(results: Result, path: Path) -> None:
    """Top-1 by arm: seeds as dots, and their mean. What an arm is compared with is a line, and the bar is the paired 95 % interval of
    the difference to it, so that a bar that misses the line is a clear difference. The paper's figures are open marks."""
    arms = [arm for arm, _ in grouped([(a, None) for a in results["arms"] if not a.get("like")])]
    by = results["measure"]
    means = {a["name"]: a["mean"][by] for a in arms}
    groups = list(dict.fromkeys(a["group"] for a in arms))
    places = [i + 0.6 * groups.index(a["group"]) for i, a in enumerate(arms)]
    drawn, (axes,) = _sheet(9, 1.5 + 0.42 * (places[-1] + 1))
    for y, arm in zip(places, arms, strict=True):
        _draw_arm(axes, y, arm, f"C{groups.index(arm['group']) % 10}", means, by)
    labels = [a["name"] if not a["group"] or a["group"] in a["name"] else f"{a['group']}: {a['name']}" for a in arms]
    axes.set_yticks(places, [short(text, 60) for text in labels])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.margins(x=0.08)
    axes.set(xlabel=f"{JUDGED[by]}: seeds and their mean;\nthe bar is the 95 % interval of the difference, seed by seed")
    axes.set_title(results["title"], fontsize=11, wrap=True)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    _legend(drawn, results)
    _save(drawn, path)


def by_memory(results: Result) -> tuple[str, list[tuple[Result, float]]] | None:
    """Arms with their share of memory: of the peak where it is known for all that are trained, else of what is held. None: there is nothing
    to compare."""
    arms = [a for a in results["arms"] if a["mean"][results["measure"]] is not None]
    trained = sum(not a.get("like") for a in arms)
    for measure in ("peak", "held"):
        shares = [(a, 1.0 if a["against"] is None else a["against"]["ratio"][measure]) for a in arms]
        known = [(a, share) for a, share in shares if share is not None]
        if len(known) >= 3 and sum(not a.get("like") for a, _ in known) == trained and len({round(share, 2) for _, share in known}) > 1:
            return measure, known
    return None


def memory_figure(results: Result, path: Path) -> None:
    """Top-1 against memory, a point an arm: up and to the left is better. Names stand beside the picture, as points may be close."""
    found = by_memory(results)
    if found is None:
        path.unlink(missing_ok=True)
        return
    measure, arms = found
    by = results["measure"]
    groups = list(dict.fromkeys(a["group"] for a, _ in arms))
    drawn, (axes,) = _sheet(11, 6)
    for n, (arm, share) in enumerate(sorted(arms, key=lambda pair: (pair[1], pair[0]["mean"][by])), 1):
        place, colour = (share, arm["mean"][by]), f"C{groups.index(arm['group']) % 10}"
        told = f"{n}  {short(arm['name'], 80)}"
        axes.errorbar(*place, yerr=arm["deviation"][by], color=colour, marker="o", capsize=3, linestyle="", elinewidth=0.8, label=told)
        axes.annotate(str(n), place, (5, 5), textcoords="offset points", fontsize=8, color=colour)
    drawn.legend(loc="outside right upper", frameon=False, fontsize=7)
    axes.set(xlabel=f"{measure}, relative to the arm that it is compared with", ylabel=f"{JUDGED[by]}: mean and deviation over seeds")
    axes.set_title(results["title"], fontsize=11, wrap=True)
    axes.margins(x=0.1, y=0.1)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    _save(drawn, path)


def _draw_arm(axes: Any, y: float, arm: Result, colour: str, means: Mapping[str, float | None], by: str) -> None:
    mean, pair = arm["mean"][by], arm["against"] and arm["against"][by]
    base = means.get(arm["against"]["arm"]) if arm["against"] else mean
    if base is not None:
        axes.plot([base, base], [y - 0.5, y + 0.5], color="0.55", linestyle="--", linewidth=1, zorder=1)
    values = [v for v in arm["values"][by] if v is not None]
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

    marks = [Line2D([], [], color="0.55", linestyle="--", linewidth=1, label=f"compared with ({short(results['against'], 30)})")]
    if any(a["paper"] is not None for a in results["arms"]):
        marks.append(Line2D([], [], color="0.2", marker="D", linestyle="", fillstyle="none", markersize=7, label="in the paper"))
    drawn.legend(handles=marks, loc="outside lower center", ncols=2, frameon=False, fontsize=9)


# The course of trainings


def curves_figure(results: Result, runs: Mapping[str, Mapping[int, Result]], path: Path) -> None:
    """`runs`: of each arm, by seed."""
    arms = [a["name"] for a in results["arms"] if a["name"] in results["curves"]]
    if not arms:
        path.unlink(missing_ok=True)
        return
    drawn, both = _sheet(11, 4.5, columns=2)
    for axes, measure in zip(both, ("train_loss", results["measure"]), strict=True):
        for n, arm in enumerate(arms):
            _draw_course(axes, [r.get("curves") or {} for r in runs[arm].values()], measure, arm, f"C{n % 10}")
        axes.set(xlabel="epoch", ylabel=f"{COURSE[measure]}: mean of seeds, and their range")
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    drawn_losses = [y for line in both[0].get_lines() for y in line.get_ydata()]
    if drawn_losses and 0 < 10 * min(drawn_losses) < max(drawn_losses):
        both[0].set_yscale("log")
    drawn.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    drawn.suptitle(results["title"], fontsize=11)
    _save(drawn, path)


def _draw_course(axes: Any, courses: Sequence[Mapping[str, Sequence[Any]]], measure: str, label: str, colour: str) -> None:
    """Over the epochs that all seeds have a value of: not each is tested, and rows may be lost."""
    by_seed = [{e: v for e, v in zip(c.get("epoch", ()), c.get(measure, ()), strict=False) if v is not None} for c in courses]
    epochs = sorted(set.intersection(*map(set, by_seed)))
    if not epochs:
        return
    values = [[own[e] for own in by_seed] for e in epochs]
    axes.plot(epochs, [statistics.fmean(v) for v in values], color=colour, linewidth=1.2, label=short(label, 60))
    axes.fill_between(epochs, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, linewidth=0)
