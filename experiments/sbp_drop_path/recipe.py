"""Drop path beside SBP, which the paper lowers: which rate is best, with exact gradients and with SBP, judged by samples held back."""

from halfback.train import Arm, Recipe, Settings

RATES = (0.1, 0.05, 0.0)
SBP = "sbp(keep=0.5)"


def verdict(results: dict) -> str:
    found = {a["name"]: a["mean"]["top1"] for a in results["arms"]}
    best = {kind: max(RATES, key=lambda rate: found[f"{kind}, drop path {rate:g}"]) for kind in ("exact", "SBP")}
    exact, sbp = (found[f"{kind}, drop path {rate:g}"] for kind, rate in best.items())
    return (
        f"Best for exact training is drop path {best['exact']:g}, for SBP {best['SBP']:g}; with its own each, SBP is {sbp - exact:+.2f} "
        "points from exact training. What is best here, the main recipe may use for its arms."
    )


RECIPE = Recipe(
    title="Drop path beside SBP",
    about="ViT-S/4 that reads the mean of its tokens, on 45,000 images of CIFAR-100, judged by the 5,000 others.",
    paper="The paper lowers drop path where SBP is used, as both drop gradients.",
    base=Settings(
        model="vit-s4-mean",
        data="cifar100",
        validation=5000,
        epochs=30,
        batch=256,
        optimizer="adamw",
        lr=5e-4,
        weight_decay=0.5,
        warmup=3.0,
        clip=1.0,
        crop=4,
        flip=True,
        randaugment=2,
        magnitude=4.0,
        mixup=0.8,
        cutmix=1.0,
        mixing=0.5,
        smoothing=0.1,
        device="cuda",
        dtype="bf16",
        compile=True,
        save_every=175 * 10,
        test_every=10,
        best=False,
    ),
    arms=tuple(
        Arm(f"{kind}, drop path {rate:g}", method, {"drop_path": rate}, group=kind, against=f"exact, drop path {rate:g}")
        for kind, method in (("exact", "exact"), ("SBP", SBP))
        for rate in RATES
    ),
    seeds=(0, 1, 2),
    against=f"exact, drop path {RATES[0]:g}",
    differs=("CIFAR-100 from scratch, where the paper has ImageNet; half of the main recipe's epochs.",),
    order=8,
    minutes=14,
    verdict=verdict,
)
