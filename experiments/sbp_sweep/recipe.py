"""SBP, figures 1 and 4 and section 4: how much, where and how the backward pass is cut, on a ViT-S/4."""

from halfback.train import Arm, Recipe, Settings


def arms() -> tuple[Arm, ...]:
    found = [Arm("exact", "exact")]
    found += [Arm(f"keep {k}", f"sbp(keep={k})", group="keep") for k in (0.75, 0.5, 0.25, 0.125)]
    found += [Arm(f"layers {n}", f"sbp(keep=0.5, layers='{n}')", group="layers") for n in ("last 1/3", "all")]
    found += [Arm(f"{r} ramp", f"sbp(keep=0.5, ramp='{r}')", group="ramp") for r in ("increasing", "decreasing")]
    found += [Arm(f"{s} sampler", f"sbp(keep=0.5, sampler='{s}')", group="sampler") for s in ("random", "fixed")]
    found += [Arm(f"attention {a}", f"sbp(keep=0.5, attention='{a}')", group="attention") for a in ("qkv", "heads")]
    found += [Arm("SkipTokens", "skiptokens(keep=0.5)", group="attention")]
    found += [Arm("PatchDropout", "exact", {"model": "experiments/changed_forward/patchdropout.py:vit_s4"}, group="attention")]
    found += [Arm(f"{m} masks", f"sbp(keep=0.5, masks='{m}')", group="masks") for m in ("independent",)]
    found += [Arm("keep 0.5, scaled", "sbp(keep=0.5, scale=True)", group="scale")]
    return tuple(found)


RECIPE = Recipe(
    title="SBP, figures 1 and 4 and section 4: how the backward pass is cut",
    about="ViT-S/4 on CIFAR-100, a short schedule. `keep 0.5` is the default; every other arm changes one thing of it.",
    paper="keep 0.5 on two thirds of the layers costs about half a point; below 0.25, or on all layers, it costs more. Uniform ratios, "
    "a grid and one mask for all layers are best.",
    base=Settings(
        model="vit-s4",
        data="cifar100",
        epochs=16,
        batch=256,
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.5,
        warmup=2.0,
        clip=1.0,
        crop=4,
        flip=True,
        device="cuda",
        dtype="bf16",
        compile=True,
        save_every=195 * 8,
        test_every=4,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1, 2),
    against="exact",
    differs=(
        "CIFAR-100 and a ViT-S with patches of 4 pixels, where the paper has ImageNet and ViT-S/16.",
        "The forward is exact in all arms but two: SkipTokens, which is what the authors' released code does for its qkv, and "
        "PatchDropout, which leaves half of the patches out of all blocks.",
    ),
    order=3,
    minutes=25,
)
