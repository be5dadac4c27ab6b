"""halfback compare: what it counts, what it writes, and how it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import halfback as hb
from halfback import kernels
from halfback.compare import METHODS, Settings, compare, foresee, measured, split_methods, with_method
from halfback.data import digits, load_data
from halfback.memory import Peak
from halfback.models import load_model, small_vit
from halfback.report import readable

TINY = {"image": 8, "patch": 2, "channels": 1, "width": 24, "depth": 3, "heads": 2, "classes": 10}


def counted(method, dtype):
    model = small_vit(**TINY).to(dtype).train()
    with_method(model, method)
    x, y = torch.zeros(3, 1, 8, 8, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    return measured(model, x, y)


MORE = ["dropit(keep=0.1)", "dropit(bits=4, activation_bits=8)", "dropit(of='rows', activation_bits=4)", "lean+recompute"]


@pytest.mark.parametrize("method", [*split_methods(METHODS), *MORE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counting_without_contents_equals_counting_with_them(method, dtype, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "FakeTensor", torch.Tensor)  # each kernel as one operation, which the fused ones on a GPU are
        real = counted(method, dtype)
    assert real == foresee(method, batch=3, dtype=dtype, **TINY)


def test_the_reference_of_a_kernel_has_more_alive_for_a_moment_and_holds_the_same():
    method = "dropit(keep=0.1, activation_bits=4)"
    real, foreseen = counted(method, torch.float32), foresee(method, batch=3, dtype=torch.float32, **TINY)
    assert real["held"] == foreseen["held"] and real["peak"] > foreseen["peak"]


def test_a_fake_count_leaves_no_trace():
    before = torch.get_default_dtype(), torch.get_rng_state()
    foresee("sbp(keep=0.5)", batch=2, **TINY)
    assert torch.get_default_dtype() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert type(small_vit(**TINY).head.weight.data) is torch.Tensor


def test_peak_counts_what_is_alive_at_once():
    known = torch.empty(1000)
    with Peak(known) as peak:
        a = torch.zeros(100)
        b = a + 1
        del a
        c = b * 2
        del b, c
        known.add_(1)
    assert peak.most == 800


def test_methods_are_split_at_outer_commas_and_exact_is_added():
    assert split_methods("sbp(keep=0.5, attention='qkv'), recompute") == ["exact", "sbp(keep=0.5, attention='qkv')", "recompute"]
    assert split_methods("recompute, exact,") == ["recompute", "exact"]
    assert split_methods("sbp(keep=0.5, grid=(4, 4))+recompute")[1] == "sbp(keep=0.5, grid=(4, 4))+recompute"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sbp(keep=2)", "keep=2 must be"),
        ("spb", "none of the methods"),
        ("recompute, recompute", "twice"),
        ("sbp(keep=0.5", "is no method"),
    ],
)
def test_methods_that_are_none_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        split_methods(text)


def test_readable():
    assert [readable(n) for n in (10, 2048, 3 << 20, 5 << 30)] == ["10 B", "2.0 KiB", "3.0 MiB", "5.00 GiB"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("compare")
    said = []
    few = digits()
    np.savez(out / "few.npz", x_train=few.x_train[:128], y_train=few.y_train[:128], x_test=few.x_test[:64], y_test=few.y_test[:64])
    settings = Settings(data=str(out / "few.npz"), methods="recompute, sbp(keep=0.5), skiptokens(keep=0.5)", seeds=2, epochs=2, batch=32)
    compare(settings, out, said.append)
    return json.loads((out / "compare.json").read_text()), out, "\n".join(said)


def test_compare_writes_what_it_found(result):
    found, out, _ = result
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert found["versions"] == {"halfback": hb.__version__, "torch": torch.__version__, "python": found["versions"]["python"]}
    assert found["settings"]["seeds"] == 2 and found["device"] == "cpu" and found["date"]
    assert [e["method"] for e in found["methods"]] == ["exact", "recompute", "sbp(keep=0.5)", "skiptokens(keep=0.5)"]
    for entry in found["methods"]:
        assert [s["seed"] for s in entry["seeds"]] == [0, 1]
        assert all(0 <= s["accuracy"] <= 1 and s["held"] > 0 and s["peak"] > 0 and s["step_ms"] > 0 for s in entry["seeds"])


def test_compare_shows_a_table_with_ratios_to_the_first_method(result):
    found, _, said = result
    assert "ViT-B/16" in said and "accuracy" in said and "± " in said
    assert "skiptokens(keep=0.5) *" in said and "changes the forward" in said
    ratios = {e["method"]: e["ratio"] for e in found["methods"]}
    assert ratios["exact"] == {"held": 1, "peak": 1, "step_ms": 1}
    assert ratios["recompute"]["held"] < ratios["sbp(keep=0.5)"]["held"] < 1


def test_an_exact_method_trains_as_exact_does(result):
    """Recompute changes no gradient, so paired runs agree: weights, batches and noise are the same."""
    exact, recompute = result[0]["methods"][:2]
    for a, b in zip(exact["seeds"], recompute["seeds"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


# Data and models


def test_digits_are_real_split_once_and_normalised():
    a, b = digits(), digits()
    assert a.shape == (1, 8, 8) and a.classes == 10 and (len(a.y_train), len(a.y_test)) == (1437, 360)
    assert torch.equal(a.x_test, b.x_test)
    assert abs(a.x_train.mean()) < 1e-5 and abs(a.x_train.std() - 1) < 1e-4


def arrays(n=6, **changed):
    x = np.random.default_rng(0).integers(0, 255, (n, 3, 8, 8), dtype=np.uint8)
    y = np.arange(n) % 2
    return {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **changed}


def test_data_from_a_file(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    data = load_data(str(tmp_path / "a.npz"))
    assert data.shape == (3, 8, 8) and data.classes == 2 and data.x_train.dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_train": np.zeros((6, 8), np.uint8)}, r"x_train has shape \(6, 8\)"),
        ({"x_train": np.zeros((6, 8, 8, 3), np.uint8)}, r"x_train has shape \(6, 8, 8, 3\), with channels last; wanted .* \(N, C, H, W\)"),
        ({"y_test": np.zeros(5, np.int64)}, r"y_test has shape \(5,\)"),
        ({"y_train": np.zeros(6, np.float32)}, "wanted .* integers"),
        ({"x_test": np.zeros((6, 3, 4, 4), np.uint8)}, "images of x_train are"),
    ],
)
def test_data_of_wrong_shape_is_refused(tmp_path, changed, message):
    np.savez(tmp_path / "a.npz", **arrays(**changed))
    with pytest.raises(ValueError, match=message):
        load_data(str(tmp_path / "a.npz"))


def test_data_that_is_missing_or_no_data_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_data(str(tmp_path / "none.npz"))
    np.savez(tmp_path / "b.npz", x_train=np.zeros(3))
    with pytest.raises(ValueError, match=r"y_train, x_test, y_test missing\. It has x_train"):
        load_data(str(tmp_path / "b.npz"))
    (tmp_path / "c.npz").write_text("no zip")
    with pytest.raises(ValueError, match=r"is no \.npz file of plain arrays"):
        load_data(str(tmp_path / "c.npz"))
    with pytest.raises(ValueError, match=r"'mnist' is unknown\. Data: digits"):
        load_data("mnist")


def test_models_by_name(tmp_path):
    (tmp_path / "mine.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 2)\ndef bad():\n    return 3\n")
    assert isinstance(load_model(f"{tmp_path}/mine.py:make"), torch.nn.Linear)
    for spec, message in {
        f"{tmp_path}/mine.py:other": "no function other. It has: make, bad",
        f"{tmp_path}/mine.py:bad": "returned int, not a torch.nn.Module",
        "resnet": "'resnet' is unknown. Models: small-vit, small-vit-mean",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_model(spec)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_model("nowhere.py:make")


@pytest.mark.parametrize(("size", "tokens"), [(8, 16), (28, 49), (32, 64), (7, 49)])
def test_small_vit_fits_the_images(size, tokens):
    model = load_model("small-vit", (3, size, size), 5)
    assert model.places.shape[1] == tokens + 1
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_small_vit_pools(pool):
    assert small_vit(pool=pool)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_small_vit_refuses_what_does_not_fit():
    for wrong, message in (({"patch": 3}, "patch=3 does not divide"), ({"heads": 5}, "heads=5"), ({"pool": "max"}, "none of class, mean")):
        with pytest.raises(ValueError, match=message):
            small_vit(**wrong)
