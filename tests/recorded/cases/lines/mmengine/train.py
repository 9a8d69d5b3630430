"""MMEngine's runner in mixed precision, with a validation."""

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn


class Classifier(BaseModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 256, 3, stride=2),
            nn.BatchNorm2d(256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
        )  # fmt: skip

    def forward(self, pictures, labels, mode="tensor"):
        said = self.layers(pictures)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(said, labels)}
        return said, labels


class Accuracy(BaseMetric):
    def process(self, batch, outputs):
        said, labels = outputs
        self.results.append({"right": (said.argmax(1) == labels).sum().cpu(), "size": len(labels)})

    def compute_metrics(self, results):
        return {"accuracy": sum(int(one["right"]) for one in results) / sum(one["size"] for one in results)}


data = torch.utils.data.TensorDataset(torch.randn(128, 3, 96, 96), torch.randint(10, (128,)))
Runner(
    model=Classifier(),
    work_dir="out",
    train_dataloader={"batch_size": 32, "dataset": data, "sampler": {"type": "DefaultSampler", "shuffle": True},
                      "collate_fn": {"type": "default_collate"}},
    optim_wrapper={"type": "AmpOptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-3}},
    train_cfg={"by_epoch": True, "max_epochs": 1, "val_interval": 1},
    val_dataloader={"batch_size": 16, "dataset": data, "sampler": {"type": "DefaultSampler", "shuffle": False},
                    "collate_fn": {"type": "default_collate"}},
    val_cfg={},
    val_evaluator={"type": Accuracy},
    launcher="none",
).train()  # fmt: skip
