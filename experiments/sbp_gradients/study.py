"""SBP, figures 2, 3, 5, 6, 8 to 11 and section 8.6: how near the gradient is, and how far apart trainings end.

    python experiments/sbp_gradients/study.py --data DIR --device cuda              a ViT-S/4 and the ConvNeXt, on CIFAR-100
    python experiments/sbp_gradients/study.py --data digits --epochs 16 --batch 64 --seeds 5 --out experiments/sbp_gradients_digits
                                                                                    ten minutes on a CPU

gradients     at the start, in the middle and at the end of an exact training: cosine, scale and squared bias of each variant's gradient
              by layer, over several batches and masks (figures 2, 3, 5, 6, 8)
training      SBP beside exact training from the same weights on the same batches: the gradient's norm by layer (figures 9, 10), the
              cosine of the weights (figure 11) and the share of equal predictions (section 8.6). And the control that the paper lacks:
              exact training on other batches, and from other weights

Writes results.json and figure.png beside this file, or to --out; `halfback reproduce --page` shows them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import halfback as hb
from halfback.compare import surroundings
from halfback.rewrite import apply_
from halfback.train.loop import Training
from halfback.train.pieces import Stop, progress
from halfback.train.record import write_json
from halfback.train.settings import Settings
from halfback.trained import consistency, gradient_norms, similarity

VARIANTS = {
    "SBP": "sbp(keep=0.5)",
    "scaled": "sbp(keep=0.5, scale=True)",
    "all layers": "sbp(keep=0.5, layers='all')",
    "all layers, scaled": "sbp(keep=0.5, layers='all', scale=True)",
    "keep 0.25": "sbp(keep=0.25)",
    "increasing": "sbp(keep=0.5, ramp='increasing')",
    "decreasing": "sbp(keep=0.5, ramp='decreasing')",
    "random positions": "sbp(keep=0.5, sampler='random')",
    "qkv": "sbp(keep=0.5, attention='qkv')",
    "heads": "sbp(keep=0.5, attention='heads')",
    "independent masks": "sbp(keep=0.5, masks='independent')",
    "DropIT, keep 0.1": "dropit(keep=0.1, exact_first=False)",
    "DropIT, 4 bits": "dropit(bits=4, activation_bits=4)",
}
CONVOLUTIONAL = ("qkv", "heads")  # which a model without attention has no use for
CONTROLS = ("exact, other batches", "exact, other weights")
BATCHES, MASKS = 4, 4


def settings(args: argparse.Namespace, model: str, seed: int, method: str = "exact") -> Settings:
    root = None if args.data == "digits" else args.data
    data = "digits" if args.data == "digits" else "cifar100"
    more: dict[str, Any] = {} if data == "digits" else {"crop": 4, "flip": True}
    return Settings(
        model=model,
        data=data,
        root=root,
        method=method,
        seed=seed,
        epochs=args.epochs,
        batch=args.batch,
        warmup=1.0,
        clip=1.0,
        device=args.device,
        dtype="bf16" if args.device == "cuda" else "fp32",
        channels_last=model == "convnext",
        best=False,
        **more,
    )


def an_epoch(training: Training, bar: Any) -> None:
    with Stop() as stop:
        training._train_epoch(training.step // training.per_epoch, 0, bar, stop)
        if stop.asked:
            raise KeyboardInterrupt
    training.loss.zero_()


def audited(training: Training) -> dict[str, Any]:
    """Each variant's gradient against the exact one, in float32, on the same batches."""
    size = min(64, training.micro)
    batches = []
    for i in range(BATCHES):
        indices = torch.arange(i * size, (i + 1) * size) % len(training.data.train)
        batches.append(training._batch(indices, 0, augmented=False))
    found = {}
    for name, method in VARIANTS.items():
        if name in CONVOLUTIONAL and "convnext" in training.settings.model:
            continue
        report = hb.audit(training.model, batches, steps=MASKS, methods=method, progress=False)
        layers = [{"layer": x.layer, "cosine": x.cosine, "scale": x.scale, "bias2": x.bias2} for x in report.layers]
        everything = report.all
        found[name] = {
            "all": {"cosine": everything.cosine, "scale": everything.scale, "bias2": everything.bias2, "noise": everything.noise},
            "layers": layers,
        }
    return found


def gradients(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Audits of one exact training, at its start, middle and end."""
    training = Training(settings(args, model, 0), folder, say=lambda text: None)
    found = {"start": audited(training)}
    with progress(training.steps, 0) as bar:
        for epoch in range(args.epochs):
            an_epoch(training, bar)
            if epoch + 1 in (args.epochs // 2, args.epochs):
                found["end" if epoch + 1 == args.epochs else "middle"] = audited(training)
    return found


def lockstep(args: argparse.Namespace, model: str, seed: int, folder: Path) -> dict[str, Any]:
    """Exact, SBP and both controls, epoch by epoch."""

    def make(method: str, own: int) -> Training:
        return Training(settings(args, model, own, method), folder, say=lambda text: None)

    other = seed + 100
    runs = {"exact": make("exact", seed), "SBP": make(VARIANTS["SBP"], seed), CONTROLS[0]: make("exact", other)}
    runs[CONTROLS[1]] = make("exact", seed)
    strange = runs[CONTROLS[0]].model.state_dict()
    runs[CONTROLS[1]].model.load_state_dict(strange)
    runs[CONTROLS[0]].model.load_state_dict(runs["exact"].model.state_dict())
    batch = runs["exact"]._batch(torch.arange(min(64, args.batch)), 0, augmented=False)
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    with progress(len(runs) * runs["exact"].steps, 0) as bar:
        for _ in range(args.epochs):
            for run in runs.values():
                an_epoch(run, bar)
            for name, run in runs.items():
                norms = gradient_norms(run.model, batch) if run.methods else _exact_norms(run, batch)
                seen[name].append({"similarity": similarity(runs["exact"].model, run.model)["all"], "norms": norms})
    part = runs["exact"].data.test
    test = [runs["exact"].prepared(*part.batch(index), augmented=False) for index in torch.arange(len(part)).split(500)]
    return {
        name: {
            "top1": run.test()["top1"],
            "consistency": 100 * consistency(runs["exact"].model, run.model, test),
            "similarity": seen[name][-1]["similarity"],
            "epochs": seen[name],
        }
        for name, run in runs.items()
    }


def _exact_norms(run: Training, batch: Any) -> dict[str, Any]:
    """Of a model without methods: both are the exact one's."""
    apply_(run.model, hb.Lean())
    try:
        return gradient_norms(run.model, batch)
    finally:
        hb.remove_(run.model)


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and deviations over seeds."""
    out = {}
    for name in runs[0]:
        values = {k: [r[name][k] for r in runs] for k in ("top1", "consistency", "similarity")}
        out[name] = {k: {"mean": statistics.fmean(v), "deviation": statistics.stdev(v), "values": v} for k, v in values.items()}
    return out


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(results["models"])
    figure, axes = plt.subplots(len(models), 4, figsize=(20, 4 * len(models)), squeeze=False, layout="constrained")
    for row, model in zip(axes, models, strict=True):
        found = results["models"][model]
        for axis in row[:2]:
            axis.set_prop_cycle(color=plt.colormaps["tab20"].colors)
        for name, audit in found["gradients"]["end"].items():
            for axis, key in zip(row[:2], ("cosine", "scale"), strict=True):
                values = [layer[key] for layer in audit["layers"]]
                axis.plot(range(len(values)), [float("nan") if v is None else v for v in values], label=name, linewidth=1)
        for axis, key in zip(row[:2], ("cosine", "scale"), strict=True):
            axis.set(title=f"{model}: {key} by layer, at the end", xlabel="layer", ylim=(0, 1.3))
        row[1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
        first = found["training"]["seeds"][0]
        for name in first:
            curves = [[e["similarity"] for e in seed[name]["epochs"]] for seed in found["training"]["seeds"]]
            if name != "exact":
                row[2].plot(range(1, len(curves[0]) + 1), [statistics.fmean(c) for c in zip(*curves, strict=True)], label=name)
            place = 1 if name == "SBP" else 0
            norms = [e["norms"]["all"][place] for e in first[name]["epochs"]]
            row[3].plot(range(1, len(norms) + 1), norms, label=name)
        row[2].set(title=f"{model}: cosine of weights with exact", xlabel="epoch")
        row[3].set(title=f"{model}: norm of the gradient", xlabel="epoch", yscale="log")
        row[2].legend(fontsize=7)
        row[3].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


PAPER = (
    "SBP's gradient is highly correlated with the exact one, most with uniform ratios and a grid (figures 2 to 8). Norms of "
    "gradients do not vanish (9, 10). The weights' cosine falls to 0.14 for a ViT-Tiny, and predictions agree on 80.7 % of ImageNet's "
    "images (section 8.6)."
)
WHEN = ("start", "middle", "end")
OF_GRADIENTS = (("cosine", 3), ("scale", 2), ("bias2", 2))  # with their digits
OF_TRAININGS = (("top1", 2), ("consistency", 2), ("similarity", 3))


def markdown(results: dict[str, Any]) -> str:
    """The text of the results page. Every figure is of `results`."""
    parts = [f"**The paper:** {PAPER}", "**Here:**"]
    for model, found in results["models"].items():
        parts += [f"`{model}`, the gradient of all layers against the exact one, in an exact training:", _gradients(found["gradients"])]
        parts += ["Trained beside exact:", _trainings(found["training"]["summary"]), f"**Does it hold?** {verdict(found)}"]
    asked, made = results["settings"], f"{results['device_name']}; torch {results['versions']['torch']}; {results['date'][:10]}"
    told = f"{asked['epochs']} epochs in batches of {asked['batch']}, {asked['seeds']} seeds of trainings, one training for gradients"
    commit = f"; commit {results['commit'][:10]}" if results["commit"] else ""
    return "\n\n".join([*parts, f"`experiments/sbp_gradients/study.py`: {asked['data']}, {told}. {made}{commit}."])


def _gradients(found: dict[str, Any]) -> str:
    lines = ["| gradient of | cosine: start | middle | end | scale: start | middle | end | bias²: start | middle | end |"]
    lines.append("| --- |" + " ---: |" * 9)
    for name, method in VARIANTS.items():
        if name in found["end"]:
            values = [(found[when][name]["all"][key], digits) for key, digits in OF_GRADIENTS for when in WHEN]
            cells = ["–" if value is None else f"{value:.{digits}f}" for value, digits in values]
            lines.append(f"| {name}<br>`{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _trainings(summary: dict[str, Any]) -> str:
    lines = ["| | top-1, % | same predictions, % | cosine of weights |", "| --- | ---: | ---: | ---: |"]
    for name, told in summary.items():
        cells = [f"{told[key]['mean']:.{digits}f} ± {told[key]['deviation']:.{digits}f}" for key, digits in OF_TRAININGS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(found: dict[str, Any]) -> str:
    end, summary = {k: v["all"]["cosine"] for k, v in found["gradients"]["end"].items()}, found["training"]["summary"]
    own, same, other = (summary[name]["consistency"]["mean"] for name in ("SBP", *CONTROLS))
    nearer = [
        name for name in ("increasing", "decreasing", "random positions", "independent masks") if round(end[name], 3) > round(end["SBP"], 3)
    ]
    order = f"nearer than that: {' and '.join(nearer)}" if nearer else "no other ratios, positions and masks are nearer"
    return (
        f"At the end the cosine is {end['SBP']:.3f}, on all layers {end['all layers']:.3f}; {order}. Predictions of SBP and of exact "
        f"training from the same weights on the same batches agree on {own:.1f} %. That alone says little: two exact trainings from the "
        f"same weights on other batches agree on {same:.1f} %, from other weights on {other:.1f} %."
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", default="digits", help="a folder with CIFAR-100's binary version, or digits")
    add("--model", action="append", help="(default: vit-s4 and convnext; of digits small-vit)")
    add("--epochs", type=int, default=12)
    add("--batch", type=int, default=256)
    add("--seeds", type=int, default=2)
    add("--device", default="cpu")
    add("--out", type=Path, default=Path(__file__).parent)
    add("--text", action="store_true", help="train nothing: the text and the figure anew, from results.json in --out")
    args = parser.parse_args(argv)
    if args.text:
        return told(args.out)
    if args.seeds < 2:
        sys.exit("study.py: --seeds must be at least 2.")
    models = args.model or (["small-vit"] if args.data == "digits" else ["vit-s4", "convnext"])
    data = "digits" if args.data == "digits" else "CIFAR-100"
    asked = {"data": data, **{k: str(v) for k, v in vars(args).items() if k not in ("out", "data", "text")}}
    title = f"SBP, figures 2 to 11 and section 8.6: gradients, weights and predictions, on {data}"
    results: dict[str, Any] = {"name": args.out.name, "order": 8, "title": title, "settings": asked, "models": {}}
    results |= surroundings(args.device)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        for model in models:
            seeds = [lockstep(args, model, seed, Path(folder)) for seed in range(args.seeds)]
            found = {"gradients": gradients(args, model, Path(folder)), "training": {"summary": summed(seeds), "seeds": seeds}}
            results["models"][model] = found
            args.out.mkdir(parents=True, exist_ok=True)
            write_json(args.out / "results.json", results)
    told(args.out)


def told(out: Path) -> None:
    """The text and the figure, from results.json."""
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    results["text"] = markdown(results)
    write_json(out / "results.json", results)
    draw(results, out / "figure.png")
    print(results["text"])


if __name__ == "__main__":
    main()
