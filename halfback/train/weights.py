"""Weights to begin with: a safetensors file, as a training's best.safetensors, so that nothing that is loaded can execute.

What has the same name and shape is taken. The rest, as a head of other classes, begins fresh, and is told.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

TOLD = 4  # names of a kind


def begin_with(model: nn.Module, path: Path) -> str:
    """Fill the model; gives what is to be told."""
    there = _read(path)
    own = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    taken = {name: t for name, t in there.items() if name in own and own[name].shape == t.shape}
    if not any(isinstance(own[name], nn.Parameter) for name in taken):
        raise ValueError(
            f"weights '{path}' have no parameter of a name and shape of the model's. There: {_named(there)}. The model: {_named(own)}."
        )
    model.load_state_dict(taken, strict=False)
    filled = {id(own[name]) for name in taken}  # tied weights are there under one of their names
    fresh = {name: t for name, t in own.items() if id(t) not in filled}
    unused = {name: t for name, t in there.items() if name not in taken}
    told = f"Begins with {len(taken)} tensors of {path}."
    told += f" Fresh: {_named(fresh)}." if fresh else ""
    return told + (f" Not used: {_named(unused)}." if unused else "")


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"weights '{path}': there is no such file.")
    try:
        found = load_file(str(path))
    except (SafetensorError, OSError) as e:
        raise ValueError(f"weights '{path}' is no safetensors file ({e}). Wanted is one, as best.safetensors of a training.") from e
    bad = [name for name, t in found.items() if t.is_floating_point() and not torch.isfinite(t.float()).all()]
    if bad:
        raise ValueError(f"weights '{path}': {bad[0]} has values that are not finite. A training cannot begin with them.")
    return found


def _named(tensors: dict[str, Tensor]) -> str:
    told = [f"{name} {tuple(t.shape)}" for name, t in list(tensors.items())[:TOLD]]
    return ", ".join(told) + (f" and {len(tensors) - TOLD} more" if len(tensors) > TOLD else "")
