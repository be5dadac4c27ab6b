"""LoRA with less memory: halfback before or after get_peft_model.

python examples/peft_lora.py            a small Llama with a frozen base learns to count; half a minute on a CPU
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import halfback as hb

METHODS = "sbp(keep=0.5)+lean"
LORA = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))


def batch(step: int) -> dict[str, torch.Tensor]:
    starts = torch.randint(0, 40, (8, 1), generator=torch.Generator().manual_seed(step))
    rows = (starts + torch.arange(32)) % 40  # the next word is the one after it
    return {"input_ids": rows, "labels": rows}


def adapted(order: str) -> tuple[PeftModel, hb.Report]:
    model = base()
    if order == "before":
        report = hb.apply_(model, *hb.parse(METHODS))
    model = get_peft_model(model, LORA)
    if order == "after":
        report = hb.apply_(model, *hb.parse(METHODS))
    return model.train(), report


def train(model: PeftModel, steps: int = 40) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 5e-3)
    losses = []
    for step in range(steps):
        loss = model(**batch(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    plain, full = get_peft_model(base(), LORA).train(), base().train()
    held = {"training all": hb.held(full, lambda: full(**batch(0)).loss), "LoRA": hb.held(plain, lambda: plain(**batch(0)).loss)}
    weights = []
    for order in ("before", "after"):
        model, report = adapted(order)
        held[f"LoRA, {METHODS} {order}"] = hb.held(model, lambda: model(**batch(0)).loss)  # noqa: B023
        losses = train(model)
        got = {name for name, p in model.named_parameters() if p.grad is not None}
        assert got == {name for name in model.state_dict() if "lora_" in name}, "every adapter gets its gradient, the base none"
        assert all("lora_" in row.layer for row in report.rows if row.function == "linear"), "frozen layers hold nothing"
        assert losses[-1] < losses[0]
        print(f"apply_ {order} get_peft_model: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
        weights.append({k: v for k, v in model.state_dict().items() if "lora_" in k})
        with tempfile.TemporaryDirectory() as folder:  # adapters are saved and loaded as ever, by models with methods or without
            model.save_pretrained(folder)
            loaded = PeftModel.from_pretrained(base(), folder)
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(**batch(0)).logits, model.eval()(**batch(0)).logits)
    print({name: f"{n / 2**20:.2f} MiB" for name, n in held.items()})
    assert all(n < 0.8 * held["LoRA"] for name, n in held.items() if "before" in name or "after" in name)
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True)), "the order does not matter"
