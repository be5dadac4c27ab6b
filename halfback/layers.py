"""What torch functions save, and how it may be held otherwise: the rows of the ledger's table.

    CHEAP        elementwise functions, casts, copies, norms: their output may be computed again           exact
    relu         its output: one bit an element says where it was positive                                 exact
    dropout      its noise: one bit an element                                                             exact
    pooling      of its input the shape alone, of indices 32 bits                                          exact
    batch_norm   its output from its input and the batch's mean and deviation, in one pass                 exact
    layers       linear, convolutions, addmm and matmul with a weight: their input, for the weight's gradient alone
                 dx = dy W                 exact
                 db = sum dy               exact
                 dW = dy' x_hat            DropIT: approximate, x_hat restored from a store; else exact
                 A convolution whose weight is frozen holds nothing of its input.
    activation   DropIT(activation_bits=4): gelu and silu hold a code of their derivative instead of their input;
                 dx = dy f'(x)             approximate, f'(x) from a table of 16 values
    product      with activation_bits, of such an activation: few-bit copies of both factors (gates.py)    approximate

A row is a function of (ledger, func, args, kwargs) that runs func and settles what it saved. Functions without a row are run as they are,
and what they save is held exactly.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import codes, kernels
from .gates import Gate, Gated
from .ledger import SMALL, Approximated, Blank, Constant, Entry, Fill, Inner, Ledger, Recipe, Rule, Stored, Use, geometry, ordinary
from .stores import Layout, Rows, Signs, flat

# Elementwise functions, casts and copies, by the name under which a function mode sees them, in place or not
CHEAP = frozenset(
    "add sub rsub mul div true_divide neg pow square sqrt rsqrt reciprocal exp log sin cos tanh sigmoid erf abs clamp clamp_min clamp_max "
    "where masked_fill addcmul lerp relu6 hardtanh hardswish hardsigmoid elu selu celu gelu silu mish softplus softsign logsigmoid "
    "threshold glu to float half bfloat16 double type type_as contiguous clone reshape flatten repeat_interleave cat "
    "layer_norm rms_norm group_norm".split()
)
SIGNS = frozenset("relu leaky_relu".split())
POOLINGS = frozenset(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3))
# where the input and the weight stand among the arguments, and which axis of the input has the channels
LAYERS = {"linear": (0, 1, -1), "addmm": (1, 2, -1), "matmul": (0, 1, -1), "mm": (0, 1, -1)}
LAYERS |= {name: (0, 1, 1) for name in ("conv1d", "conv2d", "conv3d")}
CODED = {"gelu": "gelu", "silu": "silu"}
OPERATORS = {f"__{prefix}{o}__": o for o in ("add", "sub", "mul", "pow", "matmul") for prefix in ("", "r", "i")}
OPERATORS |= {f"__{prefix}truediv__": "div" for prefix in ("", "r", "i")} | {"__rsub__": "rsub"}


class Rules(dict[Callable, Rule | None]):
    """The rule of every torch function, found when it is first called."""

    def __missing__(self, func: Callable) -> Rule | None:
        name = getattr(func, "__name__", "")
        plain, changes = plain_name(name), changes_in_place(name)
        run = _row(func, plain, changes)
        again = (getattr(torch, plain, None) or getattr(F, plain, None)) if changes else func
        self[func] = None if run is None else Rule(run, plain, changes, run in (cheap, signs, activation, product), again)
        return self[func]


rules = Rules()


def _row(func: Callable, plain: str, changes: bool) -> Callable | None:
    if func is F.multi_head_attention_forward:
        return seen_through
    if func is F.batch_norm:
        return batch_norm
    if func is F.dropout:
        return dropout
    if func is F.layer_norm:
        return layer_norm
    if plain in SIGNS:
        return signs
    if plain in POOLINGS:
        return pooling
    if plain in LAYERS:
        return layer
    if plain in CODED:
        return activation
    if plain == "mul" and not changes:
        return product
    if plain in CHEAP:
        return cheap
    return as_it_is if changes else None


def as_it_is(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    return func(*args, **kwargs)


def plain_name(name: str) -> str:
    """`add_`, `__iadd__` and `add` are one."""
    if name in OPERATORS:
        return OPERATORS[name]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def changes_in_place(name: str) -> bool:
    """Does a function of this name change its first argument?"""
    return name[-1:] == "_" and (name[:2] != "__" or name[:3] == "__i" or name == "__setitem__")


def autocast_state(t: Tensor) -> tuple[str, torch.dtype] | None:
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = t.device.type
    return (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None


def _key(t: Tensor) -> int:
    return t.untyped_storage()._cdata


# The rows


def cheap(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():  # counters, indices, masks, complex numbers
        return func(*args, **kwargs)
    out, saved, recipe = _recorded(ledger, func, args, kwargs)
    inner = _inner(recipe, saved, out) if recipe is not None and saved and ledger.within.computes else ()
    if inner and recipe is not None and 2 * ledger.cost(ledger.value(out))[0] <= sum([_tensor(e).nbytes for e in inner]):
        again = Inner(recipe, None, ledger.fill(recipe.args), ledger.fill(recipe.kwargs))
        for entry in inner:
            ledger.conclude(entry, again, entry.number, ledger.value(_tensor(entry)))
    for entry in saved:
        if entry.source is None:
            ledger.settle(entry)
    return out


def _tensor(entry: Entry) -> Tensor:
    assert entry.tensor is not None
    return entry.tensor


def _inner(recipe: Recipe, saved: list[Entry], out: Tensor) -> list[Entry]:
    """What a function saved of its own making that is large (a norm that is written out in C++)."""
    keys = [use.value.key for use in recipe.uses]
    others = [e for e in saved if e.key not in keys]
    return [e for e in others if e.key != _key(out) and 4 * _tensor(e).nbytes >= out.nbytes] if others else others


def _recorded(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> tuple[Any, list[Entry], Recipe | None]:
    """Run a function, and note how its output was made."""
    rule: Any = rules[func]
    changing = rule.changes or (kwargs and kwargs.get("inplace"))
    if changing:
        bound, named = ledger.bind(args), ledger.bind(kwargs)  # as they are before
    out, saved = ledger.watch(func, args, kwargs)
    if rule.again is None or not ordinary(out) or "out" in kwargs:
        return out, saved, None
    if not changing:
        if not saved and args and (out is args[0] or _is_view(out, args[0])):
            return out, saved, None
        bound, named = ledger.bind(args), ledger.bind(kwargs) if kwargs else kwargs
    if named and named.get("inplace"):
        named["inplace"] = False
    for t in (*bound, *named.values()) if named else bound:
        if isinstance(t, Tensor):  # one that is not ordinary
            return out, saved, None
    recipe = Recipe(rule.again, bound, named, None if rule.name in MOVES else autocast_state(out))
    if rule.name in SHORTER:
        recipe = _shorter(rule.name, recipe, out)
    return out, saved, recipe if ledger.made(out, recipe) is not None else None


def _is_view(out: Tensor, x: Any) -> bool:
    return out._base is not None and ordinary(x) and _key(out) == _key(x)


def signs(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    """relu saves its output, leaky_relu its input: of both, the sign is all that the backward asks for."""
    out, saved, _ = _recorded(ledger, func, args, kwargs)
    for entry in saved:
        ledger.store(entry, Signs(), -1, approximate=False)
    return out


@dataclass(frozen=True)
class Noise:
    """The noise of a dropout: one bit an element. `scale` is None for a mask that is kept as booleans."""

    scale: float | None

    def compress(self, x: Tensor) -> tuple[Tensor, ...]:
        return (kernels.pack_bits(flat(x).ne(0)),)

    def restore(self, held: tuple[Tensor, ...], layout: Layout) -> Tensor:
        mask = layout.of_flat(kernels.unpack_bits(held[0], layout.n))
        return mask if self.scale is None else mask.to(layout.dtype).div_(1 / self.scale)


def dropout(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    x, p, training, inplace = _of_dropout(*args, **kwargs)
    if not 0 < p < 1 or not training or inplace or not x.requires_grad or not ordinary(x):
        return func(*args, **kwargs)
    use = ledger.bind(x)
    out, saved = ledger.watch(func, args, kwargs)
    if (
        len(saved) != 1
        or not ordinary(out)
        or saved[0].tensor is None
        or saved[0].tensor.shape != x.shape
        or _key(saved[0].tensor) == _key(x)
    ):
        for entry in saved:
            ledger.settle(entry)
        return out
    noise = saved[0].tensor
    scale = None if noise.dtype == torch.bool else 1 / (1 - p)
    store = Noise(scale)
    with torch.no_grad():
        held = Stored(store, Layout.of(noise), store.compress(noise), ledger.outer, approximate=False)
    place = geometry(noise)
    ledger.made(out, Recipe(_dropped, (use, Fill(held, place), 1 / (1 - p)), {}))
    ledger.conclude(saved[0], held, place, ledger.value(noise))
    return out


def _of_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace


def _dropped(x: Tensor, noise: Tensor, scale: float) -> Tensor:
    return torch.ops.aten.native_dropout_backward(x, noise, scale) if noise.dtype == torch.bool else x * noise


@dataclass(frozen=True)
class Indices:
    """Places in a feature map: 32 bits are enough."""

    def compress(self, x: Tensor, axis: int = -1, seed: int = 0) -> tuple[Tensor, ...]:
        return (flat(x).to(torch.int32),)

    def restore(self, held: tuple[Tensor, ...], layout: Layout) -> Tensor:
        return layout.of_flat(held[0].to(layout.dtype))

    def bytes(self, layout: Layout, axis: int = -1) -> int:
        return 4 * layout.n


def pooling(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Its backward asks the input for nothing but its shape."""
    out, saved = ledger.watch(func, args, kwargs)
    inputs = {_key(t) for t in (*args[:1], *kwargs.values()) if ordinary(t)}
    for entry in saved:
        t = _tensor(entry)
        if entry.key in inputs:
            ledger.conclude(entry, Blank(t), geometry(t), ledger.value(t))
        elif t.dtype == torch.int64 and isinstance(out, Tensor):
            ledger.store(entry, Indices(), -1, approximate=False)
        else:
            ledger.settle(entry)
    return out


def batch_norm(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) if len(args) == len(names) else _all_given(names, args, kwargs)
    x = given["input"]
    if not given["training"] or not ordinary(x):
        return _evaluated(ledger, func, args, kwargs, given)
    ledger.known = {_key(t) for t in (given["running_mean"], given["running_var"]) if t is not None}
    ledger.statistics = True
    try:
        out, saved = ledger.watch(func, args, kwargs)
    finally:
        ledger.known, ledger.statistics = frozenset(), False
    # cuDNN saves a workspace of bytes beside the two
    own = [t for e in saved if not e.key and (t := _tensor(e)).shape == x.shape[1:2] and t.is_floating_point()]
    for entry in saved:
        if entry.key:
            ledger.settle(entry)
    use, weight, bias = ledger.bind((x, given["weight"], given["bias"]))
    if not ordinary(out):
        return out
    if len(own) == 2 and x.is_cuda and out.dtype == x.dtype:
        ledger.made(out, Recipe(kernels.normalise_channels, (use, *map(Constant, own), weight, bias, None, False), {}))
    elif not x.is_cuda:
        noted = None if given["running_mean"] is None else given["running_mean"].dtype
        ledger.made(out, Recipe(_normalised, (use, noted, weight, bias, given["eps"]), {}, autocast_state(x)))
    return out


def _normalised(x: Tensor, noted: torch.dtype | None, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """What a batch norm made of x, bit by bit. Its statistics are found again, in the type in which they were noted, and noted nowhere."""
    nowhere = None if noted is None else x.new_zeros(x.shape[1], dtype=noted)
    return F.batch_norm(x, nowhere, nowhere, weight, bias, True, 0.0, eps)


def _all_given(names: tuple, args: tuple, kwargs: dict) -> dict:
    return dict.fromkeys(names) | {"training": False, "eps": 1e-5} | dict(zip(names, args, strict=False)) | kwargs


def _evaluated(ledger: Ledger, func: Callable, args: tuple, kwargs: dict, given: dict) -> Any:
    """A batch norm in evaluation mode: its statistics as they are now, since a later call may change them."""
    out, saved = ledger.watch(func, args, kwargs)
    for entry in saved:
        ledger.settle(entry)
    if ordinary(out) and not given["training"]:
        x, weight, bias = ledger.bind((given["input"], given["weight"], given["bias"]))
        mean, var = (Constant(given[name].clone()) for name in ("running_mean", "running_var"))
        ledger.made(out, Recipe(func, (x, mean, var, weight, bias, False, 0.0, given["eps"]), {}, autocast_state(out)))
    return out


def layer_norm(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    """On CUDA its output comes from its input and the statistics that it saved: half the time of the norm itself."""
    x, axes, weight, bias = _of_layer_norm(*args, **kwargs)
    if not x.is_cuda or not ordinary(x) or len(axes) != 1 or not (x.ndim == 3 or x.is_contiguous()) or autocast_state(x):
        return cheap(ledger, func, args, kwargs)
    out, saved = ledger.watch(func, args, kwargs)
    rows, key = (*x.shape[:-1], 1), _key(x)
    own = [_tensor(e) for e in saved if e.key != key and _tensor(e).shape == rows]
    for entry in saved:
        ledger.settle(entry)
    if len(own) == 2 and ordinary(out) and out.is_contiguous():
        bound = ledger.bind((x, *own, weight, bias))
        ledger.made(out, Recipe(_normalised_rows, (*bound, False, tuple(out.shape)), {}))
    return out


def _of_layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> tuple:
    return input, normalized_shape, weight, bias


def _normalised_rows(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None, swapped: bool, size: tuple[int, ...]
) -> Tensor:
    """What a layer norm made of x, contiguous; `swapped`: with its first two axes exchanged."""
    if x.ndim != 3:
        x = x.reshape(1, -1, x.shape[-1])
    mean, inverse = mean.reshape(x.shape[:2]), inverse.reshape(x.shape[:2])
    if swapped:
        x, mean, inverse = x.transpose(0, 1), mean.transpose(0, 1), inverse.transpose(0, 1)
    return kernels.normalise_rows(x, mean, inverse, weight, bias).view(size)


def _copied(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """x, contiguous. Where rows lie in one piece, row by row: torch's own copy goes element by element."""
    groups: list[list[int]] = []  # neighbouring axes that lie in memory as one: [size, stride]
    for n, stride in zip(x.shape, x.stride(), strict=True):
        if groups and groups[-1][1] == n * stride:
            groups[-1] = [groups[-1][0] * n, stride]
        elif n != 1:
            groups.append([n, stride])
    if len(groups) not in (2, 3) or groups[-1][1] != 1 or groups[-1][0] < 64:
        return x.contiguous().view(size)
    (a, sa), (b, sb), (c, _) = groups if len(groups) == 3 else ([1, 0], *groups)
    return kernels.copy_rows(x.as_strided((a, b, c), (sa, sb, 1))).view(size)


def _shorter(name: str, recipe: Recipe, out: Tensor) -> Recipe:
    """The same in one pass: a norm, the addition after it, and the ReLU after that; a copy row by row."""
    if name in COPIES and out.is_cuda and out.is_contiguous() and isinstance(recipe.args[0], Use):
        return Recipe(_copied, (recipe.args[0], tuple(out.shape)), {})
    for i in PLACES.get(name, ()):
        use: Any = recipe.args[i] if len(recipe.args) > i else None
        made = use.value.recipe if isinstance(use, Use) and use.seen_as == use.value.made_as else None
        if made is None or made.func is not kernels.normalise_channels or made.args[6]:
            continue
        if name == "relu":
            return Recipe(made.func, (*made.args[:6], True), {}, passes=made.passes + 1)
        other = recipe.args[1 - i] if len(recipe.args) == 2 and not recipe.kwargs else None
        if isinstance(other, Use) and made.args[5] is None and other.seen_as[0] == use.seen_as[0] and other.seen_as[3] == use.seen_as[3]:
            return Recipe(made.func, (*made.args[:5], other, False), {}, passes=2)
    return recipe


COPIES = frozenset("contiguous reshape flatten clone".split())
MOVES = COPIES | frozenset("to float half bfloat16 double type type_as".split())  # autocast leaves them alone
PLACES = {"add": (0, 1), "relu": (0,)}  # where the norm may stand among the arguments
SHORTER = COPIES | frozenset(PLACES)


def layer(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    """A layer's input is saved for the gradient of its weight alone, so it may be held by a store."""
    first, second, axis = LAYERS[rules[func].name]  # type: ignore[union-attr]
    if len(args) <= second or not ordinary(args[first]) or not ordinary(args[second]):
        return func(*args, **kwargs)
    x, weight = args[first], args[second]
    ledger.factors.take(x)
    product = x
    state = autocast_state(x)
    if state is not None and _is_cast(x, state[1]):
        x = cheap(ledger, Tensor.to, (x, state[1]), {})  # as autocast would, where it can be seen
        args = (*args[:first], x, *args[first + 1 :])
    plan = ledger.within.store_of(x, weight, axis)
    if plan is not None and isinstance(plan.store, Rows) and axis == -1 and func is F.linear:
        return rows_linear(ledger, x, plan, *args[1:], **kwargs)
    by_factors = _by_factors(ledger, product, x) if plan is not None and not ledger.within.draws() else None
    out, saved = ledger.watch(func, args, kwargs)
    own, others = (_key(x), _key(weight)) if saved else (0, 0)
    for entry in saved:
        t = _tensor(entry)
        copied = state is None and entry.key not in (own, others) and _is_copy(t, x, weight)
        if copied:
            ledger.made(t, _copy_of(ledger.bind(x), t))
        if not copied and (entry.key != own or t.numel() != x.numel() or own == others):
            ledger.settle(entry)
        elif axis == 1 and not weight.requires_grad:
            ledger.conclude(entry, Blank(t), geometry(t), ledger.value(t))
        elif plan is not None and by_factors is not None:
            ledger.conclude(entry, by_factors, geometry(t), ledger.value(t))
        elif plan is not None:
            ledger.store(entry, plan.store, axis, True, plan.seed, plan.firm)
        else:
            ledger.settle(entry)
    return out


def _is_cast(x: Tensor, dtype: torch.dtype) -> bool:
    """Does autocast cast it, and for this call alone? Of a leaf it keeps the cast, for all who read it."""
    shared = x.is_leaf and x.requires_grad
    return not shared and x.is_floating_point() and x.dtype not in (dtype, torch.float64)


def _is_copy(t: Tensor, x: Tensor, weight: Tensor) -> bool:
    """A linear layer folds the leading axes of its input, and copies it if they cannot be folded in place. Of a weight with two axes it
    makes no copy, so what has neither's storage is that. (Under autocast it may be a cast of the weight.)"""
    folds = x.ndim > 2 and weight.ndim == 2 and not x.is_contiguous() and t.is_contiguous()
    return folds and t.shape == (x[..., 0].numel(), x.shape[-1])


def _copy_of(use: Use, t: Tensor) -> Recipe:
    made = use.value.recipe
    if made is not None and made.func is _normalised_rows and not made.args[5] and use.value.made_as is not None:
        (size, stride, offset, dtype), seen = use.value.made_as, use.seen_as
        if len(size) == 3 and seen == ((size[1], size[0], size[2]), (stride[1], stride[0], stride[2]), offset, dtype):
            return Recipe(_normalised_rows, (*made.args[:5], True, tuple(t.shape)), {})
    return _shorter("reshape", Recipe(Tensor.reshape, (use, t.shape), {}), t)


def _no_view(out: Tensor) -> Tensor:
    """What a linear layer makes of more than two axes is a view, which a Function must not return if it is to be changed in place."""
    return torch.ops.aten._unsafe_view(out, out.shape) if torch.compiler.is_compiling() or out._is_view() else out


class StoredLinear(torch.autograd.Function):
    """dx = dy W and db exact; dW = dy' x_hat, x_hat from a store, or from what it holds of x already. Of rows only the kept ones are
    multiplied."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, store: Any, seed: int, *held: Tensor):
        ctx.store, ctx.dtype = store, x.dtype
        ctx.save_for_backward(weight, *(held or store.compress(x.contiguous(), -1, seed)))
        return _no_view(F.linear(x, weight, bias))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        weight, *held = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        flat = grad.reshape(-1, grad.shape[-1])
        layout = Layout.contiguous((*grad.shape[:-1], weight.shape[1]), ctx.dtype, grad.device)
        if ctx.needs_input_grad[1] and isinstance(ctx.store, Rows):
            values, index = ctx.store.rows(tuple(held), layout)
            grad_weight = flat.index_select(0, index.long()).T @ values
        elif ctx.needs_input_grad[1]:
            x = ctx.store.restore(tuple(held), layout)
            grad_weight = flat.T @ x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, *[None] * len(held)


def rows_linear(ledger: Ledger, x: Tensor, plan: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Exact where the input is held, or can be computed, anyway."""
    value = ledger.value(x)
    layout = Layout.of(x.detach().contiguous())
    small = SMALL * x.nbytes < ledger.total
    free = small or value.free or value.exact() is not None or value.computed() is not None or ledger.can_compute(value)
    if (
        (free and not plan.firm)
        or x.ndim < 2
        or ledger.exceeds(value, plan.store.bytes(layout, -1), x)
        or torch.is_autocast_enabled(x.device.type)
    ):
        return F.linear(x, weight, bias)
    with ledger.instead_of(str(plan.store), x):
        return StoredLinear.apply(x, weight, bias, plan.store, plan.seed)


class Coded(torch.autograd.Function):
    """An activation that remembers a code of its derivative: dx = dy * table[code]."""

    @staticmethod
    def forward(ctx, x: Tensor, name: str, bits: int):
        ctx.name, ctx.bits = name, bits
        edges, _ = codes.table(name, bits, x.device)
        ctx.save_for_backward(kernels.encode(x.detach().contiguous().view(-1), edges))
        return kernels.reference.ACTIVE[name](x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (held,) = ctx.saved_tensors
        grad = grad.contiguous()
        _, values = codes.table(ctx.name, ctx.bits, grad.device)
        return kernels.scale_by_code(grad.view(-1), held, values).view(grad.shape), None, None


def code_name(name: str, kwargs: dict) -> str:
    """Which table an activation's derivative is coded by."""
    return "gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else CODED[plain_name(name)]


def activation(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    bits = ledger.within.activation_bits
    x = args[0] if args else kwargs["input"]
    changes = rules[func].changes or kwargs.get("inplace")  # type: ignore[union-attr]
    if bits is None or changes or not x.requires_grad or not ordinary(x):
        return cheap(ledger, func, args, kwargs)
    name = code_name(func.__name__, kwargs)
    with ledger.instead_of(f"a {bits}-bit code of its derivative", x):
        out = Coded.apply(x, name, bits)
    ledger.factors.note(out, x, x._version, Gate(name, bits))  # it may become one of a product
    return out


def product(ledger: Ledger, func: Callable, args: tuple, kwargs: dict) -> Any:
    """f(g) * u, of an activation that would hold a code."""
    for i in range(2) if len(args) == 2 and not kwargs else ():
        a, u = args[i], args[1 - i]
        g, version, gate = ledger.factors.take(a) or (None, 0, None)
        if g is None or g._version != version or not is_gated(g, a, u) or not ordinary(u):
            continue
        with ledger.instead_of(str(gate), g, a, u):
            out, *held = Gated.apply(g, u, a.detach(), gate, i == 0)
        if out.is_contiguous():
            ledger.products.note(out, gate, ledger.bind(tuple(held)))
        return out
    return cheap(ledger, func, args, kwargs)


def is_gated(g: Tensor, a: Tensor, u: Any) -> bool:
    """Is a, which an activation made of g, one factor of two, and the other one u? A gradient that somebody waits for at a has to go
    there; and g twice would be held twice."""
    awaited = a._backward_hooks or a.retains_grad
    return (
        not awaited and isinstance(u, Tensor) and u is not a and u is not g and u.requires_grad and (u.shape, u.dtype) == (g.shape, g.dtype)
    )


def _by_factors(ledger: Ledger, product: Tensor, x: Tensor) -> Approximated | None:
    """A product from what is held of its factors. x is what a layer reads: the product, or a cast of it."""
    gate, held = ledger.products.take(product) or (None, ())
    if gate is None:
        return None
    recipe = Recipe(gate.restore, (held, Layout.of(x)), {})
    return Approximated(recipe, geometry(x), ledger.fill(recipe.args), {})


def opened(func: Any) -> Any:
    """Torch's multi-head attention is Python that calls layers, but a mode sees only the whole. The same code, with its own question
    whether a mode is on answered no, lets it see the layers."""
    same = types.FunctionType(func.__code__, {**func.__globals__, "has_torch_function": lambda _: False}, func.__name__)
    same.__defaults__, same.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    return same


def seen_through(ledger: Ledger, func: Any, args: tuple, kwargs: dict) -> Any:
    with ledger:
        return opened(func)(*args, **kwargs)
