"""Time and peak memory of methods on one GPU, in one run: what the benchmarks of single methods share.

One process a row: all compile side by side, then they are timed one after the other, plain first and last. A step is forward and
backward.

    step_ms    median of CUDA events over steps that nobody waits for, as in training
    host_ms    what the CPU needs to send a step off: where it is as large as step_ms, the GPU waits for the CPU
    peak_gib   `max_memory_allocated` during a step above what is allocated before it: weights, gradients and the batch
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, WARMUP = 30, 5


def nothing(*_) -> None:
    return None


def images(name: str, batch: int) -> Tensor:
    return torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)


@dataclass
class Built:
    """A model with its method applied."""

    model: nn.Module
    before: Callable[[], None] = nothing  # runs before each forward
    told: Callable[[], dict] = dict  # further figures of a row, known after its first step


@dataclass
class Benchmark:
    """What a benchmark of its own says; models are known by a short name."""

    file: str  # the script, which is started once more for each row
    about: str
    names: dict[str, str]
    batch: dict[str, int]
    rows: dict[str, dict[str, tuple[bool, str]]]  # model -> label -> (compiled, what is applied)
    build: Callable[[str, str, str], Built]  # of model, what is applied, device
    images: Callable[[str, int], Tensor] = images
    check: Callable[[], None] = nothing  # before anything is timed
    further: Callable[[dict, dict], dict] = lambda figures, plain: {}  # fields that need the plain row's figures
    remarks: Callable[[list[dict]], str | None] = nothing  # what is printed before the table
    own_plain: bool = False  # rows are compared to the plain row of their kind, eager or compiled, and say so
    limit: float = 500

    @property
    def results(self) -> Path:
        return Path(self.file).parent / "results" / f"{Path(self.file).stem}.jsonl"

    def plain(self, name: str, label: str) -> str:
        """The row that a row is compared to."""
        return "plain, eager" if self.own_plain and not self.rows[name][label][0] else "plain"


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


def stem(folder: Path, label: str) -> Path:
    """Where the processes of a row leave word for each other. Without dots, as suffixes follow."""
    return folder / re.sub(r"\W+", "_", label)


def row(bench: Benchmark, name: str, label: str, folder: Path) -> None:
    """One row, in its own process: compile, say so, wait for the word, measure."""
    compiled, method = bench.rows[name][label]
    built = bench.build(name, method, "cuda")
    micro = 2 if method == "accumulate" else 1
    x = bench.images(name, bench.batch[name] // micro)
    y = torch.randint(0, 1000, (bench.batch[name] // micro,), device="cuda")
    forward = torch.compile(built.model, fullgraph=True) if compiled else built.model

    def run() -> None:
        for _ in range(micro):
            built.before()
            step(forward, x, y)

    began = time.time()
    run()
    told = {} if compiled else built.told()
    run()
    torch.cuda.synchronize()
    told["compile_s"] = round(time.time() - began, 1)
    if os.environ.get("HALFBACK_KERNELS"):
        kernels(run)
    torch.cuda.empty_cache()  # others need the memory while this one waits
    word, own = 0, stem(folder, label)
    own.with_suffix(".ready").touch()
    while True:
        while not own.with_suffix(f".go{word}").exists():
            if own.with_suffix(".stop").exists():
                return
            time.sleep(0.1)
        figures = {**measure(built.model, run), **told}
        torch.cuda.empty_cache()
        part = own.with_suffix(f".part{word}")
        part.write_text(json.dumps(figures))
        part.rename(own.with_suffix(f".done{word}"))
        word += 1


def measured(bench: Benchmark, name: str, labels: list[str], folder: Path, limit: float) -> list[dict]:
    """The rows of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    stems = {label: stem(folder, label) for label in labels}
    processes = {}
    for label in labels:
        log = stems[label].with_suffix(".log").open("w")
        command = [sys.executable, bench.file, "--row", label, "--model", name, "--folder", str(folder)]
        processes[label] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    began = time.time()

    def wait(label: str, suffix: str, until: float) -> bool:
        while not stems[label].with_suffix(suffix).exists():
            if processes[label].poll() is not None or time.time() > until:
                print(f"{bench.names[name]}: {label} failed:\n" + stems[label].with_suffix(".log").read_text()[-1500:], flush=True)
                processes[label].kill()
                return False
            time.sleep(0.1)
        return True

    ready = [label for label in labels if wait(label, ".ready", began + 0.7 * limit)]  # who hangs leaves time for the others
    figures: dict[str, dict] = {}
    for turn, label in [*((0, label) for label in ready), *((1, label) for label in ready[:1])]:
        stems[label].with_suffix(f".go{turn}").touch()
        if wait(label, f".done{turn}", began + limit):
            key = label if turn == 0 else f"{label}, again"
            figures[key] = json.loads(stems[label].with_suffix(f".done{turn}").read_text())
    for label in labels:
        stems[label].with_suffix(".stop").touch()
        processes[label].kill()
        processes[label].wait()
    return [r for label, f in figures.items() if (r := finish(bench, name, label, f, figures))]


def finish(bench: Benchmark, name: str, label: str, figures: dict, rows: dict[str, dict]) -> dict | None:
    base = label.removesuffix(", again")
    against = bench.plain(name, base)
    if against not in rows:
        print(f"{bench.names[name]}: {label} is left out, as {against} failed: {figures}", flush=True)
        return None
    plain = rows[against]
    compiled, text = bench.rows[name][base]
    return {
        "model": bench.names[name],
        "method": label,
        "text": text,
        "compiled": compiled,
        "batch": bench.batch[name],
        **{k: round(v, 3) for k, v in figures.items()},
        "time_ratio": round(figures["step_ms"] / plain["step_ms"], 3),
        "peak_ratio": round(figures["peak_gib"] / plain["peak_gib"], 3),
        **({"against": against} if bench.own_plain else {}),
        **bench.further(figures, plain),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": os.environ.get("HALFBACK_COMMIT", "unknown"),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "seed": 0,
    }


def table(rows: list[dict]) -> str:
    width = max([34, *(len(r["method"]) for r in rows)])
    lines = [f"{'model':11} {'method':{width}} {'ms':>8} {'host':>8} {'GiB':>7} {'time':>6} {'peak':>6}  compile s"]
    for r in rows:
        lines.append(
            f"{r['model']:11} {r['method']:{width}} {r['step_ms']:8.2f} {r['host_ms']:8.2f} {r['peak_gib']:7.2f} "
            f"{r['time_ratio']:6.3f} {r['peak_ratio']:6.3f}  {r['compile_s']:.0f}"
        )
    return "\n".join(lines)


def chosen(bench: Benchmark, name: str, only: list[str] | None) -> list[str]:
    """The labels that are asked for, and those that they are compared to."""
    rows = bench.rows[name]
    wanted = {label for label in rows if not only or any(o in label for o in only)}
    wanted |= {bench.plain(name, label) for label in wanted or rows}
    return [label for label in rows if label in wanted]


def main(bench: Benchmark) -> None:
    parser = argparse.ArgumentParser(description=bench.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(bench.rows), action="append", help="which model; all if not given")
    parser.add_argument("--only", action="append", help="rows whose name contains this (plain is always measured)")
    parser.add_argument("--out", type=Path, default=bench.results, help="where rows are appended")
    parser.add_argument("--limit", type=float, default=bench.limit, help="seconds for one model")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/halfback_bench"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        row(bench, args.model[0], args.row, args.folder)
        return
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks/{Path(bench.file).name}: no GPU found. Time and peak are measured on one.")
    bench.check()
    rows: list[dict] = []
    for name in args.model or bench.rows:
        own = measured(bench, name, chosen(bench, name, args.only), args.folder / f"{name}-{os.getpid()}", args.limit)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as f:
            f.writelines(json.dumps(r) + "\n" for r in own)
        rows += own
    if said := bench.remarks(rows):
        print(said)
    print(table(rows))
