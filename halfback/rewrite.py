"""apply_, remove_, exact: the only walk over a model.

SBP and SkipTokens reach a model by hooks: one on each chosen block that splits its input and, after the last of a run, one that
merges its output; one pair on the root that frames a forward. Recompute sets `forward` on the instance of a block, since a hook
cannot run a forward twice (recompute.py); Lean and DropIT set it on the root and on blocks, to put a ledger around it (watch.py). No
class is swapped, no function patched, no name or parameter added.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from . import blocks as finding
from .apart import Apart
from .heads import LEAST, Spared, bodies, find_heads
from .hooks import Around, Begin, End, Enter, Grid, Hook, Leave, Plain, State
from .methods import METHODS, SBP, ChunkedLoss, DropIT, Lean, Method, Recompute, SkipTokens
from .notes import log
from .recompute import Recomputed
from .standins import Known, Standin, standins
from .watch import Row, Unseen, Watch, Watched, choose_layers

SIZES = 64  # of what a model was called with, the last ones
TOLD = {  # what a report says of a kind of note: of what, and in which blocks
    "merged": "merged, exactly, at {} in {}",
    "dense": "dense, output split again, at {} in {}",
    "unseen": "not seen: {} in {}",
    "caution": "CAUTION, behind {1}: {0}",
}


@dataclass
class Report:
    """What `apply_` touched, what it skipped and why; completed by the first forward."""

    model: str
    methods: tuple[Method, ...]
    blocks: list[str]
    recomputed: list[str]
    apart: list[str] = field(default_factory=list)  # modules that run for kept positions, then for dropped ones
    experts: list[str] = field(default_factory=list)  # modules that are called so, and do not
    approximated: list[str] = field(default_factory=list)  # layers whose weight gradient comes from a store
    positions: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # of Lean and DropIT: what each layer and function saves, and how it is held
    before: int | None = None  # bytes that plain training would hold, and that are held: known after the first training step
    after: int | None = None
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    plan: Any = None  # the plan that the methods come from
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of what the model was called with: samples, and what comes next
    turned: set[str] = field(default_factory=set)  # blocks whose inputs have positions first, and then samples

    def hear(self, block: str, kind: str, what: str) -> None:
        where = self.notes.setdefault((kind, what), [])
        if block not in where:
            where.append(block)

    def called(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = [*(size for size in self.sizes if size not in sizes), *dict.fromkeys(sizes)][-SIZES:]

    def account(self, rows: list[Row]) -> None:
        if self.before is None:
            self.rows = rows
            self.before, self.after = sum(r.before for r in rows), sum(r.after for r in rows)

    def table(self) -> str:
        """Lean and DropIT: a line for all that each layer and function saves."""
        if self.before is None:
            return "what each layer holds is known after the first training step"
        width = max([len(r.layer) for r in self.rows], default=5)
        lines = [f"{'layer':{width}}  {'function':28}  {'before':>10}  {'after':>10}"]
        lines += [f"{r.layer:{width}}  {r.function:28}  {_mib(r.before):>10}  {_mib(r.after):>10}  {'; '.join(r.how)}" for r in self.rows]
        return "\n".join([*lines, f"{'all':{width}}  {'':28}  {_mib(self.before):>10}  {_mib(self.after or 0):>10}"])

    def drew(self, grid: tuple[int, ...], factors: list[tuple[int, ...]], always: int, counts: list[int]) -> None:
        finest = [math.prod(f) for f in zip(grid, *factors, strict=True)]
        text = f"{'x'.join(map(str, finest))} positions" + (f" after {always} that are always kept" if always else "")
        text += f", drawn on {'x'.join(map(str, grid))}" if factors else ""
        share = sum(counts) / len(counts) / math.prod(grid)
        told = f"{text}; {share:.1%} of them kept" + (" on average" if len(set(counts)) > 1 else "")
        if told not in self.positions:  # a schedule keeps more or less of the same positions later
            self.positions = [*(p for p in self.positions if not p.startswith(f"{text};")), told]

    @property
    def merged(self) -> dict[str, list[str]]:
        """Operations that were not understood and so merged, with the blocks that ran them."""
        return {what: where for (kind, what), where in self.notes.items() if kind == "merged"}

    @property
    def fallbacks(self) -> dict[str, list[str]]:
        return {what: where for (kind, what), where in self.notes.items() if kind == "fell back"}

    def __str__(self) -> str:
        if not self.methods:
            return f"halfback: nothing on {self.model}: plain training fits"
        lines = [f"halfback: {' + '.join(str(m) for m in self.methods)} on {self.model}"]
        if self.blocks:
            lines.append(f"  approximate backward in {len(self.blocks)} blocks: {_range(self.blocks)}")
        elif not self.recomputed and not any(isinstance(m, (Lean, DropIT, ChunkedLoss)) for m in self.methods):
            lines.append("  nothing: keep=1 keeps everything, so training is exact")
        if self.experts:
            lines.append(f"  if each position goes through {_range(self.experts)} by itself, SBP(apart=['*.experts']) saves there, too")
        if self.apart:
            lines.append(f"  run for kept positions, then for dropped ones: {_range(self.apart)}")
        if self.recomputed:
            lines.append(f"  recomputed in the backward: {len(self.recomputed)} blocks: {_range(self.recomputed)}")
        if any(m.changes_forward for m in self.methods):
            lines.append("  this CHANGES THE FORWARD in training: dropped tokens do not take part in the chosen blocks")
        if any(isinstance(m, (Lean, DropIT)) for m in self.methods):
            lines += self._held()
        lines += [f"  {text}" for text in self.positions]
        lines += [
            f"  {TOLD.get(kind, kind + ': {} in {}').format(what, _range(where))}"
            for (kind, what), where in self.notes.items()
            if kind != "cut"
        ]
        uncut = [name for name in self.blocks if name not in self.notes.get(("cut", ""), [])]
        later = any(m.schedule and max(m.keeps) == 1 > min(m.keeps) for m in self.methods)  # its schedule keeps all, now
        if self.positions and uncut and not later and not any(m.changes_forward for m in self.methods):
            lines.append(
                f"  nothing was cut, so gradients are exact and no less is held, maybe more, in {_range(uncut)}; leave them out of layers="
            )
        if self.blocks and not self.positions:
            lines.append("  positions, merges and fallbacks: known after the first training step")
        return "\n".join(lines)

    __repr__ = __str__  # what notebooks show

    def _held(self) -> list[str]:
        lines = []
        if self.before is None or self.after is None:
            if self.approximated:
                lines.append(f"  weight gradients from stores in up to {len(self.approximated)} layers: {_range(self.approximated)}")
            return [*lines, "  what is held, layer by layer: known after the first training step"]
        if self.approximated:
            stored = list(dict.fromkeys(r.layer for r in self.rows if r.stored))
            where = _range(stored) or "others hold all inputs"
            lines.append(f"  weight gradients from stores in {len(stored)} of {len(self.approximated)} layers: {where}")
        share = self.after / max(1, self.before)
        beside = " beside what is compiled" if any(kind == "compiled" for kind, _ in self.notes) else ""
        lines.append(f"  held for backward{beside}: {_mib(self.before)} -> {_mib(self.after)} ({share:.2f}); report.table() says by whom")
        ways: dict[str, list[Row]] = {}
        for row in self.rows:
            ways.setdefault(row.function, []).append(row)
        for function, rows in ways.items():
            before, after = sum(r.before for r in rows), sum(r.after for r in rows)
            how = list(dict.fromkeys(re.sub(r" for .*", "", h) for r in rows for h in r.how))
            lines.append(f"    {function}: {_mib(before)} -> {_mib(after)}, {len(rows)} x: {'; '.join(how)}")
        return lines


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n < 2**30 else f"{n / 2**30:.2f} GiB"


def _range(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"


# The public verbs


@dataclass
class Applied:
    """What a model remembers of its methods."""

    report: Report
    states: list[State | Watch]
    standins: list[Standin]


def apply_(model: nn.Module, *methods: Method) -> Report:
    """Make a model train with these methods, in place; `remove_` undoes it.

    Eval mode and no_grad are untouched. Everything is checked before anything is changed.
    """
    _check(model, methods)
    found = finding.find_blocks(model)
    lean = [m for m in methods if isinstance(m, (Lean, DropIT))]
    picks = {type(m): finding.choose(model, found, m.layers) for m in methods if isinstance(m, (SBP, SkipTokens, Recompute))}
    chunked = next((m for m in methods if isinstance(m, ChunkedLoss)), None)
    heads = _heads(model, found) if chunked else []
    modules = dict(model.named_modules())
    opaque = [n for m in methods for n in finding.matching_modules(model, getattr(m, "opaque", ()), "opaque")]

    streamed = next((m for m in methods if isinstance(m, (SBP, SkipTokens))), None)
    chosen = picks[type(streamed)] if streamed and min(streamed.keeps) < 1 else []  # who keeps everything is exact
    again = next((m for m in methods if isinstance(m, Recompute)), None)
    recomputed = picks.get(Recompute, [])
    if again and again.parts > 1:
        _check_parts(again, recomputed, modules)
    if lazy := [name for name in chosen if any(is_lazy(p) for p in modules[name].parameters())]:
        raise ValueError(f"apply_(): {streamed}: {lazy[0]} has parameters without a shape yet. Run a batch through the model first.")
    apart = _apart(model, streamed, chosen) if isinstance(streamed, SBP) else {}
    experts = [n for n in modules if n.endswith(".experts") and n not in apart and any(n.startswith(f"{block}.") for block in chosen)]
    report = Report(type(model).__name__, methods, chosen, recomputed, list(apart), experts if isinstance(streamed, SBP) else [])
    with _all_or_nothing(model):
        states: list[State | Watch] = []
        if lean:
            spared = again is not None and again.sparing
            states.append(_watch(model, lean, [b for b in found if spared or b[0] not in recomputed], report))
        if streamed and chosen:
            states.append(_hook(model, streamed, found, chosen, opaque, modules, report))
        kinds: dict[type, bool | None] = {}
        for name in recomputed:
            block = modules[name]
            block.forward = Recomputed(block, block.__dict__.get("forward"), again.parts if again else 1, name, kinds, report)
        for name, module in apart.items():
            module.forward = Apart(module, name, module.__dict__.get("forward"))
        for block in (modules[name] for name in chosen):
            if not isinstance(block.__dict__.get("forward"), Standin):
                block.forward = Known(block, block.__dict__.get("forward"))
        for name in heads:
            own = modules[name].__dict__.get("forward")
            modules[name].forward = Spared(modules[name], name, report, bodies(model, heads), chunked.rows if chunked else None, own)
        object.__setattr__(model, "_halfback", Applied(report, states, list(standins(model))))
    return report


def _apart(model: nn.Module, method: SBP, chosen: list[str]) -> dict[str, nn.Module]:
    """The modules that run for each part by itself; one that stands in several blocks once."""
    matching = finding.matching_modules(model, method.apart, "apart")
    inside = {n: m for n, m in model.named_modules(remove_duplicate=False) if any(n.startswith(f"{block}.") for block in chosen)}
    found = {n: m for n, m in inside.items() if any(fnmatch.fnmatchcase(n, p) for p in method.apart)}
    if matching and chosen and not found:
        raise ValueError(f"apply_(): apart={method.apart!r}: {matching[0]} is not inside of a chosen block, as {chosen[0]}.")
    for name, module in found.items():
        norm = next((m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)
        if norm is not None:
            raise ValueError(
                f"apply_(): apart={method.apart!r}: {name} has a {type(norm).__name__}, whose statistics are of all positions."
            )
    return {n: m for n, m in found.items() if n == next(k for k, other in found.items() if other is m)}


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        remove_(model)
        raise


def _check(model: nn.Module, methods: tuple[Method, ...]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply_(): expected a torch.nn.Module, found {type(model).__name__}.")
    if not methods:
        raise ValueError("apply_(): no method given. Pass one, as hb.apply_(model, hb.SBP(keep=0.5)).")
    for m in methods:
        if not isinstance(m, Method):
            raise TypeError(
                f"apply_(): {m!r} is no method. Methods: {', '.join(c.__name__ for c in METHODS.values())}, as hb.SBP(keep=0.5)."
            )
    kinds = [type(m).__name__ for m in methods]
    if len(set(kinds)) < len(kinds) or {"SBP", "SkipTokens"} <= set(kinds):
        raise ValueError(f"apply_(): {' + '.join(kinds)} cannot be combined: give each method once, and SBP or SkipTokens, not both.")
    check_free(model)


def check_free(model: nn.Module) -> None:
    """A model that has methods is an error."""
    for name, module in model.named_modules():
        if "_halfback" in module.__dict__:
            said = " + ".join(str(m) for m in module.__dict__["_halfback"].report.methods)
            raise ValueError(f"apply_(): {name or type(model).__name__} already has {said}. Call hb.remove_() on it first.")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), module.__dict__.get("forward")]
        if any(isinstance(h, (Hook, Standin)) for h in hooks):
            raise ValueError(
                f"apply_(): {name or type(model).__name__} is part of a model that has methods. Call hb.remove_() on that first."
            )


def _check_parts(method: Recompute, names: list[str], modules: dict[str, nn.Module]) -> None:
    for name in names:
        norm = next((m for m in modules[name].modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)), None)
        if norm is not None:
            raise ValueError(
                f"apply_(): parts={method.parts}: {name} has a {type(norm).__name__}, whose statistics are of a whole batch. Leave parts=1."
            )


def _heads(model: nn.Module, found: list[finding.Named]) -> list[str]:
    heads = find_heads(model, [name for name, _ in found])
    if not heads:
        raise ValueError(
            f"apply_(): {type(model).__name__} has no linear layer outside of its blocks with {LEAST} outputs or more, so ChunkedLoss has "
            "nothing to spare. It is for large vocabularies."
        )
    return heads


def _watch(model: nn.Module, methods: list, found: list[finding.Named], report: Report) -> Watch:
    """A ledger around the root, and around each block, where checkpointing may run it again."""
    method = next((m for m in methods if isinstance(m, DropIT)), methods[0])
    chosen = report.approximated = choose_layers(model, method.layers) if isinstance(method, DropIT) and min(method.keeps) < 1 else []
    watch = Watch(model, method, chosen, report)
    for module in {id(m): m for m in (model, *(block for _, block in found))}.values():
        module.forward = Watched(module, watch, module.__dict__.get("forward"))
    return watch


def _hook(model, method, found, chosen, opaque, modules, report) -> State:
    order = [name for name, _ in found]
    if not set(chosen) <= set(order):
        order = list(chosen)
    picked = set(chosen)
    following = dict(itertools.pairwise([*order, ""]))
    ends = {name for name in chosen if following[name] not in picked or _stack(name) != _stack(following[name])}
    state = State(method, chosen, ends, _chains(model, [(n, modules[n]) for n in order], chosen), report)
    model.register_forward_pre_hook(Begin(state), with_kwargs=True, prepend=True)
    model.register_forward_hook(End(state), with_kwargs=True, always_call=True)
    for name in _above(chosen):
        modules[name].register_forward_pre_hook(Around(state, True))
        modules[name].register_forward_hook(Around(state, False, whole=all(c.startswith(f"{name}.") for c in chosen)))
    for name in _maps(model, chosen):
        modules[name].register_forward_hook(Grid(state, name, _tower(name, [*order, *chosen])))
    for name in opaque:
        modules[name].register_forward_pre_hook(Plain(state, name), with_kwargs=True)
    for name in chosen:
        modules[name].register_forward_pre_hook(Enter(state, name, modules[name]), with_kwargs=True)
        modules[name].register_forward_hook(Leave(state, name), prepend=True)
        if any(m._backward_hooks or m._backward_pre_hooks for m in modules[name].modules()):
            report.hear(name, "unseen", "backward hooks of its modules, which do not fire on streams")
    return state


def _tower(name: str, blocks: list[str]) -> str:
    """With which parts the name of a module begins, and those of the blocks that stand nearest to it."""
    parts = name.split(".")[:-1]
    return max((_common(parts, block.split(".")) for block in blocks), key=len, default="")


def _common(a: list[str], b: list[str]) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(f"{part}." for part, _ in same)


def _stack(name: str) -> str:
    """The stack that a block is in: an encoder's and a decoder's blocks run one after the other in neither's name."""
    return re.sub(r"\d+", "#", name)


def _chains(model: nn.Module, blocks: list[finding.Named], chosen: list[str]) -> dict[str, list]:
    """For each chosen block the factors by which the grid shrinks between it and the end of its run of streams."""
    shrinks = finding.shrinks(model, blocks)
    chains = {}
    for i, name in enumerate(chosen):
        factors = [shrinks[later] for later in chosen[i + 1 :] if shrinks.get(later)]
        known = list(itertools.takewhile(lambda f: -1 not in f, factors))
        chains[name] = known
    return chains


def _above(chosen: list[str]) -> list[str]:
    """The modules that chosen blocks are in, but for the root, whose hooks are traced apart from its forward."""
    parts = [name.split(".") for name in chosen]
    return sorted({".".join(p[:i]) for p in parts for i in range(1, len(p))})


def _maps(model: nn.Module, chosen: list[str]) -> list[str]:
    """Convolutions over images or videos outside of the chosen blocks: embeddings of patches, and what pools between stages."""
    inside = {id(part) for name in chosen for part in model.get_submodule(name).modules()}
    return [name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Conv3d)) and id(m) not in inside]


def remove_(model: nn.Module) -> None:
    """Undo `apply_` exactly. A model that has nothing applied is left alone."""
    for module in model.modules():
        for hooks, extra in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for key in [k for k, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                for flags in extra:
                    flags.pop(key, None)
        while isinstance(module.__dict__.get("forward"), Standin):
            _take_off(module)
        if isinstance(module._compiled_call_impl, Unseen):
            module._compiled_call_impl = module._compiled_call_impl.call
        for standin in getattr(module.__dict__.pop("_halfback", None), "standins", ()):
            standin.gone = True


def _take_off(module: nn.Module) -> None:
    """The outermost forward of an instance, which is ours."""
    own = module.__dict__["forward"].own
    if own is None:
        del module.forward
    else:
        module.forward = own


@contextlib.contextmanager
def exact(model: nn.Module, recompute: bool = False) -> Iterator[None]:
    """Exact gradients for a while. Recompute and Lean, which are exact, stay on, and so does what of DropIT is Lean.

    recompute   all blocks are recomputed meanwhile, so that what is held falls instead of rising
    """
    states = _states(model)
    blocks = _not_recomputed(model) if recompute else []
    told = Report(type(model).__name__, (), [], [name for name, _ in blocks])  # by them, in warnings alone
    again = [Recomputed(block, block.__dict__.get("forward"), name=name, report=told) for name, block in blocks]
    if recompute and not finding.find_blocks(model):
        log.warning("halfback: exact(): %s has no blocks to recompute, so exact gradients hold what they hold.", type(model).__name__)
    for s in states:
        s.paused, s.on = s.paused + 1, False  # a count, as who asked first need not be done last
    for standin in again:
        standin.module.forward = standin
    try:
        yield
    finally:
        for s in states:
            s.paused -= 1
            s.on = not s.paused
        for standin in again:
            standin.gone = True
            if standin.module.__dict__.get("forward") is standin:  # else remove_ was here, or others put it into a forward of theirs
                _take_off(standin.module)


def follow_(model: nn.Module, done: float) -> None:
    """Keep what the methods' schedules say when this share of the training is done, in [0, 1]: call it before each step."""
    if not isinstance(done, (int, float)) or not 0 <= done <= 1:
        raise ValueError(f"follow_(): done={done!r} must be the share of the training that is done, in [0, 1].")
    for s in _states(model):
        if s.method.schedule is not None:
            s.set_keep(s.method.keep_at(done))


def _states(model: nn.Module) -> list[State | Watch]:
    return [s for module in model.modules() for s in getattr(module.__dict__.get("_halfback"), "states", [])]


def _not_recomputed(model: nn.Module) -> list[finding.Named]:
    """The blocks that are not recomputed already, by us or by the model itself."""
    return [
        (name, block)
        for name, block in finding.find_blocks(model)
        if not any(isinstance(f, Recomputed) and not f.gone for f in _forwards(block))
        and not getattr(block, "gradient_checkpointing", False)
    ]


def _forwards(module: nn.Module) -> Iterator[Any]:
    """The forwards of an instance, outermost first."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "own", None)
