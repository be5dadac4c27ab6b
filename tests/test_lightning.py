"""Methods in a Lightning Trainer: applied to the network, seen in its logs, resumed with its checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo  # noqa: F401
from torch import nn

from halfback.models import small_vit
from halfback.untouched import applied_to

L = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
from halfback.integrations.lightning import HalfbackCallback, network  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SBP = "sbp(keep=0.5, sampler='random')"


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = small_vit(depth=2)
        self.losses = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)

    def train_dataloader(self):
        data = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 10)
        return torch.utils.data.DataLoader(data, 16)


def fit(folder, callback, epochs, resume=None, **more):
    module = Digits()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(default_root_dir=folder, max_epochs=epochs, callbacks=[callback], **quiet, **more)
    trainer.fit(module, ckpt_path=resume)
    return module, trainer


def test_methods_work_in_training_step_and_figures_are_logged(tmp_path):
    callback = HalfbackCallback(f"{SBP}+lean")
    module, trainer = fit(tmp_path, callback, 6, enable_checkpointing=False)
    assert applied_to(module.net) and callback.report.positions
    assert module.losses[-1] < module.losses[0]
    assert 0 < trainer.logged_metrics["halfback_held"] < callback.report.before


def test_resumed_training_is_the_uninterrupted_one(tmp_path):
    whole, _ = fit(tmp_path / "whole", HalfbackCallback(SBP), 4, enable_checkpointing=False)
    _, half = fit(tmp_path / "half", HalfbackCallback(SBP), 2)
    path = half.checkpoint_callback.best_model_path
    again, _ = fit(tmp_path / "again", HalfbackCallback(SBP), 4, resume=path)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(ValueError, match="Give the same methods"):
        fit(tmp_path / "other", HalfbackCallback("sbp(keep=0.25)"), 4, resume=path)


def test_schedules_are_followed_and_the_end_is_exact():
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            (methods,) = (s for a in applied_to(pl_module) for s in a.states)
            seen.append(methods.ratios[0] if methods.on else None)

    module, callback = Digits(), HalfbackCallback("sbp(schedule=((0, 1.0), (0.25, 0.5)))", exact_tail=0.5)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    L.Trainer(max_epochs=2, callbacks=[callback, Look()], enable_checkpointing=False, **quiet).fit(module)
    assert seen == [1.0, 0.75, 0.5, 0.5, None, None, None, None]
    with pytest.raises(ValueError, match="this one has inf steps"):
        L.Trainer(max_epochs=-1, callbacks=[callback], enable_checkpointing=False, **quiet).fit(module)


def test_which_part_is_the_network():
    two = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match="Give module=NAME"):
        network(two, None)
    assert network(two, "b") is two["b"]
    with pytest.raises(ValueError, match="no module of"):
        network(two, "c")
