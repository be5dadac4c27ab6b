"""One setting with all of its figures: accuracy of fine-tuning SmolLM2-135M, time and peak of the same model from `halfback bench`.

    halfback reproduce finetune_gsm8k
    halfback bench --model smollm2 --batch 64 --method "sbp(keep=0.5, layers='last 1/3')+lean+chunkedloss+recompute(layers='first 1/10')"
    python experiments/headline.py

Writes headline.json beside this file, with what is asked of each figure and whether it is reached: of the compiled arms that have all
three figures the one that reaches most, and of those the fastest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from halfback.bench.results import read
from halfback.train.record import write_json

HERE = Path(__file__).parent
BENCH = HERE.parent / "benchmarks" / "results" / "bench.jsonl"
RECIPE, GROUP, MODEL = "finetune_gsm8k", "compiled", "smollm2"
ASKED = {"top1_difference": -0.5, "peak_ratio": 0.35, "time_ratio": 1.0}


def headline(results: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of what has all figures."""
    arms = [a for a in results["arms"] if a["group"] == GROUP and a["against"] and len(a["against"]["top1"]["seeds"]) >= 2]
    if not arms:
        raise ValueError(f"headline: {RECIPE} has no two seeds of a {GROUP} arm. `halfback reproduce {RECIPE}` trains them.")
    same = {"part": "step", "model": MODEL, "compiled": True, "device": "cuda"}
    measured = [r for r in rows if "failed" not in r and same.items() <= r.items()]
    timed = {r["text"]: r for r in measured if r["batch"] == measured[-1]["batch"]}  # the newest of each, at the newest batch
    found = [figures(results, arm, timed[arm["method"]]) for arm in arms if arm["method"] in timed]
    if not found:
        how = " ".join(f'--method "{arm["method"]}"' for arm in arms)
        raise ValueError(f"headline: {BENCH.name} has no row of {GROUP} arms. `halfback bench --model {MODEL} {how}` measures them.")
    return max(found, key=lambda f: (sum(f["reached"].values()), -f["time_ratio"]))


def figures(results: dict[str, Any], arm: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    difference = arm["against"]["top1"]
    found = {"top1_difference": difference["mean"], "peak_ratio": row["peak_ratio"], "time_ratio": row["time_ratio"]}
    return {
        "method": arm["method"],
        "model": MODEL,
        **found,
        "top1_interval": difference["interval"],
        "top1": arm["mean"]["top1"],
        "seeds": difference["seeds"],
        "trained": arm.get("like") or arm["name"],
        "asked": ASKED,
        "reached": {k: found[k] >= asked if k == "top1_difference" else found[k] <= asked for k, asked in ASKED.items()},
        "accuracy": {k: results[k] for k in ("name", "about", "devices", "versions", "commits", "dates") if k in results},
        "measured": {k: row[k] for k in ("gpu", "torch", "commit", "date", "batch", "size", "step_ms", "peak_gib")},
    }


def main() -> int:
    path = HERE / RECIPE / "results.json"
    try:
        if not path.exists():
            raise ValueError(f"headline: no {path.name} of {RECIPE}. `halfback reproduce {RECIPE}` makes it.")
        found = headline(json.loads(path.read_text(encoding="utf-8")), read(BENCH))
    except ValueError as e:
        print(e, file=sys.stderr)
        return 1
    write_json(HERE / "headline.json", found)
    for key, asked in ASKED.items():
        print(f"{key:16} {found[key]:7.3f}   asked {asked:6.2f}   {'reached' if found['reached'][key] else 'not reached'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
