"""How cost grows: depth, tokens, batch and keep swept, everything else as it is, in eager mode.

A row has the points of one sweep, each with its peak and its time, in all and per token; and the exponents of both in what was swept,
by least squares of logarithms. 1 is linear. Of keep, which half of a step does not depend on, they are below 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .measure import GIB
from .models import Spec
from .rows import Row
from .work import Place, Step, Turn, give_memory_back

SWEPT = ("batch", "tokens", "depth", "keep")
KEEPS = (0.125, 0.25, 0.5, 0.75)
PARTS = (8, 4, 2, 1)  # of the batch
STEPS = 10
METHODS = (
    ("plain", "plain", False),
    ("sbp keep 0.25", "sbp(keep=0.25)", True),
    ("sbp", "sbp(keep=0.5)", True),
    ("sbp + lean", "sbp(keep=0.5)+lean", True),
)
KINDS = ("vit", "llama", "gpt2")  # models that are made in any depth


def rows_of(spec: Spec) -> list[Row]:
    return [Row(name, text, False, ours) for name, text, ours in METHODS] if spec.kind in KINDS else []


def asked_of(row: Row) -> list[dict[str, Any]]:
    return [{"swept": what} for what in SWEPT if what != "keep" or row.text == "sbp(keep=0.5)"]


def points(spec: Spec, row: Row, what: str) -> Iterator[tuple[float, Spec, Row]]:
    """What is swept has this value, for this model and this method; on a quarter of the batch, so that the largest fits."""
    base = dataclasses.replace(spec, batch=max(1, spec.batch // 4))
    if what == "batch":
        for n in sorted({max(1, spec.batch // part) for part in PARTS}):
            yield n, dataclasses.replace(spec, batch=n), row
    elif what == "tokens":
        for size in sizes(base):
            yield tokens_of(dataclasses.replace(base, size=size)), dataclasses.replace(base, size=size), row
    elif what == "depth":
        layers = base.settings["layers"]
        for n in sorted({max(2, layers // 4), max(2, layers // 2), layers, 2 * layers}):
            yield n, dataclasses.replace(base, settings={**base.settings, "layers": n}), row
    else:
        for keep in KEEPS:
            yield keep, base, dataclasses.replace(row, text=f"sbp(keep={keep})")


def sizes(spec: Spec) -> list[int]:
    """From a quarter of the tokens to four times as many; an image's side goes with their root."""
    shares = (0.5, 0.75, 1, 1.5, 2) if spec.unit == "images" else (0.25, 0.5, 1, 2)
    return sorted({max(spec.step, round(share * spec.size) // spec.step * spec.step) for share in shares})


def tokens_of(spec: Spec) -> int:
    return (spec.size // spec.settings["patch"]) ** 2 + 1 if spec.unit == "images" else spec.size


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def work(spec: Spec, row: Row, place: Place, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for asked in given["asked"]:
        found = [point(at, s, r, place) for at, s, r in points(spec, row, asked["swept"])]
        x = [p["at"] for p in found]
        fitted = {f"{name}_exponent": exponent(x, [p[key] for p in found]) for name, key in (("time", "step_ms"), ("peak", "peak_gib"))}
        yield {"points": found, **fitted}


def point(at: float, spec: Spec, row: Row, place: Place) -> dict[str, float]:
    step = Step(spec, row, place, Turn(None))
    step.warm_up()
    figures = step.measured(STEPS)
    tokens = spec.batch * tokens_of(spec)
    del step
    give_memory_back()
    each = {"us_per_token": 1000 * figures["step_ms"] / tokens, "bytes_per_token": figures["peak_gib"] * GIB / tokens}
    return {k: float(f"{v:.6g}") for k, v in {"at": at, "step_ms": figures["step_ms"], "peak_gib": figures["peak_gib"], **each}.items()}


def told(line: dict[str, Any]) -> str:
    first, last = line["points"][0], line["points"][-1]
    return (
        f"{line['swept']} {first['at']:g} to {last['at']:g}: time grows with exponent {line['time_exponent']:.2f}, "
        f"peak with {line['peak_exponent']:.2f}"
    )


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    cells = [["method", "swept", "at", "step ms", "peak GiB", "us a token", "bytes a token", "exponents: time", "peak"]]
    for r in results:
        for i, p in enumerate(r["points"]):
            figures = [f"{p['step_ms']:.2f}", f"{p['peak_gib']:.4f}", f"{p['us_per_token']:.3f}", f"{p['bytes_per_token']:.0f}"]
            fitted = ["", ""] if i else [f"{r['time_exponent']:.2f}", f"{r['peak_exponent']:.2f}"]
            cells.append([r["method"], r["swept"], f"{p['at']:g}", *figures, *fitted])
    return cells
