"""Every results.json on one page, docs/results.md: what is claimed first, then recipe by recipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .figures import CURVES, FIGURE, MEMORY, by_memory, grouped
from .recipes import EXPERIMENTS, JUDGED, Result, finished, load, recipes, runs_folders
from .record import write_text
from .results import collect, judged, table, takes, with_interval

PAGE = Path("docs/results.md")
HEADLINE = "headline.json"
INTRODUCTION = """\
# Results

Everything on this page is written by `halfback reproduce --page` from the files that trainings left in `experiments/`; nothing is
edited by hand. `halfback reproduce NAME` trains a recipe anew.

Figures are means ± standard deviation over seeds. For one seed all arms start from the same weights and see the same batches in the same
order, so a difference is taken seed by seed; in brackets is its 95 % interval by Student's t, and a \\* marks one without
zero. Held is what is alive for the backward pass when the forward ends, peak the most that a GPU has allocated in a step above weights and
optimizer state, of an arm's seeds the least; gradients go after each step, and are in the peak as far as they are there then. Both, and
the time of a step, are ratios, but for the arm that the others are compared with; a † is to the arm that the difference names. Trainings
that ran side by side say nothing of time: their steps are timed apart, one arm at a time (`halfback reproduce NAME --time`), or no time is
given. An arm that adds to another what is exact alone has that arm's gradients, and so its accuracy: it is timed, and not trained.
"""


def page(experiments: Path | None = None, page: Path | None = None) -> Path:
    """Means and figures of every recipe that has runs anew, and the page."""
    experiments, page = experiments or EXPERIMENTS, page or PAGE
    for path in recipes(experiments):
        if any((path.parent / "runs").glob("*.json")):
            collect(path)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, page_text(experiments, page))
    return page


def page_text(experiments: Path | None = None, page: Path | None = None) -> str:
    """The page from every results.json, by `order` and then name, and from headline.json."""
    experiments, page = experiments or EXPERIMENTS, page or PAGE
    found = results_in(experiments)
    if not found:
        raise ValueError(f"There is no results.json in {experiments}/*/: halfback reproduce NAME makes one.")
    short = [told for told in (claims([r for _, r in found]), headline(experiments)) if told]
    parts = [INTRODUCTION, *(["\n\n".join(["## In short", *short]) + "\n"] if short else [])]
    told = [(p, r) for p, r in found if "text" in r or judged(r)["arms"]]
    parts += [_section(r, os.path.relpath(p.with_name(FIGURE), page.parent)) for p, r in told]
    return "\n".join([*parts, *_waiting(experiments, {r["name"] for _, r in told})])


def results_in(experiments: Path) -> list[tuple[Path, Result]]:
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in experiments.glob("*/results.json")]
    return sorted(found, key=lambda f: (f[1]["order"], f[1]["name"]))


# What is claimed

CLAIMED = ("", "exact, top-1", "difference in points", "seeds", "peak")


def claims(found: Sequence[Result]) -> str:
    """The arms that recipes are for, in one table; those that wait for their runs, too."""
    lines: list[list[str]] = []
    for r in (r for r in found if r.get("claims")):
        lines.append([f"**{_cell(r['title'])}**"] + [""] * (len(CLAIMED) - 1))
        arms = {a["name"]: a for a in r["arms"]}
        lines += [_claim(arms[name], arms) for name in r["claims"]]
    head = [list(CLAIMED), ["---"] + ["---:"] * (len(CLAIMED) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (*head, *lines)) if lines else ""


def _claim(arm: Result, arms: Mapping[str, Result]) -> list[str]:
    against, pair = arms[arm["against"]["arm"]], arm["against"]["top1"]
    name, of = f"{_cell(arm['name'])}<br>`{arm['method']}`", len(arm["wanted"])
    if len(pair["seeds"]) < 2:
        return [name, "", "not measured yet", f"{len(pair['seeds'])} of {of}", ""]
    seeds = str(of) if len(pair["seeds"]) == of else f"{len(pair['seeds'])} of {of}"
    peak = arm["against"]["ratio"]["peak"]
    return [name, f"{against['mean']['top1']:.2f} %", _cell(with_interval(pair, "top1")), seeds, "" if peak is None else f"{peak:.2f}"]


def headline(experiments: Path) -> str:
    """The text of headline.json: one setting with all of its figures."""
    path = experiments / HEADLINE
    return json.loads(path.read_text(encoding="utf-8"))["text"] if path.exists() else ""


# Recipe by recipe


def _section(r: Result, drawn: str) -> str:
    if "text" in r:  # a study that is no recipe says itself what it found
        return "\n\n".join([f"## {r['title']}", r["text"], f"![{r['title']}]({Path(drawn).as_posix()})"]) + "\n"
    missing, shown = r["runs"]["of"] - r["runs"]["done"], judged(r)["arms"]
    wait = [a["name"] for a in r["arms"] if a not in shown and not a.get("like")]
    parts = [f"## {r['title']}", r["about"], f"**The paper:** {r['paper']}"]
    parts += [f"**Not complete:** {missing} of {r['runs']['of']} runs are missing."] if missing else []
    parts += [f"Not shown before they have two seeds: {'; '.join(wait)}."] if wait else []
    untimed = [a["name"] for a in r["arms"] if a.get("like") and not a.get("time")]
    parts += [f"Not shown before they are timed: {'; '.join(untimed)}."] if untimed else []
    r = judged(r)
    parts += ["**Here:**", _markdown(r)]
    parts += [f"**Does it hold?** {r['verdict']}"] if r["verdict"] else []
    parts += ["What differs from the paper:", "\n".join(f"- {d}" for d in r["differs"])] if r["differs"] else []
    name = JUDGED[r["measure"]].removesuffix(", %")
    parts += [f"![{r['title']}: {name} of every arm]({Path(drawn).as_posix()})"]
    if by_memory(r) is not None:
        parts += [f"![{r['title']}: {name} against memory]({Path(drawn).with_name(MEMORY).as_posix()})"]
    if any(a["name"] in r.get("curves", ()) for a in r["arms"]):
        parts += [f"![{r['title']}: training loss and {name} by epochs]({Path(drawn).with_name(CURVES).as_posix()})"]
    parts += [_made(r)]
    return "\n\n".join(parts) + "\n"


def _waiting(experiments: Path, told: Collection[str]) -> list[str]:
    """The recipes of which nothing can be told so far."""
    lines = []
    for path in recipes(experiments):
        name, recipe = path.parent.name, load(path)
        if name not in told:
            done = len(finished(recipe, runs_folders(path, None)))
            lines.append(f"| `{name}` | {_cell(recipe.title)} | {done} of {len(recipe.runs())} | {takes(recipe)} |")
    about = "Recipes of which no arm has two seeds: one seed tells nothing. `halfback reproduce NAME` runs them."
    head = ["| | | runs | minutes |", "| --- | --- | ---: | ---: |"]
    return ["\n\n".join(["## Not told yet", about, "\n".join([*head, *lines])]) + "\n"] if lines else []


def _markdown(r: Result) -> str:
    head, *body = table(r)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    group = ""
    for arm, cells in grouped(list(zip(r["arms"], body, strict=True))):
        if arm["group"] != group:
            group = arm["group"]
            lines.append([f"**{_cell(group)}**"] + [""] * (len(head) - 1))
        told = _settings({**({} if arm["method"] == arm["name"] else {"method": arm["method"]}), **arm["changes"]})
        lines.append([_cell(cells[0]) + (f"<br>{told}" if told else ""), *map(_cell, cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _settings(values: Mapping[str, Any]) -> str:
    """The method as it is written, and settings as name=value, as code."""
    said = [str(v) if k == "method" else f"{k}={v}" for k, v in values.items()]
    return ", ".join(f"`{text}`" for text in said).replace("|", "\\|")


def _made(r: Result) -> str:
    versions = ", ".join(f"{k} {' and '.join(v)}" for k, v in r["versions"].items())
    dates = r["dates"][0] + (f" to {r['dates'][-1]}" if len(r["dates"]) > 1 else "")
    seeds = ", ".join(map(str, sorted({s for a in r["arms"] for s in a["seeds"]})))
    minutes = "" if r["minutes"] is None else f" About {r['minutes']:g} minutes" + (f", {r['on']}." if r["on"] else ".")
    made = f"Seeds {seeds}. " if seeds else ""
    made += f"{' and '.join(r['devices'])}; {versions}; {dates}."
    commits = [_hash(c) for c in r["commits"]]
    made += f" Commit {', '.join(commits)}." if commits else ""
    timed = r.get("timed")
    made += f" Steps timed on {timed['device_name']}, {timed['date'][:10]}, commit {_hash(timed['commit'] or 'unknown')}." if timed else ""
    base = {"model": r["base"]["model"], "data": r["base"]["data"], **r["changed"]}
    base = {k: v for k, v in base.items() if not r["arms"] or not all(k in a["changes"] for a in r["arms"])}
    beside = " and ".join(f"`{name}`" for name in r.get("beside", ()))
    made += f" What {beside} has trained with the same settings is not trained again." if beside else ""
    return f"`halfback reproduce {r['name']}`.{minutes} {made} Settings, but for those that an arm names: {_settings(base)}."


def _hash(commit: str) -> str:
    return re.sub("([0-9a-f]{10})[0-9a-f]+", "\\1", commit)  # "-dirty" stays
