"""timm's train.py in short, with its options, and --halfback "sbp(keep=0.5)".

python examples/timm_train.py                                               a small ViT on scikit-learn's digits; half a minute on a CPU
python examples/timm_train.py --data-dir imagenet --num-classes 1000 --model vit_base_patch16_224 --model-kwargs --batch-size 256
In timm's own train.py: let `create_model` be the one below, and give --model-kwargs halfback="sbp(keep=0.5)".
"""

import argparse

import timm
import torch
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, ParseKwargs, accuracy, random_seed
from torch.utils.data import DataLoader, TensorDataset

import halfback as hb
from halfback.data import digits

SMALL = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 48, "depth": 4, "num_heads": 3}


def create_model(*args, halfback="", **kwargs):
    model = timm.create_model(*args, **kwargs)
    if halfback:
        hb.apply_(model, *hb.parse(halfback))
    return model


def loaders(args, model):
    if args.data_dir is None:
        data = digits()
        sets = TensorDataset(data.x_train, data.y_train), TensorDataset(data.x_test, data.y_test)
        return [DataLoader(s, args.batch_size, shuffle=s is sets[0], drop_last=s is sets[0]) for s in sets]
    config = resolve_data_config({}, model=model)
    shared = {k: config[k] for k in ("input_size", "interpolation", "mean", "std")} | {"use_prefetcher": False, "num_workers": args.workers}
    sets = [create_dataset("", args.data_dir, split=split, is_training=split == "train") for split in ("train", "validation")]
    return [create_loader(s, batch_size=args.batch_size, is_training=s is sets[0], **shared) for s in sets]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir")
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--model-kwargs", nargs="*", default=SMALL, action=ParseKwargs)
    parser.add_argument("--num-classes", type=int, default=10)
    parser.add_argument("--halfback", default="sbp(keep=0.5)", help="methods, as in 'halfback train --help'; '' for plain training")
    for name, default in {"batch-size": 64, "epochs": 4, "opt": "adamw", "lr": 2e-3, "sched": "cosine", "workers": 4, "seed": 42}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    random_seed(args.seed)
    model = create_model(args.model, num_classes=args.num_classes, halfback=args.halfback, **args.model_kwargs).to(args.device)
    train, test = loaders(args, model)
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=0.05)
    scheduler, epochs = create_scheduler_v2(optimizer, sched=args.sched, num_epochs=args.epochs, warmup_epochs=0)
    ema, loss_of, means = ModelEmaV3(model, decay=0.98), torch.nn.CrossEntropyLoss(), []
    for epoch in range(epochs):
        model.train()
        losses = AverageMeter()
        for x, y in train:
            loss = loss_of(model(x.to(args.device)), y.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            losses.update(loss.item(), len(x))
        scheduler.step(epoch + 1)
        means.append(losses.avg)
        with torch.no_grad():
            tops = [accuracy(ema.module.eval()(x.to(args.device)), y.to(args.device))[0].item() * len(x) for x, y in test]
        print(f"epoch {epoch}: loss {losses.avg:.3f}, averaged weights {sum(tops) / len(test.dataset):.1f} % right")
    assert means[-1] < means[0]
    if args.halfback:
        held = hb.held(model.train(), lambda: model(x.to(args.device)))
        hb.remove_(model)
        assert held < hb.held(model, lambda: model(x.to(args.device))), "less is held than in plain training"
