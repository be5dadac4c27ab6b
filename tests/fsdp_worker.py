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
    for mode in ("query", "qkv"):
        for methods in ((), (hb.Recompute(),)):
            alone, batch = zoo.make("vit", layers=3)
            sharded, _ = zoo.make("vit", layers=3)
            for model in (alone, sharded):
                hb.apply_(model, hb.SBP(0.5, layers="all", attention=mode), *methods)
            for block in sharded.vit.layers:
                fully_shard(block)
            fully_shard(sharded)
            for _ in range(2):
                for model in (alone, sharded):
                    model.zero_grad()
                    zoo.loss(model, batch).backward()
            for (k, p), q in zip(alone.named_parameters(), sharded.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad.full_tensor(), atol=1e-6), (mode, methods, k)
    dist.barrier()
    dist.destroy_process_group()
    print("fsdp ok")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
