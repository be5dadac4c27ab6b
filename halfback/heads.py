"""The loss of a large vocabulary without its scores.

    loss = mean over rows of   logsumexp(x W') - (x W')[target]
    dx   = (softmax(x W') - onehot(target)) W,    dW = (softmax(x W') - onehot(target))' x

A language model's last layer makes tens of thousands of scores for each token: often more bytes than all of its blocks hold. Here it
returns `Scores`, a tensor that knows how it would be computed. Cross entropy of it runs on some rows at a time and finds the gradient
on the way, so that no more than a few rows' scores are ever there, and nothing is computed twice. Everything else that is asked of
`Scores` computes them, as they would have been.

Gradients are exact: the same sums in another order. They are held without the factor 1 / rows, which the backward multiplies with the
gradient of the loss: in fp16 a loss scale then reaches them before they are rounded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .attention import cast
from .blocks import find_blocks
from .kernels import cross_entropy_
from .notes import constant, listen, log, note
from .standins import Standin
from .streams import Through

LEAST = 4096  # outputs that make a layer worth it
PART = 2**27  # bytes of a part's scores in 16 bits
ABOUT = {"size", "dim", "numel", "__len__", "is_floating_point", "element_size", "nelement", "ndimension", "is_complex", "__get__"}
HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}
CONTENTS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that are tensors
ORDINARY = (Tensor, nn.Parameter, FakeTensor)


def find_heads(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Linear layers outside of blocks with so many outputs that their scores are worth sparing."""
    inside = tuple(name + "." for name in blocks)
    return [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and not name.startswith(inside) and m.out_features >= max(LEAST, 2 * m.in_features)
    ]


def bodies(model: nn.Module, heads: Sequence[str]) -> list[str]:
    """The largest modules that run blocks and no head: what can be compiled beside a loss in parts."""
    inner = [name for name, _ in find_blocks(model)] or [name for name, _ in model.named_parameters()]
    found: list[str] = []

    def look(name: str, module: nn.Module) -> None:
        inside = f"{name}." if name else ""
        if not any(i == name or i.startswith(inside) for i in inner) or name in heads:
            return
        if type(module).forward is nn.Module.forward or any(h.startswith(inside) for h in heads):  # a list; or a head is in it
            for key, child in module.named_children():
                look(inside + key, child)
        else:
            found.append(name)

    look("", model)
    return found


def compile_(model: nn.Module, **options: Any) -> Any:
    """torch.compile, what calls it. Where the loss is computed in parts, of all that comes before that: the model stays as it is then."""
    heads = [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), Spared)]
    if not heads:
        return torch.compile(model, **options)
    for name in bodies(model, heads):
        model.get_submodule(name).compile(**options)
    return model


@constant
def _warn(owner: str, name: str, instead: str) -> bool:
    """A compiled graph calls this once, when it is traced."""
    note(owner, name, "compiled", f"all scores are computed. Compile what comes before: {instead}")
    log.warning("halfback: ChunkedLoss does nothing while %s is compiled. Compile what comes before it: %s", name, instead)
    return True


def rows_of_a_part(classes: int) -> int:
    return max(64, PART // (2 * classes) // 64 * 64)


# The loss, a part at a time


class CrossEntropy(torch.autograd.Function):
    """The sum over rows of a cross entropy; the gradient is found in the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, rows, ignored, smoothing):
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        total = torch.zeros((), dtype=wide, device=x.device)
        grads = _Gradients(ctx.needs_input_grad, x, weight, bias, wide)
        for i in range(0, len(x), rows):
            part = x[i : i + rows]
            scores = F.linear(part, weight, bias)
            total += cross_entropy_(scores, target[i : i + rows], ignored, smoothing, grads.any).sum()
            if grads.any:
                grads.add(scores, part, i)  # their gradient by now
            del scores  # before there are others
        ctx.save_for_backward(*grads.found)
        return total

    @staticmethod
    def backward(ctx, factor):
        if torch.is_grad_enabled():
            raise RuntimeError("halfback: double backward (create_graph=True) through ChunkedLoss is not supported. Leave it out.")
        found = [None if g is None else _scaled(g, factor) for g in ctx.saved_tensors]
        return (*found, None, None, None, None)


def _scaled(g: Tensor, factor: Tensor) -> Tensor:
    """g times factor, in one copy of g; zero if g is, whatever the factor: where no target counts, it is 1 / 0. The factor has an axis, or
    it would be rounded to g's dtype first."""
    return torch.mul(g, torch.where(g.any(), factor, 0).reshape(1), out=torch.empty_like(g))


@functools.cache
def _adds_up(device: torch.device, dtype: torch.dtype) -> bool:
    """Can a product of numbers of 16 bits be added to a sum of 32 as it is made? CPUs cannot, nor torch before it learned to."""
    with unset_fake_temporarily():
        total, part = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
        try:
            return bool((torch.addmm(total, part, part, out_dtype=total.dtype, out=total) == 17).all())
        except RuntimeError:
            return False


class _Gradients:
    """Those of x, weight and bias that are wanted, as they add up."""

    def __init__(self, wanted: Sequence[bool], x: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype):
        self.weight_itself = weight
        self.x = torch.empty_like(x) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        self.any = any(wanted[:3])

    def add(self, flowing: Tensor, part: Tensor, at: int) -> None:
        if self.x is not None:
            torch.mm(flowing, self.weight_itself, out=self.x[at : at + len(part)])
        if self.weight is not None and self.weight.dtype == part.dtype:
            self.weight.addmm_(flowing.t(), part)
        elif self.weight is not None and _adds_up(part.device, part.dtype):  # in one pass over the sum
            torch.addmm(self.weight, flowing.t(), part, out_dtype=self.weight.dtype, out=self.weight)
        elif self.weight is not None:
            self.weight += flowing.t() @ part
        if self.bias is not None:
            self.bias += flowing.sum(0)

    @property
    def found(self) -> tuple[Tensor | None, ...]:
        """The weight's rounded to its dtype, but for fp16, whose range the sum may leave."""
        weight = self.weight
        if weight is not None and self.weight_itself.dtype is torch.bfloat16:
            weight = weight.to(torch.bfloat16)
        return self.x, weight, self.bias


def cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, ignored: int = -100, mean: bool = True, smoothing: float = 0
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # what is cast was cast where the layer was called
        with torch._C.DisableTorchFunction():  # many small functions, in which nobody has anything to see
            total = CrossEntropy.apply(x, weight, bias, target, rows, ignored, smoothing)
        return total / (target != ignored).sum() if mean else total


# Scores that are not there


class Layer(NamedTuple):
    """What scores know of the layer that they stand for."""

    rows: int  # of a part of the loss
    told: Callable[[str], Any]  # that the scores were computed after all, for whom
    versions: list[tuple[Tensor, int]]  # of what they come from


class Deferred(torch.autograd.Function):
    """A linear layer that is not computed: its output is `Scores`. Whatever gradient reaches those goes on as the layer's would."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer, dtype):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return Scores(x.detach(), weight.detach(), None if bias is None else bias.detach(), layer, dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None, None, None


class Whole(torch.autograd.Function):
    """The scores themselves. Their gradient goes back through `Scores`, so that hooks on those see it."""

    @staticmethod
    def forward(ctx, scores):
        with torch.autocast(scores.x.device.type, enabled=False):
            return F.linear(scores.x, scores.weight, scores.bias).to(scores.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


def deferred(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, dtype: torch.dtype) -> Scores:
    scores = Deferred.apply(x, weight, bias, layer, dtype)
    scores.inputs = (x, weight, bias)
    return scores


class Scores(Tensor):
    """What a last layer would return: `x @ weight.T + bias`, in a dtype; computed when somebody asks for more than its cross entropy."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    layer: Layer
    inputs: tuple[Tensor, Tensor, Tensor | None]  # the same with their place in the graph
    hooked: bool  # somebody wants to see the gradient of these very scores, so it has to pass through them

    @staticmethod
    def __new__(cls, x, weight, bias, layer, dtype):
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, (*x.shape[:-1], len(weight)), dtype=dtype, device=x.device)
        made.x, made.weight, made.bias, made.layer = x, weight, bias, layer
        made.hooked = False
        return made

    def __init__(self, *args, **kwargs):
        pass

    def _like(self, x: Tensor, dtype: torch.dtype | None = None) -> Scores:
        return deferred(x, *self.inputs[1:], self.layer, dtype or self.dtype)

    def check(self) -> None:
        for t, version in self.layer.versions:
            if t._version != version:
                raise RuntimeError(
                    "halfback: scores (logits) are asked for that ChunkedLoss never computed, and the weights they come from have changed "
                    "since. Ask for them before optimizer.step(), or leave ChunkedLoss out."
                )
            if t.numel() and not t.untyped_storage().nbytes():
                raise RuntimeError(
                    "halfback: the weights of the last layer are gone when the loss is computed, which ChunkedLoss needs them for: FSDP "
                    "freed them. Shard the layer with the whole model, or with reshard_after_forward=False."
                )

    def whole(self) -> Tensor:
        """The scores themselves."""
        self.check()
        return Whole.apply(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name in HOOKS:
            args[0].hooked = True
        if name in HOOKS or (name in ABOUT and attribute not in CONTENTS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], Scores) and not kwargs and _same(name, args[0], args[1:]):
            return args[0]
        _refuse_in_place(name, args, kwargs)
        if args and isinstance(args[0], Scores) and torch.is_grad_enabled() and not args[0].hooked:
            found = _spared(func, name, args[0], args[1:], kwargs)
            if found is not None:
                return found
        return _computed(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:  # as autograd's own bookkeeping asks for
            own = args[0]
            return Scores(own.x, own.weight, own.bias, own.layer, own.dtype)
        raise RuntimeError(f"halfback: {func} reached scores (logits) that ChunkedLoss did not compute. Leave it out.")

    def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
        return f"Scores(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"


def _same(name: str, scores: Scores, args: tuple) -> bool:
    """Would torch return the very tensor?"""
    if name == "to" and len(args) == 1:
        return args[0] == scores.dtype
    return not args and (name == "contiguous" or (name == "float" and scores.dtype == torch.float32))


def _refuse_in_place(name: str, args: tuple, kwargs: dict) -> None:
    """What would change scores that are not there: views of them would not know."""
    changes = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__set__") or kwargs.get("inplace")
    if (changes and name != "requires_grad_") or isinstance(kwargs.get("out"), Scores):
        raise RuntimeError(
            f"halfback: {name} would change scores (logits) in place, which ChunkedLoss did not compute. Work on logits.clone(), or leave "
            "ChunkedLoss out."
        )


def _computed(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    def whole(x: Any) -> Any:
        if isinstance(x, Scores):
            x.layer.told(name)
            return x.whole()
        return type(x)(map(whole, x)) if type(x) in (tuple, list) else x

    return func(*map(whole, args), **{k: whole(v) for k, v in kwargs.items()})


def _spared(func: Any, name: str, scores: Scores, args: tuple, kwargs: dict) -> Any:
    """What needs no scores: other shapes of the rows, another dtype, cross entropy. None for all else."""
    x = scores.inputs[0]
    if func is F.cross_entropy:
        return _loss(scores, *args, **kwargs)
    if name == "float" and not args and not kwargs:
        return scores._like(x, torch.float32)
    if name == "to" and not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype) and args[0].is_floating_point:
        return scores._like(x, args[0])
    if name in ("view", "reshape", "flatten") and not kwargs and not any(isinstance(a, torch.dtype) for a in args):
        return _reshaped(scores, name, args)
    if name == "__getitem__" and _whole_rows(args[0], scores.dim()):
        return scores._like(x[args[0]])
    return None


def _reshaped(scores: Scores, name: str, args: tuple) -> Scores | None:
    try:
        shape = getattr(torch.empty(scores.shape, device="meta"), name)(*args).shape
    except (RuntimeError, TypeError):
        return None  # the scores themselves say why
    same = len(shape) > 0 and shape[-1] == scores.shape[-1]
    return scores._like(scores.inputs[0].reshape(*shape[:-1], scores.x.shape[-1])) if same else None


def _whole_rows(index: Any, dims: int) -> bool:
    """Does an index leave the last axis as it is?"""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor) for i in parts):
        return len(parts) == 1 and parts[0].ndim < dims and parts[0].dtype in (torch.bool, torch.int64)
    if not all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in parts):
        return False
    used = sum(i is not None and i is not Ellipsis for i in parts)
    if Ellipsis not in parts and used < dims:
        return True
    return isinstance(parts[-1], slice) and parts[-1] == slice(None)


def _loss(
    scores, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
) -> Tensor | None:
    known = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    rows = scores.dim() == 2 and isinstance(target, Tensor) and target.shape == scores.shape[:1] and not target.is_floating_point()
    if not (known and rows):
        return None
    scores.check()
    x, own, bias = scores.inputs
    loss = cross_entropy(x, own, bias, target.to(torch.int64), scores.layer.rows, ignore_index, reduction == "mean", label_smoothing)
    return loss if torch.is_autocast_enabled(scores.device.type) else loss.to(scores.dtype)


# On a model


class Spared(Standin):
    """The forward of a last layer, which returns `Scores`. A mode sees the layer's own code, and is on for no longer than that: it would
    be called for every function of the model."""

    def __init__(self, module: nn.Module, name: str, report: Any, before: Sequence[str], rows: int | None = None, own: Any = None):
        super().__init__(module, own)
        self.name, self.report, self.rows = name, report, rows
        calls = [re.sub(r"\.(\d+)", r"[\1]", f"model.{b}.compile()") for b in before]
        self.instead = ", ".join(calls if len(calls) < 4 else [*calls[:2], "..."])  # of compiling the model
        self.owner = listen(report)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.owner = listen(self.report)

    def __call__(self, *args, **kwargs):
        if self.idle():
            return self.plain(*args, **kwargs)
        if torch.compiler.is_compiling():
            _warn(self.owner, self.name, self.instead)
            return self.plain(*args, **kwargs)
        with Sparing(self):
            return self.plain(*args, **kwargs)


class Sparing(Through):
    def __init__(self, spared: Spared):
        super().__init__()
        self.spared = spared

    def see(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            own = self.spared.module._parameters.get("weight")  # one that is computed is none
            if own is not None and given["weight"] is own and type(given["input"]) in ORDINARY:
                return self._scores(given["input"], own, given.get("bias"))
        return func(*args, **kwargs)

    def _scores(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Scores:
        owner, name = self.spared.owner, self.spared.name
        rows = self.spared.rows or rows_of_a_part(len(weight))
        note(owner, name, "loss in parts", f"{rows} rows at a time")
        versions = [(t, t._version) for t in (x, weight, bias) if t is not None]
        x, weight, bias = cast(x), cast(weight), cast(bias)

        def told(func: str) -> None:
            note(owner, name, "scores computed after all, as asked for by", func)

        return deferred(x, weight, bias, Layer(rows, told, versions), x.dtype)
