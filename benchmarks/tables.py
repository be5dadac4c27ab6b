"""Writes the tables of the README from the result files, so that no figure in it is typed by hand.

python benchmarks/tables.py            rewrite README.md
python benchmarks/tables.py --check    exit 1 if it differs from what the result files say
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from halfback.bench.fits import MEASURE
from halfback.bench.promises import kept
from halfback.bench.results import AGAIN, ASKED, in_full, note_of, read
from halfback.train.results_page import claims, headline, results_in

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

DROPIT = {
    "plain, eager": "plain",
    "checkpointing, eager": "checkpointing, every block",
    "flat Min-K, int32 indices, keep 0.1, eager": "flat Min-K with int32 indices, as in the released code of DropIT, keep 0.1",
    "flat Min-K, int32 indices, keep 0.2, eager": "flat Min-K with int32 indices, as in the released code of DropIT, keep 0.2",
    "lean, eager": "**`lean`**, exact",
    "dropit 0.1, eager": "**`dropit(keep=0.1)`**",
    "dropit 0.2, eager": "**`dropit(keep=0.2)`**",
    "dropit 0.1, activation_bits=4, eager": "**`dropit(keep=0.1, activation_bits=4)`**",
    "dropit bits=4, activation_bits=4, eager": "**`dropit(bits=4, activation_bits=4)`**",
}


def rows(model: str, file: str) -> dict[str, dict]:
    """The newest of each method's steps on a GPU, in the batch and size that were measured last: the others are another comparison."""
    found = [{"part": "step", "device": "cuda", **r} for r in read(RESULTS / f"{file}.jsonl") if r["model"] == model]
    steps = [r for r in found if r["part"] == "step" and r["device"] == "cuda" and "failed" not in r]
    return {r["method"]: r for r in steps if all(r.get(k) == steps[-1].get(k) for k in ASKED["step"])}


def days(found: Collection[dict]) -> str:
    """The day on which they were measured, or the first and the last."""
    dates = sorted(r["date"][:10] for r in found)
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def measured_on(found: Collection[dict]) -> str:
    def all_of(key: str) -> str:
        return ", ".join(sorted({r[key] for r in found}))

    return (
        f"Weights in bf16, one {all_of('gpu')}, torch {all_of('torch')}, {days(found)}; "
        "forward and backward; peak is `max_memory_allocated` above weights, gradients and batch."
    )


def dropit_table() -> str:
    """Of each model the eager rows that it has."""
    out, seen = [], []
    for model, size in (("ViT-B/16", "224 px"), ("ResNet-50", "224 px, channels_last")):
        found = rows(model, "dropit")
        shown = [(name, found[method]) for method, name in DROPIT.items() if method in found]
        if len(shown) > 1:
            plain = found["plain, eager"]
            out += [f"{model}, {size}, batch {plain['batch']}, eager:", "", "| | step | peak | time | memory |", "|---|---|---|---|---|"]
            for name, r in shown:
                time, peak = r["step_ms"] / plain["step_ms"], r["peak_gib"] / plain["peak_gib"]
                out.append(f"| {name} | {r['step_ms']:.1f} ms | {r['peak_gib']:.2f} GiB | {time:.2f} | {peak:.2f} |")
            out.append("")
            seen += [r for _, r in shown]
    most = max(abs(r["peak_error"]) for r in seen if "peak_error" in r)
    foreseen = f"Plain training's peak less what the report says is saved differs from the measured peak by at most {most:.1%}."
    return "\n".join([*out, measured_on(seen), foreseen])


def benched() -> dict[str, list[dict]]:
    """What `halfback bench` found: each model's rows, plain first, then peers, then ours, the fastest of them first."""
    models = dict.fromkeys(r["model"] for r in read(RESULTS / "bench.jsonl"))
    found = {model: [r for r in rows(model, "bench").values() if not r["method"].endswith(AGAIN)] for model in models}
    return {model: sorted(of, key=lambda r: (r["ours"], r["text"] != "plain", r["time_ratio"])) for model, of in found.items() if of}


def bench_table(*models: str) -> str:
    """These models' rows, compiled; of no name the promises, and all models' rows, compiled and eager."""
    found = benched()
    out = [] if models else [promises_table(), ""]
    seen = []
    for model in models or found:
        for about, compiled in (("compiled", True), ("eager", False))[: 1 if models else 2]:
            shown = [r for r in found[model] if r["compiled"] is compiled]
            if len(shown) > 1:
                r = shown[0]
                size = f"{r['size']} px" if r["unit"] == "images" else f"{r['size']} tokens"
                head = ["| | step | peak | time | memory | |", "|---|---|---|---|---|---|"]
                out += [f"{r['about']}, {size}, batch {r['batch']}, {about}:", "", *head, *map(bench_row, shown), ""]
                seen += shown
    same_run = "Time and memory are ratios to plain training, compiled or eager as the row is, in the same run."
    return "\n".join([*out, measured_on(seen), same_run])


def bench_row(r: dict) -> str:
    name = f"**`{r['text']}`**" if r["ours"] else r["method"].removesuffix(", eager")
    return f"| {name} | {r['step_ms']:.1f} ms | {r['peak_gib']:.2f} GiB | {r['time_ratio']:.2f} | {r['peak_ratio']:.2f} | {note_of(r)} |"


def promises_table() -> str:
    head, *cells = kept(r for of in benched().values() for r in of if in_full(r))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def other_part(part: str) -> dict[str, list[dict]]:
    """Each model's newest rows of --part fits or growth, on a GPU."""
    rows = [r for r in read(RESULTS / "bench.jsonl") if r["part"] == part and r["device"] == "cuda" and "failed" not in r]
    latest = {(r["model"], r["method"], *(r[k] for k in ASKED[part])): r for r in rows}
    return {model: [r for r in latest.values() if r["model"] == model] for model in dict.fromkeys(r["model"] for r in rows)}


def fits_table() -> str:
    """Of each model the largest sample at batch 1, by room."""
    out, seen = [], []
    for of in other_part("fits").values():
        alone = [r for r in of if r["largest"] != "batch" and r["at"]]
        for room in dict.fromkeys(r["room_gib"] for r in alone):
            peer = next((r for r in alone if r["room_gib"] == room and r["method"] == MEASURE), None)
            if peer is None:
                continue
            shown = [r for r in alone if all(r[k] == peer[k] for k in ("room_gib", "gpu", "torch", "commit"))]
            if len(shown) == 1:  # nothing is compared yet
                continue
            head = ["| | largest | tokens, of checkpointing's | step there, of checkpointing's |", "|---|---|---|---|"]
            out += [f"{peer['about']}, batch 1, {room:g} GiB:", "", *head, *(fits_row(r, peer) for r in shown), ""]
            seen += shown
    commits = ", ".join(dict.fromkeys(r["commit"][:10] for r in seen))
    return "\n".join(
        [*out, f"A step is forward, backward and AdamW's, eager, weights in bf16, on one {seen[0]['gpu']}; {days(seen)}, commit {commits}."]
    )


def fits_row(r: dict, peer: dict) -> str:
    pixels = r["unit"] == "images"
    ratio = (r["at"] / peer["at"]) ** (2 if pixels else 1)
    there = r["step_ms"] if r is peer else r["step_ms_there"] if r.get("timed_at") == peer["at"] else None
    name = f"**`{r['text']}`**" if r["ours"] else r["method"]
    time = "" if there is None else f"{there / peer['step_ms']:.2f}"
    return f"| {name} | {r['at']} {'pixels a side' if pixels else 'tokens'} | {ratio:.2f} | {time} |"


def growth_table() -> str:
    """By which power the peak grows."""
    out, seen = [], []
    for of in other_part("growth").values():
        swept = [what for what in ("batch", "tokens", "depth") if any(r["swept"] == what for r in of)]
        spans = [next(r["points"] for r in of if r["swept"] == what) for what in swept]
        head = [f"{what} {points[0]['at']:g} to {points[-1]['at']:g}" for what, points in zip(swept, spans, strict=True)]
        out += [f"{of[0]['about']}:", "", f"| | {' | '.join(head)} | bytes a token |", "|---" * (len(head) + 2) + "|"]
        for text in dict.fromkeys(r["text"] for r in of):
            rows = {r["swept"]: r for r in of if r["text"] == text}
            powers = [f"{rows[what]['peak_exponent']:.2f}" if what in rows else "" for what in swept]
            last = rows["batch"]["points"][-1]["bytes_per_token"]
            out.append(f"| {'plain' if text == 'plain' else f'**`{text}`**'} | {' | '.join(powers)} | {last:,.0f} |")
        out.append("")
        seen += of
    return "\n".join(
        [*out, f"Exponents of the peak, by least squares of logarithms: 1 is linear. Eager, one {seen[0]['gpu']}; {days(seen)}."]
    )


def digits_table() -> str:
    data = json.loads((RESULTS / "compare_digits.json").read_text())
    out = ["| | accuracy | held | peak |", "|---|---|---|---|"]
    for e in data["methods"]:
        mean, std, ratio = e["mean"], e["std"], e["ratio"]
        accuracy = f"{100 * mean['accuracy']:.1f} ± {100 * std['accuracy']:.1f} %"
        out.append(f"| `{e['method']}` | {accuracy} | {ratio['held']:.2f} | {ratio['peak']:.2f} |")
    return "\n".join(out)


def claims_table() -> str:
    """What trainings on real data showed of accuracy: what the recipes are for."""
    return claims([r for _, r in results_in(ROOT / "experiments")])


def headline_text() -> str:
    return headline(ROOT / "experiments")


def depth_table() -> str:
    """Errors after training, by how many blocks the gradient has passed, and a line on what else there is to know."""
    data = json.loads((RESULTS / "depth.json").read_text())
    settings, mean = data["settings"], data["mean"]
    depth, after, before = settings["depth"], mean["after training"], mean["at initialisation"]
    passed = (1, depth // 2, depth)
    head = [f"{what}, {n}" for what in ("flowing on", "weights") for n in passed]
    out = ["| | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for method, of in after.items():
        errors = [of[what]["error"][depth - n] for what in ("input", "weights") for n in passed]
        out.append(f"| `{method}` | " + " | ".join(share(e) for e in errors) + " |")
    coded = "dropit(keep=1, activation_bits=4)"
    cosine = min(min(of[coded]["input"]["cosine"]) for of in (after, before))
    out += [
        "",
        f"Relative errors of a batch's gradients after passing so many of {depth} blocks of a ViT of width {settings['width']}, on ",
    ]
    out[-1] += (
        f"{settings['data']}, {settings['dtype']}, after {settings['steps']} steps, mean of {len(data['seeds'])} seeds, "
        f"torch {data['versions']['torch']}, {data['date'][:10]}. At initialisation the flowing gradient's error with 4 bits ends at "
        f"{share(before[coded]['input']['error'][0])}. Its cosine with the exact one is nowhere below {math.floor(1e4 * cosine) / 1e4:.4f}."
    )
    return "\n".join(out)


def share(error: float) -> str:
    """A share in per cent, with two figures."""
    return "0" if error == 0 else f"{100 * error:#.2g}".rstrip(".") + " %"


def budget_rows(part: str) -> list[dict]:
    """The newest of each model, budget or method."""
    found = {}
    for r in map(json.loads, (RESULTS / "budget.jsonl").read_text().splitlines()):
        if r["part"] == part:
            found[r["model"], r.get("method") if part == "profile" else r.get("budget"), r.get("prefer")] = r
    return list(found.values())


def profile_table() -> str:
    """How far predicted peaks are from measured ones, the furthest of each model's methods."""
    found = budget_rows("profile")
    out = ["| | peak of plain training | methods | predicted on the GPU | predicted on a laptop |", "|---|---|---|---|---|"]
    for model in dict.fromkeys(r["model"] for r in found):
        own = [r for r in found if r["model"] == model]
        plain = next(r for r in own if r["method"] == "exact")
        gpu, laptop = (max((r[key] for r in own), key=abs) for key in ("predicted_error", "laptop_error"))
        out.append(f"| {model} | {plain['peak_gib']:.2f} GiB | {len(own)} | {gpu:+.1%} | {laptop:+.1%} |")
    first = found[0]
    out += [
        "",
        f"One {first['gpu']}, torch {first['torch']}, {first['date'][:10]}, eager, weights in bf16; the furthest off of all methods.",
    ]
    return "\n".join(out)


def plan_table() -> str:
    found = [r for r in budget_rows("plan") if r["prefer"] == "exact" and not r.get("impossible")]
    out = ["| budget | plan | measured peak, of the budget | time, measured | predicted |", "|---|---|---|---|---|"]
    for r in sorted(found, key=lambda r: (list(MODELS).index(r["model"]), -r["budget"])):
        shown = r["label"].partition(": ")[2]
        out.append(f"| {r['model']}, {r['budget']} | {shown} | {r['used']:.2f} | {r['time_ratio']:.2f} | {r['predicted_time']:.2f} |")
    first = found[0]
    sizes = ", ".join(f"{model} {what}" for model, what in MODELS.items())
    out += ["", f"Of the plain peak, and of plain's eager step: {sizes}; weights in bf16, one {first['gpu']}, torch {first['torch']}, "]
    out[-1] += f"{first['date'][:10]}. Gradients are exact in all of them."
    return "\n".join(out)


MODELS = {"ViT-B/16": "at batch 256", "ConvNeXt-T": "at batch 256", "GPT-2": "at 16 x 1024 tokens"}
ROUNDING = 1e-3  # of the largest value: mistakes are larger, and models cast to single precision inside
VERDICTS = {
    "wrong": "**other results**",
    "fine": "as it should be",
    "uncut": "nothing to cut",
    "none": "no blocks found",
    "error": "refused",
}


def verdict(r: dict) -> str:
    """What came of a method on somebody's model."""
    if "error" in r:
        return "none" if "no blocks found" in r["error"] else "error"
    if not (r["forward"] <= ROUNDING and r.get("gradients", 0) <= ROUNDING) or r.get("lost"):
        return "wrong"
    return "uncut" if r.get("uncut") else "fine"


def third_party_table(found: list[dict] | None = None) -> str:
    """Of all kinds of models that benchmarks/third_party.py ran: how many a method leaves what they are."""
    found = read(RESULTS / "third_party.jsonl") if found is None else found
    ran = [r for r in found if "methods" in r]
    out = ["| | models | " + " | ".join(VERDICTS.values()) + " | held, median |", "|---|" + " ---: |" * (len(VERDICTS) + 2)]
    for method in ran[0]["methods"] if ran else ():
        for library in ("transformers", "timm", "torchvision"):
            of = [r["methods"][method] for r in ran if r["model"].startswith(f"{library}:")]
            if not of:
                continue
            told = [verdict(r) for r in of]
            held = [r["held"] for r, v in zip(of, told, strict=True) if v == "fine"]
            counts = " | ".join(str(told.count(v) or "") for v in VERDICTS)
            out.append(f"| `{method}`, {library} | {len(of)} | {counts} | {f'{statistics.median(held):.2f}' if held else ''} |")
    names = [k for k in ("transformers", "timm", "torchvision") if any(k in r for r in ran)]
    versions = ", ".join(f"{k} {', '.join(sorted({r[k] for r in ran if k in r}))}" for k in (*names, "torch"))
    return "\n".join(
        [*out, "", f"On a CPU, {days(ran)}; {versions}; {len(found) - len(ran)} more did not run by themselves, as they were asked."]
    )


TABLES: dict[str, Callable[..., str]] = {
    "bench": bench_table,
    "fits": fits_table,
    "growth": growth_table,
    "dropit": dropit_table,
    "digits": digits_table,
    "claims": claims_table,
    "headline": headline_text,
    "depth": depth_table,
    "profiles": profile_table,
    "plans": plan_table,
    "third_party": third_party_table,
}


def fill(text: str, makers: Mapping[str, Callable[..., str]]) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` made anew, on lines of its own or within one;
    `<!-- name: a; b -->` calls its maker with a and b."""
    names = "|".join(map(re.escape, makers))
    place = re.compile(rf"(<!-- ({names})(?:: ([^\n]*?))? -->(\n?)).*?(<!-- /\2 -->)", re.DOTALL)
    return place.sub(lambda m: m[1] + makers[m[2]](*(m[3].split("; ") if m[3] else ())) + m[4] + m[5], text)


def filled(text: str) -> str:
    """The README with its tables made anew."""
    return fill(text, TABLES)


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = filled(text)
    if "--check" in sys.argv:
        return int(new != text)
    readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
