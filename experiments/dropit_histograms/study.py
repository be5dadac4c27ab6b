"""DropIT, figure 4: histograms of parameters after training, and of gradients at its start and its end.

    halfback reproduce dropit_main --keep
    python experiments/dropit_histograms/study.py --runs out/runs/dropit_main --data DIR --device cuda

The same of a narrow network, on a CPU:

    halfback reproduce dropit_fashion --keep
    python experiments/dropit_histograms/study.py --runs out/runs/dropit_fashion --out experiments/dropit_histograms_fashion

parameters   of exact trainings and of those with DropIT, layer by layer, seed by seed. The control, which the paper lacks: an exact
             training with another seed
gradients    of one batch, in float32, with the weights that exact trainings begin and end with: the exact gradient and DropIT's, at
             several keeps. The control: the exact gradient of another batch

overlap      the area that two histograms share, of 1
cosine       between two gradients, which histograms do not show: they compare values, not where those are

Writes results.json and figure.png beside this file, or to --out; `halfback reproduce --page` shows them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfback as hb
from halfback.compare import surroundings
from halfback.train import Settings
from halfback.train.checkpoint import latest, load
from halfback.train.loop import Training
from halfback.train.pieces import loss_from, scores_of
from halfback.train.record import write_json

RUNS = {"exact": "exact", "sparse": "parallel-min-k-keep-0.2"}  # as they are called in dropit_main
KEEPS = (0.2, 0.1, 0.01)
SPARSE, SEEDED = f"DropIT, keep {KEEPS[0]}", "exact, another seed"
BINS = 61  # or fewer, of few values: two halves of 64 normal numbers share but half of a histogram of 61 bins
RANGE = 0.995  # of the exact values lie inside of a histogram; what lies beyond is counted at its ends
CONTROL = "exact, another batch"
WHEN = ("start", "end")
PAPER = (
    "Parameters are distributed as the baseline's, at keep 0.01 too but for batch norms; gradients at keep 0.2 and 0.1 are distributed as "
    "the baseline's, at the start and at the end of training (figure 4)."
)


def chosen(model: nn.Module) -> list[str]:
    """A convolution at the beginning, one in the middle and the last one, each with the batch norm behind it. The first is left alone."""
    names = [name for name, p in model.named_parameters() if p.ndim == 4][1:]
    every = [name for name, _ in model.named_parameters()]
    picked = [names[0], names[len(names) // 2], names[-1]]
    return [name for conv in picked for name in (conv, every[every.index(conv) + 1])]


def histograms(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Of each, with the edges of the exact one: symmetric around what most of it has in the middle."""
    exact = tensors["exact"].double().flatten()
    middle, away = exact.median().item(), (exact - exact.median()).abs()
    reach = max(away[:: 1 + away.numel() // 2**23].quantile(RANGE).item(), 1e-12)
    bins = min(BINS, max(5, round(2 * exact.numel() ** (1 / 3))))
    low, high = middle - reach, middle + reach
    counts = {name: torch.histc(t.double().cpu().clamp(low, high), bins, low, high) for name, t in tensors.items()}
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    return {"edges": edges.tolist(), "shares": {name: (c / c.sum()).tolist() for name, c in counts.items()}}


def overlap(found: dict[str, Any], name: str, other: str = "exact") -> float:
    return sum(map(min, found["shares"][name], found["shares"][other]))


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0).item()


def parameters(weights: dict[str, dict[int, dict[str, Tensor]]], layers: list[str]) -> dict[str, Any]:
    """By layer and seed; the other seed is the next one that there is."""
    seeds = sorted(weights["exact"])
    found: dict[str, Any] = {}
    for layer in layers:
        found[layer] = {}
        for i, seed in enumerate(seeds):
            other = seeds[(i + 1) % len(seeds)]
            kinds = {"exact": weights["exact"][seed], SPARSE: weights["sparse"][seed], SEEDED: weights["exact"][other]}
            drawn = histograms({name: own[layer] for name, own in kinds.items()})
            found[layer][seed] = {**drawn, "overlap": {name: overlap(drawn, name) for name in kinds if name != "exact"}}
    return found


def gradient(training: Training, batch: tuple[Tensor, Tensor], method: str | None = None) -> dict[str, Tensor]:
    model = training.model
    if method is not None:
        hb.apply_(model, *hb.parse(method))
    try:
        loss_from(scores_of(model, batch[0]), batch[1], training.settings.smoothing).backward()
        return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    finally:
        model.zero_grad(set_to_none=True)
        if method is not None:
            hb.remove_(model)


def gradients(training: Training, layers: list[str]) -> dict[str, Any]:
    """At the weights that the training has, of layers that hold less of their input: those of norms are exact."""
    size = training.settings.batch
    first, second = (training._batch(torch.arange(i * size, (i + 1) * size) % len(training.data.train), 0, augmented=False) for i in (0, 1))
    kinds = {"exact": gradient(training, first), CONTROL: gradient(training, second)}
    kinds |= {f"DropIT, keep {keep}": gradient(training, first, f"dropit(keep={keep}, exact_first=False)") for keep in KEEPS}
    found = {}
    for layer in layers:
        drawn = histograms({name: own[layer] for name, own in kinds.items()})
        others = [name for name in kinds if name != "exact"]
        cosines = {name: cosine(kinds[name][layer], kinds["exact"][layer]) for name in others}
        found[layer] = {**drawn, "overlap": {name: overlap(drawn, name) for name in others}, "cosine": cosines}
    return found


def ended(runs: Path) -> dict[str, dict[int, Path]]:
    """The last checkpoints of trainings that are done, of seeds that have both."""
    found = {
        kind: {int(p.name.rpartition("_s")[2]): p for p in runs.glob(f"{name}_s*[0-9]") if (p / "result.json").exists()}
        for kind, name in RUNS.items()
    }
    both = sorted(set(found["exact"]) & set(found["sparse"]))
    places = {kind: {s: latest(own[s] / "checkpoints") for s in both} for kind, own in found.items()}
    kept = [s for s in both if all(own[s] is not None for own in places.values())]
    if len(kept) < 2:
        sys.exit(
            f"study.py: {runs} has {len(kept)} seeds with the checkpoints of both {' and '.join(RUNS.values())}, and two are wanted. "
            "`halfback reproduce dropit_main --keep` trains them and keeps their checkpoints."
        )
    return {kind: {s: own[s] for s in kept} for kind, own in places.items()}  # type: ignore[misc]


def weights_of(place: Path) -> dict[str, Tensor]:
    return {name.removeprefix("model/"): t for name, t in load(place)[0].items() if name.startswith("model/")}


def study(places: dict[str, dict[int, Path]], data: str | None, device: str) -> dict[str, Any]:
    weights = {kind: {s: weights_of(p) for s, p in own.items()} for kind, own in places.items()}
    found: dict[str, Any] = {"gradients": {when: {} for when in WHEN}}
    for seed, place in places["exact"].items():
        own = Settings.from_json(load(place)[1]["settings"])
        training = Training(replace(own, root=data or own.root, device=device, compile=False, dtype="fp32"), place, say=lambda text: None)
        layers = chosen(training.model)
        for when in WHEN:
            if when == "end":
                training.model.load_state_dict(weights["exact"][seed])
            for layer, told in gradients(training, layers[::2]).items():
                found["gradients"][when].setdefault(layer, {})[seed] = told
    return {"parameters": parameters(weights, layers), **found}


# What it tells


def _mean(by_seed: dict[Any, dict[str, Any]], key: str, name: str) -> str:
    values = [told[key][name] for told in by_seed.values()]
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"


def _table(by_layer: dict[str, Any], key: str) -> str:
    names = list(next(iter(next(iter(by_layer.values())).values()))[key])
    lines = [f"| layer | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    lines += [f"| `{layer}` | {' | '.join(_mean(seeds, key, name) for name in names)} |" for layer, seeds in by_layer.items()]
    return "\n".join(lines)


def _least(by_layer: dict[str, Any], key: str, name: str) -> float:
    return min(statistics.fmean(told[key][name] for told in seeds.values()) for seeds in by_layer.values())


def verdict(found: dict[str, Any]) -> str:
    layers = {layer: told for layer, told in found["parameters"].items() if layer in found["gradients"]["start"]}
    own, other = (_least(layers, "overlap", name) for name in (SPARSE, SEEDED))

    def least(name: str) -> str:
        shares, cosines = (min(_least(found["gradients"][when], key, name) for when in WHEN) for key in ("overlap", "cosine"))
        return f"{shares:.2f} and {cosines:.2f}"

    kept = "; ".join(f"at keep {k} {least(f'DropIT, keep {k}')}" for k in KEEPS)
    return (
        f"In the layer where they share least, weights with DropIT share {own:.2f} of their histogram with exact training's; two "
        f"exact trainings with other seeds share {other:.2f}. Of gradients the least overlap and the least cosine are {kept}; with the "
        f"exact gradient of another batch {least(CONTROL)}, as histograms do not tell where values are."
    )


def markdown(results: dict[str, Any]) -> str:
    """The text of the results page. Every figure is of `results`."""
    found = results["found"]
    parts = [f"**The paper:** {PAPER}", "**Here:**", "Parameters after training, overlap with exact training's:"]
    parts += [_table(found["parameters"], "overlap")]
    for when in WHEN:
        parts += [
            f"Gradients at the {when} of exact training, overlap with the exact gradient's:",
            _table(found["gradients"][when], "overlap"),
        ]
        parts += [f"and their cosine with it, at the {when}:", _table(found["gradients"][when], "cosine")]
    made = f"{results['device_name']}; torch {results['versions']['torch']}; {results['date'][:10]}"
    commit = f"; commit {results['commit'][:10]}" if results["commit"] else ""
    seeds = ", ".join(results["seeds"])
    return "\n\n".join(
        [
            *parts,
            f"**Does it hold?** {verdict(found)}",
            f"`experiments/dropit_histograms/study.py` of `{results['of']}`. Seeds {seeds}. {made}{commit}.",
        ]
    )


def draw(results: dict[str, Any], path: Path) -> None:
    """Of the first seed: rows of parameters, and one each for gradients at the start and the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found, seed = results["found"], results["seeds"][0]
    columns = len(found["gradients"]["start"])
    cells = [(f"{layer}, trained", told[seed]) for layer, told in found["parameters"].items()]
    cells = cells[::2] + cells[1::2]  # convolutions, then norms
    cells += [(f"gradient of {layer}, {when}", told[seed]) for when in WHEN for layer, told in found["gradients"][when].items()]
    figure, axes = plt.subplots(len(cells) // columns, columns, figsize=(4.5 * columns, 12), squeeze=False, layout="constrained")
    for axis, (title, told) in zip(axes.flat, cells, strict=True):
        for name, shares in told["shares"].items():
            line = {"color": "black", "linewidth": 1.6} if name == "exact" else {"linewidth": 1.0}
            axis.stairs(shares, told["edges"], label=name, **line)
        axis.set_title(title, fontsize=9)
        axis.set_yscale("log")
        axis.tick_params(labelsize=7)
        axis.ticklabel_format(axis="x", style="sci", scilimits=(-2, 2))
    for line in axes:
        line[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=Path, default=Path("out/runs/dropit_main"), help="where they trained (default: %(default)s)")
    add("--data", help="where the data lies (default: as they were trained)")
    add("--device", default="cpu")
    add("--out", type=Path, default=Path(__file__).parent)
    add("--text", action="store_true", help="compute nothing: the text and the figure anew, from results.json in --out")
    args = parser.parse_args(argv)
    if not args.text:
        torch.backends.cudnn.allow_tf32 = False
        places = ended(args.runs)
        own = Settings.from_json(load(next(iter(places["exact"].values())))[1]["settings"])
        on = {"cifar100": "CIFAR-100", "fashion-mnist": "Fashion-MNIST"}.get(own.data, own.data)
        title = f"DropIT, figure 4: histograms of parameters and gradients, on {on}"
        order = 2 if own.device == "cuda" else 33
        results = {"name": args.out.name, "order": order, "title": title, "seeds": [str(s) for s in places["exact"]]}
        results |= {"of": args.runs.name, **surroundings(args.device), "found": study(places, args.data, args.device)}
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "results.json", results)
    if not (args.out / "results.json").exists():
        sys.exit(f"study.py: {args.out} has no results.json for --text.")
    results = json.loads((args.out / "results.json").read_text(encoding="utf-8"))
    results["text"] = markdown(results)
    write_json(args.out / "results.json", results)
    draw(results, args.out / "figure.png")
    print(results["text"])


if __name__ == "__main__":
    main()
