"""hb.plan: a budget is met, by exact means where they can; the prediction is what a real step has."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import halfback as hb
from halfback import planner as planning
from halfback.planner import Impossible, Planner, allowed, parse_size, plan_with, total_of

SIZES = {"vit": {"layers": 2}, "gpt2": {"layers": 2}, "convnext": {"depths": (1, 1, 2, 1)}}


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4)).train()


X = torch.randn(256, 16)


@functools.cache
def made(name):
    """A model, its batch, and a planner, which counts everything once for all tests."""
    model, batch = (mlp(), X) if name == "mlp" else zoo.make(name, **SIZES[name])
    return model, batch, Planner(model, batch, optimizer="none")


# Sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 * 2**30),
        ("16 GB", 16 * 10**9),
        (" 1.5gib ", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("7", 7),
        ("7 b", 7),
        (12, 12),
        ("2K", 2000),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@given(st.integers(1, 10**6), st.sampled_from(list(planning.UNITS)), st.text(" \t", max_size=3), st.booleans())
def test_units_spaces_and_case(number, unit, space, upper):
    text = f"{space}{number}{space}{unit.upper() if upper else unit}{space}"
    assert parse_size(text) == number * planning.UNITS[unit]


@pytest.mark.parametrize("text", ["ten", "10XB", "-1GiB", "", " ", "1e3", "1_000", "nan", "10 i", 0, -5, True, None, 1.5, b"10GiB", [1]])
def test_what_is_no_size_is_said(text):
    with pytest.raises(ValueError, match=r"is no size. Write it as '10GiB', '800MiB' or '16GB', or as a number of bytes"):
        parse_size(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_an_error_that_says_so(text):
    try:
        assert parse_size(text) >= 1
    except ValueError as e:
        assert "is no size" in str(e)


@pytest.mark.parametrize("text", ["0.0001", "1" * 400])  # once: a size of no bytes; an OverflowError
def test_sizes_that_are_too_small_or_too_large_are_said(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("budget", [0.0, 1.5, -0.1, float("nan"), float("inf")])
def test_what_is_no_fraction_is_said(budget):
    with pytest.raises(ValueError, match=r"must be a fraction in \(0, 1\] of the plain peak, or a size as '10GiB'"):
        plan_with(made("mlp")[2], budget)


def test_bad_arguments_are_said():
    model = mlp()
    for budget in (0, True, "ten"):
        with pytest.raises(ValueError, match="is no size"):
            hb.plan(model, X, budget)
    with pytest.raises(ValueError, match="prefer='best' is none of exact, fast"):
        hb.plan(model, X, 0.5, prefer="best")
    with pytest.raises(ValueError, match=r"give a budget, as '10GiB' or 0.4 of the plain peak"):
        hb.plan(model, X)
    with pytest.raises(TypeError, match=r"plan\(\): batch is int"):
        hb.plan(model, 3, 0.5)
    with pytest.raises(ValueError, match="batch_size=0 must be a positive number of samples, or 'max'"):
        hb.plan(model, X, 0.9, batch_size=0)
    with pytest.raises(ValueError, match="batch_size='max' needs a budget as '10GiB'"):
        hb.plan(model, X, 0.9, batch_size="max")
    for size in (4, "max"):
        with pytest.raises(ValueError, match="a batch given as a function has no size that can be changed; give a tensor"):
            hb.plan(model, lambda: model(X).sum(), "1GiB", batch_size=size)


# The budget is met


def gradients(model, batch):
    model.zero_grad()
    zoo.loss(model, batch).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "budget"),
    [("vit", 0.9), ("vit", 0.6), ("vit", 0.45), ("gpt2", 0.6), ("gpt2", 0.4), ("convnext", 0.9), ("convnext", 0.6), ("convnext", 0.4)],
)
def test_a_plan_fits_and_its_peak_is_the_real_one(name, budget):
    model, batch, planner = made(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    wanted = gradients(model, batch)
    plan = plan_with(planner, budget)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all("_halfback" not in vars(m) and "forward" not in vars(m) for m in model.modules())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(p.grad is None for p in model.parameters()) and model.training
    hb.apply_(model, plan)
    try:
        real = hb.profile(model, batch, real=True, optimizer="none")
        assert plan.peak <= plan.budget == int(budget * planner.plain.peak)
        if not any(isinstance(m, hb.DropIT) for m in plan.methods):  # on a CPU the reference of its kernels runs, which has more alive
            assert real.peak <= plan.budget
        if plan.exact:
            assert real.peak == plan.peak
            for a, b in zip(gradients(model, batch), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    finally:
        hb.remove_(model)
    exact = [planner.point(c) for kinds in planner.tiers("exact")[:2] for c in planner.choices(kinds)]
    assert plan.exact == any(p is not None and p.peak <= plan.budget for p in exact), "approximate only where exact means do not fit"


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_gradients_of_an_exact_plan_are_exact_in_double_precision(name):
    model, batch, planner = made(name)
    plan = plan_with(planner, 0.6)
    assert plan.exact and any(isinstance(m, hb.Recompute) for m in plan.methods)
    model = copy.deepcopy(model).double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    wanted = gradients(model, batch)
    hb.apply_(model, plan)
    for a, b in zip(gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "gpt2", "convnext"])
def test_less_budget_is_never_more_memory_nor_less_time(name):
    _, _, planner = made(name)
    smallest = min(p.peak for c in planner.choices(planner.tiers("exact")[0]) if (p := planner.point(c)) is not None)
    budgets = torch.linspace(planner.plain.peak, smallest, 20).long().tolist()
    points = [planner.find(max(b, smallest), "exact") for b in budgets]
    assert all(p.exact and p.peak <= max(b, smallest) for p, b in zip(points, budgets, strict=True))
    for roomier, tighter in itertools.pairwise(points):
        assert tighter.peak <= roomier.peak
        assert tighter.seconds >= roomier.seconds
    fast = [planner.find(max(b, smallest), "fast") for b in budgets[::4]]
    assert all(f.seconds <= p.seconds for f, p in zip(fast, points[::4], strict=True))


@pytest.mark.parametrize(("name", "most"), [("vit", 0.001), ("gpt2", 0.001), ("convnext", 0.1)])
def test_the_additive_estimate_is_near_the_count_of_the_whole(name, most):
    _, _, planner = made(name)
    found = [(c, p) for c in planner.choices(planner.tiers("exact")[0]) if (p := planner.point(c)) is not None]
    assert len(found) >= 3
    assert max(abs(c.peak / p.peak - 1) for c, p in found) < most
    assert max(abs(c.seconds / p.seconds - 1) for c, p in found) < 0.05


def test_plain_training_that_fits_is_left_alone():
    model, _, planner = made("vit")
    plan = plan_with(planner, 1.0)
    assert plan.methods == () and plan.peak == plan.plain_peak == planner.plain.peak and plan.time_ratio == 1 and plan.exact
    report = hb.apply_(model, plan)
    assert report.plan is plan and "plain training fits" in str(report) and "plain training fits" in str(plan)
    hb.remove_(model)


# What cannot be


@pytest.mark.parametrize(("name", "device"), [("mlp", "cpu"), ("mlp", "cuda"), ("vit", "cpu")])
def test_the_smallest_that_an_error_names_works(name, device):
    model, batch, planner = made(name)
    if device == "cuda":
        planner = Planner(model, batch, "cuda", "none")
    with pytest.raises(Impossible, match=r"is too little for .* The smallest that works") as e:
        plan_with(planner, 0.01)
    smallest, needs = e.value.smallest, e.value.needs
    assert needs >= smallest.peak
    assert plan_with(planner, total_of(planner.plain, needs)).peak <= needs
    whole = planner.plain.peak + planner.workspace
    assert needs <= whole
    assert plan_with(planner, (needs + 1) / whole).peak == smallest.peak
    with pytest.raises(Impossible):
        plan_with(planner, (needs - 512) / whole)


@pytest.mark.parametrize("rows", [100, 333])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_figures_in_the_error_work_as_they_are_written(rows, device):  # once: on cuda a fraction above 1 is offered
    planner = Planner(mlp(), torch.randn(rows, 16), device, "none")
    with pytest.raises(Impossible) as e:
        plan_with(planner, 0.01)
    size = re.search(r"a budget of '([^']+)'", str(e.value))[1]
    assert plan_with(planner, size).total <= parse_size(size)
    share = re.search(r"or ([\d.]+) of the plain peak", str(e.value))[1]
    assert plan_with(planner, float(share)).peak <= e.value.needs


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_share_is_of_all_that_the_plan_is_held_against(device):  # once: without what libraries take, which the plan has
    planner = Planner(*made("vit")[:2], device, "none")
    plain, libraries = planner.plain.peak, planner.needs(0)
    assert (libraries > plain) == (device == "cuda")
    for share in (0.5, 0.9, 0.99):
        assert planner.room(share) == int(share * (plain + libraries)) < planner.room(1.0)


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 10**12), st.sampled_from(["cpu", "cuda"]))
def test_allowed_is_the_inverse_of_total_of(peak, fixed, device):
    plain = copy.copy(made("mlp")[2].plain)
    plain.device, plain.parameters, plain.optimizer_peak = device, fixed, 0
    assert peak <= allowed(plain, total_of(plain, peak)) <= peak + 2


def test_the_optimizers_step_has_to_fit_as_well():  # once: its moment is not compared with the budget
    model, x = mlp(512), torch.randn(4, 16)
    planner = Planner(model, x)
    plain = planner.plain
    assert plain.optimizer_peak > plain.peak
    budget = plain.fixed + plain.peak + 64
    try:
        assert plan_with(planner, budget).total <= budget
    except Impossible as e:
        assert total_of(plain, 0) > budget and "optimizer" in str(e)


def test_a_model_that_has_methods_is_said():
    model = mlp()
    hb.apply_(model, hb.Lean())
    with pytest.raises(ValueError, match=r"the model has methods already. Call hb.remove_\(model\) first"):
        hb.plan(model, X, 0.9)
    assert "_halfback" in vars(model)


def test_a_plan_for_nothing_is_said_on_a_model_that_has_methods():  # once: it reports plain training, and the methods stay
    model = mlp()
    plan = hb.plan(model, X, 1.0)
    hb.apply_(model, hb.Lean())
    with pytest.raises(ValueError, match="already has lean"):
        hb.apply_(model, plan)


# The number of samples


@pytest.mark.parametrize(("device", "budget"), [(None, 120 * 2**10), ("cuda", 840 * 2**20)])
def test_the_most_samples_fit_and_one_more_does_not(device, budget):
    find = functools.partial(hb.plan, mlp(), device=device, optimizer="none")
    plan = find(X[:8], budget, batch_size="max")
    assert plan.batch_size > 8 and plan.total <= budget and plan.exact
    try:
        more = find(X[:8], budget, batch_size=plan.batch_size + 1)
        assert not more.exact
    except Impossible:
        pass
    given = find(torch.randn(plan.batch_size, 16), budget)
    assert (given.peak, given.fixed) == (plan.peak, plan.fixed)


@pytest.mark.parametrize("size", [2, 64])
def test_a_batch_of_another_size(size):
    wanted = hb.plan(mlp(), torch.randn(size, 16), 1.0)
    assert hb.plan(mlp(), X[:8], 1.0, batch_size=size) == wanted


@pytest.mark.parametrize("size", [2, 64])
def test_a_batch_on_meta_of_another_size(size):  # once: it is expanded, so its storage is one number
    model = mlp().to("meta")
    wanted = hb.plan(model, torch.empty(size, 16, device="meta"), 1.0)
    assert hb.plan(model, torch.empty(8, 16, device="meta"), 1.0, batch_size=size) == wanted


def test_the_most_samples_are_found_without_their_memory():  # once: batches are made real, and all of them stay
    script = """
import zoo, torch, halfback as hb
model = torch.nn.Linear(256, 1)
before = zoo.most_memory()
print(hb.plan(model, torch.randn(4, 256), "64MiB", batch_size="max").batch_size)
print(zoo.most_memory() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size > 50_000 and grown < 300 * 2**10  # KiB


# apply_ and its forms


def test_budget_and_batch_in_one_and_back():
    model, batch = Trunk([Block(), Block()], range(2)).train(), torch.randn(8, 32, 16)
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    report = hb.apply_(model, budget=0.7, batch=batch, optimizer="none")
    assert report.plan.peak <= report.plan.budget and report.methods == report.plan.methods != ()
    assert hb.profile(model, batch, optimizer="none").peak == report.plan.peak
    hb.remove_(model)
    assert before == {n: set(vars(m)) for n, m in model.named_modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_apply_does_not_take_is_said_and_nothing_changes():
    model, plan = mlp(), hb.plan(mlp(), X, 0.95)
    cases = [
        ((), {"budget": 0.9}, "a budget needs a batch to plan for"),
        ((hb.Lean(),), {"budget": 0.9, "batch": X}, "lean and a budget: give methods, or a plan, or a budget and a batch"),
        ((plan, hb.Lean()), {}, "a plan stands for all methods. Give it alone"),
        ((plan, plan), {}, "a plan stands for all methods. Give it alone"),
        ((), {}, "no method given"),
    ]
    for methods, how, message in cases:
        with pytest.raises(ValueError, match=message):
            hb.apply_(model, *methods, **how)
    with pytest.raises(ValueError, match="the plan is for Sequential, the model is a Linear"):
        hb.apply_(nn.Linear(2, 2), plan)
    assert "_halfback" not in vars(model) and "forward" not in vars(model)


def test_a_plan_of_another_model_of_the_class_is_said():
    model, _, planner = made("vit")
    plan = dataclasses.replace(plan_with(planner, 0.6), methods=(hb.Recompute(layers=("vit.layers.0", "vit.layers.7")),))
    with pytest.raises(ValueError, match=r"layers='vit.layers.7' matches none of the 2 blocks"):
        hb.apply_(model, plan)
    assert "_halfback" not in vars(model)


def test_a_plan_as_an_argument_too_many_is_named_in_a_line():  # once: the whole text of the plan is in the message
    plan = hb.plan(mlp(), X, 0.95)
    with pytest.raises(ValueError, match="a budget") as e:
        hb.apply_(mlp(), plan, budget=0.5, batch=X)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_json_and_back(budget):
    planner = made("vit")[2]
    plan = plan_with(planner, budget, curve=True)
    again = hb.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and str(again) == str(plan)
    peaks = [point["peak"] for point in plan.curve]
    assert len(plan.curve) >= 3 and peaks[0] == planner.plain.peak and plan.curve[0]["time"] == 1 and min(peaks) < 0.6 * peaks[0]
    for data in ({"a": 1}, [1], {**plan.to_json(), "methods": 3}, {**plan.to_json(), "methods": [{"method": "zzz"}]}):
        with pytest.raises(ValueError, match=r"from_json\(\)"):
            hb.Plan.from_json(data)


def test_a_plan_reads_well():
    text = str(plan_with(made("vit")[2], 0.6))
    assert text.startswith("ViTForImageClassification, batch 2: ") and "gradients are exact" in text
    assert "of plain training's" in text and "of a plain step" in text and "Recompute: vit.layers." in text
    assert max(map(len, text.splitlines())) < 160


def test_scipy_is_asked_for_by_name():
    script = "import sys; sys.modules['scipy'] = None; import torch, halfback as hb; hb.plan(torch.nn.Linear(2, 2), torch.zeros(1, 2), 0.9)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert 'ImportError: plan() solves a mixed integer program with scipy: pip install "halfback[plan]".' in done.stderr


# Other structures


def test_models_without_blocks_are_planned():
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    cnn, x = nn.Sequential(*parts, nn.Linear(8 * 28 * 28, 10)).train(), torch.randn(4, 3, 32, 32)
    plan = hb.plan(cnn, x, 0.9, optimizer="none")
    assert plan.methods == (hb.Lean(),)
    hb.apply_(cnn, plan)
    assert hb.profile(cnn, x, real=True, optimizer="none").peak == plan.peak <= plan.budget
    hb.remove_(cnn)
    with pytest.raises(Impossible):
        hb.plan(cnn, x, 0.05, optimizer="none")


class Block(nn.Module):
    def __init__(self, d=16, stubborn=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 8 * d), nn.Linear(8 * d, d)
        self.stubborn = stubborn

    def forward(self, x):
        if self.stubborn and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            raise RuntimeError("not twice")
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Trunk(nn.Module):
    def __init__(self, blocks, order):
        super().__init__()
        self.blocks, self.order, self.head = nn.ModuleList(blocks), order, nn.Linear(16, 4)

    def forward(self, x):
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


def shared(twice):
    one = Block()
    return Trunk([one, one, Block()], range(3)) if twice == "listed twice" else Trunk([Block(), Block()], [0, 1, 0])


@pytest.mark.parametrize("twice", ["listed twice", "called twice"])
def test_blocks_that_run_twice(twice):
    torch.manual_seed(0)
    model, x = shared(twice).double().train(), torch.randn(8, 32, 16, dtype=torch.float64)
    wanted = gradients(model, (x,))
    planner = Planner(model, x, optimizer="none")
    for budget in (0.8, 0.6, 0.45):
        plan = plan_with(planner, budget)
        hb.apply_(model, plan)
        assert plan.exact and hb.profile(model, x, real=True, optimizer="none").peak == plan.peak <= plan.budget
        for a, b in zip(gradients(model, (x,)), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        hb.remove_(model)


def test_two_stacks():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)).train()
    batch = {"input_ids": zoo.tokens(), "labels": zoo.tokens()}
    plan = hb.plan(model, batch, 0.75, optimizer="none")
    hb.apply_(model, plan)
    assert plan.exact and hb.profile(model, batch, real=True, optimizer="none").peak == plan.peak <= plan.budget


def test_blocks_that_cannot_be_recomputed_are_left():  # BUG, perhaps: what a block raises when it runs again comes out of plan()
    model, x = Trunk([Block(stubborn=True), Block(stubborn=True)], range(2)).train(), torch.randn(8, 32, 16)
    plan = hb.plan(model, x, 0.9, optimizer="none")
    assert plan.methods == (hb.Lean(),)
