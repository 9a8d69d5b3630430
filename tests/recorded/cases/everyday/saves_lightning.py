"""Lightning's ModelCheckpoint: the two best and the last one, resumed from the last."""

import os
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, _):
        self.log("epoch_number", float(self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(folder, epochs, resume=None):
    lightning.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randn(64, 1, 28, 28), torch.randint(10, (64,))), batch_size=16)
    keeps = ModelCheckpoint(folder, filename="{epoch}", monitor="epoch", mode="max", save_top_k=2, save_last=True)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=epochs, callbacks=[keeps], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, loader, loader, ckpt_path=resume)
    return trainer, keeps


with tempfile.TemporaryDirectory() as folder:
    fit(folder, 4)
    assert sorted(os.listdir(folder)) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"], os.listdir(folder)
    assert os.path.getsize(os.path.join(folder, "last.ckpt")) > 3 * 4 * 784 * 512
    trainer, keeps = fit(folder, 5, os.path.join(folder, "last.ckpt"))
    assert trainer.global_step == 20, trainer.global_step
    loaded = Classifier.load_from_checkpoint(keeps.best_model_path)
    loaded.net.cuda().eval()(torch.randn(4, 1, 28, 28, device="cuda"))
    print(sorted(os.listdir(folder)), torch.cuda.max_memory_allocated())
