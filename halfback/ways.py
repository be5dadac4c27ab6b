"""What each block of a model holds, has alive and takes, and which blocks to recompute.

A *place* is a block, or what stands between two blocks, in the order in which a forward gets there.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .batches import loss_of
from .memory import PAGE, Peak, Place, gradients_there, known_tensors
from .timing import Clock
from .weightless import backward


class Blocks(Place):
    """Place, with a number for each block and each gap between blocks, in the order in which the forward gets there."""

    def __init__(self, model: nn.Module, names: Sequence[str]):
        super().__init__(model)
        self.wanted = set(names)
        self.visits: list[str] = []  # block names in the order of calls
        self.at = 0  # 2i: the i-th gap; 2i + 1: the i-th block that was called
        self.from_sequence: list[tuple[int, int]] = [(0, 0)]

    def _go(self, at: int) -> None:
        self.at = at
        self.from_sequence.append((torch.autograd._get_sequence_nr(), at))

    def _enter(self, module: nn.Module, args: Any) -> None:
        super()._enter(module, args)
        if not self.backward and self.names.get(module) in self.wanted:
            self.visits.append(self.names[module])
            self._go(2 * len(self.visits) - 1)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        super()._leave(module, args, out)
        if not self.backward and self.names.get(module) in self.wanted:
            self._go(2 * len(self.visits))

    def now(self) -> int:
        node = torch._C._current_autograd_node() if self.backward else None
        if node is None:
            return self.at
        number = node._sequence_nr()
        return max((at for first, at in self.from_sequence if first <= number), default=0)


class Count(Peak):
    """What each place has alive at most, and how long it takes."""

    def __init__(self, known: list[Tensor], blocks: Blocks, clock: Clock, page: int):
        super().__init__(*known, place=blocks, page=page)
        self.blocks, self.clock = blocks, clock
        self.before: dict[int, int] = {}  # by place: alive when the forward gets there
        self.tops: dict[int, int] = {}  # by place: the most alive in it, forward or backward
        self.seconds: dict[int, float] = {}

    def did(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        at = self.blocks.now()
        self.tops[at] = max(self.tops.get(at, 0), self.alive)
        spent = self.clock.seconds(func, args, kwargs, out)
        self.seconds[at] = self.seconds.get(at, 0.0) + spent

    def _count(self, storage: torch.UntypedStorage, func: Any) -> None:
        at = self.blocks.now()
        if at not in self.before:
            self.before[at] = self.alive
        super()._count(storage, func)


@dataclass
class Way:
    """All blocks run in one way: by place, what it holds, what it has alive beyond what came before, and its seconds."""

    visits: list[str]
    holds: list[int]
    tops: list[int]
    seconds: list[float]
    peak: int
    host: float = 0.0  # seconds that the CPU needs to send a step off; 0 where that is not known

    @property
    def time(self) -> float:
        return max(sum(self.seconds), self.host)


def count(model: nn.Module, batch: Any, names: Sequence[str], clock: Clock, device: str) -> Way:
    """One training step of the model as it is, on fake tensors."""
    inputs = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    with gradients_there(model):
        known = known_tensors(model, inputs)
        blocks = Blocks(model, names)
        with blocks, Count(known, blocks, clock, PAGE if device == "cuda" else 1) as seen:
            loss = loss_of(model, batch)
            end = seen.alive
            backward(loss)
            del loss
    places = 2 * len(blocks.visits) + 1
    before = [0] * places + [end]
    for at in range(places - 1, -1, -1):
        before[at] = seen.before.get(at, before[at + 1])
    return Way(
        blocks.visits,
        holds=[before[i + 1] - before[i] for i in range(places)],
        tops=[max(0, seen.tops.get(i, 0) - before[i]) for i in range(places)],
        seconds=[seen.seconds.get(i, 0.0) for i in range(places)],
        peak=seen.most,
    )


# The program


def solve(holding: Way, again: Way, limit: float | None) -> tuple[set[str], float, float] | None:
    """Which blocks to recompute: the least time with the peak within the limit, or (None) the least peak.

    x_i = 1 where block i is recomputed, and two more variables, the peak and the time, both in shares of holding's:

        base + slopes @ x <= peak        at every place
        seconds + gain @ x <= time,      host + sending @ x <= time
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    names = list(dict.fromkeys(holding.visits))
    base, slopes, gain = _by_block(holding, again, names)
    n, scale, unit = len(names), max(holding.peak, 1), max(holding.time, 1e-12)
    host = holding.host
    sending = np.full(n, (again.host - host) / max(1, n))
    device = sum(holding.seconds)
    matrix = np.vstack([np.hstack([slopes / scale, [[-1, 0]] * len(base)]), [*gain / unit, 0, -1], [*sending / unit, 0, -1]])
    upper = np.array([*-base / scale, -device / unit, -host / unit])
    tie = np.maximum(0, gain) / unit * 1e-3 + 1e-7 * np.arange(n)  # of two that take the CPU as long, the one that takes the GPU less
    objective = np.array([*tie * 1e-3, 1, 1e-3] if limit is None else [*tie, 0, 1])
    most = np.inf if limit is None else limit / scale
    bounds = Bounds(np.zeros(n + 2), np.array([*np.ones(n), most, np.inf]))
    with _quiet():
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, -np.inf, upper),
            bounds=bounds,
            integrality=np.array([*np.ones(n), 0, 0]),
            options={"mip_rel_gap": 0},
        )
    if not result.success:
        return None
    x = np.round(result.x[:n])
    time = max(device + gain @ x, host + sending @ x)
    return {name for name, on in zip(names, x, strict=True) if on}, float((base + slopes @ x).max()), float(time)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The solver's library now and then prints a line of its own."""
    sys.stdout.flush()
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nowhere)


def _by_block(holding: Way, again: Way, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The peak at each place when nothing is recomputed, and what recomputing a block adds to that and to the time."""
    index = {name: i for i, name in enumerate(names)}
    places = len(holding.holds)
    base, slopes, gain = np.zeros(places), np.zeros((places, len(names))), np.zeros(len(names))
    for at in range(places):
        base[at] += holding.tops[at]
        base[at + 1 :] += holding.holds[at]
        if at % 2:
            i = index[holding.visits[at // 2]]
            slopes[at, i] += again.tops[at] - holding.tops[at]
            slopes[at + 1 :, i] += again.holds[at] - holding.holds[at]
            gain[i] += again.seconds[at] - holding.seconds[at]
    return base, slopes, gain
