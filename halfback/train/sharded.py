"""Weights that are shared out among processes (FSDP2): each has a part of every weight, of its gradient and of its optimizer state.

Blocks are shared out one by one, so that a step has one or two of them whole at a time, and what is in no block last. Weights travel
and gradients are added up in fp32, and autocast does what it does in one process: a training is the same on any number of them.
A checkpoint has whole tensors, as one process writes them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..blocks import find_blocks


def shard_(model: nn.Module, device: str) -> None:
    """Call it after apply_, which looks for blocks and hooks them, and before an optimizer is made."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for _, block in find_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_sync(model: nn.Module, wanted: bool) -> None:
    """Are gradients added up over processes in the next backward?"""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(wanted)


def put_back(model: nn.Module) -> None:
    """After a forward without a backward: what is in no block would stay whole."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local(t: Any) -> Tensor:
    """What this process has of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def gathered(tensors: dict[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors, those that were shared out on the CPU. All processes call it; who does not `keep` them has none. Weights that are tied
    stay so."""
    seen: dict[int, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if isinstance(t, DTensor) and id(t) not in seen:
            full = t.full_tensor().detach()
            seen[id(t)] = full.cpu() if keep else full.new_empty(0)
        whole[name] = seen.get(id(t), t)
    return whole if keep else {}


def part_of(t: Tensor, like: Any) -> Tensor:
    """What this process has of a whole tensor, as it has of `like`. A copy: of the whole, nothing stays."""
    return distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None).clone() if isinstance(like, DTensor) else t
