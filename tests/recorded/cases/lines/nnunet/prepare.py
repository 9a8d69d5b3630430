"""Volumes with a box to be found, planned and preprocessed by nnU-Net itself."""

import json
import os
import subprocess
import sys

import numpy as np
import SimpleITK

place = os.path.join("raw", "Dataset001_Boxes")
for kind in ("imagesTr", "labelsTr"):
    os.makedirs(os.path.join(place, kind))
for number in range(5):
    draw = np.random.default_rng(number)
    volume, label = draw.normal(size=(40, 64, 64)).astype(np.float32), np.zeros((40, 64, 64), np.uint8)
    label[10:24, 16:40, 20:44] = 1
    for kind, name, array in (
        ("imagesTr", f"box_{number:03}_0000", volume + label),
        ("labelsTr", f"box_{number:03}", label),
    ):
        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), os.path.join(place, kind, f"{name}.nii.gz"))
with open(os.path.join(place, "dataset.json"), "w") as file:
    json.dump(
        {
            "channel_names": {"0": "CT"},
            "labels": {"background": 0, "box": 1},
            "numTraining": 5,
            "file_ending": ".nii.gz",
        },
        file,
    )
folders = {f"nnUNet_{name}": name for name in ("raw", "preprocessed", "results")}
command = ["nnUNetv2_plan_and_preprocess", "-d", "1", "-c", "3d_fullres", "-np", "1", "-npfp", "1"]
subprocess.run(command, env={**os.environ, **folders}, check=True, stdout=sys.stderr)
