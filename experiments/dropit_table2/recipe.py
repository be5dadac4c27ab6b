"""DropIT, table 2: which entries of a layer's input are kept, and how many of them."""

from halfback.train import Arm, Recipe, Settings

EPOCHS = 30


def paper(keep: float, **more) -> str:
    """As in the paper: a sparse copy of every layer's input but the first's, also where the exact one is held anyway."""
    settings = ", ".join(f"{k}={v!r}" for k, v in more.items())
    return f"dropit(keep={keep}, exact_first=False{', ' + settings if settings else ''})"


def arms() -> tuple[Arm, ...]:
    # top-1 of the paper by dropping rate 0.5, 0.8, 0.9, 0.99
    table = {
        "channels, random": ({"of": "channels", "select": "random"}, {0.2: 73.00}),
        "channels, largest": ({"of": "channels"}, {0.2: 71.64}),
        "elements, random": ({"select": "random"}, {0.5: 77.04, 0.2: 74.67, 0.1: 73.59, 0.01: 64.43}),
        "elements, Min-K": ({"block": None}, {0.2: 78.78}),
        "elements, Parallel Min-K": ({}, {0.5: 78.41, 0.2: 78.17, 0.1: 77.41, 0.01: 66.87}),
    }
    found = [Arm("exact", "exact", paper=77.96), Arm("Lean", "lean", group="halfback")]
    for name, (more, values) in table.items():
        found += [Arm(f"{name}, keep {keep}", paper(keep, **more), paper=top1, group=name) for keep, top1 in values.items()]
    found += [
        Arm("4 bits", "dropit(bits=4, exact_first=False)", group="halfback"),
        Arm("Parallel Min-K, keep 0.2, first layer too", paper(0.2, layers="all"), group="section 3.4"),
        Arm("Parallel Min-K, keep 0.2, D = 2^10", paper(0.2, block=2**10), group="D"),
        Arm("Parallel Min-K, keep 0.2, D = 2^18", paper(0.2, block=2**18), group="D"),
    ]
    return tuple(found)


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}

    def gap(name: str) -> str:
        d = found[name]["against"]["top1"]
        return f"{d['mean']:+.2f} points ({d['interval'][0]:+.2f} to {d['interval'][1]:+.2f})"

    def held(name: str) -> str:
        return f"{found[name]['against']['ratio']['held']:.2f}"

    largest, random = "elements, Parallel Min-K, keep", "elements, random, keep"
    return (
        f"Against exact: Parallel Min-K at keep 0.1 {gap(f'{largest} 0.1')}, random elements {gap(f'{random} 0.1')}; at keep 0.01 "
        f"{gap(f'{largest} 0.01')} and {gap(f'{random} 0.01')}; whole channels at keep 0.2 {gap('channels, largest, keep 0.2')} by size, "
        f"{gap('channels, random, keep 0.2')} at random. Every layer's input can be computed from what its norm holds anyway, so with "
        f"its default settings DropIT is Lean here: {gap('Lean')}, with {held('Lean')} of exact's held bytes, where Parallel Min-K at keep "
        f"0.2 has {held(f'{largest} 0.2')}."
    )


RECIPE = Recipe(
    title="DropIT, table 2: ResNet-18 on CIFAR-100, 30 epochs",
    about="ResNet-18 on CIFAR-100, a shortened schedule. Every arm sees the same batches and starts from the same weights, seed by seed. "
    "The curves are figure 3 of the paper.",
    paper="Elements beat channels, the largest beat random ones; at keep 0.5 to 0.2 Min-K is above the baseline, at 0.01 far below.",
    base=Settings(
        model="resnet18",
        data="cifar100",
        epochs=EPOCHS,
        batch=128,
        optimizer="sgd",
        lr=0.1,
        weight_decay=5e-4,
        warmup=1.0,
        crop=4,
        flip=True,
        device="cuda",
        dtype="bf16",
        channels_last=True,
        save_every=390 * 10,
        test_every=5,
        best=False,
    ),
    arms=arms(),
    seeds=(0, 1, 2),
    against="exact",
    claims=("elements, Parallel Min-K, keep 0.2", "elements, Parallel Min-K, keep 0.1", "4 bits"),
    curves=("exact", *(f"elements, Parallel Min-K, keep {keep}" for keep in (0.5, 0.2, 0.1, 0.01))),
    differs=(
        f"{EPOCHS} epochs instead of 200, with a cosine schedule; the main rows have 200.",
        "bf16 autocast, where the paper trains in float32.",
        "Selected entries are held as values and one bit an element, not as values and indices; memory is smaller than the paper's.",
    ),
    order=1,
    minutes=25,
    verdict=verdict,
)
