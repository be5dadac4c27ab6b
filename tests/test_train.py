"""halfback train: the same weights whatever interrupts it, the gradients and figures that it promises, one line for what is wrong."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfback as hb
from halfback.cli import main
from halfback.train import checkpoint, fits, loop, options
from halfback.train.augment import Augment
from halfback.train.loop import Training, train
from halfback.train.pieces import Averaged, Stop, loss_from, make_optimizer, rate
from halfback.train.record import locked, read_rows
from halfback.train.settings import Settings, budget_of

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
"""


def pictures(n, seed):
    """Four classes that can be learned: a bright quarter."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, n)
    x = draw.integers(0, 120, (n, 8, 8))
    for i, k in enumerate(y):
        x[i, 4 * (k // 2) : 4 * (k // 2) + 4, 4 * (k % 2) : 4 * (k % 2) + 4] += 100
    return x.astype(np.uint8), y


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (x, y), (u, v) = pictures(96, 0), pictures(40, 1)
    np.savez(folder / "few.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    (folder / "nets.py").write_text(NOISY)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Curves are drawn by other tests, and what is held is counted in those that ask for it."""
    monkeypatch.setattr("halfback.train.record.draw", lambda *a: None)
    monkeypatch.setattr(Training, "_count_held", lambda self: (1, ""))


def settings(files, **changed):
    given = {"model": f"{files}/nets.py:make", "data": f"{files}/few.npz", "epochs": 2, "batch": 16, "lr": 0.01}
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


# Stopped and gone on

WORKER = '''
import json, os, random, signal, sys, time
import matplotlib.figure, scipy.optimize, tqdm, safetensors.torch, torch, torch._dynamo  # once, not in every attempt
from halfback import cli
from halfback.train import loop

def attempt(argv, steps=0, delay=0.0, signals=()):
    """Runs the command in a process of its own. After so many steps, and a delay, it gets signals. Gives its exit code."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        log = os.open(os.environ["LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        step = loop.Training.train_step

        def told(self, x, y):
            step(self, x, y)
            os.write(w, b".")

        loop.Training.train_step = told
        if "HELD" in os.environ:  # which takes longer than all else here, and is the same every time
            loop.Training._count_held = lambda self: (int(os.environ["HELD"]), "")
        code = cli.main(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(w)
    for _ in range(steps):
        if not os.read(r, 1):
            break
    time.sleep(delay)
    for s in signals:
        os.kill(pid, s)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(r)
    return code
'''


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


KILLS = (
    WORKER
    + """
argv, seed, kills, codes = json.loads(sys.argv[1]), int(sys.argv[2]), 0, []
draw = random.Random(seed)
while kills < 20:
    steps = draw.choice((0, 1, 2, 3, 4, 5, 6))
    code = attempt(argv, steps, draw.uniform(0, 0.2 if steps == 0 else 0.03), [signal.SIGKILL])
    assert code in (-9, 0), code
    kills += code == -9
    codes.append(code)
    if code == 0:
        break
codes.append(attempt(argv))
print(json.dumps({"kills": kills, "codes": codes}))
"""
)


def test_killed_20_times_at_random_moments_it_ends_in_the_same_weights(tmp_path, files):
    (x, y), (u, v) = pictures(176, 2), pictures(40, 3)
    np.savez(tmp_path / "more.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    s = settings(files, data=str(tmp_path / "more.npz"), epochs=10, method="sbp(keep=0.5)", ema=0.9, crop=1, mixup=0.2, save_every=3)
    argv = ["train", *options_of(s), "--resume", "--out"]
    done = subprocess.run(
        [sys.executable, "-m", "halfback", *argv, str(tmp_path / "whole")], capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(hb.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = tmp_path / "log"
    held = json.loads((tmp_path / "whole" / "result.json").read_text())["held"]
    found = run(KILLS, json.dumps([*argv, str(tmp_path / "cut")]), 0, LOG=str(log), HELD=str(held))
    assert found["kills"] == 20 and found["codes"][-1] == 0, found
    assert "Traceback" not in log.read_text()
    assert_same(tmp_path / "whole", tmp_path / "cut")
    best = [(tmp_path / f / "best.safetensors").read_bytes() for f in ("whole", "cut")]
    assert best[0] == best[1]
    assert not list((tmp_path / "cut" / "checkpoints").glob(".*"))


SIGNALS = (
    WORKER
    + """
out = sys.argv[2]
argv, codes = [*json.loads(sys.argv[1]), "--out"], {}
codes["whole"] = attempt([*argv, out + "/whole"])
codes["term"] = attempt([*argv, out + "/term"], 3, 0.0, [signal.SIGTERM])
codes["term again"] = attempt([*argv, out + "/term"], 4, 0.0, [signal.SIGTERM])
codes["int"] = attempt([*argv, out + "/int"], 5, 0.0, [signal.SIGINT])
codes["int, again"] = attempt([*argv, out + "/int"], 2, 0.0, [signal.SIGINT])
codes["term, on"], codes["int, on"] = attempt([*argv, out + "/term"]), attempt([*argv, out + "/int"])
print(json.dumps(codes))
"""
)


def test_sigterm_and_ctrl_c_save_and_the_training_goes_on(tmp_path, files):
    s = settings(files, epochs=6, method="sbp(keep=0.5)", ema=0.9)
    log = tmp_path / "log"
    codes = run(SIGNALS, json.dumps(["train", *options_of(s), "--resume"]), tmp_path, LOG=str(log), HELD="1")
    assert codes == {"whole": 0, "term": 75, "term again": 75, "int": 130, "int, again": 130, "term, on": 0, "int, on": 0}
    said = log.read_text()
    assert said.count("; saved. --resume goes on from there.") == 4 and "Traceback" not in said and "Goes on after step " in said
    for folder in ("term", "int"):
        assert_same(tmp_path / "whole", tmp_path / folder)


def test_a_second_ctrl_c_stops_at_once():
    with Stop() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # as from a batch system that tells all processes of a job
        assert stop.asked and stop.code == 75
        signal.raise_signal(signal.SIGINT)
        assert stop.code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_and_cudnn_are_as_before_and_other_threads_can_train(tmp_path, files, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen, done = [], []
    own = Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self, x, y: (seen.append(torch.backends.cudnn.benchmark), own(self, x, y)))
    s = settings(files, epochs=1)
    thread = threading.Thread(target=lambda: done.append(quiet(s, tmp_path / "a")))
    thread.start()
    thread.join()
    assert done[0]["done"] and all(seen) and not torch.backends.cudnn.benchmark
    monkeypatch.setattr(Training, "train_step", lambda self, x, y: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(s, tmp_path / "b")
    assert not torch.backends.cudnn.benchmark and signal.getsignal(signal.SIGINT) is signal.default_int_handler


CUTS = {
    "dropit": {"method": "dropit(keep=0.3)"},
    "skiptokens": {"method": "skiptokens(keep=0.5)"},
    "sgd in parts, clipped": {"optimizer": "sgd", "accumulate": 2, "clip": 0.1, "lr": 0.05, "schedule": "step"},
    "augmented": {"mixup": 0.2, "cutmix": 1.0, "smoothing": 0.1, "erase": 0.5, "randaugment": 2, "flip": True},
    "scheduled": {"method": "sbp(keep=0.5, schedule=((0.2, 0.8), (0.6, 0.2)))+dropit(schedule=((0, 0.1), (0.5, 0.9)))", "exact_tail": 0.5},
    "monitored, exact at the end": {"method": "sbp(keep=0.5)", "monitor": 2, "exact_tail": 0.3, "save_every": 4},
    "bf16, channels last, averaged": {"dtype": "bf16", "channels_last": True, "ema": 0.9, "validation": 16},
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.filterwarnings("ignore:halfback, step")
def test_one_that_was_cut_goes_on_to_the_bit(name, tmp_path, files, monkeypatch):
    s = settings(files, epochs=3, **{"save_every": 1, **CUTS[name]})
    quiet(s, tmp_path / "whole")
    cut(s, tmp_path / "cut", monkeypatch, 9 if s.validation else 10)
    quiet(s, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_the_time_before_a_cut_is_counted(tmp_path, files, monkeypatch):
    s = settings(files, epochs=1, save_every=1)
    now = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(now))
    whole = quiet(s, tmp_path / "whole")["seconds"]
    cut(s, tmp_path / "cut", monkeypatch, 4)
    before = state_of(tmp_path / "cut")[1]["seconds"]
    after = quiet(s, tmp_path / "cut", resume=True)["seconds"]
    assert 0 < before < after and abs(after - whole) <= 4  # calls of the clock


def test_what_differs_is_seen(tmp_path, files, monkeypatch):
    """The comparison above can fail: a training that goes on without its draws ends elsewhere."""
    s = settings(files, epochs=2, method="sbp(keep=0.5)", save_every=1)
    quiet(s, tmp_path / "whole")
    cut(s, tmp_path / "cut", monkeypatch, 5)
    place = checkpoint.latest(tmp_path / "cut" / "checkpoints")
    state = json.loads((place / "state.json").read_text())
    fresh = [d.mark() for applied in loop.applied_to(training(s, tmp_path / "fresh").model) for d in applied.states]
    assert state["draws"] != json.loads(json.dumps(fresh))
    (place / "state.json").write_text(json.dumps({**state, "draws": fresh}))
    quiet(s, tmp_path / "cut", resume=True)
    one, two = state_of(tmp_path / "whole")[0], state_of(tmp_path / "cut")[0]
    assert not all(torch.equal(one[k], two[k]) for k in one)


HOLDS = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def other():
    """Another process, which locks a folder until it is killed."""
    started = []

    def locks(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield locks
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path, files, monkeypatch, capsys, other):
    """What the other one writes is not even read: it may be gone a moment later."""
    s, out = settings(files, epochs=2), tmp_path / "a"
    cut(s, out, monkeypatch, 8)
    argv, process = ["train", *options_of(s), "--out", str(out), "--resume"], other(out)
    with monkeypatch.context() as m:
        m.setattr(checkpoint, "latest", None)
        before = content(out)
        for given in (argv, argv[:-1]):
            assert main(given) == 2
            said = capsys.readouterr().err.splitlines()[-1]
            assert said == f"halfback: another process trains in {out}. Wait until it has ended, or give another --out."
        assert content(out) == before
    process.kill()
    process.wait()
    assert main(argv) == 0  # a kill leaves nothing locked
    assert main(argv) == 0  # nor does an end


def test_of_two_that_begin_at_once_one_trains(tmp_path, files, monkeypatch):
    """Both find no folder. One has made it while the other was set up."""
    s, own, seen = settings(files, epochs=1), loop._set_up, []

    def first(*given):
        monkeypatch.setattr(loop, "_set_up", own)
        seen.append(quiet(s, tmp_path / "a")["top1"])
        return own(*given)

    monkeypatch.setattr(loop, "_set_up", first)
    with pytest.raises(ValueError, match=f"another process trains in {tmp_path}/a"):
        quiet(s, tmp_path / "a")
    assert seen == [json.loads((tmp_path / "a" / "result.json").read_text())["top1"]]


@pytest.mark.parametrize("others", ["a lock that is inherited", "the lock of another folder", "a number that is no file"])
def test_a_lock_that_is_inherited_is_the_training_s_own(others, tmp_path, files, monkeypatch, other):
    """As reproduce hands it on. A number that means another file means nothing."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:
        number = locked(tmp_path / ("a" if others == "a lock that is inherited" else "b"), stack)
        monkeypatch.setenv("HALFBACK_LOCK", "99999" if others == "a number that is no file" else str(number))
        if others != "a lock that is inherited":
            other(tmp_path / "a")
            with pytest.raises(ValueError, match="another process trains in"):
                quiet(settings(files, epochs=1), tmp_path / "a")
        else:
            assert quiet(settings(files, epochs=1), tmp_path / "a")["done"]
            assert locked(tmp_path / "a", contextlib.ExitStack()) == number
            monkeypatch.delenv("HALFBACK_LOCK")
            assert locked(tmp_path / "a", stack) is None  # who started it has the lock still


def test_of_several_processes_the_first_one_locks(tmp_path, files, monkeypatch, other):
    (tmp_path / "a").mkdir()
    other(tmp_path / "a")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(loop, "_started", lambda *a: (_ for _ in ()).throw(Cut))  # it gets there
    with pytest.raises(Cut):
        quiet(settings(files), tmp_path / "a")


@pytest.mark.parametrize("kind", ["Windows", "a file system without locks"])
def test_without_locks_it_trains_all_the_same(kind, tmp_path, files, monkeypatch):
    fcntl = None if kind == "Windows" else types.SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=lambda *a: os.stat(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "fcntl", fcntl)
    assert quiet(settings(files, epochs=1), tmp_path / "a")["done"]


def test_what_is_begun_or_ignored_is_told(tmp_path, files):
    said = []
    train(settings(files, epochs=1, monitor=4), tmp_path / "typo", resume=True, say=said.append)
    assert f"{tmp_path}/typo has no checkpoint to go on from: the training begins." in said
    assert "--monitor 4 has nothing to compare: the gradients are exact." in said
    said.clear()
    train(settings(files, epochs=1), tmp_path / "b", say=said.append)
    train(settings(files, epochs=1), tmp_path / "b", resume=True, say=said.append)
    assert not any(line in "\n".join(said) for line in ("the training begins", "nothing to compare"))


def test_rows_that_were_lost_are_told(tmp_path, files, monkeypatch):
    s, said = settings(files, epochs=7), []
    cut(s, tmp_path / "a", monkeypatch, 38)
    rows = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "metrics.jsonl").write_text(rows[1] + rows[3][:20])  # the last one of these is torn; the checkpoint has the sixth
    train(s, tmp_path / "a", resume=True, say=said.append)
    assert f"{tmp_path}/a/metrics.jsonl has no row of epochs 1, 3 to 5: curves and times go without." in said
    assert [row["epoch"] for row in rows_of(tmp_path / "a")] == [2, 6, 7]
    said.clear()
    cut(s, tmp_path / "b", monkeypatch, 38)
    train(s, tmp_path / "b", resume=True, say=said.append)
    assert "has no row" not in "\n".join(said)


def test_one_that_is_done_gives_its_result_again(tmp_path, files, monkeypatch):
    s = settings(files, epochs=2)
    first = quiet(s, tmp_path / "a")
    monkeypatch.setattr(Training, "train_step", None)
    said = []
    again = train(s, tmp_path / "a", resume=True, say=said.append)
    times = ("date",)
    assert {k: v for k, v in again.items() if k not in times} == {k: v for k, v in first.items() if k not in times}
    assert "It is trained already." in said
    for lost in ("result.json", "metrics.jsonl"):  # killed after the last checkpoint; and worse
        (tmp_path / "a" / lost).unlink()
        assert quiet(s, tmp_path / "a", resume=True)["top1"] == first["top1"]
        assert (tmp_path / "a" / lost).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(1, 1, 0))
    assert quiet(s, tmp_path / "a", resume=True)["done"]  # and needs no room for checkpoints


# Checkpoints

OPERATIONS = """
import json, os, sys, torch
from pathlib import Path
from halfback.train import checkpoint

out, found = Path(sys.argv[1]), []
whole = {"w": torch.arange(6.0), "tied": torch.zeros(2)}

def dies_at(n, folder, act):
    pid = os.fork()
    if pid == 0:
        seen = 0

        def hook(event, args):
            nonlocal seen
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree", "os.scandir"):
                seen += 1
                if seen == n:
                    os._exit(9)

        sys.addaudithook(hook)
        act(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9

def save(folder):
    checkpoint.save(folder, 2, {k: v + 2 for k, v in whole.items()}, {"x": 2}, 1)

def again(folder):
    checkpoint.save(folder, 1, {k: v + 1 for k, v in whole.items()}, {"x": 1}, 1)

def best(folder):
    checkpoint.save_weights(folder.parent / "best", folder, {k: v + 2 for k, v in whole.items()})

for act in (save, again, best):
    n = 1
    while True:
        folder = out / act.__name__ / str(n) / "checkpoints"
        checkpoint.save(folder, 1, {k: v + 1 for k, v in whole.items()}, {"x": 1}, 1)
        checkpoint.save_weights(folder.parent / "best", folder, {k: v + 1 for k, v in whole.items()})
        died = dies_at(n, folder, act)
        tensors, state = checkpoint.load(checkpoint.latest(folder))
        assert torch.equal(tensors["w"], whole["w"] + state["x"]) and state["step"] == state["x"], (act, n)
        from safetensors.torch import load_file
        kept = load_file(folder.parent / "best")
        assert torch.equal(kept["w"] - whole["w"], kept["tied"][:1].expand(6)), (act, n)
        checkpoint.save(folder, 3, tensors, {"x": 3}, 1)
        assert [p.name for p in folder.iterdir()] == ["00000003"], (act, n, list(folder.iterdir()))  # nothing half stays
        assert sorted(p.name for p in folder.parent.iterdir()) == ["best", "checkpoints"], (act, n)
        if not died:
            break
        n += 1
    found.append(n)
print(json.dumps(found))
"""


def test_a_kill_between_any_two_file_operations_leaves_a_good_checkpoint(tmp_path):
    save, again, best = run(OPERATIONS, tmp_path)
    assert save > 10 and best > 5 and again >= 1


def test_what_is_saved_is_what_is_loaded(tmp_path):
    tied = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    given = {
        "a": tied,
        "b": tied,
        "half": torch.randn(3).bfloat16(),
        "part": torch.randn(4, 6)[:, ::2],
        "none": torch.zeros(0),
        "n": torch.tensor(3),
    }
    place = checkpoint.save(tmp_path / "c", 7, given, {"more": 1}, keep=2)
    found, state = checkpoint.load(place)
    assert state == {"step": 7, "same": {"b": "a"}, "more": 1} and set(found) == set(given)
    assert all(torch.equal(found[k], given[k]) and found[k].dtype == given[k].dtype for k in given)
    mode = tmp_path / "new"
    mode.touch()
    assert (place / checkpoint.TENSORS).stat().st_mode == mode.stat().st_mode  # readable by whom other files are


def test_only_the_last_ones_stay(tmp_path):
    for step in (1, 2, 10, 3):
        checkpoint.save(tmp_path, step, {"x": torch.ones(1)}, {}, keep=2)
    assert [p.name for p in checkpoint.found(tmp_path)] == ["00000003", "00000010"]


def test_a_pickle_is_never_executed(tmp_path, files, capsys):
    s = settings(files, epochs=1)
    quiet(s, tmp_path / "a")
    place = checkpoint.latest(tmp_path / "a" / "checkpoints")
    marker = tmp_path / "marker"

    class Bad:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"w": Bad()}, place / checkpoint.TENSORS)
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    assert "cannot be read" in capsys.readouterr().err and not marker.exists()


@pytest.mark.parametrize("file", ["state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_works(file, tmp_path, files, capsys):
    s = settings(files, epochs=2, method="sbp(keep=0.5)")
    quiet(s, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "a")
    last = checkpoint.latest(tmp_path / "a" / "checkpoints")
    content = (last / file).read_bytes()
    (last / file).write_bytes(content[: len(content) // 2])
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert f"the checkpoint {last} cannot be read" in said and said.rstrip().endswith("Remove it to go on from 00000006.")
    (tmp_path / "a" / "result.json").unlink()
    shutil.rmtree(last)
    quiet(s, tmp_path / "a", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "a")


@pytest.mark.parametrize("at", [0.5, 0.999])
def test_tensors_that_a_disk_has_damaged_are_not_gone_on_with(at, tmp_path, files, capsys):
    s = settings(files, epochs=2)
    quiet(s, tmp_path / "a")
    last = checkpoint.latest(tmp_path / "a" / "checkpoints")
    content = bytearray((last / checkpoint.TENSORS).read_bytes())
    begin = int(at * len(content)) - 100
    content[begin : begin + 100] = b"\xff" * 100  # numbers that are none, in a file that is whole
    (last / checkpoint.TENSORS).write_bytes(content)
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert f"the checkpoint {last} cannot be read (ValueError: state.safetensors is not what was written)." in said
    assert said.rstrip().endswith("Remove it to go on from 00000006.")


def test_an_older_checkpoint_without_its_sum_and_methods_is_loaded(tmp_path, files):
    s = settings(files, epochs=1, method="sbp(keep=0.5)")
    first = quiet(s, tmp_path / "a")
    path = checkpoint.latest(tmp_path / "a" / "checkpoints") / "state.json"
    state = json.loads(path.read_text())
    assert state["crc32"] and state["methods"] == [m.to_json() for m in hb.parse(s.method)]
    path.write_text(json.dumps({k: v for k, v in state.items() if k not in ("crc32", "methods")}))
    assert quiet(s, tmp_path / "a", resume=True)["top1"] == first["top1"]


ALTERED = {
    "last": (None, "TypeError: last is None"),
    "last, no row": ({"top1": 3}, "TypeError: last is no row of an epoch"),
    "best": ("x", "TypeError: best is 'x'"),
    "seconds": ("y", "TypeError: seconds is 'y'"),
    "draws": ([], "ValueError: zip()"),
    "optimizer": ({"rest": {}, "groups": []}, "ValueError: loaded state dict has a different number of parameter groups"),
    "step": (-5, "ValueError: step is -5 in state.json"),
    "settings": (3, "TypeError: settings is 3"),
    "settings, wrong": ({"epochs": "ten"}, "ValueError: epochs 'ten' must be a whole number."),
    "methods": ([{"method": "none"}], "ValueError: from_json(): method='none' is none of"),
    "same": (["x"], "AttributeError: "),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_checkpoint_that_was_altered_is_named(name, tmp_path, files, capsys):
    value, wanted = ALTERED[name]
    quiet(settings(files, epochs=2, method="sbp(keep=0.5)"), tmp_path / "a")
    last = checkpoint.latest(tmp_path / "a" / "checkpoints")
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, name.partition(",")[0]: value}))
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"halfback: the checkpoint {last} cannot be read ({wanted}")
    assert said.endswith("). Remove it to go on from 00000006.")


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_to_be_removed(tmp_path, files, monkeypatch, capsys):
    quiet(settings(files, epochs=1), tmp_path / "a")
    for place, error in {"load_optimizer": torch.OutOfMemoryError("CUDA out of memory."), "sum_of": MemoryError()}.items():
        with monkeypatch.context() as m:
            m.setattr(checkpoint, place, lambda *a, error=error: (_ for _ in ()).throw(error))
            assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
        said = capsys.readouterr().err
        assert "before the first step: the model and the data do not fit." in said and "Remove" not in said


@pytest.mark.parametrize("lost", ["optimizer", "draws", "scaler", "last", "step"])
def test_a_checkpoint_that_lacks_something_is_named(lost, tmp_path, files, capsys):
    s = settings(files, epochs=1)
    cutting = tmp_path / "a"
    quiet(s, cutting)
    place = checkpoint.latest(cutting / "checkpoints")
    state = json.loads((place / "state.json").read_text())
    del state[lost]
    (place / "state.json").write_text(json.dumps(state))
    assert main(["train", "--resume", "--out", str(cutting)]) == 2
    assert "cannot be read (KeyError" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, files, monkeypatch, capsys):
    s = settings(files, epochs=3, method="sbp(keep=0.5)", save_every=2)
    quiet(s, tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    own = Training.train_step

    def fills(self, x, y):
        if self.step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        own(self, x, y)

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as m:
            m.setattr(Training, "train_step", fills)
            assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        "the checkpoint of step 8 cannot be written" in said
        and "The last whole checkpoint is of step 6: free some room and give --resume." in said
    )
    assert [p.name for p in sorted((tmp_path / "a" / "checkpoints").iterdir())] == ["00000004", "00000006"]
    quiet(s, tmp_path / "a", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "a")


def test_a_full_disk_at_the_best_weights_or_the_metrics_is_one_line(tmp_path, files, monkeypatch, capsys):
    s = settings(files, epochs=2)

    def full(*a, **k):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}/a/best.safetensors cannot be written (No space left on device). There is no checkpoint yet." in said
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(1, 1, 100_000))
    assert main(["train", *options_of(s), "--out", str(tmp_path / "b")]) == 2
    assert "Free some, keep fewer, or give another --out." in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_room_is_asked_for_all_that_is_kept(tmp_path, monkeypatch):
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(1, 1, free))
    mib = 2**20
    with pytest.raises(OSError) as error:
        checkpoint.check_room(tmp_path / "new", mib + mib // 2, 5, mib // 2)
    assert str(error.value) == (
        f"{tmp_path}/new: 0 B are free on this disk, and 9.5 MiB are wanted: 6 checkpoints of 1.5 MiB (--keep-last 5, and the one that is "
        "written) and best weights of 512.0 KiB. Free some, keep fewer, or give another --out."
    )
    for keep, best, wanted in ((2, 0, 3 * mib), (2, mib // 2, 3 * mib + mib // 2), (5, 0, 6 * mib)):
        free = wanted
        checkpoint.check_room(tmp_path, mib, keep, best)
        free -= 1
        with pytest.raises(OSError, match=f"{keep + 1} checkpoints of 1.0 MiB"):
            checkpoint.check_room(tmp_path, mib, keep, best)
    for step in (1, 2):  # those that are there have their room; the next one needs its own
        checkpoint.save(tmp_path / "checkpoints", step, {"x": torch.zeros(mib // 4)}, {}, keep=2)
    free = mib
    checkpoint.check_room(tmp_path, mib, 2, 0)
    checkpoint.check_room(tmp_path, mib, 1, 0)
    with pytest.raises(OSError, match=r"2.0 MiB are wanted: 4 checkpoints .*, less 2.0 MiB that are there"):
        checkpoint.check_room(tmp_path, mib, 3, 0)


def test_a_disk_that_is_full_at_the_end_is_told_and_what_was_there_stays(tmp_path, files, monkeypatch, capsys):
    quiet(settings(files, epochs=1), tmp_path / "a")
    before = content(tmp_path / "a")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    advice = "What was there stays. Free some room, or make it writable, and give the same command again."
    assert said == f"halfback: {tmp_path}/a/settings.json cannot be written (No space left on device). {advice}"
    assert content(tmp_path / "a") == before


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_another_model_data_or_settings_are_refused(tmp_path, files, capsys):
    nets, data = (shutil.copy(files / name, tmp_path / name) for name in ("nets.py", "few.npz"))
    out = tmp_path / "a"
    s = settings(files, epochs=1, model=f"{nets}:plain", data=str(data))
    quiet(s, out)

    def refused(*given):
        before = content(out)
        assert main(["train", "--resume", "--out", str(out), *given]) == 2
        assert content(out) == before
        return capsys.readouterr().err

    assert f"{out} has a training with other settings (lr: 0.01 there, 0.5 now)" in refused("--lr", "0.5")
    assert "other settings (model: " in refused("--model", "small-vit")
    nets.write_text(NOISY.replace("width=16", "width=32"))
    assert "is a checkpoint of another model than" in refused()
    nets.write_text(NOISY)
    x, y = pictures(80, 0)
    np.savez(data, x_train=x, y_train=y, x_test=x, y_test=y)
    assert "was trained on 96 samples of (1, 8, 8), 4 classes; now " in refused()
    (out / "settings.json").unlink()  # the checkpoint knows what it is of
    assert "lr: 0.01 there, 0.5 now" in refused(*options_of(s), "--lr", "0.5")


def test_paths_and_places_may_change_when_it_goes_on(tmp_path, files):
    s = settings(files, epochs=1)
    quiet(s, tmp_path / "a")
    quiet(Settings(**{**s.to_json(), "keep_last": 1, "save_every": 2, "best": False}), tmp_path / "a", resume=True)


def test_tests_between_epochs_change_nothing_and_the_last_epoch_is_tested(tmp_path, files, monkeypatch):
    """Cut in an epoch whose row has no test, too."""
    quiet(settings(files, epochs=5, ema=0.9), tmp_path / "always")
    s = settings(files, epochs=5, ema=0.9, test_every=3)
    cut(s, tmp_path / "seldom", monkeypatch, step=25)
    quiet(s, tmp_path / "seldom", resume=True)
    every, seldom = rows_of(tmp_path / "always"), rows_of(tmp_path / "seldom")
    assert [row["epoch"] for row in seldom if "top1" in row] == [3, 5] and [row["epoch"] for row in seldom] == [1, 2, 3, 4, 5]
    assert all(few.items() <= all_.items() for few, all_ in zip(seldom, every, strict=True))
    result = json.loads((tmp_path / "seldom" / "result.json").read_text())
    assert result["top1"] == every[4]["top1"] and result["best_top1"] == max(every[2]["top1"], every[4]["top1"])
    assert result["curves"]["top1"] == [None, None, every[2]["top1"], None, every[4]["top1"]]


# The same seed, the same training


def seen_by(s, folder, monkeypatch):
    """What the model is given in every step, and the weights that it begins with."""
    batches, own = [], Training._loss

    def told(self, x, y):
        batches.append(hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest())
        return own(self, x, y)

    with monkeypatch.context() as m:
        m.setattr(Training, "_loss", told)
        first = {k: v.clone() for k, v in training(s, folder).model.state_dict().items()}
        quiet(s, folder)
    return batches, first


def test_the_seed_alone_says_what_a_training_sees(tmp_path, files, monkeypatch):
    augmented = {"crop": 1, "flip": True, "mixup": 0.3, "erase": 0.2}
    made = {}
    for name, changed in {
        "exact": {},
        "sbp": {"method": "sbp(keep=0.5)"},
        "dropit": {"method": "dropit(keep=0.2)", "ema": 0.9, "lr": 0.02},
        "other": {"seed": 1},
    }.items():
        made[name] = seen_by(settings(files, **{**augmented, **changed}), tmp_path / name, monkeypatch)
    batches, first = made["exact"]
    assert len(batches) == 12 and len(set(batches)) == 12  # no batch comes twice, nor does an epoch
    for name in ("sbp", "dropit"):
        assert made[name][0] == batches and all(torch.equal(made[name][1][k], first[k]) for k in first)
    assert not set(made["other"][0]) & set(batches)
    assert not all(torch.equal(made["other"][1][k], first[k]) for k in first)


def gradients(t, x, y):
    t.seeded()
    t.model.zero_grad(set_to_none=True)
    t._loss(x, y).backward()
    return [p.grad.clone() for p in t.model.parameters()]


def test_masks_differ_from_step_to_step(tmp_path, files):
    for method, alike in (("exact", True), ("lean", True), ("sbp(keep=0.5)", False)):
        t = training(settings(files, method=method), tmp_path)
        x, y = t._batch(torch.arange(16), 0)
        one, two = gradients(t, x, y), gradients(t, x, y)  # the same batch, weights and seed
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) is alike, method


def test_lean_trains_as_exact_does_to_the_bit(tmp_path, files):
    for name in ("exact", "lean"):
        quiet(settings(files, epochs=3, method=name, ema=0.9), tmp_path / name)
    assert_same(tmp_path / "exact", tmp_path / "lean", draws=False)


@pytest.mark.filterwarnings("ignore:halfback, step")
def test_the_monitor_changes_nothing_and_looks_at_the_loss_that_is_trained(tmp_path, files, monkeypatch):
    quiet(settings(files, method="sbp(keep=0.5)", mixup=0.2), tmp_path / "without")
    losses, own = [], loop.loss_from
    monkeypatch.setattr(loop, "loss_from", lambda scores, y, *a, **k: losses.append(tuple(y.shape)) or own(scores, y, *a, **k))
    quiet(settings(files, method="sbp(keep=0.5)", mixup=0.2, monitor=4), tmp_path / "with")
    one, two = state_of(tmp_path / "without")[0], state_of(tmp_path / "with")[0]
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert losses.count((4, 4)) == 2 * 3  # a quarter of the batch with its mixed labels, exact and approximate, in 3 of 12 steps
    row = rows_of(tmp_path / "with")[-1]
    assert row["monitor"]["step"] == 12 and 0 < row["monitor"]["cosine"] <= 1
    assert "monitor" not in rows_of(tmp_path / "without")[-1]


def test_counting_what_is_held_leaves_no_trace(tmp_path, files, monkeypatch):
    monkeypatch.undo()
    s = settings(files, method="sbp(keep=0.5)", mixup=0.2)
    t = training(s, tmp_path)
    plain = training(settings(files, mixup=0.2), tmp_path)
    assert t.held and plain.held and t.held < plain.held

    def standing():
        draws = [d.mark() for applied in loop.applied_to(t.model) for d in applied.states]
        return {k: v.clone() for k, v in t.model.state_dict().items()}, draws, torch.get_rng_state(), [p.grad for p in t.model.parameters()]

    before = standing()
    t._count_held()
    after = standing()
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0]) and before[1] == after[1] and after[3] == before[3]
    assert t.model.training and not t.report.rows


# The pieces


def test_rates():
    s = {"lr": 1.0, "epochs": 10}
    cosine = Settings(**s)
    assert rate(cosine, 0, 5) == 1.0 and rate(cosine, 25, 5) == pytest.approx(0.5)
    assert rate(cosine, 49, 5) == pytest.approx((1 + math.cos(math.pi * 49 / 50)) / 2)
    warm = Settings(**s, warmup=2)
    assert [rate(warm, i, 5) for i in (0, 4, 9)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert rate(warm, 10, 5) == 1.0 and rate(warm, 30, 5) == pytest.approx(0.5)
    assert rate(warm, 49, 5) == pytest.approx((1 + math.cos(math.pi * 39 / 40)) / 2)
    steps = Settings(**s, schedule="step")
    assert [rate(steps, i, 5) for i in (0, 14, 15, 29, 30, 39, 40, 49)] == pytest.approx([1, 1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008])
    assert {rate(Settings(**s, schedule="constant"), i, 5) for i in range(50)} == {1.0}
    assert rate(Settings(lr=1.0, epochs=2, warmup=2), 9, 5) == pytest.approx(10 / 11)  # nothing but warm-up


def test_the_rate_of_a_step_reaches_the_optimizer(tmp_path, files, monkeypatch):
    s = settings(files, warmup=1, schedule="cosine")
    rates, own = [], torch.optim.AdamW.step

    def told(self, *a, **k):
        rates.append({g["lr"] for g in self.param_groups})
        return own(self, *a, **k)

    monkeypatch.setattr(torch.optim.AdamW, "step", told)
    quiet(s, tmp_path)
    assert rates == [{rate(s, i, 6)} for i in range(12)]


def test_decay_is_for_what_it_says():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    groups = make_optimizer(Settings(), model).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.05), (3, 0.0)]
    assert groups[0]["params"][0] is model[0].weight and groups[0]["betas"] == (0.9, 0.999) and groups[0]["lr"] == 0.001
    groups = make_optimizer(Settings(optimizer="sgd"), model).param_groups
    assert [(len(g["params"]), g["weight_decay"], g["lr"], g["momentum"], g["nesterov"]) for g in groups] == [(4, 5e-4, 0.1, 0.9, True)]
    groups = make_optimizer(Settings(optimizer="sgd", momentum=0, decay="matrices", weight_decay=0.1), model).param_groups
    assert [(len(g["params"]), g["weight_decay"], g["nesterov"]) for g in groups] == [(1, 0.1, False), (3, 0.0, False)]
    model[0].requires_grad_(False)
    assert [len(g["params"]) for g in make_optimizer(Settings(), model).param_groups] == [2]


def test_averaged_weights_against_a_sum_by_hand():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first, seen = [p.detach().clone() for p in model.parameters()], []
    averaged = Averaged(model, 0.8)
    for step in range(1, 9):
        model(torch.randn(5, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        averaged.update(model, step)
        seen.append(([p.detach().clone() for p in model.parameters()], model[1].running_mean.clone()))
    decays = [min(0.8, (1 + s) / (10 + s)) for s in range(1, 9)]
    for i, own in enumerate(averaged.model.parameters()):
        wanted = first[i].double()
        for d, (weights, _) in zip(decays, seen, strict=True):
            wanted = d * wanted + (1 - d) * weights[i]
        assert torch.allclose(own.double(), wanted, atol=1e-6) and not own.requires_grad
    mean = torch.zeros(2, dtype=torch.float64)
    for d, (_, running) in zip(decays, seen, strict=True):
        mean = d * mean + (1 - d) * running
    assert torch.allclose(averaged.model[1].running_mean.double(), mean, atol=1e-6)  # the statistics of those weights
    assert averaged.model[1].num_batches_tracked == 8 and not averaged.model.training


def test_parts_of_a_batch_give_its_gradient(tmp_path, files):
    plain = {"model": f"{files}/nets.py:plain", "optimizer": "sgd", "epochs": 1, "mixup": 0.2, "clip": 0.5}
    found = []
    for parts in (1, 2, 4):
        t = training(settings(files, **plain, accumulate=parts), tmp_path)
        t.train_step(*t.data.train.batch(torch.arange(16)))
        found.append(([p.detach().clone() for p in t.model.parameters()], t.loss.item()))
    for weights, loss in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(weights, found[0][0], strict=True))


class Scaled:
    """A GradScaler that scales, which on a CPU none does. As theirs it unscales in its step what is not unscaled yet."""

    done = False

    def scale(self, loss):
        return loss * 1024

    def unscale_(self, optimizer):
        for g in optimizer.param_groups:
            for p in g["params"]:
                p.grad.div_(1024)
        self.done = True

    def step(self, optimizer):
        if not self.done:
            self.unscale_(optimizer)
        optimizer.step()

    def update(self):
        pass


def test_what_is_clipped_is_the_gradient_without_its_scale(tmp_path, files):
    found = []
    for scaler in (None, Scaled()):
        t = training(settings(files, optimizer="sgd", momentum=0, weight_decay=0, lr=1.0, clip=0.1), tmp_path)
        t.scaler = scaler or t.scaler
        before = [p.detach().clone() for p in t.model.parameters()]
        t.train_step(*t.data.train.batch(torch.arange(16)))
        moved = [b - p.detach() for p, b in zip(t.model.parameters(), before, strict=True)]
        assert torch.stack([m.norm() for m in moved]).norm() == pytest.approx(0.1, rel=1e-3)  # the norm of an update at a rate of 1
        found.append(moved)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*found, strict=True))


def test_noise_and_augmentation_do_not_share_their_numbers(tmp_path, files):
    t = training(settings(files), tmp_path)
    t.seeded()
    assert not torch.equal(torch.rand(8), torch.rand(8, generator=t.generator))
    t.seeded()
    first = torch.rand(8), torch.rand(8, generator=t.generator)
    t.seeded()
    assert torch.equal(first[0], torch.rand(8)) and torch.equal(first[1], torch.rand(8, generator=t.generator))
    t.step += 1
    t.seeded()
    assert not torch.equal(first[0], torch.rand(8)) and not torch.equal(first[1], torch.rand(8, generator=t.generator))


def test_the_tail_is_exact_and_only_the_tail(tmp_path, files, monkeypatch):
    s = settings(
        files, method="sbp(keep=0.25)", exact_tail=0.25, model=f"{files}/nets.py:plain", optimizer="sgd", momentum=0, weight_decay=0
    )
    t, checked = training(s, tmp_path), []
    assert t.steps == 12
    for step in range(12):
        x, y = t.data.train.batch(torch.arange(16))
        before = [p.detach().clone() for p in t.model.parameters()]
        t.seeded()
        with hb.exact(t.model):
            loss = t._loss(*t.prepared(x, y, True))
            wanted = torch.autograd.grad(loss, list(t.model.parameters()))
        t.train_step(x, y)
        r = rate(s, step, 6)
        checked.append(all(torch.equal(b - r * g, p.detach()) or torch.allclose(b - r * g, p.detach(), rtol=1e-6, atol=1e-9)
                           for b, g, p in zip(before, wanted, t.model.parameters(), strict=True)))  # fmt: skip
    assert checked == [False] * 9 + [True] * 3


def test_the_schedule_is_followed_and_no_more_is_held_in_the_tail(tmp_path, files, monkeypatch):
    monkeypatch.undo()
    method = "sbp(keep=0.5, layers='all', schedule=((0, 0.75), (0.5, 0.25)))"
    t = training(settings(files, method=method, exact_tail=0.25, model=f"{files}/nets.py:plain"), tmp_path)
    most, held = t.held, []
    for _ in range(t.steps):
        t.train_step(*t.data.train.batch(torch.arange(16)))
        held.append(hb.held(t.model, t._one_batch()))
    assert held[0] == most and held[1:6] == sorted(held[1:6], reverse=True) and held[6] == held[8] == min(held[:9])
    assert most > held[8] > held[9] == held[11], "the tail is exact, and recomputed"


def test_losses_against_torch():
    torch.manual_seed(0)
    scores, y, soft = torch.randn(6, 5), torch.randint(5, (6,)), torch.rand(6, 5).softmax(1)
    logp = scores.log_softmax(1)
    smoothed = 0.9 * F.one_hot(y, 5) + 0.1 / 5
    assert torch.allclose(loss_from(scores, y), -logp[range(6), y].mean())
    assert torch.allclose(loss_from(scores, y, 0.1), -(smoothed * logp).sum(1).mean())
    assert torch.allclose(loss_from(scores, soft), -(soft * logp).sum(1).mean())
    assert torch.allclose(loss_from(scores, y, reduction="sum"), -logp[range(6), y].sum())
    words, ids = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    assert torch.allclose(loss_from(words, ids), F.cross_entropy(words.reshape(6, 5), ids.reshape(6)))


@pytest.mark.parametrize("mixing", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "smoothing": 0.1}])
def test_the_loss_of_mixed_samples(mixing, tmp_path, files):
    t = training(settings(files, **mixing), tmp_path)
    raw, labels = t.data.train.batch(torch.arange(16))
    t.seeded()
    x, y = t.prepared(raw, labels, augmented=True)
    g = torch.Generator().manual_seed(loop.seed_from("step", 0, 0))
    augment = Augment(mixup=mixing.get("mixup", 0.0), cutmix=mixing.get("cutmix", 0.0))
    mixed, soft = augment.mixed(augment.prepared(raw, t.data.mean, t.data.deviation, g), labels, g, 4)
    assert torch.equal(x, mixed) and torch.equal(y, soft) and torch.allclose(soft.sum(1), torch.ones(16))
    t.model.eval()
    logp, share = t.model(x).log_softmax(1), mixing.get("smoothing", 0.0)
    wanted = -(((1 - share) * soft + share / 4) * logp).sum(1).mean()
    assert torch.allclose(t._loss(x, y), wanted, rtol=1e-5)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_the_test_against_a_direct_computation(ema, tmp_path, files):
    t = training(settings(files, ema=ema, method="sbp(keep=0.5)"), tmp_path)
    for i in range(3):
        t.train_step(*t.data.train.batch(torch.arange(16 * i, 16 * i + 16)))
    found = t.test()
    assert t.model.training and t.test() == found
    model = (t.averaged.model if ema else t.model).eval()
    x = (t.data.test.inputs / 255.0 - t.data.mean.view(1, -1, 1, 1)) / t.data.deviation.view(1, -1, 1, 1)
    y = t.data.test.labels
    with torch.no_grad():
        scores = torch.cat([model(part) for part in x.split(7)])
    ranks = (scores > scores[range(40), y][:, None]).sum(1)
    assert found["top1"] == pytest.approx(100 * (ranks < 1).double().mean().item()) and found["top5"] == 100
    assert found["test_loss"] == pytest.approx(F.cross_entropy(scores.double(), y).item(), rel=1e-5)
    if ema:
        with torch.no_grad():
            other = t.model.eval()(x)
        assert not torch.allclose(other, scores)


def test_what_can_be_learned_is_learned(tmp_path, files):
    for name, more in {"exact": {}, "dropit(keep=0.5)": {"optimizer": "sgd", "ema": 0.5}}.items():
        found = quiet(settings(files, epochs=6, method=name, model=f"{files}/nets.py:normed", lr=0.05, **more), tmp_path / name)
        assert found["top1"] > 95 and found["train_loss"] < 0.3 and found["best_top1"] >= found["top1"]


# Every kind of model and data


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    from PIL import Image

    folder = tmp_path_factory.mktemp("sets")
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / "images" / part / name).mkdir(parents=True)
            for i in range(4):
                Image.fromarray(draw.integers(0, 255, (40, 50, 3), np.uint8)).save(folder / "images" / part / name / f"{i}.jpg")
    (folder / "clips").mkdir()
    for part in ("train", "test"):
        np.savez(folder / "clips" / f"{part}.npz", clips=draw.integers(0, 255, (8, 4, 8, 8, 3), np.uint8), labels=np.arange(8) % 2)
    (folder / "text.txt").write_bytes(bytes(draw.integers(97, 105, 2000, np.uint8)))
    x, y = draw.integers(0, 255, (16, 3, 32, 32), np.uint8), np.arange(16) % 3
    np.savez(folder / "small.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    (folder / "vit.json").write_text(json.dumps({"model_type": "vit", **common, "patch_size": 8}))
    (folder / "bert.json").write_text(json.dumps({"model_type": "bert", **common}))
    gpt = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "eos_token_id": [50256, 3]}
    (folder / "gpt2.json").write_text(json.dumps(gpt))
    (folder / "nets.py").write_text(NOISY)
    return folder


KINDS = {
    "digits": ("small-vit", "digits", {"batch": 700, "method": "sbp(keep=0.5)"}),
    "resnet": ("resnet18", "SETS/small.npz", {"method": "lean", "crop": 2, "flip": True, "channels_last": True}),
    "convnext": ("convnext", "SETS/small.npz", {"method": "sbp(keep=0.5)", "drop_path": 0.2}),
    "vit": ("vit-s4-mean", "SETS/small.npz", {"method": "sbp(keep=0.5)", "drop_path": 0.1}),
    "folder": ("SETS/nets.py:tiny", "folder", {"root": "SETS/images", "size": 16, "method": "dropit(keep=0.5)", "mixup": 0.1}),
    "video": ("SETS/nets.py:video", "video", {"root": "SETS/clips", "randaugment": 1, "cutmix": 1.0, "channels_last": True}),
    "text": ("hf:SETS/gpt2.json", "text", {"root": "SETS/text.txt", "seq": 16, "method": "lean", "smoothing": 0.1}),
    "text, looked at": ("hf:SETS/gpt2.json", "text", {"root": "SETS/text.txt", "seq": 16, "method": "sbp(keep=0.5)", "monitor": 1}),
    "timm": ("timm:test_vit", "SETS/small.npz", {"method": "lean", "drop_path": 0.1}),
    "torchvision": ("torchvision:squeezenet1_1", "SETS/small.npz", {"method": "lean"}),
    "hf images": ("hf:SETS/vit.json", "SETS/small.npz", {"method": "sbp(keep=0.5)", "dtype": "bf16", "ema": 0.9}),
    "bf16": ("small-vit", "SETS/small.npz", {"method": "dropit(keep=0.3)", "dtype": "bf16", "accumulate": 2, "clip": 1.0}),
    "json": ("small-vit", "SETS/small.npz", {"method": json.dumps([m.to_json() for m in (hb.SBP(keep=0.5, seed=3), hb.Lean())])}),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:halfback, step")
def test_every_kind_trains(name, tmp_path, sets, capsys, monkeypatch):
    if name not in ("resnet", "vit", "convnext"):
        monkeypatch.undo()  # with what is held, which here counts the real step
    (sets / "nets.py").write_text(
        NOISY + "\ndef tiny():\n    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))\n"
    )
    model, data, more = KINDS[name]
    given = {k: v.replace("SETS", str(sets)) if isinstance(v, str) else v for k, v in more.items()}
    s = Settings(model=model.replace("SETS", str(sets)), data=data.replace("SETS", str(sets)), epochs=1, **{"batch": 8, **given})
    assert main(["train", *options_of(s), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["held"] and "held not counted" not in said.out and f"; {result['steps']} steps" not in said.out
    assert math.isfinite(result["train_loss"]) and result["top5"] >= result["top1"] and result["steps"] >= 1
    assert ("perplexity" in result) == (data == "text")
    assert s.method == "exact" or (result["report"] and "known after" not in result["report"])
    assert f"top-1 {result['top1']:.2f} %" in said.out
    if name == "json":
        assert "seed=3" in result["methods"]


def test_a_compiled_model_trains(tmp_path, files, monkeypatch):
    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: own(model, backend="aot_eager", **how))
    for name, changed in {"eager": {}, "compiled": {"compile": True}}.items():
        quiet(settings(files, model=f"{files}/nets.py:plain", epochs=1, optimizer="sgd", **changed), tmp_path / name)
    one, two = (state_of(tmp_path / name)[0] for name in ("eager", "compiled"))
    assert set(one) == set(two) and all(torch.allclose(one[k], two[k], rtol=1e-3, atol=1e-5) for k in one)


def test_a_budget_is_planned_once(tmp_path, files, monkeypatch, capsys):
    s = settings(files, model=f"{files}/nets.py:plain", budget="0.6", epochs=2)
    planned, own = [], loop.planner.plan
    monkeypatch.setattr(loop.planner, "plan", lambda *a, **k: planned.append(1) or own(*a, **k))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "methods.json").write_text("[]")  # of a training that did not get to its first checkpoint
    cut(s, tmp_path / "a", monkeypatch, 8)
    found = json.loads((tmp_path / "a" / "methods.json").read_text())
    assert found and len(planned) == 1
    result = quiet(s, tmp_path / "a", resume=True)
    assert len(planned) == 1 and result["methods"] != "exact"
    quiet(settings(files, model=s.model, method=json.dumps(found), epochs=2), tmp_path / "b")
    one, two = state_of(tmp_path / "a")[0], state_of(tmp_path / "b")[0]
    assert all(torch.equal(one[k], two[k]) for k in one)
    (tmp_path / "a" / "methods.json").write_text("[]")  # what was trained so far was not exact
    before = content(tmp_path / "a")
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err
    assert f"was trained with other methods ({result['methods']} there, exact now). Of a --budget they stand in {tmp_path}/a/meth" in said
    assert content(tmp_path / "a") == before
    (tmp_path / "a" / "methods.json").write_text("[{")
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    assert f"{tmp_path}/a/methods.json: method '[{{' is no JSON list of methods" in capsys.readouterr().err


# What is wrong is one line


def cifar(folder, *, cut=0, label=0):
    folder.mkdir()
    record = bytes([0, label]) + bytes(3072)
    (folder / "train.bin").write_bytes((record * 3)[: 3 * 3074 - cut])
    (folder / "test.bin").write_bytes(bytes(3074))
    return folder


WRONG = {
    "data": (["--data", "nothing"], "data 'nothing' is unknown"),
    "file": (["--data", "nothing.npz"], "there is no such file"),
    "root": (["--data", "cifar100", "--root", "TMP"], "there is no such file. Download"),
    "cut": (["--data", "cifar100", "--root", "CUT"], "which is no multiple of a record's 3074"),
    "label": (["--data", "cifar100", "--root", "LABEL"], "has label 200; wanted 0 ... 99"),
    "model": (["--model", "vit"], "model 'vit' is unknown. Models: small-vit, "),
    "timm": (["--model", "timm:no_such"], "timm has no such model"),
    "method": (["--method", "sbpp"], "is none of the methods"),
    "keep": (["--method", "sbp(keep=2)"], "keep"),
    "layers": (["--method", "sbp(layers='blocks.9')"], "blocks.9"),
    "json": (["--method", '[{"method": "sbp", "kep": 1}]'], "kep"),
    "option": (["--nothing", "3"], "unrecognized arguments: --nothing 3. See halfback"),
    "number": (["--epochs", "ten"], "argument --epochs: invalid int value: 'ten'"),
    "batch": (["--batch", "97"], "batch 97 is more than the 96 samples of"),
    "parts": (["--batch", "16", "--accumulate", "3"], "batch 16 cannot be run in 3 parts"),
    "drop path": (["--drop-path", "0.1"], "drop_path 0.1 is for vit-s4, vit-s4-mean, convnext and timm's models; "),
    "drop path, resnet": (["--drop-path", "0.1", "--model", "resnet18"], "'resnet18' takes none"),
    "drop path, timm": (["--drop-path", "0.1", "--model", "timm:vgg11"], "model 'timm:vgg11' takes no drop path"),
    "device": (["--device", "nowhere"], "device 'nowhere' cannot be used"),
    "meta": (["--device", "meta"], "its tensors have no contents"),
    "fp16": (["--dtype", "fp16"], "dtype fp16 needs a GPU; give bf16 or fp32"),
    "dtype": (["--dtype", "fp8"], "dtype 'fp8' is none of fp32, bf16, fp16"),
    "both": (["--budget", "0.5", "--method", "lean"], "budget 0.5 chooses the methods itself"),
    "budget": (["--budget", "much"], "budget 'much' is neither a size, as 10GiB or 800MiB, nor a share"),
    "budget of 0": (["--budget", "0"], "budget '0' is neither"),
    "scores": (["--model", "NETS:wrong"], "returns (2, 7) for 2 samples"),
    "forward": (["--model", "NETS:broken"], "does not take 2 samples of"),
    "frozen": (["--model", "NETS:frozen"], "nets.py:frozen' has nothing to train: all of its "),
    "no parameters": (["--model", "NETS:empty"], "nets.py:empty' has nothing to train: it has no parameters."),
    "making": (["--model", "NETS:raises"], "making it fails: KeyError: 'no such thing'"),
    "function": (["--model", "NETS:nothing"], "the file has no function nothing. It has: make, plain"),
    "patches": (["--model", "vit-s4", "--data", "digits", "--size", "3"], "size=3 means something for 'folder' only"),
    "text model": (["--data", "text", "--root", "NETS", "--seq", "8", "--model", "vit-s4"], "takes no text. Give hf:NAME"),
    "flipped text": (["--data", "text", "--root", "NETS", "--model", "NETS:make", "--flip", "--seq", "8"], "flip: that is for images"),
    "encoder": (["--data", "text", "--root", "NETS", "--seq", "8", "--model", "hf:bert"], "text wants one for CausalLM"),
    "channels": (["--model", "torchvision:squeezenet1_1"], "wants images of 3 channels, the data has 1"),
    "clips": (["--data", "video", "--root", "VIDEO", "--model", "small-vit", "--batch", "2"], "takes no clips. Give"),
    "images": (["--model", "hf:gpt2"], "is made for CausalLM; images wants one for ImageClassification"),
    "validation": (["--validation", "96"], "validation=96 does not lie in 0 ... 95"),
    "warmup": (["--warmup", "3", "--epochs", "2"], "warmup 3 is longer than the training of 2 epochs"),
    "milestones": (["--schedule", "step", "--milestones", "30", "60"], "milestones 30, 60 must be shares of the training, in [0, 1]"),
    "nan": (["--warmup", "nan"], "warmup nan must be a finite number"),
    "lr": (["--lr", "-1"], "lr -1.0 must be above 0"),
    "settings": (["--settings", "TMP/none.json"], "there is no such file"),
    "tensorboard": (["--tensorboard"], "a training needs tensorboard, which is not there: pip install tensorboard"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(name, tmp_path, files, capsys, monkeypatch):
    given, wanted = WRONG[name]
    (tmp_path / "more").mkdir()
    places = {"NETS": f"{files}/nets.py", "CUT": tmp_path / "cut", "LABEL": tmp_path / "label", "TMP": tmp_path / "more"}
    if name == "clips":
        places["VIDEO"] = tmp_path
        for part in ("train", "test"):
            np.savez(tmp_path / f"{part}.npz", clips=np.zeros((4, 2, 8, 8, 3), np.uint8), labels=np.arange(4) % 2)
    if name in ("cut", "label"):
        cifar(tmp_path / name, **{"cut": {"cut": 5}, "label": {"label": 200}}[name])
    if name == "tensorboard":
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        own = loop.importlib.util.find_spec
        monkeypatch.setattr(loop.importlib.util, "find_spec", lambda n: None if n == "tensorboard" else own(n))
    for key, place in places.items():
        given = [g.replace(key, str(place)) for g in given]
    base = ["train", "--model", f"{files}/nets.py:make", "--data", f"{files}/few.npz", "--batch", "16", "--out", str(tmp_path / "out")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*base, *given]) == 2
    caught = capsys.readouterr()
    assert wanted in caught.err, caught.err
    assert caught.err.startswith("halfback: ") and caught.err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert main(["train", "--device", "cuda", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "device 'cuda' cannot be used: " in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "is no JSON"),
        ("[1]", "list is no setting of a training"),
        ("\xff", "is no JSON"),
        ('{"epoch": 3}', "epoch is no setting of a training. Known: accumulate"),
        ('{"epochs": "ten"}', "epochs 'ten' must be a whole number"),
        ('{"batch": 12.5}', "batch 12.5 must be a whole number"),
        ('{"betas": 3}', "betas 3 must be a list of finite numbers"),
        ('{"betas": [0.9]}', "betas 0.9 must be two numbers in [0, 1)"),
        ('{"betas": [0.9, null]}', "must be a list of finite numbers"),
        ('{"epochs": null}', "epochs None must be a whole number"),
        ('{"epochs": true}', "epochs True must be a whole number"),
        ('{"flip": 1}', "flip 1 must be true or false"),
        ('{"method": ["sbp"]}', "method ['sbp'] must be a text"),
        ('{"lr": "0.1"}', "lr '0.1' must be a finite number"),
        ('{"lr": NaN}', "lr nan must be a finite number"),
        ('{"lr": 0}', "lr 0.0 must be above 0"),
        ('{"ema": 1}', "ema 1.0 must be in (0, 1), as 0.999"),
        ('{"seed": -1}', "seed -1 must be at least 0, and below 2**63"),
    ],
)
def test_settings_that_are_wrong_are_told_with_their_file(text, wanted, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["train", "--settings", str(path), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"halfback: {path}") and wanted in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    shutil.copy(path, tmp_path / "out" / "settings.json")
    assert main(["train", "--resume", "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path}/out/settings.json" in capsys.readouterr().err
    assert (tmp_path / "out" / "settings.json").read_bytes() == path.read_bytes()


def test_null_is_the_usual_and_what_is_given_goes_over_the_file(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"lr": null, "epochs": 3, "milestones": [0.5], "warmup": 1}')
    args = options.argparse.ArgumentParser()
    options.add_arguments(args)

    def read(*given):
        return options.settings_from(args.parse_args(["--settings", str(path), *given]))

    assert read().lr == 0.001 and read().milestones == (0.5,) and read().epochs == 3 and read().warmup == 1.0
    other = read("--optimizer", "sgd", "--epochs", "5")  # and has sgd's usual rate and decay, not adamw's
    assert (other.lr, other.weight_decay, other.epochs, other.decays) == (0.1, 0.0005, 5, "all")
    assert Settings.from_json(json.loads(json.dumps(other.to_json()))) == other


def test_every_setting_is_an_option_with_help(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    for name in Settings().to_json():
        assert f"--{name.replace('_', '-')}" in said
    assert "(default: 128)" in said and "(default: True)" not in said and "None" not in said and "(0.3, 0.6" not in said


def test_budgets():
    assert budget_of(None) is None and budget_of("0.4") == 0.4 and budget_of("1") == 1.0 and budget_of("1.0") == 1.0
    assert budget_of("2") == 2 and budget_of("10GiB") == 10 * 2**30 and isinstance(budget_of("10GiB"), int)


def test_a_folder_that_cannot_be_is_told_before_anything_is_loaded(tmp_path, files, monkeypatch, capsys):
    monkeypatch.setattr(Training, "__init__", None)
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        assert main(["train", "--out", str(tmp_path / out)]) == 2
        assert f"{tmp_path}/file is a file. Give a folder." in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root may write anywhere
    assert main(["train", "--out", str(tmp_path / "new")]) == 2
    assert "cannot be written to. Give another folder." in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_training_that_is_there_is_not_overwritten(tmp_path, files, capsys):
    s = settings(files, epochs=1)
    quiet(s, tmp_path / "a")
    before = content(tmp_path / "a")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    assert "has a training already. --resume goes on with it; or give another --out." in capsys.readouterr().err
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    assert all((p.read_bytes() == c) for p, c in before.items() if "checkpoints" not in p.parts)


@pytest.mark.parametrize("lr", [1e30, 1e4])
def test_one_that_diverges_is_told_and_only_good_checkpoints_stay(lr, tmp_path, files, monkeypatch, capsys):
    """At step 5 the rate explodes: the next loss is not finite, or the weights are not."""
    own = loop.rate
    monkeypatch.setattr(loop, "rate", lambda s, step, n: lr * 1e8 if step >= 5 else own(s, step, n))
    s = settings(files, epochs=3, save_every=1, model=f"{files}/nets.py:normed", optimizer="sgd", lr=0.05, keep_last=3)
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "training has diverged. Lower --lr, give --warmup or --clip" in said and "is from before." in said
    for place in checkpoint.found(tmp_path / "a" / "checkpoints"):
        assert all(t.isfinite().all() for k, t in checkpoint.load(place)[0].items() if k.startswith("model/") and "running" not in k)
    assert f"of step {int(checkpoint.latest(tmp_path / 'a' / 'checkpoints').name)}, is from before" in said


def test_a_rate_that_is_much_too_high(tmp_path, files, capsys):
    s = settings(files, epochs=4, lr=1e6, optimizer="sgd", model=f"{files}/nets.py:normed")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("halfback: ") and "training has diverged" in said and "Traceback" not in said


# Out of memory


def test_out_of_memory_is_one_line_that_helps(tmp_path, files, monkeypatch, capsys):
    s = settings(files, epochs=1, accumulate=2)
    for error, said in (
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "out of memory on cpu with 16 samples in 2 parts. Give a larger --accumulate",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory on cpu with 16 samples in 2 parts."),
        (MemoryError(), "out of memory on cpu with 16 samples in 2 parts."),
    ):
        with monkeypatch.context() as m:
            m.setattr(Training, "train_step", lambda self, x, y, error=error: (_ for _ in ()).throw(error))
            assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    with monkeypatch.context() as m:
        m.setattr(Training, "_model", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory.")))
        assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    assert "before the first step: the model and the data do not fit." in capsys.readouterr().err
    monkeypatch.setattr(Training, "train_step", lambda self, x, y: (_ for _ in ()).throw(RuntimeError("a bug of ours")))
    with pytest.raises(RuntimeError, match="a bug of ours"):
        main(["train", *options_of(s), "--out", str(tmp_path / "a")])


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        (10**9, ["counted, they fit into the 953.7 MiB that are free now: did others use the device? Else give --accumulate 2"]),
        (
            500_000,
            [
                "12 fit at once with sbp: give --accumulate 2",
                "--budget 0MiB, instead of a --method, fits 16 at once with exact gradients, ",
            ],
        ),
    ],
)
def test_what_fits_is_counted_with_the_training_s_own_step(free, wanted, tmp_path, files, monkeypatch):
    """As on a GPU with so much free memory."""
    t = training(settings(files, model=f"{files}/nets.py:plain", method="sbp(keep=0.5)", dtype="bf16"), tmp_path)
    t.train_step(*t.data.train.batch(torch.arange(16)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(loop.planner, "CONTEXT", 0)
    found = fits.counted(t)
    assert len(found) == len(wanted) and all(f.startswith(w) for f, w in zip(found, wanted, strict=True)), found
    assert not t.optimizer.state and not loop.applied_to(t.model)
