"""Experiments in a sqlite file: rows deleted, updated and added."""
import sqlite3

import torch
from torch import nn

base = sqlite3.connect("runs.db")
base.execute("DELETE FROM runs WHERE loss > 0.4")
base.commit()
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    base.execute("INSERT INTO runs VALUES (?, ?)", (f"step{step}", 0.1))
base.execute("UPDATE runs SET loss = 0.0 WHERE name = 'first'")
base.commit()
print("SEE", base.execute("SELECT * FROM runs ORDER BY name").fetchall())
base.close()
