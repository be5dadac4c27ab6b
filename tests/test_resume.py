"""halfback train: stopped, killed or cut, it goes on to the same weights, and one process trains in a folder at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from trainings import Cut, assert_same, content, cut, options_of, pictures, quiet, rows_of, run, settings, state_of, training

import halfback as hb
from halfback.cli import main
from halfback.train import checkpoint, loop
from halfback.train.loop import Training, train
from halfback.train.pieces import Stop
from halfback.train.record import locked

pytestmark = pytest.mark.usefixtures("quick")

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


def test_killed_20_times_at_random_moments_it_ends_in_the_same_weights(tmp_path, few):
    (x, y), (u, v) = pictures(176, 2), pictures(40, 3)
    np.savez(tmp_path / "more.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    s = settings(few, data=str(tmp_path / "more.npz"), epochs=10, method="sbp(keep=0.5)", ema=0.9, crop=1, mixup=0.2, save_every=3)
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


def test_sigterm_and_ctrl_c_save_and_the_training_goes_on(tmp_path, few):
    s = settings(few, epochs=6, method="sbp(keep=0.5)", ema=0.9)
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


def test_handlers_and_cudnn_are_as_before_and_other_threads_can_train(tmp_path, few, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    seen, done = [], []
    own = Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self, x, y: (seen.append(torch.backends.cudnn.benchmark), own(self, x, y)))
    s = settings(few, epochs=1)
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
def test_one_that_was_cut_goes_on_to_the_bit(name, tmp_path, few, monkeypatch):
    s = settings(few, epochs=3, **{"save_every": 1, **CUTS[name]})
    quiet(s, tmp_path / "whole")
    cut(s, tmp_path / "cut", monkeypatch, 9 if s.validation else 10)
    quiet(s, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_the_time_before_a_cut_is_counted(tmp_path, few, monkeypatch):
    s = settings(few, epochs=1, save_every=1)
    now = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(now))
    whole = quiet(s, tmp_path / "whole")["seconds"]
    cut(s, tmp_path / "cut", monkeypatch, 4)
    before = state_of(tmp_path / "cut")[1]["seconds"]
    after = quiet(s, tmp_path / "cut", resume=True)["seconds"]
    assert 0 < before < after and abs(after - whole) <= 4  # calls of the clock


def test_what_differs_is_seen(tmp_path, few, monkeypatch):
    """The comparison above can fail: a training that goes on without its draws ends elsewhere."""
    s = settings(few, epochs=2, method="sbp(keep=0.5)", save_every=1)
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


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path, few, monkeypatch, capsys, other):
    """What the other one writes is not even read: it may be gone a moment later."""
    s, out = settings(few, epochs=2), tmp_path / "a"
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


def test_of_two_that_begin_at_once_one_trains(tmp_path, few, monkeypatch):
    """Both find no folder. One has made it while the other was set up."""
    s, own, seen = settings(few, epochs=1), loop._set_up, []

    def first(*given):
        monkeypatch.setattr(loop, "_set_up", own)
        seen.append(quiet(s, tmp_path / "a")["top1"])
        return own(*given)

    monkeypatch.setattr(loop, "_set_up", first)
    with pytest.raises(ValueError, match=f"another process trains in {tmp_path}/a"):
        quiet(s, tmp_path / "a")
    assert seen == [json.loads((tmp_path / "a" / "result.json").read_text())["top1"]]


@pytest.mark.parametrize("others", ["a lock that is inherited", "the lock of another folder", "a number that is no file"])
def test_a_lock_that_is_inherited_is_the_training_s_own(others, tmp_path, few, monkeypatch, other):
    """As reproduce hands it on. A number that means another file means nothing."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with contextlib.ExitStack() as stack:
        number = locked(tmp_path / ("a" if others == "a lock that is inherited" else "b"), stack)
        monkeypatch.setenv("HALFBACK_LOCK", "99999" if others == "a number that is no file" else str(number))
        if others != "a lock that is inherited":
            other(tmp_path / "a")
            with pytest.raises(ValueError, match="another process trains in"):
                quiet(settings(few, epochs=1), tmp_path / "a")
        else:
            assert quiet(settings(few, epochs=1), tmp_path / "a")["done"]
            assert locked(tmp_path / "a", contextlib.ExitStack()) == number
            monkeypatch.delenv("HALFBACK_LOCK")
            assert locked(tmp_path / "a", stack) is None  # who started it has the lock still


def test_of_several_processes_the_first_one_locks(tmp_path, few, monkeypatch, other):
    (tmp_path / "a").mkdir()
    other(tmp_path / "a")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(loop, "_started", lambda *a: (_ for _ in ()).throw(Cut))  # it gets there
    with pytest.raises(Cut):
        quiet(settings(few), tmp_path / "a")


@pytest.mark.parametrize("kind", ["Windows", "a file system without locks"])
def test_without_locks_it_trains_all_the_same(kind, tmp_path, few, monkeypatch):
    fcntl = None if kind == "Windows" else types.SimpleNamespace(LOCK_EX=2, LOCK_NB=4, flock=lambda *a: os.stat(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "fcntl", fcntl)
    assert quiet(settings(few, epochs=1), tmp_path / "a")["done"]


def test_what_is_begun_or_ignored_is_told(tmp_path, few):
    said = []
    train(settings(few, epochs=1, monitor=4), tmp_path / "typo", resume=True, say=said.append)
    assert f"{tmp_path}/typo has no checkpoint to go on from: the training begins." in said
    assert "--monitor 4 has nothing to compare: the gradients are exact." in said
    said.clear()
    train(settings(few, epochs=1), tmp_path / "b", say=said.append)
    train(settings(few, epochs=1), tmp_path / "b", resume=True, say=said.append)
    assert not any(line in "\n".join(said) for line in ("the training begins", "nothing to compare"))


def test_rows_that_were_lost_are_told(tmp_path, few, monkeypatch):
    s, said = settings(few, epochs=7), []
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


def test_one_that_is_done_gives_its_result_again(tmp_path, few, monkeypatch):
    s = settings(few, epochs=2)
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
