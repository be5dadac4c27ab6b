"""What a training with approximate gradients ends in: section 8.6 of the SBP paper, with the control that it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .audit import Runs, batches_of, dot
from .batches import check_batch, output_of
from .page import finite
from .report import rows
from .untouched import untouched

if TYPE_CHECKING:
    from .compare import Settings


def similarity(a: nn.Module | Mapping[str, Tensor], b: nn.Module | Mapping[str, Tensor]) -> dict[str, Any]:
    """The cosine of two models' weights, as {"layers": {layer: cosine}, "all": cosine}. None: weights that are all zero.

    Of a model its parameters count, of a state dict all floating tensors but the running statistics of norms.
    """
    one, two = _weights(a), _weights(b)
    _check_same(one, two)
    sums: dict[str, list[float]] = {}
    for name, x in one.items():
        y = two[name].to(x.device)
        found = [float(dot(p.double(), q.double())) for p, q in ((x, y), (x, x), (y, y))]
        for key in (name.rpartition(".")[0] or "(own)", ""):
            sums[key] = [s + f for s, f in zip(sums.get(key, [0.0] * 3), found, strict=True)]
    cosine = {key: along / math.sqrt(xx * yy) if xx * yy else None for key, (along, xx, yy) in sums.items()}
    every = cosine.pop("")
    return {"layers": cosine, "all": every}


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _weights(of: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(of, nn.Module):
        found = dict(of.named_parameters())
    elif isinstance(of, Mapping):
        found = {k: v for k, v in of.items() if isinstance(v, Tensor) and k.rpartition(".")[2] not in STATISTICS}  # type: ignore[misc]
    else:
        raise TypeError(f"similarity(): expected models or state dicts, found {type(of).__name__}.")
    return {k.replace("_orig_mod.", ""): v.detach() for k, v in found.items() if v.is_floating_point()}


def _check_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    if not one or one.keys() != two.keys():
        only = [f"only in {name}: {', '.join(sorted(x)[:3])}" for name, x in (("a", set(one) - set(two)), ("b", set(two) - set(one))) if x]
        raise ValueError(f"similarity(): the two have different weights. {'; '.join(only) or 'There are none'}.")
    for name in one:
        if one[name].shape != two[name].shape:
            raise ValueError(f"similarity(): {name} is {tuple(one[name].shape)} in a and {tuple(two[name].shape)} in b.")


def consistency(a: nn.Module, b: nn.Module, batches: Any) -> float:
    """The share of samples (or positions) for which two models' highest score is of the same class; in eval mode.

    batches   a batch or several, as in `audit`. Classes are the last axis of scores, or the second of four or more.
    """
    same = count = 0
    with _eval(a), _eval(b), torch.no_grad():
        for batch in batches_of(batches):
            x, y = _predicted(a, batch), _predicted(b, batch)
            if x.shape != y.shape:
                raise ValueError(f"consistency(): a predicts {tuple(x.shape)} and b {tuple(y.shape)} for the same batch.")
            same += int((x == y.to(x.device)).sum())
            count += x.numel()
    if not count:
        raise ValueError("consistency(): there is no sample in batches.")
    return same / count


@contextlib.contextmanager
def _eval(model: nn.Module) -> Iterator[None]:
    flags = [(m, m.training) for m in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _predicted(model: nn.Module, batch: Any) -> Tensor:
    check_batch(model, batch, "consistency")
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, Tensor):
        out = model(batch)
    elif callable(batch):
        raise ValueError("consistency(): a function returns a loss, and predictions are wanted; give tensors, tuples or dicts.")
    else:
        out = model(batch[0]) if len(batch) == 2 else model(*batch)
    scores = output_of(out)
    if not isinstance(scores, Tensor) or scores.ndim < 2:
        raise ValueError(f"consistency(): {type(model).__name__} returned {type(scores).__name__}, and scores of classes are wanted.")
    return scores.argmax(1 if scores.ndim > 3 else -1)


BATCHES, WEIGHTS = "exact, other batches", "exact, other weights"  # the controls: how far apart two exact trainings end


def compare_trained(settings: Settings, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """Exact training beside training with each method from the same weights on the same batches: how far apart do they end? And,
    what that has to be compared with, beside exact training from the same weights on other batches, and from other weights.

    After every epoch the cosine of the weights with the exact run's, by layer, and the norms of the exact and the approximate gradient
    on one batch, by layer; at the end accuracy, and the share of test images for which the prediction is the exact run's.
    """
    from . import compare as pieces

    methods = [m for m in pieces.split_methods(settings.methods) if m != "exact"]
    if settings.seeds < 2:
        raise ValueError(f"compare_trained(): seeds={settings.seeds} must be at least 2: one seed cannot tell a difference from chance.")
    data = pieces._on_device(pieces.load_data(settings.data), settings.device)
    begin = time.perf_counter()
    entries: list[dict[str, Any]] = [{"run": name, "seeds": []} for name in ("exact", *methods, BATCHES, WEIGHTS)]
    with torch.random.fork_rng(enabled=True):
        for seed in range(settings.seeds):
            say(f"seed {seed + 1} of {settings.seeds}: {len(entries)} runs of {settings.epochs} epochs")
            for entry, found in zip(entries, _trained(settings, methods, seed, data), strict=True):
                entry["seeds"].append({"seed": seed, **found})
    for entry in entries:
        values = {k: [s[k] for s in entry["seeds"]] for k in ("accuracy", "consistency", "similarity")}
        entry["mean"] = {k: statistics.fmean(v) for k, v in values.items()}
        entry["std"] = {k: statistics.stdev(v) for k, v in values.items()}
    where = {"settings": dataclasses.asdict(settings), **pieces.surroundings(settings.device), "seconds": time.perf_counter() - begin}
    result = finite({**where, "runs": entries})
    say(trained_table(result))
    return result


def _trained(settings: Settings, methods: list[str], seed: int, data: Any) -> list[dict[str, Any]]:
    """All runs of one seed."""
    from . import compare as pieces

    def fresh(weights: int) -> nn.Module:
        torch.manual_seed(weights)
        return pieces.load_model(settings.model, data.shape, data.classes)

    other = seed + settings.seeds  # a seed that no other run has
    begin = functools.partial(pieces.start, settings=settings, steps=settings.epochs * pieces.steps_per_epoch(settings, data))
    runs = [begin(m, seed, fresh(seed)) for m in ("exact", *methods)]
    runs += [begin("exact", other, fresh(seed)), begin("exact", seed, fresh(other))]
    batch = data.x_train[: settings.batch], data.y_train[: settings.batch]
    epochs: list[list[dict[str, Any]]] = [[] for _ in runs]
    for epoch in range(settings.epochs):
        for run in runs:
            pieces.train_epoch(run, data, epoch, settings.batch, lambda: None)
        for run, seen in zip(runs, epochs, strict=True):
            alike = similarity(runs[0].model, run.model)
            seen.append({"similarity": alike["all"], "layers": alike["layers"], "norms": gradient_norms(run.model, batch)})
    test = list(zip(data.x_test.split(settings.batch), data.y_test.split(settings.batch), strict=True))
    return [
        {
            "accuracy": pieces.accuracy(run.model, data, settings.batch),
            "consistency": consistency(runs[0].model, run.model, test),
            "similarity": seen[-1]["similarity"],
            "epochs": seen,
        }
        for run, seen in zip(runs, epochs, strict=True)
    ]


def gradient_norms(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
    """For each layer the norm of the exact gradient and of the approximate one, of one mask. The model is left as it was."""
    with untouched(model) as rewind:
        runs = Runs(model, rewind)
        norms = [runs.layers.dots(g, g).sqrt().tolist() for g, _ in (run(batch, 0) for run in (runs.exact, runs.approximate))]
    return dict(zip([*runs.layers.names, "all"], zip(*norms, strict=True), strict=True))


def trained_table(result: dict[str, Any]) -> str:
    """What `compare_trained` found, as text."""
    runs, epochs = result["runs"], result["settings"]["epochs"]
    shown = [["", "accuracy", "same prediction", "cosine of weights"]]
    for run in runs:
        cells = [(run["mean"][k], run["std"][k]) for k in ("accuracy", "consistency", "similarity")]
        percent = [f"{100 * mean:.1f} ± {100 * std:.1f} %" for mean, std in cells[:2]]
        shown.append([run["run"], *percent, f"{cells[2][0]:.3f} ± {cells[2][1]:.3f}"])
    shown[1][2:] = ["", ""]  # exact is what the others are compared with
    each = [["cosine of weights after epoch", *(str(e + 1) for e in range(epochs))]]
    each += [[run["run"], *(f"{_over_seeds(run, e, 'similarity'):.3f}" for e in range(epochs))] for run in runs[1:]]
    norms = [["norm of gradients, first and last epoch", *(run["run"] for run in runs[:-2])]]
    for layer in runs[0]["seeds"][0]["epochs"][0]["norms"]:
        ends = [[_over_seeds(run, e, "norms", layer, 1) for e in (0, epochs - 1)] for run in runs[:-2]]
        norms.append([layer, *(f"{first:.2g}, {last:.2g}" for first, last in ends)])
    seeds = f"Against exact from the same weights on the same batches; mean ± standard deviation over {result['settings']['seeds']} seeds."
    return "\n\n".join([rows(shown), rows(each), rows(norms), seeds])


def _over_seeds(run: dict[str, Any], epoch: int, *keys: Any) -> float:
    """The mean of what lies under these keys of an epoch."""
    found = [functools.reduce(lambda tree, key: tree[key], keys, s["epochs"][epoch]) for s in run["seeds"]]
    return statistics.fmean(math.nan if v is None else v for v in found)
