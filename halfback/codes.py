"""A few-bit code of an activation's derivative: what GELU's or SiLU's backward needs, without its input.

    forward    y  = f(x)                          exact
               code = the cell in which x lies    2**bits cells between sorted edges
    backward   dx = dy * values[code]             approximate: f' is taken as constant in a cell
Saved for backward: the code, 4 or 8 bits an element.

Edges and values minimise E[(f'(x) - values[code])**2] for x normal with mean 0 and standard deviation SPREAD; a value is the mean of f' in
its cell. Where cells are narrow the best density of edges is (f''(x)**2 p(x))**(1/3) (Panter and Dite), which is where the search
starts; then each edge in turn goes to its best place between its neighbours, until none moves.

    root of that mean square   4 bits   8 bits        f' itself varies by 0.51 (GELU) and 0.47 (SiLU) about its mean
    gelu, gelu_tanh            0.0226   0.0015
    silu                       0.0217   0.0014
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from .kernels import code_bits
from .notes import constant

ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
# Inputs of activations in trained transformers have deviations of 1 to 2; wider, so that the tails are not all in one cell.
SPREAD = 2.0
_REACH, _POINTS = 12.0, 8192


def derivative(name: str, x: np.ndarray) -> np.ndarray:
    """f'(x) in float64."""
    if name == "silu":
        s = 1 / (1 + np.exp(-x))
        return s * (1 + x * (1 - s))
    if name == "gelu_tanh":
        a = math.sqrt(2 / math.pi)
        t = np.tanh(a * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * a * (1 + 3 * 0.044715 * x**2)
    if name == "gelu":
        return np.vectorize(math.erfc)(-x / math.sqrt(2)) / 2 + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    raise ValueError(f"codes.table(): no derivative of {name!r} is known. Allowed: {', '.join(map(repr, ACTIVATIONS))}.")


def density(x: np.ndarray) -> np.ndarray:
    p = np.exp(-((x / SPREAD) ** 2) / 2)
    return p / p.sum()


@functools.lru_cache(maxsize=16)
def cells(name: str, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(edges, values) in float32, one edge less than values."""
    n = 2**bits
    code_bits(n)  # says which are allowed
    x = np.linspace(-_REACH, _REACH, _POINTS)
    d, p = derivative(name, x), density(x)
    sums = [np.concatenate([[0.0], np.cumsum(p * d**power)]) for power in range(3)]
    cuts = _descended(_companded(x, d, p, n), sums)
    mass, mean = np.diff(sums[0][cuts]), np.diff(sums[1][cuts])
    edges = (x[cuts[1:-1] - 1] + x[cuts[1:-1]]) / 2
    return edges.astype(np.float32), (mean / mass).astype(np.float32)


def _companded(x: np.ndarray, d: np.ndarray, p: np.ndarray, n: int) -> np.ndarray:
    """Where to cut the points into n cells for a start: equal shares of the best density."""
    share = np.cumsum((np.gradient(d, x) ** 2 * p) ** (1 / 3))
    cuts = np.searchsorted(share, share[-1] * np.arange(1, n) / n)
    cuts = np.maximum.accumulate(np.maximum(cuts, np.arange(1, n)) - np.arange(n - 1)) + np.arange(n - 1)  # no cell is empty
    return np.concatenate([[0], np.minimum(cuts, len(x) - n + np.arange(1, n)), [len(x)]])


def _descended(cuts: np.ndarray, sums: list[np.ndarray]) -> np.ndarray:
    cuts = cuts.copy()
    for _ in range(200):
        before = cuts.copy()
        for i in range(1, len(cuts) - 1):
            at = np.arange(cuts[i - 1] + 1, cuts[i + 1])
            cuts[i] = at[np.argmin(_error(sums, cuts[i - 1], at) + _error(sums, at, cuts[i + 1]))]
        if np.array_equal(before, cuts):
            break
    return cuts


def _error(sums: list[np.ndarray], start, end):
    """The weighted sum of squares of f' about its mean, from point `start` to before `end`."""
    mass, mean, square = (s[end] - s[start] for s in sums)
    return square - mean**2 / mass


_ON_DEVICE: dict[tuple[str, int, torch.device], tuple[Tensor, Tensor]] = {}


@constant
def _numbers(name: str, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """cells(), as a graph can have them."""
    edges, values = cells(name, bits)
    return tuple(edges.tolist()), tuple(values.tolist())


def table(name: str, bits: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """(edges, values) as fp32 tensors, to give to kernels.encode and kernels.scale_by_code."""
    if torch.compiler.is_compiling():
        numbers = _numbers(name, bits)
        return torch.tensor(numbers[0], device=device), torch.tensor(numbers[1], device=device)
    key = (name, bits, torch.device(device))
    if key not in _ON_DEVICE:
        edges, values = (torch.from_numpy(a).to(device) for a in cells(name, bits))
        if type(edges) is not Tensor:  # a fake one must not outlive its mode
            return edges, values
        _ON_DEVICE[key] = edges, values
    return _ON_DEVICE[key]


def error(name: str, bits: int) -> float:
    """The root mean square that the search minimised, measured on points of its own."""
    edges, values = cells(name, bits)
    x = np.linspace(-_REACH, _REACH, 3 * _POINTS + 1)
    p = density(x)
    return float(np.sqrt((p * (derivative(name, x) - values[np.searchsorted(edges, x)].astype(np.float64)) ** 2).sum()))
