"""fastai: ``Learner.save``, ``load`` and ``export``, with the callback that keeps the best model of every epoch."""

import tempfile
from pathlib import Path

import fastai.callback.schedule  # noqa: F401 - it gives learners fit_one_cycle
import torch
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner
from torch import nn


class Rows(list):
    def new_empty(self):
        return Rows()


torch.manual_seed(0)
rows = Rows((torch.randn(256), torch.tensor(index % 5)) for index in range(64))
folder = Path(tempfile.mkdtemp())
loaders = DataLoaders(
    DataLoader(rows, bs=16, shuffle=True, num_workers=0),
    DataLoader(Rows(rows[:32]), bs=16, num_workers=0),
    device="cuda",
)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.BatchNorm1d(1024), nn.Linear(1024, 5))
learner = Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), path=folder, metrics=[])
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 1e-3, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
learner.save("final", with_opt=True)
learner.load("final", with_opt=True)
learner.export("export.pkl")
again = load_learner(folder / "export.pkl", cpu=True)
again.model(torch.randn(4, 256))
print(sorted(path.name for path in (folder / "models").iterdir()), type(again).__name__)
print((folder / "models" / "final.pth").stat().st_size > 3 * 4 * 256 * 1024, torch.cuda.max_memory_allocated())
