"""Writes the tables of the README from the result files, so that no figure in it is typed by hand.

python benchmarks/tables.py            rewrite README.md
python benchmarks/tables.py --check    exit 1 if it differs from what the result files say
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

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


def rows(model: str, file: str) -> dict[str, dict]:
    lines = (RESULTS / file).read_text().splitlines()
    return {r["method"]: r for r in map(json.loads, lines) if r["model"] == model}  # the newest of each


def gpu_table(model: str, names: dict[str, str], base: str = "plain", file: str = "sbp.jsonl", size: str = "224 px") -> str:
    found = rows(model, file)
    out = ["| | step | peak | time | memory |", "|---|---|---|---|---|"]
    for key, shown in names.items():
        r = found[key]
        time, peak = r["step_ms"] / found[base]["step_ms"], r["peak_gib"] / found[base]["peak_gib"]
        out.append(f"| {shown} | {r['step_ms']:.1f} ms | {r['peak_gib']:.2f} GiB | {time:.2f} | {peak:.2f} |")
    first = found[base]
    out.append("")
    out.append(
        f"{model}, {size}, batch {first['batch']}, weights in bf16, one {first['gpu']}, torch {first['torch']}, {first['date'][:10]}; "
        "forward and backward; peak is `max_memory_allocated` above weights, gradients and batch."
    )
    return "\n".join(out)


def dropit_table() -> str:
    """One table a model, of the rows that it has."""
    file, out = "dropit.jsonl", []
    for model, size in (("ViT-B/16", "224 px"), ("ResNet-50", "224 px, channels_last")):
        found = rows(model, file)
        if "plain, eager" in found:
            out.append(gpu_table(model, {k: v for k, v in DROPIT.items() if k in found}, "plain, eager", file, size))
    return "\n\n".join(out)


def digits_table() -> str:
    data = json.loads((RESULTS / "compare_digits.json").read_text())
    out = ["| | accuracy | held | peak |", "|---|---|---|---|"]
    for e in data["methods"]:
        mean, std, ratio = e["mean"], e["std"], e["ratio"]
        accuracy = f"{100 * mean['accuracy']:.1f} ± {100 * std['accuracy']:.1f} %"
        out.append(f"| `{e['method']}` | {accuracy} | {ratio['held']:.2f} | {ratio['peak']:.2f} |")
    return "\n".join(out)


TABLES = {
    "vit": lambda: gpu_table("ViT-B/16", VIT),
    "convnext": lambda: gpu_table("ConvNeXt-T", CONVNEXT),
    "eager": lambda: gpu_table("ViT-B/16", EAGER, "plain, eager"),
    "dropit": dropit_table,
    "digits": digits_table,
}
OPTIONAL = {"dropit": RESULTS / "dropit.jsonl"}  # made where the README has a place for it and this file is there


def filled(text: str) -> str:
    """The text with what stands between `<!-- name -->` and `<!-- /name -->` made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if name in OPTIONAL and not (OPTIONAL[name].exists() and pattern.search(text)):
            continue
        if not pattern.search(text):
            raise ValueError(f"README.md has no place for the table {name!r}.")
        text = pattern.sub(lambda m, make=make: m[1] + make() + "\n" + m[2], text)
    return text


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
