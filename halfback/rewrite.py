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
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from . import blocks as finding
from .apart import Apart
from .heads import LEAST, Spared, bodies, find_heads
from .hooks import Around, Begin, End, Enter, Grid, Hook, Leave, Plain, State, tell_unseen
from .methods import METHODS, SBP, ChunkedLoss, DropIT, Lean, Method, Recompute, SkipTokens
from .notes import log
from .recompute import Recomputed
from .standins import Known, Standin, standins
from .touched import Report
from .watch import Unseen, Watch, Watched, choose_layers

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
    choice = _choose(model, methods)
    with _all_or_nothing(model):
        return _change(model, methods, choice)


@dataclass
class Choice:
    """Whom the methods are for, by name."""

    modules: dict[str, nn.Module]
    found: list[finding.Named]  # all blocks
    streamed: SBP | SkipTokens | None
    chosen: list[str]  # blocks with streams
    apart: dict[str, nn.Module]
    opaque: list[str]
    lean: list[Lean | DropIT]
    again: Recompute | None
    recomputed: list[str]
    chunked: ChunkedLoss | None
    heads: list[str]

    @property
    def experts(self) -> list[str]:
        """Modules that are called so, which a user may want to run apart."""
        inside = [n for n in self.modules if any(n.startswith(f"{block}.") for block in self.chosen)]
        return [n for n in inside if n.endswith(".experts") and n not in self.apart] if isinstance(self.streamed, SBP) else []


def _choose(model: nn.Module, methods: tuple[Method, ...]) -> Choice:
    """Nothing is changed yet, and what cannot be is an error."""
    found, modules = finding.find_blocks(model), dict(model.named_modules())
    picks = {type(m): finding.choose(model, found, m.layers) for m in methods if isinstance(m, (SBP, SkipTokens, Recompute))}
    chunked = next((m for m in methods if isinstance(m, ChunkedLoss)), None)
    heads = _heads(model, found) if chunked else []
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
    lean = [m for m in methods if isinstance(m, (Lean, DropIT))]
    return Choice(modules, found, streamed, chosen, apart, opaque, lean, again, recomputed, chunked, heads)


def _change(model: nn.Module, methods: tuple[Method, ...], c: Choice) -> Report:
    report = Report(type(model).__name__, methods, c.chosen, c.recomputed, list(c.apart), c.experts)
    states: list[State | Watch] = []
    if c.lean:
        spared = c.again is not None and c.again.sparing
        states.append(_watch(model, c.lean, [b for b in c.found if spared or b[0] not in c.recomputed], report))
    if c.streamed and c.chosen:
        states.append(_hook(model, c.streamed, c.found, c.chosen, c.opaque, c.modules, report))
    kinds: dict[type, bool | None] = {}
    for name in c.recomputed:
        block = c.modules[name]
        block.forward = Recomputed(block, block.__dict__.get("forward"), c.again.parts if c.again else 1, name, kinds, report)
    for name, module in c.apart.items():
        module.forward = Apart(module, name, module.__dict__.get("forward"))
    for block in (c.modules[name] for name in c.chosen):
        if not isinstance(block.__dict__.get("forward"), Standin):
            block.forward = Known(block, block.__dict__.get("forward"))
    for name in c.heads:
        own = c.modules[name].__dict__.get("forward")
        rows = c.chunked.rows if c.chunked else None
        c.modules[name].forward = Spared(c.modules[name], name, report, bodies(model, c.heads), rows, own)
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
        tell_unseen(state.owner, name, modules[name])
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
