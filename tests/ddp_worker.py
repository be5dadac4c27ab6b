"""Run by torchrun on two processes: gradients under DDP are the mean over ranks of single-process gradients with each rank's mask."""

import sys

import torch
import torch.distributed as dist
import zoo
from torch.nn.parallel import DistributedDataParallel as DDP

import halfback as hb
from halfback import positions


def alone(rank, world, mode):
    """What this rank's gradient would be in one process with its mask."""
    model, batch = zoo.make("gpt2", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all", attention=mode, sampler="random"))
    real = positions._rank
    positions._rank = lambda: rank
    zoo.loss(model, batch).backward()
    positions._rank = real
    return {k: p.grad for k, p in model.named_parameters()}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for mode in ("query", "qkv"):
        wanted = [alone(r, world, mode) for r in range(world)]
        furthest = max((wanted[0][k] - wanted[1][k]).abs().max() for k in wanted[0])
        assert furthest > 1e-4, "both ranks drew the same mask"
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            model, batch = zoo.make("gpt2", layers=3)
            hb.apply_(model, hb.SBP(0.5, layers="all", attention=mode, sampler="random"))
            wrapped = DDP(model, **options)
            zoo.loss(wrapped, batch).backward()
            for k, p in model.named_parameters():
                mean = sum(w[k] for w in wanted) / world
                assert torch.allclose(p.grad, mean, atol=1e-6), (mode, options, k)
    for text in ("lean", "dropit(keep=0.3)", "sbp(layers='all')+lean"):
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            plain, batch = zoo.make("gpt2", layers=3)
            model = zoo.make("gpt2", layers=3)[0]
            for m in (plain, model):
                hb.apply_(m, *hb.parse(text.replace("sbp(", "sbp(sampler='fixed', ")))
            zoo.loss(plain, batch).backward()
            wrapped = DDP(model, **options)
            zoo.loss(wrapped, batch).backward()
            for (k, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, atol=1e-6), (text, options, k)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("ddp ok")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
