"""The recurrent networks of the recorded questions, the same for the recorder and the prediction."""

from __future__ import annotations

import warnings
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def warm_up() -> None:
    """cuDNN's generators for dropout, which the first network that wants them makes, exist from here on."""
    with torch.backends.cudnn.flags(enabled=True):
        torch.nn.LSTM(8, 8, 2, dropout=0.5, device="cuda")(torch.empty(2, 1, 8, device="cuda"))


def network(line: dict[str, Any]) -> torch.nn.Module:
    """The module that a line of ``ops/rnn.jsonl.gz`` asks about, on the host."""
    options: dict[str, Any] = {
        "num_layers": line["L"],
        "batch_first": bool(line["bf"]),
        "bidirectional": bool(line["bi"]),
        "bias": bool(line["bias"]),
        "dropout": line["drop"],
    }
    if line["proj"]:
        options["proj_size"] = line["proj"]
    if line["kind"] in ("RNN", "RELU"):
        options["nonlinearity"] = "tanh" if line["kind"] == "RNN" else "relu"
    kind = getattr(torch.nn, "RNN" if line["kind"] == "RELU" else line["kind"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dropout without a second layer
        module: torch.nn.Module = kind(line["I"], line["H"], **options).to(DTYPES[line["dt"]])
        return module.train(bool(line["train"]))
