"""Run by torchrun on two processes: gradients are the mean over ranks of one process's, each with that rank's samples and draws, and a
training whose weights are shared out is the one that it would be otherwise. One start for all of it, as starting takes the time."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from test_heads import V
from test_heads import made as made_head
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import halfback as hb
from halfback import positions, watch
from halfback.train import checkpoint, record, sharded
from halfback.train.loop import Training, _tensors, train
from halfback.train.pieces import World
from halfback.train.settings import Settings

SBP = "sbp(layers='all', sampler='random'"
DROPIT = "dropit(keep=0.3, exact_first=False"
METHODS = (f"{SBP})", f"{DROPIT}, select='random')", "lean", "recompute", f"{SBP})+{DROPIT})+recompute(sparing=True)")
OTHERS = (f"{SBP}, attention='qkv')+lean", "dropit(keep=0.3, activation_bits=4)", "lean+recompute", f"{SBP}, attention='qkv')+recompute")
OPTIONS = (
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "static_graph": True},
)
STEPS = 2  # a static graph is one from the second on
HOOKS = {
    "none": contextlib.nullcontext,
    "save_on_cpu": save_on_cpu,
    "as offloaded to another storage": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
}


def made(name, text):
    model, batch = zoo.make(name, layers=2)
    return model, batch, hb.apply_(model, *hb.parse(text))


def samples(batch, rank):
    return {k: v[rank : rank + 1] for k, v in batch.items()}


def alone(name, text, rank, autocast=False):
    """What this rank's gradients would be in one process with its draws, step by step."""
    real, positions.rank, watch.rank = positions.rank, lambda: rank, lambda: rank
    model, batch, _ = made(name, text)
    found = []
    for _ in range(STEPS):
        step(model, model, samples(batch, rank), autocast=autocast)
        found.append({k: p.grad.clone() for k, p in model.named_parameters()})
    positions.rank = watch.rank = real
    return found


def step(model, run, batch, hooks="none", autocast=False):
    model.zero_grad()
    with HOOKS[hooks]():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = zoo.loss(run, batch)
        loss.backward()


def mean(wanted, i, k):
    return sum(w[i][k] for w in wanted) / len(wanted)


def check(model, run, wanted, rank, batch, told, **how):
    for i in range(STEPS):
        step(model, run, samples(batch, rank), **how)
        for k, p in model.named_parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            far = (grad - mean(wanted, i, k)).abs().max().item()
            assert far < 1e-6 and grad.abs().max() > 0, (*told, how, i, k, far)


def gradients(name, rank, world):
    for text in (*METHODS, *OTHERS):
        wanted = [alone(name, text, r) for r in range(world)]
        assert max((wanted[0][0][k] - wanted[1][0][k]).abs().max() for k in wanted[0][0]) > 1e-4, "ranks are the same"
        for options in OPTIONS if text in METHODS else OPTIONS[:1]:
            model, batch, report = made(name, text)
            check(model, DDP(model, **options), wanted, rank, batch, (text, options))
            assert "dropit" not in text or any(r.stored for r in report.rows), "nothing was stored"
        for hooks in HOOKS if text in METHODS else ("none",):
            if hooks != "none":
                model, batch, _ = made(name, text)
                check(model, DDP(model), wanted, rank, batch, (text,), hooks=hooks)
            model, batch, _ = made(name, text)
            sharded.shard_(model, "cpu")
            check(model, model, wanted, rank, batch, (text, "sharded"), hooks=hooks)


def draws_differ_by_rank(rank, world):
    """Also where the samples are the same."""
    for text in METHODS[:2]:
        model, batch, _ = made("vit", text)
        step(model, model, batch)
        own = torch.cat([p.grad.flatten() for p in model.parameters()])
        both = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(both, own)
        assert not torch.allclose(*both, atol=1e-5), text


def accumulation(rank, world):
    """Gradients of two backwards add up, and are added up over processes in the second."""
    for text in ("exact", METHODS[0], METHODS[-1]):
        wanted = [alone("vit", text, r) if text != "exact" else [plain("vit", r)] * 2 for r in range(world)]
        model, batch = zoo.make("vit", layers=2)
        if text != "exact":
            hb.apply_(model, *hb.parse(text))
        sharded.shard_(model, "cpu")
        for i in range(STEPS):
            sharded.in_sync(model, i == STEPS - 1)
            zoo.loss(model, samples(batch, rank)).backward()
            assert all((p.grad is None) == (i < STEPS - 1) for p in model.parameters()), "nothing is sent before the last"
        for k, p in model.named_parameters():
            total = sum(mean(wanted, i, k) for i in range(STEPS))
            assert (p.grad.full_tensor() - total).abs().max() < 2e-6, (text, k)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
        whole = torch.cat([sum(mean(wanted, i, k) for i in range(STEPS)).flatten() for k in wanted[0][0]])
        clipped = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        assert torch.allclose(norm, whole.norm(), rtol=1e-5) and torch.allclose(clipped, whole * 0.01 / whole.norm(), atol=1e-6)


def plain(name, rank):
    model, batch = zoo.make(name, layers=2)
    step(model, model, samples(batch, rank))
    return {k: p.grad for k, p in model.named_parameters()}


def low_precision(rank, world):
    """Under autocast a model that is shared out computes what one process does, and an overflow in one process skips the step in all."""
    wanted = [alone("vit", METHODS[0], r, autocast=True) for r in range(world)]
    model, batch, _ = made("vit", METHODS[0])
    sharded.shard_(model, "cpu")
    check(model, model, wanted, rank, batch, ("bf16",), autocast=True)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), 1.0)
    for factor in (1.0, float("inf")):
        before = [sharded.local(p).clone() for p in model.parameters()]
        model.zero_grad()
        scaler.scale(zoo.loss(model, samples(batch, rank)) * (factor if rank else 1.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, sharded.local(p)) for a, p in zip(before, model.parameters(), strict=True))
        assert same == (factor != 1.0), "a step with an overflow, and only that, is skipped"
    assert scaler.get_scale() == 2.0


def turns_exact(rank, world):
    """For a while, with all blocks recomputed, also where they were wrapped before."""
    wanted = [[plain("vit", r)] * STEPS for r in range(world)]
    for parallel in (lambda model: sharded.shard_(model, "cpu") or model, DDP):
        model, batch, _ = made("vit", METHODS[0])
        run = parallel(model)
        before = hb.held(model, lambda: zoo.loss(run, batch))  # noqa: B023
        with hb.exact(model, recompute=True):
            check(model, run, wanted, rank, batch, ("exact", run))
            assert hb.held(model, lambda: zoo.loss(run, batch)) < before  # noqa: B023


def ties_stay(rank):
    model, _ = zoo.make("gpt2", layers=2)
    wanted = checkpoint.unshared(_tensors(model))
    sharded.shard_(model, "cpu")
    own, same = checkpoint.unshared(sharded.gathered(_tensors(model), rank == 0))
    assert not own if rank else (same == wanted[1] != {} and all(torch.equal(own[k], v) for k, v in wanted[0].items()))


# Trainings


class Cut(Exception):
    pass


def cut(settings, folder, at):
    """A training that dies before a step."""
    own = Training.train_step
    Training.train_step = lambda self, x, y: own(self, x, y) if self.step < at else (_ for _ in ()).throw(Cut)
    with contextlib.suppress(Cut):
        train(settings, folder, say=lambda text: None)
    Training.train_step = own
    dist.barrier()


def saved(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def trainings(rank, folder):
    say = lambda text: None  # noqa: E731
    hard = {
        "method": f"sbp(sampler='random', schedule=((0, 0.8), (0.5, 0.2)))+{DROPIT}, select='random')",
        "exact_tail": 0.3,
        "clip": 0.5,
        "ema": 0.9,
    }
    record.draw = lambda *a: None  # curves, and what is held: other tests look at them
    Training._count_held = lambda self: (1, "")
    common = {"model": "small-vit", "data": "digits", "epochs": 2, "batch": 512, "save_every": 3, "accumulate": 2}
    s = Settings(**common, **hard, parallel="fsdp")
    train(s, folder / "whole", say=say)
    cut(s, folder / "cut", 3)
    train(s, folder / "cut", resume=True, say=say)
    if rank == 0:
        (one, first), (two, second) = saved(folder / "whole"), saved(folder / "cut")
        assert set(one) == set(two) and all(torch.equal(one[k], two[k]) for k in one) and first["draws"] == second["draws"]
        best = [(folder / k / "best.safetensors").read_bytes() for k in ("whole", "cut")]
        assert best[0] == best[1]
    simple = Settings(**common, optimizer="sgd", lr=0.02, ema=0.5, best=False, parallel="fsdp")
    cut(simple, folder / "ddp", 3)  # a step after a test, which nothing was saved after; goes on with DDP
    if rank == 0:
        shutil.copytree(folder / "ddp", folder / "one")  # and in one process, which the test does
    dist.barrier()
    train(Settings(**{**simple.to_json(), "parallel": "ddp"}), folder / "ddp", resume=True, say=say)


def large_vocabulary(rank, world):
    """A loss in parts, with DDP and FSDP2."""

    def loss(model, ranks):
        ids, targets = (torch.randint(0, n, (3 * world, 7), generator=torch.Generator().manual_seed(1)) for n in (50, V))
        return F.cross_entropy(model(ids[ranks]).flatten(0, 1), targets[ranks].flatten())

    plain, *_ = made_head(torch.float32)
    loss(plain, slice(None)).backward()
    mine = slice(3 * rank, 3 * rank + 3)
    for text in ("chunkedloss", "lean+chunkedloss"):
        for how in ("ddp", "root", "kept", "freed"):
            model, *_ = made_head(torch.float32)
            hb.apply_(model, *hb.parse(text))
            if how in ("kept", "freed"):
                fully_shard(model.head, reshard_after_forward=how == "freed")
            run = DDP(model) if how == "ddp" else fully_shard(model)
            if how == "freed":
                try:
                    loss(run, mine)
                except RuntimeError as e:
                    assert "Shard the layer with the whole model" in str(e)
                    continue
                raise AssertionError("weights that are gone were used")
            loss(run, mine).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                assert torch.allclose(grad, q.grad, atol=1e-6) and grad.abs().max() > 0, (text, how, name)


def main():
    with World().joined("cpu"):
        rank, world = dist.get_rank(), dist.get_world_size()
        gradients("vit", rank, world)
        draws_differ_by_rank(rank, world)
        accumulation(rank, world)
        low_precision(rank, world)
        turns_exact(rank, world)
        large_vocabulary(rank, world)
        ties_stay(rank)
        trainings(rank, Path(os.environ["FOLDER"]))
        dist.barrier()
    if rank == 0:
        print("several ok")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
