"""Poolings and optimizers, as `poolings` has them on digits, with enough test images to tell half a point."""

from halfback.train import Arm, Recipe, Settings, in_words

MODEL = "experiments/fashion/vit.py"
OPTIMIZERS = {
    "AdamW": {"optimizer": "adamw", "lr": 5e-3, "weight_decay": 0.05},
    "SGD": {"optimizer": "sgd", "lr": 0.2, "weight_decay": 5e-4},
    "SGD, not clipped": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4, "clip": None},
}
POOLS = {"class token": f"{MODEL}:from_class_token", "average": f"{MODEL}:from_mean"}
SBP, SCALED = "sbp(keep=0.5)", "sbp(keep=0.5, scale=True)"
GROUPS = {
    ("average", "AdamW"): {"SBP": SBP},
    ("class token", "AdamW"): {"SBP": SBP},
    ("average", "SGD"): {"SBP": SBP, "SBP, scaled": SCALED},
    ("average", "SGD, not clipped"): {"SBP": SBP, "SBP, scaled": SCALED},
}


def arms() -> tuple[Arm, ...]:
    found = []
    for (pool, optimizer), methods in GROUPS.items():
        group = f"{pool}, {optimizer}"
        own = {**OPTIMIZERS[optimizer], "model": POOLS[pool]}
        found.append(Arm(f"exact, {group}", "exact", own, group=group))
        found += [Arm(f"{n}, {group}", m, own, group=group, against=f"exact, {group}") for n, m in methods.items()]
    return tuple(found)


def verdict(results: dict) -> str:
    return "; ".join(f"{a['name']}: {in_words(a)}" for a in results["arms"] if a["against"] and not a["name"].startswith("exact")) + "."


RECIPE = Recipe(
    title="Poolings and optimizers, on Fashion-MNIST",
    about="A ViT of 0.1 million weights on all 60,000 images, three times each; 10,000 to test on.",
    paper="Not in the papers, which train with AdamW and a class token (SBP), or with SGD and average pooling (DropIT's ResNet).",
    base=Settings(model=POOLS["average"], data="fashion-mnist", epochs=3, batch=128, warmup=0.3, clip=1.0, best=False),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact, average, AdamW",
    claims=("SBP, class token, AdamW", "SBP, average, AdamW", "SBP, average, SGD", "SBP, average, SGD, not clipped"),
    differs=(
        "Rates were chosen on images held out of the training set, with exact gradients; without clipping it is that of `poolings`.",
        "Gradients are clipped to a norm of 1, as in the main recipes, but where it says otherwise.",
    ),
    order=30,
    minutes=80,
    on="two CPU cores",
    verdict=verdict,
)
