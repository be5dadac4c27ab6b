"""Blocks that are computed again in the backward pass, by torch's own checkpoint.

NOTE [the same again]
A recomputed block has plain training's gradients only if its second run finds what the first one found. In eager mode:
 1. Buffers are what they were when the first run began, also those that it changed, or put others in the places of (spectral norm's
    vectors, a scale that follows the activations). They are copies, and the module's own are back after it: so statistics are updated
    once, and what the second run saves stays as it is. Numbers that a module with buffers keeps beside them (how long a table is, whether
    a codebook has begun) go with them.
 2. Parameters are those of the first run, also if they stood in the module for that forward alone (torch.func.functional_call). One that
    was changed in place since is an error, as it is where autograd saved it. What FSDP frees, or exchanges for a DTensor and back, is
    left to it.
 3. Objects and lists among its arguments that it may change (a cache of keys and values, to which it adds) have in them what they had, as
    far as handed.py looks; what they have by now is back after it. A tensor in them that the block itself changes in place is told in the
    report, as the second run finds what the first one made of it.
 4. What a block keeps elsewhere is not seen. Under torch.compile the compiler chooses: it reads a buffer that was changed in place as it is
    by then, with torch's own checkpoint as with ours.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import ops  # which fills the table
from .attention import multi_head, steady
from .handed import Handed, put, version
from .notes import caution, constant
from .standins import Standin
from .streams import ROUTE, RUNNING, Call, Streams, asked, find

CHANGED = (
    "Recompute(): {}: its parameter {!r} was changed in place between the forward and the backward, which computes the block again. Call "
    "backward() before whatever changes it, as an optimizer's step()."
)
SHARED = (
    "Recompute(parts={}): {} changes what it is handed, as a cache of keys and values, which the parts of a batch cannot share. Switch "
    "that off (transformers: use_cache=False), or leave parts=1."
)
KEPT = (
    "puts tensors into what it is handed, as a cache of keys and values, which is held until the backward then. Switch that off if nobody "
    "reads it (transformers: use_cache=False)"
)
WRITTEN = (
    "changes in place a tensor that it finds in an object or a list it is handed, and finds it changed when it is computed again. If it "
    "reads it, gradients are wrong: leave the block out of layers="
)
SMALL = 2**16  # bytes of a buffer that is kept as the first run found it, changed or not: kernels (batch norm) and .data change it unseen
NUMBERS = (bool, int, float, str, type(None))


@constant
def allow_modes() -> bool:
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


def settled(tree: Any, whole: bool = True) -> Any:
    """What a block returns, with its gradients settled, or of Streams those of dropped positions alone."""
    if isinstance(tree, Streams) and tree.parts is not None:
        kept, dropped = tree.parts
        return tree.like(settled(kept) if whole else kept, settled(dropped))
    if isinstance(tree, Streams):
        grid = settled(tree.whole) if whole else tree.whole
        return Streams(None, grid, tree.at, tree.axis, tree.span, tree.outer, tree.role, tree.site, tree.rest)
    if isinstance(tree, Tensor) and tree.requires_grad:
        return Settled.apply(tree)
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)([settled(x, whole) for x in tree])
    return tree


class Draws(TorchDispatchMode):
    """While a block is counted: fake tensors draw random numbers that no generator knows of. Attention's dropout is asked for itself."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():
            asked()
        return func(*args, **(kwargs or {}))


class Had:
    """What a block has when its first run begins, for the second: NOTE [the same again]."""

    def __init__(self, block: nn.Module, arguments: tuple):
        modules = list(block.modules())
        self.parameters = [(m._parameters, dict(m._parameters)) for m in modules if m._parameters]
        self.buffers = [(m._buffers, dict(m._buffers)) for m in modules if m._buffers]
        self.numbers = [(m.__dict__, {k: v for k, v in m.__dict__.items() if type(v) in NUMBERS}) for m in modules if m._buffers]
        self.handed = Handed(arguments)
        with torch._C.DisableTorchFunction():  # as no mode that runs is meant
            found = [b for b in _each(self.buffers) if not b.requires_grad and not is_lazy(b)]
            self.copies = {id(b): b.detach().clone() for b in found}  # by id, so that one buffer in two places stays one
            self.large = {id(b): version(b) for b in found if b.numel() * b.itemsize > SMALL}

    def ran(self) -> None:
        """After the first run: of large buffers that it left alone no copies are kept, nor numbers that are what they were."""
        with torch._C.DisableTorchFunction():
            for b in _each(self.buffers):
                if id(b) in self.large and self.large[id(b)] == version(b):
                    self.copies.pop(id(b), None)
        self.numbers = [(own, {k: v for k, v in had.items() if own.get(k) is not v}) for own, had in self.numbers]
        self.mark()

    def mark(self) -> None:
        with torch._C.DisableTorchFunction():
            self.versions = {id(p): version(p) for p in _each(self.parameters)}

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
        after: list = []
        try:
            for own, new in given:
                own.update(new)
            after = self.handed.put_back()
            yield
        finally:
            for own, was in meanwhile:
                own.update(was)
            put(after)
            self.mark()  # an embedding's max_norm changes its weight in every run

    def changed_parameter(self, block: nn.Module) -> str | None:
        """Before the block has it again: a parameter that was changed since the last run."""
        with torch._C.DisableTorchFunction():
            for own, had in self.parameters:
                for name, p in had.items():
                    now = own.get(name)
                    if p is not None and (p is now or _replaces(p, now)) and version(p) != self.versions[id(p)]:
                        return _named(block, own, name)
        return None

    def changed_buffer(self, block: nn.Module) -> str | None:
        """While the block has it again: a buffer that is no longer what was given."""
        for own, had in self.buffers:
            for name, b in had.items():
                now = own[name]
                if b is not None and not b.requires_grad and (now is None or version(now) or not torch.equal(now, b)):
                    return _named(block, own, name)
        return None


def _named(block: nn.Module, own: dict, name: str) -> str:
    where = next(n for n, m in block.named_modules() if own is m._parameters or own is m._buffers)
    return f"{where}.{name}" if where else name


def _each(places: list[tuple[dict, dict]]) -> Iterator[Tensor]:
    return (t for _, had in places for t in had.values() if t is not None)


def _replaces(p: Tensor | None, now: Tensor | None) -> bool:
    """Is what stood for a parameter in the first run to stand there in the second, instead of what does now? See rule 2."""
    if p is None or p is now:
        return False
    alone = type(p) is Tensor  # nobody but functional_call, and FSDP1, puts such a one there
    alike = type(p) is type(now) is nn.Parameter and p.shape == now.shape and p.dtype == now.dtype
    return (alone or alike) and p.untyped_storage().nbytes() > 0


class Recomputed(Standin):
    """The forward of a block under torch's checkpoint. Streams go in and come out as the tensors they are made of."""

    def __init__(
        self,
        module: nn.Module,
        own: Any = None,
        parts: int = 1,
        name: str = "",
        kinds: dict[type, bool | None] | None = None,
        report: Any = None,
    ):
        super().__init__(module, own)
        self.parts, self.name, self.report = parts, name, report
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
            allow_modes()
            return settled(checkpoint(self.traced, *args, use_reentrant=False, **kwargs))
        return checkpoint(self.again(), *args, use_reentrant=False, **kwargs)

    def traced(self, *args, **kwargs):
        with STEADY:
            return self.plain(*args, **kwargs)

    def again(self, part: bool = False) -> Any:
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
            handed = (args, tuple(kwargs.values()))
            had = Had(self.module, handed)
            out = self.plain(*args, **kwargs)
            had.ran()
            self.look(had.handed.ran(handed), part)
            before.append(had)
            return out

        return run

    def look(self, found: tuple[bool, bool, bool], part: bool) -> None:
        """What the block did to what it was handed."""
        changed, added, written = found
        if changed and part:
            raise ValueError(SHARED.format(self.parts, self.name))
        if added:
            caution(self.report, self.name, KEPT)
        if written:
            caution(self.report, self.name, WRITTEN)

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
            outs.append(checkpoint(self.again(part=True), *a, use_reentrant=False, **kw))
        return _joined(outs, self.name)

    def check(self, samples: int, args: tuple, kwargs: dict) -> None:
        """Is what becomes of a sample the same whoever is beside it, and whoever went before it?"""
        handed = (args, tuple(kwargs.values()))
        modes, had, changed = [(m, m.training) for m in self.module.modules()], Had(self.module, handed), False
        devices = sorted({t.device.index for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_cuda})
        with torch.no_grad(), torch.random.fork_rng(devices), had.again():
            for m, _ in modes:
                m.training = False  # whoever defines train() may do more in it
            try:
                a, kw = _samples(0, 2, (args, kwargs), samples)
                pair, same = self.plain(*a, **kw), True
                changed, *_ = had.handed.ran(handed)
                for i in (0, 1):
                    one, named = _samples(i, i + 1, (args, kwargs), samples)
                    pairs = zip(tree_leaves(pair), tree_leaves(self.plain(*one, **named)), strict=True)
                    same = same and all(_close(p[i : i + 1], q) for p, q in pairs if isinstance(p, Tensor) and p.ndim)
            except (RuntimeError, ValueError) as e:
                if changed:
                    raise ValueError(SHARED.format(self.parts, self.name)) from e
                raise ValueError(f"Recompute(parts={self.parts}): {self.name} does not run on a part of the batch: {e}") from e
            finally:
                for m, was in modes:
                    m.training = was
            self.plain(*a, **kw)
            buffer = had.changed_buffer(self.module)
        if changed:
            raise ValueError(SHARED.format(self.parts, self.name))
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
            allow_modes()
            return settled(checkpoint(run, *tensors, *rest, use_reentrant=False, context_fn=_keep_attention, **kwargs))
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
