"""Low memory, on a toy: what SBP on all layers loses, and where; few bits, and a forward that is cut, beside it."""

from halfback.train import Arm, Recipe, Settings

METHODS = {
    "where it is cut": {
        "SBP, all layers": "sbp(keep=0.5, layers='all')",
        "SBP": "sbp(keep=0.5)",
        "SBP, last half": "sbp(keep=0.5, layers='last 1/2')",
        "SBP, first half": "sbp(keep=0.5, layers='first 1/2')",
        "SBP, first block": "sbp(keep=0.5, layers='first 1')",
        "SBP, last block": "sbp(keep=0.5, layers='last 1')",
    },
    "how it is cut": {
        "SBP, all layers, scaled": "sbp(keep=0.5, layers='all', scale=True)",
        "SBP, all layers, qkv": "sbp(keep=0.5, layers='all', attention='qkv')",
        "SBP, all layers, keep 0.75": "sbp(keep=0.75, layers='all')",
        "SBP, all layers, increasing": "sbp(keep=0.5, layers='all', ramp='increasing')",
        "SBP, all layers, decreasing": "sbp(keep=0.5, layers='all', ramp='decreasing')",
    },
    "what else": {
        "SkipTokens, all layers": "skiptokens(keep=0.5, layers='all')",
        "Lean": "lean",
        "DropIT, 4 bits": "dropit(bits=4, activation_bits=4)",
        "DropIT, largest tenth": "dropit(keep=0.1, activation_bits=4)",
        "SBP, 4 bits": "sbp(keep=0.5)+dropit(bits=4, activation_bits=4)",
        "SBP, all layers, 4 bits": "sbp(keep=0.5, layers='all')+dropit(bits=4, activation_bits=4)",
    },
}


def arms() -> tuple[Arm, ...]:
    return (Arm("exact", "exact"), *(Arm(n, m, group=group) for group, made in METHODS.items() for n, m in made.items()))


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}
    exact = found["exact"]["mean"]["train_loss"]

    def told(name: str) -> str:
        arm = found[name]
        clear = "" if arm["against"]["train_loss"]["clear"] else ", not clear of exact"
        return f"{name} {arm['mean']['train_loss'] / exact:.2f} (held {arm['against']['ratio']['held']:.2f}{clear})"

    clear = [k for k, a in found.items() if k != "exact" and a["against"]["top1"]["clear"]]
    groups = "; ".join(f"{group}: {', '.join(map(told, made))}" for group, made in METHODS.items())
    return (
        f"Training loss at the end, in exact training's, {groups}. Accuracy: "
        f"{', '.join(clear) or 'none of the differences'} {'are' if len(clear) > 1 else 'is'} clear of zero."
    )


RECIPE = Recipe(
    title="Low memory, on digits",
    about="The small ViT of `halfback compare` on scikit-learn's digits, with the mean of its tokens read out, where SBP costs most.",
    paper="SBP: on all layers the accuracy falls by more than on two thirds of them (figure 1).",
    base=Settings(
        model="small-vit-mean", data="digits", epochs=16, batch=64, optimizer="adamw", lr=2e-3, weight_decay=0.05, warmup=1.0, best=False
    ),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    beside=("poolings",),
    differs=("A toy: 360 test images cannot tell less than about a point. The training loss tells more.",),
    order=29,
    minutes=25,
    on="two CPU cores",
    verdict=verdict,
)
