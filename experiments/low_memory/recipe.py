"""Low memory: what each way to it costs in accuracy, on all layers of a ViT-S/4; exact ways beside them."""

from halfback.train import Arm, Recipe, Settings

EXACT = {  # gradients are exact's, so they are timed, and not trained again
    "accumulation, 4 parts": ("exact", {"accumulate": 4}),
    "Lean": ("lean", {}),
    "Recompute": ("recompute", {}),
    "Lean, Recompute": ("lean+recompute(sparing=True)", {}),
}
APPROXIMATE = {
    "SBP": "sbp(keep=0.5)",
    "SBP, all layers": "sbp(keep=0.5, layers='all')",
    "SBP, all layers, scaled": "sbp(keep=0.5, layers='all', scale=True)+lean",
    "SBP, all layers, qkv": "sbp(keep=0.5, layers='all', attention='qkv')+lean",
    "SBP, all layers, keep 0.75": "sbp(keep=0.75, layers='all')+lean",
    "SBP, all layers, increasing": "sbp(keep=0.5, layers='all', ramp='increasing')+lean",
    "SBP, all layers, decreasing": "sbp(keep=0.5, layers='all', ramp='decreasing')+lean",
    "SkipTokens, all layers": "skiptokens(keep=0.5, layers='all')+lean",
    "4 bits": "dropit(bits=4, activation_bits=4)",
    "largest tenth": "dropit(keep=0.1, activation_bits=4)",
    "SBP, 4 bits": "sbp(keep=0.5)+dropit(bits=4, activation_bits=4)",
    "SBP, all layers, 4 bits": "sbp(keep=0.5, layers='all')+dropit(bits=4, activation_bits=4)",
}
ADDED = {  # what is exact alone
    "SBP, Lean": ("sbp(keep=0.5)+lean", "SBP"),
    "SBP, all layers, Lean": ("sbp(keep=0.5, layers='all')+lean", "SBP, all layers"),
    "SBP, Recompute": ("sbp(keep=0.5)+recompute", "SBP"),
    "SBP, all layers, Recompute": ("sbp(keep=0.5, layers='all')+recompute", "SBP, all layers"),
}


def arms() -> tuple[Arm, ...]:
    group = "exact gradients"
    exact = [Arm("exact", "exact", group=group), *(Arm(n, m, c, group=group, like="exact") for n, (m, c) in EXACT.items())]
    group = "approximate gradients"
    approximate = [Arm(name, method, group=group) for name, method in APPROXIMATE.items()]
    approximate += [Arm(name, method, group=group, like=like) for name, (method, like) in ADDED.items()]
    tail = Arm("SBP, all layers, last tenth exact", APPROXIMATE["SBP, all layers"], {"exact_tail": 0.1}, group=group)
    return (*exact, *approximate, tail)


RECIPE = Recipe(
    title="Low memory: accuracy against peak",
    about="ViT-S/4 on CIFAR-100, the short schedule. Exact ways to save memory cost time, approximate ones accuracy.",
    paper="SBP: on all layers the accuracy falls by more than on two thirds of them (figure 1).",
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
    beside=("sbp_sweep",),
    differs=("CIFAR-100 and a ViT-S with patches of 4 pixels, where the paper has ImageNet and ViT-Tiny.",),
    order=6,
    minutes=20,
)
