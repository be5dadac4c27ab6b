"""A memory budget, and the methods that meet it at the least cost.

    peak = max over places p of   sum of what the places before p hold  +  the most that p itself has alive
    time = max(sum of the places' seconds on the GPU, what the CPU needs to send them off)

A *place* is a block, or what stands between two blocks. What each holds, has alive and takes is counted on fake tensors, once for
every way in which all blocks can be run; a mixed integer program (scipy's HiGHS) then chooses the way of each block. What it chose
is counted again as a whole before it is believed; and on a GPU that it fits on, it is run for a few steps to say how long they take.

NOTE [exact first]
 1. Choices are tried in tiers: exact ones (as it is, Lean, Recompute, the loss in parts); exact ones that are tighter and slower (a
    batch in parts); then approximate ones by the accuracy that they were seen to cost. `prefer="fast"` puts all that cost at most
    `POINTS` of accuracy into the first tier.
 2. Within a tier, choices come in a fixed order, from the roomiest to the tightest, whatever the budget; the first that fits is the
    plan. So less budget never means more memory.
 3. The gradient's cosine does not rank methods by accuracy, so nothing here uses it: costs are accuracies of trained models.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import blocks as finding
from . import rewrite
from .batches import Batch, check_batch, loss_of, resized, size_of
from .extras import install
from .heads import find_heads
from .memory import Profile, profile
from .methods import SBP, ChunkedLoss, DropIT, Lean, Method, Recompute, from_json
from .report import readable
from .rewrite import Report, remove_
from .timing import Clock, Rates, time_of_host, time_of_step
from .untouched import untouched
from .ways import Way, count, solve
from .weightless import faked, weightless

PREFER = ("exact", "fast")
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
CONTEXT = 768 * 2**20  # what CUDA itself takes on a device
UNUSED = 0.12  # the share of what the allocator reserves that lies between tensors, or in blocks that no other tensor fits
WORKSPACE = 32 * 2**20, 128 * 2**20  # what libraries take for a moment, and no count sees: of matrices, of convolutions
UNSEEN = 0.015  # the share of the peak that a count may miss
MOST = 2**20  # samples; no training has more
PATIENCE = 8  # guesses before a range is halved instead
FEW = 4  # samples of a step that the GPU is done with before the CPU is
STEP = 0.96  # from one level of memory to the next
POINTS = 1.0  # of accuracy: what "fast" may cost
BLOCKS = "paper"  # where SBP may work: where it was seen to cost little
SLACK = 1.02  # a choice whose estimate is above the budget by this is not counted as a whole
PRESETS = Path(__file__).with_name("presets.json")


def parse_size(text: Any, asked: str = "plan()") -> int:
    """Bytes of a size as people write it: "10GiB", "16 GB", 2**30.

    >>> parse_size("1.5GiB")
    1610612736
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", text, re.IGNORECASE) if isinstance(text, str) else None
    unit = match[2].lower() if match else "?"
    unit = unit if unit in UNITS else unit + "b"
    size = float(match[1]) * UNITS[unit] if match is not None and unit in UNITS else 0
    if not 1 <= size < 2**63:
        raise ValueError(f"{asked}: {text!r} is no size. Write it as '10GiB', '800MiB' or '16GB', or as a number of bytes.")
    return int(size)


# What accuracy a method was seen to cost


@dataclass(frozen=True)
class Preset:
    """Points of accuracy that a method cost, on average, in a training that somebody can run again."""

    methods: str
    family: str
    points: float
    error: float  # of that mean: its standard error over seeds
    source: str


def presets() -> list[Preset]:
    return [Preset(**entry) for entry in json.loads(PRESETS.read_text())["presets"]]


def points_of(methods: str, family: str) -> tuple[float | None, str]:
    """The accuracy that methods cost, and where that is from; None where nobody has measured it."""
    for known in (p for want in (family, None) for p in presets() if want in (None, p.family)):
        if known.methods == methods:
            told = "" if known.family == family else f", a {known.family}"
            return known.points, f"{known.source}{told}, standard error {known.error}"
    return None, "not measured"


def family_of(model: nn.Module, found: Sequence[finding.Named]) -> str:
    """What a model is, as far as accuracies carry over: blocks with convolutions over positions, or without."""
    convolutions = any(isinstance(m, finding.CONVOLUTIONS) and math.prod(m.kernel_size) > 1 for _, block in found for m in block.modules())
    return "convnet" if convolutions else "transformer"


# Choosing


@dataclass(frozen=True)
class Kind:
    """What is the same for the whole model: who rewrites what layers hold, and the share of positions that SBP keeps in its blocks."""

    base: str = ""  # "", "lean", "dropit"
    keep: float | None = None
    sparing: bool = False  # the base works in recomputed blocks too
    parts: int = 1  # in which a batch goes through recomputed blocks
    chunked: bool = False  # the loss of a large vocabulary

    @property
    def exact(self) -> bool:
        return self.base != "dropit" and self.keep is None

    def methods(self, family: str, streamed: Sequence[str], recomputed: Sequence[str]) -> tuple[Method, ...]:
        found: list[Method] = []
        if self.keep is not None and streamed:
            found.append(SBP(keep=self.keep, layers=tuple(streamed)))
        if self.base == "lean":
            found.append(Lean())
        if self.base == "dropit":
            found.append(_dropit(family))
        if recomputed:
            found.append(Recompute(layers=tuple(recomputed), sparing=self.sparing, parts=self.parts))
        if self.chunked:
            found.append(ChunkedLoss())
        return tuple(found)

    def preset(self, family: str) -> str:
        """How the presets call it."""
        parts = [str(SBP(keep=self.keep, layers=BLOCKS))] if self.keep is not None else []
        return "+".join([*parts, *([str(_dropit(family))] if self.base == "dropit" else [])])


def _dropit(family: str) -> DropIT:
    """As the evidence has it: a tenth of the entries for transformers, a fifth for convolutions."""
    return DropIT(keep=0.1, activation_bits=4) if family == "transformer" else DropIT(keep=0.2)


EXACT = (Kind(), Kind("lean"))
TIGHT = (Kind("lean", sparing=True), Kind("lean", parts=2), Kind("lean", parts=4))  # exact too, slower, for when these are too large
APPROXIMATE = (Kind("dropit"), *(Kind("lean", keep, sparing) for keep in (0.5, 0.25) for sparing in (False, True)), Kind("dropit", 0.5))


@dataclass
class Choice:
    """The way of each block, as the program chose it."""

    kind: Kind
    methods: tuple[Method, ...]
    peak: float  # estimated
    seconds: float


@dataclass
class Point:
    """A choice, as a rule counted as a whole."""

    methods: tuple[Method, ...]
    peak: int
    seconds: float
    points: float | None  # of accuracy; 0 where exact, None where nobody has measured it
    source: str

    @property
    def exact(self) -> bool:
        return not any(isinstance(m, (SBP, DropIT)) for m in self.methods)

    @property
    def text(self) -> str:
        return " + ".join(str(m) for m in self.methods) or "exact"

    @property
    def label(self) -> str:
        """Short: with numbers of blocks instead of their names."""
        return " + ".join(_short(m) for m in self.methods) or "plain"


def _short(m: Method) -> str:
    if isinstance(m, (SBP, Recompute)) and isinstance(m.layers, tuple):
        name = f"sbp(keep={m.keep})" if isinstance(m, SBP) else "recompute"
        how = "" if isinstance(m, SBP) else ", sparing" * m.sparing + f", in {m.parts} parts" * (m.parts > 1)
        return f"{name} of {len(m.layers)} block{'s' * (len(m.layers) > 1)}{how}"
    return str(m)


class Planner:
    """The choices for one model and batch. It counts what it is asked for, once."""

    def __init__(
        self, model: nn.Module, batch: Any, device: str | None = None, optimizer: Any = "adamw", rates: Rates | None = None, few: Any = None
    ):
        """`few`: samples that a real step can be run on, if not the batch's."""
        check_batch(model, batch, "plan")
        _needs_scipy()
        if any("_halfback" in m.__dict__ for m in model.modules()):
            raise ValueError("plan(): the model has methods already. Call hb.remove_(model) first, or plan before apply_.")
        self.model, self.batch = model, batch
        found = finding.find_blocks(model)
        self.names = [name for name, _ in found]
        self.family = family_of(model, found)
        self.plain = profile(model, batch, device=device, optimizer=optimizer)
        self.device = self.plain.device
        self.few = batch if few is None else few
        self.where = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        self.clock = Clock(self.where, rates)
        self.sbp = finding.choose(model, found, BLOCKS) if found else []
        self.heads = find_heads(model, self.names)
        convolutions = sum(isinstance(m, finding.CONVOLUTIONS) for m in model.modules()) > 1  # one alone makes patches
        self.workspace = WORKSPACE[convolutions] if self.device == "cuda" else 0
        self.ways: dict[tuple[Kind, bool], Way | None] = {}
        self.counted: dict[tuple[Method, ...], Point | None] = {}
        self.trials: dict[tuple[Method, ...], float | None] = {}  # seconds of real steps

    @contextlib.contextmanager
    def _with(self, methods: tuple[Method, ...]) -> Iterator[Any]:
        """The model with methods applied, on fake tensors; afterwards as it was."""
        with untouched(self.model), self._applied(methods), weightless(self.model, self.device == "cuda" and not self._on_cuda()) as mode:
            yield faked(mode, self.batch, self.where)

    def _on_cuda(self) -> bool:
        return any(p.is_cuda for p in self.model.parameters())

    def way(self, kind: Kind, recompute: bool) -> Way | None:
        """All blocks recomputed, or none; None where that cannot be."""
        key = kind, recompute
        if key not in self.ways:
            methods = kind.methods(self.family, self.sbp, self.names if recompute else ())
            same = [k for k in self.ways if not recompute and not k[1] and replace(k[0], sparing=kind.sparing, parts=kind.parts) == kind]
            found = self.ways[same[0]] if same else self._count(methods)
            if found is not None and not same:
                found.host = self._host(methods)
            self.ways[key] = found
        return self.ways[key]

    def tried(self, methods: tuple[Method, ...], peak: int) -> float | None:
        """Seconds of a real step; None where there is no GPU, or it does not fit beside what is there."""
        if self.clock.device is None:
            return None
        size = size_of(self.batch)
        batch = self.batch if self.few is self.batch or size is None else resized(self.few, size)
        gradients = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        if (self.needs(peak) + gradients) / (1 - UNUSED) > _free(self.clock.device):
            return None
        with untouched(self.model, *(t for t in tree_leaves(batch) if isinstance(t, Tensor))), self._applied(methods):
            try:
                return time_of_step(lambda: loss_of(self.model, batch), lambda: self.model.zero_grad(set_to_none=True))
            except torch.OutOfMemoryError:
                return None

    def _host(self, methods: tuple[Method, ...]) -> float:
        """What the CPU needs for a step: timed with a few samples, where there is a GPU."""
        size = size_of(self.few)
        if self.clock.device is None or size is None:
            return 0.0
        few = resized(self.few, min(size, FEW))
        with untouched(self.model), self._applied(methods):
            return time_of_host(lambda: loss_of(self.model, few))

    @contextlib.contextmanager
    def _applied(self, methods: tuple[Method, ...]) -> Iterator[None]:
        if methods:
            rewrite.apply_(self.model, *methods)
        try:
            yield
        finally:
            remove_(self.model)

    def _count(self, methods: tuple[Method, ...]) -> Way | None:
        try:
            with self._with(methods) as batch:
                return count(self.model, batch, self.names, self.clock, self.device)
        except (ValueError, RuntimeError):
            if not methods:
                raise
            return None  # a method that finds nothing to do here, or a block that cannot be run again

    @property
    def seconds(self) -> float:
        """Of a plain step."""
        plain = self.way(Kind(), False)
        assert plain is not None
        return plain.time

    def ratio(self, point: Point) -> tuple[float, str]:
        """The time of a step relative to a plain one, and how it is known."""
        if not point.methods:
            return 1.0, Plan.timed
        if () not in self.trials:
            self.trials[()] = self.tried((), self.plain.peak)
        plain = self.trials[()]
        if plain is not None and point.methods not in self.trials:
            self.trials[point.methods] = self.tried(point.methods, point.peak)
        own = self.trials.get(point.methods)
        if plain is not None and own is not None:
            return own / plain, "measured on this GPU"
        estimated = point.seconds / self.seconds if self.seconds else 1.0
        return estimated, "estimated from its operations, timed on this GPU" if self.clock.device is not None else Plan.timed

    def choose(self, kind: Kind, limit: float | None) -> Choice | None:
        """The fastest choice of this kind with an estimated peak within the limit; None as limit: the smallest peak there is."""
        holding, again = self.way(kind, False), self.way(kind, True) if self.names else None
        if holding is None:
            return None
        if again is None or again.visits != holding.visits:
            return Choice(kind, kind.methods(self.family, self.sbp, ()), holding.peak, holding.time) if _within(holding, limit) else None
        picked = solve(holding, again, limit)
        if picked is None:
            return None
        recomputed, peak, seconds = picked
        names = [n for n in self.names if n in recomputed]
        return Choice(kind, kind.methods(self.family, self.sbp, names), peak, seconds)

    def point(self, choice: Choice) -> Point | None:
        """A choice counted as a whole."""
        if choice.methods not in self.counted:
            way = self._count(choice.methods)
            if way is not None:
                way.host = self._host(choice.methods)
            self.counted[choice.methods] = None if way is None else self._point(choice, way.peak, way.time)
        return self.counted[choice.methods]

    def _point(self, choice: Choice, peak: int, seconds: float) -> Point:
        points, source = (0.0, "exact") if choice.kind.exact else points_of(choice.kind.preset(self.family), self.family)
        return Point(choice.methods, peak, seconds, points, source)

    def tiers(self, prefer: str) -> list[list[Kind]]:
        """NOTE [exact first]"""
        exact, tight = ([*kinds, *(replace(k, chunked=True) for k in kinds if self.heads)] for kinds in (EXACT, TIGHT))
        kinds = [replace(k, chunked=bool(self.heads)) for k in APPROXIMATE if k.keep is None or self.sbp]
        known = {k: points_of(k.preset(self.family), self.family)[0] for k in kinds}
        cost = {k: math.inf if points is None else points for k, points in known.items()}
        cheap = [k for k in kinds if cost[k] <= POINTS]
        rest = sorted((k for k in kinds if prefer == "exact" or k not in cheap), key=lambda k: cost[k])
        return [[*exact, *(cheap if prefer == "fast" else [])], tight, *([k] for k in rest)]

    def levels(self) -> Iterator[float]:
        limit = float(self.plain.peak)
        while limit > self.plain.peak / 64:
            yield limit
            limit *= STEP

    def choices(self, kinds: Sequence[Kind]) -> Iterator[Choice]:
        """Of a tier, from the roomiest to the tightest."""
        before = None
        for limit in [*self.levels(), None]:
            found = [c for k in kinds if (c := self.choose(k, limit)) is not None]
            best = min(found, key=lambda c: c.peak if limit is None else c.seconds, default=None)
            if best is not None and best.methods != before:
                before = best.methods
                yield best

    def find(self, budget: float, prefer: str, least: int = 0) -> Point:
        """The plan for so many bytes of peak, which are `least` at least, whatever is chosen."""
        if prefer == "exact" and max(self.needs(self.plain.peak), least) <= budget:
            return Point((), self.plain.peak, self.seconds, 0.0, "exact")
        smallest: Point | None = None
        for kinds in self.tiers(prefer):
            for choice in self.choices(kinds):
                if self.needs(int(choice.peak)) > SLACK * budget:
                    continue
                point = self.point(choice)
                if point is not None and max(self.needs(point.peak), least) <= budget:
                    return point
            tightest = min((c for k in kinds if (c := self.choose(k, None)) is not None), key=lambda c: c.peak, default=None)
            point = self.point(tightest) if tightest is not None else None
            if point is not None and max(self.needs(point.peak), least) <= budget:  # it was thought to need more
                return point
            if point is not None and (smallest is None or point.peak < smallest.peak):
                smallest = point
        assert smallest is not None
        raise Impossible(budget, smallest, max(self.needs(smallest.peak), least), self.plain, self.workspace)

    def needs(self, peak: int) -> int:
        """A peak with what no count sees of it."""
        if self.device != "cuda":
            return peak
        return int(peak * (1 + UNSEEN)) + self.workspace

    def least(self) -> int:
        """What the process takes on the device with all blocks recomputed, as sparingly as exact gradients allow."""
        peaks = [self.plain.peak]
        for kind in TIGHT[::-1]:
            way = self.way(replace(kind, chunked=bool(self.heads)), bool(self.names))
            if way is not None:
                peaks.append(way.peak)
                break
        return total_of(self.plain, self.needs(min(peaks)))

    def room(self, budget: str | float | int) -> int:
        """Bytes of peak that a budget allows."""
        if not isinstance(budget, float):
            return allowed(self.plain, parse_size(budget))
        if not 0 < budget <= 1:
            raise ValueError(f"plan(): budget={budget} must be a fraction in (0, 1] of the plain peak, or a size as '10GiB'.")
        return self.needs(self.plain.peak) if budget == 1 else int(budget * (self.plain.peak + self.workspace))

    def curve(self, prefer: str = "exact") -> list[Point]:
        """Memory against time, from the roomiest to the tightest: the first tier, and further ones as far as they are known. Estimated,
        as counting each as a whole would take long, but where that was done."""
        points: list[Point] = []
        for i, kinds in enumerate(self.tiers(prefer)):
            if i == 0 or all((k, False) in self.ways for k in kinds):
                points += [self.counted.get(c.methods) or self._point(c, int(c.peak), c.seconds) for c in self.choices(kinds)]
        return points


def _free(device: torch.device) -> int:
    """Bytes that a step could have: of the device, and of what the allocator keeps for later."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Impossible(ValueError):
    """No choice fits. It says what the smallest needs."""

    def __init__(self, budget: float, smallest: Point, needs: int, plain: Profile, workspace: int):
        self.smallest, self.needs = smallest, needs
        self.fraction = math.ceil(1000 * needs / (plain.peak + workspace)) / 1000  # of the plain peak, as `Planner.room` takes it
        self.total = -(-total_of(plain, needs) // 2**20)  # MiB on the device
        libraries = f" with the {readable(workspace)} that libraries take for a moment" if workspace else ""
        share = f", or {self.fraction} of the plain peak{libraries}" if self.fraction <= 1 else ""
        super().__init__(
            f"plan(): {readable(max(0, budget))} for activations is too little for {plain.model}. The smallest that works, "
            f"{smallest.label}, needs {readable(needs)}: a budget of '{self.total}MiB' on the device, of which {readable(plain.fixed)} are "
            f"weights, gradients, optimizer and batch{share}. Give that much, a smaller batch, or an optimizer with less state."
        )


def _within(way: Way, limit: float | None) -> bool:
    return limit is None or way.peak <= limit


def _needs_scipy() -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as e:
        raise ImportError(f"plan() solves a mixed integer program with scipy: {install('scipy')}.") from e


# The plan


@dataclass
class Plan:
    """Methods that meet a budget. `hb.apply_(model, plan)` applies them."""

    model: str
    methods: tuple[Method, ...]
    budget: int  # bytes of peak that were allowed
    peak: int  # predicted
    plain_peak: int
    time_ratio: float  # predicted, to a plain step
    total: int  # on the device, with weights, gradients, optimizer, batch, CUDA itself and what lies between tensors
    fixed: int
    points: float | None = 0.0
    source: str = "exact"
    batch_size: int | None = None
    device: str = "cpu"
    timed: str = "estimated for a usual GPU"  # how the time is known
    curve: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return not any(isinstance(m, (SBP, DropIT)) for m in self.methods)

    def __str__(self) -> str:
        label = " + ".join(_short(m) for m in self.methods) or "nothing: plain training fits"
        lines = [f"{self.model}" + (f", batch {self.batch_size}" if self.batch_size else "") + f": {label}"]
        share = f"{self.peak / max(1, self.plain_peak):.2f} of plain training's {readable(self.plain_peak)}"
        lines.append(f"  peak    {readable(self.peak)} of the {readable(self.budget)} allowed; {share}")
        lines.append(
            f"  total   {readable(self.total)} on the device, {readable(self.fixed)} of it weights, gradients, optimizer and batch"
        )
        lines.append(f"  time    {self.time_ratio:.2f} of a plain step, {self.timed}")
        if self.exact:
            lines.append("  gradients are exact")
        else:
            cost = "nobody has measured what that costs" if self.points is None else f"it cost {self.points:.1f} points of accuracy"
            lines.append(f"  gradients are approximate: {cost} ({self.source}). Exact means do not fit, or are slower.")
        for m in self.methods:
            if isinstance(m, (SBP, Recompute)):
                lines.append(f"  {type(m).__name__}: {_ranges(m.layers)}")
        return "\n".join(lines)

    __repr__ = __str__  # what notebooks show

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "methods": [m.to_json() for m in self.methods]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        try:
            return cls(**{**data, "methods": tuple(from_json(m) for m in data["methods"])})
        except (KeyError, TypeError) as e:
            raise ValueError(f"Plan.from_json(): this is no plan that to_json() wrote: {e}.") from e


def _ranges(layers: Any) -> str:
    names = list(layers) if isinstance(layers, (tuple, list)) else [str(layers)]
    return ", ".join(names) if len(names) < 5 else f"{', '.join(names[:2])} ... {names[-1]} ({len(names)})"


def total_of(plain: Profile, peak: int) -> int:
    """What the process takes on the device when a step needs so much at its peak."""
    most = plain.fixed + max(peak, plain.optimizer_peak)
    return math.ceil(most / (1 - UNUSED)) + CONTEXT if plain.device == "cuda" else most


def allowed(plain: Profile, total: int) -> int:
    """The peak that fits into a total on the device; the inverse of `total_of`."""
    most = int((total - CONTEXT) * (1 - UNUSED)) if plain.device == "cuda" else total
    return most - plain.fixed


def plan(
    model: nn.Module,
    batch: Batch,
    budget: str | float | int | None = None,
    *,
    prefer: str = "exact",
    batch_size: int | str | None = None,
    device: str | None = None,
    optimizer: Any = "adamw",
    curve: bool = False,
) -> Plan:
    """Methods that meet a memory budget, at the least cost; the model is left as it was.

    budget      "10GiB" or a number of bytes: the total that the process may take on the device. A fraction up to 1: of the peak of
                plain training, on a GPU with what libraries take for a moment. None: all memory of the GPU that the model is on
    prefer      "exact": approximate only what exact means cannot meet. "fast": the fastest of all that cost at most a point of accuracy
    batch_size  another number of samples than the batch has; "max": the most that fits with exact gradients
    device      "cuda": plan for a GPU with a model that is on the CPU; then times are estimated. On a GPU the plan is tried for a few
                steps, if it fits beside what is there
    optimizer   as in `profile`
    curve       also what other budgets would give, for a plot
    """
    if prefer not in PREFER:
        raise ValueError(f"plan(): prefer={prefer!r} is none of {', '.join(PREFER)}.")
    check_batch(model, batch, "plan")
    budget = _whole_gpu(model) if budget is None else budget
    if batch_size == "max":
        return _largest(model, batch, budget, prefer, device, optimizer, curve)
    if batch_size is not None:
        return plan_with(
            Planner(model, resized(batch, _count_of(batch_size), light=True), device, optimizer, few=batch), budget, prefer, curve
        )
    return plan_with(Planner(model, batch, device, optimizer), budget, prefer, curve)


def plan_with(planner: Planner, budget: str | float | int, prefer: str = "exact", curve: bool = False) -> Plan:
    """A plan of a planner that may have made others: what it has counted is not counted again."""
    plain = planner.plain
    room = planner.room(budget)
    point = planner.find(room, prefer, 0 if isinstance(budget, float) else plain.optimizer_peak)
    seconds = planner.seconds
    ratio, timed = planner.ratio(point)
    return Plan(
        model=plain.model,
        methods=point.methods,
        budget=room,
        peak=point.peak,
        plain_peak=plain.peak,
        time_ratio=ratio,
        total=total_of(plain, planner.needs(point.peak)),
        fixed=plain.fixed,
        points=point.points,
        source=point.source,
        batch_size=plain.batch,
        device=plain.device,
        timed=timed,
        curve=[_told(p, seconds) for p in planner.curve(prefer)] if curve else [],
    )


def _told(p: Point, seconds: float) -> dict[str, Any]:
    return {"peak": p.peak, "time": p.seconds / seconds, "exact": p.exact, "methods": p.text, "label": p.label, "points": p.points}


def _count_of(batch_size: Any) -> int:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"plan(): batch_size={batch_size!r} must be a positive number of samples, or 'max'.")
    return batch_size


def _whole_gpu(model: nn.Module) -> int:
    first = next((p for p in model.parameters() if p.is_cuda), None)
    if first is None:
        raise ValueError("plan(): give a budget, as '10GiB' or 0.4 of the plain peak; the model is on no GPU whose memory could be meant.")
    return torch.cuda.get_device_properties(first.device).total_memory


def _largest(model: nn.Module, batch: Any, budget: Any, prefer: str, device: Any, optimizer: Any, curve: bool) -> Plan:
    if isinstance(budget, float):
        raise ValueError(f"plan(): batch_size='max' needs a budget as '10GiB'; {budget} of the plain peak grows with the batch.")

    def make(size: int) -> Planner:
        return Planner(model, resized(batch, size, light=True), device, optimizer, few=batch)

    return plan_with(make(most_samples(make, budget, size_of(batch) or 1)), budget, prefer, curve)


def most_samples(make: Callable[[int], Planner], budget: Any, start: int = 1) -> int:
    """The most samples that fit a budget with exact gradients; 1 where not even one does."""
    return largest(lambda n: make(n).least(), parse_size(budget), 1, start)[0] or 1


def largest(
    need: Callable[[int], int], room: int, step: int, start: int, fixed: int = 0, power: int = 1, most: int = MOST
) -> tuple[int | None, int, bool]:
    """The largest multiple of `step` that needs no more than `room`, what it needs, and whether larger ones were not tried; None where
    one step needs more. A need grows nearly as fixed + b n**power, so the next guess is where the line through two known ones meets the
    room; after a few guesses the range is halved."""
    known = {0: fixed}
    low, high, guess = 0, 0, max(step, start // step * step)
    while (not high or high - low > step) and low < most:
        known[guess] = need(guess)
        if known[guess] <= room:
            low = guess
        else:
            high = guess
        guess = min(most, _guess(known, room, step, low, high, power))
    return low or None, known.get(low or step, fixed), low >= most


def _guess(known: dict[int, int], room: int, step: int, low: int, high: int, power: int) -> int:
    if high and len(known) > PATIENCE:
        return max(low + step, (low + high) // 2 // step * step)
    other = high or max(n for n in known if n < low)
    slope = (known[other] - known[low]) / (other**power - low**power)
    target = (low**power + max(0, room - known[low]) / slope) ** (1 / power) if slope > 0 else 2 * low
    highest = high - step if high else 64 * low
    return min(highest, max(low + step, int(target) // step * step))


def apply_(
    model: nn.Module, *methods: Method | Plan, budget: str | float | int | None = None, batch: Batch | None = None, **how: Any
) -> Report:
    """Make a model train with these methods, in place; `remove_` undoes it.

    hb.apply_(model, hb.SBP(keep=0.5), hb.Lean())          methods, which compose
    hb.apply_(model, plan)                                 those of a plan
    hb.apply_(model, budget="16GiB", batch=batch)          plan and apply in one; further arguments are those of `plan`

    Eval mode and no_grad are untouched. Everything is checked before anything is changed.
    """
    if budget is None and batch is None and not how:
        plans = [m for m in methods if isinstance(m, Plan)]
        if not plans:
            return rewrite.apply_(model, *methods)  # type: ignore[arg-type]
        if len(methods) > 1:
            raise ValueError(f"apply_(): {len(methods)} arguments, one of them a plan: a plan stands for all methods. Give it alone.")
        return _apply_plan(model, plans[0])
    if methods:
        given = "a plan" if isinstance(methods[0], Plan) else str(methods[0])
        raise ValueError(f"apply_(): {given} and a budget: give methods, or a plan, or a budget and a batch that methods are chosen for.")
    if batch is None:
        raise ValueError("apply_(): a budget needs a batch to plan for, as hb.apply_(model, budget='16GiB', batch=batch).")
    return _apply_plan(model, plan(model, batch, budget, **how))


def _apply_plan(model: nn.Module, plan: Plan) -> Report:
    if plan.model != type(model).__name__:
        raise ValueError(f"apply_(): the plan is for {plan.model}, the model is a {type(model).__name__}.")
    if not plan.methods:
        rewrite.check_free(model)
    report = rewrite.apply_(model, *plan.methods) if plan.methods else Report(plan.model, (), [], [])
    report.plan = plan
    return report
