"""Pretrained models to be fine-tuned, as `prepare.py` left them in $HALFBACK_WEIGHTS; and the same with LoRA, of which adapters learn."""

import os
from pathlib import Path

from torch import Tensor, nn

PAD = 0  # of MiniLM
RANK = 16


def weights(name: str) -> Path:
    found = Path(os.environ.get("HALFBACK_WEIGHTS", "out/finetune")) / name
    if not (found / "config.json").is_file():
        raise FileNotFoundError(f"{found} has no config.json. experiments/finetune/prepare.py makes it; HALFBACK_WEIGHTS tells where.")
    return found


class Sentences(nn.Module):
    """A classifier of sentences that are filled up with PAD."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits


def minilm() -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    return Sentences(AutoModelForSequenceClassification.from_pretrained(weights("minilm"), num_labels=2))


def smollm2() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weights("smollm2"), use_cache=False)


def minilm_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", modules_to_save=["classifier"])
    made = minilm()
    made.model = get_peft_model(made.model, config)
    return made


def smollm2_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(smollm2(), LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
