"""How many bytes are alive for the backward pass. It measures any model and knows nothing of our methods.

*Held*: bytes alive when the forward ends, each storage once, parameters and buffers excluded.
*Peak*: the most bytes alive at once, of all that operations made, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _parts(t: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor is made of."""
    if t.layout is torch.strided:
        return (t,)
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    return (t.crow_indices(), t.col_indices(), t.values()) if rows else (t.ccol_indices(), t.row_indices(), t.values())


class Held:
    """Counts, within `with`, what autograd saves; `bytes()` is what of it is alive at the moment.

    The pack hook keeps `t.detach()`, a new tensor on the same storage: keeping an output itself would close a cycle through its
    grad_fn, and nothing would ever be freed.
    """

    def __init__(self, *ignore: nn.Module):
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ignored = {t.untyped_storage()._cdata for m in ignore for t in [*m.parameters(), *m.buffers()] for t in _parts(t)}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        for part in _parts(t):
            storage = part.untyped_storage()
            if storage._cdata not in self.ignored:
                self.refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return t

    def bytes(self) -> int:
        return sum(size for ref, size in self.refs.values() if not ref.expired())

    def __enter__(self) -> Held:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.hooks.__exit__(*exc)


class Peak(TorchDispatchMode):
    """Within `with`, the most bytes that were alive at once, of storages that operations made; `known` tensors are left out."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def held(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes held for backward after `forward()`, which runs the model and returns its loss."""
    with Held(model) as count:
        loss = forward()
        total = count.bytes()
    del loss
    return total
