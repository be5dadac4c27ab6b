"""halfback: train with a fraction of the backward pass.

report = hb.apply_(model, hb.SBP(keep=0.5))                  in place; what was touched, skipped, and why
report = hb.apply_(model, hb.Lean())                         exact gradients, less held
report = hb.apply_(model, hb.DropIT(keep=0.1))               weight gradients from sparse inputs
report = hb.apply_(model, hb.SBP(keep=0.5), hb.Recompute())  methods compose
report = hb.apply_(model, budget="16GiB", batch=batch)       methods that fit the memory, exact ones first
hb.remove_(model)                                            the exact inverse
with hb.exact(model): ...                                    exact gradients for a while
hb.follow_(model, step / steps)                              keep what the methods' schedules say

profile = hb.profile(model, batch)                           who holds how many bytes for backward
plan = hb.plan(model, batch, budget="10GiB")                 what fits, and what it costs
audit = hb.audit(model, batch)                               approximate against exact gradients, layer by layer
"""

from .attention import attention_memory
from .audit import Audit, audit
from .functional import sbp
from .memory import Profile, held, profile
from .methods import SBP, ChunkedLoss, DropIT, Lean, Recompute, SkipTokens, parse
from .monitor import Monitor
from .planner import Plan, apply_, plan
from .positions import Positions
from .rewrite import Report, exact, follow_, remove_
from .streams import Streams

__version__ = "0.1.0"
__all__ = [
    "SBP",
    "Audit",
    "ChunkedLoss",
    "DropIT",
    "Lean",
    "Monitor",
    "Plan",
    "Positions",
    "Profile",
    "Recompute",
    "Report",
    "SkipTokens",
    "Streams",
    "apply_",
    "attention_memory",
    "audit",
    "exact",
    "follow_",
    "held",
    "parse",
    "plan",
    "profile",
    "remove_",
    "sbp",
]
