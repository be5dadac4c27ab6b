"""The training loop: one that can be read, stopped at any moment, and continued to the same weights.

    for each step of each epoch:
        batch = the epoch's order, augmented on the device        a pure function of (seed, epoch, step)
        loss  = cross entropy of the model's scores, in autocast
        backward, clip, optimizer, averaged weights
        now and then a checkpoint; after each epoch a test

Everything that a step draws is seeded from (seed, step), so a checkpoint holds no random state but where the methods' own draws stand.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import memory, planner, rewrite
from ..batches import output_of
from ..methods import from_json
from ..models import load_for
from ..monitor import Monitor
from ..report import readable
from ..untouched import applied_to
from . import checkpoint
from .augment import Augment, normalise
from .record import Recorder, write_json
from .sets import DataSet, batches, load_set, order, seed_from
from .settings import Settings, Stopped, methods_of

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
TESTED = 1000  # samples at once; without gradients they are light
LOOKED = 50  # steps between looks at the loss, which wait for the device
STOPPED = 75  # exit code of a training that was told to stop, and can go on
TOP = 5


# The pieces


def rate(settings: Settings, step: int, per_epoch: int) -> float:
    """The learning rate of a step."""
    total, warm = settings.epochs * per_epoch, settings.warmup * per_epoch
    if step < warm:
        return settings.lr * (step + 1) / (warm + 1)
    done = (step - warm) / max(1, total - warm)
    if settings.schedule == "cosine":
        return settings.lr * (1 + math.cos(math.pi * done)) / 2
    if settings.schedule == "step":
        return settings.lr * settings.fall ** sum(step / total >= m for m in settings.milestones)
    return settings.lr


def make_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = trained if settings.decays == "all" else [p for p in trained if p.ndim > 1]
    others = [] if settings.decays == "all" else [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    fused = settings.device.startswith("cuda")
    if settings.optimizer == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, settings.lr, momentum=settings.momentum, nesterov=nesterov, fused=fused)
    return torch.optim.AdamW(groups, settings.lr, betas=settings.betas, fused=fused)


class Averaged:
    """A moving average of the weights, in a model of its own."""

    def __init__(self, model: nn.Module, decay: float):
        self.model, self.decay = copy.deepcopy(model).eval().requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))  # the first weights are soon forgotten
        own: Any = list(self.model.parameters())
        new: Any = list(model.parameters())
        torch._foreach_lerp_(own, new, 1 - decay)
        for a, b in zip(self.model.buffers(), model.buffers(), strict=True):
            a.copy_(b)


def scores_of(model: Callable, x: Tensor) -> Tensor:
    return output_of(model(x))


def loss_from(scores: Tensor, y: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross entropy with classes or soft targets; of texts, over all tokens."""
    if scores.ndim == 3 and y.ndim == 2:
        scores, y = scores.flatten(0, 1), y.flatten()
    return F.cross_entropy(scores, y, label_smoothing=smoothing, reduction=reduction)


# The training


class Training:
    """One training, in a folder of its own."""

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], Any] = print):
        self.settings, self.folder, self.say = settings, folder, say
        self.device = usable(settings.device)
        torch.backends.cudnn.benchmark = True  # shapes do not change
        self.data = self._data()
        self.per_epoch = len(self.data.train) // settings.batch
        if not self.per_epoch:
            raise ValueError(f"batch {settings.batch} is more than the {len(self.data.train)} samples of {settings.data}.")
        self.steps = settings.epochs * self.per_epoch
        self.model = self._model()
        self.averaged = Averaged(self.model, settings.ema) if settings.ema is not None else None
        self.methods = self._methods()
        self.report = str(rewrite.apply_(self.model, *self.methods)) if self.methods else ""
        self.optimizer = make_optimizer(settings, self.model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "fp16")
        self.run: Any = torch.compile(self.model) if settings.compile else self.model
        self.augment = Augment(
            settings.crop, settings.flip, settings.randaugment, settings.magnitude, settings.erase, settings.mixup, settings.cutmix
        )
        self.generator = torch.Generator(self.device)
        self.monitor = Monitor(self.model, settings.monitor) if settings.monitor and self.methods else None
        self.step = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # of the epoch so far
        self.seconds = 0.0
        self.peak = Peak(self.model, self.device)
        self.best = -math.inf
        self.last: dict[str, Any] = {}
        self.held, self.why_not_held = self._count_held()

    # Set up

    def _data(self) -> DataSet:
        s = self.settings
        root = None if s.root is None else Path(s.root)
        return load_set(s.data, root=root, validation=s.validation, seed=s.seed, size=s.size, seq=s.seq).to(self.device)

    def _model(self) -> nn.Module:
        s = self.settings
        torch.manual_seed(s.seed)
        model = load_for(s.model, self.data.kind, self.data.shape, self.data.classes, s.drop_path).to(self.device)
        if s.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, y = self._batch(torch.arange(2), 0, augmented=False)
        with torch.no_grad(), self.autocast():
            out = scores_of(model.eval(), x)
        wanted = (*y.shape, self.data.classes)
        if not isinstance(out, Tensor) or out.shape != wanted:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"model {s.model!r} returns {found} for {len(x)} samples of {s.data}; wanted {wanted}: a score for each class."
            )
        return model.train()

    def _methods(self) -> tuple[Any, ...]:
        """As asked for; a budget is planned once, and then the plan holds."""
        path = self.folder / "methods.json"
        if self.settings.budget is None:
            return methods_of(self.settings.method)
        if path.is_file():
            return tuple(from_json(m) for m in json.loads(path.read_text()))
        text = self.settings.budget
        budget = float(text) if text.replace(".", "", 1).isdigit() and float(text) <= 1 else text
        plan = planner.plan(self.model, self._one_batch(), budget, optimizer=self.settings.optimizer)
        self.say(str(plan))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, [m.to_json() for m in plan.methods])
        return plan.methods

    def _one_batch(self) -> Callable[[], Tensor]:
        """A batch as plan and profile take it: a function, as the loss is computed in autocast."""
        x, y = self._batch(torch.arange(self.settings.micro) % len(self.data.train), 0)
        return lambda: self._loss(x, y)

    def _count_held(self) -> tuple[int | None, str]:
        if self.settings.compile:
            return None, "the compiler chooses what a compiled model holds"
        try:
            device = self.device.type if self.device.type in ("cpu", "cuda") else None
            return memory.profile(self.model, self._one_batch(), device=device, optimizer="none").held, ""
        except Exception as e:  # whatever a model does that tensors without contents cannot: it can be trained all the same
            return None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"

    # A step

    def autocast(self) -> Any:
        dtype = AUTOCAST.get(self.settings.dtype)
        return torch.autocast(self.device.type, dtype) if dtype is not None else contextlib.nullcontext()

    def _batch(self, indices: Tensor, epoch: int, augmented: bool = True) -> tuple[Tensor, Tensor]:
        x, y = self.data.train.batch(indices, epoch=epoch)
        return self.prepared(x, y, augmented)

    def prepared(self, x: Tensor, y: Any, augmented: bool) -> tuple[Tensor, Tensor]:
        """A batch as the model takes it: bytes become numbers, which are augmented in training."""
        if self.data.kind == "text":
            return x, y
        if augmented:
            x = self.augment.prepared(x, self.data.mean, self.data.deviation, self.generator)
            x, y = self.augment.mixed(x, y, self.generator, self.data.classes)
        else:
            x = normalise(x, self.data.mean, self.data.deviation)
        if self.settings.channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, y

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.autocast():
            return loss_from(scores_of(self.run, x), y, self.settings.smoothing)

    def seeded(self) -> None:
        """What this step draws is its own."""
        seed = seed_from("step", self.settings.seed, self.step)
        torch.manual_seed(seed)
        self.generator.manual_seed(seed)

    def train_step(self, x: Tensor, y: Any) -> None:
        s = self.settings
        self.seeded()
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, self.step, self.per_epoch)
        x, y = self.prepared(x, y, augmented=True)
        if self.monitor is not None:
            with self.autocast():
                self.monitor((x, y))
        exact = s.exact_tail and self.step >= (1 - s.exact_tail) * self.steps
        with rewrite.exact(self.model) if exact else contextlib.nullcontext():
            for part, target in zip(x.split(s.micro), y.split(s.micro), strict=True):
                loss = self._loss(part, target) / s.accumulate
                self.scaler.scale(loss).backward()
                self.loss += loss.detach()
        if s.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.averaged is not None:
            self.averaged.update(self.model, self.step)

    # The test

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Of the averaged weights, where there are any."""
        model = self.averaged.model if self.averaged is not None else self.model
        model.eval()
        part = self.data.test
        best, few, loss, count = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(4))
        for x, y in batches(part, torch.arange(len(part)), min(TESTED, max(self.settings.batch, 100)), epoch=0):
            x, y = self.prepared(x, y, augmented=False)
            with self.autocast():
                scores = scores_of(model, x)
            scores, y = scores.float().flatten(0, -2), y.flatten()
            ranked = scores.topk(min(TOP, self.data.classes), 1).indices == y[:, None]
            best += ranked[:, 0].sum()
            few += ranked.any(1).sum()
            loss += loss_from(scores, y, reduction="sum")
            count += len(y)
        self.model.train()
        n = count.item()
        found = {"top1": 100 * best.item() / n, "top5": 100 * few.item() / n, "test_loss": loss.item() / n}
        return {**found, "perplexity": math.exp(min(found["test_loss"], 700))} if self.data.kind == "text" else found

    # Checkpoints

    def save(self) -> None:
        optimizer, described = checkpoint.optimizer_state(self.optimizer)
        averaged = {} if self.averaged is None else {f"averaged/{k}": v for k, v in self.averaged.model.state_dict().items()}
        own = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        state = {
            "settings": self.settings.to_json(),
            "optimizer": described,
            "scaler": self.scaler.state_dict(),
            "draws": [state.mark() for applied in applied_to(self.model) for state in applied.states],
            "seconds": self.seconds,
            "best": None if self.best == -math.inf else self.best,
            "last": self.last,
        }
        tensors = {**own, **optimizer, **averaged, "loss": self.loss}
        checkpoint.save(self.folder / "checkpoints", self.step, tensors, state, self.settings.keep_last)

    def load(self, place: Path) -> None:
        tensors, state = checkpoint.load(place)
        self._fill(self.model, "model/", tensors, place)
        if self.averaged is not None:
            self._fill(self.averaged.model, "averaged/", tensors, place)
        checkpoint.load_optimizer(self.optimizer, tensors, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        draws = [d for applied in applied_to(self.model) for d in applied.states]
        for drawing, mark in zip(draws, state["draws"], strict=True):
            drawing.rewind(mark)
        self.loss.copy_(tensors["loss"])
        self.step, self.seconds, self.last = state["step"], state["seconds"], state["last"]
        self.best = -math.inf if state["best"] is None else state["best"]
        if self.monitor is not None:
            self.monitor.step = self.step

    def _fill(self, model: nn.Module, prefix: str, tensors: dict[str, Tensor], place: Path) -> None:
        own, tensors = model.state_dict(), {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if set(own) != set(tensors) or any(own[k].shape != tensors[k].shape for k in own):
            other = sorted(set(own) ^ set(tensors)) or [k for k in own if own[k].shape != tensors[k].shape]
            raise ValueError(f"{place} is a checkpoint of another model than {self.settings.model!r}: {other[0]} differs, of {len(other)}.")
        model.load_state_dict(tensors)

    def keep_best(self) -> None:
        """The weights that tested best, alone, for whoever uses the model."""
        from safetensors.torch import save_file

        model = self.averaged.model if self.averaged is not None else self.model
        own, same = checkpoint._unshared(dict(model.state_dict()))
        path = self.folder / "best.safetensors"
        save_file(own, str(path.with_suffix(".part")), {"same": repr(same)} if same else None)
        path.with_suffix(".part").replace(path)

    # All of it

    def nbytes(self) -> int:
        """Of a checkpoint: the weights, two more of them for AdamW or one for SGD, and averaged ones."""
        weights = sum(t.nbytes for t in self.model.state_dict().values())
        return weights * (2 + (self.settings.optimizer == "adamw") + (self.averaged is not None))

    def train(self, recorder: Recorder, bar: Any, stop: Stop) -> None:
        while self.step < self.steps:
            epoch, first = divmod(self.step, self.per_epoch)
            began = time.perf_counter()
            with self.peak:
                self._train_epoch(epoch, first, bar, stop)
            self._finish_epoch(epoch, first, time.perf_counter() - began, recorder)
            if not self.settings.save_every or self.step % self.settings.save_every == 0 or self.step == self.steps:
                self.save()
            if stop.asked and self.step < self.steps:
                self._stop(stop)

    def _train_epoch(self, epoch: int, first: int, bar: Any, stop: Stop) -> None:
        s = self.settings
        indices = order(len(self.data.train), s.seed, epoch)[: self.per_epoch * s.batch]
        began = time.perf_counter()
        for done, (x, y) in enumerate(batches(self.data.train, indices, s.batch, epoch=epoch, first=first), 1):
            self.train_step(x, y)
            bar.update(1)
            ends = self.step % self.per_epoch == 0
            if done % LOOKED == 0 or ends:
                self._look(bar, self.loss.item() / (first + done), done * s.batch / (time.perf_counter() - began), epoch)
            if s.save_every and self.step % s.save_every == 0 and not ends:
                self.save()
            if stop.asked and not ends:
                self.seconds += time.perf_counter() - began
                self._stop(stop)

    def _finish_epoch(self, epoch: int, first: int, spent: float, recorder: Recorder) -> None:
        """Test, and note it. A checkpoint comes after that: what is noted beyond the last one is dropped when training goes on."""
        steps = self.per_epoch - first
        self.seconds += spent
        row: dict[str, Any] = {
            "epoch": epoch + 1,
            "step": self.step,
            "lr": rate(self.settings, self.step - 1, self.per_epoch),
            "train_loss": self.loss.item() / self.per_epoch,
            **self.test(),
            "seconds": self.seconds,
            "step_ms": 1000 * spent / steps,
            "images_per_s": steps * self.settings.batch / spent,
            "peak": self.peak.most,
            "allocated": self.peak.allocated,
            "held": self.held,
        }
        if self.monitor is not None and self.monitor.history:
            row["monitor"] = self.monitor.history[-1]
        self.loss.zero_()
        self.last = row
        recorder.epoch(**row)
        if row["top1"] > self.best:
            self.best = row["top1"]
            if self.settings.best:
                self.keep_best()

    def _stop(self, stop: Stop) -> None:
        self.save()
        raise Stopped(f"stopped at step {self.step} of {self.steps}; saved. --resume goes on from there.", stop.code)

    def _look(self, bar: Any, loss: float, speed: float, epoch: int) -> None:
        if not math.isfinite(loss):
            raise ValueError(
                f"the training loss is {loss} in epoch {epoch + 1}, step {self.step}: training has diverged. Lower --lr, give --warmup or "
                "--clip, or with fp16 try bf16. The last checkpoint is from before."
            )
        told = {"loss": f"{loss:.3f}", "per s": f"{speed:.0f}"}
        if "top1" in self.last:
            told["top-1"] = f"{self.last['top1']:.1f}"
        if self.held is not None:
            told["held"] = readable(self.held)
        if self.peak.most is not None:
            told["peak"] = readable(self.peak.most)
        bar.set_postfix(told, refresh=False)

    def result(self, recorder: Recorder) -> dict[str, Any]:
        s, last = self.settings, recorder.rows[-1]
        times = [r["step_ms"] for r in recorder.rows]
        names = ("top1", "top5", "test_loss", "train_loss", *(("perplexity",) if "perplexity" in last else ()))
        return {
            "settings": s.to_json(),
            "seed": s.seed,
            "done": True,
            **{k: last[k] for k in names},
            "best_top1": self.best,
            "epochs": s.epochs,
            "steps": self.steps,
            "seconds": self.seconds,
            "step_ms": statistics.median(times[1:] or times),
            "held": self.held,
            **{k: max([r[k] for r in recorder.rows if r[k] is not None], default=None) for k in ("peak", "allocated")},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "methods": " + ".join(str(m) for m in self.methods) or "exact",
            "report": self.report,
            "device": s.device,
        }


class Peak:
    """On a GPU, the most that was allocated while training, above what stays there: weights, optimizer, data, and gradients."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model, device
        self.most: int | None = None
        self.allocated: int | None = None  # with all that stays

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def __exit__(self, *exc: Any) -> None:
        if self.device.type == "cuda" and not any(exc):
            gradients = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
            self.allocated = torch.cuda.max_memory_allocated(self.device)
            self.most = self.allocated - torch.cuda.memory_allocated(self.device) - gradients


def usable(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"device {device!r} cannot be used: {str(e).splitlines()[0]} Devices: cpu, cuda.") from e
    return found


class Stop:
    """SIGTERM and the first Ctrl-C: the step that runs is finished, and saved."""

    def __init__(self) -> None:
        self.asked = False
        self.code = STOPPED

    def __enter__(self) -> Stop:
        self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: Any) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.code = 130 if number == signal.SIGINT else STOPPED


@contextlib.contextmanager
def progress(total: int, done: int) -> Iterator[Any]:
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError as e:
        raise ValueError("train needs tqdm and safetensors: pip install halfback[train].") from e
    often = 0.5 if sys.stderr.isatty() else 30  # seconds; a log file wants few lines
    with tqdm(total=total, initial=done, unit="step", mininterval=often, maxinterval=often) as bar:
        yield bar


def train(settings: Settings, folder: Path, *, resume: bool = False, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Train, in `folder`, from where it stands; gives what result.json has."""
    folder = Path(folder)
    last = _started(settings, folder, resume)
    training = Training(settings, folder, say)
    checkpoint.check_room(folder, training.nbytes())
    if last is not None:
        training.load(last)
    recorder = Recorder(folder, settings, resume_at=training.step, tensorboard=settings.tensorboard)
    write_json(folder / "settings.json", settings.to_json())
    for note in (*training.data.notes, training.report, *_introduced(training)):
        if note:
            say(note)
    with Stop() as stop, progress(training.steps, training.step) as bar:
        try:
            training.train(recorder, bar, stop)
        except torch.OutOfMemoryError as e:
            raise MemoryError(_what_fits(training)) from e
    result = recorder.finish(training.result(recorder))
    say(f"\n{_told(result)}\nWritten: {folder}/result.json, summary.csv, curves.png, report.html{', best.safetensors' * settings.best}")
    return result


def _started(settings: Settings, folder: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from."""
    last = checkpoint.latest(folder / "checkpoints")
    if not resume:
        if last is not None or (folder / "result.json").exists():
            raise ValueError(f"{folder} has a training already. --resume goes on with it; or give another --out.")
        return None
    path = folder / "settings.json"
    if path.is_file():
        other = settings.differs(Settings.load(path))
        if other:
            told = ", ".join(f"{k}: {was!r} there, {now!r} now" for k, (now, was) in other.items())
            raise ValueError(f"{folder} has a training with other settings ({told}). Give those, or another --out.")
    return last


def _introduced(t: Training) -> list[str]:
    count = sum(p.numel() for p in t.model.parameters()) / 1e6
    held = f"{readable(t.held)} held" if t.held is not None else f"held not counted ({t.why_not_held})"
    s = t.settings
    what = f"{s.model}, {count:.1f} million parameters, on {s.data}: {len(t.data.train)} to train on, {len(t.data.test)} to test"
    return [f"{what}. {t.steps} steps of {s.batch} on {s.device}, {s.dtype}; {held}. Seed {s.seed}."]


def _told(r: dict[str, Any]) -> str:
    what = f"top-1 {r['top1']:.2f} %, top-5 {r['top5']:.2f} %, test loss {r['test_loss']:.3f}, training loss {r['train_loss']:.3f}"
    peak = f", peak {readable(r['peak'])}" if r["peak"] is not None else ""
    return f"{r['methods']}: {what}; {r['step_ms']:.1f} ms a step{peak}"


def _what_fits(t: Training) -> str:
    """After an out of memory: what would have fitted. The model is counted where memory does not matter."""
    s = t.settings
    told = f"out of memory on {s.device} with {s.batch} samples" + (f" in {s.accumulate} parts" if s.accumulate > 1 else "") + "."
    try:
        x, y = (v.cpu() for v in t._batch(torch.arange(2), 0))
        rewrite.remove_(t.model)
        t.optimizer.zero_grad(set_to_none=True)
        model, room = t.model.cpu(), torch.cuda.get_device_properties(t.device).total_memory
        t.optimizer.state.clear()
        torch.cuda.empty_cache()
        room = min(room, torch.cuda.mem_get_info(t.device)[0])
        most = _most(model, (x, y), t.methods, room, s)
        said = [f"With {' + '.join(map(str, t.methods)) or 'plain training'} {most} samples fit at once" if most else ""]
        parts = next((n for n in range(2, s.batch + 1) if s.batch % n == 0 and s.batch // n <= most), None) if most else None
        said.append(f"--accumulate {parts} runs a batch of {s.batch} in parts of {s.batch // parts}" if parts else "")
        plan = planner.plan(model, (x, y), room, batch_size=s.micro, device="cuda", optimizer=s.optimizer)
        said.append(f'--method "{" + ".join(map(str, plan.methods))}" fits {s.micro} samples, with exact gradients' if plan.exact else "")
        return told + " " + "; ".join(p for p in said if p) + "."
    except Exception as e:
        return f"{told} Give a smaller --batch, a larger --accumulate, or --budget. (What fits could not be counted: {type(e).__name__})"


def _most(model: nn.Module, batch: Any, methods: tuple[Any, ...], room: int, s: Settings) -> int:
    """The most samples at once with these methods; autocast's smaller activations are not counted on."""
    from ..batches import resized

    if methods:
        rewrite.apply_(model, *methods)
    try:

        def need(n: int) -> int:
            profile = memory.profile(model, resized(batch, n, light=True), device="cuda", optimizer=s.optimizer)
            return planner.total_of(profile, profile.peak)

        return planner.largest(need, room, 1, s.micro)[0] or 0
    finally:
        rewrite.remove_(model)
