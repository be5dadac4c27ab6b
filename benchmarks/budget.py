"""Do profiles and plans hold on a GPU? Predicted peaks and times against measured ones, in eager mode, weights in bf16.

    python benchmarks/budget.py                          ViT-B/16, ConvNeXt-T, GPT-2 and (profiles alone) ResNet-50
    python benchmarks/budget.py --part plan --model gpt2

profile   each method on each model: the peak of a step above weights, gradients and batch. `laptop_gib` is predicted on CPU tensors
          without contents, `predicted_gib` on GPU tensors without contents, `peak_gib` is the allocator's own
plan      plans for 0.6, 0.35 and 0.15 of the plain peak: predicted and measured peak and time; and what the process takes on the
          device in training with AdamW (`device_gib`), against what the plan says (`total_gib`)
          `predicted_time`: what the plan says, which has tried a few steps; `estimated_time`: what it knew before that
          `room_needed`: the share of `total_gib` that the allocator has to be given for training to run
sweep     plans for 20 budgets: less budget never means more memory. It needs no GPU

HALFBACK_PREFER=exact or =fast plans with that preference alone.
One process a model; plans have the GPU for themselves. Rows are appended to benchmarks/results/budget.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path

import torch

import halfback as hb
from halfback.batches import loss_of
from halfback.bench.measure import measure
from halfback.planner import Impossible, Planner, plan_with

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "budget.jsonl"
NAMES = {"vit": "ViT-B/16", "convnext": "ConvNeXt-T", "resnet": "ResNet-50", "gpt2": "GPT-2"}
BUDGETS = (0.6, 0.35, 0.15)
DROPIT = {"resnet": "dropit(keep=0.2)", "convnext": "dropit(keep=0.2)"}
METHODS = (
    "exact",
    "recompute",
    "recompute(parts=4)",
    "lean",
    "lean+recompute(sparing=True)",
    "dropit",
    "sbp(keep=0.5)",
    "sbp(keep=0.5)+lean",
    "sbp(keep=0.5)+recompute",
    "skiptokens(keep=0.5)",
    "lean+chunkedloss",
)
APPLY = {"skiptokens(keep=0.5)": ("vit",), "lean+chunkedloss": ("gpt2",), "recompute(parts=4)": ("vit", "convnext", "gpt2")}
ALLOWED = 0.05  # by how much a predicted peak may be off


def make(name: str, device: str):
    """The model and a batch, on the GPU or, without memory, on the meta device."""
    batch = {"vit": 256, "convnext": 256, "resnet": 256, "gpt2": 16}[name]
    torch.manual_seed(0)
    with torch.device(device):
        if name == "gpt2":
            from transformers import GPT2Config, GPT2LMHeadModel

            model = GPT2LMHeadModel(GPT2Config(use_cache=False, loss_type="ForCausalLM")).bfloat16()
            ids = torch.randint(0, 50257, (batch, 1024)) if device == "cuda" else torch.zeros(batch, 1024, dtype=torch.int64)
            return model.train(), {"input_ids": ids, "labels": ids}
        from torchvision import models

        model = {"vit": models.vit_b_16, "convnext": models.convnext_tiny, "resnet": models.resnet50}[name]().bfloat16()
        x = torch.empty(batch, 3, 224, 224, dtype=torch.bfloat16)
        x = x.normal_() if device == "cuda" else x
        y = torch.zeros(batch, dtype=torch.int64)
    if name == "resnet":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    return model.train(), (x, y)


def surroundings() -> dict:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "commit": os.environ.get("HALFBACK_COMMIT", "unknown"),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "seed": 0,
    }


def row(part: str, name: str, **figures) -> dict:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    return {"part": part, "model": NAMES[name], **rounded, **surroundings()}


def peak_of(model, batch) -> int:
    """What CUDA had allocated at most during a step, above what was there before it; gradients are."""
    for _ in range(2):
        loss_of(model, batch).backward()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss_of(model, batch).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def profiles(name: str):
    """Each method, in turn, on the laptop's and on the GPU's model."""
    laptop, small = make(name, "meta")
    model, batch = make(name, "cuda")
    for text in METHODS:
        if name not in APPLY.get(text, NAMES):
            continue
        text = DROPIT.get(name, "dropit(keep=0.1, activation_bits=4)") if text == "dropit" else text
        try:
            for m in (laptop, model):
                if methods := hb.parse(text):
                    hb.apply_(m, *methods)
            began = time.time()
            foreseen = hb.profile(laptop, small, device="cuda")
            seconds = time.time() - began
            predicted = hb.profile(model, batch)
            peak = peak_of(model, batch)
            yield row(
                "profile",
                name,
                method=text,
                laptop_gib=foreseen.peak / 2**30,
                predicted_gib=predicted.peak / 2**30,
                peak_gib=peak / 2**30,
                laptop_error=foreseen.peak / peak - 1,
                predicted_error=predicted.peak / peak - 1,
                held_gib=predicted.held / 2**30,
                laptop_held_gib=foreseen.held / 2**30,
                laptop_s=seconds,
            )
        except Exception:
            print(f"{name} {text}", traceback.format_exc()[-1500:], file=sys.stderr, flush=True)
        model.zero_grad(set_to_none=True)
        hb.remove_(laptop), hb.remove_(model)


def train(model, batch, optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    torch.cuda.synchronize()


def room_needed(model, batch, total: int) -> float | None:
    """How much of what the plan says the process may take on the device training really has to be given: the least of a few tries."""
    return next((factor for factor in (0.9, 1.0, 1.1, 1.25) if fits(model, batch, int(factor * total))), None)


def fits(model, batch, total: int) -> bool:
    """Does training run when the process may take no more than so many bytes on the device?"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    context = whole - free - torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((total - context) / whole)
    try:
        train(model, batch, optimizer)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def on_device(model, batch) -> dict[str, float]:
    """What the process takes on the device in training, as the driver sees it; and of that, what the allocator has reserved, and what
    was allocated at most."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(model, batch, optimizer)
    free, whole = torch.cuda.mem_get_info()
    taken = {"device_gib": whole - free, "reserved_gib": torch.cuda.memory_reserved(), "allocated_gib": torch.cuda.max_memory_allocated()}
    return {k: v / 2**30 for k, v in taken.items()}


def plans(name: str):
    model, batch = make(name, "cuda")
    began = time.time()
    planner = Planner(model, batch)
    plain = measure(model, lambda: loss_of(model, batch).backward())
    for prefer, budgets in (("exact", BUDGETS), ("fast", BUDGETS[:2])):
        if prefer != os.environ.get("HALFBACK_PREFER", prefer):
            continue
        for budget in budgets:
            yield one_plan(name, model, batch, planner, plain, budget, prefer)
            print(f"{name} {prefer} {budget}: {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    again = measure(model, lambda: loss_of(model, batch).backward())
    print(f"plain again: {again['step_ms'] / plain['step_ms']:.3f}; not timed alone: {sorted(planner.clock.failed)}", file=sys.stderr)


def one_plan(name, model, batch, planner, plain, budget, prefer) -> dict:
    model.zero_grad(set_to_none=True)
    began = time.time()
    try:
        plan = plan_with(planner, budget, prefer)
    except Impossible as e:
        smallest = e.smallest
        return row(
            "plan", name, budget=budget, prefer=prefer, impossible=True, smallest=smallest.peak / planner.plain.peak, label=str(e)[:400]
        )
    seconds = time.time() - began
    hb.apply_(model, plan)
    try:
        figures = measure(model, lambda: loss_of(model, batch).backward())
        taken = on_device(model, batch) | {"room_needed": room_needed(model, batch, plan.total)}
    finally:
        hb.remove_(model)
        model.zero_grad(set_to_none=True)
    allowed = budget * plain["peak_gib"]
    return row(
        "plan",
        name,
        budget=budget,
        prefer=prefer,
        method=" + ".join(str(m) for m in plan.methods) or "exact",
        label=str(plan).splitlines()[0],
        plan_s=seconds,
        predicted_gib=plan.peak / 2**30,
        peak_gib=figures["peak_gib"],
        allowed_gib=allowed,
        used=figures["peak_gib"] / allowed,
        predicted_time=plan.time_ratio,
        timed=plan.timed,
        estimated_time=planner.counted[plan.methods].seconds / planner.seconds if plan.methods else 1.0,
        time_ratio=figures["step_ms"] / plain["step_ms"],
        time_error=plan.time_ratio / (figures["step_ms"] / plain["step_ms"]) - 1,
        step_ms=figures["step_ms"],
        host_ms=figures["host_ms"],
        total_gib=plan.total / 2**30,
        **taken,
    )


def sweeps(name: str):
    """20 budgets on tensors without contents, for which no GPU is needed."""
    model, batch = make(name, "meta")
    planner = Planner(model, batch, device="cuda")
    peaks = []
    for i in range(20, 0, -1):
        try:
            peaks.append(plan_with(planner, i / 20).peak / planner.plain.peak)
        except Impossible:
            break
    rounded = [round(p, 4) for p in peaks]
    yield row("sweep", name, budgets=20, possible=len(peaks), peaks=rounded, monotone=peaks == sorted(peaks, reverse=True))


PARTS = {"profile": profiles, "plan": plans, "sweep": sweeps}


def table(rows: list[dict]) -> str:
    lines = []
    for r in rows:
        if r["part"] == "profile":
            mark = "" if max(abs(r["laptop_error"]), abs(r["predicted_error"])) <= ALLOWED else "  TOO FAR OFF"
            lines.append(
                f"{r['model']:11} {r['method']:36} peak {r['peak_gib']:6.2f} GiB, predicted {r['predicted_error']:+.1%}, "
                f"on a laptop {r['laptop_error']:+.1%}{mark}"
            )
        elif r["part"] == "plan" and not r.get("impossible"):
            mark = "" if r["used"] <= 1 and abs(r["time_error"]) <= 0.1 else "  MISSED"
            lines.append(
                f"{r['model']:11} {r['budget']:5} {r['prefer']:5} used {r['used']:.3f}, time {r['time_ratio']:.3f} "
                f"({r['time_error']:+.1%}; estimated {r['estimated_time']:.2f}), "
                f"needs {r['room_needed']} of {r['total_gib']:.2f} GiB{mark}  {r['label']}"
            )
        elif r["part"] == "plan":
            lines.append(f"{r['model']:11} {r['budget']:5} {r['prefer']:5} impossible, smallest {r['smallest']:.3f}")
        else:
            lines.append(f"{r['model']:11} sweep: {r['possible']} of {r['budgets']} possible, monotone: {r['monotone']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--model", choices=list(NAMES), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available() and args.part != ["sweep"]:
        sys.exit("benchmarks/budget.py: no GPU found. Predictions are compared with one.")
    models = args.model or list(NAMES)
    if args.one:
        with args.out.open("a") as f:
            for r in PARTS[args.part[0]](models[0]):
                f.write(json.dumps(r) + "\n")
                f.flush()
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    before = args.out.read_text().count("\n") if args.out.exists() else 0
    for part in args.part or PARTS:
        chosen = [m for m in models if part == "profile" or m != "resnet"]
        commands = [[sys.executable, __file__, "--one", "--part", part, "--model", m, "--out", str(args.out)] for m in chosen]
        if part == "profile":  # bytes are the same beside others, times are not
            for process in [subprocess.Popen(c) for c in commands]:
                process.wait()
        else:
            for c in commands:
                subprocess.run(c, check=False)
    print(table([json.loads(line) for line in args.out.read_text().splitlines()[before:]]))


if __name__ == "__main__":
    main()
