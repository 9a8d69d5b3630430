"""The folder in which every program of ``programs`` starts: checkpoints, logs and tables of earlier runs, all real.

python -m tests.sandbox.earlier_run FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

#: What a Trainer leaves in a checkpoint.
_NAMES = (
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
)


def make(folder: Path) -> None:
    """Make the folder, and the files of earlier runs in it."""
    folder.mkdir()
    os.chdir(folder)
    if importlib.util.find_spec("accelerate"):
        _three_checkpoints_of_a_trainer("out")
    else:
        _files_named_as_those_of_a_trainer("out")
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 64)).mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 41}, "best.pt")
    Path("last.ckpt").write_bytes(os.urandom(50_000))
    Path("logs").mkdir()
    Path("logs/old.txt").write_text("old\n")
    Path("notes.txt").write_text("do not lose me\n")
    Path("config.json").write_text(json.dumps({"lr": 0.1}))
    np.save("data.npy", np.random.default_rng(0).random((64, 32), dtype=np.float32))
    _tables()
    Path("runs/plain").mkdir(parents=True)
    for step in (-900, -899, -898):
        Path(f"runs/plain/step{step:05d}.pt").write_bytes(os.urandom(1900 + step))


def _three_checkpoints_of_a_trainer(folder: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=1000))
    ids, mask = torch.arange(16), torch.ones(16, dtype=torch.long)
    rows = [{"input_ids": ids, "attention_mask": mask, "labels": i % 2} for i in range(24)]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=3,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()


def _files_named_as_those_of_a_trainer(folder: str) -> None:
    """For programs that only delete them: a Trainer needs accelerate."""
    for number in (1, 2, 3):
        checkpoint = Path(folder) / f"checkpoint-{number}"
        checkpoint.mkdir(parents=True)
        for name in _NAMES:
            (checkpoint / name).write_bytes(os.urandom(1000))


def _tables() -> None:
    base = sqlite3.connect("runs.db")
    base.execute("CREATE TABLE runs (name TEXT, loss REAL)")
    base.executemany("INSERT INTO runs VALUES (?, ?)", [("first", 0.5), ("second", 0.3), ("third", 0.4)])
    base.commit()
    base.close()
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    import h5py

    with h5py.File("data.h5", "w") as file:
        file["x"] = np.ones((10, 10))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
