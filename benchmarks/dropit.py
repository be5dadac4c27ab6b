"""Time and peak memory of DropIT and Lean against what one would use instead, on one GPU, in one run.

    python benchmarks/dropit.py                ViT-B/16 and ResNet-50 (channels_last), batch 256, 224 px, weights in bf16
    python benchmarks/dropit.py --model vit    one of them

How it is measured: harness.py. Eager rows are compared to eager plain, compiled ones to compiled plain; `against` says to which.
Eager rows of one of our methods alone also have

    held_before_gib, held_after_gib   what plain training and the method hold for backward, as the report tells it
    predicted_peak_gib                the peak of eager plain less their difference
    peak_error                        by how much the prediction is off, relative to the measured peak

Rows are appended to benchmarks/results/dropit.jsonl.
"""

from __future__ import annotations

import torch
from harness import Benchmark, Built, images, main
from mink import mink_
from torch import Tensor

import halfback as hb

BATCH = {"vit": 256, "resnet": 256}
NAMES = {"vit": "ViT-B/16", "resnet": "ResNet-50"}
ALLOWED_ERROR = 0.05  # of a predicted peak

# name -> (compiled, what is applied)
ROWS = {
    "vit": {
        "plain, eager": (False, "plain"),
        "plain": (True, "plain"),
        "checkpointing, eager": (False, "checkpoint"),
        "checkpointing": (True, "checkpoint"),
        "flat Min-K, int32 indices, keep 0.1, eager": (False, "flat min-k 0.1"),
        "lean, eager": (False, "lean"),
        "dropit 0.1, eager": (False, "dropit(keep=0.1)"),
        "dropit 0.1, activation_bits=4, eager": (False, "dropit(keep=0.1, activation_bits=4)"),
        "dropit bits=4, activation_bits=4, eager": (False, "dropit(bits=4, activation_bits=4)"),
        "lean": (True, "lean"),
        "dropit 0.1, activation_bits=4": (True, "dropit(keep=0.1, activation_bits=4)"),
        "sbp query, last 8, + lean, eager": (False, "sbp(layers='last 2/3')+lean"),
    },
    "resnet": {
        "plain, eager": (False, "plain"),
        "plain": (True, "plain"),
        "checkpointing, eager": (False, "checkpoint"),
        "flat Min-K, int32 indices, keep 0.2, eager": (False, "flat min-k 0.2"),
        "lean, eager": (False, "lean"),
        "dropit 0.2, eager": (False, "dropit(keep=0.2)"),
        "dropit 0.2": (True, "dropit(keep=0.2)"),
    },
}


def build(name: str, method: str, device: str) -> Built:
    """torchvision's own models, unmodified."""
    from torchvision.models import resnet50, vit_b_16

    torch.manual_seed(0)
    model = (vit_b_16() if name == "vit" else resnet50()).to(device, torch.bfloat16).train()
    if name == "resnet":
        model.to(memory_format=torch.channels_last)
    if method.startswith("flat min-k"):
        mink_(model, float(method.split()[-1]))
    elif method == "checkpoint":
        hb.apply_(model, hb.Recompute())  # alone it is torch's checkpoint around every block
    elif method != "plain":
        methods = hb.parse(method)
        report = hb.apply_(model, *methods)
        if len(methods) == 1:  # beside SBP the report starts from what SBP holds, not from plain training
            return Built(model, told=lambda: held(report))
    return Built(model)


def held(report: hb.Report) -> dict[str, float]:
    if not report.before:
        return {}
    return {"held_before_gib": report.before / 2**30, "held_after_gib": report.after / 2**30}


def inputs(name: str, batch: int) -> Tensor:
    x = images(name, batch)
    return x.to(memory_format=torch.channels_last) if name == "resnet" else x


def predicted(figures: dict, plain: dict) -> dict[str, float]:
    if "held_before_gib" not in figures:
        return {}
    peak = plain["peak_gib"] - (figures["held_before_gib"] - figures["held_after_gib"])
    return {"predicted_peak_gib": round(peak, 3), "peak_error": round(peak / figures["peak_gib"] - 1, 3)}


def predictions(rows: list[dict]) -> str:
    lines = []
    for r in (r for r in rows if "peak_error" in r):
        error = f"{r['peak_error']:+.1%}" + ("" if abs(r["peak_error"]) <= ALLOWED_ERROR else ", too far off")
        lines.append(f"{r['model']}, {r['method']}: peak {r['peak_gib']:.2f} GiB, predicted {r['predicted_peak_gib']:.2f} ({error})")
    return "\n".join(lines)


if __name__ == "__main__":
    main(
        Benchmark(
            __file__, __doc__, NAMES, BATCH, ROWS, build, images=inputs, further=predicted, remarks=predictions, own_plain=True, limit=270
        )
    )
