"""halfback train --resume, where something was lost or changed in between, and what is said where an option has nothing to do."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from trainings import assert_same, cut, options_of, quiet, settings, training

from halfback.cli import main
from halfback.train import checkpoint
from halfback.train.loop import Training
from halfback.train.sets import content_of, load_set
from halfback.untouched import applied_to

METHOD = "sbp(keep=0.5,schedule=((0,1.0),(0.5,0.5)))+lean"


def resumed(folder, *given):
    return main(["train", "--resume", "--out", str(folder), *given])


def test_other_data_of_the_same_size_are_refused(tmp_path, few, quick, monkeypatch, capsys):
    shutil.copy(few / "few.npz", tmp_path / "own.npz")
    s = settings(few, data=str(tmp_path / "own.npz"), save_every=2)
    cut(s, tmp_path / "a", monkeypatch, 7)
    before = (tmp_path / "own.npz").read_bytes()
    for change in ("x_train", "y_test"):
        found = dict(np.load(few / "few.npz"))
        found[change] = found[change][::-1].copy()
        np.savez(tmp_path / "own.npz", **found)
        assert resumed(tmp_path / "a") == 2
        assert "4 classes too, but other ones. Give that data." in capsys.readouterr().err
    (tmp_path / "own.npz").write_bytes(before)
    assert resumed(tmp_path / "a") == 0


def test_a_checkpoint_that_knows_less_of_its_data_is_gone_on_from(tmp_path, few, quick, monkeypatch):
    cut(settings(few, save_every=2), tmp_path / "a", monkeypatch, 7)
    place = checkpoint.latest(tmp_path / "a/checkpoints")
    state = json.loads((place / "state.json").read_text())
    state["data"] = state["data"].partition(", content")[0]
    del state["processes"]
    (place / "state.json").write_text(json.dumps(state))
    quiet(settings(few, save_every=2), tmp_path / "a", resume=True)


def test_the_content_of_a_folder_is_that_of_its_files(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for root in ("a", "b"):
        for part, count in (("train", 3), ("val", 1)):
            for name in ("cat", "dog"):
                (tmp_path / root / part / name).mkdir(parents=True)
                for i in range(count):
                    image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / root / part / name / f"{i}.png")
    one, two = (content_of(load_set("folder", root=tmp_path / root, size=8)) for root in ("a", "b"))
    assert one == two, "wherever it lies"
    (tmp_path / "b/train/cat/0.png").rename(tmp_path / "b/train/cat/9.png")
    assert content_of(load_set("folder", root=tmp_path / "b", size=8)) != one


def test_another_spelling_of_a_method_is_no_other_training(tmp_path, few, quick, monkeypatch, capsys):
    s = settings(few, method=METHOD, save_every=2)
    quiet(s, tmp_path / "whole")
    cut(s, tmp_path / "cut", monkeypatch, 7)
    spelled = "sbp(schedule = ((0, 1.0), (0.5, 0.5)), keep=0.5) + lean"
    assert resumed(tmp_path / "cut", "--method", spelled) == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
    cut(s, tmp_path / "other", monkeypatch, 7)
    assert resumed(tmp_path / "other", "--method", METHOD.replace("keep=0.5", "keep=0.25")) == 2
    assert "has a training with other settings (method:" in capsys.readouterr().err


@pytest.mark.parametrize("there", [None, "{"])
def test_lost_settings_are_those_of_the_checkpoint(tmp_path, few, quick, monkeypatch, capsys, there):
    s = settings(few, method=METHOD, epochs=3, save_every=2, lr=0.02)
    quiet(s, tmp_path / "whole")
    cut(s, tmp_path / "cut", monkeypatch, 7)
    path = tmp_path / "cut/settings.json"
    if there is None:
        path.unlink()
    else:
        path.write_text(there)
        assert resumed(tmp_path / "cut") == 2
        assert "settings.json is no JSON" in (said := capsys.readouterr().err) and "Remove that file: the checkpoints have" in said
        path.unlink()
    assert resumed(tmp_path / "cut") == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_lost_settings_of_a_damaged_checkpoint_are_told_in_a_line(tmp_path, few, quick, monkeypatch, capsys):
    cut(settings(few, save_every=2), tmp_path / "a", monkeypatch, 7)
    (tmp_path / "a/settings.json").unlink()
    place = checkpoint.latest(tmp_path / "a/checkpoints")
    state = json.loads((place / "state.json").read_text())
    del state["settings"]
    for text in (json.dumps(state), "{"):
        (place / "state.json").write_text(text)
        assert resumed(tmp_path / "a") == 2
        assert str(place) in (said := capsys.readouterr().err) and "Traceback" not in said


def test_lost_best_weights_and_other_processes_are_told(tmp_path, few, quick, monkeypatch, capsys):
    cut(settings(few, epochs=3), tmp_path / "a", monkeypatch, 7)
    (tmp_path / "a/best.safetensors").unlink()
    place = checkpoint.latest(tmp_path / "a/checkpoints")
    state = json.loads((place / "state.json").read_text())
    assert state["processes"] == 1
    (place / "state.json").write_text(json.dumps({**state, "processes": 2}))
    assert resumed(tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "best.safetensors is gone: the best weights so far are lost." in said
    assert "2 processes trained so far, now it is 1: other masks, noise and weights than with as many." in said
    assert json.loads((tmp_path / "a/result.json").read_text())["processes"] == 1


def test_what_has_nothing_to_do_is_told(tmp_path, few, quick, capsys, monkeypatch):
    entered = []
    monkeypatch.setattr("halfback.course.exact", lambda *a, **k: entered.append(a))
    given = [*options_of(settings(few, method="lean")), "--exact-tail", "0.5", "--parallel", "fsdp"]
    assert main(["train", *given, "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "--exact-tail 0.5 has nothing to do: the gradients are exact." in said and not entered
    assert "--parallel fsdp shares nothing out: this is one process." in said


def test_a_wrong_key_of_a_method_is_named(capsys):
    assert main(["train", "--method", '[{"method": "sbp", "bad": 1}]']) == 2
    assert "sbp takes keep, layers, " in (said := capsys.readouterr().err) and "found 'bad'" in said


TRAINS_NOT = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 4)

    def forward(self, x):
        if self.training and len(x) < 2:
            raise KeyError("two or more")
        return self.head(self.norm(x.flatten(1)))

class Never(Own):
    def forward(self, x):
        if self.training:
            raise KeyError("no training")
        return super().forward(x)
"""


@pytest.mark.parametrize(
    "kind, more, wanted", [("Own", ["--accumulate", "16"], "Batch norms want two samples or more"), ("Never", [], "no training")]
)
def test_a_model_that_cannot_be_trained_is_told_before_anything_is_written(tmp_path, few, capsys, kind, more, wanted):
    (tmp_path / "net.py").write_text(TRAINS_NOT)
    given = ["--model", f"{tmp_path}/net.py:{kind}", "--data", f"{few}/few.npz", "--batch", "16", *more, "--out", str(tmp_path / "a")]
    assert main(["train", *given]) == 2
    said = capsys.readouterr().err
    assert "cannot be trained on " in said and wanted in said and "Traceback" not in said and not (tmp_path / "a").exists()


ASKS = """
import torch
from torch import nn

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 4)
        self.calls = 0

    def forward(self, x):
        h = self.norm(x.flatten(1))
        if self.training:
            self.calls += float(torch.autograd.grad(self.head(h).sum(), self.head.weight, retain_graph=True)[0].sum()) != 0
        return self.head(h)
"""


def test_a_model_that_asks_for_gradients_and_for_contents_trains(tmp_path, few):
    (tmp_path / "net.py").write_text(ASKS)
    t = training(
        settings(few, model=f"{tmp_path}/net.py:Asks", method="dropit(keep=0.5, exact_first=False, select='random')"), tmp_path / "a"
    )
    assert t.held is None and t.model.calls == 1, "it was tried"
    assert not t.model.norm.running_mean.any() and t.model.norm.num_batches_tracked == 0
    assert [s.mark() for a in applied_to(t.model) for s in a.states] == [0]


def test_a_look_whether_a_model_trains_changes_nothing(tmp_path, few, monkeypatch):
    """Where it is asked, since the model cannot be counted without contents."""
    (tmp_path / "net.py").write_text(TRAINS_NOT)
    s = settings(few, model=f"{tmp_path}/net.py:Own")
    with monkeypatch.context() as m:
        m.setattr(Training, "_count_held", lambda self: (1, ""))
        plain = training(s, tmp_path / "a").model.state_dict()
    with monkeypatch.context() as m:
        m.setattr("halfback.train.loop.memory.profile", lambda *a, **k: 1 / 0)
        looked = training(s, tmp_path / "b").model.state_dict()
    assert all(torch.equal(t, looked[k]) for k, t in plain.items())
