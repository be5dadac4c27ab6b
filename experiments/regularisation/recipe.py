"""How strongly the main recipes regularise: chosen for exact training, on samples held back from the training set."""

from halfback.train import Arm, Recipe, Settings

MIXED = {"mixup": 0.8, "cutmix": 1.0, "mixing": 0.5}
CONVNEXT = {"model": "convnext", "lr": 2e-3, "channels_last": True}


def arms() -> tuple[Arm, ...]:
    """Weight decay shrinks weights by lr * decay a step: at the ViT's rate 0.05 forgets over 200 epochs, 0.5 over 20."""
    vit = [Arm("ViT-S/4, half mixed", "exact", MIXED, group="ViT-S/4")]
    for rate in ("5e-4", "3e-4", "2e-4"):
        changes = {**MIXED, "weight_decay": 0.5, "lr": float(rate)}
        vit.append(Arm(f"ViT-S/4, half mixed, decay 0.5, rate {rate}", "exact", changes, group="ViT-S/4"))
    first = "ConvNeXt, half mixed"
    convnext = [
        Arm(first, "exact", {**CONVNEXT, **MIXED}, group="ConvNeXt", against=first),
        Arm(f"{first}, batch 128", "exact", {**CONVNEXT, **MIXED, "batch": 128}, group="ConvNeXt", against=first),
        Arm(f"{first}, decay 0.2", "exact", {**CONVNEXT, **MIXED, "weight_decay": 0.2}, group="ConvNeXt", against=first),
    ]
    return (*vit, *convnext)


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
    against="ViT-S/4, half mixed",
    order=7,
    minutes=30,
)
