"""halfback train --weights: what a training begins with."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trainings import assert_same, cut, pictures, quiet, settings, state_of, training

from halfback.cli import main
from halfback.train.weights import begin_with

pytestmark = pytest.mark.usefixtures("quick")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight


@pytest.fixture
def pretrained(tmp_path, few):
    """A training's best weights, of a network with a batch norm."""
    quiet(settings(few), tmp_path / "pretrained")
    return tmp_path / "pretrained" / "best.safetensors"


def test_it_begins_with_the_weights_and_statistics_of_another_training(tmp_path, few, pretrained):
    made = training(settings(few, weights=str(pretrained)), tmp_path / "next")
    there, own = load_file(pretrained), made.model.state_dict()
    assert set(there) == set(own) and all(torch.equal(there[k], own[k]) for k in own)
    assert any("running_mean" in k and there[k].abs().sum() > 0 for k in there)
    assert made.begun_with == f"Begins with {len(own)} tensors of {pretrained}."


def test_a_head_of_other_classes_begins_fresh_as_its_seed_says_and_is_told(tmp_path, few):
    (x, y), (z, w) = pictures(96, 0), pictures(32, 1)
    np.savez(tmp_path / "six.npz", x_train=x, y_train=y + 2, x_test=z, y_test=w + 2)
    given = {"model": "small-vit", "data": str(tmp_path / "six.npz")}
    sevens = {k: torch.full_like(t, 7.0) for k, t in training(settings(few, model="small-vit"), tmp_path / "a").model.state_dict().items()}
    save_file({**sevens, "old.weight": torch.ones(2)}, tmp_path / "sevens.safetensors")
    fresh = training(settings(few, **given, seed=3), tmp_path / "b").model.state_dict()
    made = training(settings(few, **given, seed=3, weights=str(tmp_path / "sevens.safetensors")), tmp_path / "c")
    for name, t in made.model.state_dict().items():
        assert torch.equal(t, fresh[name]) if name.startswith("head") else (t == 7).all()
    assert " Fresh: head.weight (6, 48), head.bias (6,). Not used: " in made.begun_with
    assert all(name in made.begun_with for name in ("head.weight (4, 48)", "head.bias (4,)", "old.weight (2,)"))


def test_one_that_was_cut_goes_on_without_the_file(tmp_path, few, pretrained, monkeypatch):
    given = settings(few, weights=str(pretrained), save_every=2)
    quiet(given, tmp_path / "whole")
    cut(given, tmp_path / "cut", monkeypatch, 7)
    pretrained.unlink()
    quiet(given, tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    other = settings(few, save_every=2)
    quiet(other, tmp_path / "other")
    assert not all(torch.equal(t, state_of(tmp_path / "other")[0][k]) for k, t in state_of(tmp_path / "whole")[0].items())


def test_other_weights_are_another_training(tmp_path, few, pretrained, monkeypatch):
    cut(settings(few, weights=str(pretrained), save_every=2), tmp_path / "cut", monkeypatch, 7)
    for weights in (None, str(tmp_path / "others.safetensors")):
        with pytest.raises(ValueError, match=r"has a training with other settings \(weights: "):
            quiet(settings(few, weights=weights, save_every=2), tmp_path / "cut", resume=True)


def test_tied_weights_are_there_under_one_name_and_nothing_of_them_is_fresh(tmp_path):
    save_file({"words.weight": torch.arange(15.0).view(5, 3)}, tmp_path / "w.safetensors")
    model = Tied()
    assert begin_with(model, tmp_path / "w.safetensors") == f"Begins with 1 tensors of {tmp_path}/w.safetensors."
    assert model.head.weight is model.words.weight and model.head.weight[4, 2] == 14


class Opened:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return (open, (str(self.place), "w"))


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (None, "there is no such file"),
        ("pickle", "is no safetensors file ("),
        ("cut", "is no safetensors file ("),
        ({"a.weight": torch.ones(2, 3)}, "have no parameter of a name and shape of the model's. There: a.weight (2, 3). The model: "),
        ({"patches.1.num_batches_tracked": torch.tensor(3)}, "have no parameter of a name and shape of the model's"),
        ({"norm.weight": torch.tensor([1.0, float("nan")])}, "norm.weight has values that are not finite"),
    ],
)
def test_weights_that_cannot_be_are_told_in_a_line_and_leave_nothing(tmp_path, few, capsys, made, wanted):
    path = tmp_path / "w.safetensors"
    if made == "pickle":
        path.write_bytes(pickle.dumps(Opened(tmp_path / "executed")))
    elif made == "cut":
        save_file({"norm.weight": torch.ones(64)}, path)
        path.write_bytes(path.read_bytes()[:-9])
    elif made:
        save_file(made, path)
    given = ["--model", f"{few}/nets.py:make", "--data", f"{few}/few.npz", "--batch", "16", "--out", str(tmp_path / "out")]
    assert main(["train", *given, "--weights", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"weights '{path}'" in said and wanted in said and "Traceback" not in said
    assert not (tmp_path / "out").exists() and not (tmp_path / "executed").exists()


def test_what_it_begins_with_is_said(tmp_path, few, pretrained, capsys):
    given = ["--model", f"{few}/nets.py:make", "--data", f"{few}/few.npz", "--batch", "16", "--epochs", "1", "--out", str(tmp_path / "out")]
    assert main(["train", *given, "--weights", str(pretrained)]) == 0
    assert f"Begins with {len(load_file(pretrained))} tensors of {pretrained}." in capsys.readouterr().out
