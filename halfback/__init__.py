"""halfback: train with a fraction of the backward pass.

report = hb.apply_(model, hb.SBP(keep=0.5))                  in place; what was touched, skipped, and why
report = hb.apply_(model, hb.Lean())                         exact gradients, less held
report = hb.apply_(model, hb.DropIT(keep=0.1))               weight gradients from sparse inputs
report = hb.apply_(model, hb.SBP(keep=0.5), hb.Recompute())  methods compose
hb.remove_(model)                                            the exact inverse
with hb.exact(model): ...                                    exact gradients for a while
"""

from .attention import attention_memory
from .functional import sbp
from .memory import held
from .methods import SBP, DropIT, Lean, Recompute, SkipTokens, parse
from .positions import Positions
from .rewrite import Report, apply_, exact, remove_
from .streams import Streams

__version__ = "0.1.0"
__all__ = [
    "SBP",
    "DropIT",
    "Lean",
    "Positions",
    "Recompute",
    "Report",
    "SkipTokens",
    "Streams",
    "apply_",
    "attention_memory",
    "exact",
    "held",
    "parse",
    "remove_",
    "sbp",
]
