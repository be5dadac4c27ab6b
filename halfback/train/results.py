"""What trainings gave: means, differences paired by seed, and figures.

experiments/NAME/results.json   all runs of a recipe: means, and differences paired by seed; figures.py draws them, results_page.py has all
                                recipes on a page. Times of steps are of times.json, see timed.py, or where every run was alone on its
                                device of the runs

difference   d_s = arm_s - against_s for each seed s that both have: the same batches in the same order
interval     mean(d) ± t(0.975, n - 1) sd(d) / √n, Student's, for 95 %
a *          the interval is without zero. With three seeds that is 4.3 standard errors; results.json tells those beyond two as well
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..report import readable, rows
from .figures import CURVES, FIGURE, MEMORY, curves_figure, figure, memory_figure, short
from .recipes import (
    EXPERIMENTS,
    LOCAL,
    MEASURES,
    Arm,
    Recipe,
    Result,
    differing,
    find,
    finished,
    load,
    name_of,
    recipes,
    runs_folders,
)
from .record import write_json
from .settings import PATHS

TIMES = "times.json"
PAIRED = ("top1", "top5", "train_loss", "test_loss")
RATIOS = ("held", "peak", "step_ms")


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


def typical(measure: str, values: Sequence[float | None]) -> float | None:
    """One figure of an arm: the mean of its seeds. Of peaks the least: what some have above it is what cuDNN tried."""
    return min(known) if measure == "peak" and (known := [v for v in values if v is not None]) else spread(values)["mean"]


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
    """Writes results.json and its figures from the runs that are done."""
    path = find(recipe_path)
    recipe, folders = load(path), runs_folders(path, into)
    done = finished(recipe, folders)
    if not done:
        raise ValueError(f"{folders[0]} has no runs yet: halfback reproduce {name_of(path)} trains them.")
    results = results_of(recipe, name_of(path), done, times_of(recipe, folders))
    results["verdict"] = _verdict(recipe, results, path)
    folders[-1].parent.mkdir(parents=True, exist_ok=True)  # what is done may all lie beside the recipe
    write_json(folders[-1].parent / "results.json", results)
    shown = judged(results)
    if shown["arms"]:
        figure(shown, folders[-1].parent / FIGURE)
        memory_figure(shown, folders[-1].parent / MEMORY)
        curves_figure(shown, runs_by_arm(recipe, done), folders[-1].parent / CURVES)
    return json.loads((folders[-1].parent / "results.json").read_text(encoding="utf-8"))


def times_of(recipe: Recipe, folders: Sequence[Path]) -> Result:
    """What is known of the time of steps, of arms that still have the settings with which they were timed."""
    found = [p for folder in reversed(folders) if (p := folder.parent / TIMES).exists()]
    if not found:
        return {"arms": {}}
    told = json.loads(found[0].read_text(encoding="utf-8"))
    arms = {a.name: a for a in recipe.arms}
    known = {name: (t, recipe.settings(arms[name], t["settings"]["seed"])) for name, t in told["arms"].items() if name in arms}
    same = {name: t for name, (t, now) in known.items() if not differing(now, t["settings"], found[0])}
    return {**told, "arms": {name: {k: v for k, v in t.items() if k != "settings"} for name, t in same.items()}}


def results_of(recipe: Recipe, name: str, done: Mapping[str, Result], times: Result) -> Result:
    runs = [done[r.id] for r in recipe.runs() if r.id in done]
    by_arm = runs_by_arm(recipe, done)
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
        "measure": recipe.measure,
        "against": recipe.against,
        "claims": list(recipe.claims),
        "curves": list(recipe.curves),
        "beside": list(recipe.beside),
        "seeds": list(recipe.seeds),
        "runs": {"done": len(runs), "of": len(recipe.runs())},
        "base": {k: v for k, v in recipe.base.to_json().items() if k not in LOCAL},
        "changed": {k: v for k, v in recipe.base.changed().items() if k not in PATHS},
        "arms": [_arm(recipe, a, by_arm, times["arms"]) for a in recipe.arms],
        "timed": {k: times[k] for k in ("device_name", "versions", "commit", "date") if k in times} or None,
        "devices": sorted({r["device_name"] for r in runs}),
        "versions": versions,
        "commits": sorted({r["commit"] for r in runs if r["commit"]}),
        "dates": sorted({r["date"][:10] for r in runs}),
    }


def runs_by_arm(recipe: Recipe, done: Mapping[str, Result]) -> dict[str, dict[int, Result]]:
    """By seed, and of an arm that is not trained those of the arm that it is like."""
    return {a.name: {r.seed: done[r.id] for r in recipe.runs() if r.arm.name == (a.like or a.name) and r.id in done} for a in recipe.arms}


def _arm(recipe: Recipe, arm: Arm, by_arm: Mapping[str, Mapping[int, Result]], times: Mapping[str, Result]) -> Result:
    runs, own = by_arm[arm.name], arm.like is None
    values = {m: [r[m] for r in runs.values()] if own or m not in RATIOS else [] for m in MEASURES}
    spreads = {m: spread(v) for m, v in values.items()}
    against = recipe.against_of(arm)
    return {
        "name": arm.name,
        "method": arm.method,
        "changes": dict(arm.changes),
        "group": arm.group,
        "like": arm.like,
        "paper": arm.paper,
        "seeds": list(runs),
        "wanted": list(arm.seeds or recipe.seeds),
        "values": values,
        "typical": {m: typical(m, values[m]) for m in RATIOS},
        **{k: {m: spreads[m][k] for m in MEASURES} for k in ("mean", "deviation", "interval")},
        "alone": own and bool(runs) and all(r["side_by_side"] == 1 for r in runs.values()),
        "time": times.get(arm.name),
        "against": None if against is None else _against(against, own, runs, by_arm[against], *(times.get(n) for n in (arm.name, against))),
    }


def _against(
    name: str, own: bool, ours: Mapping[int, Result], theirs: Mapping[int, Result], time: Result | None, its_time: Result | None
) -> Result:
    """Ratios are of means over common seeds, on one device; of times those that were timed, or the runs' where all were alone on it. What
    runs do not tell (of an arm without any, all; of CUDA graphs, the peak) comes from what was timed."""
    seeds = [s for s in ours if s in theirs]
    pairs = {m: paired({s: r[m] for s, r in ours.items()}, {s: r[m] for s, r in theirs.items()}) for m in PAIRED}
    used = [runs[s] for runs in (ours, theirs) for s in seeds]
    same = len({r["device_name"] for r in used}) == 1
    alone = all(r["side_by_side"] == 1 for r in used) and len({r["settings"].get("graphs", False) for r in used}) == 1
    ratio: dict[str, float | None] = dict.fromkeys(RATIOS)
    for m in RATIOS:
        mine, its = (typical(m, [runs[s][m] for s in seeds]) for runs in (ours, theirs))
        if own and mine is not None and its and same and (alone or m != "step_ms"):
            ratio[m] = mine / its
    for m in (m for m in RATIOS if m == "step_ms" or ratio[m] is None):
        if time and its_time and time.get(m) and its_time.get(m):
            ratio[m] = time[m] / its_time[m]
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


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} %"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def signed(value: float, measure: str) -> str:
    return (f"{value:+.2f}" if measure == "top1" else f"{value:+.3f}").replace("-", "−")


def _mean(arm: Result, measure: str, digits: int) -> str:
    mean, deviation = arm["mean"][measure], arm["deviation"][measure]
    if mean is None or arm.get("like"):
        return ""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def in_words(arm: Result) -> str:
    """How an arm differs from the one that it is compared with, in words, for verdicts."""
    top1, loss = arm["against"]["top1"], arm["against"]["train_loss"]
    clear = "" if top1["clear"] else ", not clear of zero"
    return f"{top1['mean']:+.2f} points{clear}, training loss {loss['mean']:+.3f}".replace("-", "\u2212")


def with_interval(pair: Result, measure: str) -> str:
    """A difference with its 95 % interval, and a * where that is without zero."""
    said = signed(pair["mean"], measure)
    if pair["interval"] is not None:
        said += f" ({signed(pair['interval'][0], measure)} to {signed(pair['interval'][1], measure)})"
    return said + (" *" if pair["clear"] else "")


def _difference(arm: Result, results: Result) -> str:
    by = results["measure"]
    pair = arm["against"] and arm["against"][by]
    if arm.get("like"):
        against = arm["against"]["arm"] if arm["against"] else results["against"]
        return f"as {arm['like']}" + ("" if against in (results["against"], arm["like"]) else f", ratios to {against}")
    if not pair or pair["mean"] is None:
        return ""
    said = with_interval(pair, by)
    return said if arm["against"]["arm"] == results["against"] else f"{said} to {arm['against']['arm']}"


def _size(arm: Result, results: Result, measure: str) -> str:
    """The ratio, with a † where it is to another arm than most; for an arm that is against none, the figure itself."""
    if arm["against"] is not None:
        ratio = arm["against"]["ratio"][measure]
        return "" if ratio is None else f"{ratio:.2f}" + ("" if arm["against"]["arm"] == results["against"] else " †")
    mean = arm["typical"][measure]
    if measure == "step_ms":
        step = arm["time"]["step_ms"] if arm.get("time") else mean if arm["alone"] else None
        return "" if step is None else f"{step:.1f} ms"
    return "" if mean is None else readable(mean)


def _seeds(arm: Result, results: Result) -> str:
    """How many, unless it has those of the recipe; of how many, if some are to come."""
    wanted: list[int] = arm.get("wanted") or results["seeds"]
    if arm.get("like") or arm["seeds"] == wanted == results["seeds"]:
        return ""
    return str(len(wanted)) if arm["seeds"] == wanted else f"{len(arm['seeds'])} of {len(wanted)}"


def _speed(arm: Result, unit: str) -> str:
    return f"{arm['time']['per_s']:,.0f}" if arm.get("time") and arm["time"]["unit"] == unit else ""


TABLE: tuple[tuple[str, Callable[[Result, Result], str]], ...] = (
    ("arm", lambda a, r: a["name"]),
    ("seeds", _seeds),
    ("test loss", lambda a, r: _mean(a, "test_loss", 3) if r["measure"] == "test_loss" else ""),
    ("top-1, %", lambda a, r: _mean(a, "top1", 2) if r["measure"] == "top1" else ""),
    ("difference", _difference),
    ("paper", lambda a, r: "" if a["paper"] is None else f"{a['paper']:g}"),
    ("top-1, %", lambda a, r: _mean(a, "top1", 2) if r["measure"] != "top1" else ""),
    ("top-5, %", lambda a, r: _mean(a, "top5", 2)),
    ("training loss", lambda a, r: _mean(a, "train_loss", 3)),
    ("held", lambda a, r: _size(a, r, "held")),
    ("peak", lambda a, r: _size(a, r, "peak")),
    ("step", lambda a, r: _size(a, r, "step_ms")),
    ("samples/s", lambda a, r: _speed(a, "samples")),
    ("tokens/s", lambda a, r: _speed(a, "tokens")),
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
    cells = [["name", "runs", "minutes", "measured", "what", "paper"]]
    for path in found:
        cells.append([name_of(path), *_listed(path)])
    return rows(cells, texts=3)


def _listed(path: Path) -> list[str]:
    try:
        recipe = load(path)
        done = finished(recipe, runs_folders(path, None))
    except ValueError as e:
        return ["–", "–", "", short(str(e), 90), ""]
    measured = _measured(judged(results_of(recipe, name_of(path), done, {"arms": {}}))) if done else ""
    return [f"{len(done)}/{len(recipe.runs())}", takes(recipe), measured, short(recipe.title, 50), short(recipe.paper, 70)]


def takes(recipe: Recipe) -> str:
    """Minutes, and on what."""
    return "–" if recipe.minutes is None else f"{recipe.minutes:g}" + (f", {recipe.on}" if recipe.on else "")


def _measured(results: Result) -> str:
    by = results["measure"]
    if not results["arms"]:
        return "one seed so far, which tells nothing"
    base = next((a["mean"][by] for a in results["arms"] if a["name"] == results["against"]), None)
    others = [a for a in results["arms"] if a["against"] and not a.get("like")]
    apart = [a["against"][by]["mean"] for a in others if a["against"][by]["mean"] is not None]
    said = f"{results['against']} {percent(base) if by == 'top1' or base is None else f'{base:.3f}'}"
    if not apart:
        return said
    low, high = signed(min(apart), by), signed(max(apart), by)
    return f"{said}, others {low}" + (f" to {high}" if high != low else "")


def judged(r: Result) -> Result:
    """With the arms alone that have more than one seed, where the recipe wants more: one says nothing of accuracy. Those that are not
    trained have to be timed."""
    return {**r, "arms": [a for a in r["arms"] if len(a["seeds"]) >= min(2, len(r["seeds"])) and (not a.get("like") or a.get("time"))]}
