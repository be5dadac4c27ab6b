"""Finding the blocks of a model by its structure, and choosing among them.

A block is one of two or more modules of a class that stand in lists, and has parts, a weight matrix and a norm. Where such
modules are nested (stages of blocks), the inner ones are the blocks, but for a single layer and its norm, which are a part of one.
Experts of a mixture have no norm, so they are none.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import groupby, pairwise
from typing import Any

from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Named = tuple[str, nn.Module]


def find_blocks(model: nn.Module) -> list[Named]:
    """The blocks of a model in the order in which they are registered."""
    listed = {id(child) for module in model.modules() if isinstance(module, LISTS) for child in module.children()}
    found = [(name, module) for name, module in model.named_modules() if id(module) in listed and _is_block(module)]
    kinds = Counter(type(block) for _, block in found)
    found = [(name, block) for name, block in found if kinds[type(block)] > 1]
    found = [(name, block) for name, block in found if matrices(block) > 1 or not _within(name, found)]
    outer = {name for name, _ in found if any(_within(inner, [(name, None)]) for inner, _ in found)}
    return [(name, block) for name, block in found if name not in outer]


def _within(name: str, others: Sequence[tuple[str, Any]]) -> bool:
    return any(name.startswith(other + ".") for other, _ in others)


def matrices(module: nn.Module) -> int:
    """Not counting what stands for a sample, as an embedding of positions, nor a row, as a scale."""
    return sum(p.ndim >= 2 and len(p) > 1 for p in module.parameters())


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, LISTS) or not any(True for _ in module.children()):
        return False
    return matrices(module) > 0 and any(_is_norm(name, m) for name, m in module.named_modules())


def _is_norm(name: str, module: nn.Module) -> bool:
    """Vectors are all that it has, and its own; an activation may be part of it. One without weights (of OLMo, of diffusion transformers)
    has nothing to be known by but its name."""
    if not any(True for _ in module.parameters()):
        leaf = not any(True for _ in module.children())
        return leaf and "norm" in name.rpartition(".")[2].lower() and not isinstance(module, nn.Identity)
    return any(True for _ in module.parameters(recurse=False)) and all(p.ndim == 1 for p in module.parameters())


def stacks(blocks: Sequence[Named]) -> list[list[Named]]:
    """Blocks grouped by how their names begin, up to the first index: several towers, an encoder and a decoder are stacks of their own,
    and so is a stem. Stages of one network are one stack."""
    found: dict[str, list[Named]] = {}
    for name, block in blocks:
        before = re.split(r"(?:^|\.)\d+\.?", name, maxsplit=1)[0]
        found.setdefault(re.sub(r"\d+", "#", before), []).append((name, block))
    return list(found.values())


def stages(blocks: Sequence[Named]) -> list[list[str]]:
    """The blocks of a stack grouped by the list that they are in, and neighbouring lists of one width together; all of them are one
    group, unless each is wider than the one before: branches are no stages."""
    lists = [list(group) for _, group in groupby(blocks, lambda named: named[0].rpartition(".")[0])]
    found = [
        (size, [name for blocks in group for name, _ in blocks]) for size, group in groupby(lists, lambda blocks: width(blocks[-1][1]))
    ]
    if all(a < b for (a, _), (b, _) in pairwise(found)):
        return [names for _, names in found]
    return [[name for name, _ in blocks]]


def width(block: nn.Module) -> int:
    """Of the trunk, as far as weights tell: the largest smaller side of a matrix."""
    return max(min(p.shape[:2]) for p in block.parameters() if p.ndim >= 2)


def choose(model: nn.Module, blocks: Sequence[Named], layers: Any) -> list[str]:
    """The names of the blocks that `layers` means."""
    names = [name for name, _ in blocks]
    kind = type(model).__name__
    named = [] if isinstance(layers, str) or callable(layers) else _modules(model, patterns_of(layers))
    if not names and not named:
        raise ValueError(
            f"apply_(): no blocks found in {kind}: none of its lists holds two modules of one class with a weight matrix and a norm. "
            "Name the modules that carry the trunk, as layers=['encoder.0', 'encoder.1']."
        )
    if layers == "all":
        return names
    if layers == "paper":
        return _paper(blocks)
    if isinstance(layers, str) and (share := re.fullmatch(r"(first|last) (\d+)(?:/(\d+))?", layers.strip())):
        number = Fraction(int(share[2]), int(share[3] or 1))
        count = math.ceil(number * len(names)) if share[3] else min(int(share[2]), len(names))
        if count < 1 or (number > 1 and share[3]):
            raise ValueError(f"apply_(): layers={layers!r} is no share of the {len(names)} blocks of {kind}.")
        return names[-count:] if share[1] == "last" else names[:count]
    if callable(layers):
        chosen = [name for name, block in blocks if layers(name, block)]
        missing = [] if chosen else ["the function"]
    else:
        patterns = patterns_of(layers)
        names = names if any(n in names for n in named) or not named else named
        chosen = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
        missing = [p for p in patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
    if missing:
        raise ValueError(
            f"apply_(): layers={missing[0]!r} matches none of the {len(names)} blocks of {kind}. Blocks: {names[0]} ... {names[-1]}."
        )
    return chosen


def patterns_of(wanted: Any, field: str = "layers") -> list[str]:
    found = [wanted] if isinstance(wanted, str) or not isinstance(wanted, Iterable) else list(wanted)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ValueError(f"apply_(): {field}={wanted!r}: {pattern!r} is no name. Give names or patterns, as ['encoder.0', 'head.*'].")
    return found


def _modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of any modules that the patterns mean."""
    return [name for name, _ in model.named_modules() if name and any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def _paper(blocks: Sequence[Named]) -> list[str]:
    """Section 8.3, of each stack that has a quarter of the largest one's blocks or more: a smaller one is a stem, or a head.
    What has one matrix where others have more is a stem, too, or embeds."""
    found = stacks([b for b in blocks if matrices(b[1]) > 1] or blocks)
    most = max(len(stack) for stack in found)
    chosen = {name for stack in found if 4 * len(stack) >= most for name in _paper_of(stack)}
    return [name for name, _ in blocks if name in chosen]


def _paper_of(stack: list[Named]) -> list[str]:
    """The last two thirds of a plain stack; of four stages, each wider than the one before, the first two whole, of the third the
    first 6 of 9 (21 of 27), the last exact. The paper's last stages have a sixth of the blocks or less. Where one has more than a third
    (NesT), it is the stack that the rest leads up to."""
    groups = stages(stack)
    if len(groups) < 3 or 3 * len(groups[-1]) > len(stack):
        return [name for name, _ in stack[len(stack) - math.ceil(len(stack) * 2 / 3) :]]
    third = groups[-2]
    part = {27: 21}.get(len(third), math.ceil(len(third) * 2 / 3))
    return [name for group in groups[:-2] for name in group] + third[:part]


def shrinks(model: nn.Module, blocks: Sequence[Named]) -> dict[str, tuple[int, ...]]:
    """What stands between blocks and makes the grid coarser: for each block name the factor of the convolutions (kernel = stride)
    that are registered just before it."""
    names = {name for name, _ in blocks}
    out: dict[str, tuple[int, ...]] = {}
    pending: tuple[int, ...] = ()
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside + "."):
            continue
        if name in names:
            out[name] = pending
            inside, pending = name, ()
        elif isinstance(module, CONVOLUTIONS) and out and math.prod(module.stride) > 1:
            same = tuple(module.kernel_size) == tuple(module.stride) and math.prod(module.dilation) == 1
            pending = tuple(module.stride) if same and not pending else (-1,)
    return out


def matching_modules(model: nn.Module, patterns: Sequence[str], field: str) -> list[str]:
    """Names of any modules that the patterns of a method's field mean; each has to match."""
    names, patterns = [name for name, _ in model.named_modules() if name], patterns_of(patterns, field)
    for p in patterns:
        if not any(fnmatch.fnmatchcase(name, p) for name in names):
            raise ValueError(f"apply_(): {field}={p!r} matches no module of {type(model).__name__}, as {names[0]} ... {names[-1]}.")
    return _modules(model, patterns)
