"""Lightning's Trainer, as its tutorials use it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.recorded.cases.libraries.registry import program

_CLASSES = 10


class _Images(torch.utils.data.Dataset[Any]):
    """Random images that are the same every time."""

    def __init__(self, count: int, side: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.images = torch.randn(count, 3, side, side, generator=generator)
        self.labels = torch.randint(_CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


def _network() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    return nn.Sequential(
        block(3, 64), block(64, 128), block(128, 256), nn.Flatten(), nn.Linear(256 * 8 * 8, 1024), nn.ReLU(),
        nn.Dropout(0.2), nn.Linear(1024, _CLASSES),
    )  # fmt: skip


def _classifier(learning_rate: float = 1e-3) -> Any:
    import lightning
    from torchmetrics.classification import MulticlassAccuracy

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = _network()
            self.accuracy = MulticlassAccuracy(_CLASSES)

        def forward(self, images: torch.Tensor) -> Any:
            return self.model(images)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            loss = functional.cross_entropy(self(images), labels)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            images, labels = batch
            logits = self(images)
            self.accuracy(logits, labels)
            self.log("val_loss", functional.cross_entropy(logits, labels), prog_bar=True)
            self.log("val_accuracy", self.accuracy, on_step=False, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

    return Classifier()


def _fit(module: Any, side: int = 64, **options: Any) -> None:
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    lightning.seed_everything(42)
    train = torch.utils.data.DataLoader(_Images(150, side), batch_size=32, shuffle=True)
    validation = torch.utils.data.DataLoader(_Images(50, side), batch_size=32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="gpu",
            devices=1,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True), LearningRateMonitor()],
            log_every_n_steps=2,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, train, validation)


@program("lightning", "torchmetrics")
def lightning_fp32() -> None:
    _fit(_classifier())


@program("lightning", "torchmetrics")
def lightning_bf16_accumulation() -> None:
    _fit(_classifier(), precision="bf16-mixed", accumulate_grad_batches=2, gradient_clip_val=1.0)


@program("lightning", "torchmetrics")
def lightning_fp16_clip_by_value() -> None:
    _fit(_classifier(), precision="16-mixed", gradient_clip_val=0.5, gradient_clip_algorithm="value")


@program("lightning", "torchmetrics")
def lightning_true_bf16_progress_bar() -> None:
    _fit(_classifier(), precision="bf16-true", enable_progress_bar=True)
