"""What we promise on an H200, compiled unless it says eager, and what was measured: time and peak of a step relative to plain training of
the same kind, in the same run. None: nothing is promised of it.

Beside that, of each model: the methods with the model's own forward that are faster than plain, take less memory, and that no peer with
the model's own forward beats in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Promise(NamedTuple):
    model: str
    method: str
    time: float | None
    peak: float | None


PROMISES = (
    Promise("vit-b", "sbp", 0.83, 0.76),
    Promise("vit-b", "sbp + lean", 0.88, 0.55),
    Promise("vit-b", "sbp + lean, eager", 0.88, 0.55),
    Promise("vit-b", "sbp + recompute", 1.00, 0.15),
    Promise("vit-b", "skiptokens", 0.69, 0.68),
    Promise("vit-b", "lean", 1.03, 0.64),
    Promise("vit-b", "dropit 0.1, activation_bits=4", 1.10, 0.50),
    Promise("vit-b", "sbp keep 1, eager", 1.03, None),
    Promise("vit-b", "sbp, eager", 0.92, None),
    Promise("convnext-t", "sbp, paper's layers", 0.89, 0.70),
    Promise("convnext-t", "sbp, paper's layers, + lean", 0.93, 0.60),
    Promise("llama-1b", "sbp", 0.88, 0.80),
    Promise("llama-1b", "sbp + lean", 0.92, 0.60),
    Promise("vit-l", "sbp", 0.83, 0.76),
    Promise("vit-l", "sbp + lean", 0.88, 0.55),
    Promise("vit-l", "sbp + recompute", 1.00, 0.15),
    Promise("vit-l", "skiptokens", 0.69, 0.68),
    Promise("resnet-50", "dropit 0.1, activation_bits=4", 1.12, 0.64),
    Promise("mask-rcnn", "sbp, paper's layers, eager", None, 0.69),
)
PROMISED = {(p.model, p.method) for p in PROMISES}


def kept(results: Iterable[dict[str, Any]]) -> list[list[str]]:
    """A line a promise about the models that are there: promised, measured, and whether it is kept."""
    found = {(r["model"], r["method"]): r for r in results}
    models = {model: r["about"] for (model, _), r in found.items()}
    cells = [["what we promise on an H200", "time", "measured", "peak", "measured", "kept"]]
    for p in PROMISES:
        if p.model in models:
            cells.append([f"{models[p.model]}: {p.method}", *_against(p, found.get((p.model, p.method)))])
    return cells


def _against(promise: Promise, row: dict[str, Any] | None) -> list[str]:
    wanted = {"time_ratio": promise.time, "peak_ratio": promise.peak}
    if row is None:
        said = "not measured"
    else:
        said = "yes" if all(most is None or row[key] <= most for key, most in wanted.items()) else "no"
    shown = [("" if most is None else f"{most:.2f}", "" if row is None else f"{row[key]:.3f}") for key, most in wanted.items()]
    return [*shown[0], *shown[1], said]


def ahead(results: Iterable[dict[str, Any]]) -> list[str]:
    """Of one model, in one mode: ours that are faster than plain at less memory, and that no peer beats; of those that leave the forward
    as it is and train the model, which those with a note do not."""
    fair = [r for r in results if not r["note"]]
    peers = [r for r in fair if not r["ours"]]

    def beaten(r: dict[str, Any]) -> bool:
        return any(p["time_ratio"] <= r["time_ratio"] and p["peak_ratio"] <= r["peak_ratio"] for p in peers)

    return [r["method"] for r in fair if r["ours"] and r["time_ratio"] < 1 and r["peak_ratio"] < 1 and not beaten(r)]
