"""Accelerate: ``save_state`` with a limit of two, ``load_state`` of the newest, the epoch that was begun gone on with."""

import os
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run(folder, epochs, resume):
    torch.manual_seed(0)
    accelerator = Accelerator(
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    )
    model = nn.Sequential(nn.Embedding(2000, 128), nn.Flatten(), nn.Linear(128 * 16, 512), nn.GELU(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = DataLoader(
        TensorDataset(torch.randint(2000, (64, 16)), torch.randint(4, (64,))), batch_size=16, shuffle=True
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if resume:
        folders = sorted(os.listdir(os.path.join(folder, "checkpoints")))
        accelerator.load_state(os.path.join(folder, "checkpoints", folders[-1]))
        accelerator.project_configuration.iteration = int(folders[-1].rpartition("_")[2]) + 1
    for _ in range(epochs):
        for ids, labels in loader:
            loss = nn.functional.cross_entropy(model(ids), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.save_state()
    print(sorted(os.listdir(os.path.join(folder, "checkpoints"))), torch.cuda.max_memory_allocated())
    return sorted(os.listdir(os.path.join(folder, "checkpoints")))


with tempfile.TemporaryDirectory() as folder:
    assert run(folder, 3, resume=False) == ["checkpoint_1", "checkpoint_2"]
    assert run(folder, 1, resume=True) == ["checkpoint_2", "checkpoint_3"]
