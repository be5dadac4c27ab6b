"""Trainings for tests: few pictures that can be learned, networks for them, and how two trainings are told to be the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import halfback as hb
from halfback.train import checkpoint
from halfback.train.loop import Training, train
from halfback.train.record import read_rows
from halfback.train.settings import Settings

NOISY = """
import torch
from torch import nn
from halfback.models import small_vit
from halfback.train.nets import DroppedBlock

def make():
    model = small_vit(width=16, depth=3, heads=2, classes=4)
    model.patches = nn.Sequential(nn.Conv2d(1, 16, 2, 2), nn.BatchNorm2d(16), nn.Dropout(0.1))
    model.blocks = nn.ModuleList(DroppedBlock(16, 2, p) for p in (0.0, 0.1, 0.2))
    return model

def plain():
    return small_vit(width=16, depth=3, heads=2, classes=4)

def video():
    return nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))

def normed():
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4))

def wrong():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))

def broken():
    return nn.Linear(3, 4)

def frozen():
    return plain().requires_grad_(False)

def empty():
    return nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(4))

def raises():
    raise KeyError("no such thing")

def applied():
    import halfback as hb
    model = plain()
    hb.apply_(model, hb.SBP(keep=0.25))
    return model
"""


def pictures(n, seed):
    """Four classes that can be learned: a bright quarter."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, n)
    x = draw.integers(0, 120, (n, 8, 8))
    for i, k in enumerate(y):
        x[i, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 100
    return x.astype(np.uint8), y


def settings(few, **changed):
    given = {"model": f"{few}/nets.py:make", "data": f"{few}/few.npz", "epochs": 2, "batch": 16, "lr": 0.01}
    return Settings(**{**given, **changed})


def quiet(s, folder, **how):
    return train(s, folder, say=lambda text: None, **how)


def training(s, folder):
    return Training(s, folder, lambda text: None)


def state_of(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def rows_of(folder):
    times = ("seconds", "step_ms", "images_per_s")
    return [{k: v for k, v in row.items() if k not in times} for row in read_rows(folder / "metrics.jsonl")]


def assert_same(a, b, draws=True):
    """Weights, averaged weights, optimizer, draws, rows and figures, to the bit."""
    (one, first), (two, second) = state_of(a), state_of(b)
    assert set(one) == set(two) and all(torch.equal(one[k], two[k]) for k in one)
    assert (first["draws"] == second["draws"] or not draws) and first["step"] == second["step"]
    assert rows_of(a) == rows_of(b)
    one, two = (json.loads((f / "result.json").read_text()) for f in (a, b))
    assert all(one[k] == two[k] for k in ("top1", "top5", "test_loss", "train_loss", "best_top1", "steps", "curves"))


class Cut(Exception):
    pass


def cut(s, folder, monkeypatch, step):
    """A training that dies before its step number `step`."""
    own = Training.train_step

    def dies(self, x, y):
        if self.step == step:
            raise Cut
        own(self, x, y)

    with monkeypatch.context() as m:
        m.setattr(Training, "train_step", dies)
        with pytest.raises(Cut):
            quiet(s, folder)


def run(script, *argv, timeout=240, **env):
    """What a script prints as its last line, which is JSON."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hb.__file__).parents[1]), **env}
    done = subprocess.run([sys.executable, "-c", script, *map(str, argv)], capture_output=True, text=True, timeout=timeout, env=given)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def options_of(s):
    """Settings as a user would write them."""
    given = []
    for name, value in s.changed().items():
        option = "--" + name.replace("_", "-")
        given += [option] if value is True else [option, *map(str, value)] if isinstance(value, tuple) else [option, str(value)]
    return given


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
