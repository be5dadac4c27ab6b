"""torchvision's reference script for classification in short, with its options, and --halfback "dropit(keep=0.2)".

python examples/torchvision_train.py                                    ResNet-18 on scikit-learn's digits; half a minute on a CPU
python examples/torchvision_train.py --data-path imagenet --train-crop-size 224 --model convnext_tiny --halfback "sbp(keep=0.5)" -b 128
"""

import argparse
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, default_collate
from torchvision.transforms import v2

import halfback as hb
from halfback.data import digits


def transforms(size, training):
    crop = [v2.RandomResizedCrop(size, (0.6, 1.0)) if training else v2.Resize((size, size))]
    return v2.Compose([v2.ToImage(), v2.RGB(), *crop, v2.ToDtype(torch.float32, scale=True)])


def dataset(args, split):
    transform = transforms(args.train_crop_size, split == "train")
    if args.data_path:
        return torchvision.datasets.ImageFolder(Path(args.data_path) / split, transform)
    data = digits()
    x, y = (data.x_train, data.y_train) if split == "train" else (data.x_test, data.y_test)
    return [(transform(image), int(label)) for image, label in zip(x, y, strict=True)]


def load_data(args):
    sets = [dataset(args, split) for split in ("train", "val")]
    classes = len(getattr(sets[0], "classes", range(10)))
    mix = v2.CutMix(num_classes=classes)
    train = DataLoader(sets[0], args.batch_size, shuffle=True, drop_last=True, collate_fn=lambda b: mix(*default_collate(b)))
    return train, DataLoader(sets[1], args.batch_size), classes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-path")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--halfback", default="dropit(keep=0.2)", help="methods, as in 'halfback train --help'; '' for plain training")
    parser.add_argument("-b", "--batch-size", type=int, default=32)
    for name, default in {"epochs": 1, "lr": 0.02, "momentum": 0.9, "weight-decay": 1e-4, "train-crop-size": 32}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test, classes = load_data(args)
    model = torchvision.models.get_model(args.model, weights=None, num_classes=classes).to(args.device)
    if args.halfback:
        print(hb.apply_(model, *hb.parse(args.halfback)))
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay)
    scheduler, losses = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train)), []
    for _ in range(args.epochs):
        for x, y in train:
            loss = loss_of(model.train()(x.to(args.device)), y.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        with torch.inference_mode():
            right = sum((model.eval()(x.to(args.device)).argmax(1).cpu() == y).sum().item() for x, y in test)
        print(f"loss {losses[-1]:.3f}, {right / len(test.dataset):.1%} right")
    assert sum(losses[-5:]) < sum(losses[:5])
    if args.halfback:
        held = hb.held(model.train(), lambda: model(x.to(args.device)))
        hb.remove_(model)
        plain = hb.held(model, lambda: model(x.to(args.device)))
        print(f"held {held / plain:.2f} of plain")
        assert held < plain
