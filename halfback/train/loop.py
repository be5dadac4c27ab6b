"""The training loop: one that can be read, stopped at any moment, and continued to the same weights.

    for each step of each epoch:
        batch = the epoch's order, augmented on the device        a pure function of (seed, epoch, step)
        loss  = cross entropy of the model's scores, in autocast
        backward, clip, optimizer, averaged weights
        now and then a checkpoint; after an epoch a test

Everything that a step draws is seeded from (seed, step), so a checkpoint holds no random state but where the methods' own draws stand.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import memory, planner, rewrite
from ..audit import set_seed
from ..compiled import OPTIONS
from ..course import Course
from ..extras import install
from ..heads import compile_
from ..methods import SBP, DropIT, Recompute, SkipTokens, from_json
from ..models import DTYPES, line_of, load_for
from ..monitor import Monitor
from ..report import readable
from ..untouched import applied_to
from . import checkpoint, sharded
from .augment import Augment, normalise
from .fits import what_fits
from .pieces import Averaged, Peak, Stop, World, loss_from, make_optimizer, progress, rate, scores_of, tuned, usable
from .record import Recorder, locked, write_json
from .sets import DataSet, batches, content_of, order, seed_from, set_of
from .settings import STOPPED, Settings, Shared, Stopped, budget_of, methods_of
from .weights import begin_with

TESTED = 1000  # samples at once; without gradients they are light
LOOKED = 50  # steps between looks at the loss, which wait for the device
TOP = 5
GRAPHS = {"triton.cudagraphs": True}  # torch.compile's option
STATE: dict[str, tuple[type, ...]] = {  # of a checkpoint: what each is
    "step": (int,),
    "settings": (dict,),
    "optimizer": (dict,),
    "scaler": (dict,),
    "draws": (list,),
    "seconds": (int, float),
    "best": (int, float, type(None)),
    "last": (dict,),
}


class Other(ValueError):
    """What is there is of another training: nothing is wrong with it."""


class Training:
    """One training, in a folder of its own."""

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], Any] = print):
        self.world = World()
        self.settings, self.folder, self.say = settings, folder, say if self.world.first else lambda text: None
        self.device = usable(self.world.device(settings.device))
        self.micro, over = divmod(settings.batch, self.world.size * settings.accumulate)
        if over or not self.micro:
            parts = f"{self.world.size} processes" + (f" in {settings.accumulate} parts" if settings.accumulate > 1 else "")
            raise Shared(f"batch {settings.batch} cannot be shared evenly by {parts}.")
        if settings.graphs and self.world.size > 1:
            raise Shared(f"graphs is for one process, and here are {self.world.size}. Leave it out.")
        self.data = self._data()
        self.per_epoch = len(self.data.train) // settings.batch
        if not self.per_epoch:
            raise ValueError(f"batch {settings.batch} is more than the {len(self.data.train)} samples of {settings.data}.")
        self.steps = settings.epochs * self.per_epoch
        s = settings
        self.augment = Augment(s.crop, s.flip, s.randaugment, s.magnitude, s.erase, s.mixup, s.cutmix, mixing=s.mixing, compiled=s.compile)
        self.generator = torch.Generator(self.device)
        self.begun_with = ""
        self.model = self.run = self._model()
        self.averaged = Averaged(self.model, settings.ema) if settings.ema is not None else None
        self.methods = self._methods()
        self.report = rewrite.apply_(self.model, *self.methods) if self.methods else ""
        self.held, self.why_not_held = self._count_held()
        self.sharded = settings.parallel == "fsdp" and self.world.size > 1
        if self.sharded:
            for model in (self.model, *(() if self.averaged is None else (self.averaged.model,))):
                sharded.shard_(model, self.device.type)
        self.optimizer = make_optimizer(settings, self.model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "fp16")
        self.monitor = Monitor(self.model, settings.monitor) if settings.monitor and self.methods else None
        self.step, self.processes = 0, self.world.size  # processes: that trained up to the last checkpoint
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)  # of the epoch so far
        self.seconds = 0.0  # of training, up to when the epoch began, or went on
        self.began: float | None = None
        self.approximates = any(isinstance(m, (SBP, SkipTokens, DropIT)) for m in self.methods)
        self.tail = settings.exact_tail if self.approximates else 0.0
        self.course = Course(self.tail)
        self.has_course = bool(self.tail) or any(m.schedule for m in self.methods)
        self.peak = Peak(self.device, settings.graphs)
        self.best = -math.inf
        self.last: dict[str, Any] = {}
        if settings.compile:
            recomputes = self.tail or any(isinstance(m, Recompute) for m in self.methods)
            options = {**(OPTIONS if recomputes else {}), **(GRAPHS if settings.graphs else {})}
            self.run = compile_(self.model, options=options or None)
        if self.world.size > 1 and not self.sharded:
            self.run = DistributedDataParallel(self.run)

    # Set up

    def _data(self) -> DataSet:
        s = self.settings
        data = set_of(s)
        given = [k for k in ("crop", "flip", "randaugment", "erase", "mixup", "cutmix", "channels_last") if getattr(s, k)]
        if data.kind == "text" and given:
            raise ValueError(f"{', '.join(given)}: that is for images and clips, and {s.data!r} is text. Leave it out.")
        self.content = content_of(data)
        return data.to(self.device)

    def _model(self) -> nn.Module:
        s = self.settings
        if s.model.startswith("hf:") and self.data.kind == "text" and self.data.train.labels is not None:
            raise ValueError(
                f"model {s.model!r} would learn the next token, and {s.data} has labels of whole texts. Give a file.py:factory that "
                "returns scores of classes."
            )
        torch.manual_seed(s.seed)
        model = load_for(s.model, self.data.kind, self.data.shape, self.data.classes, s.drop_path)
        if s.weights is not None and checkpoint.latest(self.folder / "checkpoints") is None:
            self.begun_with = begin_with(model, Path(s.weights))
        model = model.to(self.device)
        if s.channels_last:
            model = model.to(memory_format=self._layout())  # type: ignore[call-overload]
        x, y = self._batch(torch.arange(min(2, len(self.data.train))), 0, augmented=False)
        try:
            with torch.no_grad(), self.autocast():
                out = scores_of(model.eval(), x)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # a model's own errors, of any kind
            raise ValueError(f"model {s.model!r} does not take {len(x)} samples of {s.data}, {tuple(x.shape)}: {line_of(e)}") from e
        self._check_trained(model)
        wanted = (*y.shape, self.data.classes)
        if not isinstance(out, Tensor) or out.shape != wanted:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"model {s.model!r} returns {found} for {len(x)} samples of {s.data}; wanted {wanted}: a score for each class."
            )
        return model.train()

    def _check_trained(self, model: nn.Module) -> None:
        count = len(list(model.parameters()))
        if not any(p.requires_grad for p in model.parameters()):
            has = f"all of its {count} parameters are frozen (requires_grad=False)" if count else "it has no parameters"
            raise ValueError(f"model {self.settings.model!r} has nothing to train: {has}. Wanted is at least one that takes a gradient.")

    def _methods(self) -> tuple[Any, ...]:
        """As asked for; a budget is planned once, and then the plan holds."""
        budget = budget_of(self.settings.budget)
        if budget is None:
            return methods_of(self.settings.method)
        methods = self._planned(budget) if self.world.first else None  # the others do not look: the file may be there by then
        return tuple(from_json(m) for m in self.world.firsts(methods))

    def _planned(self, budget: Any) -> list[dict[str, Any]]:
        path = self.folder / "methods.json"
        if path.is_file():
            try:
                return [m.to_json() for m in methods_of(path.read_text())]
            except ValueError as e:
                raise ValueError(f"{path}: {e} A checkpoint's state.json has those it was; or remove {self.folder} to begin again.") from e
        plan = planner.plan(self.model, self._one_batch(), budget, optimizer=self.settings.optimizer)
        self.say(str(plan))
        return [m.to_json() for m in plan.methods]

    def _one_batch(self) -> Callable[[], Tensor]:
        """A batch as plan and profile take it: a function, as the loss is computed in autocast."""
        x, y = self._batch(torch.arange(self.micro) % len(self.data.train), 0)
        return lambda: self._loss(x, y)

    def _count_held(self) -> tuple[int | None, str]:
        if self.settings.compile:
            return None, "the compiler chooses what a compiled model holds"
        try:
            device = self.device.type if self.device.type in ("cpu", "cuda") else None
            rewrite.follow_(self.model, self._fullest())
            return memory.profile(self.model, self._one_batch(), device=device, optimizer="none").held, ""
        except Exception as e:  # whatever a model does that tensors without contents cannot: it can be trained all the same, or cannot
            self._check_trains()
            return None, f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"

    def _check_trains(self) -> None:
        """What no part of a batch can go through in training mode is told before anything is written."""
        before = {name: t.clone() for name, t in self.model.named_buffers()}  # statistics change
        try:
            with rewrite.exact(self.model):  # draws nothing
                self._one_batch()()
        except Exception as e:
            if _out_of_memory(e):
                raise
            few = " Batch norms want two samples or more: give a larger batch, or fewer parts (accumulate)." if self.micro == 1 else ""
            raise ValueError(f"model {self.settings.model!r} cannot be trained on {self.micro} at a time: {line_of(e)}{few}") from e
        finally:
            now = dict(self.model.named_buffers())
            for name, t in before.items():
                now[name].copy_(t)

    def _fullest(self) -> float:
        """The share of the training at which the methods' schedules keep the most."""
        points = [point for m in self.methods for point in m.schedule or ()]
        return max(points, key=lambda point: point[1], default=(0.0, 1.0))[0]

    # A step

    def autocast(self) -> Any:
        dtype = DTYPES[self.settings.dtype]
        return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(self.device.type, dtype)

    def _batch(self, indices: Tensor, epoch: int, augmented: bool = True) -> tuple[Tensor, Tensor]:
        x, y = self.data.train.batch(indices, epoch=epoch)
        return self.prepared(x, y, augmented)

    def prepared(self, x: Tensor, y: Any, augmented: bool) -> tuple[Tensor, Tensor]:
        """A batch as the model takes it: bytes become numbers, which are augmented in training."""
        if self.data.kind == "text":
            return x.long(), y
        if augmented:
            x = self.augment.prepared(x, self.data.mean, self.data.deviation, self.generator)
            x, y = self.augment.mixed(x, y, self.generator, self.data.classes)
        else:
            x = normalise(x, self.data.mean, self.data.deviation)
        if self.settings.channels_last:
            x = x.contiguous(memory_format=self._layout())
        return x, y

    def _layout(self) -> torch.memory_format:
        return torch.channels_last_3d if self.data.kind == "clips" else torch.channels_last

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.autocast():
            return loss_from(scores_of(self.run, x), y, self.settings.smoothing)

    def seeded(self) -> None:
        """What this step draws is its own; the model's noise and augmentation are not drawn from the same numbers."""
        own = (self.settings.seed, self.step, *([self.world.rank] if self.world.rank else []))
        set_seed(seed_from("noise", *own))
        self.generator.manual_seed(seed_from("step", *own))

    def train_step(self, x: Tensor, y: Any) -> None:
        s = self.settings
        self.seeded()
        if s.graphs:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs made, nobody needs any more
        for group in self.optimizer.param_groups:
            group["lr"] = rate(s, self.step, self.per_epoch)
        x, y = self.prepared(x, y, augmented=True)
        if self.has_course:
            self.course.step(self.model, self.step, self.steps)
        if self.monitor is not None:
            few = max(2, self.micro // 4)  # their exact backward fits where the approximate one of all did
            self.monitor(lambda: self._loss(x[:few], y[:few]))
        parts = list(zip(x.split(self.micro), y.split(self.micro), strict=True))
        for i, (part, target) in enumerate(parts, 1):
            with self._in_sync(i == len(parts)):
                loss = self._loss(part, target) / s.accumulate
                self.scaler.scale(loss).backward()
            self.loss += loss.detach()
        if s.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.trained, s.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.averaged is not None:
            self.averaged.update(self.model, self.step)

    def _in_sync(self, last: bool) -> Any:
        """Processes add up their gradients once a step."""
        if self.sharded:
            sharded.in_sync(self.model, last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last or self.world.size == 1 else self.run.no_sync()  # type: ignore[operator]

    # The test

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Of the averaged weights, where there are any."""
        model = self.averaged.model if self.averaged is not None else self.model
        self.world.align(model)
        model.eval()
        part = self.data.test
        best, few, loss, count = (torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(4))
        mine, left = self.world.portion(len(part))
        for x, y in batches(part, mine, min(TESTED, max(self.settings.batch, 100)), epoch=0):
            x, y = self.prepared(x, y, augmented=False)
            with self.autocast():
                scores = scores_of(model, x)
            scores, y, left = scores[:left], y[:left], left - len(x)
            scores, y = scores.float().flatten(0, -2), y.flatten()
            ranked = scores.topk(min(TOP, self.data.classes), 1).indices == y[:, None]
            best += ranked[:, 0].sum()
            few += ranked.any(1).sum()
            loss += loss_from(scores, y, reduction="sum")
            count += len(y)
        self.model.train()
        sharded.put_back(model)
        best, few, loss, count = self.world.total(torch.stack((best, few, loss, count))).unbind()
        n = count.item()
        found = {"top1": 100 * best.item() / n, "top5": 100 * few.item() / n, "test_loss": loss.item() / n}
        return {**found, "perplexity": math.exp(min(found["test_loss"], 700))} if part.labels is None else found

    # Checkpoints

    def save(self) -> None:
        self._check_weights()
        optimizer, described = checkpoint.optimizer_state(self.optimizer)
        averaged = {} if self.averaged is None else {f"averaged/{k}": v for k, v in _tensors(self.averaged.model).items()}
        own = {f"model/{k}": v for k, v in _tensors(self.model).items()}
        state = {
            "settings": self.settings.to_json(),
            "methods": [m.to_json() for m in self.methods],
            "data": self._data_told(),
            "processes": self.world.size,
            "optimizer": described,
            "scaler": self.scaler.state_dict(),
            "draws": [state.mark() for applied in applied_to(self.model) for state in applied.states],
            "seconds": self.seconds + (0 if self.began is None else time.perf_counter() - self.began),
            "best": None if self.best == -math.inf else self.best,
            "last": self.last,
            "monitor": [] if self.monitor is None else self.monitor.history[:1] + self.monitor.history[1:][-1:],
        }
        tensors = sharded.gathered({**own, **optimizer, **averaged, "loss": self._mean_loss()}, self.world.first)
        if self.world.first:
            checkpoint.save(self.folder / "checkpoints", self.step, tensors, state, self.settings.keep_last)
        self.world.wait()

    def _mean_loss(self) -> Tensor:
        """The sum of the epoch's losses so far, over all samples."""
        return self.world.total(self.loss.clone()) / self.world.size

    def _check_weights(self) -> None:
        """What is saved can be gone on from: a loss that was still finite may have made weights that are not."""
        parts = [sharded.local(p.detach()) for p in self.model.parameters() if p.is_floating_point()]
        own: Any = [*(part for part in parts if part.numel()), self.loss]
        norms = torch.stack([n.float() for n in torch._foreach_norm(own, math.inf)])
        if self.world.any(not norms.isfinite().all()):
            raise self._diverged(self.loss.item() / (self.step % self.per_epoch or self.per_epoch))

    def _diverged(self, loss: float) -> Shared:
        what = f"the training loss is {loss:.3g}" if not math.isfinite(loss) else "weights are no longer finite"
        last = checkpoint.latest(self.folder / "checkpoints")
        there = f"The last checkpoint, of step {int(last.name)}, is from before." if last else "There is no checkpoint yet."
        advice = "Lower --lr, give --warmup or --clip, or with fp16 try bf16, in another --out."
        return Shared(f"{what} at step {self.step} of {self.steps}: training has diverged. {advice} {there}")

    def _data_told(self) -> str:
        return f"{len(self.data.train)} samples of {tuple(self.data.shape)}, {self.data.classes} classes, content {self.content:08x}"

    def load(self, place: Path) -> None:
        tensors, state = checkpoint.load(place)
        try:
            _check_state(state)
            self._load(tensors, state, place)
        except (KeyError, TypeError, AttributeError, RuntimeError, IndexError, ValueError) as e:
            if isinstance(e, Other) or _out_of_memory(e):
                raise
            raise ValueError(checkpoint.unreadable(place, e)) from e

    def _load(self, tensors: dict[str, Tensor], state: dict[str, Any], place: Path) -> None:
        _check_same(self.settings, Settings.from_json(state["settings"]), place)
        there, here = state.get("data", ""), self._data_told()
        if not here.startswith(there):  # older checkpoints know less of it, or nothing
            was, now = (text.partition(", content")[0] for text in (there, here))
            other = " too, but other ones" if was == now else ""
            raise Other(f"{place} was trained on {was}; now {self.settings.data} has {now}{other}. Give that data.")
        self._check_methods(state, place)
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
        self.processes = state.get("processes", self.world.size)
        self.best = -math.inf if state["best"] is None else state["best"]
        if self.monitor is not None:
            self.monitor.step, self.monitor.history = self.step, state.get("monitor", [])

    def _check_methods(self, state: dict[str, Any], place: Path) -> None:
        """Of a budget they stand in methods.json, which anyone can change. Older checkpoints do not tell theirs."""
        there = tuple(from_json(m) for m in state["methods"]) if "methods" in state else self.methods
        if there != self.methods:
            raise Other(
                f"{place} was trained with other methods ({_named(there)} there, {_named(self.methods)} now). Of a --budget they stand in "
                f"{self.folder}/methods.json: put those back that the checkpoint's state.json has, or give another --out."
            )

    def _fill(self, model: nn.Module, prefix: str, tensors: dict[str, Tensor], place: Path) -> None:
        own, tensors = model.state_dict(), {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if set(own) != set(tensors) or any(own[k].shape != tensors[k].shape for k in own):
            other = sorted(set(own) ^ set(tensors)) or [k for k in own if own[k].shape != tensors[k].shape]
            raise Other(f"{place} is a checkpoint of another model than {self.settings.model!r}: {other[0]} differs, of {len(other)}.")
        model.load_state_dict({k: sharded.part_of(t, own[k]) for k, t in tensors.items()})

    def keep_best(self) -> None:
        """The weights that tested best, alone, for whoever uses the model."""
        model = self.averaged.model if self.averaged is not None else self.model
        weights = sharded.gathered(_tensors(model), self.world.first)
        if self.world.first:
            checkpoint.save_weights(self.folder / "best.safetensors", self.folder / "checkpoints", weights)

    # All of it

    def check_room(self) -> None:
        """A checkpoint has the weights, two more of them for AdamW or one for SGD, and averaged ones."""
        s, weights = self.settings, sum(t.nbytes for t in self.model.state_dict().values())
        nbytes = weights * (2 + (s.optimizer == "adamw") + (self.averaged is not None))
        checkpoint.check_room(self.folder, nbytes, s.keep_last, weights * s.best)

    def train(self, recorder: Recorder, bar: Any, stop: Stop) -> None:
        try:
            self._train(recorder, bar, stop)
        finally:
            self.course.end()

    def _train(self, recorder: Recorder, bar: Any, stop: Stop) -> None:
        while self.step < self.steps:
            epoch, first = divmod(self.step, self.per_epoch)
            began = self.began = time.perf_counter()
            with self.peak:
                self._train_epoch(epoch, first, bar, stop)
            self.began = None
            self._finish_epoch(epoch, first, time.perf_counter() - began, recorder)
            if not self.settings.save_every or self.step % self.settings.save_every == 0 or self.step == self.steps:
                self.save()
            if self.step < self.steps and self.world.any(stop.asked):
                self._stop(stop)

    def _train_epoch(self, epoch: int, first: int, bar: Any, stop: Stop) -> None:
        s = self.settings
        indices = self.world.share(order(len(self.data.train), s.seed, epoch)[: self.per_epoch * s.batch], s.batch)
        began = time.perf_counter()
        coming = batches(self.data.train, indices, s.batch // self.world.size, epoch=epoch, first=first)
        for done, (x, y) in enumerate(self._coming(coming), 1):
            self.train_step(x, y)
            bar.update(1)
            ends = self.step % self.per_epoch == 0
            if done == 1 and not ends:
                self.peak.anew()
            if done % LOOKED == 0 or ends:
                self._look(bar, self.loss.item() / (first + done), done * s.batch / (time.perf_counter() - began))
            if s.save_every and self.step % s.save_every == 0 and not ends:
                self.save()
            if not ends and self.world.any(stop.asked):
                self._stop(stop)

    def _coming(self, found: Iterator[Any]) -> Iterator[Any]:
        """Batches as they are read. Where one cannot be, the steps since the last checkpoint are not lost."""
        begun = self.step
        try:
            yield from found
        except ValueError:
            if self.world.size == 1 and self.step > begun:
                self.save()
            raise

    def _finish_epoch(self, epoch: int, first: int, spent: float, recorder: Recorder) -> None:
        """Test, and note it. A checkpoint comes after that: what is noted beyond the last one is dropped when training goes on."""
        self._check_weights()
        steps = self.per_epoch - first
        self.seconds += spent
        row: dict[str, Any] = {
            "epoch": epoch + 1,
            "step": self.step,
            "lr": rate(self.settings, self.step - 1, self.per_epoch),
            "train_loss": self._mean_loss().item() / self.per_epoch,
            **(self.test() if self._is_tested(epoch + 1) else {}),
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
        if row.get("top1", -math.inf) > self.best:
            self.best = row["top1"]
            if self.settings.best:
                self.keep_best()

    def _is_tested(self, epochs: int) -> bool:
        return epochs % self.settings.test_every == 0 or epochs == self.settings.epochs

    def _stop(self, stop: Stop) -> None:
        self.save()
        raise Stopped(f"stopped at step {self.step} of {self.steps}; saved. --resume goes on from there.", stop.code or STOPPED)

    def _look(self, bar: Any, loss: float, speed: float) -> None:
        if self.world.any(not math.isfinite(loss)):
            raise self._diverged(loss)
        told = {"loss": f"{loss:.3f}", "per s": f"{speed:.0f}"}
        if "top1" in self.last:
            told["top-1"] = f"{self.last['top1']:.1f}"
        if self.held is not None:
            told["held"] = readable(self.held)
        if self.peak.most is not None:
            told["peak"] = readable(self.peak.most)
        bar.set_postfix(told, refresh=False)

    def result(self, recorder: Recorder) -> dict[str, Any]:
        s, last = self.settings, self.last
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
            "processes": self.world.size,
            "methods": _named(self.methods),
            "report": str(self.report),
            "device": s.device,
        }


def train(settings: Settings, folder: Path, *, resume: bool = False, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Train, in `folder`, from where it stands; gives what result.json has."""
    folder, world = Path(folder), World()
    _check_packages(settings)
    _check_folder(folder)
    new = not folder.exists()
    with contextlib.ExitStack() as stack:
        if world.first and not new:
            _lock(folder, stack)  # before what is there is read: another process may write it
        last = _started(settings, folder, resume)
        with world.joined(settings.device), tuned():
            training = _set_up(settings, folder, last, say)
            if world.first and new:
                _lock(folder, stack, new=True)  # only now: a mistake that is found before leaves no folder
            world.wait()  # what the first one writes, the others must not find there
            if not world.first:
                return _helped(training)
            recorder = _begun(training, resume)
            full = False
            with Stop() as stop, progress(training.steps, training.step) as bar:
                try:
                    training.train(recorder, bar, stop)
                except (RuntimeError, MemoryError) as e:
                    full = _out_of_memory(e)
                    if not full:
                        raise
            if full:  # here, and not where the error holds on to all that filled the memory
                raise MemoryError(what_fits(training))
        result = recorder.finish(training.result(recorder))
    best = ", best.safetensors" if (folder / "best.safetensors").exists() else ""
    say(f"\n{_told(result)}\nWritten: {folder}/result.json, summary.csv, curves.png, report.html{best}")
    return result


def _lock(folder: Path, stack: contextlib.ExitStack, new: bool = False) -> None:
    try:
        if new:
            folder.mkdir(parents=True)
        alone = locked(folder, stack) is not None
    except FileExistsError:  # it was not there when this training was set up
        alone = False
    if not alone:
        raise ValueError(f"another process trains in {folder}. Wait until it has ended, or give another --out.")


def _begun(t: Training, resume: bool) -> Recorder:
    """What is written and said before the first step."""
    s = t.settings
    recorder = Recorder(t.folder, s, resume_at=t.step, tensorboard=s.tensorboard)
    if t.last and (not recorder.rows or recorder.rows[-1]["step"] < t.last["step"]):
        recorder.epoch(**t.last)  # metrics.jsonl was lost; the checkpoint knows its last row
    write_json(t.folder / "settings.json", s.to_json())
    if s.budget is not None:
        write_json(t.folder / "methods.json", [m.to_json() for m in t.methods])
    for line in _introduced(t, resume):
        t.say(line)
    lost = recorder.lacks(t.step // t.per_epoch)
    if lost:
        t.say(f"{recorder.path} has no row of {lost}: curves and times go without.")
    return recorder


def _helped(training: Training) -> dict[str, Any]:
    """What the other processes do: all but writing and speaking."""

    class Silent:
        def epoch(self, **row: Any) -> None:
            pass

        def update(self, n: int) -> None:
            pass

        def set_postfix(self, told: Any, refresh: bool) -> None:
            pass

    with Stop() as stop:
        training.train(Silent(), Silent(), stop)  # type: ignore[arg-type]
    return {}


def _set_up(settings: Settings, folder: Path, last: Path | None, say: Callable[[str], Any]) -> Training:
    try:
        training = Training(settings, folder, say)
        if last is not None:
            training.load(last)
    except (RuntimeError, MemoryError) as e:
        if not _out_of_memory(e):
            raise
        raise MemoryError(f"out of memory on {settings.device} before the first step: the model and the data do not fit.") from e
    if training.step < training.steps:
        training.check_room()
    return training


def _out_of_memory(e: BaseException) -> bool:
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(e)


def _check_packages(settings: Settings) -> None:
    """Known before a training, not at its first checkpoint."""
    for name in ("tqdm", "safetensors", *(["tensorboard"] if settings.tensorboard else [])):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"a training needs {name}, which is not there: {install(name)}.")


def _started(settings: Settings, folder: Path, resume: bool) -> Path | None:
    """The checkpoint to go on from. What cannot be is told before anything is loaded or written."""
    last = checkpoint.latest(folder / "checkpoints")
    if not resume:
        if last is not None or (folder / "result.json").exists():
            raise ValueError(f"{folder} has a training already. --resume goes on with it; or give another --out.")
        (folder / "methods.json").unlink(missing_ok=True)  # a plan of a training that did not get far
        return None
    path = folder / "settings.json"
    if path.is_file():
        _check_same(settings, Settings.load(path), folder)
    return last


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tied weights are one and the same."""
    return dict(model.state_dict(keep_vars=True))


def _named(methods: tuple[Any, ...]) -> str:
    return " + ".join(map(str, methods)) or "exact"


def _check_state(state: dict[str, Any]) -> None:
    """A file can be whole JSON and still not be what was written."""
    for name, kinds in STATE.items():
        if not isinstance(state[name], kinds):
            raise TypeError(f"{name} is {state[name]!r:.60}")
    if state["last"] and not all(isinstance(state["last"].get(k), int) for k in ("epoch", "step")):
        raise TypeError("last is no row of an epoch")


def _check_same(settings: Settings, other: Settings, where: Path) -> None:
    differs = settings.differs(other)
    if differs:
        told = ", ".join(f"{k}: {was!r} there, {now!r} now" for k, (now, was) in differs.items())
        raise Other(f"{where} has a training with other settings ({told}). Give those, or another --out.")


def _check_folder(folder: Path) -> None:
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"--out {folder}: {there} is a file. Give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--out {folder}: {there} cannot be written to. Give another folder.")


def _introduced(t: Training, resume: bool) -> list[str]:
    count = sum(p.numel() for p in t.model.parameters()) / 1e6
    held = f"{readable(t.held)} held" if t.held is not None else f"held not counted ({t.why_not_held})"
    s = t.settings
    what = f"{s.model}, {count:.1f} million parameters, on {s.data}: {len(t.data.train)} to train on, {len(t.data.test)} to test"
    steps = f"{t.steps} steps of {s.batch}" + (f" in {s.accumulate} parts" if s.accumulate > 1 else "")
    applied = [line for line in str(t.report).splitlines() if line and "known after" not in line]
    on = [f"Goes on after step {t.step}."] if 0 < t.step < t.steps else ["It is trained already."] if t.step else []
    on += [f"{t.folder} has no checkpoint to go on from: the training begins."] if resume and not t.step else []
    if t.processes != t.world.size:
        on += [f"{t.processes} processes trained so far, now it is {t.world.size}: other masks, noise and weights than with as many."]
    if t.best != -math.inf and s.best and not (t.folder / "best.safetensors").exists():
        on += [f"{t.folder}/best.safetensors is gone: the best weights so far are lost."]
    on += [f"--monitor {s.monitor} has nothing to compare: the gradients are exact."] if s.monitor and not t.methods else []
    on += [f"--exact-tail {s.exact_tail:g} has nothing to do: the gradients are exact."] if s.exact_tail and not t.approximates else []
    on += ["--parallel fsdp shares nothing out: this is one process."] if s.parallel == "fsdp" and not t.sharded else []
    return [
        *t.data.notes,
        *filter(None, [t.begun_with]),
        *applied,
        f"{what}. {steps} on {s.device}, {s.dtype}; {held}. Seed {s.seed}.",
        *on,
    ]


def _told(r: dict[str, Any]) -> str:
    what = f"top-1 {r['top1']:.2f} %, top-5 {r['top5']:.2f} %, test loss {r['test_loss']:.3f}, training loss {r['train_loss']:.3f}"
    what += f", perplexity {r['perplexity']:.2f}" if "perplexity" in r else ""
    peak = f", peak {readable(r['peak'])}" if r["peak"] is not None else ""
    return f"{r['methods']}: {what}; {r['step_ms']:.1f} ms a step{peak}"
