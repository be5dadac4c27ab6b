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
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .batches import check_batch, loss_of, size_of
from .methods import METHODS, Method, parse
from .page import finite
from .report import rows
from .rewrite import apply_, exact, remove_
from .untouched import applied_to, untouched

if TYPE_CHECKING:
    pass

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

    __repr__ = __str__  # what notebooks show

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
        return finite(dataclasses.asdict(self))

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


# Left as it was


def set_seed(seed: int) -> None:
    """As torch.manual_seed, which also tells devices of kinds that are not there, in 0.3 ms."""
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
        set_seed(seed)
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
    model = unwrapped(model, "audit")
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


def unwrapped(model: Any, verb: str) -> nn.Module:
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
        yield method_text(model, "audit")
        return
    given = parse(methods) if isinstance(methods, str) else (methods,) if isinstance(methods, Method) else tuple(methods)
    if not given:
        raise ValueError(f'audit(): methods={methods!r} is exact, so there is nothing to audit. Give one as "sbp(keep=0.5)".')
    apply_(model, *given)
    try:
        yield method_text(model, "audit")
    finally:
        remove_(model)


def method_text(model: nn.Module, verb: str) -> str:
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
