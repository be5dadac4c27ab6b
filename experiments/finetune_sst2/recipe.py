"""Fine-tuning a pretrained encoder: MiniLM on SST-2, all of it and with LoRA."""

from halfback.train import Arm, Recipe, Settings

MODELS = "experiments/finetune/models.py"
METHODS = {
    "checkpointing": "recompute",
    "Lean": "lean",
    "SBP": "sbp(keep=0.5)",
    "SBP, Lean": "sbp(keep=0.5)+lean",
    "DropIT, keep 0.1": "dropit(keep=0.1, exact_first=False)",
    "DropIT, 4 bits": "dropit(bits=4, activation_bits=4)",
}


def arms() -> tuple[Arm, ...]:
    found = [Arm("exact", "exact", group="all weights"), Arm("accumulation, 4 parts", "exact", {"accumulate": 4}, group="all weights")]
    found += [Arm(name, method, group="all weights") for name, method in METHODS.items()]
    lora = {"model": f"{MODELS}:minilm_lora", "lr": 1e-3}
    found.append(Arm("LoRA", "exact", lora, group="LoRA"))
    found += [
        Arm(f"LoRA, {name}", METHODS[name], lora, group="LoRA", against="LoRA") for name in ("Lean", "SBP", "SBP, Lean", "DropIT, keep 0.1")
    ]
    return tuple(found)


RECIPE = Recipe(
    title="Fine-tuning MiniLM on SST-2",
    about="A pretrained BERT of six layers learns whether a phrase is positive; sentences of 64 tokens, filled up. Five paired seeds.",
    paper="Neither paper has a language model.",
    base=Settings(
        model=f"{MODELS}:minilm",
        data="tokens",
        epochs=1,
        batch=64,
        optimizer="adamw",
        lr=1e-4,
        weight_decay=0.01,
        warmup=0.1,
        clip=1.0,
        device="cuda",
        dtype="bf16",
        save_every=10**6,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact",
    claims=("SBP", "DropIT, keep 0.1", "DropIT, 4 bits"),
    order=20,
    minutes=4,
)
