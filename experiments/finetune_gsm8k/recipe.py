"""Fine-tuning a pretrained decoder: SmolLM2-135M on the text of GSM8K, all of it and with LoRA."""

from typing import Any

from halfback.train import Arm, Recipe, Settings

MODELS = "experiments/finetune/models.py"
METHODS = {
    "checkpointing": "recompute",
    "Lean": "lean",
    "Lean, loss in parts": "lean+chunkedloss",
    "SBP": "sbp(keep=0.5)",
    "SBP, Lean": "sbp(keep=0.5)+lean",
    "DropIT, keep 0.1": "dropit(keep=0.1, exact_first=False)",
    "DropIT, 4 bits": "dropit(bits=4, activation_bits=4)",
}
THIRD = "SBP on the last third, Lean, loss in parts, Recompute"
FEW = "dropit(activation_bits=4, lean=False)"
COMPILED = {
    "DropIT, 8 bits, loss in parts": "dropit(activation_bits=8)+chunkedloss",
    "DropIT, 4 bits, loss in parts": "dropit(activation_bits=4)+chunkedloss",
    "Lean, loss in parts, Recompute": "lean+chunkedloss+recompute(layers='first 2/5')",
    "SBP on the last half, Lean, loss in parts": "sbp(keep=0.5, layers='last 1/2')+lean+chunkedloss",
    THIRD: "sbp(keep=0.5, layers='last 1/3')+lean+chunkedloss+recompute(layers='first 1/10')",
    "SBP on the last third, DropIT, 4 bits, loss in parts": f"sbp(keep=0.5, layers='last 1/3')+{FEW}+chunkedloss",
    "SBP on the last quarter, DropIT, 4 bits, loss in parts": f"sbp(keep=0.5, layers='last 1/4')+{FEW}+chunkedloss",
    "SBP on the last fifth, DropIT, 4 bits, loss in parts": f"sbp(keep=0.5, layers='last 1/5')+{FEW}+chunkedloss",
}
LESS = {  # less time for more memory, with the same gradients
    "Lean, loss in parts, a fifth recomputed": ("lean+chunkedloss+recompute(layers='first 1/5')", "Lean, loss in parts, Recompute"),
    "SBP on the last third, Lean, loss in parts, one block recomputed": (
        "sbp(keep=0.5, layers='last 1/3')+lean+chunkedloss+recompute(layers='first 1')",
        THIRD,
    ),
    "SBP on the last third, DropIT, 4 bits, loss in longer parts": (
        f"sbp(keep=0.5, layers='last 1/3')+{FEW}+chunkedloss(rows=5376)",
        "SBP on the last third, DropIT, 4 bits, loss in parts",
    ),
    "SBP on the last quarter, DropIT, 4 bits, loss in longer parts": (
        f"sbp(keep=0.5, layers='last 1/4')+{FEW}+chunkedloss(rows=2688)",
        "SBP on the last quarter, DropIT, 4 bits, loss in parts",
    ),
}


def arms() -> tuple[Arm, ...]:
    found = [Arm("exact", "exact", group="all weights"), Arm("accumulation, 4 parts", "exact", {"accumulate": 4}, group="all weights")]
    found += [Arm(name, method, group="all weights") for name, method in METHODS.items()]
    compiled: dict[str, Any] = {"compile": True}
    exact = "exact, compiled"
    found.append(Arm(exact, "exact", compiled, group="compiled", against=exact))
    found += [Arm(f"{name}, compiled", method, compiled, group="compiled", against=exact) for name, method in COMPILED.items()]
    found += [
        Arm(f"{name}, compiled", method, compiled, group="compiled", against=exact, like=f"{like}, compiled")
        for name, (method, like) in LESS.items()
    ]
    lora = {"model": f"{MODELS}:smollm2_lora", "lr": 1e-3}
    found.append(Arm("LoRA", "exact", lora, group="LoRA"))
    found += [
        Arm(f"LoRA, {name}", METHODS[name], lora, group="LoRA", against="LoRA") for name in ("Lean", "SBP", "SBP, Lean", "DropIT, keep 0.1")
    ]
    return tuple(found)


RECIPE = Recipe(
    title="Fine-tuning SmolLM2-135M on GSM8K",
    about="A pretrained decoder of thirty layers goes on with questions and answers of school mathematics, in windows of 512 tokens. "
    "Judged by the loss of the test part's next tokens. Five paired seeds.",
    paper="Neither paper has a language model.",
    base=Settings(
        model=f"{MODELS}:smollm2",
        data="tokens",
        epochs=1,
        batch=16,
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
    differs=(
        "The weights come from a 4-bit file, made whole again.",
        "SBP's runs kept half of the tokens by a dithered grid, but for the compiled ones: now every second one is kept, and attention's "
        "backward is shorter.",
    ),
    order=21,
    minutes=9,
    measure="test_loss",
)
