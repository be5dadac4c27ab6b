"""The same model trained with each method: what it costs, and what it saves.

Paired: for one seed every method starts from the same weights and sees the same batches in the same order. The methods of a seed
take turns, an epoch each, so that a machine that slows down slows all of them.

    accuracy   on the test set after the last epoch
    held       bytes alive for backward when the forward of one training batch ends
    peak       the most bytes alive at once during forward and backward of that batch, above weights, gradients and the batch
    step       the median time of a training step: forward, backward, optimizer

Held and peak can be counted on *fake* tensors, which have shapes and no contents: what a large model would hold on a GPU is known
on any machine, in seconds, to the byte. A kernel of ours counts there as one operation, which the fused one on a GPU is; its reference
on a CPU has more alive for a moment, so DropIT's peak is higher where it is counted on a CPU's real tensors.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import __version__
from .batches import loss_of, output_of
from .data import Data, load_data
from .extras import install
from .files import write_text
from .memory import profile
from .methods import parse
from .models import VIT_B16, load_model, small_vit
from .page import write_page
from .report import picture, readable, remarks, rows, table
from .rewrite import Report, apply_

METHODS = (
    "exact, recompute, lean, sbp(keep=0.5), sbp(keep=0.5, attention='qkv'), sbp(keep=0.5)+lean, "
    "dropit(keep=0.1, activation_bits=4), skiptokens(keep=0.5)"
)
MEASURES = ("accuracy", "loss", "held", "peak", "step_ms")
WARM_UP = 0.1  # the share of steps in which the learning rate rises


@dataclass(frozen=True)
class Settings:
    model: str = "small-vit"
    data: str = "digits"
    methods: str = METHODS
    seeds: int = 3
    epochs: int = 8
    batch: int = 64
    lr: float = 4e-3
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"compare: {name}={getattr(self, name)} must be at least 1.")
        if not self.lr > 0:
            raise ValueError(f"compare: lr={self.lr} must be above 0.")


# Methods as text


def split_list(text: str) -> list[str]:
    """The parts of a list, separated by the commas that stand in no parentheses."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text + ","):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and (depth == 0 or i == len(text)):
            found.append(text[start:i].strip())
            start = i + 1
    return [part for part in found if part]


def split_methods(text: str) -> list[str]:
    """The methods of a list. "exact" is among them."""
    found = split_list(text)
    for m in found:
        parse(m)
        if found.count(m) > 1:
            raise ValueError(f"compare: {m} is in the list of methods twice.")
    return found if "exact" in found else ["exact", *found]


def with_method(model: nn.Module, method: str) -> Report | None:
    parsed = parse(method)
    return apply_(model, *parsed) if parsed else None


# What is measured on one batch


def measured(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, int]:
    """Held and peak bytes of one training step; on a GPU the peak is the allocator's own."""
    seen = profile(model, (x, y), real=True, optimizer="none")
    return {"held": seen.held, "peak": seen.peak if seen.measured_peak is None else seen.measured_peak}


def foresee(method: str, batch: int = 64, dtype: torch.dtype = torch.bfloat16, **shape: Any) -> dict[str, int]:
    """Held and peak bytes of a ViT (ViT-B/16 unless told) in training, counted without its memory."""
    shape = shape or VIT_B16
    with torch.device("meta"):
        model = small_vit(**shape).to(dtype).train()
        x = torch.zeros(batch, shape["channels"], shape["image"], shape["image"], dtype=dtype)
        y = torch.zeros(batch, dtype=torch.int64)
    with_method(model, method)
    seen = profile(model, (x, y), optimizer="none")
    return {"held": seen.held, "peak": seen.peak}


# Training


@dataclass
class Run:
    """One model in training with one method."""

    method: str
    seed: int
    model: nn.Module
    report: Report | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def start(method: str, seed: int, model: nn.Module, settings: Settings, steps: int) -> Run:
    report = with_method(model, method)
    model.to(settings.device).train()
    warm = max(1, round(WARM_UP * steps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / warm, (1 + math.cos(math.pi * t / steps)) / 2))
    return Run(method, seed, model, report, optimizer, schedule)


def train_epoch(run: Run, data: Data, epoch: int, batch: int, tick: Callable[[], Any]) -> None:
    """One epoch. The seed is set here, so that data order and the model's own noise are the same for all methods."""
    torch.manual_seed(1000 * run.seed + epoch)
    run.model.train()
    run.losses.clear()
    for index in torch.randperm(len(data.y_train)).split(batch):
        if len(index) == batch or len(data.y_train) < batch:
            index = index.to(data.x_train.device)
            run.losses.append(_step(run, data.x_train[index], data.y_train[index]))
            tick()


def _step(run: Run, x: Tensor, y: Tensor) -> float:
    begin = time.perf_counter()
    run.optimizer.zero_grad()
    loss = loss_of(run.model, (x, y))
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.schedule.step()
    value = loss.item()  # waits for a GPU
    if x.is_cuda:
        torch.cuda.synchronize()
    run.times.append(time.perf_counter() - begin)
    return value


def finish(run: Run, data: Data, batch: int) -> dict[str, Any]:
    x, y = data.x_train[:batch].clone(), data.y_train[:batch].clone()  # a slice would hold the whole set
    out = {"seed": run.seed, "accuracy": accuracy(run.model, data, batch), "loss": statistics.fmean(run.losses)}
    run.model.train()
    run.optimizer.zero_grad()
    return {
        **out,
        **measured(run.model, x, y),
        "step_ms": 1000 * statistics.median(run.times),
        "seconds": sum(run.times),
    }


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, batch: int) -> float:
    model.eval()
    right = 0
    for x, y in zip(data.x_test.split(batch), data.y_test.split(batch), strict=True):
        out = model(x)
        right += int((output_of(out).argmax(1) == y).sum())
    return right / len(data.y_test)


def train_all(settings: Settings, methods: list[str], data: Data, bar: Any) -> list[dict[str, Any]]:
    """Every method with every seed; one entry a method."""
    steps = settings.epochs * steps_per_epoch(settings, data)
    entries: list[dict[str, Any]] = [{"method": m, "report": "", "seeds": []} for m in methods]
    for seed in range(settings.seeds):
        torch.manual_seed(seed)
        model = load_model(settings.model, data.shape, data.classes)
        runs = [start(m, seed, copy.deepcopy(model), settings, steps) for m in methods]
        for epoch in range(settings.epochs):
            for run in runs:
                bar.set_description(f"seed {seed + 1} of {settings.seeds}, {run.method}"[:60], refresh=False)
                train_epoch(run, data, epoch, settings.batch, bar.update)
        for run, entry in zip(runs, entries, strict=True):
            entry["seeds"].append(finish(run, data, settings.batch))
            entry["report"] = str(run.report or "")
    return entries


def steps_per_epoch(settings: Settings, data: Data) -> int:
    return max(1, len(data.y_train) // settings.batch)


# The result


def summarize(entries: list[dict[str, Any]]) -> None:
    """Adds to each entry means, deviations over seeds, ratios to the first, and the paired difference in accuracy."""
    first = entries[0]
    for entry in entries:
        values = {name: [s[name] for s in entry["seeds"]] for name in MEASURES}
        entry["mean"] = {name: statistics.fmean(v) for name, v in values.items()}
        entry["std"] = {name: statistics.stdev(v) if len(v) > 1 else None for name, v in values.items()}
        entry["ratio"] = {name: entry["mean"][name] / first["mean"][name] for name in ("held", "peak", "step_ms")}
        pairs = zip(entry["seeds"], first["seeds"], strict=True)
        entry["accuracy_differences"] = [a["accuracy"] - b["accuracy"] for a, b in pairs]
        entry["changes_forward"] = any(m.changes_forward for m in parse(entry["method"]))


def screen(methods: list[str]) -> str:
    """What a ViT-B/16 would hold, for who has no GPU at hand."""
    cells, first = [["method", "held", "ratio", "peak", "ratio"]], None
    for method in methods:
        try:
            seen = foresee(method)
        except ValueError as e:
            cells.append([method, f"does not apply: {e}"[:60], "", "", ""])
            continue
        first = first or seen
        ratios = {k: f"{seen[k] / first[k]:.2f}" for k in seen}
        cells.append([method, readable(seen["held"]), ratios["held"], readable(seen["peak"]), ratios["peak"]])
    return "ViT-B/16 in training on a GPU: batch 64, 224 pixels, bf16. Counted on tensors without contents.\n\n" + rows(cells)


def surroundings(device: str) -> dict[str, Any]:
    """Where and when: enough to tell two results apart. HALFBACK_COMMIT tells the commit where there is no repository."""
    home = Path(__file__).resolve().parents[1]
    try:
        done = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        commit = done.stdout.strip() if done.returncode == 0 and (home / ".git").exists() else None
    except (OSError, subprocess.SubprocessError):
        commit = None
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or platform.machine()
    versions = {"halfback": __version__, "torch": torch.__version__, "python": platform.python_version()}
    threads = torch.get_num_threads()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "date": date,
        "device": device,
        "device_name": name,
        "threads": threads,
        "versions": versions,
        "commit": os.environ.get("HALFBACK_COMMIT") or commit,
    }


def made_of(device: str) -> dict[str, Any]:
    """When, where and by what a page was made."""
    found = surroundings(device)
    return {"date": found["date"], "device": found["device_name"], "versions": found["versions"]}


def compare(settings: Settings, out: Path, say: Callable[[str], Any] = print, html: Path | None = None) -> dict[str, Any]:
    """Train, print a table, write compare.json and compare.png to `out`, and a page to `html`."""
    methods = split_methods(settings.methods)
    tqdm = _needed("tqdm").tqdm
    _needed("matplotlib")
    data = _on_device(load_data(settings.data), settings.device)
    out.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(enabled=True):
        _rehearse(settings, methods, data)
        say(screen(methods))
        total = settings.seeds * len(methods) * settings.epochs * steps_per_epoch(settings, data)
        counts = f"{len(methods)} methods, seeds: {settings.seeds}, steps: {total}"
        say(f"\nTraining {settings.model} on {data.name}, {settings.device}: {counts}")
        often = 0.5 if sys.stderr.isatty() else 15  # seconds; a log file wants few lines
        begin = time.perf_counter()
        with tqdm(total=total, unit="step", mininterval=often, maxinterval=often) as bar:
            entries = train_all(settings, methods, data, bar)
    summarize(entries)
    result = {"settings": asdict(settings), **surroundings(settings.device), "seconds": time.perf_counter() - begin, "methods": entries}
    say("\n" + table(entries) + "\n")
    say("\n".join(remarks(entries, settings.seeds, settings.device)))
    write_text(out / "compare.json", json.dumps(result, indent=1) + "\n")
    seeds = f"{settings.seeds} seeds" if settings.seeds > 1 else "one seed"
    picture(entries, f"{settings.model} on {data.name}, {seeds}, {settings.device}", out / "compare.png")
    written = [out / "compare.json", out / "compare.png"]
    if html is not None:
        head = {"title": f"halfback compare {settings.model}", "subtitle": f"{settings.model} on {data.name}, {seeds}, {settings.device}"}
        write_page(html, {**head, "made": made_of(settings.device), "compare": entries})
        written.append(html)
    say(f"\nWritten: {', '.join(map(str, written))}")
    return result


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as e:
        raise ValueError(f"compare needs {package}: {install(package)}.") from e


def _on_device(data: Data, device: str) -> Data:
    try:
        tensors = [t.to(device) for t in (data.x_train, data.y_train, data.x_test, data.y_test)]
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"compare: device={device!r} cannot be used: {str(e).splitlines()[0]} Devices: cpu, cuda.") from e
    return Data(data.name, *tensors)


def _rehearse(settings: Settings, methods: list[str], data: Data) -> None:
    """One forward of each method, so that what cannot work is known before the training."""
    x = data.x_train[: min(2, len(data.y_train))]
    for method in methods:
        model = load_model(settings.model, data.shape, data.classes).to(settings.device).train()
        with_method(model, method)
        out = model(x)
        out = output_of(out)
        if not isinstance(out, Tensor) or out.ndim != 2 or out.shape[1] < data.classes:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"compare: {settings.model} returns {found} for {len(x)} images; wanted ({len(x)}, {data.classes}): a score for each class."
            )
