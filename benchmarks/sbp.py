"""Time and peak memory of SBP against what one would use instead, on one GPU, in one run.

    python benchmarks/sbp.py                 ViT-B/16 (batch 256) and ConvNeXt-T (batch 128), 224 px, weights in bf16
    python benchmarks/sbp.py --model vit     one of them

One process a row: all compile side by side, then they are timed one after the other, plain first and last. A step is forward and
backward.

    step_ms    median of CUDA events over steps that nobody waits for, as in training
    host_ms    what the CPU needs to send a step off: where it is as large as step_ms, the GPU waits for the CPU
    peak_gib   `max_memory_allocated` during a step above what is allocated before it: weights, gradients and the batch

Rows are appended to benchmarks/results/sbp.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

import halfback as hb

RESULTS = Path(__file__).parent / "results" / "sbp.jsonl"
STEPS, WARMUP = 30, 5
BATCH = {"vit": 256, "convnext": 128}
NAMES = {"vit": "ViT-B/16", "convnext": "ConvNeXt-T"}
LAST8 = "layers='last 2/3'"

# name -> (compiled, what is applied)
ROWS = {
    "vit": {
        "plain": (True, "plain"),
        "plain, eager": (False, "plain"),
        "checkpointing": (True, "checkpoint"),
        "accumulation, 2 micro-batches": (True, "accumulate"),
        "compile's budget 0.5": (True, "budget"),
        "Algorithm 1, last 8": (True, "algorithm1"),
        "Algorithm 1, last 8, eager": (False, "algorithm1"),
        "sbp query, last 8": (True, f"sbp({LAST8})"),
        "sbp qkv, last 8": (True, f"sbp({LAST8}, attention='qkv')"),
        "skiptokens, last 8": (True, f"skiptokens({LAST8})"),
        "sbp query, last 8, + recompute": (True, f"sbp({LAST8})+recompute"),
        "sbp qkv, all 12, + recompute": (True, "sbp(layers='all', attention='qkv')+recompute"),
        "sbp query, last 8, eager": (False, f"sbp({LAST8})"),
    },
    "convnext": {
        "plain": (True, "plain"),
        "plain, eager": (False, "plain"),
        "checkpointing": (True, "checkpoint"),
        "accumulation, 2 micro-batches": (True, "accumulate"),
        "compile's budget 0.5": (True, "budget"),
        "sbp, paper's layers": (True, "sbp(layers='paper')"),
        "sbp, all blocks of three stages": (True, "sbp(layers=('features.1.*', 'features.3.*', 'features.5.*'))"),
        "sbp, paper's layers, eager": (False, "sbp(layers='paper')"),
    },
}


def build(name: str, method: str, device: str):
    """The model with the method applied, and what must run before each step. torchvision's own models, unmodified."""
    from torchvision.models import convnext_tiny, vit_b_16

    torch.manual_seed(0)
    model = vit_b_16() if name == "vit" else convnext_tiny(stochastic_depth_prob=0.0)
    model = model.to(device, torch.bfloat16).train()
    before = lambda: None  # noqa: E731
    if method == "checkpoint":
        hb.apply_(model, hb.Recompute())  # alone it is torch's checkpoint around every block
    elif method == "algorithm1":
        from algorithm1 import Algorithm1, Masks

        masks, drawn = Masks(14, device), {}

        def before() -> None:
            drawn["keep"], drawn["drop"] = masks.draw()

        layers = model.encoder.layers
        for i in range(4, 12):
            layers[i] = Algorithm1(layers[i], drawn)
    elif method == "budget":
        torch._functorch.config.activation_memory_budget = 0.5
    elif method not in ("plain", "accumulate"):
        hb.apply_(model, *hb.parse(method))
    return model, before


def step(model, x, y) -> None:
    F.cross_entropy(model(x).float(), y).backward()


def measure(model, run) -> dict[str, float]:
    """Time and peak of run(); the peak with gradients already there, so that it is above them."""
    for _ in range(WARMUP):
        run()
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    began = time.perf_counter()
    for event in events[:-1]:  # as in training, the host runs ahead and gradients are made anew
        event.record()
        model.zero_grad(set_to_none=True)
        run()
    events[-1].record()
    host = (time.perf_counter() - began) / STEPS
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    times.sort()
    p20, p50, p80 = (times[int(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
    return {"step_ms": p50, "step_ms_p20": p20, "step_ms_p80": p80, "host_ms": 1000 * host, "peak_gib": peak / 2**30}


def kernels(run) -> None:
    """Where a step's time goes, into the row's log."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total, count = sum(e.self_device_time_total for e in events) / 1000, sum(e.count for e in events)
    print(f"{total:8.3f} ms {count:4d} x  in all", flush=True)
    for e in events[:80]:
        print(f"{e.self_device_time_total / 1000:8.3f} ms {e.count:4d} x  {e.key[:90]}", flush=True)


def row(name: str, label: str, folder: Path) -> None:
    """One row, in its own process: compile, say so, wait for the word, measure."""
    compiled, method = ROWS[name][label]
    model, before = build(name, method, "cuda")
    micro = 2 if method == "accumulate" else 1
    x = torch.randn(BATCH[name] // micro, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(0, 1000, (BATCH[name] // micro,), device="cuda")
    forward = torch.compile(model, fullgraph=True) if compiled else model

    def run() -> None:
        for _ in range(micro):
            before()
            step(forward, x, y)

    began = time.time()
    run()
    run()
    torch.cuda.synchronize()
    compile_s = time.time() - began
    torch.cuda.empty_cache()
    if os.environ.get("HALFBACK_KERNELS"):
        kernels(run)
    word = 0
    stem = folder / label.replace(" ", "_").replace("/", "_")
    stem.with_suffix(".ready").touch()
    while True:
        while not stem.with_suffix(f".go{word}").exists():
            if stem.with_suffix(".stop").exists():
                return
            time.sleep(0.1)
        figures = {**measure(model, run), "compile_s": round(compile_s, 1)}
        torch.cuda.empty_cache()
        part = stem.with_suffix(f".part{word}")
        part.write_text(json.dumps(figures))
        part.rename(stem.with_suffix(f".done{word}"))
        word += 1


def benchmark(name: str, labels: list[str], folder: Path, limit: float) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    stems = {label: folder / label.replace(" ", "_").replace("/", "_") for label in labels}
    processes = {}
    for label in labels:
        log = stems[label].with_suffix(".log").open("w")
        command = [sys.executable, __file__, "--row", label, "--model", name, "--folder", str(folder)]
        processes[label] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.time() + limit

    def wait(label: str, suffix: str) -> bool:
        while not stems[label].with_suffix(suffix).exists():
            if processes[label].poll() is not None or time.time() > deadline:
                return False
            time.sleep(0.1)
        return True

    ready = [label for label in labels if wait(label, ".ready")]
    for label in set(labels) - set(ready):
        print(f"{NAMES[name]}: {label} failed:\n" + stems[label].with_suffix(".log").read_text()[-1500:], flush=True)
        processes[label].kill()
    figures: dict[str, dict] = {}
    for turn, label in [*((0, label) for label in ready), *((1, label) for label in ready[:1])]:
        stems[label].with_suffix(f".go{turn}").touch()
        if wait(label, f".done{turn}"):
            key = label if turn == 0 else f"{label}, again"
            figures[key] = json.loads(stems[label].with_suffix(f".done{turn}").read_text())
        else:
            print(f"{NAMES[name]}: {label} failed:\n" + stems[label].with_suffix(".log").read_text()[-1500:], flush=True)
    for label in labels:
        stems[label].with_suffix(".stop").touch()
        processes[label].kill()
    plain = figures.get("plain")
    return [finish(name, label, f, plain) for label, f in figures.items()] if plain else []


def finish(name: str, label: str, figures: dict, plain: dict) -> dict:
    base = label.removesuffix(", again")
    return {
        "model": NAMES[name],
        "method": label,
        "text": ROWS[name][base][1],
        "compiled": ROWS[name][base][0],
        "batch": BATCH[name],
        **{k: round(v, 3) for k, v in figures.items()},
        "time_ratio": round(figures["step_ms"] / plain["step_ms"], 3),
        "peak_ratio": round(figures["peak_gib"] / plain["peak_gib"], 3),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("HALFBACK_COMMIT", "unknown"),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "seed": 0,
    }


def check() -> None:
    """Attention of kept positions on this GPU's kernels against its definition, before anything is timed."""
    from halfback.attention import kept_attention
    from halfback.positions import Positions

    for dtype, kernel, allowed in ((torch.bfloat16, "flash", 3e-2), (torch.float32, "efficient", 5e-3)):
        for causal in (False, True):
            torch.manual_seed(0)
            n = 197
            at = Positions.of([0, *range(1, n, 2)], (n,))
            index = at.index.cuda()
            q, k, v = (torch.randn(4, 6, n, 64, device="cuda", dtype=dtype) for _ in range(3))
            parts = [x.index_select(2, i).requires_grad_() for x in (q, k, v) for i in (index[0, : at.k], index[0, at.k :])]
            order = index[1] if causal else torch.arange(n, device="cuda")
            joined = [torch.cat((parts[i], parts[i + 1]), 2).index_select(2, order).detach() for i in (0, 2, 4)]
            out1, _, _ = kept_attention(parts[0], parts[2], parts[4], *joined, None, index, kernel, causal, None)
            weight = torch.randn(out1.shape, device="cuda", dtype=torch.float64)
            (out1 * weight).sum().backward()
            exact = [p.detach().double().requires_grad_() for p in parts]
            whole = [torch.cat(exact[i : i + 2], 2).index_select(2, index[1]) for i in (0, 2, 4)]
            m = whole[0] @ whole[1].mT / 8.0
            if causal:
                m = m.masked_fill(~torch.ones(n, n, dtype=torch.bool, device="cuda").tril(), float("-inf"))
            s = m.softmax(-1)
            a = s @ whole[2]
            dA = torch.zeros_like(a).index_copy(2, index[0, : at.k], weight)
            dM = s * (dA @ whole[2].mT - (dA * a).sum(-1, keepdim=True))
            keep = index[0, : at.k]
            dM, s = (x.index_select(2, keep).index_select(3, keep) for x in (dM, s))
            want = (dM @ exact[2] / 8.0, dM.mT @ exact[0] / 8.0, s.mT @ weight)
            got = (parts[0].grad, parts[2].grad, parts[4].grad)
            worst = max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
            forward = (out1.double() - a.index_select(2, keep)).abs().max().item()
            print(f"check {kernel} {dtype} causal={causal}: gradient {worst:.1e}, forward {forward:.1e}", flush=True)
            assert worst < allowed and parts[1].grad is None and parts[3].grad is None


def table(rows: list[dict]) -> str:
    lines = [f"{'model':11} {'method':34} {'ms':>8} {'host':>8} {'GiB':>7} {'time':>6} {'peak':>6}  compile s"]
    for r in rows:
        lines.append(
            f"{r['model']:11} {r['method']:34} {r['step_ms']:8.2f} {r['host_ms']:8.2f} {r['peak_gib']:7.2f} "
            f"{r['time_ratio']:6.3f} {r['peak_ratio']:6.3f}  {r['compile_s']:.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(ROWS), action="append", help="which model; all if not given")
    parser.add_argument("--only", action="append", help="rows whose name contains this (plain is always measured)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where rows are appended")
    parser.add_argument("--limit", type=float, default=500, help="seconds for one model")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/halfback_bench"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        row(args.model[0], args.row, args.folder)
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/sbp.py: no GPU found. Time and peak are measured on one.")
    check()
    rows: list[dict] = []
    for name in args.model or ROWS:
        labels = [x for x in ROWS[name] if x == "plain" or not args.only or any(o in x for o in args.only)]
        rows += benchmark(name, labels, args.folder / f"{name}-{os.getpid()}", args.limit)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as f:
            f.writelines(json.dumps(r) + "\n" for r in rows if r["model"] == NAMES[name])
    print(table(rows))


if __name__ == "__main__":
    main()
