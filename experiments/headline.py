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

from halfback.bench.results import note_of, read
from halfback.train.record import write_json
from halfback.train.results import with_interval

HERE = Path(__file__).parent
BENCH = HERE.parent / "benchmarks" / "results" / "bench.jsonl"
RECIPE, GROUP, MODEL = "finetune_gsm8k", "compiled", "smollm2"
NAMES = {"top1_difference": "the difference", "peak_ratio": "the peak", "time_ratio": "the time"}
ASKED = {"top1_difference": -0.5, "peak_ratio": 0.35, "time_ratio": 1.0}


def headline(results: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of what has all figures, and a text that has the others beside it."""
    arms = [a for a in results["arms"] if a["group"] == GROUP and a["against"] and len(a["against"]["top1"]["seeds"]) >= 2]
    if not arms:
        raise ValueError(f"headline: {RECIPE} has no two seeds of a {GROUP} arm. `halfback reproduce {RECIPE}` trains them.")
    same = {"part": "step", "model": MODEL, "compiled": True, "device": "cuda"}
    measured = [r for r in rows if "failed" not in r and same.items() <= r.items()]
    measured = [r for r in measured if r["batch"] == measured[-1]["batch"]]
    timed = {r["text"]: r for r in measured}  # the newest of each, at the newest batch
    found = [figures(results, arm, timed[arm["method"]]) for arm in arms if arm["method"] in timed]
    if not found:
        how = " ".join(f'--method "{arm["method"]}"' for arm in arms)
        raise ValueError(f"headline: {BENCH.name} has no row of {GROUP} arms. `halfback bench --model {MODEL} {how}` measures them.")
    best = max(found, key=lambda f: (sum(f["reached"].values()), -f["time_ratio"]))
    peers = {r["method"]: r for r in measured if not r["ours"] and r["text"] != "plain"}
    return {**best, "text": text(best, found, list(peers.values()))}


def text(best: dict[str, Any], found: list[dict[str, Any]], peers: list[dict[str, Any]]) -> str:
    """For pages: what one would use instead first, which is exact, then ours by time."""
    reached = [NAMES[key] for key, yes in best["reached"].items() if yes]
    lost, peak, time = (f"{value:g}".replace("-", "−") for value in ASKED.values())
    lines = [
        "**One setting with all of its figures**: SmolLM2-135M on GSM8K, compiled against compiled. Asked are a difference of at least "
        f"{lost} points, a peak of at most {peak} and a time of at most {time}. `{best['method']}` reaches "
        f"{'all three' if len(reached) == len(ASKED) else ' and '.join(reached) or 'none'}:",
        "",
        "| | difference in points | peak | time | |",
        "| --- | ---: | ---: | ---: | --- |",
        *(
            f"| {r['method']} | exact | {r['peak_ratio']:.2f} | {r['time_ratio']:.2f} | {note_of(r)} |"
            for r in sorted(peers, key=lambda r: r["time_ratio"])
        ),
    ]
    for f in sorted((f for f in found if not any(better(other, f) for other in found)), key=lambda f: f["time_ratio"]):
        name = f"**`{f['method']}`**" if f is best else f"`{f['method']}`"
        difference = with_interval({"mean": f["top1_difference"], "interval": f["top1_interval"], "clear": False}, "top1")
        lines.append(
            f"| {name} | {difference}, {len(f['seeds'])} seeds | {f['peak_ratio']:.2f} | {f['time_ratio']:.2f} | {f['measured']['note']} |"
        )
    m = best["measured"]
    return "\n".join(
        [
            *lines,
            "",
            "Each time is of one run, and the best of those measured is shown in bold; a row that waits for the CPU moves with it. "
            "Settings that another one beats in every figure are left out. Top-1 of next tokens, paired by seed, of trainings at batch "
            f"{best['accuracy']['batch']} (`halfback reproduce {RECIPE}`); peak and time of steps at batch "
            f"{m['batch']} of {m['size']} tokens, each against plain training of its own run (`halfback bench --model {MODEL}`); "
            f"{m['gpu']}, torch {m['torch']}, {m['date'][:10]}, commit {m['commit'][:10]}. `python experiments/headline.py`.",
        ]
    )


def better(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """In no figure worse, and in one better."""
    mine, its = ((f["top1_difference"], -f["peak_ratio"], -f["time_ratio"]) for f in (a, b))
    return mine != its and all(m >= i for m, i in zip(mine, its, strict=True))


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
        "accuracy": {
            **{k: results[k] for k in ("name", "about", "devices", "versions", "commits", "dates") if k in results},
            "batch": results["base"]["batch"],
        },
        "measured": {"note": note_of(row)}
        | {k: row[k] for k in ("gpu", "torch", "commit", "date", "batch", "size", "step_ms", "peak_gib")},
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
