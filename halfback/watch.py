"""Lean and DropIT on a model: a ledger (ledger.py) around its forward, and around each block's where something else runs the block.

`forward` is set on the instance, as Recompute does: only a `with` around the forward ends for certain, also on Ctrl-C.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import layers
from .blocks import patterns_of
from .compiled import Marking, marks
from .drawn import frame_now
from .ledger import Approximated, Blank, Entry, Exact, Ledger, Stored, Value
from .methods import DropIT
from .notes import constant, listen, note, rank
from .recompute import checkpointed
from .standins import Standin, standins

PASSING = ("ledger", "looked", "names", "owner", "on", "paused", "account", "accounted")  # not copied


@dataclass(frozen=True)
class Wanted:
    """How the input of a layer is held."""

    store: Any
    seed: int
    firm: bool = False  # also where an exact holder is there


@dataclass
class Row:
    """What one layer or function saves, and how it is held."""

    layer: str
    function: str
    before: int
    after: int
    how: list[str]
    stored: bool = False  # by a store that approximates

    def add(self, how: str) -> None:
        if how not in self.how:
            self.how.append(how)


def layers_of(model: nn.Module) -> list[str]:
    """The modules with a weight that multiplies their input, in the order of registration. Embeddings count as a first layer."""
    names = [n for n, p in model.named_parameters() if p.ndim > 1 and n.rpartition(".")[2].endswith("weight")]
    return list(dict.fromkeys(layer_name(n) for n in names))


def layer_name(parameter: str) -> str:
    module, _, own = parameter.rpartition(".")
    part = own.removesuffix("weight").rstrip("_")
    return f"{module}.{part}" if part else module


def choose_layers(model: nn.Module, wanted: Any) -> list[str]:
    """The names of the layers that DropIT's `layers` means."""
    names = layers_of(model)
    modules = dict(model.named_modules())
    usable = [n for n in names if not isinstance(modules.get(n), (nn.Embedding, nn.EmbeddingBag))]
    kind = type(model).__name__
    if not usable:
        raise ValueError(f"apply_(): {kind} has no layer with a weight matrix, so DropIT has nothing to do.")
    if wanted == "all":
        return usable
    if wanted == "all but first":
        return [n for n in usable if n != names[0]]
    if callable(wanted):
        chosen = [n for n in usable if wanted(n, modules.get(n))]
        if not chosen:
            raise ValueError(f"apply_(): the function given as layers= chose none of the {len(usable)} layers of {kind}.")
        return chosen
    patterns = patterns_of(wanted)
    for p in patterns:
        if any(fnmatch.fnmatchcase(n, p) for n in usable):
            continue
        if p in modules:
            raise ValueError(
                f"apply_(): layers={p!r} is a {type(modules[p]).__name__}, which DropIT cannot rewrite: it has no weight of its own that "
                f"multiplies its input. Layers: {usable[0]} ... {usable[-1]}."
            )
        raise ValueError(f"apply_(): layers={p!r} matches none of the {len(usable)} layers of {kind}: {usable[0]} ... {usable[-1]}.")
    return [n for n in usable if any(fnmatch.fnmatchcase(n, p) for p in patterns)]


def seed_of(seed: int, call: int, rank: int = 0) -> int:
    """Each call of a layer draws its own numbers, in each process."""
    return (seed * 1_000_003 + call + rank * 998_244_353) % 2**31


class Watch:
    """What the frames of one model share: whose weights are approximated, and who hears what is held."""

    def __init__(self, model: nn.Module, method: Any, chosen: Sequence[str], report: Any):
        self._model = weakref.ref(model)
        self.told = False  # is what the report says of a forward of the root?
        self.method, self.report = method, report
        self.chosen = frozenset(chosen)
        self.exact = not isinstance(method, DropIT)
        self.computes = self.exact or method.lean  # again what is cheap
        self.set_keep(getattr(method, "keep", 1.0))
        self.firm = not self.exact and not method.exact_first
        self.calls = 0
        # Whose weights are meant, for a tracer, which knows no names; or, as that is shorter, whose are not. Weak: FSDP puts parts of them
        # in their places, and frees them.
        self.all_but = self.exact or method.layers in ("all", "all but first")
        weights = [(layer_name(n) in self.chosen, p) for n, p in model.named_parameters() if p.ndim > 1]
        self.weights = [weakref.ref(p) for wanted, p in weights if self.chosen and wanted is not self.all_but]
        self._reset()

    def _reset(self) -> None:
        self.owner = listen(self.report)
        self.on, self.paused = True, 0  # paused: by how many `exact`, of which a copy is in none
        self.account: Account | None = None  # of a forward without the root, block by block
        self.accounted: set[int] = set()
        self.ledger: Ledger | None = None
        self.looked = False  # for modules that are compiled
        self.names: dict[int, tuple[Any, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in PASSING}
        return {**state, "_model": self._model(), "weights": [p for ref in self.weights if (p := ref()) is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {"told": False, **state, "_model": weakref.ref(state["_model"]), "weights": [weakref.ref(p) for p in state["weights"]]}
        )
        self._reset()

    def set_keep(self, keep: float) -> None:
        self.store, self.grouped = (None if self.exact else self.method.store(keep, g) for g in (False, True))

    def mark(self) -> int:
        """Where the draws stand; `rewind` goes back there."""
        return self.calls

    def rewind(self, mark: int) -> None:
        self.calls = mark

    @property
    def approximates(self) -> bool:
        return self.on and not self.exact

    @property
    def activation_bits(self) -> int | None:
        return self.method.activation_bits if self.approximates else None

    def name_of(self, weight: Tensor) -> str:
        """The layer that a weight, or a part of one, belongs to; empty where it is computed."""
        parameter = weight if isinstance(weight, nn.Parameter) else weight._base
        if not isinstance(parameter, nn.Parameter):
            return ""
        ref, name = self.names.get(id(parameter), (None, ""))
        if ref is None or ref() is not parameter:  # the first time, or somebody (FSDP) put another in its place
            model: Any = self._model()
            self.names = {id(p): (weakref.ref(p), layer_name(n)) for n, p in model.named_parameters()}
            name = self.names.get(id(parameter), (None, ""))[1]
        return name

    def store_for(self, x: Tensor, weight: Tensor, axis: int) -> Any:
        """How x is held. `axis` is 1 for a convolution, whose filters see fewer channels than x has where it is grouped."""
        return self.grouped if axis == 1 and x.shape[1 - weight.ndim] > weight.shape[1] else self.store

    def store_of(self, x: Tensor, weight: Tensor, axis: int) -> Wanted | None:
        if self.store is None or not self.on or not weight.requires_grad or self.name_of(weight) not in self.chosen:
            return None
        self.calls += 1
        return Wanted(self.store_for(x, weight, axis), seed_of(self.method.seed, self.calls, rank()), self.firm)

    def draws(self) -> bool:
        """Does the store draw random numbers?"""
        return not self.exact and (self.method.select == "random" or self.method.stochastic)

    def wants(self, weight: Tensor) -> bool:
        """Is a weight's gradient to be approximated? While a model is traced, names cannot be looked up."""
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return False
        return any([weight is ref() for ref in self.weights]) is not self.all_but

    def open(self, module: nn.Module) -> Any:
        if not self.looked:
            self.looked = True
            model: Any = self._model()
            for m in model.modules():
                call = m._compiled_call_impl
                if call is not None and not isinstance(call, Unseen) and (self.exact or _has_frames(m)):
                    m._compiled_call_impl = Unseen(call, self)
        return Ledger(layers.rules, self, self._account(module)).open()

    def _account(self, module: nn.Module) -> Account | None:
        """Who tells the report: the first forward of the root; before there is one, that of its blocks. What a checkpoint runs is held
        by nobody when it ends, and blocks inside of another frame are told of by that."""
        if self.told or self.ledger is not None or frame_now() is not None:
            return None
        if module is self._model():
            return Account(self)
        if id(module) in self.accounted:  # it comes again, so that a forward is over
            self.account = None
        elif not self.accounted or self.account is not None:
            self.accounted.add(id(module))
            self.account = self.account or Account(self)
        return self.account


@constant
def _only_for(layers: str) -> bool:
    """The graph that is traced serves a module of which these layers are named, as approximated or as not. That a weight is not among
    them, the compiler does not ask again."""
    return True


class Unseen:
    """The call of a compiled module in a model that is not. What it holds was settled when it was traced; a frame that is open around it
    would only be called for each of its kernels."""

    def __init__(self, call: Any, watch: Watch):
        self.call, self.watch = call, watch

    def __call__(self, *args, **kwargs):
        if self.watch.ledger is None:
            return self.call(*args, **kwargs)
        with self.watch.ledger.away():
            return self.call(*args, **kwargs)


def _has_frames(module: nn.Module) -> bool:
    """Does it open frames of its own? DropIT needs them where a compiled module falls back to eager mode."""
    return any(isinstance(f, Watched) for f in standins(module))


class Watched(Standin):
    """The forward of a module with a ledger around it."""

    def __init__(self, module: nn.Module, watch: Watch, own: Any = None):
        super().__init__(module, own)
        self.watch = watch
        named = {id(ref()) for ref in watch.weights}
        self.named = " ".join([n for n, p in module.named_parameters() if id(p) in named])

    def __call__(self, *args, **kwargs):
        watch = self.watch
        if self.idle():
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            again = checkpointed()
            if again and not watch.approximates:  # Lean has nothing to add there
                return self.plain(*args, **kwargs)
            if marks(watch):  # as around the root: in a block's own marking, the root's would see what that makes of functions, once more
                return self.plain(*args, **kwargs)
            _only_for(self.named)
            note(watch.owner, "the model", "compiled", "the compiler chooses what is held, and computes again what is marked")
            if watch.draws():
                note(watch.owner, "the model", "compiled", "random selections and roundings are left exact")
            with Marking(watch, again):
                return self.plain(*args, **kwargs)
        if watch.ledger is not None and watch.ledger.mine():  # inside a frame
            return self.plain(*args, **kwargs)
        with watch.open(self.module) as ledger:
            ledger.give(args, kwargs)
            out = self.plain(*args, **kwargs)
            if ledger.tell is not None:
                ledger.tell.close()
                watch.told = self.module is watch._model()
            return out


class Account:
    """What was saved in a forward and how it is held, for the report."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self.heard: list[tuple[str, str, Any, tuple[Value, ...], str]] = []
        self.layer = self.function = ""

    def called(self, func: Any, args: tuple, kwargs: dict) -> None:
        name = layers.plain_name(getattr(func, "__name__", ""))
        if name.startswith("__"):  # attributes, indexing
            return
        self.function = name
        weights = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and self.watch.name_of(t)]
        if weights:
            self.layer = self.watch.name_of(weights[0])
        elif self.layer and not self.layer.startswith("after "):
            self.layer = f"after {self.layer}"

    def saved(self, entry: Entry, values: tuple[Value, ...], what: str) -> None:
        """An entry, and what plain training would hold in its place."""
        self.heard.append((self.layer, self.function, weakref.ref(entry), values, what))

    def close(self) -> None:
        """At the end of the forward: what is still alive, a row for each call that saved something."""
        holders: dict[int, str] = {}  # of what is held: who was the first to save it
        counted: set[int] = set()
        rows: dict[tuple[str, str], Row] = {}
        for layer, function, ref, values, what in self.heard:
            entry = ref()
            if entry is None:
                continue
            row = rows.setdefault((layer, function), Row(layer, function, 0, 0, []))
            me = f"{function} {layer}".strip()
            kept = {id(k): k for k in entry.source.leaves() if k.nbytes}  # a parameter has none
            new = [k for key, k in kept.items() if key not in holders]
            if any(v.nbytes > 1024 for v in values):  # counts and statistics need no words
                others = [holders[key] for key in kept if key in holders]
                row.add(what or _how(entry.source, [o for o in others if o != me], bool(new) or me in others))
            row.stored = row.stored or isinstance(entry.source, Approximated)
            row.stored = row.stored or any(isinstance(k, Stored) and k.approximate for k in kept.values())
            new_ones = {id(v): v for v in values if id(v) not in counted}
            row.before += sum(v.nbytes for v in new_ones.values())
            row.after += sum(k.nbytes for k in new)
            counted |= new_ones.keys()
            holders |= {id(k): me for k in new}
        for row in rows.values():
            row.how = row.how or ["held"]
        self.watch.report.account(list(rows.values()))


def _how(source: Any, holders: Sequence[str], new: bool) -> str:
    others = " and ".join(dict.fromkeys(holders[:2]))
    if isinstance(source, Stored):
        return str(source.store) if not source.instead else f"held for {others}"
    if isinstance(source, Exact):
        return "held" if new else f"held for {others}"
    if isinstance(source, Blank):
        return "not held: only its shape is needed"
    return f"computed again from what is held for {others}" if others and not new else "computed again from what is held for that"
