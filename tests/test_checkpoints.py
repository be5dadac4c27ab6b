"""Checkpoints of halfback train: whole or not there, damaged ones are named, nothing in them is executed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from trainings import NOISY, assert_same, content, cut, options_of, pictures, quiet, rows_of, run, settings, training

import halfback as hb
from halfback.cli import main
from halfback.train import checkpoint, sets
from halfback.train.loop import Training
from halfback.train.sets import order
from halfback.train.settings import Settings

pytestmark = pytest.mark.usefixtures("quick")

OPERATIONS = """
import json, os, sys, torch
from pathlib import Path
from halfback.train import checkpoint, sets

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


def test_a_pickle_is_never_executed(tmp_path, few, capsys):
    s = settings(few, epochs=1)
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
def test_a_damaged_checkpoint_is_named_and_the_one_before_works(file, tmp_path, few, capsys):
    s = settings(few, epochs=2, method="sbp(keep=0.5)")
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
def test_tensors_that_a_disk_has_damaged_are_not_gone_on_with(at, tmp_path, few, capsys):
    s = settings(few, epochs=2)
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


def test_an_older_checkpoint_without_its_sum_and_methods_is_loaded(tmp_path, few):
    s = settings(few, epochs=1, method="sbp(keep=0.5)")
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
def test_a_checkpoint_that_was_altered_is_named(name, tmp_path, few, capsys):
    value, wanted = ALTERED[name]
    quiet(settings(few, epochs=2, method="sbp(keep=0.5)"), tmp_path / "a")
    last = checkpoint.latest(tmp_path / "a" / "checkpoints")
    state = json.loads((last / "state.json").read_text())
    (last / "state.json").write_text(json.dumps({**state, name.partition(",")[0]: value}))
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"halfback: the checkpoint {last} cannot be read ({wanted}")
    assert said.endswith("). Remove it to go on from 00000006.")


def test_a_checkpoint_that_does_not_fit_into_memory_is_not_to_be_removed(tmp_path, few, monkeypatch, capsys):
    quiet(settings(few, epochs=1), tmp_path / "a")
    for place, error in {"load_optimizer": torch.OutOfMemoryError("CUDA out of memory."), "sum_of": MemoryError()}.items():
        with monkeypatch.context() as m:
            m.setattr(checkpoint, place, lambda *a, error=error: (_ for _ in ()).throw(error))
            assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
        said = capsys.readouterr().err
        assert "before the first step: the model and the data do not fit." in said and "Remove" not in said


@pytest.mark.parametrize("lost", ["optimizer", "draws", "scaler", "last", "step"])
def test_a_checkpoint_that_lacks_something_is_named(lost, tmp_path, few, capsys):
    s = settings(few, epochs=1)
    cutting = tmp_path / "a"
    quiet(s, cutting)
    place = checkpoint.latest(cutting / "checkpoints")
    state = json.loads((place / "state.json").read_text())
    del state[lost]
    (place / "state.json").write_text(json.dumps(state))
    assert main(["train", "--resume", "--out", str(cutting)]) == 2
    assert "cannot be read (KeyError" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, few, monkeypatch, capsys):
    s = settings(few, epochs=3, method="sbp(keep=0.5)", save_every=2)
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


def test_a_full_disk_at_the_best_weights_or_the_metrics_is_one_line(tmp_path, few, monkeypatch, capsys):
    s = settings(few, epochs=2)

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


def test_a_disk_that_is_full_at_the_end_is_told_and_what_was_there_stays(tmp_path, few, monkeypatch, capsys):
    quiet(settings(few, epochs=1), tmp_path / "a")
    before = content(tmp_path / "a")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["train", "--resume", "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    advice = "What was there stays. Free some room, or make it writable, and give the same command again."
    assert said == f"halfback: {tmp_path}/a/settings.json cannot be written (No space left on device). {advice}"
    assert content(tmp_path / "a") == before


def test_another_model_data_or_settings_are_refused(tmp_path, few, capsys):
    nets, data = (shutil.copy(few / name, tmp_path / name) for name in ("nets.py", "few.npz"))
    out = tmp_path / "a"
    s = settings(few, epochs=1, model=f"{nets}:plain", data=str(data))
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


def test_paths_and_places_may_change_when_it_goes_on(tmp_path, few):
    s = settings(few, epochs=1)
    quiet(s, tmp_path / "a")
    quiet(Settings(**{**s.to_json(), "keep_last": 1, "save_every": 2, "best": False}), tmp_path / "a", resume=True)


def test_tests_between_epochs_change_nothing_and_the_last_epoch_is_tested(tmp_path, few, monkeypatch):
    """Cut in an epoch whose row has no test, too."""
    quiet(settings(few, epochs=5, ema=0.9), tmp_path / "always")
    s = settings(few, epochs=5, ema=0.9, test_every=3)
    cut(s, tmp_path / "seldom", monkeypatch, step=25)
    quiet(s, tmp_path / "seldom", resume=True)
    every, seldom = rows_of(tmp_path / "always"), rows_of(tmp_path / "seldom")
    assert [row["epoch"] for row in seldom if "top1" in row] == [3, 5] and [row["epoch"] for row in seldom] == [1, 2, 3, 4, 5]
    assert all(few.items() <= all_.items() for few, all_ in zip(seldom, every, strict=True))
    result = json.loads((tmp_path / "seldom" / "result.json").read_text())
    assert result["top1"] == every[4]["top1"] and result["best_top1"] == max(every[2]["top1"], every[4]["top1"])
    assert result["curves"]["top1"] == [None, None, every[2]["top1"], None, every[4]["top1"]]


def test_an_image_that_cannot_be_read_costs_no_step(tmp_path, monkeypatch):
    """What was trained since the last checkpoint is saved before it is told; with the image back, the training is as it would have been."""
    draw = np.random.default_rng(0)
    monkeypatch.setattr(sets, "ESTIMATED", 1)  # files are read as their turn comes
    for part, n in (("train", 64), ("val", 8)):
        for i in range(n):
            (tmp_path / "data" / part / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 255, (8, 8, 3), np.uint8)).save(tmp_path / "data" / part / f"c{i % 2}" / f"{i}.png")
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))\n")
    s = Settings(model=f"{tmp_path}/nets.py:net", data="folder", root=str(tmp_path / "data"), size=8, epochs=2, batch=2, save_every=1000)
    quiet(s, tmp_path / "whole")
    paths = training(s, tmp_path / "whole").data.train.paths
    bad = Path(paths[order(64, s.seed, 0)[-1]])  # of the first epoch's last batch
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read as an image"):
        quiet(s, tmp_path / "cut")
    assert int(checkpoint.latest(tmp_path / "cut" / "checkpoints").name) == 31
    bad.write_bytes(whole)
    quiet(s, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "cut", tmp_path / "whole")
