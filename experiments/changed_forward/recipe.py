"""Methods that change the forward, SkipTokens and PatchDropout, beside SBP, which does not: what each costs in accuracy."""

from halfback.train import Arm, Recipe, Settings


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}

    def lost(name: str) -> str:
        difference = found[name]["against"]["top1"]
        return f"{difference['mean']:+.1f} points".replace("-", "\u2212") + ("" if difference["clear"] else ", not clear of zero")

    return (
        f"With half of the tokens, against exact training: SBP {lost('SBP')}; SkipTokens {lost('SkipTokens')}, on all blocks "
        f"{lost('SkipTokens, all layers')}; PatchDropout {lost('PatchDropout')}."
    )


RECIPE = Recipe(
    title="Methods that change the forward, on digits",
    about="The small ViT of `halfback compare` on scikit-learn's digits, half of the tokens. SBP computes the exact forward; SkipTokens "
    "leaves tokens out of the last two thirds of the blocks in training, or of all; PatchDropout out of all blocks, drawn for each sample.",
    paper="SBP compares itself to no method that changes the forward; its released code for `qkv` is what we call SkipTokens.",
    base=Settings(model="small-vit", data="digits", epochs=16, batch=64, lr=2e-3, weight_decay=0.05, warmup=1.0, best=False),
    arms=(
        Arm("exact"),
        Arm("SBP", "sbp(keep=0.5)"),
        Arm("SBP, all layers", "sbp(keep=0.5, layers='all')"),
        Arm("SkipTokens", "skiptokens(keep=0.5)"),
        Arm("SkipTokens, random", "skiptokens(keep=0.5, sampler='random')"),
        Arm("SkipTokens, all layers", "skiptokens(keep=0.5, layers='all')"),
        Arm("SkipTokens, all layers, random", "skiptokens(keep=0.5, layers='all', sampler='random')"),
        Arm("PatchDropout", "exact", {"model": "experiments/changed_forward/patchdropout.py:small_vit"}),
    ),
    seeds=(0, 1, 2, 3, 4),
    differs=("A toy: 360 test images cannot tell less than about a point.",),
    order=30,
    minutes=8,
    on="two CPU cores",
    verdict=verdict,
)
