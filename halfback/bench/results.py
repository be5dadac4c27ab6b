"""The result file: a line a row, added as soon as it is known. What is done is read off it."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..compare import surroundings
from ..report import rows as columns
from .models import MODELS
from .rows import Row

OUT = Path("benchmarks/results/bench.jsonl")
ASKED = {"step": ("batch", "size"), "fits": ("largest", "room_gib"), "growth": ("swept",)}  # what tells rows of a part apart
AGAIN = ", again"
Results = list[dict[str, Any]]


def here(device: str) -> dict[str, Any]:
    """On what, with what, and when."""
    found = surroundings(device)
    return {
        "device": device,
        "gpu": found["device_name"] if device == "cuda" else "none",
        "torch": torch.__version__,
        "commit": found["commit"] or "unknown",
        "date": now(),
        "seed": 0,
    }


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def read(path: Path) -> Results:
    """A last line that was cut is left out."""
    found = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as e:
            if line.endswith("}"):
                raise ValueError(f"{path}: line {number} is no JSON: {e}.") from e
    return found


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as f:
        f.write("\n" * cut + json.dumps(row) + "\n")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    part = row.get("part", "step")
    own = tuple(row.get(k) for k in ASKED[part])
    return part, row["model"], row["method"], row.get("compiled"), *own, *(row.get(k) for k in ("gpu", "torch", "commit", "device"))


def newest(results: Results, part: str = "step") -> Results:
    """Of each row the last that was measured, in the order in which they were first."""
    return list({key(r): r for r in results if r.get("part", "step") == part and "failed" not in r}.values())


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in figures.items()}


def finished(row: Row, figures: dict[str, Any], plain: dict[str, dict[str, Any]], again: bool = False) -> dict[str, Any]:
    """A row's figures with its ratios to the plain rows of the same run, of its own kind and compiled."""
    own = plain[row.plain]
    told = {
        "method": row.method + AGAIN * again,
        "text": row.text,
        "compiled": row.compiled,
        "ours": row.ours,
        "note": row.note,
        **figures,
        "time_ratio": figures["step_ms"] / own["step_ms"],
        "peak_ratio": figures["peak_gib"] / own["peak_gib"],
        "against": row.plain,
    }
    if "plain" in plain and not row.compiled:
        told["time_ratio_compiled"] = figures["step_ms"] / plain["plain"]["step_ms"]
        told["peak_ratio_compiled"] = figures["peak_gib"] / plain["plain"]["peak_gib"]
    if "held_before_gib" in figures:
        foreseen = own["peak_gib"] - (figures["held_before_gib"] - figures["held_after_gib"])
        told |= {"predicted_peak_gib": foreseen, "peak_error": foreseen / figures["peak_gib"] - 1}
    return rounded(told)


def in_full(row: dict[str, Any]) -> bool:
    """It was measured in the size that promises are made for."""
    spec = MODELS.get(row["model"])
    return spec is not None and row["part"] == "step" and (row["batch"], row["size"]) == (spec.batch, spec.size)


def note_of(row: dict[str, Any]) -> str:
    waits = row["device"] == "cuda" and row["host_ms"] > 0.9 * row["step_ms"]
    return ", ".join(filter(None, (row["note"], "the GPU waits for the CPU" if waits else "")))


def table(results: Results) -> str:
    cells = [["method", "step ms", "host ms", "peak GiB", "time", "peak", "floor", "compiled time", "note"]]
    for r in results:
        floor = f"{r['time_floor']:.2f}" if "time_floor" in r else ""
        both = f"{r['time_ratio_compiled']:.3f}" if "time_ratio_compiled" in r else ""
        figures = [f"{r['step_ms']:.2f}", f"{r['host_ms']:.2f}", f"{r['peak_gib']:.3f}", f"{r['time_ratio']:.3f}", f"{r['peak_ratio']:.3f}"]
        cells.append([("* " if r["ours"] else "  ") + r["method"], *figures, floor, both, note_of(r)])
    return columns(cells, texts=1)


def file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model)
