"""How the output is read, and by which optimizer: with the mean of the tokens SBP's layers get a smaller gradient, which AdamW hides."""

from halfback.train import Arm, Recipe, Settings

OPTIMIZERS = {
    "AdamW": {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 0.05},
    "SGD": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4},
}
POOLS = {"class token": "small-vit", "average": "small-vit-mean"}
METHODS = {
    "SBP": "sbp(keep=0.5)",
    "SBP, scaled": "sbp(keep=0.5, scale=True)",
    "SBP, all layers": "sbp(keep=0.5, layers='all')",
    "SBP, all layers, scaled": "sbp(keep=0.5, layers='all', scale=True)",
    "DropIT": "dropit(keep=0.1, exact_first=False)",
}


def arms() -> tuple[Arm, ...]:
    found = []
    for optimizer, changes in OPTIMIZERS.items():
        for pool, model in POOLS.items():
            group = f"{pool}, {optimizer}"
            own = {**changes, "model": model}
            found.append(Arm(f"exact, {group}", "exact", own, group=group))
            found += [Arm(f"{n}, {group}", m, own, group=group, against=f"exact, {group}") for n, m in METHODS.items()]
    return tuple(found)


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}
    losses = {k: found[k]["mean"]["train_loss"] for k in found}

    def rise(method: str, group: str) -> str:
        return f"{losses[f'{method}, {group}'] / losses[f'exact, {group}']:.1f}"

    clear = [k for k, a in found.items() if a["against"] and not k.startswith("exact") and a["against"]["top1"]["clear"]]
    told = f"{', '.join(clear)} are" if clear else "none of the differences is"
    mean, adam, token = "average, SGD", "average, AdamW", "class token, AdamW"
    return (
        f"Accuracy: {told} clear of zero; five seeds of 360 test images cannot tell less than about a point. The training loss shows more: "
        f"with the mean of the tokens and SGD, SBP ends at {rise('SBP', mean)} times exact training's loss, and on all layers at "
        f"{rise('SBP, all layers', mean)} times; with AdamW at {rise('SBP', adam)} and {rise('SBP, all layers', adam)}; with a class token "
        f"and AdamW at {rise('SBP', token)} and {rise('SBP, all layers', token)}. That is the smaller gradient of SBP's layers, a smaller "
        f"learning rate in effect. Scaled (`scale=True`) it is at {rise('SBP, scaled', mean)} and {rise('SBP, all layers, scaled', mean)} "
        "times with the mean of the tokens and SGD. There, use it, raise the rate, or keep more."
    )


RECIPE = Recipe(
    title="Poolings and optimizers, on digits",
    about="The small ViT of `halfback compare` on scikit-learn's digits: a toy, on which every combination can be run on a CPU.",
    paper="Not in the papers, which train with AdamW and a class token (SBP), or with SGD and average pooling (DropIT's ResNet).",
    base=Settings(model="small-vit", data="digits", epochs=16, batch=64, warmup=1.0, best=False),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact, class token, AdamW",
    differs=("Rates were chosen on samples held out of the training set, with exact gradients.",),
    order=31,
    minutes=20,
    on="two CPU cores",
    verdict=verdict,
)
