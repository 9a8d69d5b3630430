"""Ultralytics' own training of a small detector on pictures that are made here: ``last.pt``, ``best.pt``, stripped."""

import os
import tempfile

import numpy as np
import torch
from PIL import Image

folder = tempfile.mkdtemp()
os.environ["YOLO_CONFIG_DIR"] = folder
os.environ["YOLO_OFFLINE"] = "true"

from ultralytics import YOLO  # noqa: E402
from ultralytics.engine.trainer import BaseTrainer  # noqa: E402

BaseTrainer._handle_nan_recovery = lambda *_: False  # on a stub of the driver every loss looks so

for part in ("train", "val"):
    for kind in ("images", "labels"):
        os.makedirs(os.path.join(folder, kind, part))
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, "images", part, f"{number}.png"))
        with open(os.path.join(folder, "labels", part, f"{number}.txt"), "w") as file:
            file.write("0 0.5 0.5 0.4 0.4\n")
with open(os.path.join(folder, "data.yaml"), "w") as file:
    file.write(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {{0: thing}}\n")

model = YOLO("yolov8n.yaml")
model.train(
    data=os.path.join(folder, "data.yaml"), epochs=2, imgsz=64, batch=4, workers=0, device=0, project=folder,
    name="run", plots=False, amp=False, verbose=False,
)  # fmt: skip
weights = os.path.join(folder, "run", "weights")
print(sorted(os.listdir(weights)), os.path.getsize(os.path.join(weights, "best.pt")) // 100_000)
again = YOLO(os.path.join(weights, "best.pt"))
again.predict(np.zeros((64, 64, 3), dtype=np.uint8), device=0, verbose=False)
print(torch.cuda.max_memory_allocated())
