"""How strongly the main recipes regularise, and in what batches: chosen for exact training, on samples held back from training."""

from halfback.train import Arm, Recipe, Settings

STRONG = {"magnitude": 9.0, "erase": 0.25}
MIXED = {"mixup": 0.8, "cutmix": 1.0, "mixing": 0.5}


def arms() -> tuple[Arm, ...]:
    found = []
    for name, changes in (("ViT-S/4", {}), ("ConvNeXt", {"model": "convnext", "lr": 2e-3, "channels_last": True})):
        found += [
            Arm(f"{name}, weak", "exact", changes, group=name),
            Arm(f"{name}, strong", "exact", {**changes, **STRONG}, group=name, against=f"{name}, weak"),
            Arm(f"{name}, half mixed", "exact", {**changes, **MIXED}, group=name, against=f"{name}, weak"),
            Arm(f"{name}, strong, half mixed", "exact", {**changes, **STRONG, **MIXED}, group=name, against=f"{name}, weak"),
            Arm(f"{name}, half mixed, batch 128", "exact", {**changes, **MIXED, "batch": 128}, group=name, against=f"{name}, weak"),
        ]
    return tuple(found)


RECIPE = Recipe(
    title="How strongly to regularise",
    about="ViT-S/4 and ConvNeXt on 45,000 images of CIFAR-100, judged by the 5,000 others; exact training alone. What is best here, the "
    "main recipes use for all their arms.",
    paper="Both papers use their models' own recipes, which are for ImageNet.",
    base=Settings(
        model="vit-s4",
        data="cifar100",
        validation=5000,
        epochs=60,
        batch=256,
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.05,
        warmup=5.0,
        clip=1.0,
        crop=4,
        flip=True,
        randaugment=2,
        magnitude=4.0,
        smoothing=0.1,
        drop_path=0.1,
        device="cuda",
        dtype="bf16",
        compile=True,
        save_every=175 * 15,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1),
    against="ViT-S/4, weak",
    order=7,
    minutes=30,
)
