"""hb.audit: every figure against a computation by hand, and a model that is left as it was."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
import statistics
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfback as hb
from halfback.audit import Audit, audit, batches_of
from halfback.compare import Settings
from halfback.models import small_vit
from halfback.monitor import Monitor
from halfback.trained import compare_trained, consistency, gradient_norms, similarity
from halfback.untouched import untouched

ROWS = hb.DropIT(0.25, select="random", of="rows", layers="all")


def mlp(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)).to(dtype)


def points(n=32, seed=1, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=make).to(dtype), torch.randint(0, 5, (n,), generator=make)


def vit(**kwargs):
    torch.manual_seed(0)
    return small_vit(width=16, depth=3, heads=2, **kwargs).double()


def pictures(n=8, seed=1):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=make).double(), torch.randint(0, 10, (n,), generator=make)


class CNN(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(6, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x).mean((2, 3)))


def cnn(dropout=0.0):
    torch.manual_seed(0)
    return CNN(dropout).double()


def gradient(model, batch):
    """Of all parameters, by .backward(), as one vector a layer."""
    model.zero_grad(set_to_none=True)
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    found = {}
    for name, p in model.named_parameters():
        layer = name.rpartition(".")[0] or type(model).__name__
        found.setdefault(layer, []).append((torch.zeros_like(p) if p.grad is None else p.grad).flatten())
    found = {k: torch.cat(v) for k, v in found.items()}
    return {**found, "all": torch.cat(list(found.values()))}


def by_hand(g, masks):
    """The figures from the exact gradients of batches, and from all gradients of all masks of each."""
    g, h = torch.stack(g), torch.stack([torch.stack(m) for m in masks])  # (batches, entries), (batches, masks, entries)
    n, square = h.shape[1], (g**2).sum(-1)
    along = (h * g[:, None]).sum(-1)
    variance = ((h - h.mean(1, keepdim=True)) ** 2).sum(-1).sum(-1) / (n - 1)
    bias = ((h.mean(1) - g) ** 2).sum(-1) - variance / n
    return {
        "norm": square.sqrt().mean(),
        "cosine": (along / h.norm(dim=-1) / g.norm(dim=-1)[:, None]).mean(),
        "scale": along.mean(1).sum() / square.sum(),
        "bias2": max(0.0, bias.sum() / square.sum()),
        "variance": variance.sum() / square.sum(),
    }


def assert_by_hand(found, wanted):
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name


# The figures


CASES = {
    "dropit": (mlp, points, ROWS),
    "sbp": (vit, pictures, hb.SBP(0.25, sampler="random", attention="qkv", layers="all")),
    "dropit on a cnn": (cnn, pictures, hb.DropIT(0.3, of="rows", select="random", layers="all")),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_figure_equals_the_one_computed_by_hand_from_all_masks(case, count):
    make, draw, method = CASES[case]
    model, batches, steps = make(), [draw(seed=s) for s in range(count)], 5
    found = audit(model, batches if count > 1 else batches[0], steps=steps, methods=method)

    exact = [gradient(model, b) for b in batches]
    hb.apply_(model, method)
    masks = [[gradient(model, b) for _ in range(steps)] for b in batches]
    assert [layer.layer for layer in found.layers] == list(exact[0])[:-1]
    for layer in [*found.layers, found.all]:
        name = layer.layer
        assert_by_hand(layer, by_hand([g[name] for g in exact], [[h[name] for h in m] for m in masks]))
        assert layer.parameters == len(exact[0][name]) and layer.own == 0
    assert found.all.cosine < 0.999 and found.all.variance > 0.001
    loss = pytest.approx(statistics.fmean(F.cross_entropy(model(x), y).item() for x, y in batches), rel=1e-12)
    assert found.loss == loss and found.loss_exact == loss


def test_a_known_selection_gives_the_known_figures():
    """DropIT's largest elements on the last layer: dW = dy' x_hat, with x_hat the k largest of its input."""
    model, (x, y) = mlp(), points()
    found = audit(model, (x, y), steps=3, methods=hb.DropIT(0.25, block=None, layers="4"))
    hidden = model[:4](x).detach()
    kept = torch.zeros(hidden.numel(), dtype=torch.bool)
    kept[hidden.flatten().abs().topk(hidden.numel() // 4).indices] = True
    dy = torch.autograd.functional.jacobian(lambda out: F.cross_entropy(out, y), model(x).detach())
    g = torch.cat(((dy.T @ hidden).flatten(), dy.sum(0)))
    h = torch.cat(((dy.T @ (hidden * kept.view_as(hidden))).flatten(), dy.sum(0)))
    last = found.layers[-1]
    assert last.cosine == pytest.approx(float(g @ h / g.norm() / h.norm()), rel=1e-12)
    assert last.bias2 == pytest.approx(float((g - h).square().sum() / g.square().sum()), rel=1e-12)
    assert last.scale == pytest.approx(float(g @ h / (g @ g)), rel=1e-12) and last.variance == 0
    assert all(layer.cosine == 1 and layer.bias2 == 0 for layer in found.layers[:-1])


def test_a_fixed_mask_has_no_variance_and_its_error_is_the_bias():
    model, batch = vit(), pictures()
    found = audit(model, batch, steps=3, methods=hb.SBP(0.5, sampler="fixed", layers="all"))
    g = gradient(model, batch)["all"]
    hb.apply_(model, hb.SBP(0.5, sampler="fixed", layers="all"))
    off = gradient(model, batch)["all"] - g
    assert found.all.variance == 0 and found.all.bias2 == pytest.approx(float(off @ off / (g @ g)), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [vit, cnn])
def test_lean_is_exact_to_the_last_bit(make, dtype):
    x, y = pictures()
    model = make().to(dtype)
    found = audit(model, (x.to(dtype), y), steps=2, methods=hb.Lean())
    plain = gradient(model, (x.to(dtype), y))  # hb.exact leaves Lean on, so what is exact there is looked at here
    for layer in [*found.layers, found.all]:
        assert layer.norm == pytest.approx(float(plain[layer.layer].double().norm()), rel=1e-6, abs=1e-9)
        assert layer.bias2 == 0 and layer.variance == 0
        assert (layer.cosine, layer.scale) == ((1, 1) if layer.norm else (None, None))
    assert "nothing was approximated" in str(found)


def test_an_unbiased_method_has_little_bias_for_its_variance():
    found = audit(mlp(), points(), steps=64, methods=ROWS)
    assert found.all.variance > 0.05 and found.all.bias2 < found.all.variance / 20
    assert found.all.scale == pytest.approx(1, abs=0.2)


def test_the_average_pool_scales_the_gradient_and_the_class_token_hardly():
    scales = {}
    for pool in ("class", "mean"):
        scales[pool] = audit(vit(pool=pool), pictures(32), steps=4, methods="sbp(keep=0.5)").all.scale
    assert scales["class"] > 0.85 and scales["mean"] < 0.8


# Noise


def test_noise_of_one_batch_comes_from_its_halves():
    model = mlp()
    for size, half in ((32, 16), (5, 2)):  # of 5 the halves of 4 are taken, and the variance of a mean over 5
        x, y = points(size)
        found = audit(model, (x, y), methods=ROWS, steps=2)
        a, b = gradient(model, (x[:half], y[:half])), gradient(model, (x[half : 2 * half], y[half : 2 * half]))
        g = gradient(model, (x, y))
        for layer in [*found.layers, found.all]:
            n = layer.layer
            wanted = (a[n] - b[n]).square().sum() / 4 * 2 * half / size / g[n].square().sum()
            assert layer.noise == pytest.approx(float(wanted), rel=1e-9)


def test_noise_of_several_batches_is_the_variance_between_them():
    model, batches = mlp(), [points(16, seed=s) for s in range(5)]
    found = audit(model, batches, methods=ROWS, steps=2)
    g = torch.stack([gradient(model, b)["all"] for b in batches])
    wanted = g.var(0).sum() / g.square().sum(1).mean()
    assert found.all.noise == pytest.approx(float(wanted), rel=1e-9)


def test_both_estimates_of_noise_mean_the_same():
    """Means over many batches, of halves and of odd sizes too: the variance of a mean over the batch, times |g|²."""
    model = mlp()
    for size in (16, 15):
        batches = [points(size, seed=s) for s in range(120)]
        found = [audit(model, b, methods=hb.Lean(), steps=1, progress=False).all for b in batches]
        halves = statistics.fmean(f.noise * f.norm**2 for f in found)
        between = torch.stack([gradient(model, b)["all"] for b in batches]).var(0).sum()
        assert halves == pytest.approx(float(between), rel=0.2)


def test_noise_of_a_sum_is_relative_to_the_sum():
    """A batch without targets: the loss is a sum over samples, whose relative noise is the mean's."""
    x, _ = points(32)
    model = mlp()
    summed, mean = audit(model, x, methods=ROWS, steps=2), audit(model, lambda: model(x).sum(), methods=ROWS, steps=2)
    g = {k: torch.autograd.grad(model(part).sum(), model[4].weight)[0] for k, part in (("a", x[:16]), ("b", x[16:]), ("all", x))}
    first = audit(nn.Sequential(model), x, methods=ROWS, steps=2).layers[2]
    bias = 16 * 5 - 16 * 5  # the gradient of the last bias is the number of samples, in each half the same
    wanted = float((g["a"] - g["b"]).square().sum() + bias) / float(g["all"].square().sum() + 5 * 32**2)
    assert first.noise == summed.layers[2].noise == pytest.approx(wanted, rel=1e-9)
    assert mean.all.noise is None and mean.all.scale == summed.all.scale


def test_noise_is_unknown_for_one_sample_and_where_a_half_cannot_run():
    assert audit(mlp(), points(1), methods=ROWS, steps=2).all.noise is None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).double()
    found = audit(model, points(2), methods=hb.Lean(), steps=2)
    assert found.all.noise is None and found.all.cosine == 1 and "-" in found.table()


# The model's own random functions


class Doubtful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(300, 4, bias=False)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.25, self.training))


def test_own_is_the_variance_that_dropout_makes():
    torch.manual_seed(0)
    x = torch.randn(1, 300, dtype=torch.float64)
    found = audit(Doubtful().double(), x, methods=hb.Lean(), steps=40).all
    # the gradient of a sum is x * mask / 0.75 in every row: a variance of x² / 3
    assert found.own * found.norm**2 == pytest.approx(float(4 * x.square().sum() / 3), rel=0.1)
    assert found.variance == pytest.approx(found.own, rel=0.1) and found.bias2 < 0.015 * found.own
    assert found.scale == pytest.approx(1, abs=0.1) and 0.75 < found.cosine < 0.95


def test_noise_has_dropouts_part_whatever_the_number_of_seeds():
    """Batches that are all the same: all that differs from step to step of a training is dropout."""
    torch.manual_seed(0)
    model, x = Doubtful().double(), torch.randn(1, 300, dtype=torch.float64)
    for steps in (2, 5):
        found = audit(model, [(x, torch.zeros(1, 4, dtype=torch.float64))] * 40, methods=hb.Lean(), steps=steps).all
        assert found.noise == pytest.approx(found.own, rel=0.1)


class Counting(nn.Module):
    """Its output depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("runs", torch.ones(()))

    def forward(self, x):
        self.runs = self.runs + 1  # another tensor, as some write it
        return self.linear(x) * self.runs


def test_every_run_starts_from_the_same_buffers():
    model = Counting().double()
    runs = model.runs
    found = audit(model, points(), methods=hb.Lean(), steps=3)
    assert found.all.own == 0 and found.all.variance == 0 and found.loss == found.loss_exact
    assert model.runs is runs and float(runs) == 1


def test_dropout_is_told_from_the_masks():
    model, batch = cnn(0.5), pictures()
    lean, rows = audit(model, batch, methods=hb.Lean()), audit(model, batch, methods=CASES["dropit on a cnn"][2])
    assert lean.all.own > 0 and lean.all.own == rows.all.own
    assert rows.all.variance > 1.5 * rows.all.own
    assert "dropout" in str(rows) and "own" in rows.table() and "own" not in audit(cnn(), batch, methods=hb.Lean()).table()


# Layers


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.scale * self.last(F.relu(self.frozen(F.relu(self.first(x)))))


def test_tied_weights_count_once_frozen_not_and_unused_are_zero():
    torch.manual_seed(0)
    found = audit(Odd().double(), points(), methods=hb.DropIT(0.3, layers="all"), steps=2)
    assert [(layer.layer, layer.parameters) for layer in found.layers] == [("Odd", 1), ("first", 36), ("unused", 21)]
    unused = found.layers[2]
    assert unused.norm == 0 and {unused.cosine, unused.scale, unused.bias2, unused.variance, unused.noise, unused.own} == {None}
    assert found.all.parameters == 58 and 0 < found.layers[1].bias2 < 1 and found.layers[0].bias2 == 0
    assert [layer.layer for layer in found.worst(9)] == ["first", "Odd"]


def test_bert_with_dropout_and_a_tokenizers_batch():
    from transformers import BatchEncoding, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    model = BertForMaskedLM(config)
    tokens = torch.randint(0, 40, (4, 12))
    batch = BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens})
    hb.apply_(model, hb.SBP(0.5), hb.Lean())
    assert not model.eval().training
    found = audit(model, batch, steps=3)
    assert found.methods == "sbp+lean" and found.all.own > 0 and found.all.noise > 0 and not model.training
    names = [layer.layer for layer in found.layers]
    assert "cls.predictions.decoder" not in names and "bert.embeddings.word_embeddings" in names  # tied
    assert 0.2 < found.all.cosine < 1


def test_skiptokens_says_that_the_loss_is_another():
    found = audit(vit(), pictures(), steps=2, methods="skiptokens(keep=0.5)")
    assert found.loss != found.loss_exact and found.changes_forward
    assert "changes the forward: the loss is" in found.table() and "changes the forward: the loss is" in str(found)


def test_low_precision_gradients_are_summed_in_better():
    model, (x, y) = mlp(torch.bfloat16), points(dtype=torch.bfloat16)
    found = audit(model, (x, y), steps=4, methods=ROWS)

    def once():
        return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x).float(), y), list(model.parameters()))])

    g = once().double()
    hb.apply_(model, ROWS)
    wanted = by_hand([g], [[once().double() for _ in range(4)]])
    for name, value in wanted.items():
        assert getattr(found.all, name) == pytest.approx(float(value), rel=1e-5), name


# Batches


def test_one_batch_and_several():
    x, y = torch.zeros(2, 3), torch.zeros(2)
    for one in (x, (x, y), [x, y], {"x": x}, ((x, x), y), [(x, x), y], lambda: x.sum(), [x]):
        assert batches_of(one) == [one]
    for several in ([(x, y)], [[x, y], [x, y]], [{"x": x}], [lambda: x.sum()]):
        assert batches_of(several) is several


def test_a_loaders_batches_are_taken_as_they_come():
    model, (x, y) = mlp(), points(24)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    found = audit(model, itertools.islice(loader, 2), steps=2, methods=ROWS)
    assert found.batches == 2 and found == audit(model, [(x[:8], y[:8]), (x[8:16], y[8:16])], steps=2, methods=ROWS)
    assert audit(model, loader, steps=2, methods=ROWS).batches == 3
    assert audit(model, next(iter(loader)), steps=2, methods=ROWS) == audit(model, (x[:8], y[:8]), steps=2, methods=ROWS)


# Left as it was


class Fragile(CNN):
    """Fails, or is interrupted, in the forward that it is told."""

    fail, error = -1, RuntimeError

    def forward(self, x):
        self.fail -= 1
        if self.fail == 0:
            raise self.error("enough")
        random.random()
        np.random.rand()
        return super().forward(x)


def snapshot(model):
    states = [(s.mark(), s.on, getattr(s, "open", None) is True) for s in model._halfback.states]
    report = model._halfback.report
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "flags": [m.training for m in model.modules()],
        "draws": (states, report.before, report.after, report.rows),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),
    }


def assert_same(a, b):
    assert a["flags"] == b["flags"] and a["draws"] == b["draws"]
    assert all(torch.equal(a["weights"][k], b["weights"][k]) for k in a["weights"])
    for (i, x), (j, y) in zip(a["gradients"], b["gradients"], strict=True):
        assert i == j and (x is y or torch.equal(x, y))
    (t, p, n), (u, q, m) = a["random"], b["random"]
    assert torch.equal(t, u) and p == q and (n == m).all()


METHODS = {"sbp": hb.SBP(0.5, layers="all", sampler="random"), "dropit": ROWS, "lean": hb.Lean()}


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(error, training):
    torch.manual_seed(0)
    model = Fragile(0.3).double()
    hb.apply_(model, ROWS)
    model.train(training)
    model.norm1.eval()
    model.dropout.train()
    model.head.bias.grad = torch.ones(10, dtype=torch.float64)
    before = snapshot(model)
    if error is None:
        audit(model, pictures(), steps=2)
    else:
        for at in (2, 5):  # in an exact forward, in an approximate one
            model.fail, model.error = at, error
            with pytest.raises(error, match="enough"):
                audit(model, pictures(), steps=3)
            assert model.fail == 0
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_methods_for_the_audit_are_gone_after_it_also_after_an_error(error):
    model = Fragile().double()
    model.fail, model.error = 4, error
    with pytest.raises(error):
        audit(model, pictures(), steps=3, methods="dropit(keep=0.3)")
    assert "_halfback" not in vars(model) and "forward" not in vars(model)
    audit(model, pictures(), steps=1, methods="dropit(keep=0.3)")
    assert "_halfback" not in vars(model) and "forward" not in vars(model)


def test_a_stream_that_broke_off_is_forgotten():
    model = vit()
    hb.apply_(model, METHODS["sbp"])
    state = model._halfback.states[0]

    def interrupt(*_):
        if state.on:
            assert state.current is not None
            raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        audit(model, pictures(), steps=2)
    handle.remove()
    assert not state.open and state.current is None and state.key is None and state.mark() == 0


def test_a_function_that_calls_backward_leaves_gradients_alone():
    model, (x, y) = mlp(), points()
    hb.apply_(model, ROWS)
    gradient(model, (x, y))
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]

    def both():
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        return loss

    audit(model, both, steps=2)
    assert all(p.grad is g and torch.equal(g, was) for p, (g, was) in zip(model.parameters(), before, strict=True))


def test_an_audit_between_forward_and_backward_disturbs_neither():
    model, (x, y) = cnn(), pictures()
    model.norm1.eval()  # whose statistics the graph saves
    wanted = gradient(copy.deepcopy(model), (x, y))["all"]
    hb.apply_(model, hb.Recompute(layers=("conv1", "conv2")), hb.Lean())
    loss = F.cross_entropy(model(x), y)
    audit(model, (x, y), steps=2)
    loss.backward()
    assert torch.allclose(torch.cat([p.grad.flatten() for p in model.parameters()]), wanted, rtol=1e-12, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", METHODS)
def test_on_a_gpu_too_training_goes_on_bit_equal(name):
    torch.use_deterministic_algorithms(True, warn_only=True)
    ends = []
    for look in (False, True):
        torch.manual_seed(0)
        model = (small_vit(width=64, heads=1) if name == "sbp" else CNN(0.2)).cuda()
        hb.apply_(model, METHODS[name])
        monitor = Monitor(model, every=2, share=0.5, cosine=-1, scale=(-9, 9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(5)
        for step in range(4):
            x, y = (t.cuda() for t in pictures(seed=step))
            with torch.autocast("cuda", torch.bfloat16), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                if look:
                    monitor((x.float(), y))
                    assert audit(model, (x.float(), y), steps=2).all.norm > 0
                loss = F.cross_entropy(model(x.float()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append((torch.cuda.get_rng_state(), [p.detach().clone() for p in model.parameters()]))
    torch.use_deterministic_algorithms(False)
    assert torch.equal(ends[0][0], ends[1][0])
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_an_audit_without_gradients_around_it_works():
    with torch.no_grad():
        assert audit(mlp(), points(), steps=2, methods=ROWS).all.norm > 0


def trained(look, method, make, steps=6):
    """Weights and losses after a few steps; `look` is called in each."""
    model = make()
    hb.apply_(model, method)
    if look == "monitor":
        monitor = Monitor(model, every=2, share=0.5)
        look = monitor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    losses = []
    for step in range(steps):
        x, y = pictures(seed=step)
        if look is not None:
            look((x, y)) if isinstance(look, Monitor) else look(model, (x, y))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), look


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("how", ["audit", "monitor"])
def test_training_goes_on_bit_equal(how, name):
    make = vit if name == "sbp" else lambda: cnn(0.2)
    look = "monitor" if how == "monitor" else lambda model, batch: audit(model, batch, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the monitor thinks of it is another test
        plain, seen = trained(None, METHODS[name], make), trained(look, METHODS[name], make)
    assert plain[0] == seen[0] and all(torch.equal(plain[1][k], seen[1][k]) for k in plain[1])
    if how == "monitor":
        assert [h["step"] for h in seen[2].history] == [2, 4, 6]


def test_a_report_still_counts_a_whole_batch():
    model = cnn()
    report = hb.apply_(model, hb.DropIT(0.3, layers="all"))
    audit(model, pictures(2), steps=1)
    assert report.before is None
    gradient(model, pictures(8))
    again = hb.apply_(other := cnn(), hb.DropIT(0.3, layers="all"))
    gradient(other, pictures(8))
    assert (report.before, report.after) == (again.before, again.after)


def test_untouched_puts_a_frozen_batch_norm_nowhere():
    model = cnn().train()
    model.norm1.eval()
    with untouched(model):
        assert not model.norm1.training and model.norm2.training
    with untouched(model.eval()):
        assert model.norm1.training
    assert not any(m.training for m in model.modules())


# Text, JSON, errors


def test_the_table_has_every_layer_in_order_and_the_text_the_worst():
    found = audit(vit(pool="mean"), pictures(), steps=2, methods="sbp(keep=0.25, layers='all')")
    lines = found.table().splitlines()
    assert lines[0].split() == ["layer", "norm", "cosine", "scale", "bias²", "variance", "noise"]
    assert [line.split()[0] for line in lines[2:]] == [*(layer.layer for layer in found.layers), "all"]
    text = str(found)
    assert all(layer.layer in text for layer in found.worst(3)) and len(text.splitlines()) < 14
    assert "a smaller learning rate for them that AdamW hides and SGD does not" in text and "the batch's own noise" in text
    assert "does not rank methods by accuracy" in text
    assert found.worst(1, by="scale")[0].scale == min(layer.scale for layer in found.layers if layer.scale is not None)


def test_json_there_and_back():
    found = audit(Odd().double(), points(), methods="dropit(keep=0.3)", steps=2)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert Audit.from_json(json.loads(text)) == found
    data = json.loads(text)
    assert set(data) == {"model", "methods", "steps", "batches", "loss", "loss_exact", "layers", "all"}
    assert set(data["all"]) == {"layer", "parameters", "norm", "cosine", "scale", "bias2", "variance", "noise", "own"}
    with pytest.raises(ValueError, match="missing or unknown: loss"):
        Audit.from_json({k: v for k, v in data.items() if k != "loss"})


def test_one_mask_tells_neither_bias_nor_variance():
    found = audit(mlp(), points(), steps=1, methods=ROWS)
    assert found.all.bias2 is None and found.all.variance is None and found.all.cosine < 1
    assert "learning rate" in str(found) or "does not rank" in str(found)


def test_what_is_not_finite_is_said():
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0] = math.inf
    found = audit(model, points(), steps=2, methods=hb.Lean())
    assert "not finite" in str(found) and found.to_json()["all"]["cosine"] is None


def test_errors_say_what_to_do():
    model, batch = mlp(), points()
    with pytest.raises(ValueError, match=r"audit\(\): Sequential has no method applied.*hb\.apply_.*methods="):
        audit(model, batch)
    with pytest.raises(ValueError, match="methods='exact' is exact, so there is nothing to audit"):
        audit(model, batch, methods="exact")
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        audit(model, batch, steps=0, methods=ROWS)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, found tuple"):
        audit(batch, model, methods=ROWS)
    with pytest.raises(TypeError, match="batch is str; give a tensor"):
        audit(model, "digits", methods=ROWS)
    with pytest.raises(TypeError, match="there is no tensor in batch"):
        audit(model, [], methods=ROWS)
    with pytest.raises(ValueError, match="there is no batch to audit"):
        audit(model, iter([]), methods=ROWS)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        audit(mlp().requires_grad_(False), batch, methods=hb.Lean())
    hb.apply_(model, ROWS)
    with pytest.raises(ValueError, match="already has dropit"):
        audit(model, batch, methods=ROWS)
    with pytest.raises(ValueError, match="by='norms' is none of cosine, scale, bias2, variance"):
        audit(model, batch, steps=1).worst(by="norms")
    other = mlp()
    assert "Does the batch's function run this model?" in str(audit(model, lambda: _touch(model) + other(batch[0]).sum(), steps=2))


def _touch(model):
    return 0 * sum(p.sum() for p in model.parameters())


def test_a_bar_only_when_asked(capsys):
    audit(mlp(), points(), steps=2, methods=ROWS)
    assert capsys.readouterr().err == ""
    audit(mlp(), points(), steps=2, methods=ROWS, progress=True)
    assert "audit" in capsys.readouterr().err


# The monitor


def test_the_monitor_looks_at_one_mask_of_a_part():
    model, (x, y) = mlp(), points(32)
    hb.apply_(model, ROWS)
    monitor = Monitor(model, every=3, share=0.25, cosine=-1, scale=(-9, 9))
    assert [monitor((x, y)) is None for _ in range(6)] == [True, True, False] * 2
    some, other = (x[:8], y[:8]), copy.deepcopy(model)
    hb.remove_(other)
    g, h = gradient(other, some), gradient(model, some)
    now = monitor.history[1]
    assert monitor.history[0] == {**now, "step": 3} and now["step"] == 6  # nothing was trained between them
    assert now["norm_exact"] == pytest.approx(float(g["all"].norm())) and now["norm"] == pytest.approx(float(h["all"].norm()))
    assert now["scale"] == pytest.approx(float(g["all"] @ h["all"] / g["all"].square().sum()))
    assert now["cosine"] == pytest.approx(float(F.cosine_similarity(g["all"], h["all"], 0)))
    cosines = {k: float(F.cosine_similarity(g[k], h[k], 0)) for k in g if k != "all"}
    assert now["worst"] == min(cosines, key=cosines.get) and now["worst_cosine"] == pytest.approx(min(cosines.values()))
    norms = monitor.norms()
    assert list(norms) == ["0", "2", "4"]
    assert norms["4"][0] == (3, pytest.approx(float(g["4"].norm())), pytest.approx(float(h["4"].norm())))
    data = json.loads(json.dumps(monitor.to_json(), allow_nan=False))
    assert data["history"] == monitor.history and len(data["norms"]["0"]) == 2 and data["methods"] == str(ROWS)


def watched(method, **limits):
    model = mlp()
    hb.apply_(model, method)
    return model, Monitor(model, every=1, share=1, **limits)


def test_each_warning_comes_once():
    model, monitor = watched(ROWS, cosine=0.999, scale=(-9, 9))
    with pytest.warns(UserWarning, match=r"step 1: the cosine of dropit.* is 0\.\d\d, below 0.999; the worst layer is") as seen:
        monitor(points())
        monitor(points())
    assert len(seen) == 1 and seen[0].filename == __file__

    model, monitor = watched(ROWS, cosine=-1, scale=(50, 60))
    with pytest.warns(UserWarning, match=r"of the exact gradient, outside 50 to 60.*AdamW hides and SGD does not"):
        monitor(points())

    model, monitor = watched(hb.Lean())
    monitor(points())
    with torch.no_grad():
        model[4].weight.mul_(1e6)
    x, _ = points()
    with pytest.warns(UserWarning, match=r"norm fell from .* to .*monitor.norms\(\) says in which layers"):
        monitor((x, model(x).argmax(1)))

    model, monitor = watched(hb.Lean())
    with torch.no_grad():
        model[0].weight[0, 0] = math.inf
    with pytest.warns(UserWarning, match="the exact gradient is not finite, so it is not the method"):
        monitor(points())
    assert json.dumps(monitor.to_json(), allow_nan=False)


class Large(nn.Module):
    """Activations that float64 can hold and the float32 scale of a few-bit copy cannot."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 5)

    def forward(self, x):
        return self.last(F.relu(self.first(x)) * 1e200) * 1e-200


def test_a_gradient_that_only_the_method_makes_infinite_is_its_own_fault():
    torch.manual_seed(0)
    model = Large().double()
    hb.apply_(model, hb.DropIT(bits=4, layers="last"))
    monitor = Monitor(model, every=1)
    with pytest.warns(UserWarning, match=r"the gradient of dropit.* is not finite, and the exact one is. Train on with hb.exact"):
        now = monitor(points())
    assert math.isfinite(now["norm_exact"]) and not math.isfinite(now["norm"])


def test_a_monitors_errors():
    with pytest.raises(ValueError, match=r"Monitor\(\): Sequential has no method applied"):
        Monitor(mlp())
    model, monitor = watched(hb.Lean())
    for wrong, said in (({"every": 0}, "every=0 must be at least 1"), ({"share": 0}, r"share=0 must be in \(0, 1\]")):
        with pytest.raises(ValueError, match=said):
            Monitor(model, **wrong)
    hb.remove_(model)
    with pytest.raises(ValueError, match="has no method applied"):
        monitor(points())


# What a training ends in


def test_similarity_is_the_cosine_of_weights():
    a, b = cnn(), cnn()
    with torch.no_grad():
        b.conv1.weight.mul_(-2)
        b.norm1.running_mean.add_(5)
        b.head.weight.add_(torch.randn_like(b.head.weight))
    found = similarity(a, b)
    assert list(found["layers"]) == ["conv1", "norm1", "conv2", "norm2", "head"]
    one, two = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (a, b))
    assert found["all"] == pytest.approx(float(F.cosine_similarity(one, two, 0))) and found["layers"]["norm1"] == pytest.approx(1)
    one, two = (torch.cat([m.conv1.weight.detach().flatten(), m.conv1.bias.detach()]) for m in (a, b))
    assert found["layers"]["conv1"] == pytest.approx(float(F.cosine_similarity(one, two, 0)))
    assert similarity(a.state_dict(), b) == found
    assert similarity({"w": torch.zeros(2)}, {"w": torch.ones(2)}) == {"layers": {"(own)": None}, "all": None}


def test_similarity_of_different_models_is_an_error():
    with pytest.raises(ValueError, match=r"different weights. only in a: 0.bias, 0.weight, 2.bias; only in b: conv1.bias"):
        similarity(mlp(), cnn())
    with pytest.raises(ValueError, match=r"0.weight is \(2, 3\) in a and \(2, 4\) in b"):
        similarity(nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(TypeError, match="expected models or state dicts, found int"):
        similarity(mlp(), 3)


def test_consistency_is_the_share_of_equal_predictions():
    torch.manual_seed(0)
    a = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5)).double()
    b, (x, y) = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 5)).double(), points(40)
    a[1].eval()
    found = consistency(a, b, [(x[:30], y[:30]), (x[30:], y[30:])])
    assert a.training and a[0].training and not a[1].training and b[1].training
    wanted = (a.eval()(x).argmax(1) == b.eval()(x).argmax(1)).double().mean()
    assert found == float(wanted) and 0 < found < 1 and found == consistency(a, b, x)
    assert consistency(a, a, (x, y)) == 1 and not a.training
    with pytest.raises(ValueError, match="a function returns a loss"):
        consistency(a, b, lambda: a(x).sum())


def test_gradient_norms_are_of_the_exact_and_of_one_mask():
    model, batch = mlp(), points()
    g = gradient(model, batch)
    hb.apply_(model, ROWS)
    found = gradient_norms(model, batch)
    h = gradient(model, batch)
    assert {k: pytest.approx((float(g[k].norm()), float(h[k].norm()))) for k in g} == found


def test_trained_models_beside_their_controls(tmp_path):
    make = np.random.default_rng(0)
    y = make.integers(0, 3, 96)
    x = make.normal(size=(96, 8, 8)) + np.eye(8)[None] * y[:, None, None]
    file = tmp_path / "three.npz"
    np.savez(file, x_train=x[:64].astype(np.float32), y_train=y[:64], x_test=x[64:].astype(np.float32), y_test=y[64:])
    settings = Settings(data=str(file), methods="lean, sbp(keep=0.25, layers='all')", seeds=2, epochs=2, batch=16)
    said = []
    before = torch.get_rng_state()
    result = compare_trained(settings, say=said.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    runs = {r["run"]: r for r in result["runs"]}
    assert list(runs) == ["exact", "lean", "sbp(keep=0.25, layers='all')", "exact, other batches", "exact, other weights"]
    exact, lean, sbp, batches, weights = runs.values()
    assert lean["mean"]["similarity"] == pytest.approx(1, abs=1e-6) and lean["mean"]["consistency"] == 1
    assert sbp["mean"]["similarity"] < 0.9999 and batches["mean"]["similarity"] < 0.9999
    assert abs(weights["mean"]["similarity"]) < 0.5 * batches["mean"]["similarity"]  # other weights are unrelated but for norms
    assert sbp["std"]["consistency"] == pytest.approx(statistics.stdev(s["consistency"] for s in sbp["seeds"]))
    for run in runs.values():
        for s in run["seeds"]:
            assert len(s["epochs"]) == 2 and set(s["epochs"][0]["norms"]) == {*s["epochs"][0]["layers"], "ViT", "all"} - {"(own)"}
            same = all(math.isclose(*pair, rel_tol=1e-6) for pair in s["epochs"][1]["norms"].values())
            assert same == (run is not sbp)
    assert exact["seeds"][0]["epochs"][0]["norms"] == lean["seeds"][0]["epochs"][0]["norms"]
    assert "other batches" in said[-1] and "cosine of weights after epoch" in said[-1] and "blocks.3.mlp.2" in said[-1]
    assert result["settings"]["seeds"] == 2 and result["versions"]["torch"] == torch.__version__


def test_one_seed_is_not_enough():
    with pytest.raises(ValueError, match="seeds=1 must be at least 2"):
        compare_trained(Settings(methods="lean", seeds=1))
