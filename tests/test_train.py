"""halfback train: the gradients and figures that it promises, by the seed alone, for every kind of model and data."""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trainings import NOISY, assert_same, content, cut, options_of, quiet, rows_of, settings, state_of, training

import halfback as hb
from halfback.cli import main
from halfback.train import loop
from halfback.train.augment import Augment
from halfback.train.loop import Training
from halfback.train.pieces import Averaged, loss_from, make_optimizer, rate
from halfback.train.settings import Settings

pytestmark = pytest.mark.usefixtures("quick")

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


def test_the_seed_alone_says_what_a_training_sees(tmp_path, few, monkeypatch):
    augmented = {"crop": 1, "flip": True, "mixup": 0.3, "erase": 0.2}
    made = {}
    for name, changed in {
        "exact": {},
        "sbp": {"method": "sbp(keep=0.5)"},
        "dropit": {"method": "dropit(keep=0.2)", "ema": 0.9, "lr": 0.02},
        "other": {"seed": 1},
    }.items():
        made[name] = seen_by(settings(few, **{**augmented, **changed}), tmp_path / name, monkeypatch)
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


def test_masks_differ_from_step_to_step(tmp_path, few):
    for method, alike in (("exact", True), ("lean", True), ("sbp(keep=0.5)", False)):
        t = training(settings(few, method=method), tmp_path)
        x, y = t._batch(torch.arange(16), 0)
        one, two = gradients(t, x, y), gradients(t, x, y)  # the same batch, weights and seed
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)) is alike, method


def test_lean_trains_as_exact_does_to_the_bit(tmp_path, few):
    for name in ("exact", "lean"):
        quiet(settings(few, epochs=3, method=name, ema=0.9), tmp_path / name)
    assert_same(tmp_path / "exact", tmp_path / "lean", draws=False)


@pytest.mark.filterwarnings("ignore:halfback, step")
def test_the_monitor_changes_nothing_and_looks_at_the_loss_that_is_trained(tmp_path, few, monkeypatch):
    quiet(settings(few, method="sbp(keep=0.5)", mixup=0.2), tmp_path / "without")
    losses, own = [], loop.loss_from
    monkeypatch.setattr(loop, "loss_from", lambda scores, y, *a, **k: losses.append(tuple(y.shape)) or own(scores, y, *a, **k))
    quiet(settings(few, method="sbp(keep=0.5)", mixup=0.2, monitor=4), tmp_path / "with")
    one, two = state_of(tmp_path / "without")[0], state_of(tmp_path / "with")[0]
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert losses.count((4, 4)) == 2 * 3  # a quarter of the batch with its mixed labels, exact and approximate, in 3 of 12 steps
    row = rows_of(tmp_path / "with")[-1]
    assert row["monitor"]["step"] == 12 and 0 < row["monitor"]["cosine"] <= 1
    assert "monitor" not in rows_of(tmp_path / "without")[-1]


def test_counting_what_is_held_leaves_no_trace(tmp_path, few, monkeypatch):
    monkeypatch.undo()
    s = settings(few, method="sbp(keep=0.5)", mixup=0.2)
    t = training(s, tmp_path)
    plain = training(settings(few, mixup=0.2), tmp_path)
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


def test_the_rate_of_a_step_reaches_the_optimizer(tmp_path, few, monkeypatch):
    s = settings(few, warmup=1, schedule="cosine")
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


def test_parts_of_a_batch_give_its_gradient(tmp_path, few):
    plain = {"model": f"{few}/nets.py:plain", "optimizer": "sgd", "epochs": 1, "mixup": 0.2, "clip": 0.5}
    found = []
    for parts in (1, 2, 4):
        t = training(settings(few, **plain, accumulate=parts), tmp_path)
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


def test_what_is_clipped_is_the_gradient_without_its_scale(tmp_path, few):
    found = []
    for scaler in (None, Scaled()):
        t = training(settings(few, optimizer="sgd", momentum=0, weight_decay=0, lr=1.0, clip=0.1), tmp_path)
        t.scaler = scaler or t.scaler
        before = [p.detach().clone() for p in t.model.parameters()]
        t.train_step(*t.data.train.batch(torch.arange(16)))
        moved = [b - p.detach() for p, b in zip(t.model.parameters(), before, strict=True)]
        assert torch.stack([m.norm() for m in moved]).norm() == pytest.approx(0.1, rel=1e-3)  # the norm of an update at a rate of 1
        found.append(moved)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(*found, strict=True))


def test_noise_and_augmentation_do_not_share_their_numbers(tmp_path, few):
    t = training(settings(few), tmp_path)
    t.seeded()
    assert not torch.equal(torch.rand(8), torch.rand(8, generator=t.generator))
    t.seeded()
    first = torch.rand(8), torch.rand(8, generator=t.generator)
    t.seeded()
    assert torch.equal(first[0], torch.rand(8)) and torch.equal(first[1], torch.rand(8, generator=t.generator))
    t.step += 1
    t.seeded()
    assert not torch.equal(first[0], torch.rand(8)) and not torch.equal(first[1], torch.rand(8, generator=t.generator))


def test_the_tail_is_exact_and_only_the_tail(tmp_path, few, monkeypatch):
    s = settings(few, method="sbp(keep=0.25)", exact_tail=0.25, model=f"{few}/nets.py:plain", optimizer="sgd", momentum=0, weight_decay=0)
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


def test_the_schedule_is_followed_and_no_more_is_held_in_the_tail(tmp_path, few, monkeypatch):
    monkeypatch.undo()
    method = "sbp(keep=0.5, layers='all', schedule=((0, 0.75), (0.5, 0.25)))"
    t = training(settings(few, method=method, exact_tail=0.25, model=f"{few}/nets.py:plain"), tmp_path)
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
def test_the_loss_of_mixed_samples(mixing, tmp_path, few):
    t = training(settings(few, **mixing), tmp_path)
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
def test_the_test_against_a_direct_computation(ema, tmp_path, few):
    t = training(settings(few, ema=ema, method="sbp(keep=0.5)"), tmp_path)
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


def test_what_can_be_learned_is_learned(tmp_path, few):
    for name, more in {"exact": {}, "dropit(keep=0.5)": {"optimizer": "sgd", "ema": 0.5}}.items():
        found = quiet(settings(few, epochs=6, method=name, model=f"{few}/nets.py:normed", lr=0.05, **more), tmp_path / name)
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


def test_a_compiled_model_trains(tmp_path, few, monkeypatch):
    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: own(model, backend="aot_eager", **how))
    for name, changed in {"eager": {}, "compiled": {"compile": True}}.items():
        quiet(settings(few, model=f"{few}/nets.py:plain", epochs=1, optimizer="sgd", **changed), tmp_path / name)
    one, two = (state_of(tmp_path / name)[0] for name in ("eager", "compiled"))
    assert set(one) == set(two) and all(torch.allclose(one[k], two[k], rtol=1e-3, atol=1e-5) for k in one)


def test_a_budget_is_planned_once(tmp_path, few, monkeypatch, capsys):
    s = settings(few, model=f"{few}/nets.py:plain", budget="0.6", epochs=2)
    planned, own = [], loop.planner.plan
    monkeypatch.setattr(loop.planner, "plan", lambda *a, **k: planned.append(1) or own(*a, **k))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "methods.json").write_text("[]")  # of a training that did not get to its first checkpoint
    cut(s, tmp_path / "a", monkeypatch, 8)
    found = json.loads((tmp_path / "a" / "methods.json").read_text())
    assert found and len(planned) == 1
    result = quiet(s, tmp_path / "a", resume=True)
    assert len(planned) == 1 and result["methods"] != "exact"
    quiet(settings(few, model=s.model, method=json.dumps(found), epochs=2), tmp_path / "b")
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
