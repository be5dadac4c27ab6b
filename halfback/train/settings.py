"""What a training is asked to be. All of it is in one frozen value, which is saved beside the results as settings.json.

The randomness of a training is a pure function of (seed, epoch, step): the order of the data, augmentation, and the model's own noise.
Two trainings with the same seed see the same batches, whatever their method is, and one that goes on after a break needs no random
state.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..methods import from_json, parse

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "step", "constant")
DTYPES = ("fp32", "bf16", "fp16")
DECAYS = ("all", "matrices")
PATHS = ("root", "device", "save_every", "keep_last", "best", "tensorboard")  # how, not what: they may differ when a training goes on


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
    smoothing: float = 0.0
    drop_path: float = 0.0
    ema: float | None = None  # decay of averaged weights, which are then tested

    # with what
    device: str = "cpu"
    dtype: str = "fp32"
    compile: bool = False
    channels_last: bool = False

    # what is kept
    save_every: int = 0  # steps between checkpoints; 0: every epoch
    keep_last: int = 2  # checkpoints
    best: bool = True  # the weights that tested best, in a file of their own
    monitor: int = 0  # steps between looks at the gradient's error; 0: never
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("betas", "milestones"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("dtype", DTYPES), ("decay", (None, *DECAYS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(k for k in known if k)}.")
        self._check_numbers()
        self._check_together()
        methods_of(self.method)

    def _check_numbers(self) -> None:
        usual = {"sgd": (0.1, 5e-4), "adamw": (1e-3, 0.05)}[self.optimizer]
        for name, value in zip(("lr", "weight_decay"), usual, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("epochs", "batch", "accumulate", "keep_last"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1.")
        for name in ("validation", "warmup", "crop", "randaugment", "mixup", "cutmix", "weight_decay", "save_every", "monitor"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} must not be below 0.")
        for name in ("momentum", "smoothing", "drop_path", "erase", "exact_tail"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} must be in [0, 1].")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr {self.lr} must be above 0.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema {self.ema} must be in (0, 1), as 0.999.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip {self.clip} must be above 0.")

    def _check_together(self) -> None:
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} cannot be run in {self.accumulate} parts of one size (accumulate).")
        if self.budget is not None and self.method != "exact":
            raise ValueError(f"budget {self.budget} chooses the methods itself; leave method {self.method!r} out, or the budget.")
        if self.dtype == "fp16" and self.device == "cpu":
            raise ValueError("dtype fp16 needs a GPU; give bf16 or fp32.")
        if self.compile and self.monitor:
            raise ValueError("monitor compares gradients in eager mode; leave compile out, or the monitor.")

    @property
    def micro(self) -> int:
        """Samples that are run at once."""
        return self.batch // self.accumulate

    @property
    def decays(self) -> str:
        return self.decay or ("all" if self.optimizer == "sgd" else "matrices")

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "settings") -> Settings:
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, dict) or set(data) - known:
            unknown = ", ".join(sorted(set(data) - known)) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{where}: {unknown} is no setting of a training. Known: {', '.join(sorted(known))}.")
        try:
            return cls(**data)
        except TypeError as e:
            raise ValueError(f"{where}: {e}.") from e

    @classmethod
    def load(cls, path: Path) -> Settings:
        try:
            return cls.from_json(json.loads(path.read_text()), str(path))
        except json.JSONDecodeError as e:
            raise ValueError(f"{path} is no JSON: {e}.") from e

    def differs(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """What makes another training of it: settings that may not change when one goes on."""
        mine, theirs = self.to_json(), other.to_json()
        return {k: (mine[k], theirs[k]) for k in mine if k not in PATHS and mine[k] != theirs[k]}


def methods_of(method: str) -> tuple[Any, ...]:
    """Methods from their text or their JSON."""
    if not method.lstrip().startswith("["):
        return parse(method)
    try:
        return tuple(from_json(m) for m in json.loads(method))
    except (json.JSONDecodeError, TypeError, AttributeError) as e:
        raise ValueError(f"method {method!r} is no JSON list of methods: {e}.") from e
