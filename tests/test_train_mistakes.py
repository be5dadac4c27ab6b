"""halfback train: one line for what is wrong, before any work is lost; and what fits, where memory is short."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings

import numpy as np
import pytest
import torch
from trainings import content, options_of, quiet, settings, training

from halfback.cli import main
from halfback.train import checkpoint, fits, loop, options
from halfback.train.loop import Training
from halfback.train.settings import Settings, budget_of

pytestmark = pytest.mark.usefixtures("quick")

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
    "momentum": (["--momentum", "0.5"], "momentum 0.5 means nothing to optimizer adamw; leave it out."),
    "betas": (["--optimizer", "sgd", "--betas", "0.9", "0.95"], "betas (0.9, 0.95) means nothing to optimizer sgd"),
    "fall": (["--fall", "0.5"], "fall 0.5 means nothing to schedule cosine"),
    "magnitude": (["--magnitude", "5"], "magnitude 5.0 means nothing to a training without randaugment"),
    "applied": (["--model", "NETS:applied"], "has methods already (sbp(keep=0.25)): what is trained would be told to be something else"),
    "keep": (["--method", "sbp(keep=2)"], "keep"),
    "layers": (["--method", "sbp(layers='blocks.9')"], "blocks.9"),
    "json": (["--method", '[{"method": "sbp", "kep": 1}]'], "kep"),
    "option": (["--xyz", "3"], "unrecognized arguments: --xyz 3. See halfback"),
    "number": (["--epochs", "ten"], "argument --epochs: invalid int value: 'ten'"),
    "batch": (["--batch", "97"], "batch 97 is more than the 96 samples of"),
    "parts": (["--batch", "16", "--accumulate", "3"], "batch 16 cannot be run in 3 parts"),
    "drop path": (["--drop-path", "0.1"], "drop_path 0.1 is for vit-s4, vit-s4-mean, convnext and timm's models; "),
    "drop path, resnet": (["--drop-path", "0.1", "--model", "resnet18"], "'resnet18' takes none"),
    "drop path, timm": (["--drop-path", "0.1", "--model", "timm:vgg11"], "model 'timm:vgg11' takes no drop path"),
    "device": (["--device", "nowhere"], "device 'nowhere' cannot be used"),
    "meta": (["--device", "meta"], "its tensors have no contents"),
    "graphs": (["--graphs"], "graphs launches kernels as CUDA graphs, and needs what the compiler makes; give compile too."),
    "graphs, cpu": (["--graphs", "--compile"], "graphs launches kernels as CUDA graphs, and needs device cuda; here it is cpu."),
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
    "all dropped": (["--drop-path", "1"], "drop_path 1.0 must be in [0, 1)"),
    "all momentum": (["--optimizer", "sgd", "--momentum", "1"], "momentum 1.0 must be in [0, 1)"),
    "rising": (["--schedule", "step", "--fall", "3"], "fall 3.0 must be in (0, 1], as 0.2"),
    "labels": (["--data", "tokens", "--root", "TOKENS", "--model", "hf:gpt2", "--batch", "2"], "and tokens has labels of whole"),
    "lr": (["--lr", "-1"], "lr -1.0 must be above 0"),
    "settings": (["--settings", "TMP/none.json"], "there is no such file"),
    "tensorboard": (["--tensorboard"], "a training needs tensorboard, which is not there: pip install tensorboard"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_leaves_nothing(name, tmp_path, few, capsys, monkeypatch):
    given, wanted = WRONG[name]
    (tmp_path / "more").mkdir()
    places = {"NETS": f"{few}/nets.py", "CUT": tmp_path / "cut", "LABEL": tmp_path / "label", "TMP": tmp_path / "more"}
    if name == "clips":
        places["VIDEO"] = tmp_path
        for part in ("train", "test"):
            np.savez(tmp_path / f"{part}.npz", clips=np.zeros((4, 2, 8, 8, 3), np.uint8), labels=np.arange(4) % 2)
    if name == "labels":
        places["TOKENS"] = tmp_path
        for part in ("train", "test"):
            np.savez(tmp_path / f"{part}.npz", tokens=np.ones((4, 8), np.int64), labels=np.arange(4) % 2)
    if name in ("cut", "label"):
        cifar(tmp_path / name, **{"cut": {"cut": 5}, "label": {"label": 200}}[name])
    if name == "tensorboard":
        monkeypatch.setitem(sys.modules, "tensorboard", None)
        own = loop.importlib.util.find_spec
        monkeypatch.setattr(loop.importlib.util, "find_spec", lambda n: None if n == "tensorboard" else own(n))
    for key, place in places.items():
        given = [g.replace(key, str(place)) for g in given]
    base = ["train", "--model", f"{few}/nets.py:make", "--data", f"{few}/few.npz", "--batch", "16", "--out", str(tmp_path / "out")]
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
    path.write_text('{"lr": null, "epochs": 3, "schedule": "step", "milestones": [0.5], "warmup": 1}')
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
    assert budget_of("10GiB") == 10 * 2**30 and isinstance(budget_of("10GiB"), int)
    for text in ("2", "1.5", "0", "-1", "nan", "inf", "10GB iB"):
        with pytest.raises(ValueError, match="is neither a size, as 10GiB or 800MiB, nor a share in"):
            budget_of(text)


def test_a_folder_that_cannot_be_is_told_before_anything_is_loaded(tmp_path, few, monkeypatch, capsys):
    monkeypatch.setattr(Training, "__init__", None)
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        assert main(["train", "--out", str(tmp_path / out)]) == 2
        assert f"{tmp_path}/file is a file. Give a folder." in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setattr(os, "access", lambda path, how: False)  # root may write anywhere
    assert main(["train", "--out", str(tmp_path / "new")]) == 2
    assert "cannot be written to. Give another folder." in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_training_that_is_there_is_not_overwritten(tmp_path, few, capsys):
    s = settings(few, epochs=1)
    quiet(s, tmp_path / "a")
    before = content(tmp_path / "a")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    assert "has a training already. --resume goes on with it; or give another --out." in capsys.readouterr().err
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    assert all((p.read_bytes() == c) for p, c in before.items() if "checkpoints" not in p.parts)


@pytest.mark.parametrize("lr", [1e30, 1e4])
def test_one_that_diverges_is_told_and_only_good_checkpoints_stay(lr, tmp_path, few, monkeypatch, capsys):
    """At step 5 the rate explodes: the next loss is not finite, or the weights are not."""
    own = loop.rate
    monkeypatch.setattr(loop, "rate", lambda s, step, n: lr * 1e8 if step >= 5 else own(s, step, n))
    s = settings(few, epochs=3, save_every=1, model=f"{few}/nets.py:normed", optimizer="sgd", lr=0.05, keep_last=3)
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "training has diverged. Lower --lr, give --warmup or --clip" in said and "is from before." in said
    for place in checkpoint.found(tmp_path / "a" / "checkpoints"):
        assert all(t.isfinite().all() for k, t in checkpoint.load(place)[0].items() if k.startswith("model/") and "running" not in k)
    assert f"of step {int(checkpoint.latest(tmp_path / 'a' / 'checkpoints').name)}, is from before" in said


def test_a_rate_that_is_much_too_high(tmp_path, few, capsys):
    s = settings(few, epochs=4, lr=1e6, optimizer="sgd", model=f"{few}/nets.py:normed")
    assert main(["train", *options_of(s), "--out", str(tmp_path / "a")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("halfback: ") and "training has diverged" in said and "Traceback" not in said


# Out of memory


def test_out_of_memory_is_one_line_that_helps(tmp_path, few, monkeypatch, capsys):
    s = settings(few, epochs=1, accumulate=2)
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
def test_what_fits_is_counted_with_the_training_s_own_step(free, wanted, tmp_path, few, monkeypatch):
    """As on a GPU with so much free memory."""
    t = training(settings(few, model=f"{few}/nets.py:plain", method="sbp(keep=0.5)", dtype="bf16"), tmp_path)
    t.train_step(*t.data.train.batch(torch.arange(16)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(loop.planner, "CONTEXT", 0)
    found = fits.counted(t)
    assert len(found) == len(wanted) and all(f.startswith(w) for f, w in zip(found, wanted, strict=True)), found
    assert not t.optimizer.state and not loop.applied_to(t.model)
