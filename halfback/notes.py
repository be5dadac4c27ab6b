"""Who hears of what only a forward can tell: merges, fallbacks, the positions that were drawn."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

LISTENERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_OWNERS = itertools.count(1)


def constant(f: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which is this mark and imports the compiler: that takes as long as importing torch."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def listen(report: Any) -> int:
    """The number under which a report hears."""
    owner = next(_OWNERS)
    LISTENERS[owner] = report
    return owner


@constant
def note(owner: int, block: str, kind: str, what: str) -> bool:
    """Tell whoever applied the method that `what` was merged, or fell back, in `block`. A compiled graph calls this once, when it is
    traced, as plain Python."""
    listener = LISTENERS.get(owner)
    if listener is not None:
        listener.hear(block, kind, what)
    return True
