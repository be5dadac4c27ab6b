"""A batch as users have it, and the loss that it gives.

tensor           model(tensor)
(inputs, y)      as a data loader gives it: model(inputs), and cross entropy with integer y, or the mean squared error with floating y
longer tuples    model(*tuple)
dict             model(**dict), as with transformers
function         called without arguments, it runs the model and returns the loss

Without targets the loss is what the model returns as `.loss`, or the sum of its output, whose backward costs and holds nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

FORMS = "a tensor, a tuple (inputs, targets), a dict of arguments, or a function of no arguments that returns the loss"


def check_batch(model: nn.Module, batch: Any, verb: str) -> None:
    """A batch that cannot be one is an error before anything runs."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}(): expected a torch.nn.Module, found {type(model).__name__}.")
    if isinstance(batch, nn.Module) or not (isinstance(batch, (Tensor, tuple, list, Mapping)) or callable(batch)):
        raise TypeError(f"{verb}(): batch is {type(batch).__name__}; give {FORMS}.")
    if not callable(batch) and not any(isinstance(t, Tensor) for t in tree_leaves(_plain(batch))):
        raise TypeError(f"{verb}(): there is no tensor in batch={batch!r}; give {FORMS}.")
    if isinstance(model, nn.parallel.DistributedDataParallel) and verb in ("profile", "plan"):
        raise ValueError(f"{verb}(): give the model that is wrapped, model.module; DDP itself holds buckets as large as the gradients.")
    if _is_compiled(model):
        raise ValueError(
            f"{verb}(): the model is compiled, and the compiler chooses what is held: it cannot be counted. Give the model as it was "
            "before torch.compile."
        )
    if not _is_function(batch):
        _check_signature(model, batch, verb)


def _is_compiled(model: nn.Module) -> bool:
    """Asked without importing the compiler, which takes as long as importing torch."""
    dynamo = sys.modules.get("torch._dynamo")
    return (dynamo is not None and isinstance(model, dynamo.OptimizedModule)) or any(m._compiled_call_impl for m in model.modules())


def _check_signature(model: nn.Module, batch: Any, verb: str) -> None:
    signature = inspect.signature(model.forward)
    given = () if isinstance(batch, Mapping) else (batch,) if isinstance(batch, Tensor) else batch[:1] if len(batch) == 2 else batch
    try:
        signature.bind(*given, **(batch if isinstance(batch, Mapping) else {}))
    except TypeError as e:
        takes = ", ".join(p.name for p in signature.parameters.values())
        raise ValueError(f"{verb}(): the batch does not fit {type(model).__name__}.forward ({e}). It takes: {takes}.") from e


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Run the model on a batch; its loss."""
    if isinstance(batch, Mapping):
        return _scalar(model(**batch))
    if callable(batch) and not isinstance(batch, Tensor):
        loss = batch()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the function given as batch returned {found}; it has to run the model and return the loss, one number.")
        return loss
    if isinstance(batch, Tensor):
        return _scalar(model(batch))
    if len(batch) == 2:
        return _against(model(batch[0]), batch[1])
    return _scalar(model(*batch))


def output_of(out: Any) -> Any:
    """The scores in what a model returns."""
    return out.logits if hasattr(out, "logits") else out


def _against(out: Any, target: Any) -> Tensor:
    out = output_of(out)
    if not isinstance(out, Tensor) or not isinstance(target, Tensor):
        raise ValueError(
            f"a batch (inputs, targets) needs a model that returns a tensor or .logits, and a tensor of targets; found "
            f"{type(out).__name__} and {type(target).__name__}. Give a function that returns the loss instead."
        )
    if target.is_floating_point() and target.shape == out.shape:
        return F.mse_loss(_wide(out), _wide(target))
    if not target.is_floating_point() and target.shape == out.shape[:-1]:  # classes come last, as in a language model
        return F.cross_entropy(_wide(out).flatten(0, -2), target.flatten())
    if not target.is_floating_point() and out.ndim > 2 and target.shape == (out.shape[0], *out.shape[2:]):  # or second, as in a map
        return F.cross_entropy(_wide(out), target)
    raise ValueError(
        f"the batch's targets, {tuple(target.shape)} of {target.dtype}, do not fit the model's output, {tuple(out.shape)}. "
        "Give a function that returns the loss instead."
    )


def _scalar(out: Any) -> Tensor:
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(out, Tensor) and out.numel() == 1:
        return _wide(out).sum()
    leaves = [t for t in tree_leaves(dict(out) if isinstance(out, Mapping) else out) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError(
            "nothing that the model returned requires a gradient, so there is nothing to train: are all parameters frozen, or is it under "
            "no_grad?"
        )
    total = _wide(leaves[0]).sum()
    for t in leaves[1:]:
        total = total + _wide(t).sum()
    return total


def _wide(t: Tensor) -> Tensor:
    """In float32 or better."""
    return t if t.dtype == torch.float64 else t.float()


# The number of samples


def size_of(batch: Any) -> int | None:
    """How many samples a batch has; None for a function."""
    first = next((t for t in tree_leaves(_plain(batch)) if isinstance(t, Tensor)), None) if not _is_function(batch) else None
    return None if first is None or first.ndim == 0 else len(first)


def resized(batch: Any, size: int, light: bool = False) -> Any:
    """The same batch with another number of samples, repeated or cut; `light`: floating point numbers without contents."""
    now = size_of(batch)
    if now is None:
        raise ValueError(f"a batch given as a function has no size that can be changed; give {FORMS.rpartition(',')[0]}.")

    def change(t: Tensor) -> Tensor:
        t = t.to("meta") if light and t.is_floating_point() else t
        if t.ndim == 0 or len(t) != now or size == now:
            return t
        if size < now:
            return t[:size]
        return torch.empty_like(t[:1].expand(size, *t.shape[1:])) if _weightless(t) else _repeated(t, size)

    return tree_map_only(Tensor, change, _plain(batch))


def _plain(batch: Any) -> Any:
    """Tokenizers give mappings of their own, which torch's trees take for a leaf."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _weightless(t: Tensor) -> bool:
    return t.is_meta or hasattr(t, "fake_mode")


def _repeated(t: Tensor, size: int) -> Tensor:
    return t[torch.arange(size, device=t.device) % len(t)]


def _is_function(batch: Any) -> bool:
    return callable(batch) and not isinstance(batch, (Tensor, Mapping))


Batch = Tensor | tuple | list | Mapping[str, Any] | Callable[[], Tensor]
