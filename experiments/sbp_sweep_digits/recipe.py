"""SBP, figures 1 and 4 and section 4, on a toy: how much, where and how the backward pass is cut."""

from halfback.train import Arm, Recipe, Settings

SBP = "SBP"
CHANGES = {  # one thing of it
    "keep": {"keep 0.75": "sbp(keep=0.75)", "keep 0.25": "sbp(keep=0.25)", "keep 0.125": "sbp(keep=0.125)"},
    "layers": {"last third": "sbp(keep=0.5, layers='last 1/3')", "all layers": "sbp(keep=0.5, layers='all')"},
    "ramp": {f"{r} ramp": f"sbp(keep=0.5, ramp='{r}')" for r in ("increasing", "decreasing")},
    "sampler": {f"{s} sampler": f"sbp(keep=0.5, sampler='{s}')" for s in ("random", "fixed")},
    "masks": {"independent masks": "sbp(keep=0.5, masks='independent')"},
    "attention": {f"attention {a}": f"sbp(keep=0.5, attention='{a}')" for a in ("qkv", "heads")},
    "scale": {"scaled": "sbp(keep=0.5, scale=True)"},
}


def arms() -> tuple[Arm, ...]:
    found = [Arm("exact", "exact"), Arm(SBP, "sbp(keep=0.5)")]
    return (*found, *(Arm(name, method, group=group) for group, made in CHANGES.items() for name, method in made.items()))


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}
    exact = found["exact"]["mean"]["train_loss"]

    def told(name: str) -> str:
        clear = "" if found[name]["against"]["train_loss"]["clear"] else " (not clear of exact)"
        return f"{name} {found[name]['mean']['train_loss'] / exact:.2f}{clear}"

    clear = [k for k, a in found.items() if k != "exact" and a["against"]["top1"]["clear"]]
    ranked = sorted((k for k in found if k != "exact"), key=lambda k: found[k]["mean"]["train_loss"])
    return (
        f"Training loss at the end, in exact training's: {', '.join(told(k) for k in ranked)}. Accuracy: "
        f"{', '.join(clear) or 'none of the differences'} {'are' if len(clear) > 1 else 'is'} clear of zero."
    )


RECIPE = Recipe(
    title="SBP, figures 1 and 4 and section 4, on digits",
    about="The small ViT of `halfback compare` on scikit-learn's digits, read from its class token. `SBP` is the default; every other arm "
    "changes one thing of it.",
    paper="keep 0.5 on two thirds of the layers costs about half a point; below 0.25, or on all layers, it costs more. Uniform ratios, "
    "a grid and one mask for all layers are best.",
    base=Settings(model="small-vit", data="digits", epochs=16, batch=64, lr=2e-3, weight_decay=0.05, warmup=1.0, best=False),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    beside=("changed_forward", "poolings"),
    differs=("A toy: 360 test images cannot tell less than about a point. The training loss tells more.",),
    order=28,
    minutes=20,
    on="two CPU cores",
    verdict=verdict,
)
