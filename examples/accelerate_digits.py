"""Accelerate: hb.apply_ before or after prepare, which makes no difference.

python examples/accelerate_digits.py                                                 on one device
ACCELERATE_MIXED_PRECISION=bf16 torchrun --nproc-per-node 2 examples/accelerate_digits.py   the same, with DDP and autocast
"""

import gc

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import halfback as hb
from halfback.data import digits
from halfback.models import small_vit

METHODS = hb.parse("sbp(keep=0.5)+lean")


def prepared(accelerator: Accelerator, order: str):
    torch.manual_seed(0)
    model, data = small_vit(), digits()
    if order == "before":
        hb.apply_(model, *METHODS)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    loader = DataLoader(TensorDataset(data.x_train, data.y_train), 64, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if order == "after":
        hb.apply_(model, *METHODS)
    return model, optimizer, loader


def train(accelerator: Accelerator, order: str) -> tuple[list[float], list[torch.Tensor]]:
    model, optimizer, loader = prepared(accelerator, order)
    losses, gradients = [], []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    inner = accelerator.unwrap_model(model)
    held = hb.held(model, lambda: F.cross_entropy(model(x), y))
    hb.remove_(inner if order == "before" else model)
    plain = hb.held(model, lambda: F.cross_entropy(model(x), y))
    accelerator.print(f"apply_ {order} prepare: loss {losses[0]:.2f} -> {losses[-1]:.2f}, held {held / plain:.2f} of plain")
    assert held < 0.8 * plain and losses[-1] < losses[0]
    return losses, gradients


if __name__ == "__main__":
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    (first, ours), (second, theirs) = train(accelerator, "before"), train(accelerator, "after")
    assert first == second and all(map(torch.equal, ours, theirs)), "the order does not matter"
    gc.collect()  # DDP's reducers: if one of them is the last to hold the process group, its threads may outlive Python, and abort
    accelerator.end_training()
