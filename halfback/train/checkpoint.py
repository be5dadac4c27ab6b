"""Checkpoints: safetensors and JSON, so that nothing that is loaded can execute.

    checkpoints/00001200/state.safetensors    weights, optimizer state, averaged weights
                         state.json           where the training stands

A checkpoint is written beside its place and moved there when it is whole: whatever happens, the ones that are there are good. A sum of
the tensors' file tells when it has been damaged since.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..report import readable
from .sharded import part_of

TENSORS, STATE = "state.safetensors", "state.json"


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint, and then drop all but the last `keep`. One that is there already is the same, and stays."""
    place, making = folder / f"{step:08d}", folder / f".{step:08d}.part"
    if place in found(folder):
        return place
    with _whole(folder, making, f"the checkpoint of step {step} cannot be written to {folder}"):
        own, same = unshared(tensors)
        write_tensors(making / TENSORS, own)
        (making / STATE).write_text(json.dumps({"step": step, "same": same, "crc32": sum_of(making / TENSORS), **state}))
        _synced(making / STATE)
        _synced(making)
        shutil.rmtree(place, ignore_errors=True)  # half of one, whose removal was cut
        os.replace(making, place)
        _synced(folder)
    _drop(folder, keep)
    return place


def save_weights(path: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Weights alone, in a file. It is made in `folder`, that of the checkpoints, where what a kill leaves is cleared."""
    making = folder / f".{path.name}.part"
    with _whole(folder, making, f"{path} cannot be written"):
        own, same = unshared(tensors)
        write_tensors(making / path.name, own, {"same": repr(same)} if same else None)
        os.replace(making / path.name, path)
        _synced(path.parent)
        making.rmdir()


@contextlib.contextmanager
def _whole(folder: Path, making: Path, failed: str) -> Iterator[None]:
    """A folder to make something in. When that fails it is gone, and the error says what there is to go on from."""
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        yield
    except Exception as e:  # safetensors has errors of its own for a full disk
        shutil.rmtree(making, ignore_errors=True)
        last = latest(folder)
        there = (
            f"The last whole checkpoint is of step {int(last.name)}: free some room and give --resume."
            if last
            else "There is no checkpoint yet."
        )
        raise OSError(f"{failed} ({_told(e)}). {there}") from e


def _drop(folder: Path, keep: int) -> None:
    """All but the last `keep`, and what a kill left half written or half removed."""
    stay = found(folder)[-keep:]
    for other in (*folder.glob("[0-9]*"), *folder.glob(".*.part")):
        if other not in stay:
            shutil.rmtree(other, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """On the disk when this returns, and readable by whom a new file is; safetensors alone makes it the owner's only."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, str(path), about)
    path.chmod(mode)
    _synced(path)


def sum_of(path: Path) -> int:
    """A CRC, as it is damage that is looked for, not forgery: 0.08 s for 500 MB, where blake2b takes 0.38 s and all the rest of a
    checkpoint 0.43 s."""
    found = 0
    with path.open("rb") as file:
        while part := file.read(2**20):
            found = zlib.crc32(part, found)
    return found


def _told(e: Exception) -> str:
    return getattr(e, "strerror", None) or next(iter(str(e).splitlines()), "") or type(e).__name__


def _synced(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unshared(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each storage once: tied weights under their first name, and the other names of them."""
    own: dict[str, Tensor] = {}
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, t in tensors.items():
        key = (t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride()) if t.numel() else name
        if key in first:
            same[name] = first[key]
        else:
            first[key] = name
            own[name] = t.detach().to("cpu", memory_format=torch.contiguous_format).clone(memory_format=torch.contiguous_format)
    return own, same


def found(folder: Path) -> list[Path]:
    """All whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob("[0-9]*") if (p / STATE).is_file() and (p / TENSORS).is_file()) if folder.is_dir() else []


def latest(folder: Path) -> Path | None:
    return next(iter(found(folder)[::-1]), None)


def load_state(place: Path) -> dict[str, Any]:
    """Where a training stood, without its tensors."""
    try:
        state = json.loads((place / STATE).read_text())
        if state["step"] != int(place.name):
            raise ValueError(f"step is {state['step']!r} in {STATE}")
        return state
    except Exception as e:
        raise ValueError(unreadable(place, e)) from e


def load(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    state = load_state(place)
    try:
        if state.pop("crc32", None) not in (None, sum_of(place / TENSORS)):  # older checkpoints have none
            raise ValueError(f"{TENSORS} is not what was written")
        tensors = load_file(str(place / TENSORS))
        return {**tensors, **{name: tensors[first] for name, first in state["same"].items()}}, state
    except MemoryError:
        raise
    except Exception as e:
        raise ValueError(unreadable(place, e)) from e


def unreadable(place: Path, e: Exception) -> str:
    before = [p.name for p in found(place.parent) if p < place]
    then = f"go on from {before[-1]}" if before else "begin again"
    return f"the checkpoint {place} cannot be read ({type(e).__name__}: {_told(e)}). Remove it to {then}."


def check_room(folder: Path, nbytes: int, keep: int, best: int) -> None:
    """A disk that is too small is known before the training: for `keep` checkpoints and one that is written, and the best weights' bytes.

    Those that a training goes on from have their room already, and the next is written before one of them goes.
    """
    has = sum(p.stat().st_size for p in (*folder.glob("checkpoints/[0-9]*/*"), *folder.glob("best.safetensors")))
    wanted = max(nbytes, (keep + 1) * nbytes + best - has)
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if free < wanted:
        also = (f" and best weights of {readable(best)}" if best else "") + (f", less {readable(has)} that are there" if has else "")
        raise OSError(
            f"{folder}: {readable(free)} are free on this disk, and {readable(wanted)} are wanted: {keep + 1} checkpoints of "
            f"{readable(nbytes)} (--keep-last {keep}, and the one that is written){also}. Free some, keep fewer, or give another --out."
        )


# Optimizers, as tensors and JSON


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = optimizer.state_dict()
    tensors, rest = {}, {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = value
            else:
                rest[f"{index}/{name}"] = value
    return tensors, {"rest": rest, "groups": state["param_groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    state: dict[int, dict[str, Any]] = {}
    for name, t in tensors.items():
        kind, _, place = name.partition("/")
        if kind == "optimizer":
            index, _, key = place.partition("/")
            state.setdefault(int(index), {})[key] = t
    for place, value in saved["rest"].items():
        index, _, key = place.partition("/")
        state.setdefault(int(index), {})[key] = value
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in saved["groups"]]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    for number, values in state.items():  # they lie in memory as their parameter does, which fused optimizers ask for
        p = parameters[number]
        values.update(
            {
                k: torch.empty_like(p, dtype=v.dtype).copy_(part_of(v, p))
                for k, v in values.items()
                if isinstance(v, Tensor) and v.shape == p.shape and v.ndim
            }
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})
