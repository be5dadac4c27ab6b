"""Keep over the training: where in it the approximate steps cost least."""

from halfback.train import Arm, Recipe, Settings

OPTIMIZERS = {
    "AdamW": {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 0.05},
    "SGD": {"optimizer": "sgd", "lr": 0.05, "weight_decay": 5e-4},
}
ALL = "SBP, all layers"
SBP = "sbp(keep=0.5, layers='all')"
COURSES = {
    "last tenth exact": (SBP, {"exact_tail": 0.1}),
    "last three tenths exact": (SBP, {"exact_tail": 0.3}),
    "first three tenths exact": ("sbp(keep=0.5, layers='all', schedule=((0, 1.0), (0.3, 1.0), (0.3, 0.5)))", {}),
    "keep 0.25 to 0.75": ("sbp(keep=0.5, layers='all', schedule=((0, 0.25), (1, 0.75)))", {}),
    "keep 0.75 to 0.25": ("sbp(keep=0.5, layers='all', schedule=((0, 0.75), (1, 0.25)))", {}),
}


def arms() -> tuple[Arm, ...]:
    found = []
    for group, changes in OPTIMIZERS.items():
        exact = f"exact, {group}"
        found.append(Arm(exact, "exact", changes, group=group))
        found.append(Arm(f"{ALL}, {group}", SBP, changes, group=group, against=exact))
        found += [Arm(f"{name}, {group}", m, {**changes, **own}, group=group, against=exact) for name, (m, own) in COURSES.items()]
    return tuple(found)


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}

    def told(name: str, group: str) -> str:
        arm = found[f"{name}, {group}"]
        times = arm["mean"]["train_loss"] / found[f"exact, {group}"]["mean"]["train_loss"]
        return f"{name} {times:.1f}{'' if arm['against']['train_loss']['clear'] else ' (not clear of exact)'}"

    by_group = [f"with {group}, {', '.join(told(name, group) for name in (ALL, *COURSES))}" for group in OPTIMIZERS]
    clear = [k for k, a in found.items() if a["against"] and not k.startswith("exact") and a["against"]["top1"]["clear"]]
    return (
        f"Training loss at the end, in exact training's: {'; '.join(by_group)}. Accuracy: {', '.join(clear) or 'none of the differences'} "
        f"{'are' if len(clear) > 1 else 'is'} clear of zero; five seeds of 360 test images cannot tell less than about a point."
    )


RECIPE = Recipe(
    title="Keep over the training, on digits",
    about="SBP on all layers of the small ViT with the mean of its tokens read out, where it costs most, with parts of the training exact. "
    "At the end the blocks are recomputed then, so that no more is held; at the beginning all of it is held.",
    paper="Not in the papers, which keep the same share in all steps.",
    base=Settings(model="small-vit-mean", data="digits", epochs=16, batch=64, warmup=1.0, best=False),
    arms=arms(),
    seeds=(0, 1, 2, 3, 4),
    against="exact, AdamW",
    beside=("poolings",),
    differs=("A toy. Accuracies are too close to each other to tell courses apart; the training loss is what shows.",),
    order=32,
    minutes=20,
    on="two CPU cores",
    verdict=verdict,
)
