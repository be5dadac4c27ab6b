"""Writes what of the documentation is made from something else: figures and tables from result files, tables of the code, docstrings,
help texts, examples and pictures.

python docs/make.py            rewrite docs/*.md and docs/pictures/*.svg
python docs/make.py --check    exit 1, and name them, if any would change

A part that is made stands between `<!-- name -->` and `<!-- /name -->`, on lines of its own or within one; `<!-- name: a; b -->` gives
arguments (`benchmarks/tables.py` has the machinery and the tables of the README; docs/results.md is `halfback reproduce --page`'s).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "docs")]

import pictures  # noqa: E402
import tables  # noqa: E402
import test_third_party as third_party  # noqa: E402

import halfback as hb  # noqa: E402
from halfback import cli, compiled, layers, ops  # noqa: E402
from halfback.integrations import huggingface, lightning  # noqa: E402
from halfback.methods import Method  # noqa: E402

WIDTH = "110"  # columns of help texts


# Figures, from result files


def _ratio(file: str, model: str, method: str, of: str) -> str:
    """A row's time or peak, of plain training's of the same kind."""
    found = tables.rows(model, file)
    row, plain = found[method], found["plain, eager" if method.endswith("eager") else "plain"]
    figure = {"time": "step_ms", "peak": "peak_gib"}[of]
    return f"{row[f'{of}_ratio'] if file == 'bench' else row[figure] / plain[figure]:.2f}"  # halfback bench knows plain of the same run


def time(file: str, model: str, method: str) -> str:
    return _ratio(file, model, method, "time")


def memory(file: str, model: str, method: str) -> str:
    return _ratio(file, model, method, "peak")


def host(file: str, model: str, method: str) -> str:
    """What the CPU needs to send a step off, of the time that the step takes."""
    row = tables.rows(model, file)[method]
    return f"{row['host_ms'] / row['step_ms']:.2f}"


def compiling(file: str, model: str, method: str) -> str:
    return f"{tables.rows(model, file)[method]['compile_s']:.0f} s"


def kernel(name: str) -> str:
    """Milliseconds that benchmarks/kernels.py measured last. Names may have a star, which tells what halfback runs."""
    rows = [json.loads(line) for line in (tables.RESULTS / "kernels.jsonl").read_text().splitlines()]
    return f"{next(r['ms'] for r in reversed(rows) if r['kernel'].removesuffix(' *') == name):.1f} ms"


def measured(model: str, method: str) -> str:
    """What `halfback bench` found of a method on a GPU, or that it has not yet."""
    row = tables.rows(model, "bench").get(method)
    if row is None:
        return "We have not measured it yet."
    return f"On {row['about']} it took {row['peak_ratio']:.2f} of the memory and {row['time_ratio']:.2f} of the time here."


@functools.cache
def _profiles(model: str) -> dict[str, dict]:
    rows = map(json.loads, (tables.RESULTS / "budget.jsonl").read_text().splitlines())
    return {r["method"]: r for r in rows if r["part"] == "profile" and r["model"] == model}


def peak(model: str, method: str) -> str:
    """A peak that was measured on a GPU, in eager mode, of plain training's."""
    found = _profiles(model)
    return f"{found[method]['peak_gib'] / found['exact']['peak_gib']:.2f}"


@functools.cache
def _experiment(name: str) -> dict:
    return json.loads((ROOT / "experiments" / name / "results.json").read_text())


def _arm(experiment: str, name: str) -> dict:
    return next(arm for arm in _experiment(experiment)["arms"] if arm["name"] == name)


def loss(experiment: str, name: str, against: str) -> str:
    """The training loss that an arm ends with, of another's."""
    return f"{_arm(experiment, name)['mean']['train_loss'] / _arm(experiment, against)['mean']['train_loss']:.1f}"


def top1(experiment: str, name: str) -> str:
    """The accuracy of an arm less that of the arm it is compared with, in points, with its interval."""
    return _signed(_difference(experiment, name)["mean"])


def interval(experiment: str, name: str) -> str:
    """Of what the experiment is judged by."""
    measure = _experiment(experiment)["measure"]
    low, high = _arm(experiment, name)["against"][measure]["interval"]
    return " to ".join(_signed(x, 2 if measure == "top1" else 3) for x in (low, high))


def _difference(experiment: str, name: str) -> dict:
    return _arm(experiment, name)["against"]["top1"]


def _signed(x: float, digits: int = 2) -> str:
    return f"{x:+.{digits}f}".replace("-", "−")


def apart(experiment: str, name: str) -> str:
    """The test loss of an arm less that of the arm it is compared with."""
    return _signed(_arm(experiment, name)["against"]["test_loss"]["mean"], 3)


def step(experiment: str, name: str) -> str:
    """The time of a step of an arm, of exact training's."""
    exact = _arm(experiment, _experiment(experiment)["against"])
    return f"{_arm(experiment, name)['time']['step_ms'] / exact['time']['step_ms']:.1f}"


def most(experiment: str, name: str) -> str:
    """The peak of an arm, of the arm that it is compared with."""
    return f"{_arm(experiment, name)['against']['ratio']['peak']:.2f}"


def held(experiment: str, name: str) -> str:
    """What an arm holds, of the arm that it is compared with."""
    return f"{_arm(experiment, name)['against']['ratio']['held']:.2f}"


def clear(experiment: str, of: str) -> str:
    """How many arms, of those whose name begins so, have an accuracy whose difference is clear of zero."""
    found = [arm["against"]["top1"]["clear"] for arm in _experiment(experiment)["arms"] if arm["name"].startswith(of)]
    return f"{sum(found) or 'none'} of {len(found)}"


def runs(experiment: str) -> str:
    done = _experiment(experiment)["runs"]
    return f"{done['done']} of {done['of']}"


def not_run() -> str:
    """Recipes without a result."""
    recipes = sorted(p.parent.name for p in (ROOT / "experiments").glob("*/recipe.py") if not (p.parent / "results.json").exists())
    return ", ".join(f"`{name}`" for name in recipes)


def digits(method: str, what: str) -> str:
    """Of `halfback compare` on digits: accuracy in per cent, or held or peak of exact training's."""
    found = {e["method"]: e for e in json.loads((tables.RESULTS / "compare_digits.json").read_text())["methods"]}[method]
    return f"{100 * found['mean']['accuracy']:.1f}" if what == "accuracy" else f"{found['ratio'][what]:.2f}"


def error(method: str, of: str, blocks: str) -> str:
    """The relative error of a gradient after so many blocks: of "input", which flows on, or of "weights"."""
    data = json.loads((tables.RESULTS / "depth.json").read_text())
    return tables.share(data["mean"]["after training"][method][of]["error"][data["settings"]["depth"] - int(blocks)])


def least() -> str:
    """The smallest peak that a plan was found for, of the plain peak."""
    rows = map(json.loads, (tables.RESULTS / "budget.jsonl").read_text().splitlines())
    return ", ".join(f"{min(r['peaks']):.2f} for {r['model']}" for r in rows if r["part"] == "sweep")


# Tables of the code


def _names(names: Any) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def _first(text: str | None) -> str:
    """The first sentence of a docstring."""
    line = " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;]) ", line, maxsplit=1)[0].rstrip(".;:")


def streamed() -> str:
    """The table of functions that run on the two streams of SBP."""
    rows: dict[Callable, list[str]] = {}
    for name, row in ops.TABLE.items():
        rows.setdefault(row, []).append(name)
    told = [[_names(names), " ".join((row.__doc__ or "").split())] for row, names in rows.items()]
    return _table(["functions", "how they treat positions"], told)


def ledger() -> str:
    """The table of functions whose saved tensors Lean and DropIT hold otherwise."""
    by_row: dict[str, list[str]] = {}
    known = sorted({*layers.CHEAP, *layers.SIGNS, *layers.POOLINGS, *layers.LAYERS, *layers.CODED, "batch_norm", "dropout"})
    for name in known:
        func = {"batch_norm": layers.F.batch_norm, "dropout": layers.F.dropout}.get(name)
        row = layers._row(func or (lambda: None), name, False)
        by_row.setdefault(row.__name__ if row else "", []).append(name)
    held = {
        "layer": "their input serves the gradient of the weight alone: shared, computed again, or (DropIT) stored",
        "activation": "their output is computed again from their input; with `activation_bits` a code of the derivative is held",
        "product": "computed again; with `activation_bits`, of an activation above and another factor, few-bit copies of both are held",
        "signs": "one bit an element",
        "dropout": "one bit an element",
        "pooling": "of the input its shape, of indices 32 bits",
        "batch_norm": "their output is computed again from the input and the batch's statistics",
        "cheap": "their output is computed again from what is held anyway",
    }
    return _table(["functions", "held instead"], [[_names(by_row[row]), text] for row, text in held.items()])


def again() -> str:
    return _names(sorted(compiled.AGAIN))


def models() -> str:
    """The models of other people's libraries that the tests train as they are."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for name, make in third_party.MODELS.items():
        kind = type(make()[0])
        library = kind.__module__.partition(".")[0].replace("_", "-")
        found.setdefault(library, (set(), set()))[name in third_party.UNCUT].add(kind.__name__)
    rows = [[library, *(_names(sorted(names)) for names in both)] for library, both in sorted(found.items())]
    return _table(["of", "models", "models in which SBP finds nothing to cut"], rows)


def _told(method: type) -> dict[str, str]:
    """What a method's docstring says of its options."""
    said: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(method.__doc__ or "").split("\n\n")[-1].splitlines():
        if found := re.match(r"(\w+) {2,}(.*)", line):
            name, said[found[1]] = found[1], found[2]
        elif name:
            said[name] += " " + line.strip()
    return said


def options(name: str) -> str:
    method = getattr(hb, name)
    said = {**_told(hb.SBP), **_told(method)}
    shown = [f for f in dataclasses.fields(method) if f.init]
    rows = [[f"`{f.name}`", f"`{f.default!r}`", said.get(f.name, "").replace("|", "\\|")] for f in shown]
    return _table(["option", "default", "meaning"], rows)


# The reference


def reference() -> str:
    kinds: dict[str, list[str]] = {"Methods": [], "Functions": [], "What they return, and what they are made of": []}
    for name in hb.__all__:
        thing = getattr(hb, name)
        kind = 1 if not inspect.isclass(thing) else 0 if issubclass(thing, Method) else 2
        list(kinds.values())[kind].append(name)
    return "\n\n".join(f"## {kind}\n\n" + "\n\n".join(_entry(name, getattr(hb, name)) for name in names) for kind, names in kinds.items())


def callbacks() -> str:
    return "\n\n".join(_entry(f"{m.__name__}.HalfbackCallback", m.HalfbackCallback) for m in (huggingface, lightning))


def _entry(name: str, thing: Any) -> str:
    about, *more = inspect.cleandoc(thing.__doc__ or "").split("\n\n")
    parts = [f"### {name}", f"```text\n{_signature(thing.__name__, thing)}\n```", about]
    if more:
        parts.append("```text\n" + "\n\n".join(more) + "\n```")
    if inspect.isclass(thing) and not issubclass(thing, Method):
        parts += [rows] if (rows := _members(thing)) else []
    return "\n\n".join(parts)


def _signature(name: str, thing: Any) -> str:
    found = inspect.signature(thing)
    shown = []
    for p in found.parameters.values():
        of = "" if p.annotation is p.empty else f": {p.annotation}"
        default = "" if p.default is p.empty or "factory" in repr(p.default) else (" = " if of else "=") + repr(p.default)
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        if p.kind is p.KEYWORD_ONLY and not any(s.startswith("*") for s in shown):
            shown.append("*")
        shown.append(f"{mark}{p.name}{of}{default}")
    back = "" if inspect.isclass(thing) or found.return_annotation is found.empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(shown)}){back}"
    return line if len(line) <= int(WIDTH) else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){back}"


def _members(thing: type) -> str:
    rows = []
    for name, member in vars(thing).items():
        func = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        own = inspect.isfunction(func) and func.__qualname__ == f"{thing.__name__}.{name}"
        if own and not name.startswith("_") and func.__doc__:
            rows.append([f"`{name}`" if isinstance(member, property) else f"`{name}()`", _first(func.__doc__)])
    return _table(["", ""], rows) if rows else ""


def commands() -> str:
    top = cli.parser()
    subs = next(a for a in top._actions if isinstance(a.choices, dict))
    parsers = {"halfback": top, **{f"halfback {name}": sub for name, sub in subs.choices.items()}}
    with mock.patch.dict(os.environ, COLUMNS=WIDTH):
        return "\n\n".join(f"### {name}\n\n```text\n{found.format_help().rstrip()}\n```" for name, found in parsers.items())


# Examples


def examples() -> str:
    """Every example, as it is."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        about = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
        parts.append(f"### {path.name}\n\n{about}\n\n```python\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


MADE = (time, memory, host, compiling, kernel, measured, peak)
MADE += (loss, top1, interval, clear, runs, not_run, digits, error, least, apart, step, most, held)
MADE += (streamed, ledger, again, models, options, reference, callbacks, commands, examples)
MAKERS: dict[str, Callable[..., str]] = {**tables.TABLES, **{f.__name__: f for f in MADE}}


def page(text: str) -> str:
    """A page with its parts made anew."""
    names = re.findall(r"<!-- (\w+)(?:: [^\n]*?)? -->", text)
    closed = re.findall(r"<!-- /(\w+) -->", text)
    if wrong := {*names} - MAKERS.keys() or {*names} ^ {*closed}:
        raise ValueError(f"Parts that nobody makes, or that do not begin or end: {', '.join(sorted(wrong))}.")
    return tables.fill(text, MAKERS)


def made() -> dict[Path, str]:
    """All that is made, by file."""
    pages = {p: page(p.read_text()) for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "results.md"}
    return pages | {ROOT / "docs" / "pictures" / name: text for name, text in pictures.all_of_them().items()}


def main() -> int:
    changed = {path: text for path, text in made().items() if not path.exists() or path.read_text() != text}
    for path, text in changed.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        print(f"{'would change' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}")
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
