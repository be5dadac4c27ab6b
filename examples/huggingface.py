"""One line in a script that uses transformers' Trainer: methods by name, or a memory budget.

python examples/huggingface.py          a small GPT-2 learns to count; half a minute on a CPU
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import halfback as hb
from halfback.integrations.huggingface import HalfbackCallback


def data(n: int, seq: int = 16) -> list[dict[str, torch.Tensor]]:
    starts = torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(n))
    rows = (starts[:, None] + torch.arange(seq)) % 40  # the next word is the one after it
    return [{"input_ids": row, "labels": row} for row in rows]


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 40, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False))


def train(callback: HalfbackCallback) -> list[dict[str, float]]:
    args = TrainingArguments(
        "out/examples/huggingface",
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model(), args, train_dataset=data(512), callbacks=[callback])  # the one line is the callback
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    batch = {k: torch.stack([row[k] for row in data(16)]) for k in ("input_ids", "labels")}
    plain = hb.profile(model(), batch).held
    for callback in (HalfbackCallback("lean"), HalfbackCallback("sbp(keep=0.5)+lean"), HalfbackCallback(budget=0.5)):
        rows = train(callback)
        methods = " + ".join(map(str, callback.report.methods))
        print(f"{methods[:60]}: held {callback.held / plain:.2f} of plain, loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}")
        assert callback.held < 0.8 * plain, "less is held than in plain training"
        assert rows[-1]["loss"] < rows[0]["loss"], "the loss falls"
