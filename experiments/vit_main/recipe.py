"""SBP, table 1, and DropIT, table 3, in our setting: a ViT-S/4 trained from scratch on CIFAR-100."""

from halfback.train import Arm, Recipe, Settings

MAIN = ("SBP", "DropIT, keep 0.1")  # what is claimed of them takes five seeds, of the others three
METHODS = {
    "SBP": "sbp(keep=0.5)",
    "SkipTokens": "skiptokens(keep=0.5)",
    "DropIT, keep 0.1": "dropit(keep=0.1, exact_first=False)",
    "DropIT, 4 bits": "dropit(bits=4, activation_bits=4)",
    "SBP, DropIT, Recompute": "sbp(keep=0.5)+dropit(keep=0.1, activation_bits=4)+recompute(sparing=True)",
}
# With gradients of another arm: timed, and not trained
LIKE = {
    "Lean": ("lean", "exact"),
    "checkpointing": ("recompute", "exact"),
    "SBP, Lean": ("sbp(keep=0.5)+lean", "SBP"),
    "SBP, Lean, Recompute": ("sbp(keep=0.5)+lean+recompute(layers='first 1/3', sparing=True)", "SBP"),
}


def arms() -> tuple[Arm, ...]:
    found = []
    for pool, model in (("class token", "vit-s4"), ("average", "vit-s4-mean")):
        changes = {"model": model}
        exact = f"exact, {pool}"
        seeds = tuple(range(10)) if pool == "average" else None  # five left it open whether the lower bound is above -1
        found.append(Arm(exact, "exact", changes, group=pool, against=exact, seeds=seeds))
        for name, method in METHODS.items():
            if name == "SBP" or pool == "class token":
                own = seeds if name in MAIN else (0, 1, 2)
                found.append(Arm(f"{name}, {pool}", method, changes, group=pool, against=exact, seeds=own))
        if pool == "class token":
            for name, (method, like) in LIKE.items():
                found.append(Arm(f"{name}, {pool}", method, changes, group=pool, against=exact, like=f"{like}, {pool}"))
    return tuple(found)


RECIPE = Recipe(
    title="SBP and DropIT: ViT-S/4 from scratch on CIFAR-100, 60 epochs",
    about="ViT-S/4 from scratch on CIFAR-100, read from its class token, five paired seeds for SBP and DropIT, three for the others, and "
    "from the mean of its tokens, ten. SBP is "
    "alone: Lean and Recompute are exact, and with them beside it, it has the gradient that it has alone.",
    paper="SBP, keep 0.5 on two thirds of the layers: -0.5 to -0.6 points on ImageNet. DropIT, keep 0.1: +0.2 to +0.6 in fine-tuning.",
    base=Settings(
        data="cifar100",
        epochs=60,
        batch=256,
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.5,
        warmup=5.0,
        clip=1.0,
        crop=4,
        flip=True,
        randaugment=2,
        magnitude=4.0,
        mixup=0.8,
        cutmix=1.0,
        mixing=0.5,
        smoothing=0.1,
        drop_path=0.1,
        device="cuda",
        dtype="bf16",
        compile=True,
        save_every=195 * 15,
        test_every=10,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact, class token",
    claims=("SBP, class token", "SBP, average", "DropIT, keep 0.1, class token"),
    curves=("exact, class token", "SBP, class token", "DropIT, keep 0.1, class token", "exact, average", "SBP, average"),
    differs=("CIFAR-100 from scratch, where the paper has ImageNet; the recipe is ours.",),
    order=4,
    minutes=60,
)
