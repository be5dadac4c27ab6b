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

from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from .stores import FewBits, Held, Layout


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

    def restore(self, held: Held, layout: Layout) -> Tensor:
        return kernels.gate_again(*held, layout.n, self.name, self.bits, layout.dtype).view(layout.size)

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
        of_g, of_u = kernels.gate_backward(grad.contiguous(), *ctx.saved_tensors, ctx.gate.name, ctx.gate.bits)
        needs_g, needs_u, *_ = ctx.needs_input_grad
        return of_g if needs_g else None, of_u if needs_u else None, None, None, None
