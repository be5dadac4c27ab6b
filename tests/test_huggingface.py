"""Methods in transformers' Trainer: applied once, seen in its logs, saved and resumed with its checkpoints."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import halfback as hb
from halfback.integrations.huggingface import HalfbackCallback
from halfback.monitor import Monitor
from halfback.untouched import applied_to

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SBP = "sbp(keep=0.5, sampler='random')"


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 40, "n_positions": 32}
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=None, eos_token_id=None, use_cache=False, loss_type="ForCausalLM"))


def rows(n=64, seq=16):
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 40, (n,), generator=generator)
    rows = (starts[:, None] + torch.arange(seq)) % 40  # the next word is the one after it
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(tmp_path, model, *callbacks, steps=8, data=None, **more):
    options = {"save_strategy": "no", "logging_steps": 2, "learning_rate": 3e-3, "seed": 3, "lr_scheduler_type": "constant", **more}
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=8,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    return Trainer(model, args, train_dataset=rows() if data is None else data, callbacks=list(callbacks))


class Reporter(TrainerCallback):
    """As one that comes with the Trainer, which is told before the callbacks that it is given."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def trained(own):
    own.train()
    return weights(own.model)


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_methods_are_applied_and_figures_reach_logs_and_reporters(tmp_path):
    model, reporter, callback = gpt2(), Reporter(), HalfbackCallback(f"{SBP}+lean", monitor=4)
    own = trainer(tmp_path, model, reporter, steps=20)
    callback.attach(own)
    plain = hb.profile(gpt2(), _batch()).held
    own.train()
    rows = [r for r in own.state.log_history if "loss" in r]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 < r["halfback_held"] < 0.8 * plain for r in rows)
    assert rows[0]["halfback_held"] == hb.profile(own.model, _batch()).held + 8  # and the number of words, that the Trainer gives
    assert all(s["halfback_held"] == rows[0]["halfback_held"] for s in reporter.seen if "loss" in s)
    late = [r for r in rows if r["step"] >= 4]
    assert all(0.3 < r["halfback_cosine"] <= 1.0001 and r["halfback_scale"] > 0 for r in late)
    assert len(applied_to(model)) == 1


def _batch():
    return {k: torch.stack([row[k] for row in rows()[:8]]) for k in ("input_ids", "labels")}


def test_given_to_the_trainer_it_reaches_the_log_history(tmp_path):
    own = trainer(tmp_path, gpt2(), HalfbackCallback(hb.Lean()), steps=2)
    own.train()
    assert [r["halfback_held"] for r in own.state.log_history if "loss" in r]


def test_lean_is_the_plain_training(tmp_path):
    plain = trained(trainer(tmp_path / "a", gpt2(0.1)))
    assert equal(plain, trained(trainer(tmp_path / "b", gpt2(0.1), HalfbackCallback("lean"))))
    assert not equal(plain, trained(trainer(tmp_path / "c", gpt2(0.1), HalfbackCallback(SBP))))


def test_the_monitor_leaves_the_training_as_it_is(tmp_path):
    one = trained(trainer(tmp_path / "a", gpt2(0.1), HalfbackCallback(SBP)))
    assert equal(one, trained(trainer(tmp_path / "b", gpt2(0.1), HalfbackCallback(SBP, monitor=2))))


def test_each_look_is_at_the_batch_of_its_step(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Monitor, "look", lambda self, batch: (seen.append(batch["input_ids"]), self.model(**batch)))
    own = trainer(tmp_path, gpt2(), callback := HalfbackCallback(SBP, monitor=1), steps=4)
    own.train()
    assert [len(batch) for batch in seen] == [8] * 4 and len({str(batch) for batch in seen}) == 4
    assert all(type(batch) is torch.Tensor for batch in seen) and callback.held


SCHEDULED = "sbp(keep=0.5, sampler='random', schedule=((0.25, 1.0), (0.75, 0.25)))"


@pytest.mark.parametrize("method", [SCHEDULED, "dropit(keep=0.3, select='random', exact_first=False)"])
def test_resumed_training_is_the_uninterrupted_one(tmp_path, method):
    def callback():
        return HalfbackCallback(method, exact_tail=0.125)

    whole = trainer(tmp_path / "whole", gpt2(0.1), callback())
    whole.train()
    cut = trainer(tmp_path / "cut", gpt2(0.1), callback(), save_strategy="steps", save_steps=4)
    cut.train()
    assert equal(weights(whole.model), weights(cut.model))
    again = trainer(tmp_path / "cut", gpt2(0.1), callback())
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert equal(weights(whole.model), weights(again.model))
    saved = json.loads((tmp_path / "cut" / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]["HalfbackCallback"]
    assert saved["attributes"]["saved"]["applied"][0]["method"] in method
    other = trainer(tmp_path / "cut", gpt2(), HalfbackCallback("sbp(keep=0.25)"))
    with pytest.raises(ValueError, match="Give the same methods"):
        other.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))


def test_a_budget_is_planned_from_the_first_batch_and_kept(tmp_path):
    callback = HalfbackCallback(budget=0.6)
    own = trainer(tmp_path, gpt2(), callback, save_strategy="steps", save_steps=4)
    own.train()
    assert callback.report.methods and callback.held < 0.75 * hb.profile(gpt2(), _batch()).held
    second = HalfbackCallback(budget=0.6)
    again = trainer(tmp_path, gpt2(), second)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert second.report.methods == callback.report.methods
    assert equal(weights(own.model), weights(again.model))


@pytest.mark.parametrize("more", [{"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_with_what_a_trainer_can_do(tmp_path, more):
    own = trainer(tmp_path, gpt2(), HalfbackCallback(SBP), steps=16, **more)
    own.train()
    rows = [r["loss"] for r in own.state.log_history if "loss" in r]
    assert rows[-1] < rows[0]


def test_methods_that_are_there_already_stay(tmp_path):
    model = gpt2()
    hb.apply_(model, hb.SBP(keep=0.5))
    callback = HalfbackCallback()
    own = trainer(tmp_path, model, callback, steps=2)
    own.train()
    assert str(callback.report.methods[0]) == "sbp" and len(applied_to(model)) == 1


def test_methods_that_come_after_the_trainer_count_and_none_is_an_error(tmp_path):
    own = trainer(tmp_path, gpt2(), callback := HalfbackCallback(), steps=2)
    with pytest.raises(ValueError, match="no methods were given, and GPT2LMHeadModel has none"):
        own.train()
    hb.apply_(own.model, hb.Lean())
    own.train()
    assert str(callback.report.methods[0]) == "lean"


def test_one_callback_serves_several_trainers(tmp_path):
    for callback in (HalfbackCallback(budget=0.6), HalfbackCallback(SBP, monitor=1)):
        first, second = (trainer(tmp_path, gpt2(), callback, steps=2) for _ in range(2))
        for own in (first, second):
            own.train()
            assert callback.own.model is own.model and len(applied_to(own.model)) == 1
            assert callback.report is applied_to(own.model)[0].report


class Noisy(torch.utils.data.IterableDataset):
    """A stream with noise of all three kinds."""

    def __iter__(self):
        for row in rows():
            noise = random.randrange(40) + np.random.randint(40) + int(torch.randint(0, 40, ()))
            yield dict.fromkeys(("input_ids", "labels"), (row["input_ids"] + noise) % 40)


class Once(torch.utils.data.IterableDataset):
    """A stream that cannot be read again."""

    def __init__(self):
        self.rows = iter(rows())

    def __iter__(self):
        return self.rows


@pytest.mark.parametrize(("kind", "callback"), [(Noisy, {"budget": 0.9, "prefer": "exact"}), (Noisy, "lean"), (Once, "lean")])
def test_no_sample_and_no_noise_is_lost(tmp_path, kind, callback):
    given = HalfbackCallback(callback) if isinstance(callback, str) else HalfbackCallback(**callback)
    plain, own = (trained(trainer(tmp_path, gpt2(0.1), *more, data=kind())) for more in ((), (given,)))
    assert equal(plain, own) and given.held


def test_schedules_are_followed_and_no_more_is_held_in_an_exact_end(tmp_path):
    model, seen = gpt2(), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            (methods,) = (s for a in applied_to(model) for s in a.states)
            seen.append((methods.ratios[0] if methods.on else None, hb.profile(model, _batch(), optimizer="none").held))

    trainer(tmp_path, model, HalfbackCallback(SCHEDULED, exact_tail=0.25), Look()).train()
    kept, held = zip(*seen, strict=True)
    assert kept == (1.0, 1.0, 1.0, 0.8125, 0.625, 0.4375, None, None)
    assert held[2] > held[3] > held[4] > held[5] > held[6] == held[7]


def test_the_end_is_exact_also_after_a_training_that_broke_off(tmp_path):
    model, seen = gpt2(), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(next(s.on for a in applied_to(model) for s in a.states))
            if len(seen) == 7:
                raise RuntimeError("CUDA out of memory.")

    own = trainer(tmp_path, model, HalfbackCallback(SBP, exact_tail=0.25), Look(), auto_find_batch_size=True)
    own.train()
    assert seen == [True] * 6 + [False] + [True] * 6 + [False] * 2
    assert [s.on for a in applied_to(model) for s in a.states] == [True]


def test_mistakes():
    with pytest.raises(ValueError, match="chooses the methods itself"):
        HalfbackCallback("lean", budget="1GiB")
    with pytest.raises(ValueError, match="exact_tail"):
        HalfbackCallback("lean", exact_tail=2)
    with pytest.raises(ValueError, match="none of the methods"):
        HalfbackCallback("leaner")


def test_the_readmes_lines_run(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "HalfbackCallback" in b)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no")
    found = {"Trainer": Trainer, "model": gpt2(), "args": args, "data": rows()}
    exec(block, found)
    found["trainer"].train()
    assert applied_to(found["model"])
