"""What stands around blocks in training: the state of a forward, the hooks that split and merge, the forward that runs twice.

NOTE [one draw a forward]
 1. Positions are drawn at the first chosen block that a forward enters, and kept until that forward ends.
 2. Inside a backward, nothing is drawn. A checkpointed block that splits a plain tensor again looks up what its forward drew, by the
    storage of that tensor, which checkpointing holds until then. Where it cannot be found (the tensor came back in another storage,
    or the forward ran without gradients, as reentrant checkpointing does) it raises: another mask would be wrong, and silent.
 3. At the end of a forward the state is as it was before it, so that a compiled forward is traced once.

NOTE [the same again]
A recomputed block has plain training's gradients only if its second run finds what the first one found. In eager mode:
 1. Buffers are what they were when the first run began, also those that it changed, or put others in the places of (spectral norm's
    vectors, a scale that follows the activations). They are copies, and the module's own are back after it: so statistics are updated
    once, and what the second run saves stays as it is. Numbers that a module with buffers keeps beside them (how long a table is, whether
    a codebook has begun) go with them.
 2. Parameters are those of the first run, also if they stood in the module for that forward alone (torch.func.functional_call). One that
    was changed in place since is an error, as it is where autograd saved it. What FSDP frees, or exchanges for a DTensor and back, is
    left to it.
 3. What a block keeps elsewhere is not seen. Under torch.compile the compiler chooses: it reads a buffer that was changed in place as it is
    by then, with torch's own checkpoint as with ours.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import ops  # which fills the table
from .attention import multi_head, steady
from .methods import SBP, DropIT, Lean, SkipTokens
from .notes import constant, listen, note, uncompiled
from .positions import Positions, draw, keeps, tick
from .streams import (
    ROUTE,
    RUNNING,
    TRUNK,
    Call,
    Site,
    Streams,
    absent,
    asked,
    contains,
    find,
    merge,
    merge_all,
    split,
    split_parts,
    tell_einops,
)

MOST_LEADING_TOKENS = 16  # class, distillation and register tokens: more than these in front of an image grid are something else
REMEMBERED = 64  # splits whose positions a checkpoint may still ask for
CANNOT_TELL = (
    "{} is computed again in a backward pass, and halfback cannot tell which positions its forward kept: reentrant checkpointing ran it "
    "without gradients, its input came back in another storage, or it is compiled by itself inside of a checkpoint. Use "
    "checkpoint(..., use_reentrant=False), hb.Recompute() instead of offloading block inputs, and compile the whole model."
)
COMPUTED_TOO = (
    "{} is computed again in a backward pass by the model's own checkpointing, and halfback cannot tell which positions its forward kept: "
    "{} computes inputs of a checkpoint again instead of holding them. Use hb.Recompute() instead of the model's own checkpointing, or "
    "leave {} out."
)
CHANGED = (
    "Recompute(): {}: its parameter {!r} was changed in place between the forward and the backward, which computes the block again. Call "
    "backward() before whatever changes it, as an optimizer's step()."
)
SMALL = 2**16  # bytes of a buffer that is kept as the first run found it, changed or not: kernels (batch norm) and .data change it unseen
NUMBERS = (bool, int, float, str, type(None))


@constant
def in_backward() -> bool:
    """Does a backward pass compute something again? Asked while a frame is traced, too."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Does torch.func run this? Its tensors have no storages, and it refuses hooks on what is saved."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


class State:
    """What the hooks of one SBP or SkipTokens share."""

    def __init__(self, method: SBP | SkipTokens, chosen: list[str], ends: set[str], chains: dict[str, list], report: Any):
        self.method = method
        self.chosen = chosen
        self.ends = ends  # blocks after which streams end
        self.chains = chains  # for each block: by which factors the grid shrinks between it and the last chosen one
        self.report = report
        self.step = torch.zeros((), dtype=torch.int64)
        self.on, self.paused = True, 0  # paused: by how many `exact`
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
        self.open = False
        self.key: Tensor | None = None  # of this forward's draws
        self.current: list[Positions] | None = None
        self.grid: tuple[int, ...] | None = None
        self.seen: OrderedDict[int, tuple[list[Positions], Any]] = OrderedDict()  # by storage: what its split was drawn as

    def __getstate__(self) -> dict[str, Any]:
        passing = ("owner", "open", "key", "current", "grid", "seen")
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
        if self.key is None:
            self.key = tick(self.step)

    def finish(self) -> None:
        self.key = self.current = self.grid = None

    def positions(self, block: str, x: Tensor, grid: tuple[int, ...], whole: bool) -> Positions:
        """The positions that a block's input x is split at. `whole`: the grid is all of it, no leading tokens."""
        where: Any = (block, grid, whole, x.device)
        if torch.compiler.is_compiling():  # pure, from the key, as this may be traced inside a checkpoint
            if self.key is None and in_backward():
                raise RuntimeError(CANNOT_TELL.format(block))
            self.start()
            return self._at(self._draw(self.key, *where), self.key, *where)
        storage = x.untyped_storage()._cdata
        if in_backward():
            if storage not in self.seen:
                raise RuntimeError(self._unknown(block))
            return self._at(*self.seen[storage], *where)
        if self.current is None:
            self.start()
            self.current = self._draw(self.key, *where)
        self.seen[storage] = (self.current, self.key)
        self.seen.move_to_end(storage)
        while len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
        return self._at(self.current, self.key, *where)

    def _unknown(self, block: str) -> str:
        lean = next((type(m).__name__ for m in self.report.methods if isinstance(m, (Lean, DropIT))), None)
        return CANNOT_TELL.format(block) if lean is None else COMPUTED_TOO.format(block, lean, lean)

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
        if self.grid is not None and 0 <= n - math.prod(self.grid) <= MOST_LEADING_TOKENS:
            leading = n - math.prod(self.grid)
            if m.always is None or m.always == leading:
                return leading, self.grid
        always = min(n - 1, (1 if self.grid is None else 0) if m.always is None else m.always)
        return always, (n - always,)


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
def _allow() -> bool:
    """While a frame is traced: our hooks may run inside a checkpointed region (transformers puts them there), where Dynamo forbids entering
    a function mode unless this is set. The mode is left again within the region, so nothing is lost in the recomputation. However the
    trace ends, the setting is put back."""
    config, tracer = torch._dynamo.config, getattr(torch._dynamo.symbolic_convert.tls, "current_tx", None)
    if tracer is not None and not config.skip_fwd_side_effects_in_bwd_under_checkpoint:
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        tracer.output.add_cleanup_hook(lambda: setattr(config, "skip_fwd_side_effects_in_bwd_under_checkpoint", False))
    return True


@constant
def checkpointed() -> bool:
    """While a frame is traced: are we inside of what a checkpoint computes again?"""
    tracer = torch._dynamo.symbolic_convert.tls.current_tx.output.current_tracer
    while tracer is not None and tracer.source_target is not torch.ops.higher_order.tag_activation_checkpoint:
        tracer = tracer.parent
    return tracer is not None


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
                _allow()
        return merge_all(output) if self.whole and contains(output) else None


class Begin(Hook):
    """Before the root's forward."""

    @uncompiled
    def __call__(self, module, args, kwargs):
        if self.idle(module):
            return None
        self.state.open, self.state.current, self.state.key = True, None, None
        self.state.start()  # here, and not in a block that is compiled by itself: computed again in a backward pass, it would draw anew
        return None


class End(Hook):
    """After the root's forward, also after one that failed: what a model returns are tensors."""

    def __call__(self, module, args, output):
        if self.idle(module):
            return None
        self.state.open = False
        self.state.finish()
        return merge_all(output) if contains(output) else None


class Grid(Hook):
    """After a convolution in front of the blocks: its output's shape is the grid that tokens come from."""

    def __call__(self, module, args, output):
        if self.idle(module):
            return None
        self.state.grid = tuple(output.shape[2:])
        return None


class Plain(Hook):
    """Before an opaque module: it gets tensors."""

    def __call__(self, module, args, kwargs):
        if self.idle(module):
            return None
        return merge_all(args), merge_all(kwargs)


class Enter(Hook):
    """Before a chosen block: its first activation becomes two streams."""

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
        if x.ndim == 3 and x.shape[1] in self.lines and x.shape[2] not in self.lines:
            return 2, 1
        if x.ndim == 3:
            return (1, 1) if self.batch_first else (0, 1)
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

    def __call__(self, module, args, output):
        if self.idle(module) and not contains(output):
            return None
        modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else []
        if modes and modes[-1] is ROUTE:  # not where torch compiled one of this block's hooks and not the other
            ROUTE.__exit__(None, None, None)
        if self.name not in self.state.ends:
            again = isinstance(module.__dict__.get("forward"), Recomputed)  # which does it itself
            return _settled(output, whole=False) if torch.compiler.is_compiling() and contains(output) and not again else None
        if not self.state.open:  # a part of the model was called, without its root
            self.state.finish()
        return merge_all(_restored(output)) if contains(output) else None


def _restored(tree: Any) -> Any:
    """SkipTokens: what waited comes back, as it left; what was carried along comes back without a gradient."""
    if isinstance(tree, Streams) and tree.site.attention == "skip":
        rest = tree.rest.to(tree.dtype) if absent(tree) else tree.dropped.detach()
        return merge(tree.like(tree.kept, rest))
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_restored(x) for x in tree])
    return tree


class Steady(torch.overrides.TorchFunctionMode):
    """While a recomputed block is being compiled: attention without dropout is no random function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, out = kwargs or {}, NotImplemented
        if func is Tensor.unflatten:  # one of Python's, which cannot be traced here
            func = torch.unflatten
        if func is F.scaled_dot_product_attention and find(args) is None and find(tuple(kwargs.values())) is None:
            out = steady(*args, **kwargs)
        elif func is F.multi_head_attention_forward and find(args) is None and find(tuple(kwargs.values())) is None:
            # inside which a mode is off
            with self:
                out = multi_head(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out


STEADY = Steady()
ATTENTION = {torch.ops.halfback.kept_attention.default, torch.ops.halfback.row_attention.default}


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_attention():
    """In a compiled block the results of attention are kept that are computed of all queries at once: without dropped rows they are small,
    and with them the recomputation needs none of the dropped queries. In eager mode it would keep, and run, both streams."""
    return create_selective_checkpoint_contexts(_policy)


@torch.library.custom_op("halfback::settle", mutates_args=())
def settle(x: Tensor) -> Tensor:
    """x, computed: the compiler does not look into this, so it moves nothing from one side of it to the other. It would rather compute the
    whole block before the first of the chosen ones again than hold what enters them."""
    return x.clone()


@settle.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("halfback::settle_", mutates_args=("x",))
def settle_(x: Tensor) -> None:
    """The same without a copy: for all that the compiler knows, it writes to x."""


@settle_.register_fake
def _(x: Tensor) -> None:
    pass


def _settled_gradient(ctx, grad: Tensor) -> Tensor:
    grad = grad.clone()  # which is where the compiler writes it anyway
    settle_(grad)
    return grad


settle.register_autograd(_settled_gradient)


class Settled(torch.autograd.Function):
    """x itself, with its gradient settled.

    Left to itself, the compiler makes one kernel of what it can, across blocks: a sum over the gradient that leaves one block and another
    over the same one in the next. Such a kernel runs where the first of them would, with all that the second needs before it, and while
    it waits the first block's tensors wait too. Of recomputed blocks that is more than all they hold. It does so as well with the
    gradient of dropped positions, which is a sum over blocks of elementwise terms, to which each block adds one.
    """

    @staticmethod
    def forward(ctx, x: Tensor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _settled_gradient(ctx, grad)


def _settled(tree: Any, whole: bool = True) -> Any:
    """What a block returns, with its gradients settled, or of Streams those of dropped positions alone."""
    if isinstance(tree, Streams) and tree.parts is not None:
        kept, dropped = tree.parts
        return tree.like(_settled(kept) if whole else kept, _settled(dropped))
    if isinstance(tree, Streams):
        grid = _settled(tree.whole) if whole else tree.whole
        return Streams(None, grid, tree.at, tree.axis, tree.span, tree.outer, tree.role, tree.site, tree.rest)
    if isinstance(tree, Tensor) and tree.requires_grad:
        return Settled.apply(tree)
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([_settled(x, whole) for x in tree])
    return tree


class Standin:
    """A forward that stands before a module's own. It does not keep the module alive, which keeps it: no cycle."""

    def __init__(self, module: nn.Module, own: Any = None):
        self._module = weakref.ref(module)
        self.own = own  # a forward that the instance had already
        self.gone = False  # removed, where others may have put it into a forward of theirs, as Accelerate does
        self.__name__ = "forward"
        self.__signature__ = inspect.signature(module.forward)  # which trainers look at

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "its forward outlived a module"
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_module": weakref.ref(state["_module"])})

    def idle(self) -> bool:
        return self.gone or not (self.module.training and torch.is_grad_enabled()) or in_transform()

    def plain(self, *args, **kwargs):
        return self.own(*args, **kwargs) if self.own is not None else type(self.module).forward(self.module, *args, **kwargs)


def standins(model: nn.Module) -> Iterator[Standin]:
    for module in model.modules():
        forward = module.__dict__.get("forward")
        while isinstance(forward, Standin):
            yield forward
            forward = forward.own


class Known(Standin):
    """The forward that a block with hooks has anyway. The compiler does not ask a module for its hooks when it looks for a graph that fits,
    but it does ask for a forward of its own: without one, a plain model's graph would be run, and nothing be approximated."""

    def __call__(self, *args, **kwargs):
        return self.plain(*args, **kwargs)


class Draws(TorchDispatchMode):
    """While a block is counted: fake tensors draw random numbers that no generator knows of. Attention's dropout is asked for itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            asked()
        return func(*args, **(kwargs or {}))


class Had:
    """What a block has when its first run begins, for the second: NOTE [the same again]."""

    def __init__(self, block: nn.Module):
        modules = list(block.modules())
        self.parameters = [(m._parameters, dict(m._parameters)) for m in modules if m._parameters]
        self.buffers = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        self.numbers = [(m.__dict__, {k: v for k, v in m.__dict__.items() if type(v) in NUMBERS}) for m in modules if m._buffers]
        with torch._C.DisableTorchFunction():  # as no mode that runs is meant
            found = [b for b in _each(self.buffers) if not b.requires_grad and not is_lazy(b)]
            self.copies = {id(b): b.detach().clone() for b in found}  # by id, so that one buffer in two places stays one
            self.large = {id(b): _version(b) for b in found if b.numel() * b.itemsize > SMALL}

    def ran(self) -> None:
        """After the first run: of large buffers that it left alone no copies are kept, nor numbers that are what they were."""
        with torch._C.DisableTorchFunction():
            for b in _each(self.buffers):
                if id(b) in self.large and self.large[id(b)] == _version(b):
                    self.copies.pop(id(b), None)
        self.numbers = [(own, {k: v for k, v in had.items() if own.get(k) is not v}) for own, had in self.numbers]
        self.mark()

    def mark(self) -> None:
        with torch._C.DisableTorchFunction():
            self.versions = {id(p): _version(p) for p in _each(self.parameters)}

    def given(self) -> list[tuple[dict, dict]]:
        """What is put where for the second run."""
        with torch._C.DisableTorchFunction():
            fresh = {id(b): self.copies.get(id(b), b).detach().clone() for b in _each(self.buffers) if not b.requires_grad}
            parameters = [(own, {k: p for k, p in had.items() if _replaces(p, own.get(k))}) for own, had in self.parameters]
        return [*parameters, *((own, {k: fresh.get(id(b), b) for k, b in had.items()}) for own, had in self.buffers), *self.numbers]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """The block has it again, for a while."""
        given = self.given()
        meanwhile = [(own, {k: own[k] for k in new if k in own}) for own, new in given]
        try:
            for own, new in given:
                own.update(new)
            yield
        finally:
            for own, was in meanwhile:
                own.update(was)
            self.mark()  # an embedding's max_norm changes its weight in every run

    def changed_parameter(self, block: nn.Module) -> str | None:
        """Before the block has it again: a parameter that was changed since the last run."""
        with torch._C.DisableTorchFunction():
            for own, had in self.parameters:
                for name, p in had.items():
                    now = own.get(name)
                    if p is not None and (p is now or _replaces(p, now)) and _version(p) != self.versions[id(p)]:
                        return _named(block, own, name)
        return None

    def changed_buffer(self, block: nn.Module) -> str | None:
        """While the block has it again: a buffer that is no longer what was given."""
        for own, had in self.buffers:
            for name, b in had.items():
                now = own[name]
                if b is not None and not b.requires_grad and (now is None or _version(now) or not torch.equal(now, b)):
                    return _named(block, own, name)
        return None


def _named(block: nn.Module, own: dict, name: str) -> str:
    where = next(n for n, m in block.named_modules() if own is m._parameters or own is m._buffers)
    return f"{where}.{name}" if where else name


def _each(places: list[tuple[dict, dict]]) -> Iterator[Tensor]:
    return (t for _, had in places for t in had.values() if t is not None)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _replaces(p: Tensor | None, now: Tensor | None) -> bool:
    """Is what stood for a parameter in the first run to stand there in the second, instead of what does now? See rule 2."""
    if p is None or p is now:
        return False
    alone = type(p) is Tensor  # nobody but functional_call, and FSDP1, puts such a one there
    alike = type(p) is type(now) is nn.Parameter and p.shape == now.shape and p.dtype == now.dtype
    return (alone or alike) and p.untyped_storage().nbytes() > 0


class Recomputed(Standin):
    """The forward of a block under torch's checkpoint. Streams go in and come out as the tensors they are made of."""

    def __init__(self, module: nn.Module, own: Any = None, parts: int = 1, name: str = "", kinds: dict[type, bool | None] | None = None):
        super().__init__(module, own)
        self.parts, self.name = parts, name
        self.short: bool | None = None  # can it run again without dropped positions? None: not known; then as others of its kind
        self.kinds = {} if kinds is None else kinds  # None: it never can, as that would hold more
        self.split: list[bool] | None = None  # which of the arguments' tensors have samples, as was checked

    def __call__(self, *args, **kwargs):
        if self.idle():
            return self.plain(*args, **kwargs)
        named = [key for key, x in kwargs.items() if isinstance(x, Streams)]
        if named:
            key, rest = named[0], {k: v for k, v in kwargs.items() if k != named[0]}
            run = self.again()
            return self.streams(kwargs[key], lambda again, *a, **kw: run(*a, **{key: again}, **kw), args, rest)
        if args and isinstance(args[0], Streams):
            return self.streams(args[0], self.again(), args[1:], kwargs)
        samples = self.samples(args, kwargs) if self.parts > 1 and not torch.compiler.is_compiling() else 1
        if samples > 1:
            return self.in_parts(samples, args, kwargs)
        if torch.compiler.is_compiling():
            _allow()
            return _settled(checkpoint(self.traced, *args, use_reentrant=False, **kwargs))
        return checkpoint(self.again(), *args, use_reentrant=False, **kwargs)

    def traced(self, *args, **kwargs):
        with STEADY:
            return self.plain(*args, **kwargs)

    def again(self) -> Any:
        """The module's own forward, for one call of it: once, and then, in the backward, with what it had: NOTE [the same again]."""
        if torch.compiler.is_compiling():
            return self.traced
        before: list[Had] = []

        def run(*args, **kwargs):
            if before:
                changed = before[0].changed_parameter(self.module)
                if changed is not None:
                    raise RuntimeError(CHANGED.format(self.name, changed))
                with before[0].again():
                    return self.plain(*args, **kwargs)
            had = Had(self.module)
            out = self.plain(*args, **kwargs)
            had.ran()
            before.append(had)
            return out

        return run

    # A batch in parts

    def samples(self, args: tuple, kwargs: dict) -> int:
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        return 1 if first is None or first.ndim < 2 else len(first)

    def in_parts(self, samples: int, args: tuple, kwargs: dict) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        split = [_has_samples(t, samples) for t in leaves]
        fake = any(isinstance(t, FakeTensor) for t in leaves)
        if not fake and (self.split is None or len(self.split) != len(split)):
            self.check(samples, args, kwargs)
            self.split = split
        split = split if fake or self.split is None else [a and b for a, b in zip(split, self.split, strict=True)]
        if not fake and split != self.split:  # something that had samples has none now
            return checkpoint(self.again(), *args, use_reentrant=False, **kwargs)
        parts = -(-samples // -(-samples // self.parts))
        shares = [t.split(-(-samples // self.parts)) if has else (t,) * parts for t, has in zip(leaves, split, strict=True)]
        outs = []
        for part in zip(*shares, strict=True):
            a, kw = tree_unflatten(part, spec)
            outs.append(checkpoint(self.again(), *a, use_reentrant=False, **kw))
        return _joined(outs, self.name)

    def check(self, samples: int, args: tuple, kwargs: dict) -> None:
        """Is what becomes of a sample the same whoever is beside it, and whoever went before it?"""
        modes, had = [(m, m.training) for m in self.module.modules()], Had(self.module)
        devices = sorted({t.device.index for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices), had.again():
            self.module.eval()
            try:
                a, kw = _samples(0, 2, (args, kwargs), samples)
                pair, same = self.plain(*a, **kw), True
                for i in (0, 1):
                    one, named = _samples(i, i + 1, (args, kwargs), samples)
                    pairs = zip(tree_leaves(pair), tree_leaves(self.plain(*one, **named)), strict=True)
                    same = same and all(_close(p[i : i + 1], q) for p, q in pairs if isinstance(p, Tensor) and p.ndim)
            except (RuntimeError, ValueError) as e:
                raise ValueError(f"Recompute(parts={self.parts}): {self.name} does not run on a part of the batch: {e}") from e
            finally:
                for m, was in modes:
                    m.training = was
            self.plain(*a, **kw)
            buffer = had.changed_buffer(self.module)
        if buffer is not None:
            raise ValueError(
                f"Recompute(parts={self.parts}): {self.name} changes its buffer {buffer!r} in its forward, so the next part of a batch "
                "would find another. Leave parts=1 for it."
            )
        if not same:
            raise ValueError(f"Recompute(parts={self.parts}): the samples of a batch see each other in {self.name}. Leave parts=1 for it.")

    def streams(self, x: Streams, forward: Any, rest: tuple, kwargs: dict) -> Any:
        # A grid may stay whole, for convolutions; of tokens the dropped part is not all computed again.
        tensors = (x.whole,) if x.parts is None and x.span > 1 else x.taken_apart()

        def run(*inputs, **kw):
            own, others = inputs[: len(tensors)], inputs[len(tensors) :]
            parts, whole = (None, own[0]) if len(own) == 1 else (own, None)
            again = Streams(parts, whole, x.at, x.axis, x.span, x.outer, x.role, x.site, x.rest)
            if torch.compiler.is_compiling():
                with ROUTE:
                    return forward(again, *others, **kw)
            return forward(again, *others, **kw)

        if torch.compiler.is_compiling():
            _allow()
            return _settled(checkpoint(run, *tensors, *rest, use_reentrant=False, context_fn=_keep_attention, **kwargs))
        return self.twice(functools.partial(run, **kwargs), x, (*tensors, *rest))

    def twice(self, run: Any, x: Streams, inputs: tuple) -> Any:
        """In eager mode, a block on Streams, and again in the backward, if it can without dropped positions: NOTE [again]."""
        kind = type(self.module)
        known = self.kinds.get(kind, False)
        call = Call(bool(known if known is None or self.short is None else self.short))

        def again(*inputs):
            before, RUNNING.call = RUNNING.call, call
            call.starts()
            try:
                with Draws() if call.last is None and isinstance(inputs[0], FakeTensor) else contextlib.nullcontext():
                    out = run(*inputs)
                made = ops.streams_in((out,))
                if not made or any([s.traced for s in made]):  # by a compiled function, of which we hear nothing
                    asked()
                return out
            finally:
                RUNNING.call = before

        # Where as many are kept as dropped, shapes do not tell one from the other: to the block's end both runs are to save as much.
        out = checkpoint(again, *inputs, use_reentrant=False, early_stop=not call.short or 2 * x.at.k != x.at.n)
        short = call.ended(x.device)
        if call.holds:
            self.kinds[kind] = None
        elif self.kinds.get(kind, False) is not None:
            self.short = self.kinds[kind] = short
        return out


def _has_samples(t: Any, samples: int) -> bool:
    return isinstance(t, Tensor) and t.ndim > 0 and len(t) == samples


def _samples(start: int, stop: int, tree: Any, samples: int) -> Any:
    """Some samples of a batch; what has no samples stays as it is."""
    return tree_map_only(Tensor, lambda t: t[start:stop] if _has_samples(t, samples) else t, tree)


def _joined(outs: list, name: str) -> Any:
    """What a block returned for the parts of a batch, as for the whole."""
    if isinstance(outs[0], Tensor) and outs[0].ndim:
        return torch.cat(outs)
    if type(outs[0]) in (tuple, list):
        return type(outs[0])([_joined(list(x), name) for x in zip(*outs, strict=True)])
    if outs[0] is None:
        return None
    raise ValueError(f"Recompute(parts=...): {name} returns {type(outs[0]).__name__}, whose parts cannot be joined. Leave parts=1 for it.")


def _close(a: Tensor, b: Tensor) -> bool:
    loose = 0.05 if a.dtype in (torch.float16, torch.bfloat16) else 1e-3
    return a.shape == b.shape and bool((a - b).abs().max() <= loose * b.abs().max() + 1e-6)
