"""Lightning with save_last, over a last.ckpt that is there; then a second fit that resumes."""
import os
import warnings

warnings.filterwarnings("ignore")
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(steps, path=None):
    saving = ModelCheckpoint(dirpath=".", filename="epoch{step}", save_last=True, every_n_train_steps=1, save_top_k=1)
    trainer = L.Trainer(
        max_steps=steps, accelerator="gpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving],
    )
    trainer.fit(Module(), DataLoader(torch.randn(32, 32), batch_size=8), ckpt_path=path)
    return trainer.global_step


print("SEE", fit(2))
os.remove("last.ckpt") if os.path.exists("last-v1.ckpt") else None
print("SEE", sorted(n for n in os.listdir(".") if n.endswith(".ckpt")))
newest = sorted(n for n in os.listdir(".") if n.endswith(".ckpt"))[-1]
print("SEE", fit(3, newest), os.path.getsize(newest))
