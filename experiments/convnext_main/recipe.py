"""SBP, table 1, in our setting: a ConvNeXt trained from scratch on CIFAR-100."""

from halfback.train import Arm, Recipe, Settings

RECIPE = Recipe(
    title="SBP and DropIT on a ConvNeXt, main schedule",
    about="A ConvNeXt for 32 pixels, from scratch on CIFAR-100; five paired seeds.",
    paper="SBP, keep 0.5: ConvNeXt-T 82.1 to 81.6 on ImageNet.",
    base=Settings(
        model="convnext",
        data="cifar100",
        epochs=60,
        batch=256,
        optimizer="adamw",
        lr=2e-3,
        weight_decay=0.05,
        warmup=5.0,
        clip=1.0,
        crop=4,
        flip=True,
        randaugment=2,
        magnitude=4.0,
        mixup=0.8,
        cutmix=1.0,
        smoothing=0.1,
        drop_path=0.1,
        device="cuda",
        dtype="bf16",
        channels_last=True,
        save_every=195 * 15,
        best=False,
    ),
    arms=(
        Arm("exact", "exact"),
        Arm("SBP", "sbp(keep=0.5)"),
        Arm("DropIT, keep 0.1", "dropit(keep=0.1, exact_first=False)"),
        Arm("SBP, DropIT, Recompute", "sbp(keep=0.5)+dropit(keep=0.1, activation_bits=4)+recompute(sparing=True)"),
    ),
    seeds=(0, 1, 2, 3, 4),
    against="exact",
    differs=("CIFAR-100 from scratch, where the paper has ImageNet; the recipe is ours.",),
    order=5,
    minutes=60,
)
