"""One setting with all of its figures: accuracy of fine-tuning SmolLM2-135M, time and peak of the same model from `halfback bench`.

    halfback reproduce finetune_gsm8k
    halfback bench --model smollm2 --batch 64 --method "lean+chunkedloss+recompute(layers='first 2/5')"
    python experiments/headline.py

Writes headline.json beside this file, with what is asked of each figure and whether it is reached.
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
RECIPE, ARM, MODEL = "finetune_gsm8k", "Lean, loss in parts, Recompute, compiled", "smollm2"
ASKED = {"top1_difference": -0.5, "peak_ratio": 0.35, "time_ratio": 1.0}


def headline(results: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    arm = next((a for a in results["arms"] if a["name"] == ARM), None)
    if arm is None or len(arm["against"]["top1"]["seeds"]) < 2:
        raise ValueError(f"headline: {RECIPE} has no two seeds of {ARM!r}. `halfback reproduce {RECIPE}` trains them.")
    same = {"part": "step", "model": MODEL, "text": arm["method"], "compiled": True, "device": "cuda"}
    timed = [r for r in rows if "failed" not in r and same.items() <= r.items()]
    if not timed:
        how = f'halfback bench --model {MODEL} --method "{arm["method"]}"'
        raise ValueError(f"headline: {BENCH.name} has no row of it. `{how}` measures one.")
    row, difference = timed[-1], arm["against"]["top1"]
    found = {"top1_difference": difference["mean"], "peak_ratio": row["peak_ratio"], "time_ratio": row["time_ratio"]}
    return {
        "method": arm["method"],
        "model": MODEL,
        **found,
        "top1_interval": difference["interval"],
        "top1": arm["mean"]["top1"],
        "seeds": difference["seeds"],
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
