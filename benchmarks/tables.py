"""Writes the tables of the README from the result files, so that no figure in it is typed by hand.

python benchmarks/tables.py            rewrite README.md
python benchmarks/tables.py --check    exit 1 if it differs from what the result files say
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from halfback.bench.promises import kept
from halfback.bench.results import in_full, note_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

VIT = {
    "plain": "plain",
    "checkpointing": "checkpointing, every block",
    "accumulation, 2 micro-batches": "gradient accumulation, 2 micro-batches",
    "compile's budget 0.5": "torch.compile's memory budget 0.5",
    "Algorithm 1, last 8": "the paper's Algorithm 1, last 8 blocks",
    "sbp query, last 8": "**`SBP(keep=0.5)`**",
    "sbp qkv, last 8": '**`SBP(keep=0.5, attention="qkv")`**',
    "sbp qkv, all 12, + recompute": '**`SBP(keep=0.5, attention="qkv", layers="all")` + `Recompute()`**',
    "skiptokens, last 8": "`SkipTokens(keep=0.5)`, which changes the forward",
}
CONVNEXT = {
    "plain": "plain",
    "checkpointing": "checkpointing, every block",
    "accumulation, 2 micro-batches": "gradient accumulation, 2 micro-batches",
    "compile's budget 0.5": "torch.compile's memory budget 0.5",
    "sbp, paper's layers": '**`SBP(keep=0.5, layers="paper")`**',
    "sbp, all blocks of three stages": "`SBP(keep=0.5)` on all blocks of three stages",
}
EAGER = {
    "plain, eager": "plain",
    "Algorithm 1, last 8, eager": "the paper's Algorithm 1, last 8 blocks",
    "sbp query, last 8, eager": "`SBP(keep=0.5)`",
}
DROPIT = {
    "plain, eager": "plain",
    "checkpointing, eager": "checkpointing, every block",
    "flat Min-K, int32 indices, keep 0.1, eager": "flat Min-K with int32 indices, as in the released code of DropIT, keep 0.1",
    "flat Min-K, int32 indices, keep 0.2, eager": "flat Min-K with int32 indices, as in the released code of DropIT, keep 0.2",
    "lean, eager": "**`Lean()`**, exact",
    "dropit 0.1, eager": "**`DropIT(keep=0.1)`**",
    "dropit 0.2, eager": "**`DropIT(keep=0.2)`**",
    "dropit 0.1, activation_bits=4, eager": "**`DropIT(keep=0.1, activation_bits=4)`**",
    "dropit bits=4, activation_bits=4, eager": "**`DropIT(bits=4, activation_bits=4)`**",
    "sbp query, last 8, + lean, eager": "`SBP(keep=0.5)` + `Lean()`",
}
DROPIT_COMPILED = {
    "plain": "plain",
    "checkpointing": "checkpointing, every block",
    "lean": "**`Lean()`**, exact",
    "dropit 0.1, activation_bits=4": "**`DropIT(keep=0.1, activation_bits=4)`**",
    "dropit 0.2": "**`DropIT(keep=0.2)`**",
}


def rows(model: str, file: str) -> dict[str, dict]:
    lines = (RESULTS / file).read_text().splitlines()
    return {r["method"]: r for r in map(json.loads, lines) if r["model"] == model}  # the newest of each


def gpu_rows(found: dict[str, dict], names: dict[str, str], base: str) -> list[str]:
    out = ["| | step | peak | time | memory |", "|---|---|---|---|---|"]
    for key, shown in names.items():
        r = found[key]
        time, peak = r["step_ms"] / found[base]["step_ms"], r["peak_gib"] / found[base]["peak_gib"]
        out.append(f"| {shown} | {r['step_ms']:.1f} ms | {r['peak_gib']:.2f} GiB | {time:.2f} | {peak:.2f} |")
    return out


def measured_on(model: str, first: dict, size: str) -> str:
    return (
        f"{model}, {size}, batch {first['batch']}, weights in bf16, one {first['gpu']}, torch {first['torch']}, {first['date'][:10]}; "
        "forward and backward; peak is `max_memory_allocated` above weights, gradients and batch."
    )


def gpu_table(model: str, names: dict[str, str], base: str = "plain", file: str = "sbp.jsonl", size: str = "224 px") -> str:
    found = rows(model, file)
    return "\n".join([*gpu_rows(found, names, base), "", measured_on(model, found[base], size)])


def dropit_table() -> str:
    """Two tables a model, eager and compiled, of the rows that it has."""
    out = []
    for model, size in (("ViT-B/16", "224 px"), ("ResNet-50", "224 px, channels_last")):
        found = rows(model, "dropit.jsonl")
        for base, names, about in (("plain, eager", DROPIT, "eager"), ("plain", DROPIT_COMPILED, "compiled")):
            shown = {k: v for k, v in names.items() if k in found}
            if base in found and len(shown) > 1:
                out += [f"{model}, {about}:", "", *gpu_rows(found, shown, base), ""]
        if "plain, eager" in found:
            out += [measured_on(model, found["plain, eager"], size), *predicted(found), ""]
    return "\n".join(out[:-1])


def predicted(found: dict[str, dict]) -> list[str]:
    """How far the peaks that the report foretells are from those measured."""
    errors = [abs(r["peak_error"]) for r in found.values() if "peak_error" in r]
    if not errors:
        return []
    return [f"Plain training's peak less what the report says is saved differs from the measured peak by at most {max(errors):.1%}."]


def bench_table() -> str:
    """Each model's rows, compiled and eager, the newest of each; ratios are to plain of the same kind in the same run."""
    lines = (json.loads(line) for line in (RESULTS / "bench.jsonl").read_text().splitlines())
    steps = [r for r in lines if r["part"] == "step" and r["device"] == "cuda" and "failed" not in r and not r["method"].endswith("again")]
    out = []
    for model in dict.fromkeys(r["model"] for r in steps):
        found = {r["method"]: r for r in steps if r["model"] == model}
        for about, compiled in (("compiled", True), ("eager", False)):
            shown = [r for r in found.values() if r["compiled"] is compiled]
            if len(shown) > 1:
                head = ["| | step | peak | time | memory | |", "|---|---|---|---|---|---|"]
                out += [f"{shown[0]['about']}, {about}:", "", *head, *map(bench_row, shown), ""]
        first = next(iter(found.values()))
        what = f"{first['size']} px" if first["unit"] == "images" else f"{first['size']} tokens"
        out += [measured_on(first["about"], first, what), ""]
    cells = kept(r for r in steps if in_full(r))
    promised = [f"| {' | '.join(line)} |" for line in (cells[0], ["---"] * len(cells[0]), *cells[1:])]
    return "\n".join([*promised, "", *out[:-1]] if cells[1:] else out[:-1])


def bench_row(r: dict) -> str:
    name = f"**`{r['text']}`**" if r["ours"] else r["method"].removesuffix(", eager")
    return f"| {name} | {r['step_ms']:.1f} ms | {r['peak_gib']:.2f} GiB | {r['time_ratio']:.2f} | {r['peak_ratio']:.2f} | {note_of(r)} |"


def digits_table() -> str:
    data = json.loads((RESULTS / "compare_digits.json").read_text())
    out = ["| | accuracy | held | peak |", "|---|---|---|---|"]
    for e in data["methods"]:
        mean, std, ratio = e["mean"], e["std"], e["ratio"]
        accuracy = f"{100 * mean['accuracy']:.1f} ± {100 * std['accuracy']:.1f} %"
        out.append(f"| `{e['method']}` | {accuracy} | {ratio['held']:.2f} | {ratio['peak']:.2f} |")
    return "\n".join(out)


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
TABLES = {
    "vit": lambda: gpu_table("ViT-B/16", VIT),
    "convnext": lambda: gpu_table("ConvNeXt-T", CONVNEXT),
    "eager": lambda: gpu_table("ViT-B/16", EAGER, "plain, eager"),
    "dropit": dropit_table,
    "bench": bench_table,
    "digits": digits_table,
    "depth": depth_table,
    "profiles": profile_table,
    "plans": plan_table,
}
OPTIONAL = {
    "dropit": RESULTS / "dropit.jsonl",
    "bench": RESULTS / "bench.jsonl",
}  # made where the README has a place for it and this file is there


def fill(text: str, makers: Mapping[str, Callable[..., str]]) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` made anew, on lines of its own or within one;
    `<!-- name: a; b -->` calls its maker with a and b."""
    names = "|".join(map(re.escape, makers))
    place = re.compile(rf"(<!-- ({names})(?:: ([^\n]*?))? -->(\n?)).*?(<!-- /\2 -->)", re.DOTALL)
    return place.sub(lambda m: m[1] + makers[m[2]](*(m[3].split("; ") if m[3] else ())) + m[4] + m[5], text)


def filled(text: str) -> str:
    """The README with its tables made anew."""
    return fill(text, {name: make for name, make in TABLES.items() if name not in OPTIONAL or OPTIONAL[name].exists()})


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
