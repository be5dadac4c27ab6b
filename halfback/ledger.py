"""Who holds what for the backward: every storage once, and nothing that can be computed again from what is held anyway.

Autograd hands every tensor that it saves to a pair of hooks. Ours look the tensor's storage up in a *ledger*, which a torch function
mode keeps while the model runs: which function made it, from what. Then there are three ways to hold it.

    Exact      the tensor itself, once for all that save it
    Computed   nothing: it is made again from what is held (a norm's output from its input, gelu(x) from x), by the same function
    Stored     a store's tensors instead of it (stores.py), where a few entries or a few bits are enough

The functions that a model calls are torch's own, with the arguments that it gives them, so the forward is the plain one, bit for bit, and
so is every backward formula. Custom autograd.Functions and extensions need no row in a table: what they save is looked up as well.

NOTE [what is computed again]
 1. A value that a function of `layers.CHEAP` made may be computed again. It is, if what else would have to be held for it has at most
    half of its bytes: gelu(x) needs x, which gelu's own backward holds, so nothing; x.float() needs x, half of it; a + b needs two
    tensors that nobody holds, so a + b is held itself.
 2. No more than LIMIT times its own bytes are computed for it, so chains of residual additions end somewhere.
 3. What several ask for is computed once in a backward pass, and dropped when the last of them has had it.
 4. A tensor may be changed in place where plain training allows it: what is computed from it then gets a copy. Only what autograd saved
    itself must stay as it is, and raises if it does not.

NOTE [other hooks]
Whatever stands outside (memory.Held, save_on_cpu, checkpoint) gets every tensor that we hold, and gives it back: hooks compose. A frame
opened in a checkpointed block decides in the recomputation as it did in the forward, since it starts from an empty ledger.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from .notes import uncompiled
from .stores import Layout, is_dense

SMALL = 256  # a layer's input of less than this part of all that was saved before it is not worth an approximation
FAR = 8  # a value is not computed from a storage of more than so many times its bytes, which might be held for it alone
LIMIT = 12  # gelu_new, written out, is 8 passes; a residual join with its norm and ReLU is 3
NEVER = 1 << 62
TWICE = "halfback: double backward (create_graph=True) through DropIT is not supported. Use hb.exact(model)."
STRIDED = torch.strided
ORDINARY = frozenset((Tensor, nn.Parameter, FakeTensor))
Geometry = tuple[tuple[int, ...], tuple[int, ...], Any, torch.dtype]  # size, stride, offset, dtype


def geometry(t: Tensor) -> Geometry:
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype  # a torch.Size would stay with the garbage collector


def _see(t: Tensor, shape: Geometry) -> Tensor:
    """A view of t's storage."""
    size, stride, offset, dtype = shape
    return (t if t.dtype == dtype else t.view(dtype)).as_strided(size, stride, offset)


def _laid_out(t: Tensor, shape: Geometry) -> Tensor:
    """t with the strides that it had when it was saved."""
    size, stride, _, dtype = shape
    return t if t.stride() == stride else torch.empty_strided(size, stride, dtype=dtype, device=t.device).copy_(t)


# What is known of a storage while the model runs. Nothing here keeps a tensor alive.


class Use:
    """A value as an argument of a function, which was a tensor."""

    __slots__ = ("needs_grad", "ref", "seen_as", "value")

    def __init__(self, value: Value, seen_as: Geometry, t: Tensor):
        self.value, self.seen_as, self.needs_grad = value, seen_as, t.requires_grad
        self.ref = weakref.ref(t)


class Recipe:
    """How a value was made: a function, and arguments in which tensors are `Use`s of other values."""

    __slots__ = ("args", "autocast", "func", "kwargs", "passes", "uses")

    def __init__(self, func: Callable, args: tuple, kwargs: dict, autocast: tuple[str, torch.dtype] | None = None, passes: int = 1):
        self.func, self.args, self.kwargs, self.autocast = func, args, kwargs, autocast
        self.passes = passes  # how many of the model's functions it stands for
        self.uses: list[Use] = _found(args, Use) + _found(kwargs, Use) if kwargs else _found(args, Use)


class Value:
    """The contents of a storage, from one in-place change of it to the next."""

    __slots__ = ("computed", "exact", "free", "key", "made_as", "nbytes", "recipe", "ref", "storage", "stored", "version")

    def __init__(self, t: Tensor, storage: torch.UntypedStorage, recipe: Recipe | None = None, free: bool = False):
        self.storage = weakref.ref(storage)  # when it is gone, the key, an address, may be given to another
        self.key = storage._cdata
        self.nbytes = storage.nbytes()
        self.free = free  # it is there anyway
        self.ref: Any = (lambda: t) if self.free else weakref.ref(t)
        self.version = t._version
        self.made_as: Any = None if recipe is None else geometry(t)
        self.recipe = recipe
        self.exact: Any = _nothing
        self.computed: Any = _nothing
        self.stored: dict[Any, Any] | None = None

    def tensor(self) -> Tensor | None:
        t = self.ref()
        return t if t is not None and t._version == self.version else None


_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transforms = torch._C._functorch.peek_interpreter_stack
_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def ordinary(t: Any) -> bool:
    """A tensor whose storage says it all: no subclass, sparse, complex or inference one."""
    return type(t) in ORDINARY and t.layout is STRIDED and not (t.is_complex() or t.is_inference() or t.is_neg())


def _parameter(t: Any) -> bool:
    """A fake parameter has the class of a fake tensor, and says so."""
    return type(t) is nn.Parameter or (type(t) is FakeTensor and getattr(t, "_is_param", False))


def _is_parameter(t: Tensor) -> bool:
    """One, or a part of one."""
    base = t._base
    return type(t) is not Tensor and _parameter(t) if base is None else _parameter(base)


def _nothing() -> None:
    """A weak reference to nobody."""


# What entries of the autograd graph keep alive. It knows nothing of the ledger.


class Shared:
    """Something that is made once for all of a backward pass that ask for it, and dropped when the last of them has had it (rule 3)."""

    __slots__ = ("__weakref__", "cache", "used", "users")

    def __init__(self) -> None:
        self.users = self.used = 0
        self.cache: Any = None

    def make(self) -> Any:
        raise NotImplementedError

    def value(self) -> Any:
        made = self.cache if self.cache is not None else self.make()
        self.used += 1
        last = self.used >= self.users
        self.cache, self.used = (None, 0) if last else (made, self.used)
        return made


class Handed(Shared):
    """A tensor in the hands of the hooks outside. Some of them (checkpoint) give it back once only."""

    __slots__ = ("outer", "packed")

    def __init__(self, t: Tensor, outer: Any):
        super().__init__()
        self.outer, self.packed = outer, outer[0](t)

    def make(self) -> Tensor:
        return self.outer[1](self.packed)


def _modified(t: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
        f"{tuple(t.shape)} is at version {t._version}; expected version {version}."
    )


class Exact:
    """A storage, held. Each view that somebody wants of it goes through the hooks that stand outside ours."""

    __slots__ = ("__weakref__", "all_of_it", "changed", "fills", "handed", "nbytes", "outer", "version", "views")

    def __init__(self, version: int, nbytes: int, outer: Any):
        self.version, self.nbytes = version, nbytes
        self.outer = outer
        self.views: dict[Geometry, Tensor] = {}
        self.handed: dict[Geometry, Handed] = {}
        self.all_of_it: Geometry | None = None
        self.fills: tuple[Any, ...] = ()  # who computes from it
        self.changed = False  # in place, so that no more may be computed from it

    def has(self, shape: Geometry) -> bool:
        return shape in self.views or shape in self.handed

    def reaches(self) -> bool:
        """Can any view of the storage be had of what is held? Hooks outside need not give back the storage, only the view."""
        return bool(self.views) or self.all_of_it is not None

    def keep(self, t: Tensor, shape: Geometry, detached: bool = False) -> None:
        """Hold a view of t's storage; `detached`: t is that view, and part of no graph."""
        if shape in self.views or shape in self.handed:
            return
        alias = t if detached else _see(t.detach(), shape)
        if not self.outer:
            self.views[shape] = alias
            return
        self.handed[shape] = Handed(alias, self.outer)
        whole = alias.nbytes == alias.untyped_storage().nbytes() and is_dense(alias)
        if whole or getattr(self.outer[0], "gives_storage_back", False):  # who only counts must not change what is held
            self.all_of_it = shape

    def _handed(self, shape: Geometry) -> tuple[Geometry, Handed]:
        shape = shape if shape in self.handed or self.all_of_it is None else self.all_of_it
        return shape, self.handed[shape]

    def join(self, shape: Geometry, users: int = 1) -> None:
        if self.outer:
            self._handed(shape)[1].users += users

    def get(self, shape: Geometry) -> Tensor:
        if self.outer:
            seen_as, handed = self._handed(shape)
            t = handed.value()
            return t if seen_as == shape else _see(_laid_out(t, seen_as), shape)
        t = self.views[shape]
        if t._version != self.version:
            raise _modified(t, self.version)
        return t

    def change(self, t: Tensor) -> None:
        """t, a tensor on this storage, is about to be changed in place: what is computed from it gets a copy. See rule 4."""
        self.changed = True
        fills = [fill for fill in [ref() for ref in self.fills] if fill is not None]
        if fills:
            whole = t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).clone()
            copy = Exact(whole._version, self.nbytes, self.outer)
            for fill in fills:
                copy.keep(whole, fill.seen_as)
                copy.join(fill.seen_as)
                self.join(fill.seen_as, -1)
                fill.source = copy
            copy.fills = self.fills

    def leaves(self) -> Iterator[Any]:
        yield self


class Computed(Shared):
    """Nothing is held: the value is made again."""

    __slots__ = ("args", "autocast", "func", "kwargs", "made_as")
    nbytes = 0

    def __init__(self, recipe: Recipe, made_as: Any, args: tuple, kwargs: dict):
        super().__init__()
        self.func, self.autocast = recipe.func, recipe.autocast
        self.made_as, self.args, self.kwargs = made_as, args, kwargs

    def join(self, place: Any) -> None:
        self.users += 1

    def get(self, shape: Geometry) -> Tensor:
        made = self.value()
        return made if shape == self.made_as else _see(made, shape)

    def make(self) -> Any:
        if self.autocast is None and not torch.is_grad_enabled():  # as in most backward passes
            made = self.func(*_filled(self.args), **_filled(self.kwargs))
        else:
            with torch.no_grad(), _autocast(self.autocast):
                made = self.func(*_filled(self.args), **_filled(self.kwargs))
        return _laid_out(made, self.made_as)

    def leaves(self) -> Iterator[Any]:
        for fill in _found((self.args, self.kwargs), Fill):
            yield from fill.source.leaves()


class Approximated(Computed):
    """The same, from what is held of others in few bits."""

    __slots__ = ()

    def make(self) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        return super().make()


class Inner(Computed):
    """What a function saved of its own intermediate values: it is run again as autograd saw it, and what it saves is collected."""

    __slots__ = ()

    def make(self) -> list[Tensor]:
        saved: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            saved.append(t.detach())
            return saved[-1]

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with torch.enable_grad(), _autocast(self.autocast), hooks:
            self.func(*_filled(self.args, _as_leaf), **_filled(self.kwargs, _as_leaf))
        return saved

    def get(self, place: Any) -> Tensor:
        return self.value()[place]


class Stored:
    """A store's tensors instead of a value; or the value, where it turned out that somebody holds it anyway."""

    def __init__(self, store: Any, layout: Layout, held: tuple[Tensor, ...], outer: Any, approximate: bool, firm: bool = False):
        self.store, self.layout, self.approximate, self.firm = store, layout, approximate, firm
        self.held: tuple = tuple([Handed(t, outer) for t in held]) if outer else held
        self.outer = outer
        self.nbytes = sum([t.nbytes for t in held])
        self.instead: tuple[Any, Geometry] | None = None
        self.users = 0

    def join(self, shape: Geometry) -> None:
        self.users += 1
        if self.instead is not None:
            self.instead[0].join(self.instead[1])
        elif self.outer:
            for t in self.held:
                t.users += 1

    def get(self, shape: Geometry) -> Tensor:
        size, stride, _, _ = shape
        if self.instead is not None:
            source, seen_as = self.instead
            t = _laid_out(source.get(seen_as), seen_as)
            return t.as_strided(size, stride, t.storage_offset())
        if self.approximate and torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        held = tuple([t.value() for t in self.held]) if self.outer else self.held
        return self.store.restore(held, self.layout).as_strided(size, stride)

    def give_way(self, source: Any, seen_as: Geometry) -> None:
        self.instead, self.held, self.nbytes = (source, seen_as), (), 0
        for _ in range(self.users):
            source.join(seen_as)

    def leaves(self) -> Iterator[Any]:
        yield from self.instead[0].leaves() if self.instead else (self,)


class Blank:
    """Only its shape is needed: pooling, or a convolution whose weight is frozen, asks its input for nothing else."""

    def __init__(self, t: Tensor):
        self.device = t.device

    def join(self, shape: Geometry) -> None:
        pass

    def get(self, shape: Geometry) -> Tensor:
        size, stride, _, dtype = shape
        return torch.empty_strided(size, stride, dtype=dtype, device=self.device)

    def leaves(self) -> Iterator[Any]:
        return iter(())


class Fill:
    """A place in a recipe's arguments, to be filled from a source."""

    __slots__ = ("__weakref__", "needs_grad", "seen_as", "source")

    def __init__(self, source: Any, seen_as: Geometry, needs_grad: bool = False):
        self.source, self.seen_as, self.needs_grad = source, seen_as, needs_grad

    def get(self) -> Tensor:
        return self.source.get(self.seen_as)


class Constant:
    """A parameter or a statistic in a recipe's arguments, as it was."""

    __slots__ = ("tensor", "version")

    def __init__(self, t: Tensor):
        self.tensor, self.version = t, t._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.version)
        return self.tensor


def _got(place: Fill | Constant) -> Tensor:
    return place.get()


def _as_leaf(place: Fill | Constant) -> Tensor:
    """As an argument that a graph begins with."""
    return place.get().detach().requires_grad_() if type(place) is Fill and place.needs_grad else place.get()


def _filled(tree: Any, of: Callable = _got) -> Any:
    return _mapped(tree, FILLED, of) if tree else tree


def _mapped(tree: Any, kinds: frozenset[type], f: Callable) -> Any:
    """f of everything of these types in nested tuples, lists and dicts."""
    kind = type(tree)
    if kind is dict:
        return {k: f(x) if type(x) in kinds else (_mapped(x, kinds, f) if type(x) in NESTED else x) for k, x in tree.items()}
    if kind in NESTED:
        return kind([f(x) if type(x) in kinds else (_mapped(x, kinds, f) if type(x) in NESTED else x) for x in tree])
    return f(tree) if kind in kinds else tree


def _found(tree: Any, kind: type) -> list[Any]:
    """Everything of a type in nested tuples, lists and dicts."""
    found: list[Any] = []
    for x in tree.values() if type(tree) is dict else tree:
        if type(x) is kind:
            found.append(x)
        elif type(x) in NESTED:
            found += _found(x, kind)
    return found


NESTED = frozenset((tuple, list, dict))
FILLED = frozenset((Fill, Constant))
TO_FILL = frozenset((Use, Fill))


def _autocast(state: tuple[str, torch.dtype] | None) -> Any:
    return torch.autocast(*state) if state else contextlib.nullcontext()


class Entry:
    """What stands in the autograd graph for a tensor that was saved."""

    __slots__ = ("__weakref__", "key", "number", "place", "source", "tensor")

    def __init__(self, t: Tensor, key: int, place: Any = None, number: int = 0):
        self.tensor: Tensor | None = t
        self.key = key
        self.place = place  # of it in its source: its geometry
        self.number = number  # among what its function saved
        self.source: Any = None

    def get(self) -> Tensor:
        return self.tensor if self.tensor is not None else self.source.get(self.place)


_unpack = operator.methodcaller("get")


class Passed:
    """A tensor that nothing is to be gained from (a parameter) or that we do not know (a subclass): held as autograd would."""

    __slots__ = ("held", "outer", "version")

    def __init__(self, t: Tensor, outer: Any):
        self.outer, self.version = outer, None if t.is_inference() else t._version
        self.held = outer[0](t) if outer else (t if t.is_leaf else t.detach())

    def get(self) -> Tensor:
        if self.outer:
            return self.outer[1](self.held)
        if self.version is not None and self.held._version != self.version:
            raise _modified(self.held, self.version)
        return self.held


@dataclass(frozen=True)
class Rule:
    """What the ledger does with a function: how it is run, and whether what it does in place is known."""

    run: Callable
    name: str  # without the marks of methods, operators and in-place forms
    changes: bool  # its first argument, in place, by its name
    known: bool
    again: Callable | None  # what computes, out of place, what it makes


class Remembered(dict[int, Any]):
    """Something about tensors, for the first who asks, as long as they are there, and as they were."""

    def note(self, t: Tensor, *about: Any) -> None:
        key = id(t)
        self[key] = weakref.ref(t, lambda _: self.pop(key, None)), t._version, geometry(t), about

    def take(self, t: Any) -> tuple | None:
        noted = self.pop(id(t), None)
        if noted is None or noted[0]() is not t:
            return None
        _, version, shape, about = noted
        return about if t._version == version and t.requires_grad and geometry(t) == shape else None


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """The frame right outside, if there is one, has nothing to do, and would be called for every shape that the one inside looks at."""
    modes = torch._C._len_torch_function_stack()
    outside = torch._C._get_function_stack_at(modes - 1) if modes else None
    if not isinstance(outside, Ledger):
        yield
        return
    torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        torch._C._push_on_torch_function_stack(outside)


class Ledger(TorchFunctionMode):
    """The frame of one forward: the mode that sees functions and the hooks that see what they save.

    `rules` has the rule of each function (layers.py), or None. `tell` hears of calls and of what they saved, for a report.
    """

    def __init__(self, rules: Mapping[Callable, Rule | None], within: Any, tell: Any = None):
        super().__init__()
        self.rules, self.within, self.tell = rules, within, tell
        self.is_away = False  # while a compiled module runs
        self.stands_aside = tell is None  # while Streams are worked on: a report hears of every function
        self.values: dict[int, Value] = {}
        self.uses: dict[int, Use] = {}  # by tensor, as most tensors are used several times
        self.pending: list[Entry] | None = None
        self.count = 0  # of what the function that runs has saved
        self.total = 0  # bytes of all that was saved so far
        self.known: Any = frozenset()  # storages of buffers, which are there anyway
        self.given: Any = frozenset()  # storages of parameters of which a block is given parts
        self.statistics = False  # a norm's are being saved
        self.stands_for: tuple[tuple[Value, ...], str] | None = None  # what plain training would save instead, and what is saved now
        self.factors = Remembered()  # the inputs of activations, for products of what they made: see layers.product
        self.products = Remembered()  # what is held of the factors of such products

    @contextlib.contextmanager
    def open(self) -> Iterator[Ledger]:
        """Everything that runs inside is seen. A frame that is opened inside another takes over."""
        self.outer = _hooks(False)
        before, self.within.ledger = self.within.ledger, self
        try:
            with _aside(), torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack), self:
                yield self
        finally:
            self.within.ledger = before
            self.values.clear()
            self.uses.clear()
            self.factors.clear()
            self.products.clear()

    def give(self, args: tuple, kwargs: dict) -> None:
        """What the module of this frame is called with."""
        parts = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t._base is not None and _is_parameter(t)]
        self.given = frozenset(t.untyped_storage()._cdata for t in parts)

    def mine(self) -> bool:
        """Are we the ones that saved tensors reach? In a checkpointed region they may not be."""
        top = _hooks(False)
        return top is not None and getattr(top[0], "__self__", None) is self

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Neither functions nor what they save are seen meanwhile."""
        modes = torch._C._len_torch_function_stack()
        if not modes or torch._C._get_function_stack_at(modes - 1) is not self or not self.mine():
            yield
            return
        torch._C._pop_torch_function_stack()
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, _unpack)
            torch._C._push_on_torch_function_stack(self)

    @contextlib.contextmanager
    def back(self) -> Iterator[None]:
        """Seen again, where it is away."""
        if not self.is_away:
            yield
            return
        self.is_away = False
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack), self:
                yield
        finally:
            self.is_away = True

    # The functions

    @uncompiled
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_compiling():  # a compiled function inside an eager model
            return func(*args, **kwargs)
        for kind in types:
            if not issubclass(kind, Tensor):  # Streams: what runs on their parts is to be seen
                return self.run_on_parts(kind, func, types, args, kwargs)
        rule = self.rules[func]
        if rule is None and self.tell is None:  # most calls: shapes, views, attributes
            return func(*args, **kwargs)
        return self.run(func, rule, args, kwargs)

    def run(self, func: Callable, rule: Rule | None, args: tuple, kwargs: dict) -> Any:
        """A function on tensors, by its rule."""
        if self.within.ledger is not self or not self.mine() or _transforms() is not None:
            return func(*args, **kwargs)
        grad = torch.is_grad_enabled()
        if rule is not None and (rule.changes or (kwargs and kwargs.get("inplace"))):
            self.changing(args, rule.known and grad)
        if not grad:
            return func(*args, **kwargs)
        if self.tell is not None:
            self.tell.called(func, args, kwargs)
        return func(*args, **kwargs) if rule is None else rule.run(self, func, args, kwargs)

    def run_on_parts(self, parts: Any, func: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if self.within.ledger is not self or not self.mine() or _transforms() is not None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        with self:
            return parts.__torch_function__(func, types, args, kwargs)

    def seen(self, func: Callable) -> Callable:
        """How a function is run on a part of Streams while this mode stands aside."""
        rule = self.rules[func]
        return func if rule is None else lambda *args, **kwargs: self.run(func, rule, args, kwargs)

    def changing(self, args: tuple, known: bool) -> None:
        """Before a tensor is changed in place. Unless it is `known` how, nothing that was noted of its storage holds after it."""
        target: Any = args[0] if args else None
        storage = target.untyped_storage() if ordinary(target) else None
        value = self.values.get(storage._cdata) if storage is not None else None
        if value is None or value.storage() is not storage:
            return
        exact = value.exact()
        if exact is not None:
            exact.change(target)
        if not known:
            del self.values[value.key]

    def watch(self, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, list[Entry]]:
        """Run a function; what it saved waits to be settled."""
        before, self.pending, self.count = self.pending, [], 0
        try:
            return func(*args, **kwargs), self.pending
        finally:
            self.pending = before

    def bind(self, tree: Any) -> Any:
        """Arguments with every tensor replaced by a use of its value, as it is now."""
        return _mapped(tree, ORDINARY, self._bound)

    def _bound(self, t: Tensor) -> Any:
        if type(t) is not Tensor and _parameter(t):
            return Constant(t)
        return self.use(t) or t

    def use(self, t: Tensor) -> Use | None:
        """t as an argument; None if it is not ordinary."""
        use = self.uses.get(id(t))
        if use is not None and use.ref() is t:
            value = use.value
            there = value.version == t._version and value.key == t.untyped_storage()._cdata and use.needs_grad == t.requires_grad
            if there and self.values.get(value.key) is value:
                return use
        if not ordinary(t):
            return None
        use = self.uses[id(t)] = Use(self.value(t), geometry(t), t)
        return use

    def value(self, t: Tensor) -> Value:
        storage = t.untyped_storage()
        value = self.values.get(storage._cdata)
        if value is None or value.version != t._version or value.storage() is not storage:
            value = self.values[storage._cdata] = Value(t, storage, free=self.is_parameter(t))
        return value

    def is_parameter(self, t: Tensor) -> bool:
        """One, or a part of one, but for what a block is given: that comes as an ordinary tensor when the block is computed again."""
        return _is_parameter(t) and (t._base is None or not self.given or t.untyped_storage()._cdata not in self.given)

    def made(self, out: Tensor, recipe: Recipe) -> Value | None:
        """Note how a fresh storage, or a new version of an old one, came to be; `out` is ordinary."""
        storage = out.untyped_storage()
        if storage.nbytes() != out.nbytes or out.storage_offset():
            return None
        value = Value(out, storage, recipe)
        for use in recipe.uses:
            if use.value.key == value.key and use.value.version == value.version:  # a view: nothing was made
                return None
        self.values[value.key] = value
        self.uses[id(out)] = Use(value, value.made_as, out)
        return value

    # The hooks

    @uncompiled
    def pack(self, t: Tensor) -> Any:
        use = None if self.is_parameter(t) or _wrapped(t) else self.use(t)
        if use is None or use.value.key in self.known:
            self.count += 1
            return Passed(t, self.outer)
        if self.statistics and t.ndim == 1:
            entry = Entry(t.detach(), 0)  # small, and held as it is
            self.pending.append(entry)  # type: ignore[union-attr]
            return entry
        entry = Entry(t.detach(), use.value.key, use.seen_as, self.count)
        self.count += 1
        if self.pending is not None:
            self.pending.append(entry)
        else:
            self.settle(entry)
        return entry

    def settle(self, entry: Entry) -> None:
        """Hold what was saved, exactly."""
        t: Any = entry.tensor
        value, place = self.values[entry.key], entry.place
        source = value.exact()
        if source is not None:
            source.keep(t, place, detached=True)
        else:
            source = value.computed() or (self.compute(value) if self.worth_computing(value) else self.hold(value, t, place))
        self.conclude(entry, source, place, value)

    def conclude(self, entry: Entry, source: Any, place: Any, value: Value) -> None:
        entry.tensor, entry.source, entry.place = None, source, place
        source.join(place)
        self.total += value.nbytes
        if self.tell is not None and not value.free:
            self.tell.saved(entry, *(self.stands_for or ((value,), "")))

    @contextlib.contextmanager
    def instead_of(self, what: str, *tensors: Tensor) -> Iterator[None]:
        """What is saved meanwhile stands for these."""
        self.stands_for = tuple([self.value(t) for t in tensors]), what
        try:
            yield
        finally:
            self.stands_for = None

    def source(self, value: Value) -> Any:
        """How a value is held: as it is already, or computed, or from now on itself. See NOTE [what is computed again]."""
        held = value.exact() or value.computed()
        if held is not None:
            return held
        if self.worth_computing(value):
            return self.compute(value)
        t = value.tensor()
        assert t is not None, "a value that is gone was to be held"
        return self.hold(value, t.detach(), geometry(t))

    def hold(self, value: Value, t: Tensor, place: Geometry) -> Exact:
        """From now on, itself; t is a detached view of it."""
        exact = Exact(value.version, 0 if value.free else value.nbytes, self.outer)
        exact.keep(t, place, detached=True)
        value.exact = weakref.ref(exact)
        for (offset, _, dtype, _), ref in value.stored.items() if value.stored else ():
            stored = ref()
            if stored is not None and not stored.firm:
                shape = (tuple(stored.layout.size), tuple(stored.layout.stride), offset, dtype)
                exact.keep(t, shape)
                stored.give_way(exact, shape)
        return exact

    def compute(self, value: Value) -> Computed:
        recipe: Any = value.recipe
        made = Computed(recipe, value.made_as, self.fill(recipe.args), self.fill(recipe.kwargs))
        value.computed = weakref.ref(made)
        return made

    def fill(self, tree: Any) -> Any:
        """A recipe's arguments, each from how it is held."""
        return _mapped(tree, TO_FILL, self._fill)

    def _fill(self, use: Any) -> Fill:
        if type(use) is Fill:  # the noise of a dropout
            use.source.join(use.seen_as)
            return use
        source = self.source(use.value)
        fill = Fill(source, use.seen_as, use.needs_grad)
        if type(source) is Exact:
            source.fills += (weakref.ref(fill),)
            if not source.has(use.seen_as):
                t = use.value.tensor()
                t = next(iter(source.views.values()), None) if t is None else t
                if t is not None:
                    source.keep(t, use.seen_as)
        source.join(use.seen_as)
        return fill

    def worth_computing(self, value: Value) -> bool:
        return self.within.computes and self.can_compute(value)

    def can_compute(self, value: Value) -> bool:
        return value.recipe is not None and self.price(value)[1] > 0

    def price(self, value: Value, depth: int = 0) -> tuple[int, int]:
        """What would have to be held for a value, and how much computed, in bytes. (0, 0): it is held."""
        if value.free:
            return 0, 0
        exact = value.exact()
        if exact is not None:
            return (0, 0) if not exact.changed and (exact.reaches() or value.tensor() is not None) else (NEVER, 0)
        if value.recipe is not None and depth < LIMIT:
            new, passes = self.cost(value, depth + 1)
            if 2 * new <= value.nbytes and passes <= LIMIT * value.nbytes:
                return new, passes
        t = value.tensor()
        if t is None or (depth and t.grad_fn is None):  # nobody saved it: what the model did not make, others may change
            return NEVER, 0
        return value.nbytes, 0

    def cost(self, value: Value, depth: int = 0) -> tuple[int, int]:
        """The price of a value's recipe."""
        recipe: Any = value.recipe
        new, passes = 0, recipe.passes * value.nbytes
        for use in recipe.uses:
            if use.value.nbytes > FAR * value.nbytes and not use.value.free:
                return NEVER, passes
            more, again = self.price(use.value, depth)
            new, passes = new + more, passes + again
        return new, passes

    def store(self, entry: Entry, store: Any, axis: int, approximate: bool, seed: int = 0, firm: bool = False) -> None:
        """Hold a store's tensors instead, unless the value is held anyway, or can be computed without holding more than the store;
        `firm`: whatever else is held."""
        t: Any = entry.tensor
        value = self.values[entry.key]
        held = (value.stored or {}).get((t.storage_offset(), t.numel(), t.dtype, store), _nothing)()
        if value.free or (not firm and (value.exact() is not None or value.computed() is not None)):
            self.settle(entry)
        elif held is not None:
            self.conclude(entry, held, geometry(t), value)
        else:
            self._compress(entry, store, axis, approximate, seed, value, firm)

    def exceeds(self, value: Value, nbytes: int, t: Tensor) -> bool:
        """Would a store of so many bytes, with what is stored of the value already (a ReLU's bits), hold as much as t itself?"""
        stored = [ref() for ref in (value.stored or {}).values()]
        return nbytes + sum([s.nbytes for s in stored if s is not None]) >= t.nbytes

    def _compress(self, entry: Entry, store: Any, axis: int, approximate: bool, seed: int, value: Value, firm: bool) -> None:
        t: Any = entry.tensor
        new, passes = (NEVER, 0) if firm else self.price(value)
        if (passes > 0 and new == 0) or (approximate and not firm and SMALL * t.nbytes < self.total):
            self.settle(entry)
            return
        with torch.no_grad():
            dense = t if is_dense(t) else t.contiguous()
            layout = Layout.of(dense)
            most = store.bytes(layout, axis)
            if (most >= t.nbytes if firm else self.exceeds(value, most, t)) or (passes > 0 and new <= most):
                self.settle(entry)
                return
            held = Stored(store, layout, store.compress(dense, axis, seed), self.outer, approximate, firm)
        if dense is t:
            value.stored = {**(value.stored or {}), (t.storage_offset(), t.numel(), t.dtype, store): weakref.ref(held)}
        self.conclude(entry, held, geometry(dense), value)
