"""profile, plan, fit and audit on the command line: what they say and write is what the library says, and mistakes are one line."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halfback as hb
from halfback import commands, models
from halfback.cli import main
from halfback.memory import Profile
from halfback.models import Wanted, load_subject, small_vit
from halfback.planner import CONTEXT, WORKSPACE, Impossible, Planner, total_of
from halfback.report import readable

GPU = f"{(CONTEXT + max(WORKSPACE)) // 2**20 + 30}MiB"  # with little left beside what CUDA and its libraries take
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
CONVNEXT = {"model_type": "convnext", "depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 32, 64], "image_size": 64}
FACTORIES = '''
import torch
from torch import nn


class Norms(nn.Module):
    """Convolutions with BatchNorm, in no blocks."""

    def __init__(self):
        super().__init__()
        self.all = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.all(x).mean(2))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.out = nn.Linear(16, 50)

    def forward(self, ids):
        return self.out(self.table(ids))


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum().item() > 0 else -y


class Valued(nn.Module):
    """Asks for a value when it is made, and for one of a buffer when it runs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, int(torch.linspace(0, 6, 3)[-1].item()))
        self.register_buffer("times", torch.tensor(2))

    def forward(self, x):
        for _ in range(int(self.times)):
            y = self.layer(x)
        return y


def alone():
    return Norms()


def words():
    return Words()


def with_batch():
    return nn.Linear(4, 3), (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))


def with_make():
    return nn.Linear(4, 3), lambda n: (torch.randn(n, 4), torch.zeros(n, dtype=torch.int64))


def with_loss():
    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    return model, lambda: model(x).sum()


def asks():
    return Asks(), torch.randn(6, 4)


def valued():
    return Valued(), torch.randn(6, 4)


def wrong():
    return 3


def raising():
    raise KeyError("no such weight")
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with small configurations and factories."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in {"gpt2": GPT2, "bert": BERT, "vit": VIT, "convnext": CONVNEXT}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(FACTORIES)
    return folder


def said(capsys, *argv):
    assert main(list(map(str, argv))) == 0
    caught = capsys.readouterr()
    assert not caught.err
    return caught.out


def as_json(capsys, *argv):
    return json.loads(said(capsys, *argv, "--json", "-"))


def content_of(page):
    """What the page was made of."""
    return json.loads(re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[1])


def subject(files, name, **wanted):
    return load_subject(Wanted(f"hf:{files / name}", **wanted))


# Models and batches


@pytest.mark.parametrize(
    ("name", "kind", "keys"),
    [
        ("gpt2", "GPT2LMHeadModel", {"input_ids", "labels"}),
        ("bert", "BertForSequenceClassification", {"input_ids", "labels"}),
        ("vit", "ViTForImageClassification", {"pixel_values", "labels"}),
        ("convnext", "ConvNextForImageClassification", {"pixel_values", "labels"}),
    ],
)
def test_a_configuration_gives_a_model_without_memory_and_a_batch_with_labels(files, name, kind, keys):
    found = subject(files, name, samples=3)
    assert type(found.model).__name__ == kind and found.model.training
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in found.model.parameters())
    assert set(found.batch()) == keys and all(len(t) == 3 for t in found.batch().values())
    assert getattr(found.model.config, "use_cache", False) is False


def test_a_head_that_the_configuration_names_is_used(files, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BERT, "architectures": ["BertForMaskedLM"]}))
    found = load_subject(Wanted(f"hf:{tmp_path / 'config.json'}", seq=16))
    assert type(found.model).__name__ == "BertForMaskedLM" and found.batch()["labels"].shape == (8, 16)


def test_a_model_type_of_transformers_has_its_default_size():
    found = load_subject(Wanted("hf:gpt2", seq=32))
    assert found.model.config.n_layer == 12 and sum(p.numel() for p in found.model.parameters()) == 124_439_808
    assert found.inputs == "32 tokens"


def test_size_and_length_reach_the_model(files):
    assert subject(files, "vit", size=64).model.config.image_size == 64
    long = subject(files, "gpt2", seq=100)
    assert long.model.config.n_positions == 100 and "64 in the configuration, raised to 100" in long.notes[0]
    assert subject(files, "gpt2").inputs == "64 tokens"


def test_patches_are_the_step_of_sizes(files):
    assert subject(files, "vit").step == 8 and subject(files, "convnext").step == 32
    assert load_subject(Wanted("small-vit")).step == 2


def test_factories_give_a_model_and_any_form_of_batch(files):
    def own(name, **wanted):
        return load_subject(Wanted(f"{files / 'own.py'}:{name}", **wanted))

    assert own("alone", size=16, samples=3).batch()[0].shape == (3, 3, 16, 16)
    assert own("words", seq=7, samples=3).batch()[0].shape == (3, 7)
    assert own("with_batch").samples == 6 and len(own("with_batch", samples=9).batch()[0]) == 9
    assert len(own("with_make", samples=5).batch()[1]) == 5
    assert own("with_batch").batch()[0].dtype is torch.bfloat16
    assert own("with_loss").model.weight.dtype is torch.float32
    assert own("valued").model.layer.out_features == 6  # it cannot be made without values, so it is made with them


def test_small_models_of_timm_and_torchvision():
    assert load_subject(Wanted("torchvision:resnet18", samples=2, size=64)).batch()[0].shape == (2, 3, 64, 64)
    found = load_subject(Wanted("timm:vit_tiny_patch16_224", samples=2))
    assert found.batch()[0].shape == (2, 3, 224, 224) and found.step == 16


# profile


def test_profile_prints_what_the_library_counts(files, capsys):
    found = subject(files, "vit", samples=4)
    plain = hb.profile(found.model, found.batch(), device="cuda")
    hb.apply_(found.model, hb.SBP(keep=0.5), hb.Lean())
    lean = hb.profile(found.model, found.batch(), device="cuda")
    out = said(capsys, "profile", f"hf:{files / 'vit'}", "--batch", 4, "--method", "sbp(keep=0.5)+lean")
    assert str(plain) in out and str(plain.compare(lean)) in out
    assert plain.table(3) in out and "vit.layers.0 " in plain.table(3)


def test_profile_json_is_both_profiles_and_nothing_else(files, capsys):
    data = as_json(
        capsys, "profile", f"hf:{files / 'gpt2'}", "--batch", 2, "--seq", 32, "--optimizer", "sgd", "--dtype", "fp32", "--method", "lean"
    )
    found = subject(files, "gpt2", samples=2, seq=32, dtype="fp32")
    before = hb.profile(found.model, found.batch(), device="cuda", optimizer="sgd")
    assert Profile.from_json(data["before"]) == before and data["after"]["held"] < data["before"]["held"]


def test_profile_counts_as_a_cpu_if_asked_to(files, capsys):
    data = as_json(capsys, "profile", f"hf:{files / 'gpt2'}", "--batch", 2, "--device", "cpu")
    assert data["before"]["device"] == "cpu" and data["after"] is None


def test_a_long_table_is_cut_and_all_shows_it(capsys):
    short = said(capsys, "profile", "torchvision:resnet18", "--batch", 2, "--size", 64, "--depth", 4)
    whole = said(capsys, "profile", "torchvision:resnet18", "--batch", 2, "--size", 64, "--depth", 4, "--all")
    assert "more: --all" in short and "more: --all" not in whole and len(whole) > len(short)
    assert short.splitlines()[-1].split()[0] == "all" == whole.splitlines()[-1].split()[0]


def test_profile_page_has_the_figures(files, capsys, tmp_path):
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    out = said(capsys, "profile", f"hf:{files / 'vit'}", "--batch", 4, "--method", "lean", "--html", page, "--json", data)
    assert out.endswith(f"Written: {data}, {page}\n")
    written, shown = json.loads(data.read_text()), content_of(page)
    assert [p["held"] for p in shown["profiles"]] == [written["before"]["held"], written["after"]["held"]]
    assert [p["name"] for p in shown["profiles"]] == ["plain", "lean"] and shown["made"]["versions"]["halfback"] == hb.__version__


def test_a_large_model_takes_little_memory():
    code = (
        "import time; start = time.perf_counter(); import zoo; from halfback.cli import main; "
        "code = main(['profile', 'torchvision:vit_l_16', '--batch', '256']); "
        "print(code, zoo.most_memory() // 1024, time.process_time())"
    )
    there = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([".", "..", os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent, env=there
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    code, mib, seconds = done.stdout.splitlines()[-1].split()
    assert code == "0" and int(mib) < 2000 and float(seconds) < 20
    assert "VisionTransformer on cuda, batch 256" in done.stdout


# plan


def test_plan_is_the_librarys(files, capsys, tmp_path):
    found = subject(files, "vit", samples=64)
    plan = hb.plan(found.model, found.batch(), 0.5, device="cpu", curve=True)
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    argv = ["plan", f"hf:{files / 'vit'}", "--batch", 64, "--budget", "0.5", "--device", "cpu"]
    out = said(capsys, *argv, "--html", page, "--json", data)
    assert json.loads(data.read_text()) == json.loads(json.dumps(plan.to_json()))
    assert str(plan) in out and "Other budgets" in out and all(p["label"] in out for p in plan.curve)
    pareto, profiles = content_of(page)["pareto"], content_of(page)["profiles"]
    chosen = pareto["points"][pareto["chosen"]]
    assert chosen["peak"] == plan.peak == profiles[1]["peak"] and pareto["plain_peak"] == plan.plain_peak == profiles[0]["peak"]
    assert chosen["budget"] == plan.total


def test_plan_finds_the_largest_batch_and_says_other_budgets_only_if_asked(files, capsys, tmp_path):
    argv = ["plan", f"{files / 'own.py'}:alone", "--size", 16, "--batch", "max", "--budget", "100KiB", "--device", "cpu"]
    data = as_json(capsys, *argv)
    found = load_subject(Wanted(f"{files / 'own.py'}:alone", size=16))
    assert data["total"] <= 100 * 1024 and data["batch_size"] > 1
    with pytest.raises(Impossible):
        hb.plan(found.model, found.make(data["batch_size"] + 1), "100KiB", device="cpu")
    argv[argv.index("max")] = data["batch_size"]
    out = said(capsys, *argv)
    assert f"batch {data['batch_size']}: " in out and "Other budgets" not in out


def test_an_impossible_budget_names_the_smallest(files, capsys):
    assert main(["plan", f"{files / 'own.py'}:alone", "--size", "16", "--budget", "0.001", "--batch", "16"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("halfback: ") and "The smallest that works" in err and err.count("\n") == 1


# fit


@pytest.mark.parametrize(
    ("need", "power"),
    [
        (lambda n: 100 + 7 * n, 1),
        (lambda n: 100 + max(7 * n, 9 * n - 300), 1),
        (lambda n: 100 + n * n, 2),
        (lambda n: 100 + n**3 // 50, 1),
        (lambda n: 100 + 512 * (n // 20), 1),
        (lambda n: 100 + 7 * n, 2),
    ],
)
@pytest.mark.parametrize("room", [108, 500, 5001, 123_456])
@pytest.mark.parametrize("step", [1, 4])
def test_the_search_finds_what_trying_all_finds(need, power, room, step):
    tried = []
    n, total, bounded = commands.largest(lambda n: tried.append(n) or need(n), room, step, 8 * step, 90, power, most=10**6)
    wanted = max((n for n in range(step, 20_000, step) if need(n) <= room), default=None)
    assert n == wanted and total == need(n or step) and not bounded
    assert len(tried) == len(set(tried)) < 40


def test_the_search_ends_at_the_most():
    assert commands.largest(lambda n: 10, 100, 1, 8, most=512) == (512, 10, True)


@functools.cache
def needs(files, name):
    found = subject(files, name, samples=1)
    return Planner(found.model, found.batch(), "cuda").needs


def fits(files, name, method, gpu, samples, **sized):
    found = subject(files, name, samples=samples, **sized)
    methods = hb.parse("exact" if method == "plain" else method)
    if methods:
        hb.apply_(found.model, *methods)
    profile = hb.profile(found.model, found.batch(), device="cuda")
    total = total_of(profile, needs(files, name)(profile.peak))
    return total, total <= gpu


def test_fit_finds_the_largest_batch_of_each_method(files, capsys):
    methods = ["plain", "accumulation", "recompute", "lean", "sbp(keep=0.5)+lean"]
    assert set(methods) < set(commands.fit_methods(commands.METHODS))
    data = as_json(capsys, "fit", f"hf:{files / 'vit'}", "--gpu", GPU, "--methods", ", ".join(methods))
    found = {f["method"]: f for f in data["methods"]}
    assert list(found) == methods and not any(f["why"] for f in found.values())
    for method, f in found.items():
        if method != "accumulation":
            assert fits(files, "vit", method, data["gpu"], f["largest"]) == (f["total"], True)
            assert not fits(files, "vit", method, data["gpu"], f["largest"] + 1)[1]
    assert found["plain"]["largest"] < found["lean"]["largest"] and found["plain"]["time"] == 1 < found["recompute"]["time"]
    assert found["accumulation"]["any"] and found["accumulation"]["largest"] == found["plain"]["largest"]


def test_fit_prints_a_table_and_a_page(files, capsys, tmp_path):
    page, data = tmp_path / "fit.html", tmp_path / "fit.json"
    argv = ["fit", f"hf:{files / 'vit'}", "--gpu", GPU, "--methods", "accumulation, lean, sbp(keep=0.5)"]
    out = said(capsys, *argv, "--html", page, "--json", data)
    plain, _, lean, sbp = json.loads(data.read_text())["methods"]
    assert f"any, in micro-batches of {plain['largest']}" in out and readable(lean["total"]) in out
    assert re.search(rf"\nlean +{lean['largest']} +{lean['largest'] / plain['largest']:.2f}", out)
    assert "approximate" in out and "may cost accuracy" in out
    points = content_of(page)["pareto"]["points"]
    assert [(p["methods"], p["peak"], p["time"]) for p in points] == [(f["method"], f["peak"], f["time"]) for f in (lean, sbp)]


def test_fit_finds_the_largest_image(files, capsys):
    data = as_json(capsys, "fit", f"hf:{files / 'vit'}", "--gpu", GPU, "--largest", "size", "--methods", "plain, recompute")
    assert data["step"] == 8
    for f in data["methods"]:
        assert fits(files, "vit", f["method"], data["gpu"], 1, size=f["largest"]) == (f["total"], True)
        assert not fits(files, "vit", f["method"], data["gpu"], 1, size=f["largest"] + 8)[1]


def test_fit_finds_the_longest_text_beyond_the_models_positions(files, capsys):
    argv = ["fit", f"hf:{files / 'gpt2'}", "--gpu", GPU, "--largest", "seq", "--methods", "plain, accumulation, lean"]
    data = as_json(capsys, *argv)
    plain, accumulation, lean = data["methods"]
    for f in (plain, lean):
        assert f["largest"] > 64 and f["largest"] % 64 == 0
        assert fits(files, "gpt2", f["method"], data["gpu"], 1, seq=f["largest"]) == (f["total"], True)
        assert not fits(files, "gpt2", f["method"], data["gpu"], 1, seq=f["largest"] + 64)[1]
    assert accumulation["largest"] == plain["largest"] and "a single sample stays as it is" in accumulation["why"]


def test_fit_says_what_does_not_fit_and_what_does_not_apply(files, capsys):
    model = f"{files / 'own.py'}:alone"
    out = said(capsys, "fit", model, "--size", 2000, "--gpu", GPU, "--methods", "plain, accumulation, sbp(keep=0.5)")
    assert re.search(r"\nplain +not even 1 ", out) and re.search(r"\nsbp\(keep=0.5\) +does not apply", out)
    assert "sbp(keep=0.5): apply_(): no blocks found in Norms" in out and "Where nothing fits, what 1 would need." in out


def test_accumulation_says_that_batch_norm_is_another_training(files, capsys):
    out = said(capsys, "fit", f"{files / 'own.py'}:alone", "--size", 64, "--gpu", GPU, "--methods", "accumulation")
    assert "BatchNorm takes its statistics from the micro-batch" in out and "any, in micro-batches of" in out


# audit


def test_audit_on_data_is_the_librarys(capsys, tmp_path):
    from halfback.data import digits

    page = tmp_path / "audit.html"
    argv = ["audit", "small-vit", "--data", "digits", "--batch", "16", "--method", "sbp(keep=0.5)", "--masks", "2"]
    torch.manual_seed(0)
    model, data = models.load_model("small-vit").train(), digits()
    found = hb.audit(model, (data.x_train[:16], data.y_train[:16]), 2, "sbp(keep=0.5)")
    out = said(capsys, *argv, "--html", page, "--all")
    assert str(found) in out and found.table() in out
    assert content_of(page)["audit"]["all"]["cosine"] == found.all.cosine
    assert as_json(capsys, *argv) == {"audit": found.to_json(), "trained": None}


def test_audit_of_several_random_batches(files, capsys):
    data = as_json(capsys, "audit", f"hf:{files / 'gpt2'}", "--method", "sbp(keep=0.5)", "--batches", "2", "--masks", "2", "--batch", "2")
    assert data["audit"]["batches"] == 2 and data["audit"]["all"]["noise"] > 0 and data["audit"]["all"]["cosine"] < 1


def test_audit_trains_if_asked_to(capsys):
    argv = ["audit", "small-vit", "--method", "sbp(keep=0.5)", "--masks", "2", "--train", "--epochs", "1", "--seeds", "2", "--batch", "512"]
    data = as_json(capsys, *argv)
    assert data["trained"]["settings"]["methods"] == "sbp(keep=0.5)" and data["trained"]["runs"][1]["run"] == "sbp(keep=0.5)"


# Mistakes


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["profile", "vit"],
            "convnext, timm:NAME, torchvision:NAME, path/to/file.py:factory, hf:NAME",
        ),
        (["profile", "hf:"], "model 'hf:' is unknown"),
        (["profile", "timm:nothing_like_it"], "timm has no such model"),
        (["profile", "torchvision:nothing"], "torchvision has no such model"),
        (["profile", "hf:nowhere/config.json"], "there is no file nowhere/config.json"),
        (["profile", "nowhere.py:make"], "there is no file nowhere.py"),
        (["profile", "OWN:nothing"], "the file has no function nothing. It has: "),
        (["profile", "OWN:wrong"], "the function returned int, not a torch.nn.Module, or (model, batch)"),
        (["profile", "OWN:raising"], "making it fails: KeyError: 'no such weight'"),
        (["profile", "OWN:asks"], "asks for the value of a tensor"),
        (["profile", "OWN:words"], "a training step on 64x3x224x224 fails: "),
        (["profile", "OWN:with_batch", "--size", "32"], "comes with its own batch, so --size 32 has no meaning"),
        (["profile", "OWN:with_loss", "--batch", "3"], "which has no --batch"),
        (["profile", "small-vit", "--size", "8", "--seq", "8"], "Give one of them"),
        (["profile", "small-vit", "--size", "7"], "patch=2 does not divide image=7"),
        (["profile", "small-vit", "--seq", "8"], "takes images, which have no --seq"),
        (["profile", "GPT2", "--size", "8"], "takes texts, which have no --size"),
        (["profile", "small-vit", "--batch", "0"], "--batch 0 must be at least 1"),
        (["profile", "small-vit", "--batch", "many"], "argument --batch: invalid int value: 'many'. See halfback profile --help"),
        (["profile", "small-vit", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["profile", "small-vit", "--optimizer", "lion"], "argument --optimizer: invalid choice: 'lion'"),
        (["profile", "small-vit", "--method", "spb"], "none of the methods sbp"),
        (["profile", "small-vit", "--method", "sbp(layers='x')"], "matches none of the 4 blocks"),
        (["profile", "small-vit", "--html", "nowhere/page.html"], "cannot be written: there is no folder nowhere"),
        (["profile", "small-vit", "--json", "FOLDER"], "is a folder; name a file"),
        (["plan", "small-vit"], "the following arguments are required: --budget"),
        (["plan", "small-vit", "--budget", "10 apples"], "--budget: '10 apples' is no size"),
        (["plan", "small-vit", "--budget", "16"], "--budget 16 has no unit"),
        (["plan", "small-vit", "--budget", "0.5", "--batch", "max"], "--batch max needs a budget as 10GiB"),
        (["plan", "small-vit", "--budget", "0.5", "--batch", "most"], "--batch most is no number of samples"),
        (["fit", "small-vit", "--gpu", "16"], "--gpu 16 has no unit; write it as 16GiB"),
        (["fit", "small-vit", "--gpu", "100MiB"], f"less than the {readable(CONTEXT)} that CUDA itself takes"),
        (["fit", "small-vit", "--gpu", "1GiB", "--methods", "lean, lean"], "lean is in the list twice"),
        (["fit", "small-vit", "--gpu", "1GiB", "--largest", "size", "--size", "8"], "--largest size finds what --size would say"),
        (["fit", "small-vit", "--gpu", "1GiB", "--largest", "seq"], "takes images, which have no --seq"),
        (["fit", "GPT2", "--gpu", "1GiB", "--largest", "size"], "takes texts; give --largest seq"),
        (["fit", "OWN:with_make", "--gpu", "1GiB", "--largest", "size"], "comes with its own batch, whose samples keep their size"),
        (["fit", "small-vit", "--gpu", "1GiB", "--step", "0"], "--step 0 must be at least 1"),
        (["audit", "small-vit"], "the following arguments are required: --method"),
        (["audit", "small-vit", "--method", "exact"], "exact gradients need no audit"),
        (["audit", "small-vit", "--method", "lean", "--masks", "0"], "--masks 0 must be at least 1"),
        (["audit", "small-vit", "--method", "lean", "--data", "digits", "--batch", "9999"], "fewer than the 9999"),
        (["audit", "small-vit", "--method", "lean", "--data", "digits", "--size", "8"], "leave --size and --seq out"),
        (["audit", "GPT2", "--method", "lean", "--data", "digits"], "is unknown. Models: small-vit, small-vit-mean"),
        (["compare", "--html", "nowhere/page.html"], "there is no folder nowhere"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(given, message, files, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"OWN": f"{files / 'own.py'}", "GPT2": f"hf:{files / 'gpt2'}", "FOLDER": str(tmp_path)}
    argv = [known.get(a.partition(":")[0], a.partition(":")[0]) + a[len(a.partition(":")[0]) :] for a in given]
    assert (
        main([*argv, *(["--json", "out.json"] if given[0] != "nothing" and given[0] != "compare" and "--json" not in given else [])]) == 2
    )
    caught = capsys.readouterr()
    assert caught.err.startswith("halfback: ") and message in caught.err and caught.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_on_the_hub_without_a_network_says_so_at_once(capsys, monkeypatch):
    monkeypatch.setattr(models, "_online", lambda: False)
    assert main(["profile", "hf:nobody/nothing"]) == 2
    err = capsys.readouterr().err
    assert "the hub cannot be reached" in err and "Give a model type (hf:gpt2" in err and err.count("\n") == 1


def test_a_file_that_is_no_configuration_says_so(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert main(["profile", f"hf:{tmp_path}"]) == 2
    assert "is no configuration of transformers" in capsys.readouterr().err


def test_stopping_is_no_traceback(monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "profile", stop)
    assert main(["profile", "small-vit"]) == 130 and capsys.readouterr().err == "halfback: stopped.\n"


@pytest.mark.parametrize("command", ["profile", "plan", "fit", "audit"])
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "examples:" in out and f"halfback {command} " in out and "path/to/file.py:factory" in out


def test_small_vit_is_the_one_of_the_library(capsys):
    data = as_json(capsys, "profile", "small-vit", "--batch", 4, "--dtype", "fp32", "--optimizer", "none")
    model = small_vit().train()
    wanted = hb.profile(model, (torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)), device="cuda", optimizer="none")
    assert Profile.from_json(data["before"]) == wanted
