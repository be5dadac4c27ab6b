"""What one would use instead, each applied to a plain model in place: what a row's text names before its number, as "accumulate 4".

    plain                 as it is
    accumulate N          N micro-batches of a Nth of the batch; the gradients add up
    budget X              torch.compile's activation_memory_budget
    selective             torch's checkpoint around each block, which holds what matrix products, convolutions and attention return
    offload               save_on_cpu: what autograd saves waits in the CPU's pinned memory
    fewbits B             what autograd saves is held in B bits, scaled in groups, each tensor once; in the layers' dtype only, so that a
                          norm's statistics and attention's log-sum-exp stay. By our own fused kernels: it is not slow for lack of them
    patchdropout X        a share X of a ViT's patches enters the blocks, drawn for each sample: the forward is changed
    lora R                all weights frozen, and adapters of rank R on linear layers: it trains something else
    algorithm1 X, mink X  the two papers' algorithms as they were written
Torch's checkpoint around each block needs nothing here: it is our "recompute" alone.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..blocks import find_blocks
from ..stores import FewBits, Held, Layout
from .algorithm1 import algorithm1_
from .mink import mink_
from .models import PLACES, Spec


def nothing() -> None:
    return None


@dataclass
class Applied:
    """What a method changes of a step, beside the model."""

    before: Callable[[], None] = nothing  # runs before each forward
    around: Callable[[], Any] = contextlib.nullcontext  # the forward runs in it
    parts: int = 1  # micro-batches


# Checkpointing of all but the expensive


def expensive() -> list[Any]:
    aten = torch.ops.aten
    names = (
        "mm addmm bmm baddbmm convolution _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu"
    )
    return [getattr(aten, name).default for name in names.split()]


def selective_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    contexts = partial(create_selective_checkpoint_contexts, expensive())
    for _, block in find_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    return Applied()


# Saved tensors in few bits


class Coded:
    """A tensor in few bits."""

    def __init__(self, t: Tensor, store: FewBits):
        self.store, self.layout = store, Layout.of(t)
        self.held: Held = store.compress(t)

    def restore(self) -> Tensor:
        return self.store.restore(self.held, self.layout)


class Coder:
    """Pack and unpack hooks. A tensor that several functions save is coded once: as long as its storage lives it is known by it."""

    least = 1024  # elements; less is left as it is

    def __init__(self, model: nn.Module, bits: int, dtype: torch.dtype):
        self.store, self.dtype = FewBits(bits), dtype
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.known: dict[int, tuple[StorageWeakRef, dict[Any, weakref.ref[Coded]]]] = {}

    def pack(self, t: Tensor) -> Any:
        storage = t.untyped_storage()
        if t.dtype != self.dtype or t.numel() < self.least or storage._cdata in self.weights:
            return t.detach()
        alive, coded = self.known.get(storage._cdata, (None, {}))
        if alive is None or alive.expired():
            coded = {}
            self.known[storage._cdata] = StorageWeakRef(storage), coded
        key = t.storage_offset(), t.shape, t.stride(), t._version
        found = coded[key]() if key in coded else None
        if found is None:
            found = Coded(t.detach(), self.store)
            coded[key] = weakref.ref(found)
        return found

    def unpack(self, saved: Any) -> Tensor:
        return saved.restore() if isinstance(saved, Coded) else saved

    def hooks(self) -> Any:
        self.known.clear()
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def fewbits_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    own = next(p.dtype for p in model.parameters())
    return Applied(around=Coder(model, int(value), torch.bfloat16 if spec.autocast and device == "cuda" else own).hooks)


# Fewer patches, fewer weights


def some_patches(x: Tensor, share: float) -> Tensor:
    """Of (N, tokens, width) a share of the tokens, drawn for each sample; the first, a class token, always."""
    n, tokens, width = x.shape
    chosen = 1 + torch.rand(n, tokens - 1, device=x.device).topk(round(share * (tokens - 1))).indices
    return torch.cat((x[:, :1], x.gather(1, chosen[..., None].expand(-1, -1, width))), 1)


def patchdropout_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    place = next(m for name, m in model.named_modules() if name in PLACES)
    place.register_forward_hook(lambda module, args, x: some_patches(x, value))
    return Applied()


class Adapter(nn.Module):
    """y + B A x, with B zero at first."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        like: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Parameter(torch.empty(rank, layer.in_features, **like))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer, self.adapter = layer, Adapter(layer, rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)


def lora_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    """On the linear layers of blocks, but for those inside nn.MultiheadAttention, which reads their weights and never calls them."""
    model.requires_grad_(False)
    for _, block in find_blocks(model):
        parents = [m for m in block.modules() if not isinstance(m, nn.MultiheadAttention)]
        for parent, name, layer in [(p, n, c) for p in parents for n, c in p.named_children() if type(c) is nn.Linear]:
            setattr(parent, name, Adapted(layer, int(value)))
    return Applied()


# The papers' algorithms


def half_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    if value != 0.5:
        raise ValueError(f"bench: algorithm1 {value} is not there; the paper's masks keep 0.5.")
    return Applied(before=algorithm1_(model, spec.kind, spec.size, spec.settings.get("patch", 4), device))


def least_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    mink_(model, value)
    return Applied()


def budget_(model: nn.Module, value: float, spec: Spec, device: str) -> Applied:
    from torch._functorch import config

    config.activation_memory_budget = value  # of this process, which is the row's own
    return Applied()


PEERS: dict[str, Callable[[nn.Module, float, Spec, str], Applied]] = {
    "plain": lambda *_: Applied(),
    "accumulate": lambda model, value, spec, device: Applied(parts=int(value)),
    "budget": budget_,
    "selective": selective_,
    "offload": lambda model, value, spec, device: Applied(around=partial(torch.autograd.graph.save_on_cpu, pin_memory=device == "cuda")),
    "fewbits": fewbits_,
    "patchdropout": patchdropout_,
    "lora": lora_,
    "algorithm1": half_,
    "mink": least_,
}


def is_peer(text: str) -> bool:
    return text.partition(" ")[0] in PEERS


def apply_peer_(model: nn.Module, text: str, spec: Spec, device: str) -> Applied:
    name, *value = text.split()
    return PEERS[name](model, float(value[0]) if value else 0.0, spec, device)
