"""A gated product in few bits: h = f(g) * u, of the gated MLPs of language models, without g and u.

    forward    h  = f(g) * u                       exact
    backward   dg = dh * u_hat * f'(g_hat)         approximate: g_hat and u_hat are few-bit copies
               du = dh * f(g_hat)                  approximate
               dW = dy' (f(g_hat) * u_hat)         approximate: of the layer that reads h
Saved for backward: the two copies, `bits` bits an element and four bytes of scales for every 64. Plain training holds g, f(g), u and h.

f is an activation whose derivative could be held as a code (codes.py). Behind a product the code alone would save nothing: f(g) is held for
du, and u for dg. The gradient goes from h to g and u, and past f(g): who has a hook on f(g), or keeps its gradient, gets it, and a code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .stores import FewBits, Held, Layout

RUN = kernels.reference.ACTIVE
BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward(grad, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
}


@dataclass(frozen=True)
class Gate:
    """How the two factors of a product are held. `layout` is that of all three, contiguous; what is restored is the product."""

    name: str
    bits: int

    def product(self, g: Tensor, u: Tensor, active: Tensor, first: bool) -> tuple[Tensor, ...]:
        """h, and what is held of g and u; `active` is f(g), which is there already, and the `first` factor or the second one."""
        if torch.compiler.is_compiling() and g.is_contiguous() and u.is_contiguous():  # all of it in one pass over them
            return kernels.gate(g, u, self.name, self.bits)
        store = FewBits(self.bits)
        held = [*store.compress(g.contiguous()), *store.compress(u.contiguous())]
        return (active * u if first else u * active), *held  # its strides are those of the first factor

    def factors(self, held: Held, layout: Layout) -> tuple[Tensor, Tensor]:
        return self._restored(held[:2], layout), self._restored(held[2:], layout)

    def _restored(self, held: Held, layout: Layout) -> Tensor:
        if torch.compiler.is_compiling():  # one kernel, with all that is computed from it
            codes, scales = held
            return kernels.reference.dequantise(codes, scales, layout.n, self.bits, dtype=layout.dtype).view(layout.size)
        return FewBits(self.bits).restore(held, layout)

    def restore(self, held: Held, layout: Layout) -> Tensor:
        g, u = self.factors(held, layout)
        return RUN[self.name](g) * u

    def __str__(self) -> str:
        return f"both factors in {self.bits} bits"


class Gated(torch.autograd.Function):
    """A product, and what is held of its factors."""

    @staticmethod
    def forward(ctx, g: Tensor, u: Tensor, active: Tensor, gate: Gate, first: bool):
        h, *held = gate.product(g, u, active, first)
        ctx.gate = gate
        ctx.save_for_backward(*held)
        ctx.mark_non_differentiable(*held)
        return h, *held

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        g, u = ctx.gate.factors(ctx.saved_tensors, Layout.contiguous(grad.shape, grad.dtype, grad.device))
        grad_g = grad_u = None
        if ctx.needs_input_grad[0]:
            grad_g = BACKWARD[ctx.gate.name](grad * u, g)
        if ctx.needs_input_grad[1]:
            grad_u = grad * RUN[ctx.gate.name](g)
        return grad_g, grad_u, None, None, None
