"""How the error of `activation_bits` grows with depth.

DropIT leaves the gradient that flows on exact, whatever it keeps of a layer's input. `activation_bits` does not: a GELU's derivative comes
from a code, so the gradient leaves every block a little wrong, and section 3.1 of the DropIT paper says what follows: the errors of
all blocks that it has passed add up. A ViT of 24 blocks on scanned digits, before training and after some of it; on one batch, for every
block, against exact gradients:

    input     the gradient that flows into the block's input
    weights   the gradients of the block's weight matrices, as one vector
    error     |approximate - exact| / |exact|
    cosine    of the angle between them

Lean is the control: its error has to be rounding. keep=1 shows what `activation_bits` does alone; bits=4 and keep=0.1 add few-bit
and sparse inputs, which touch the weights' gradients and not what flows on.

    python benchmarks/depth.py     writes benchmarks/results/depth.json and depth.png, in about two minutes on a CPU
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfback as hb
from halfback.batches import loss_of
from halfback.compare import Settings, accuracy, start, steps_per_epoch, surroundings, train_epoch
from halfback.data import Data, digits
from halfback.models import ViT, small_vit
from halfback.report import rows

METHODS = (
    "lean",
    "dropit(keep=1, activation_bits=8)",
    "dropit(keep=1, activation_bits=4)",
    "dropit(bits=4, activation_bits=4)",
    "dropit(keep=0.1, activation_bits=4)",
)
WHEN = ("at initialisation", "after training")
WHAT = ("input", "weights")
SHAPE: dict[str, Any] = {"width": 48, "depth": 24, "heads": 3}
TRAINING = Settings(methods="exact", seeds=3, epochs=6, batch=64, lr=1e-3)

Gradients = dict[str, list[Tensor]]  # of WHAT, a vector a block


def gradients(model: ViT, x: Tensor, y: Tensor) -> Gradients:
    """Of one batch; the model is left without gradients."""
    model.zero_grad()  # what training left
    inputs: list[Tensor] = []

    def note(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        inputs.append(args[0])

    hooks = [block.register_forward_pre_hook(note) for block in model.blocks]
    loss_of(model.train(), (x, y)).backward()
    for hook in hooks:
        hook.remove()
    weights = [torch.cat([gradient(p) for p in block.parameters() if p.ndim > 1]) for block in model.blocks]
    model.zero_grad()
    return {"input": [gradient(t) for t in inputs], "weights": weights}


def gradient(t: Tensor) -> Tensor:
    assert t.grad is not None
    return t.grad.flatten()


def differences(found: Gradients, exact: Gradients) -> dict[str, dict[str, list[float]]]:
    """Per block, in float64, as Lean's error is near that of float32."""
    out = {}
    for what in WHAT:
        pairs = [(a.double(), b.double()) for a, b in zip(found[what], exact[what], strict=True)]
        errors = [float((a - b).norm() / b.norm()) for a, b in pairs]
        out[what] = {"error": errors, "cosine": [float(a @ b / (a.norm() * b.norm())) for a, b in pairs]}
    return out


def measured(model: ViT, x: Tensor, y: Tensor) -> dict[str, Any]:
    exact = gradients(model, x, y)
    out = {}
    for method in METHODS:
        hb.apply_(model, *hb.parse(method))
        out[method] = differences(gradients(model, x, y), exact)
        hb.remove_(model)
    return out


def of_seed(seed: int, data: Data) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = small_vit(**SHAPE)
    x, y = data.x_test[: TRAINING.batch], data.y_test[: TRAINING.batch]
    before = measured(copy.deepcopy(model), x, y)
    run = start("exact", seed, model, TRAINING, TRAINING.epochs * steps_per_epoch(TRAINING, data))
    for epoch in range(TRAINING.epochs):
        train_epoch(run, data, epoch, TRAINING.batch, lambda: None)
    return {"accuracy": accuracy(model, data, TRAINING.batch), WHEN[0]: before, WHEN[1]: measured(model, x, y)}


def mean(found: list[Any]) -> Any:
    """The mean over seeds of nested dicts and lists of numbers."""
    if isinstance(found[0], dict):
        return {key: mean([f[key] for f in found]) for key in found[0]}
    if isinstance(found[0], list):
        return [mean(list(values)) for values in zip(*found, strict=True)]
    return sum(found) / len(found)


def table(values: dict[str, Any]) -> str:
    """Errors after one block, half of them, and all."""
    depth = SHAPE["depth"]
    passed = (1, depth // 2, depth)
    cells = [["relative error after so many blocks", *(f"{what} {n}" for what in WHAT for n in passed)]]
    for when in WHEN:
        for method, of in values[when].items():
            cells.append([f"{method}, {when}", *(f"{of[what]['error'][depth - n]:.1e}" for what in WHAT for n in passed)])
    return rows(cells)


def picture(values: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots(1, len(WHAT), sharey=True)
    for ax, what in zip(axes, WHAT, strict=True):
        for i, method in enumerate(METHODS):
            for when, style in zip(WHEN, ("--", "-"), strict=True):
                errors = values[when][method][what]["error"]
                shown = f"{method}, {when}" + ("" if any(errors) else ": no error at all")
                width = 0.7 + 0.8 * (len(METHODS) - i)  # the lines of what flows on lie on each other
                ax.plot(range(1, len(errors) + 1), errors[::-1], style, color=f"C{i}", linewidth=width, label=shown)
        ax.set(yscale="log", xlabel="blocks that the gradient has passed", title=f"gradient of a block's {what}")
        ax.grid(color="0.9")
    axes[0].set_ylabel("relative error")
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="the folder of depth.json and depth.png")
    out = parser.parse_args().out
    begin, data = time.perf_counter(), digits()
    seeds = list(range(TRAINING.seeds))
    values = mean([of_seed(seed, data) for seed in seeds])
    settings = {
        "model": "small-vit",
        **SHAPE,
        "data": data.name,
        "dtype": "float32",
        "images": TRAINING.batch,
        "steps": TRAINING.epochs * steps_per_epoch(TRAINING, data),
        "lr": TRAINING.lr,
    }
    result = {"settings": settings, "seeds": seeds, **surroundings("cpu"), "seconds": time.perf_counter() - begin, "mean": values}
    out.mkdir(parents=True, exist_ok=True)
    (out / "depth.json").write_text(json.dumps(result, indent=1) + "\n")
    picture(values, out / "depth.png")
    print(table(values))
    print(f"\nMeans over {len(seeds)} seeds; accuracy after {settings['steps']} steps of exact training: {values['accuracy']:.3f}.")
    print(f"Written: {out / 'depth.json'}, {out / 'depth.png'}")


if __name__ == "__main__":
    main()
