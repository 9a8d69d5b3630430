"""Lightning: a fit for every size of the hidden layer, the best checkpoint tested."""

import tempfile

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(pl.LightningModule):
    def __init__(self, hidden, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 64))
        self.decoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 784))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main():
    pl.seed_everything(1)
    train_loader = DataLoader(TensorDataset(torch.rand(2048, 784)), batch_size=512, shuffle=True)
    val_loader = DataLoader(TensorDataset(torch.rand(512, 784)), batch_size=512)
    scores = {}
    for hidden in (512, 2048, 4096):
        model = Autoencoder(hidden)
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="gpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tempfile.mkdtemp(),
        )
        trainer.fit(model, train_loader, val_loader)
        scores[hidden] = float(trainer.callback_metrics["val_loss"])
    print(scores)


if __name__ == "__main__":
    main()
