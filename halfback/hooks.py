"""What stands around blocks in training: the state of a forward, and the hooks that split and merge.

NOTE [one draw a forward]
 1. Positions are drawn at the first chosen block that a forward enters, and kept until that forward ends.
 2. Inside a backward, nothing is drawn. A checkpointed block that splits a plain tensor again looks up what its forward drew, by the
    checkpoint (drawn.py). Where it cannot be found (the forward ran without gradients, as reentrant checkpointing does, or it could be
    one of several) it raises: another mask would be wrong, and silent.
 3. At the end of a forward the state is as it was before it, so that a compiled forward is traced once.
"""

from __future__ import annotations

import inspect
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from .drawn import Ambiguous, Drawn
from .handed import exchange
from .methods import SBP, SkipTokens
from .notes import LISTENERS, caution, constant, listen, note, uncompiled
from .positions import Positions, draw, keeps, tick
from .recompute import Recomputed, allow_modes, settle, settled
from .standins import in_transform
from .streams import (
    ROUTE,
    TRUNK,
    Site,
    Streams,
    absent,
    contains,
    find,
    merge,
    merge_all,
    split,
    split_parts,
    tell_einops,
)

MOST_LEADING_TOKENS = 16  # class, distillation and register tokens: more than these in front of an image grid are something else
CANNOT_TELL = (
    "{} is computed again in a backward pass, and halfback cannot tell which positions its forward kept: reentrant checkpointing ran it "
    "without gradients, its input came back in another storage, or it is compiled by itself inside of a checkpoint. Use "
    "checkpoint(..., use_reentrant=False), around parts of the model and not all of it, hb.Recompute() instead of offloading block inputs, "
    "and compile the whole model."
)
SEVERAL = (
    "{} is computed again in a backward pass, and halfback cannot tell of which of several forwards, each of which kept positions of its "
    "own. Run one forward in a checkpoint, do not nest them, or use hb.Recompute()."
)
READS_ONE = (
    "of each sample the loss reads one of {1} positions, which {0} does not always keep. Where it drops it, the chosen blocks get next to "
    "no gradient. Choose blocks that exact ones follow, as layers='first 2/3', or use Lean, Recompute or DropIT"
)
READS_NONE = (
    "in {2} of the first {3} steps the loss read none of the {1} positions that {0} keeps: it reads few. The chosen blocks got next to no "
    "gradient there. Keep more, choose blocks that exact ones follow, as layers='first 2/3', or use Lean, Recompute or DropIT"
)
LOOKS = 3  # losses that do so, the first ones: of few masked tokens one may be alone by chance
LOOKED_AT = 16  # losses, until no more are


@constant
def in_backward() -> bool:
    """Does a backward pass compute something again? Asked while a frame is traced, too."""
    return torch._C._current_graph_task_id() != -1


class State:
    """What the hooks of one SBP or SkipTokens share."""

    def __init__(self, method: SBP | SkipTokens, chosen: list[str], ends: set[str], chains: dict[str, list], report: Any):
        self.method = method
        self.chosen = chosen
        self.ends = ends  # blocks after which streams end
        self.chains = chains  # for each block: by which factors the grid shrinks between it and the last chosen one
        self.report = report
        self.step = torch.zeros((), dtype=torch.int64)
        self.set_keep(method.keep)
        self._reset()

    def set_keep(self, keep: float) -> None:
        ratios = keeps(keep, len(self.chosen), self.method.ramp)
        same = self.method.masks == "shared" and len(set(ratios)) == 1
        # A compiler makes a constant of text; of a float that changes it makes a symbol, which no count can be rounded from.
        self.written = [str(r) for r in (ratios[:1] if same else ratios)]
        self.row = {name: 0 if same else i for i, name in enumerate(self.chosen)}

    @property
    def ratios(self) -> list[float]:
        return [float(r) for r in self.written]

    def _reset(self) -> None:
        tell_einops()
        self.owner = listen(self.report)
        self.on, self.paused = True, 0  # paused: by how many `exact`, of which a copy is in none
        self.open = False
        self.key: Tensor | None = None  # of this forward's draws
        self.current: list[Positions] | None = None
        self.grids: tuple[tuple[tuple[int, ...], str], ...] = ()  # of convolutions in this forward, and where, the last one first
        self.asked: tuple[tuple[int, int], ...] = ()  # sizes that a compiled forward was called with: see `_turned`
        self.drawn = Drawn()  # by this forward and others, whose checkpoints may run again

    def __getstate__(self) -> dict[str, Any]:
        passing = ("owner", "open", "key", "current", "grids", "asked", "drawn", "on", "paused")
        return {k: v for k, v in self.__dict__.items() if k not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def mark(self) -> int:
        """Where the draws stand; `rewind` goes back there."""
        return int(self.step)

    def rewind(self, mark: int) -> None:
        self.step.fill_(mark)

    def site(self, block: str) -> Site:
        return Site(block, self.owner, self.method.attention, self.method.scale)

    # NOTE [one draw a forward]

    def start(self) -> None:
        if self.key is None and not in_backward():
            self.key = tick(self.step)

    def finish(self) -> None:
        self.key, self.current, self.grids, self.asked = None, None, (), ()

    def positions(self, block: str, x: Tensor, grid: tuple[int, ...], whole: bool) -> Positions:
        """The positions that a block's input x is split at. `whole`: the grid is all of it, no leading tokens."""
        where: Any = (block, grid, whole, x.device)
        if torch.compiler.is_compiling():  # pure, from the key, as this may be traced inside a checkpoint
            if self.key is None and in_backward():
                raise RuntimeError(CANNOT_TELL.format(block))
            self.start()
            return self._at(self._draw(self.key, *where), self.key, *where)
        if in_backward():
            return self._at(*self._drawn_before(block, x), *where)
        if self.current is None:
            self.start()
            self.current = self._draw(self.key, *where)
        self.drawn.keep(x, self.current, self.key)
        return self._at(self.current, self.key, *where)

    def _drawn_before(self, block: str, x: Tensor) -> tuple[list[Positions], Any]:
        try:
            found = self.drawn.look_up(x)
        except Ambiguous:
            raise RuntimeError(SEVERAL.format(block)) from None
        if found is None:
            raise RuntimeError(CANNOT_TELL.format(block))
        return found

    def _at(
        self, drawn: list[Positions], key: Tensor | None, block: str, grid: tuple[int, ...], whole: bool, device: torch.device
    ) -> Positions:
        """The split of this grid among those that were drawn together."""
        at: Positions | None = drawn[self.row[block]]
        while at is not None:
            if at.n == math.prod(grid) and (not whole or at.grid == grid):
                return at
            at = at.coarse
        return self._draw(key, block, grid, whole, device)[self.row[block]]  # a grid of its own, which no factor leads to

    def _draw(self, key: Any, block: str, grid: tuple[int, ...], whole: bool, device: torch.device) -> list[Positions]:
        m = self.method
        always, factors = 0, []
        if whole:
            factors = self.chains[block]
            while factors and not _divides(grid, factors):
                factors = factors[:-1]
            for f in factors:
                grid = tuple(g // c for g, c in zip(grid, f, strict=True))
        else:
            always, grid = self._places(grid[0], block)
        if m.sampler == "frames" and len(grid) != 3:
            raise ValueError(f'{m}: sampler="frames" needs a (T, H, W) grid; {block} has {grid}. Give grid=(T, H, W) or another sampler.')
        return draw(key, grid, self.ratios, always, m.sampler, m.masks, m.seed, device, factors[::-1], self.owner)

    def _places(self, n: int, block: str) -> tuple[int, tuple[int, ...]]:
        """How many leading tokens stand before which grid, in n tokens."""
        m = self.method
        if m.grid is not None:
            always = n - math.prod(m.grid) if m.always is None else m.always
            if always < 0 or always + math.prod(m.grid) != n:
                raise ValueError(
                    f"{m}: grid={m.grid} does not fit: {block} has {n} tokens, and {math.prod(m.grid)} + {m.always or 0} always kept "
                    f"are {math.prod(m.grid) + (m.always or 0)}."
                )
            return always, m.grid
        fitting = {}
        for known, tower in reversed(self.grids):
            most = MOST_LEADING_TOKENS if block.startswith(tower) else 1  # of another tower's a text may have the length, by chance
            for grid in reversed(_pooled(known)):
                number = n - math.prod(grid)
                if 0 <= number <= most and m.always in (None, number):
                    fitting[number] = grid
        if fitting:
            return min(fitting), fitting[min(fitting)]
        always = min(n - 1, 1 if m.always is None else m.always)  # the first may be a class token; if not, one position more is kept
        return always, (n - always,)


def _turned(state: State, block: str, first: int, second: int) -> bool:
    """Do positions come first, and then samples? Where the model was called with (samples, positions), as texts are, and not with this.
    Once found it is known, so that a compiler takes no length for a constant twice."""
    if _known(state.owner, block):
        return True
    sizes = state.asked or _sizes(state.owner)
    found = any([first == b and second == a for a, b in sizes]) and not any([first == a and second == b for a, b in sizes])
    return found and _know(state.owner, block)


@constant
def _sizes(owner: str) -> tuple[tuple[int, int], ...]:
    return tuple(LISTENERS[owner].sizes) if owner in LISTENERS else ()


@constant
def _known(owner: str, block: str) -> bool:
    return owner in LISTENERS and block in LISTENERS[owner].turned


@constant
def _know(owner: str, block: str) -> bool:
    if owner in LISTENERS:
        LISTENERS[owner].turned.add(block)
    return True


def _pooled(grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A grid of a map, and what halving it makes of it, as merging of patches does without a convolution."""
    found = [grid]
    while all([size > 1 and size % 2 == 0 for size in found[-1][-2:]]):
        found.append((*found[-1][:-2], *[size // 2 for size in found[-1][-2:]]))
    return found


def _divides(grid: tuple[int, ...], factors: list[tuple[int, ...]]) -> bool:
    product = [math.prod(f) for f in zip(*factors, strict=True)]
    return len(product) == len(grid) and all([g % p == 0 for g, p in zip(grid, product, strict=True)])


# The hooks: small objects, so that they can be copied, pickled, and known as ours


class Hook:
    """All hooks of halfback. The first line of each returns where nothing is to be done."""

    def __init__(self, state: State, name: str = ""):
        self.state = state
        self.name = name

    def idle(self, module: nn.Module) -> bool:
        return not (module.training and torch.is_grad_enabled() and self.state.on) or in_transform()


@constant
def _know_matmul() -> bool:
    """Of all operators Dynamo leaves out matmul. Where the left operand is no Tensor, as Streams, it exchanges both and calls the reversed
    method, of which it knows none, and called matmul itself: x @ weight became weight @ x. Where neither is one, it gave up."""
    from torch._dynamo.variables import builtin

    builtin.BUILTIN_TO_TENSOR_RFN_MAP.setdefault(operator.matmul, Tensor.__rmatmul__)
    known: dict[Any, Any] = getattr(builtin.BuiltinVariable, "_binops", dict)()
    if operator.matmul not in known:
        known[operator.matmul] = (["__matmul__", "__rmatmul__", "__imatmul__"], operator.imatmul)
        getattr(builtin.BuiltinVariable._binop_handlers, "cache_clear", lambda: None)()  # they are made from it
    return True


class Around(Hook):
    """Before and after a module that blocks are in. Its hooks are traced with the model's forward, which the root's are not, and outside
    of what is checkpointed. After one that all of them are in, what it returns of inner blocks (a backbone's maps) are tensors.

    Where this very module is compiled (module.compile()), its hooks are not: each would be a graph of its own, in front of the model's."""

    def __init__(self, state: State, within: bool, whole: bool = False):
        super().__init__(state)
        self.within, self.whole = within, whole

    @uncompiled
    def __call__(self, module, args, output=None):
        if self.idle(module):
            return None
        if self.within:
            self.state.start()
            if torch.compiler.is_compiling():
                allow_modes()
        return merge_all(output) if self.whole and contains(output) else None


class Begin(Hook):
    """Before the root's forward."""

    @uncompiled
    def __call__(self, module, args, kwargs):
        if self.idle(module):
            return None
        self.state.finish()  # what a forward that was cut left, and convolutions that a backward pass ran again
        sizes = [(t.shape[0], t.shape[1]) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > 1]
        if torch.compiler.is_compiling():
            self.state.asked = tuple(sizes)
        else:
            self.state.report.called(sizes)
        self.state.open = True
        self.state.start()  # here, and not in a block that is compiled by itself: computed again in a backward pass, it would draw anew
        return None


class End(Hook):
    """After the root's forward, also after one that failed: what a model returns are tensors."""

    def __call__(self, module, args, kwargs, output):
        if self.idle(module):
            return None
        self.state.open = False
        self.state.finish()
        if isinstance(self.state.method, SBP) and not torch.compiler.is_compiling():  # in a cache
            exchange((args, kwargs, output), lambda x: isinstance(x, (Streams, tuple)) and contains(x), merge_all)
        return merge_all(output) if contains(output) else None


class Grid(Hook):
    """After a convolution outside of the chosen blocks: its output's shape may be the grid that tokens come from."""

    def __init__(self, state: State, name: str, tower: str):
        super().__init__(state, name)
        self.tower = tower  # how names begin of the blocks that stand nearest to it

    def __call__(self, module, args, output):
        if self.idle(module) or not isinstance(output, Tensor):
            return None
        found = (tuple(output.shape[2:]), self.tower)
        self.state.grids = (found, *[g for g in self.state.grids if g != found])
        return None


class Plain(Hook):
    """Before an opaque module: it gets tensors."""

    def __call__(self, module, args, kwargs):
        if not (contains(args) or contains(kwargs)):  # whether a gradient is asked for here, or not
            return None
        return merge_all(args), merge_all(kwargs)


def tell_unseen(owner: str, name: str, block: nn.Module) -> None:
    if any(m._backward_hooks or m._backward_pre_hooks for m in block.modules()):
        note(owner, name, "unseen", "backward hooks of its modules, which do not fire on streams")


class Enter(Hook):
    """Before a chosen block: its first activation becomes two streams."""

    looks = 0  # at hooks that others set after ours

    def __init__(self, state: State, name: str, block: nn.Module):
        super().__init__(state, name)
        parts = list(block.modules())
        self.channels = {m.in_channels for m in parts if isinstance(m, (nn.Conv2d, nn.Conv3d))}
        self.lines = {m.in_channels for m in parts if isinstance(m, nn.Conv1d)}
        self.widths = {m.in_features for m in parts if isinstance(m, nn.Linear)} | {len(p) for p in block.parameters() if p.ndim == 1}
        self.batch_first = all(getattr(m, "batch_first", True) for m in parts)
        self.first = next(iter(inspect.signature(block.forward).parameters), "")

    def __call__(self, module, args, kwargs):
        if self.idle(module):
            return None
        if torch.compiler.is_compiling():
            _know_matmul()
            ROUTE.__enter__()
        elif self.looks < LOOKS:
            self.looks += 1
            tell_unseen(self.state.owner, self.name, module)
        if args:
            return (self.enter(args[0]), *args[1:]), kwargs
        if self.first in kwargs:
            return args, {**kwargs, self.first: self.enter(kwargs[self.first])}
        return None

    def enter(self, x: Tensor | Streams) -> Any:
        state = self.state
        if isinstance(x, Streams):
            if len(state.ratios) == 1:
                return x.entering(state.site(self.name))
            source, x = x.some, merge(x)
        else:
            source = x
        if not isinstance(x, Tensor) or x.ndim < 3 or not x.is_floating_point():
            note(state.owner, self.name, "skipped", "its first argument is no activation with positions")
            return x
        axis, span = self.place(x)
        grid = tuple(x.shape[axis : axis + span])
        at = state.positions(self.name, source, grid, span > 1)
        if at.k == at.n:
            return x
        whole = settle(x) if torch.compiler.is_compiling() and state.report.recomputed else x
        if isinstance(state.method, SkipTokens):
            return self.skip(whole, at, axis, span)
        return split(whole, at, axis, span, TRUNK, state.site(self.name))

    def place(self, x: Tensor) -> tuple[int, int]:
        """On which axes positions lie."""
        if x.ndim == 3 and self.state.method.axis is not None:
            return self.state.method.axis, 1
        if x.ndim == 3 and x.shape[1] in self.lines and x.shape[2] not in self.lines:
            return 2, 1
        if x.ndim == 3:
            return (1, 1) if self.batch_first and not _turned(self.state, self.name, *x.shape[:2]) else (0, 1)
        first = x.shape[1] in self.channels or (x.shape[1] in self.widths and x.shape[-1] not in self.widths)
        return (2, x.ndim - 2) if first else (1, x.ndim - 2)

    def skip(self, x: Tensor, at: Positions, axis: int, span: int) -> Streams:
        kept, dropped = split_parts(x.flatten(axis, axis + span - 1), at, axis)
        site = self.state.site(self.name)
        carry = getattr(self.state.method, "carry", None)
        carry = at.always == 0 if carry is None else carry
        if carry:
            return Streams((kept, dropped.detach()), None, at, axis, span, 1, TRUNK, site)
        return Streams((kept, None), None, at, axis, span, 1, TRUNK, site, rest=dropped.detach())


class Leave(Hook):
    """After a chosen block. Streams end after the last one of a run."""

    looked = False  # at what the losses read of the last one's output, often enough
    looks = alone = none = 0  # so often; how often of one position alone; and of none that is kept

    def __call__(self, module, args, output):
        if self.idle(module) and not contains(output):
            return None
        modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
        if modes and modes[-1] is ROUTE:  # not where torch compiled one of this block's hooks and not the other
            ROUTE.__exit__(None, None, None)
        if self.name not in self.state.ends:
            again = isinstance(module.__dict__.get("forward"), Recomputed)  # which does it itself
            return settled(output, whole=False) if torch.compiler.is_compiling() and contains(output) and not again else None
        if not self.state.open:  # a part of the model was called, without its root
            self.state.finish()
        if not contains(output):
            return None
        trunk, merged = find((output,)), merge_all(_restored(output))
        if not (torch.compiler.is_compiling() or self.looked or in_backward()):
            self.watch(trunk, merged[0] if isinstance(merged, (list, tuple)) else merged)
        return merged

    def watch(self, trunk: Streams | None, merged: Any) -> None:
        """In the first backwards: does the loss reach one position alone, which is kept by chance, or often none that is kept?"""
        if trunk is None or trunk.span > 1 or trunk.outer > 1 or not (isinstance(merged, Tensor) and merged.requires_grad):
            return
        at, axis = trunk.at, trunk.axis
        last = axis == merged.ndim - 2 or (axis == 0 and merged.ndim == 3)
        if not last or merged.shape[axis] != at.n or at.n < 3:  # features are not last, or this is another output
            return

        def look(grad: Tensor) -> None:
            batched = torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
            if self.looked or type(grad) is not Tensor or grad.is_meta or batched or not grad.numel():
                return  # without contents, or of more than one backward
            if grad.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            reached = torch.linalg.vector_norm(grad, math.inf, -1).movedim(axis, -1).reshape(-1, at.n) != 0
            each = reached.sum(-1)
            if not each.any():
                return  # as behind a head that begins with zeros
            if ("cut", "") not in self.state.report.notes:
                return  # exact so far
            self.looks += 1
            self.alone += bool(each.max() == 1 and reached[:, at.always :].any())
            self.none += not reached.index_select(-1, at.index[0, : at.k]).any()
            method, report = self.state.method, self.state.report
            one, few = self.alone == self.looks == LOOKS, self.none == LOOKS
            if one:
                caution(report, self.name, READS_ONE.format(method, at.n))
            elif few:
                caution(report, self.name, READS_NONE.format(method, at.n, LOOKS, self.looks))
            many = reached[:, : at.always].any() or 4 * reached.sum() > reached.numel()  # of so many some are always kept
            self.looked = one or few or bool(many) or self.looks == LOOKED_AT

        merged.register_hook(look)


def _restored(tree: Any) -> Any:
    """SkipTokens: what waited comes back, as it left; what was carried along comes back without a gradient."""
    if isinstance(tree, Streams) and tree.site.attention == "skip":
        rest = tree.rest.to(tree.dtype) if absent(tree) else tree.dropped.detach()
        return merge(tree.like(tree.kept, rest))
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_restored(x) for x in tree])
    return tree
