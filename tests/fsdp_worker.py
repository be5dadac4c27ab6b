"""Run by torchrun on two processes: FSDP2 after apply_, against the same model in one process with the same mask on both ranks."""

import sys

import torch
import torch.distributed as dist
import zoo
from torch.distributed.fsdp import fully_shard

import halfback as hb
from halfback import positions


def main():
    dist.init_process_group("gloo")
    positions._rank = lambda: 0  # the same mask everywhere, so that one process can say what is right
    lean = [(hb.Lean(),), (hb.DropIT(0.3, activation_bits=4),), (hb.Lean(), hb.Recompute())]
    for mode in ("query", "qkv", None):
        for methods in lean if mode is None else [(), (hb.Recompute(),)]:
            alone, batch = zoo.make("vit", layers=3)
            sharded, _ = zoo.make("vit", layers=3)
            for model in (alone, sharded):
                streams = () if mode is None else (hb.SBP(0.5, layers="all", attention=mode),)
                report = hb.apply_(model, *streams, *methods)
            for block in sharded.vit.layers:
                fully_shard(block)
            fully_shard(sharded)
            for _ in range(2):
                for model in (alone, sharded):
                    model.zero_grad()
                    zoo.loss(model, batch).backward()
            assert mode is not None or isinstance(methods[0], hb.Lean) or any(r.stored for r in report.rows), "nothing was stored"
            for (k, p), q in zip(alone.named_parameters(), sharded.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad.full_tensor(), atol=1e-6), (mode, methods, k)
    dist.barrier()
    dist.destroy_process_group()
    print("fsdp ok")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
