"""One line in a script that uses Lightning.

python examples/lightning_digits.py     a small ViT on scikit-learn's digits; a minute on a CPU
"""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from halfback.integrations.lightning import HalfbackCallback
from halfback.models import small_vit


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = small_vit()
        self.losses: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)


if __name__ == "__main__":
    L.seed_everything(0)
    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(found.target)
    module, callback = Digits(), HalfbackCallback("sbp(keep=0.5)+lean")
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_epochs=2, callbacks=[callback], **quiet)  # the one line is the callback
    trainer.fit(module, DataLoader(TensorDataset(x, y), 64, shuffle=True))
    print(callback.report)
    share = callback.report.after / callback.report.before
    print(f"held {share:.2f} of what it would be; loss {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
    assert share < 0.8
    assert module.losses[-1] < module.losses[0]
