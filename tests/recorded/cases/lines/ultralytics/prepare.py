"""Pictures with a box each."""

import os

import numpy as np
from PIL import Image

for part in ("train", "val"):
    for kind in ("images", "labels"):
        os.makedirs(os.path.join(kind, part))
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(os.path.join("images", part, f"{number}.png"))
        with open(os.path.join("labels", part, f"{number}.txt"), "w") as file:
            file.write("0 0.5 0.5 0.4 0.4\n")
with open("data.yaml", "w") as file:
    file.write(f"path: {os.getcwd()}\ntrain: images/train\nval: images/val\nnames: {{0: thing}}\n")
