"""What a user asks for: frozen, checked when made, with one text form.

sbp(keep=0.5)+recompute        the same in Python reports and on the command line
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .keep import BLOCK, OF, SELECTS
from .positions import MASKS, RAMPS, SAMPLERS
from .stores import Channels, Elements, FewBits, Rows

Layers = str | Sequence[str] | Callable[[str, Any], bool]
Schedule = Sequence[tuple[float, float]]  # (share of the training, keep)
ATTENTION = ("query", "qkv", "heads")


class Method:
    """The base of all methods: a text form and a JSON form, of what differs from the defaults."""

    changes_forward: ClassVar[bool] = False
    layers: Layers
    keep: float
    schedule: Schedule | None = None

    def keep_at(self, done: float) -> float:
        """What is kept when this share of the training is done."""
        (share, keep), *later = self.schedule or ((0.0, self.keep),)
        for until, then in later:
            if done < until:
                return keep + (then - keep) * max(0.0, done - share) / (until - share)
            share, keep = until, then
        return keep

    @property
    def keeps(self) -> list[float]:
        """All that may be kept in a training."""
        return [self.keep, *(keep for _, keep in self.schedule or ())]

    def changed(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in self.changed().items())
        name = type(self).__name__.lower()
        return f"{name}({shown})" if shown else name

    def to_json(self) -> dict[str, Any]:
        fields = self.changed()
        for key, value in fields.items():
            if callable(value):
                raise TypeError(f"{type(self).__name__}.to_json(): {key} is a function; name the layers to save them as JSON.")
        return {"method": type(self).__name__.lower(), **fields}


def _one_of(method: str, field: str, found: Any, allowed: Sequence[str]) -> None:
    if found not in allowed:
        raise ValueError(f"{method}(): {field}={found!r} is none of {', '.join(allowed)}.")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_keep(x: Any) -> bool:
    return _is_number(x) and 0 < x <= 1


def _check_keep(method: str, keep: Any, of: str = "positions") -> None:
    if not _is_keep(keep):
        raise ValueError(f"{method}(): keep={keep!r} must be a number in (0, 1]: the share of {of} that stays (0.5 is half).")


def _check_schedule(method: Any) -> None:
    """Lists, as JSON has them, become tuples."""
    if method.schedule is None:
        return
    name, given = type(method).__name__, method.schedule
    try:
        points = tuple((share, keep) for share, keep in given)
    except (TypeError, ValueError):
        points = ()
    shares = [share for share, _ in points]
    if not points or not all(_is_number(share) and 0 <= share <= 1 for share in shares) or shares != sorted(shares):
        raise ValueError(
            f"{name}(): schedule={given!r} must be pairs of a share of the training, in [0, 1] and ascending, and what is kept from there "
            "on, as ((0, 1.0), (0.5, 0.25))."
        )
    for _, keep in points:
        if not _is_keep(keep):
            raise ValueError(f"{name}(): schedule={given!r}: keep={keep!r} must be a number in (0, 1].")
    object.__setattr__(method, "schedule", tuple((float(share), float(keep)) for share, keep in points))


def _check_places(method: str, grid: Any, always: Any, axis: Any) -> None:
    if grid is not None and (not grid or len(grid) > 3 or any(not isinstance(g, int) or g < 1 for g in grid)):
        raise ValueError(f"{method}(): grid={grid!r} must be one to three positive sizes, as (14, 14).")
    if always is not None and (not isinstance(always, int) or always < 0):
        raise ValueError(f"{method}(): always={always!r} must be the number of leading tokens that are always kept, as 1.")
    if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis <= 2):
        raise ValueError(f"{method}(): axis={axis!r} must be 0, 1 or 2: on which of a block's input positions lie, or None.")


@dataclass(frozen=True)
class SBP(Method):
    """Stochastic backpropagation: the forward exact, the backward through kept positions only.

    keep       the share of positions that gets a gradient through the layers of a block
    layers     "paper" (the last two thirds of each stack of blocks; of a network in stages all but the last stage and the end of the one
               before it), "all", "last 2/3", names, glob patterns, or a function of (name, module)
    sampler    "grid" (the paper's), "random", "frames" (of a video), "fixed"
    ramp       keep over the layers: "uniform", "increasing", "decreasing" around the mean
    attention  "query": keys and values of all positions get a gradient; "qkv": of kept ones only; "heads": kept heads
    grid       the shape in which positions lie, where it cannot be found, as (14, 14)
    always     how many leading tokens (class, register) are always kept; None: found from the model
    axis       of a block's input of three, where positions lie: 0 for (positions, samples, features); None: found from the model
    masks      "shared" by all layers; "independent" and "disjoint" are for experiments
    scale      what a kept position passes back to others, through attention or a depthwise convolution, counts for the dropped ones
               too, so that it is right in the mean; False: as in the paper, it is that much smaller
    opaque     modules that need plain tensors (custom autograd.Functions): names or glob patterns
    apart      modules that treat each position by itself, as a mixture's "*.experts": run for kept positions, then for dropped ones
    seed       of the masks
    schedule   keep over the training, for who follows it (hb.follow_): points (share of the training, keep) with straight lines between
               them, as ((0, 1.0), (0.5, 0.25)); two points at one share are a jump
    """

    keep: float = 0.5
    layers: Layers = "paper"
    sampler: str = "grid"
    ramp: str = "uniform"
    attention: str = "query"
    grid: tuple[int, ...] | None = None
    always: int | None = None
    axis: int | None = None
    masks: str = "shared"
    scale: bool = False
    opaque: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    seed: int = 0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        _check_keep("SBP", self.keep)
        _check_schedule(self)
        _check_places("SBP", self.grid, self.always, self.axis)
        _one_of("SBP", "sampler", self.sampler, SAMPLERS)
        _one_of("SBP", "ramp", self.ramp, RAMPS)
        _one_of("SBP", "attention", self.attention, ATTENTION)
        _one_of("SBP", "masks", self.masks, MASKS)
        if not isinstance(self.scale, bool):
            raise ValueError(f"SBP(): scale={self.scale!r} must be True or False.")
        if self.scale and self.attention == "heads":
            raise ValueError(
                'SBP(): scale=True counts positions, of which attention="heads" keeps all. Use another attention, or leave it out.'
            )
        for name, given in (("opaque", self.opaque), ("apart", self.apart)):
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))


@dataclass(frozen=True)
class SkipTokens(Method):
    """Kept tokens alone go through the chosen blocks, in training only. This changes the forward.

    carry   what becomes of dropped tokens. False: they wait, and come back where the chosen blocks end. True: they go through
            the blocks too, seeing all tokens, without gradient, as in the code that the SBP paper's authors released. None: wait
            where the model has class tokens to read the output from, be carried where it has not.
    """

    keep: float = 0.5
    layers: Layers = "last 2/3"
    sampler: str = "grid"
    grid: tuple[int, ...] | None = None
    always: int | None = None
    axis: int | None = None
    carry: bool | None = None
    seed: int = 0
    schedule: Schedule | None = None
    changes_forward: ClassVar[bool] = True
    ramp: ClassVar[str] = "uniform"
    masks: ClassVar[str] = "shared"
    attention: ClassVar[str] = "skip"
    scale: ClassVar[bool] = False
    opaque: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_keep("SkipTokens", self.keep)
        _check_schedule(self)
        _check_places("SkipTokens", self.grid, self.always, self.axis)
        _one_of("SkipTokens", "sampler", self.sampler, SAMPLERS)
        if self.grid is not None:
            object.__setattr__(self, "grid", tuple(self.grid))


@dataclass(frozen=True)
class Recompute(Method):
    """Blocks are checkpointed: what they hold is computed again in the backward. Beside SBP little of that is of dropped positions: in a
    compiled model what kept ones need, in eager mode what comes before attention, unless there is dropout behind it, a merge, or a norm on
    the trunk. Compile with options={"allow_buffer_reuse": False}, or the compiler holds a block's tensors for the next one.

    layers    "all", "first 1/3", "last 2/3", names, glob patterns, or a function of (name, module)
    sparing   beside Lean or DropIT: they work in recomputed blocks too. The peak falls further, for more time.
    parts     a batch goes through a recomputed block in so many parts, one after the other, so that the block has less alive at a time.
              Its samples must not see each other, as they do in a batch norm; the first step checks that. Blocks that SBP runs, and
              compiled ones, are run whole.
    """

    layers: Layers = "all"
    sparing: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.parts, int) or isinstance(self.parts, bool) or self.parts < 1:
            raise ValueError(f"Recompute(): parts={self.parts!r} must be a positive number of parts of a batch, as 4.")


@dataclass(frozen=True)
class ChunkedLoss(Method):
    """A language model's scores (logits) are never all there: its last layer and the cross entropy run on some rows at a time. The
    gradient is exact, the same sums in another order. What else asks for the scores gets them, computed.

    rows   so many rows (tokens) at a time: more take more memory, fewer make more parts, each of which adds to the weight's gradient. None:
           as many as have 128 MiB of scores
    """

    rows: int | None = None
    layers: Layers = field(default="all", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rows is not None and (not isinstance(self.rows, int) or isinstance(self.rows, bool) or self.rows < 1):
            raise ValueError(f"ChunkedLoss(): rows={self.rows!r} must be a positive number of rows, as 4096, or None.")


@dataclass(frozen=True)
class Lean(Method):
    """Gradients equal to plain training's, with less held: what one layer holds serves the others, and what is cheap to compute from it
    is computed again."""

    layers: Layers = field(default="all", init=False, repr=False, compare=False)


@dataclass(frozen=True)
class DropIT(Method):
    """Lean, and where a layer's input is held for nobody else, a sparse copy of it. The gradient that flows on stays exact; the
    gradient of the weight comes from the copy.

    keep             the share of entries of a layer's input that is kept; a grouped or depthwise convolution, whose filters would lose
                     whole channels, holds a copy of 4 bits instead
    select           "largest" by magnitude (the paper's Min-K), or "random", scaled so that the gradient is unbiased
    of               "elements", "channels", or "rows" (positions; the weight's gradient then costs only `keep`)
    block            elements are selected in blocks of so many (Parallel Min-K); None: of the whole tensor at once, which is slow
    bits             4 or 8: a few-bit copy of the whole input instead of few entries; keep is then not used
    stochastic       round the few-bit copy at random, so that the weight's gradient is unbiased
    activation_bits  4 or 8: gelu and silu keep a code of their derivative instead of their input; of a gated product, silu(g) * u, both
                     factors are kept in so many bits, for the layer behind it too. This touches the flowing gradient, so its error
                     adds up over the layers.
    lean             False: without Lean. Nothing is computed again, and more is held
    exact_first      False: a sparse copy also where the exact input is held, or can be computed, anyway, as in the paper. That holds more
                     and approximates more; it is for experiments
    layers           "all but first", "all", names or glob patterns of layers, or a function of (name, module)
    seed             of random selections and roundings
    schedule         keep over the training, as of SBP
    """

    keep: float = 0.1
    select: str = "largest"
    of: str = "elements"
    block: int | None = BLOCK
    bits: int | None = None
    stochastic: bool = False
    activation_bits: int | None = None
    lean: bool = True
    exact_first: bool = True
    layers: Layers = "all but first"
    seed: int = 0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        _check_keep("DropIT", self.keep, "entries")
        _check_schedule(self)
        _one_of("DropIT", "select", self.select, SELECTS)
        _one_of("DropIT", "of", self.of, OF)
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(f"DropIT(): block={self.block!r} must be a positive number of elements, as {BLOCK}, or None for all at once.")
        for name in ("bits", "activation_bits"):
            if getattr(self, name) not in (None, 4, 8):
                raise ValueError(f"DropIT(): {name}={getattr(self, name)!r} is none of 4, 8, None.")
        if self.bits is not None and (self.select, self.of) != ("largest", "elements"):
            raise ValueError(
                f"DropIT(): bits={self.bits} keeps the whole input, so select={self.select!r} and of={self.of!r} mean nothing."
            )
        if not isinstance(self.lean, bool):
            raise ValueError(f"DropIT(): lean={self.lean!r} must be True or False.")
        if self.stochastic and self.bits is None:
            raise ValueError("DropIT(): stochastic=True rounds the copy that bits=4 or bits=8 keeps; give one of them.")
        if self.schedule is not None and self.bits is not None:
            raise ValueError(f"DropIT(): bits={self.bits} keeps the whole input, so schedule={self.schedule!r} means nothing.")

    def store(self, keep: float | None = None, grouped: bool = False) -> Any:
        """How a layer's input is held; None: as it is. `grouped`: of a convolution whose filters see few channels each, or one. The largest
        entries lie in few channels, so those of the others would hardly learn: a few-bit copy has all."""
        keep = self.keep if keep is None else keep
        if self.bits is not None:
            return FewBits(self.bits, self.stochastic)
        if keep == 1:
            return None
        if grouped and self.exact_first and self.select == "largest" and self.of != "rows":
            return FewBits()
        if self.of == "elements":
            return Elements(keep, self.select, self.block)
        return (Channels if self.of == "channels" else Rows)(keep, self.select)


METHODS: dict[str, type] = {c.__name__.lower(): c for c in (SBP, SkipTokens, Recompute, Lean, DropIT, ChunkedLoss)}


def parse(text: str) -> tuple[Any, ...]:
    """Methods from their text form; "exact" is none.

    >>> parse("sbp(keep=0.5)+recompute")
    (SBP(keep=0.5, ...), Recompute(...))
    """
    form = 'as "sbp(keep=0.5)+recompute" or "exact"'
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as e:
        raise ValueError(f"{text!r} is no method: write it {form}.") from e
    found: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        found.insert(0, tree.right)
        tree = tree.left
    found.insert(0, tree)
    if len(found) == 1 and isinstance(tree, ast.Name) and tree.id == "exact":
        return ()
    return tuple(_parse_one(node, text, form) for node in found)


def _parse_one(node: ast.expr, text: str, form: str) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = call.func.id.lower() if isinstance(call.func, ast.Name) else ""
    if name not in METHODS:
        raise ValueError(f"{name or text!r} in {text!r} is none of the methods {', '.join(METHODS)}; write it {form}.")
    if call.args:
        raise ValueError(f"{text!r}: name every argument, {form}.")
    try:
        given = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except ValueError as e:
        raise ValueError(f"{text!r}: values are numbers, 'text' in quotes, or tuples of these, {form}.") from e
    try:
        return METHODS[name](**given)
    except TypeError as e:
        known = ", ".join(f.name for f in dataclasses.fields(METHODS[name]))
        raise ValueError(f"{text!r}: {name} takes {known}.") from e


def from_json(data: dict[str, Any]) -> Any:
    """The method that `to_json` wrote."""
    if not isinstance(data, dict):
        raise ValueError(f"from_json(): {data!r} is no method: wanted an object, as {{'method': 'sbp', 'keep': 0.5}}.")
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "method"}
    if data.get("method") not in METHODS:
        raise ValueError(f"from_json(): method={data.get('method')!r} is none of {', '.join(METHODS)}.")
    known = [f.name for f in dataclasses.fields(METHODS[data["method"]]) if f.init]
    if unknown := [k for k in fields if k not in known]:
        raise ValueError(f"from_json(): {data['method']} takes {', '.join(known)}; found {unknown[0]!r}.")
    return METHODS[data["method"]](**fields)
