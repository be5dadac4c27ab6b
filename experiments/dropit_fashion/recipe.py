"""DropIT on a narrow ResNet-18 and Fashion-MNIST: small enough for a CPU, and what figure 4 is drawn of there."""

from halfback.train import Arm, Recipe, Settings, in_words


def verdict(results: dict) -> str:
    found = next(a for a in results["arms"] if a["against"])
    return f"{found['name']}: {in_words(found)}, held {found['against']['ratio']['held']:.2f}."


RECIPE = Recipe(
    title="DropIT on a narrow ResNet-18, Fashion-MNIST",
    about="ResNet-18 with 8 to 64 channels on all 60,000 images, twice each; 10,000 to test on.",
    paper="CIFAR-100, 64 to 512 channels: 77.96 exact, 78.17 with Parallel Min-K, keep 0.2.",
    base=Settings(
        model="experiments/dropit_fashion/net.py:resnet",
        data="fashion-mnist",
        epochs=2,
        batch=128,
        optimizer="sgd",
        lr=0.1,
        weight_decay=5e-4,
        warmup=0.2,
        best=False,
    ),
    arms=(Arm("exact"), Arm("Parallel Min-K, keep 0.2", "dropit(keep=0.2, exact_first=False)")),
    seeds=(0, 1, 2),
    differs=("Two epochs of Fashion-MNIST, and an eighth of the channels.",),
    order=32,
    minutes=15,
    on="two CPU cores",
    verdict=verdict,
)
