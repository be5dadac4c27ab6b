"""Two real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfback.train.checkpoint import found, latest

HERE = Path(__file__).parent


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_on_two_processes_are_those_of_one(kind):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / f"{kind}_worker.py")]
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"{kind} ok" in result.stdout


TRAINING = "-m halfback train --model small-vit --data digits --epochs 2 --batch 128 --save-every 3 --no-best".split()


def start(folder, *more, processes=2):
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *several, *TRAINING, "--out", str(folder), *more]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def trained(folder, *more, processes=2):
    out, err = (process := start(folder, *more, processes=processes)).communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    assert out.count("top-1") == 1, "one of them speaks"
    tensors = load_file(latest(folder / "checkpoints") / "state.safetensors")
    return {k: v for k, v in tensors.items() if k.startswith("model/")}


def test_two_processes_train_to_the_weights_of_one(tmp_path):
    sgd = ("--keep-last", "99", "--optimizer", "sgd", "--lr", "0.02")  # AdamW makes steps of rounding errors
    one, two = trained(tmp_path / "one", *sgd, processes=1), trained(tmp_path / "two", *sgd, "--accumulate", "2")
    early = load_file(found(tmp_path / "one" / "checkpoints")[0] / "state.safetensors")
    apart, moved = (max(float((one[k] - other[k]).abs().max()) for k in one) for other in (two, early))
    assert apart < 1e-5 < 1e-2 < moved


def test_two_processes_that_were_killed_go_on_to_the_same_weights(tmp_path):
    method = ("--method", "sbp(keep=0.5, sampler='random')")
    whole = trained(tmp_path / "whole", *method)
    killed = start(tmp_path / "cut", *method)
    until = time.time() + 120
    while latest(tmp_path / "cut" / "checkpoints") is None and time.time() < until:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    again = trained(tmp_path / "cut", *method, "--resume")
    assert all(torch.equal(whole[k], again[k]) for k in whole)


def test_a_batch_that_cannot_be_shared_is_an_error(tmp_path):
    _, err = start(tmp_path, "--batch", "65").communicate(timeout=240)
    assert "batch 65 cannot be shared evenly by 2 processes" in err and not (tmp_path / "settings.json").exists()
