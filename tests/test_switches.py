"""What can be switched while a model trains: exact gradients for a while, and keep over the training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle

import pytest
import torch
import zoo

import halfback as hb
from halfback import rewrite
from halfback.methods import from_json
from halfback.untouched import applied_to

NAN = ((0, 1.0), (float("nan"), 0.5), (1, 0.25))  # which stands between the others in any order
DOWN = ((0, 1.0), (0.5, 0.25))
METHODS = (
    "sbp(keep=0.5)",
    "sbp(keep=0.5, attention='qkv', layers='all')+lean",
    "dropit(keep=0.1, activation_bits=4)",
    "skiptokens(keep=0.5)",
)


def gradients(model, batch):
    model.zero_grad()
    zoo.loss(model, batch).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters()}


def held(model, batch):
    return hb.held(model, lambda: zoo.loss(model, batch))


def same(one, two, atol=1e-6):
    return all(torch.allclose(one[k], two[k], atol=atol) for k in one)


# Exact for a while


@pytest.mark.parametrize("text", METHODS)
def test_recompute_takes_the_memory_over_where_gradients_turn_exact(text):
    model, batch = zoo.make("vit")
    plain, most = gradients(model, batch), held(model, batch)
    hb.apply_(model, *hb.parse(text))
    before = held(model, batch)
    assert before < most and not same(plain, gradients(model, batch))
    with hb.exact(model, recompute=True):
        assert held(model, batch) < before and same(plain, gradients(model, batch))
    assert held(model, batch) == before and not same(plain, gradients(model, batch))
    hb.remove_(model)
    assert not any("forward" in vars(m) for m in model.modules()) and held(model, batch) == most


@pytest.mark.parametrize("text", METHODS)
def test_a_copy_that_is_made_meanwhile_is_not_exact_for_ever(text):
    model, batch = zoo.make("vit")
    plain = gradients(model, batch)
    hb.apply_(model, *hb.parse(text))
    with hb.exact(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        assert same(plain, gradients(model, batch))
    own, *others = (gradients(m, batch) for m in (model, *copies))
    assert not same(plain, own) and all(same(own, other) for other in others)


def test_what_is_recomputed_already_is_not_twice():
    model, batch = zoo.make("vit")
    hb.apply_(model, hb.SBP(), hb.Recompute(layers="first 6"))
    runs = [0] * 12
    for i, layer in enumerate(model.vit.layers):
        next(layer.children()).register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
    with hb.exact(model, recompute=True):
        gradients(model, batch)
    assert runs == [2] * 12
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hb.remove_(model)
    hb.apply_(model, hb.SBP())
    with hb.exact(model, recompute=True):
        gradients(model, batch)
    assert runs == [4] * 12


def test_methods_may_be_removed_while_gradients_are_exact():
    model, batch = zoo.make("vit", layers=3)
    most = held(model, batch)
    hb.apply_(model, hb.SBP())
    with hb.exact(model, recompute=True):
        hb.remove_(model)
    assert not any("forward" in vars(m) for m in model.modules()) and held(model, batch) == most


def test_a_block_is_recomputed_no_more_where_others_wrapped_its_forward_meanwhile():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP())
    before = held(model, batch)
    with hb.exact(model, recompute=True):
        for layer in model.vit.layers:
            layer.forward = functools.partial(layer.forward)
    assert held(model, batch) == before
    with hb.exact(model, recompute=True):
        assert held(model, batch) < before


def test_whoever_asked_first_for_exact_gradients_need_not_be_done_last():
    model, batch = zoo.make("vit", layers=3)
    plain = gradients(model, batch)
    hb.apply_(model, hb.SBP(), hb.DropIT())
    first, second = hb.exact(model, recompute=True), hb.exact(model, recompute=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert same(plain, gradients(model, batch))
    second.__exit__(None, None, None)
    assert not same(plain, gradients(model, batch)) and all(s.on for a in applied_to(model) for s in a.states)


def test_a_model_without_blocks_is_exact_and_says_that_it_holds_what_it_holds(caplog, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    hb.apply_(model, hb.DropIT(0.1, exact_first=False))
    for rank, said in ((0, 1), (1, 0)):  # of several processes, one says it
        monkeypatch.setattr("halfback.notes.rank", lambda rank=rank: rank)
        caplog.clear()
        with hb.exact(model, recompute=True):
            assert not applied_to(model)[0].states[0].on
        assert len(caplog.records) == said
    assert applied_to(model)[0].states[0].on


# Keep over the training


def test_keep_over_the_training():
    method = hb.SBP(schedule=[[0, 1.0], [0.5, 0.25], [0.9, 0.25], [0.9, 1.0]])
    found = [method.keep_at(done) for done in (0, 0.25, 0.5, 0.7, 0.89, 0.9, 1)]
    assert found == pytest.approx([1, 0.625, 0.25, 0.25, 0.25, 1, 1])
    assert hb.SBP(schedule=((0.5, 0.5),)).keep_at(0) == hb.SBP(schedule=((0.5, 0.5),)).keep_at(1) == 0.5
    assert hb.SBP(0.3).keep_at(0.7) == 0.3


@pytest.mark.parametrize("method", [hb.SBP(schedule=DOWN), hb.DropIT(schedule=DOWN), hb.SkipTokens(schedule=DOWN)])
def test_a_schedule_has_the_text_and_the_json_of_its_method(method):
    assert hb.parse(str(method)) == (method,) == (from_json(json.loads(json.dumps(method.to_json()))),)
    assert hash(method) == hash(dataclasses.replace(method))


@pytest.mark.parametrize(
    "name", ["sbp(keep=0.1, layers='all', sampler='fixed'", "dropit(keep=0.1, activation_bits=4", "skiptokens(keep=0.1, sampler='fixed'"]
)
def test_a_model_that_follows_trains_as_one_with_that_keep(name):
    model, batch = zoo.make("vit", layers=3)
    report = hb.apply_(model, *hb.parse(f"{name}, schedule={DOWN})"))
    other, _ = zoo.make("vit", layers=3)
    for done, keep in ((1.0, 0.25), (0.25, 0.625), (0.0, 1.0)):
        hb.follow_(model, done)
        hb.apply_(other, *hb.parse(f"{name})".replace("keep=0.1", f"keep={keep}")))
        assert held(model, batch) == held(other, batch)
        assert same(gradients(model, batch), gradients(other, batch), atol=0)
        hb.remove_(other)
    assert len(report.positions) <= 1


def test_without_a_schedule_there_is_nothing_to_follow():
    model, _ = zoo.make("vit", layers=3)
    hb.follow_(model, 0.5)
    hb.apply_(model, hb.SBP(keep=0.5), hb.Lean())
    before = [s.ratios for a in applied_to(model) for s in a.states if hasattr(s, "ratios")]
    hb.follow_(model, 0.5)
    assert before == [s.ratios for a in applied_to(model) for s in a.states if hasattr(s, "ratios")] == [[0.5]]
    for wrong in (1.5, float("nan"), "half"):
        with pytest.raises(ValueError, match=rf"done={wrong!r} must be the share"):
            hb.follow_(model, wrong)


@pytest.mark.parametrize(
    "wrong", [(), 0.5, ((0, 0.5), (2, 1.0)), ((0.5, 0.5), (0, 1.0)), ((0, 0.0),), ((0, 0.5, 1),), "linear", NAN, (("0", 0.5),)]
)
def test_a_schedule_that_is_none_says_what_one_is(wrong):
    with pytest.raises(ValueError, match=r"SBP\(\): schedule=.* must be"):
        hb.SBP(schedule=wrong)
    with pytest.raises(ValueError, match="means nothing"):
        hb.DropIT(bits=4, schedule=DOWN)


def test_a_schedule_that_keeps_everything_at_first_is_not_told_to_go():
    model, batch = zoo.make("vit")
    report = hb.apply_(model, hb.SBP(0.5, schedule=((0, 1.0), (0.5, 0.25))))
    rewrite.follow_(model, 0.0)
    gradients(model, batch)
    assert "100.0% of them kept" in str(report) and "leave them out" not in str(report)
    rewrite.follow_(model, 0.9)
    gradients(model, batch)
    assert "25.0% of them kept" in str(report)
