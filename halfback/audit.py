"""How far the approximate gradient is from the exact one, layer by layer; and what a training with it ends in.

For one batch with the exact gradient g, and masks i = 1 .. n with the approximate gradients h_i, of a layer's parameters:

    norm      |g|
    cosine    mean of  <h_i, g> / |h_i| |g|
    scale     mean of  <h_i, g> / |g|²                 how much of the exact gradient is there
    bias2     |E h - g|² / |g|²                        what no number of masks averages away
    variance  E |h - E h|² / |g|²                      from mask to mask; unbiased, from n >= 2 masks
    noise     the same of g from batch to batch of this size: what the training lives with anyway
    own       the same of g by the model's own random functions (dropout); 0 where it has none

bias2 comes from the mean of n masks, so its share of the variance, variance / n (and own / n), is subtracted; it is never below 0.
Of several batches norm and cosine are means, and the others ratios of means over the batches: sums over batches of what stands above
the line, over the sum of |g|². Noise is then the sample variance between batches; of one batch it comes from its halves, |g1 - g2|² / 4.
With random functions in the model g is a mean over n seeds; cosine and variance contain their part, and noise does too.

Exact is what `hb.exact` gives: Lean and Recompute, which are exact, stay on. The exact backward of the batch has to fit the memory.

Held: the exact gradient, the running mean of the approximate ones, and one of them, in float32 or better. Sums are float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .batches import check_batch, loss_of, output_of, resized, size_of
from .methods import METHODS, Method, parse
from .report import rows
from .rewrite import apply_, exact, remove_
from .untouched import applied_to, untouched

if TYPE_CHECKING:
    from .compare import Settings

PATIENCE = 3.0  # seconds before a progress bar appears
FAIR = (0.8, 1.25)  # a layer's scale outside of these is said in words


# The result


@dataclass(frozen=True)
class Layer:
    """The figures of one layer, or of all. None: its exact gradient is zero, or there were too few masks or samples to tell."""

    layer: str
    parameters: int
    norm: float
    cosine: float | None
    scale: float | None
    bias2: float | None
    variance: float | None
    noise: float | None
    own: float | None


WORSE: dict[str, Callable[[float], float]] = {  # larger is worse
    "cosine": lambda x: -x,
    "scale": lambda x: abs(x - 1),
    "bias2": lambda x: x,
    "variance": lambda x: x,
}


@dataclass(frozen=True)
class Audit:
    """What `audit` found. `print(audit)` is short; `audit.table()` has every layer."""

    model: str
    methods: str
    steps: int
    batches: int
    loss_exact: float
    loss: float
    layers: list[Layer]
    all: Layer

    def worst(self, n: int = 3, by: str = "cosine") -> list[Layer]:
        """The n worst layers by cosine, scale (farthest from 1), bias2 or variance."""
        if by not in WORSE:
            raise ValueError(f"worst(): by={by!r} is none of {', '.join(WORSE)}.")
        known = [layer for layer in self.layers if getattr(layer, by) is not None]
        return sorted(known, key=lambda layer: WORSE[by](getattr(layer, by)), reverse=True)[:n]

    def table(self) -> str:
        """A line for every layer, in the model's order, then one for all."""
        lines = [self._cells([*self.layers, self.all])]
        if self.changes_forward:
            lines.append(self._forward())
        return "\n".join(lines)

    def _cells(self, layers: Sequence[Layer]) -> str:
        names = ["norm", "cosine", "scale", "bias2", "variance", "noise"] + (["own"] if self.all.own else [])
        head = ["layer", *(n.replace("bias2", "bias²") for n in names)]
        return rows([head, *([layer.layer, *(_shown(n, getattr(layer, n)) for n in names)] for layer in layers)])

    @property
    def changes_forward(self) -> bool:
        return any(name in self.methods for name, kind in METHODS.items() if issubclass(kind, Method) and kind.changes_forward)

    def _forward(self) -> str:
        what = f"the loss is {self.loss_exact:.4g} exact, {self.loss:.4g} with it"
        return f"{self.methods} changes the forward: {what}. Its gradient is that of another network, so bias² is no error of it."

    def __str__(self) -> str:
        masks = f"masks: {self.steps}" + (" for each batch" if self.batches > 1 else "")
        head = f"halfback: {self.methods} on {self.model} against the exact gradient; batches: {self.batches}, {masks}"
        said = "\n".join(f"  {sentence}" for sentence in self.meaning())
        return f"{head}\n{self._cells([*self.worst(3), self.all])}\n{said}"

    def meaning(self) -> list[str]:
        """What the figures mean, in plain words."""
        said = []
        if self.all.cosine is None:
            said.append("The exact gradient is zero everywhere. Does the batch's function run this model?")
        elif not math.isfinite(self.all.cosine):
            said.append("A gradient is not finite: look at the loss, the data and the number format first.")
        elif self.all.bias2 == 0 and self.all.variance == 0:
            said.append("Every gradient is the exact one: nothing was approximated on this batch.")
        else:
            said += [*self._scale(), *self._bias(), *self._variance()]
        if self.all.own:
            said.append(f"The model's own random functions (dropout) have a variance of {self.all.own:.2g}, part of the two others.")
        if self.changes_forward:
            said.append(self._forward())
        return [*said, "The cosine does not rank methods by accuracy: compare by training, with `halfback compare`."]

    def _scale(self) -> list[str]:
        known = [layer.scale for layer in self.layers if layer.scale is not None]
        said = []
        for kind, off in (("smaller", [s for s in known if s < FAIR[0]]), ("larger", [s for s in known if s > FAIR[1]])):
            if off:
                said.append(
                    f"{len(off)} of {len(known)} layers get {statistics.median(off):.2f} of the exact gradient (median): "
                    f"a {kind} learning rate for them that AdamW hides and SGD does not."
                )
        return said

    def _bias(self) -> list[str]:
        if self.all.bias2 is None or not self.all.noise:
            return []
        means = "more steps do not average it away" if self.all.bias2 > self.all.noise else "one batch cannot show it, many steps can"
        return [f"bias² is {_times(self.all.bias2 / self.all.noise)} the batch's own noise: {means}."]

    def _variance(self) -> list[str]:
        if self.all.variance is None or not self.all.noise:
            return []
        masks = max(0.0, self.all.variance - (self.all.own or 0))
        like = self.all.noise / (self.all.noise + masks)
        return [f"The masks' variance is {_times(masks / self.all.noise)} that noise: as a batch of {like:.2f} of the size."]

    def to_json(self) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Audit:
        known = {f.name for f in dataclasses.fields(cls)}
        if set(data) != known:
            wrong = ", ".join(sorted(set(data) ^ known))
            raise ValueError(f"Audit.from_json(): missing or unknown: {wrong}. Wanted: {', '.join(sorted(known))}.")
        return cls(**{**data, "layers": [Layer(**layer) for layer in data["layers"]], "all": Layer(**data["all"])})


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if name == "cosine" else f"{value:.2f}" if name == "scale" else f"{value:.2g}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times" if ratio >= 1 else f"{ratio:.2g} of"


def _plain(tree: Any) -> Any:
    """Ready for JSON, which has no word for what is not finite."""
    if isinstance(tree, dict):
        return {k: _plain(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(v) for v in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


# Left as it was


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else it would seed what the user has not started yet
        torch.cuda.manual_seed_all(seed)


# Gradients


class Layers:
    """The parameters that are trained, by the module that owns them; the last of all figures is of all of them."""

    def __init__(self, model: nn.Module):
        named = [(n.replace("_orig_mod.", ""), p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError(f"audit(): {type(model).__name__} has no parameter that requires a gradient.")
        owners = [n.rpartition(".")[0] or type(model).__name__ for n, _ in named]
        self.names = list(dict.fromkeys(owners))
        self.parameters = [p for _, p in named]
        self.where = torch.tensor([self.names.index(owner) for owner in owners])
        self.counts = [int(c) for c in self.total([torch.tensor(float(p.numel()), dtype=torch.float64) for p in self.parameters])]

    def total(self, each: Sequence[Tensor]) -> Tensor:
        """From a number a parameter to one a layer, and of all."""
        found = torch.stack([t.to(each[0].device) for t in each]).cpu()
        layers = torch.zeros(len(self.names), dtype=torch.float64).index_add_(0, self.where, found)
        return torch.cat((layers, layers.sum()[None]))

    def dots(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return self.total([dot(x, y) for x, y in zip(a, b, strict=True)])

    def zeros(self) -> Tensor:
        return torch.zeros(len(self.names) + 1, dtype=torch.float64)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.sum(a * b, dtype=torch.float64)


def widened(g: Tensor) -> Tensor:
    g = g.detach()
    g = g if g.layout == torch.strided else g.to_dense()
    return g.float() if g.element_size() < 4 else g


class Running:
    """The mean of gradients that come one by one, and their variance (Welford): of equal gradients it is 0 exactly."""

    def __init__(self, layers: Layers):
        self.layers, self.n = layers, 0
        self.mean: list[Tensor] = []
        self.spread = layers.zeros()

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.n += 1
        self.mean = self.mean or [torch.zeros_like(g) for g in gradients]
        each = []
        for mean, g in zip(self.mean, gradients, strict=True):
            off = g - mean
            each.append(dot(off, off))
            mean.add_(off, alpha=1 / self.n)
        self.spread += self.layers.total(each) * ((self.n - 1) / self.n)

    @property
    def variance(self) -> Tensor:
        return self.spread / (self.n - 1) if self.n > 1 else torch.full_like(self.spread, math.nan)


class Runs:
    """Forward and backward of a batch, exact or not, without a trace in `p.grad`."""

    def __init__(self, model: nn.Module, rewind: Callable[[], None], tick: Callable[[], Any] = lambda: None):
        self.model, self.layers = model, Layers(model)
        self.rewind, self.tick = rewind, tick

    def approximate(self, batch: Any, seed: int) -> tuple[list[Tensor], float]:
        self.rewind()
        _set_seed(seed)
        with torch.enable_grad():
            loss = loss_of(self.model, batch)
            found = torch.autograd.grad(loss, self.layers.parameters, materialize_grads=True)
        self.tick()
        return [widened(g) for g in found], float(loss.detach())

    def exact(self, batch: Any, seed: int) -> tuple[list[Tensor], float]:
        with exact(self.model):
            return self.approximate(batch, seed)


# The audit


def audit(
    model: nn.Module, batch: Any, steps: int = 8, methods: str | Method | Sequence[Method] | None = None, progress: bool | None = None
) -> Audit:
    """The approximate gradient against the exact one, layer by layer. The model is left as it was.

    model     with methods applied; or give methods
    batch     a batch (batches.py), or several: a list of tuples, lists, dicts or functions, or an iterator, as itertools.islice(loader, 4).
              A list of tensors is one batch, as a data loader gives it
    steps     how many masks are drawn for each batch
    methods   a method, several, or their text as "sbp(keep=0.5)": applied for the audit and removed after it
    progress  a bar; None: where it takes longer than a few seconds
    """
    model = _inner(model, "audit")
    if steps < 1:
        raise ValueError(f"audit(): steps={steps} must be at least 1, and 2 or more for variance and bias².")
    several = batches_of(batch)
    count = len(several) if isinstance(several, list) else None
    with _with(model, methods) as text, untouched(model) as rewind, _bar(_runs(count, steps), progress) as tick:
        tally = Tally(Runs(model, rewind, tick), steps)
        for one in several:
            check_batch(model, one, "audit")
            tally.add(one)
        if not tally.batches:
            raise ValueError("audit(): there is no batch to audit: the list or iterator given as batch is empty.")
        layers = tally.figures()
    losses = statistics.fmean(tally.losses_exact), statistics.fmean(tally.losses)
    return Audit(type(model).__name__, text, steps, tally.batches, *losses, layers[:-1], layers[-1])


def _runs(batches: int | None, steps: int) -> int | None:
    """How many backward passes an audit takes, of a model without random functions; None: who knows how many batches an iterator has."""
    return None if batches is None else batches * (1 + steps) + 1 + 2 * (batches == 1)


def _inner(model: Any, verb: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}(): expected a torch.nn.Module, found {type(model).__name__}.")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model  # each process audits its own batch


def batches_of(batch: Any) -> Iterable[Any]:
    """One batch or several, as several."""
    if isinstance(batch, list):
        several = bool(batch) and all(isinstance(b, (tuple, list, Mapping)) or (callable(b) and not isinstance(b, Tensor)) for b in batch)
        return batch if several else [batch]
    one = isinstance(batch, (Tensor, tuple, Mapping, str)) or callable(batch) or not isinstance(batch, Iterable)
    return [batch] if one else batch


@contextlib.contextmanager
def _with(model: nn.Module, methods: Any) -> Iterator[str]:
    """Methods for a while; their text."""
    if methods is None:
        yield _text(model, "audit")
        return
    given = parse(methods) if isinstance(methods, str) else (methods,) if isinstance(methods, Method) else tuple(methods)
    if not given:
        raise ValueError(f'audit(): methods={methods!r} is exact, so there is nothing to audit. Give one as "sbp(keep=0.5)".')
    apply_(model, *given)
    try:
        yield _text(model, "audit")
    finally:
        remove_(model)


def _text(model: nn.Module, verb: str) -> str:
    found = [m for applied in applied_to(model) for m in applied.report.methods]
    if not found:
        raise ValueError(
            f"{verb}(): {type(model).__name__} has no method applied, so there is nothing to look at. Call "
            f"hb.apply_(model, hb.SBP(keep=0.5)) first" + (', or give methods="sbp(keep=0.5)".' if verb == "audit" else ".")
        )
    return "+".join(str(m) for m in found)


@contextlib.contextmanager
def _bar(total: int | None, progress: bool | None) -> Iterator[Callable[[], Any]]:
    try:
        from tqdm import tqdm
    except ImportError:
        progress = False
    if progress is False:
        yield lambda: None
        return
    with tqdm(total=total, unit="backward", desc="audit", leave=False, delay=0 if progress else PATIENCE) as bar:
        yield bar.update


class Tally:
    """The sums over batches that the figures come from; one number a layer, and of all."""

    def __init__(self, runs: Runs, steps: int):
        self.runs, self.steps = runs, steps
        self.batches, self.seed = 0, 0
        self.random: bool | None = None  # does the model have random functions of its own? Known after the first batch
        self.losses_exact: list[float] = []  # of each batch the mean
        self.losses: list[float] = []
        zeros = runs.layers.zeros
        self.norm, self.square, self.along, self.bias, self.variance, self.own = (zeros() for _ in range(6))
        self.cosine, self.cosines = zeros(), zeros()
        self.between = Running(runs.layers)
        self.last: Any = None

    def draw(self, run: Callable, batch: Any, losses: list[float]) -> list[Tensor]:
        self.seed += 1
        gradients, loss = run(batch, self.seed)
        losses.append(loss)
        return gradients

    def add(self, batch: Any) -> None:
        dots = self.runs.layers.dots
        losses: list[float] = []
        wanted = self.exact(batch)
        g, found = wanted.mean, Running(self.runs.layers)
        square = dots(g, g)
        for _ in range(self.steps):
            h = self.draw(self.runs.approximate, batch, losses)
            along, own = dots(h, g), dots(h, h)
            known = square > 0
            self.cosine += torch.where(known, cosines(along, own, square), 0.0)
            self.cosines += known
            self.along += along / self.steps
            found.add(h)
            del h
        off = [a - b for a, b in zip(found.mean, g, strict=True)]
        own = wanted.variance if self.random else torch.zeros_like(square)
        self.bias += dots(off, off) - found.variance / self.steps - own / wanted.n
        self.norm += square.sqrt()
        self.square += square
        self.variance += found.variance
        self.own += own
        self.between.add(g)
        self.losses.append(statistics.fmean(losses))
        self.batches += 1
        self.last = batch

    def exact(self, batch: Any) -> Running:
        """The exact gradient; of a model with random functions, the mean over seeds."""
        found, losses = Running(self.runs.layers), list[float]()
        found.add(self.draw(self.runs.exact, batch, losses))
        if self.random is None:
            found.add(self.draw(self.runs.exact, batch, losses))
            self.random = bool((found.spread != 0).any())
        for _ in range(max(2, self.steps) - found.n if self.random else 0):
            found.add(self.draw(self.runs.exact, batch, losses))
        self.losses_exact.append(statistics.fmean(losses))
        return found

    def noise(self) -> Tensor | None:
        if self.batches == 1:
            return self.halves()
        own = self.own / self.batches  # a mean over seeds has less of it than one gradient
        return self.between.variance + own * (1 - 1 / max(2, self.steps))

    def halves(self) -> Tensor | None:
        """From the halves of one batch. The gradient is their mean, or their sum where the loss is a sum over samples: the nearer one."""
        size = size_of(self.last)
        if size is None or size < 2:
            return None
        half, dots = size // 2, self.runs.layers.dots
        try:
            a, b = (self.draw(self.runs.exact, part(self.last, i * half, (i + 1) * half), []) for i in (0, 1))
        except (ValueError, RuntimeError):  # what runs on the whole may not run on a half, as BatchNorm on one sample
            return None
        both = [x + y for x, y in zip(a, b, strict=True)]
        share = 1.0 if dots(both, self.between.mean)[-1] > 0.75 * dots(both, both)[-1] else 0.5
        off = [x - y for x, y in zip(a, b, strict=True)]
        return share**2 * dots(off, off) * (2 * half / size)

    def figures(self) -> list[Layer]:
        layers, n = self.runs.layers, self.batches
        noise = self.noise()
        relative = {"scale": self.along, "bias2": self.bias.clamp_min(0), "variance": self.variance, "noise": noise, "own": self.own}
        if noise is not None and n > 1:
            relative["noise"] = noise * n  # the others are sums over batches
        columns = {"norm": self.norm / n, "cosine": self.cosine / self.cosines}
        columns |= {name: torch.full_like(self.square, math.nan) if v is None else v / self.square for name, v in relative.items()}
        unknown = {name for name, v in relative.items() if v is None} | ({"bias2", "variance"} if self.steps < 2 else set())
        found = []
        for i, (name, count) in enumerate(zip([*layers.names, "all"], layers.counts, strict=True)):
            zero = self.square[i] == 0
            values = {k: None if k != "norm" and (zero or k in unknown) else float(v[i]) for k, v in columns.items()}
            found.append(Layer(name, count, **values))  # type: ignore[arg-type]
        return found


def cosines(along: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """From <x, y>, |x|² and |y|²: 1 exactly where they are equal, however small. Of a gradient that is zero it is 0."""
    return torch.where((a == 0) | (b == 0), 0.0, (along / b / (a / b).sqrt()).clamp(-1, 1))


def part(batch: Any, start: int, stop: int) -> Any:
    """Some of a batch's samples."""
    size = size_of(batch)
    return tree_map_only(
        Tensor, lambda t: t[start:stop] if t.ndim and len(t) == size else t, dict(batch) if isinstance(batch, Mapping) else batch
    )


# In a training loop


class Monitor:
    """The cheap form for a training loop: one mask, a part of the batch, every so many steps. Training goes on as if it were not there.

        monitor = hb.Monitor(model, every=100)
        for batch in loader:
            monitor(batch)
            ...

    every    which calls look; the others return at once
    share    of the batch: the exact backward of a quarter fits where the approximate one of the whole did. A function is used whole
    cosine   of all parameters: below this a warning says so
    scale    of all parameters: outside of these a warning says so

    Call it where the training's forward is, so also under its autocast. In a compiled model another batch size and exact gradients are
    compiled apart: give share=1, and a large `every`. With dropout the exact and the approximate gradient have different noise, which
    lowers the cosine.
    """

    VANISHED = 1e-3  # of the first exact norm

    def __init__(
        self, model: nn.Module, every: int = 100, share: float = 0.25, cosine: float = 0.5, scale: tuple[float, float] = (0.25, 4.0)
    ):
        self.model = _inner(model, "Monitor")
        if every < 1:
            raise ValueError(f"Monitor(): every={every} must be at least 1.")
        if not 0 < share <= 1:
            raise ValueError(f"Monitor(): share={share} must be in (0, 1]: the share of a batch that is looked at.")
        self.methods = _text(self.model, "Monitor")
        self.every, self.share, self.cosine, self.scale = every, share, cosine, scale
        self.step = 0
        self.history: list[dict[str, Any]] = []
        self._norms: dict[str, list[tuple[int, float, float]]] = {}
        self._warned: set[str] = set()

    def __call__(self, batch: Any) -> dict[str, Any] | None:
        self.step += 1
        return None if self.step % self.every else self.look(batch)

    def look(self, batch: Any) -> dict[str, Any]:
        """Look now; what was found is also added to `history`."""
        check_batch(self.model, batch, "Monitor")
        _text(self.model, "Monitor")
        with untouched(self.model) as rewind:
            runs = Runs(self.model, rewind)
            some = self._some(batch)
            (g, _), (h, _) = runs.exact(some, self.step), runs.approximate(some, self.step)
            layers = runs.layers
            square, own, along = layers.dots(g, g), layers.dots(h, h), layers.dots(h, g)
        found = self._note(layers.names, square, own, along)
        for kind, text in self._troubles(found).items():
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(f"halfback, step {self.step}: {text}", stacklevel=3)
        return found

    def _some(self, batch: Any) -> Any:
        size = size_of(batch)
        return batch if size is None else resized(batch, min(size, max(2, round(self.share * size))))

    def _note(self, names: list[str], square: Tensor, own: Tensor, along: Tensor) -> dict[str, Any]:
        cosine = cosines(along, own, square)
        known = [(float(c), name) for c, s, name in zip(cosine[:-1], square, names, strict=False) if s > 0]
        for name, wanted, got in zip(names, square.sqrt().tolist(), own.sqrt().tolist(), strict=False):
            self._norms.setdefault(name, []).append((self.step, wanted, got))
        zero = bool(square[-1] == 0)
        worst = min(known, default=(None, None))
        self.history.append(
            {
                "step": self.step,
                "cosine": None if zero else float(cosine[-1]),
                "scale": None if zero else float(along[-1] / square[-1]),
                "norm_exact": float(square[-1].sqrt()),
                "norm": float(own[-1].sqrt()),
                "worst": worst[1],
                "worst_cosine": worst[0],
            }
        )
        return self.history[-1]

    def _troubles(self, now: dict[str, Any]) -> dict[str, str]:
        """What is wrong, by kind."""
        if not math.isfinite(now["norm_exact"]):
            return {
                "finite": "the exact gradient is not finite, so it is not the method: look at the loss, the data and the learning rate."
            }
        if not math.isfinite(now["norm"]):
            return {"finite": f"the gradient of {self.methods} is not finite, and the exact one is. Train on with hb.exact(model)."}
        said, more = {}, "Keep more, or approximate fewer layers; hb.audit(model, batch) says where."
        first = next((h["norm_exact"] for h in self.history if h["norm_exact"]), 0.0)
        if now["norm_exact"] < self.VANISHED * first:
            fell = f"the exact gradient's norm fell from {first:.2g} to {now['norm_exact']:.2g}"
            said["vanished"] = f"{fell}. If the training has not converged, gradients vanish: monitor.norms() says in which layers."
        if now["cosine"] is not None and now["cosine"] < self.cosine:
            found = f"the cosine of {self.methods}'s gradient with the exact one is {now['cosine']:.2f}, below {self.cosine}"
            said["cosine"] = f"{found}; the worst layer is {now['worst']} with {now['worst_cosine']:.2f}. {more}"
        if now["scale"] is not None and not self.scale[0] <= now["scale"] <= self.scale[1]:
            found = f"{self.methods} gives {now['scale']:.2f} of the exact gradient, outside {self.scale[0]} to {self.scale[1]}"
            said["scale"] = f"{found}: a learning rate of its own, which AdamW hides and SGD does not. {more}"
        return said

    def norms(self) -> dict[str, list[tuple[int, float, float]]]:
        """For each layer (step, norm of the exact gradient, norm of the approximate one): do gradients vanish?"""
        return {name: list(seen) for name, seen in self._norms.items()}

    def to_json(self) -> dict[str, Any]:
        settings = {"model": type(self.model).__name__, "methods": self.methods, "every": self.every, "share": self.share}
        return _plain({**settings, "steps": self.step, "history": self.history, "norms": self.norms()})


# What a training ends in: section 8.6 of the SBP paper, with the control that it lacks


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
    result = _plain({**where, "runs": entries})
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
