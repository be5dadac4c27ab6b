"""What a block is handed and may change, as a cache or a list. A block that runs twice is to find it as it was.

Looked at are what lists, dicts, deques and sets hold, and the attributes of objects, in slots too, as deep as they go. Not looked into are
functions, modules, iterators and generators, and what a tensor holds: one that was changed in place stays changed. Of more than MOST
entries it is data, such as a vocabulary, and left alone.
"""

from __future__ import annotations

import copyreg
import functools
import logging
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .streams import Streams

MOST = 10_000
CONTAINERS = (OrderedDict, dict, list, deque, set)  # by whose own methods they are read and written, whatever a subclass forbids
CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
LEFT = (bool, int, float, str, bytes, type(None), Tensor, Streams, nn.Module, type, types.ModuleType, logging.Logger, *CALLED)


class Slots:
    """Attributes of an object that it has no dict for."""

    def __init__(self, of: Any, names: list[str]):
        self.of, self.names = of, names

    def read(self) -> list[Any]:
        there = [name for name in self.names if hasattr(self.of, name)]
        return [*there, *(getattr(self.of, name) for name in there)]

    def write(self, had: list[Any]) -> None:
        for name in self.names:
            if hasattr(self.of, name):
                object.__delattr__(self.of, name)
        for name, x in _pairs(had):
            object.__setattr__(self.of, name, x)


class Handed:
    """What is in a block's arguments when its first run begins."""

    def __init__(self, arguments: tuple):
        self.places: list[tuple[Any, list[Any]]] = []
        self.versions: dict[int, tuple[Tensor, int]] = {}
        with torch._C.DisableTorchFunction():  # as no mode that runs is meant
            for place, had, inside in _walk(arguments):
                self.places.append((place, had))
                self.versions.update({id(t): (t, version(t)) for t in inside if isinstance(t, Tensor)})

    def ran(self, arguments: tuple) -> tuple[bool, bool, bool]:
        """After the first run: has it changed what is in them, has it put a tensor there that has a gradient, and has it changed one that
        was there in place?"""
        changed = any(not _same(_read(place), had) for place, had in self.places)
        with torch._C.DisableTorchFunction():
            new = [t for _, _, inside in _walk(arguments) for t in inside if isinstance(t, Tensor)] if changed else []
            added = any(t.requires_grad for t in new if id(t) not in self.versions)
            written = any(version(t) != was for t, was in self.versions.values())
        self.versions = {}
        return changed, added, written

    def put_back(self) -> list[tuple[Any, list[Any]]]:
        """What they have now, for `put`."""
        now = [(place, _read(place)) for place, _ in self.places]
        put(self.places)
        return now


def exchange(tree: Any, which: Callable[[Any], bool], by: Callable[[Any], Any]) -> None:
    """In the objects of a tree, and what they hold, one thing by another."""
    for place, had, inside in _walk(tree):
        if any(which(x) for x in inside):
            _write(place, [by(x) if which(x) else x for x in had])


def put(places: list[tuple[Any, list[Any]]]) -> None:
    for place, had in places:
        if not _same(_read(place), had):
            _write(place, had)


def version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _walk(tree: Any) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Each place once, with what it has, and what of that is no key."""
    stack, seen, room = [tree], set(), MOST
    while stack:
        x = stack.pop()
        if isinstance(x, LEFT) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, (tuple, frozenset)) and len(x) <= room:
            stack += x
        for place in _places(x):
            if isinstance(place, Slots) or len(place) <= room:
                had = _read(place)
                inside = had[len(had) // 2 :] if isinstance(place, (dict, Slots)) else had
                room -= len(inside)
                stack += inside
                yield place, had, inside


def _places(x: Any) -> Iterator[Any]:
    if isinstance(x, CONTAINERS):
        yield x
    own = getattr(x, "__dict__", None)
    if type(own) is dict:
        yield own
    slots = () if isinstance(x, (tuple, *CONTAINERS)) else copyreg._slotnames(type(x))  # type: ignore[attr-defined]
    if slots:
        yield Slots(x, slots)


def _kind(place: Any) -> Any:
    return next(kind for kind in CONTAINERS if isinstance(place, kind))


def _read(place: Any) -> list[Any]:
    """Of a dict first its keys, then its values."""
    if isinstance(place, Slots):
        return place.read()
    kind = _kind(place)
    return [*kind.keys(place), *kind.values(place)] if isinstance(place, dict) else list(kind.__iter__(place))


def _write(place: Any, had: list[Any]) -> None:
    if isinstance(place, Slots):
        return place.write(had)
    kind = _kind(place)
    kind.clear(place)
    if isinstance(place, dict):
        for key, x in _pairs(had):
            kind.__setitem__(place, key, x)
    else:
        (kind.update if kind is set else kind.extend)(place, had)


def _pairs(had: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(had[: len(had) // 2], had[len(had) // 2 :], strict=True)


def _same(now: list[Any], had: list[Any]) -> bool:
    return len(now) == len(had) and all(a is b for a, b in zip(now, had, strict=True))
