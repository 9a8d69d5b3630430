"""Logs, JSON, CSV, truncation, appending; a file handler of logging."""
import csv
import json
import logging
import os

import torch
from torch import nn

logging.basicConfig(filename="logs/train.log", level=logging.INFO, format="%(message)s")
model = nn.Linear(32, 32).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open("logs/history.csv", "w", newline="") as stream:
    table = csv.writer(stream)
    for step in range(3):
        model(torch.randn(8, 32, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        table.writerow([step, 0.5])
        logging.info("step %d", step)
with open("config.json") as stream:
    config = json.load(stream)
config["trained"] = True
with open("config.json", "w") as stream:
    json.dump(config, stream)
os.truncate("notes.txt", 5)
with open("notes.txt", "r+") as stream:
    stream.seek(0, 2)
    stream.write("!")
print("SEE", open("notes.txt").read(), json.load(open("config.json")), open("logs/history.csv").read().split())
os.chmod("notes.txt", 0o600)
os.utime("notes.txt", (1, 1))
print("SEE", oct(os.stat("notes.txt").st_mode), int(os.stat("notes.txt").st_mtime))
