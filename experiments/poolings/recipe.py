"""How the output is read, and by which optimizer: with the mean of the tokens SBP's layers get a smaller gradient, which AdamW hides."""

from halfback.train import Arm, Recipe, Settings

OPTIMIZERS = {
    "AdamW": {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 0.05},
    "SGD": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4},
}
POOLS = {"class token": "small-vit", "average": "small-vit-mean"}
METHODS = {"SBP": "sbp(keep=0.5)", "SBP, all layers": "sbp(keep=0.5, layers='all')", "DropIT": "dropit(keep=0.1, exact_first=False)"}


def arms() -> tuple[Arm, ...]:
    found = []
    for optimizer, changes in OPTIMIZERS.items():
        for pool, model in POOLS.items():
            group = f"{pool}, {optimizer}"
            own = {**changes, "model": model}
            found.append(Arm(f"exact, {group}", "exact", own, group=group))
            found += [Arm(f"{n}, {group}", m, own, group=group, against=f"exact, {group}") for n, m in METHODS.items()]
    return tuple(found)


RECIPE = Recipe(
    title="Poolings and optimizers, on digits",
    about="The small ViT of `halfback compare` on scikit-learn's digits: a toy, on which every combination can be run on a CPU.",
    paper="Not in the papers, which train with AdamW and a class token (SBP), or with SGD and average pooling (DropIT's ResNet).",
    base=Settings(model="small-vit", data="digits", epochs=16, batch=64, warmup=1.0, best=False),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact, class token, AdamW",
    differs=("Rates were chosen on samples held out of the training set, with exact gradients.",),
    order=0,
    minutes=20,
)
