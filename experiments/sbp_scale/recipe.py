"""Should a kept position count for dropped ones in what it passes back to others? Judged on samples held back from the training set."""

from halfback.train import Arm, Recipe, Settings

NETS = {
    "ConvNeXt": {"model": "convnext", "epochs": 30, "lr": 2e-3, "weight_decay": 0.2, "channels_last": True},
    "ViT-S/4, average": {"model": "vit-s4-mean"},
    "ViT-S/4, class token": {"model": "vit-s4"},
}
LAYERS = {
    "ViT-S/4, class token": ", layers='all'",  # on two thirds of them there is little to correct
    "ConvNeXt": ", layers='last 2/3'",
}


def arms() -> tuple[Arm, ...]:
    found = []
    for net, changes in NETS.items():
        layers = LAYERS.get(net, "")
        said = f"{net}, all layers" if "all" in layers else net
        found += [
            Arm(f"{net}, exact", "exact", changes, group=net, against=f"{net}, exact"),
            Arm(f"{said}, SBP", f"sbp(keep=0.5{layers})", changes, group=net, against=f"{net}, exact"),
            Arm(f"{said}, SBP, scaled", f"sbp(keep=0.5{layers}, scale=True)", changes, group=net, against=f"{net}, exact"),
        ]
    return tuple(found)


RECIPE = Recipe(
    title="SBP: kept positions that count for dropped ones",
    about="Short schedules on 45,000 images of CIFAR-100, judged by the 5,000 others: what is best here becomes the default.",
    paper="The paper does not scale what kept positions pass back to others.",
    base=Settings(
        data="cifar100",
        validation=5000,
        epochs=20,
        batch=256,
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.5,
        warmup=2.0,
        clip=1.0,
        crop=4,
        flip=True,
        smoothing=0.1,
        device="cuda",
        dtype="bf16",
        compile=True,
        save_every=175 * 10,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1, 2),
    against="ConvNeXt, exact",
    order=7,
    minutes=12,
)
