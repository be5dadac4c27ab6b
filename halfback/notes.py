"""Who hears of what only a forward can tell (merges, fallbacks, the positions that were drawn), and who of several processes speaks."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

LISTENERS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_OWNERS = itertools.count(1)


def rank() -> int:
    """The number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


log = logging.getLogger("halfback")
log.addFilter(lambda record: rank() == 0)  # what one process has to say, all have


def constant(f: Callable) -> Callable:
    """torch.compiler.assume_constant_result, which is this mark and imports the compiler: that takes as long as importing torch."""
    f._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return f


def uncompiled(f: Callable) -> Callable:
    """torch.compiler.disable, for what autograd calls while a compiled function runs: Dynamo would compile that, and all that it calls."""
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(f.__code__, dynamo._FrameExecStrategy(skip, skip))
    return f


def listen(report: Any) -> str:
    """The name under which a report hears. A text: the compiler takes a number for one that varies, once it has seen two."""
    owner = str(next(_OWNERS))
    LISTENERS[owner] = report
    return owner


@constant
def note(owner: str, block: str, kind: str, what: str) -> bool:
    """Tell whoever applied the method that `what` was merged, or fell back, in `block`. A compiled graph calls this once, when it is
    traced, as plain Python."""
    listener = LISTENERS.get(owner)
    if listener is not None:
        listener.hear(block, kind, what)
    return True


def caution(report: Any, block: str, what: str, kind: str = "caution") -> None:
    """For a user who does not read reports, too: a warning, of the first block."""
    if (kind, what) not in report.notes:
        log.warning("halfback: %s: %s.", block, what)
    report.hear(block, kind, what)


@constant
def warn(owner: str, block: str, what: str) -> bool:
    """The same inside of a block, which may be compiled."""
    if owner in LISTENERS:
        caution(LISTENERS[owner], block, what, "warned")
    return True
