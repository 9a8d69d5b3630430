"""Two cards, as Lightning starts them."""

import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )

    def training_step(self, batch, _):
        rows, labels = batch
        return nn.functional.cross_entropy(self.layers(rows), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(2048, 784), torch.randint(10, (2048,)))
    loader = torch.utils.data.DataLoader(data, batch_size=256)
    trainer = lightning.Trainer(
        accelerator="gpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader)
