"""Two real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfback.train import pieces
from halfback.train.checkpoint import found, latest, load
from halfback.train.loop import Training, train
from halfback.train.pieces import STOPPED, Stop
from halfback.train.settings import Settings, Stopped

HERE = Path(__file__).parent


def test_two_processes_with_ddp_and_fsdp_have_the_gradients_and_the_trainings_of_one(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "several_worker.py")]
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1", "FOLDER": str(tmp_path)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "several ok" in result.stdout
    monkeypatch.setattr("halfback.train.record.draw", lambda *a: None)
    s = Settings.load(tmp_path / "one" / "settings.json")
    assert s.parallel == "fsdp"
    train(s, tmp_path / "one", resume=True, say=lambda text: None)  # what two processes with FSDP began, and went on with DDP
    train(s, tmp_path / "alone", say=lambda text: None)
    one, ddp, alone = (load(latest(tmp_path / k / "checkpoints"))[0] for k in ("one", "ddp", "alone"))
    assert set(one) == set(ddp) == set(alone) and any(k.startswith("averaged/") for k in one)
    assert all(torch.allclose(alone[k], other[k], atol=1e-5) for other in (one, ddp) for k in alone)


THREADS = """
import atexit, os
from pathlib import Path

def running():
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))

atexit.register(lambda: running() and os._exit(3))  # the first to be registered is the last that is called
import torch
from halfback.train.pieces import World

with World().joined("cpu"):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(2, 2)).sum().backward()
    model.itself = [model]  # until what is no longer reached is looked for
    assert running()
del model
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_threads_of_a_process_group_end_before_python_does(tmp_path):
    (tmp_path / "threads.py").write_text(THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "threads.py")]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]


def test_parts_of_a_test_set_have_one_length(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    for n in (1, 6, 7, 8):
        parts = []
        for rank in range(3):
            monkeypatch.setenv("RANK", str(rank))
            parts.append(pieces.World().portion(n))
        assert len({len(mine) for mine, _ in parts}) == 1
        assert sorted(i for mine, count in parts for i in mine[:count].tolist()) == list(range(n))


@pytest.mark.parametrize("what", [{"compile": True}, {"channels_last": True}, {"monitor": 5}])
def test_what_is_done_to_whole_weights_is_not_done_to_parts_of_them(what):
    with pytest.raises(ValueError, match=f"leave {next(iter(what))} out, or give ddp"):
        Settings(parallel="fsdp", **what)


def test_accelerate_on_two_processes_does_not_mind_the_order():
    example = HERE.parent / "examples" / "accelerate_digits.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("of plain") == 2, "one of them speaks, once for each order"


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


def test_what_two_processes_tested_is_what_they_saved(tmp_path):
    """BatchNorm's statistics are each process's own, and the first one's are saved."""
    trained(tmp_path, "--model", "resnet18", "--epochs", "1", "--batch", "512", "--ema", "0.5")
    alone = Training(Settings.load(tmp_path / "settings.json"), tmp_path)
    alone.load(latest(tmp_path / "checkpoints"))
    assert alone.test()["test_loss"] == pytest.approx(alone.last["test_loss"], rel=1e-5)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_two_processes_stop_together_at_once_and_go_on(tmp_path, told):
    more = ("--epochs", "5", "--batch", "64")
    process = start(tmp_path, *more)
    until = time.time() + 120
    while latest(tmp_path / "checkpoints") is None and time.time() < until:
        time.sleep(0.05)
    os.kill(process.pid, told)
    _, err = process.communicate(timeout=60)
    steps = [int(n) for n in re.findall(r"stopped at step (\d+) of", err)]
    assert len(steps) == 1 and int(latest(tmp_path / "checkpoints").name) in steps, err[-3000:]
    out, _ = start(tmp_path, *more, "--resume").communicate(timeout=240)
    assert f"Goes on after step {steps.pop()}." in out and "top-1" in out


def test_a_budget_on_two_processes_is_planned_by_the_first(tmp_path):
    trained(tmp_path, "--budget", "0.6", "--epochs", "1", "--parallel", "fsdp")
    assert "recompute" in json.loads((tmp_path / "result.json").read_text())["methods"]


def test_one_process_that_is_told_stops_all(tmp_path):
    """Also those that were not told end as stopped, and not as done."""
    training = Training(Settings(epochs=1), tmp_path)
    with pytest.raises(Stopped) as stopped:
        training._stop(Stop())
    assert stopped.value.code == STOPPED


def test_each_process_has_a_gpu_of_its_own_as_the_current_one(monkeypatch):
    done = []
    monkeypatch.setattr(pieces, "usable", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(pieces.dist, "init_process_group", done.append)
    monkeypatch.setattr(pieces.dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pieces.World().joined("cuda"):
        assert done == ["cuda:1", "cpu:gloo,cuda:nccl"]


def test_a_batch_that_cannot_be_shared_is_an_error(tmp_path):
    _, err = start(tmp_path, "--batch", "65").communicate(timeout=240)
    assert err.count("batch 65 cannot be shared evenly by 2 processes") == 1 and not (tmp_path / "settings.json").exists()
