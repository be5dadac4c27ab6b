"""What a training is asked to be. All of it is in one frozen value, which is saved beside the results as settings.json.

The randomness of a training is a pure function of (seed, epoch, step): the order of the data, augmentation, and the model's own noise.
Two trainings with the same seed see the same batches, whatever their method is, and one that goes on after a break needs no random
state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..methods import from_json, parse

STOPPED = 75  # exit code of a training that was told to stop, and has saved where it stands
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "step", "constant")
DTYPES = ("fp32", "bf16", "fp16")
DECAYS = ("all", "matrices")
PARALLEL = ("ddp", "fsdp")
WHOLE = {"compile": "compiled", "channels_last": "laid out in memory", "monitor": "compared"}  # what is done to whole weights or gradients
PATHS = (
    "root",
    "device",
    "parallel",
    "graphs",
    "save_every",
    "test_every",
    "keep_last",
    "best",
    "tensorboard",
)  # how, not what: they may differ when a training goes on


KINDS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (  # what a setting's type is called, and what it is; the first that fits
    ("tuple", "a list of finite numbers", lambda v: isinstance(v, (list, tuple)) and all(_number(x) for x in v)),
    ("str", "a text", lambda v: isinstance(v, str)),
    ("bool", "true or false", lambda v: isinstance(v, bool)),
    ("int", "a whole number", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    ("float", "a finite number", lambda v: _number(v)),
)
RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("epochs", "batch", "accumulate", "keep_last", "test_every"), lambda v: v >= 1, "at least 1"),
    (
        ("validation", "warmup", "crop", "randaugment", "mixup", "cutmix", "weight_decay", "save_every", "monitor"),
        lambda v: v >= 0,
        "at least 0",
    ),
    (("smoothing", "erase", "mixing", "exact_tail"), lambda v: 0 <= v <= 1, "in [0, 1]"),
    (("momentum", "drop_path"), lambda v: 0 <= v < 1, "in [0, 1)"),
    (("fall",), lambda v: 0 < v <= 1, "in (0, 1], as 0.2"),
    (("lr", "clip"), lambda v: v > 0, "above 0"),
    (("magnitude",), lambda v: 0 <= v <= 10, "in [0, 10]"),
    (("ema",), lambda v: 0 < v < 1, "in (0, 1), as 0.999"),
    (("seed",), lambda v: 0 <= v < 2**63, "at least 0, and below 2**63"),
)
UNUSED_BY: dict[str, tuple[str, ...]] = {  # that mean nothing to an optimizer or a schedule
    "sgd": ("betas",),
    "adamw": ("momentum", "nesterov"),
    "cosine": ("milestones", "fall"),
    "constant": ("milestones", "fall"),
    "step": (),
}
SHARES = {"betas": "two numbers in [0, 1)", "milestones": "shares of the training, in [0, 1]"}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Shared(ValueError):
    """A mistake that all processes of a training see: the first one tells it."""


class Stopped(Exception):
    """A training was told to stop. What it has done is saved."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Settings:
    """Defaults are those of a short training; a recipe changes what it needs."""

    # what
    model: str = "small-vit"
    weights: str | None = None  # a safetensors file to begin with
    data: str = "digits"
    root: str | None = None  # where the data lies; None: HALFBACK_DATA/NAME
    method: str = "exact"  # "sbp(keep=0.5)+recompute", or JSON: a list of methods as to_json() writes them
    budget: str | None = None  # instead of a method: "10GiB", or "0.4" of the peak of plain training
    size: int | None = None  # pixels a side, of a folder's images
    seq: int | None = None  # tokens of a text
    seed: int = 0
    validation: int = 0  # samples of the training set to test on, instead of the test set

    # how long, how fast
    epochs: int = 10
    batch: int = 128  # samples of a step of the optimizer
    accumulate: int = 1  # parts that a batch is run in
    optimizer: str = "adamw"
    lr: float = None  # type: ignore[assignment]  # None: 0.1 for sgd, 0.001 for adamw
    momentum: float = 0.9
    nesterov: bool = True
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = None  # type: ignore[assignment]  # None: 0.0005 for sgd, 0.05 for adamw
    decay: str | None = None  # "all" parameters, or "matrices" alone; None: all for sgd, matrices for adamw
    schedule: str = "cosine"
    milestones: tuple[float, ...] = (0.3, 0.6, 0.8)  # of "step": shares of the training after which the rate falls
    fall: float = 0.2  # of "step": to this much of it
    warmup: float = 0.0  # epochs in which the rate rises
    clip: float | None = None  # norm of the gradient
    exact_tail: float = 0.0  # the last share of the steps with exact gradients

    # what it is regularised by
    crop: int = 0  # pixels of padding that a random crop is taken from
    flip: bool = False
    randaugment: int = 0  # operations an image
    magnitude: float = 9.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixing: float = 1.0
    smoothing: float = 0.0
    drop_path: float = 0.0
    ema: float | None = None  # decay of averaged weights, which are then tested

    # with what
    device: str = "cpu"
    dtype: str = "fp32"
    parallel: str = "ddp"  # on several processes: each has all weights, or with "fsdp" a part of each
    compile: bool = False
    graphs: bool = False  # launch what the compiler made as CUDA graphs
    channels_last: bool = False

    # what is kept
    save_every: int = 0  # steps between checkpoints; 0: every epoch
    test_every: int = 1  # epochs between tests; the last one is tested in any case
    keep_last: int = 2  # checkpoints
    best: bool = True  # the weights that tested best, in a file of their own
    monitor: int = 0  # steps between looks at the gradient's error; 0: never
    tensorboard: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "dtype": DTYPES, "decay": (None, *DECAYS), "parallel": PARALLEL}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(k for k in known if k)}.")
        self._check_numbers()
        self._check_together()
        methods_of(self.method)
        budget_of(self.budget)

    def _check_types(self) -> None:
        """A setting from a file may be anything. Lists become tuples, whole numbers floats where those are meant."""
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            if value is None and (f.default is None or "None" in kind):
                continue
            wanted, check = next((w, c) for name, w, c in KINDS if name in kind)
            if not check(value):
                raise ValueError(f"{f.name} {value!r} must be {wanted}.")
            if "float" in kind:
                object.__setattr__(self, f.name, tuple(map(float, value)) if "tuple" in kind else float(value))
        for name, value in (("betas", self.betas), ("milestones", self.milestones)):
            if not all(0 <= v <= 1 for v in value) or (name == "betas" and (len(value) != 2 or max(value) == 1)):
                raise ValueError(f"{name} {', '.join(f'{v:g}' for v in value)} must be {SHARES[name]}.")

    def _check_numbers(self) -> None:
        usual = {"sgd": (0.1, 5e-4), "adamw": (1e-3, 0.05)}[self.optimizer]
        for name, value in zip(("lr", "weight_decay"), usual, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for names, right, wanted in RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not right(value):
                    raise ValueError(f"{name} {value} must be {wanted}.")

    def _check_together(self) -> None:
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} cannot be run in {self.accumulate} parts of one size (accumulate).")
        if self.warmup > self.epochs:
            raise ValueError(f"warmup {self.warmup:g} is longer than the training of {self.epochs} epochs; lr would never be reached.")
        for given, names in (("optimizer", UNUSED_BY[self.optimizer]), ("schedule", UNUSED_BY[self.schedule])):
            self._check_unused(f"{given} {getattr(self, given)}", names)
        if not self.randaugment:
            self._check_unused("a training without randaugment", ("magnitude",))
        if self.budget is not None and self.method != "exact":
            raise ValueError(f"budget {self.budget} chooses the methods itself; leave method {self.method!r} out, or the budget.")
        if self.dtype == "fp16" and self.device == "cpu":
            raise ValueError("dtype fp16 needs a GPU; give bf16 or fp32.")
        if self.compile and self.monitor:
            raise ValueError("monitor compares gradients in eager mode; leave compile out, or the monitor.")
        if self.graphs and not (self.compile and self.device.startswith("cuda")):
            lacks = f"device cuda; here it is {self.device}" if self.compile else "what the compiler makes; give compile too"
            raise ValueError(f"graphs launches kernels as CUDA graphs, and needs {lacks}.")
        for name, done in WHOLE.items() if self.parallel == "fsdp" else ():
            if getattr(self, name):
                raise ValueError(f"parallel fsdp shares weights out, and with {name} they are {done} whole; leave {name} out, or give ddp.")

    def _check_unused(self, by: str, names: tuple[str, ...]) -> None:
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) != usual[name]:
                raise ValueError(f"{name} {getattr(self, name)!r} means nothing to {by}; leave it out.")

    @property
    def decays(self) -> str:
        return self.decay or ("all" if self.optimizer == "sgd" else "matrices")

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        usual = {**Settings(optimizer=self.optimizer).to_json(), "optimizer": Settings.optimizer}
        return {k: v for k, v in self.to_json().items() if v != usual[k]}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "settings") -> Settings:
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, dict) or set(data) - known:
            unknown = ", ".join(sorted(set(data) - known)) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{where}: {unknown} is no setting of a training. Known: {', '.join(sorted(known))}.")
        return cls(**data)

    @classmethod
    def load(cls, path: Path) -> Settings:
        data = read_json(path)
        try:
            return cls.from_json(data, str(path))
        except ValueError as e:
            raise e if str(e).startswith(str(path)) else ValueError(f"{path}: {e}") from e

    def differs(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """What makes another training of it: settings that may not change when one goes on."""
        mine, theirs = self.to_json(), other.to_json()
        return {k: (mine[k], theirs[k]) for k in mine if k not in PATHS and _meant(k, mine[k]) != _meant(k, theirs[k])}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as e:  # a text that is no UTF-8 is one too
        raise ValueError(f"{path} is no JSON: {e}.") from e


def budget_of(text: str | None) -> float | int | None:
    """Bytes on the device, or a share of the peak of plain training."""
    from ..planner import parse_size

    if text is None:
        return None
    wrong = f"budget {text!r} is neither a size, as 10GiB or 800MiB, nor a share in (0, 1] of the peak of plain training."
    number = math.nan
    with contextlib.suppress(ValueError):
        number = float(text)
    if 0 < number <= 1:
        return number
    try:
        size = parse_size(text)
    except ValueError as e:
        raise ValueError(wrong) from e
    if not math.isnan(number):  # bytes, by their number alone, are what nobody means
        raise ValueError(wrong)
    return size


def methods_of(method: str) -> tuple[Any, ...]:
    """Methods from their text or their JSON."""
    if not method.lstrip().startswith("["):
        return parse(method)
    try:
        return tuple(from_json(m) for m in json.loads(method))
    except (json.JSONDecodeError, TypeError, AttributeError) as e:
        raise ValueError(f"method {method!r} is no JSON list of methods: {e}.") from e


def _meant(name: str, value: Any) -> Any:
    """Methods and budgets have several spellings."""
    meaning: dict[str, Callable[[Any], Any]] = {"method": methods_of, "budget": budget_of}
    return meaning[name](value) if name in meaning else value
