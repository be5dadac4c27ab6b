"""What a block is handed and changes, it finds in its second run as it was in the first: each kind of place, and what is not one."""

from __future__ import annotations

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn

from halfback.handed import MOST, Handed, _read, put

X = torch.ones(2)


class Plain:
    def __init__(self, value):
        self.value, self.itself = value, self


class Called(Plain):
    def __call__(self):
        return self.value


class Slotted:
    __slots__ = ("__own", "value")

    def __init__(self, value):
        self.value = value

    def hide(self):
        self.__own = X


@dataclasses.dataclass(slots=True, frozen=True)
class Frozen:
    value: object


class Refusing(dict):
    def update(self, *args, **kwargs):
        raise TypeError("no")

    clear = __setitem__ = update


class Noting(list):
    note = None


def attribute(x):
    x.value = torch.zeros(2)


PLACES = {
    "list": ([X], lambda x: x.append(X)),
    "emptied list": ([X], lambda x: x.clear()),
    "dict": ({"a": X}, lambda x: x.update(b=X)),
    "another value": ({"a": X}, lambda x: x.update(a=X + 1)),
    "another order": (collections.OrderedDict(a=X, b=X), lambda x: x.move_to_end("a")),
    "defaultdict": (collections.defaultdict(list, a=[X]), lambda x: x["b"].append(X)),
    "deque": (collections.deque([X, X], maxlen=2), lambda x: x.append(X + 1)),
    "set": ({1}, lambda x: x.add(2)),
    "dict that refuses": (Refusing(a=X), lambda x: dict.__setitem__(x, "b", X)),
    "attribute of a list": (Noting([X]), lambda x: setattr(x, "note", X)),
    "object": (Plain(X), attribute),
    "new attribute": (Plain(X), lambda x: setattr(x, "new", X)),
    "called": (Called(X), attribute),
    "namespace": (types.SimpleNamespace(value=X), attribute),
    "slots": (Slotted(X), attribute),
    "a slot that was empty": (Slotted(X), lambda x: x.hide()),
    "frozen": (Frozen(X), lambda x: object.__setattr__(x, "value", X + 1)),
    "deep": ((Plain({"a": [Plain(Slotted(X))]}),), lambda x: attribute(x[0].value["a"][0].value)),
}


def contents(handed):
    return [[id(x) for x in _read(place)] for place, _ in handed.places]


@pytest.mark.parametrize("name", PLACES)
def test_each_kind_of_place_is_put_back_and_left_as_it_is(name):
    given, change = PLACES[name]
    handed = Handed((given,))
    before = contents(handed)
    assert handed.ran((given,)) == (False, False, False)
    change(given)
    after = contents(handed)
    assert handed.ran((given,))[0] and after != before
    now = handed.put_back()
    assert contents(handed) == before
    put(now)
    assert contents(handed) == after


def test_what_a_block_did_to_tensors_is_told():
    grows = torch.ones(2, requires_grad=True) * 2
    found = {}
    for name, change in {
        "nothing": lambda x: None,
        "without a gradient": lambda x: x.append(X),
        "with one": lambda x: x.append(Plain(grows)),
        "moved": lambda x: x.append(x[0]),
        "in place": lambda x: x[0].mul_(2),
    }.items():
        given = [torch.ones(2)]
        handed = Handed((given,))
        change(given)
        found[name] = handed.ran((given,))
    assert found == {
        "nothing": (False, False, False),
        "without a gradient": (True, False, False),
        "with one": (True, True, False),
        "moved": (True, False, False),
        "in place": (False, False, True),
    }


def test_data_modules_and_what_goes_round_in_circles_are_left_alone():
    linked = Plain(None)
    for _ in range(3000):  # deeper than Python calls go
        linked = Plain(linked)
    given = (list(range(MOST + 1)), {str(i): i for i in range(MOST + 1)}, nn.Linear(2, 2), torch, linked, print, Plain, contents, 3, "text")
    places = [place for place, _ in Handed(given).places]
    assert places and all(type(place) is dict and "itself" in place for place in places)
    small = [1]
    assert any(place is small for place, _ in Handed((list(range(MOST + 1)), small)).places)
    many = [[i] for i in range(MOST)]
    assert len(Handed((many,)).places) == 1  # no further


def test_an_output_of_transformers_is_a_place():
    from transformers.modeling_outputs import BaseModelOutput

    given = BaseModelOutput(last_hidden_state=X)
    handed = Handed((given,))
    given["hidden_states"] = (X,)
    now = handed.put_back()
    assert list(given.keys()) == ["last_hidden_state"] and given.hidden_states is None
    put(now)
    assert given.hidden_states is given["hidden_states"] and given[1] == (X,)
