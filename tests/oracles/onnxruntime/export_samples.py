"""Export the three models that sessions are recorded of, their weights one repeating pattern, so that they pack well.

    python -m tests.oracles.onnxruntime.export_samples

Writes ``tests/golden/onnxruntime/models``. They are the questions of ``record_sessions``: names of modules become names
in the graph, so another name or another exporter means recording the sessions again. PyTorch 2.13 with onnxscript 0.7
writes the stored bytes.
"""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

from tests.support.onnx_samples import MODELS

#: Weights of fewer elements stay as they are.
_LARGE = 128


class UNet(nn.Module):
    """Three levels down and up, with skip connections by concatenation."""

    def __init__(self, channels: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [channels << level for level in range(depth)]
        self.d = nn.ModuleList(_twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.mid = _twice(widths[-1], 2 * widths[-1])
        self.u, self.t = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths):
            self.t.append(nn.ConvTranspose2d(2 * width, width, 2, 2))
            self.u.append(_twice(2 * width, width))
        self.o, self.p = nn.Conv2d(channels, 4, 1), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.d:
            x = block(x)
            skipped.append(x)
            x = self.p(x)
        x = self.mid(x)
        for up, block in zip(self.t, self.u, strict=True):
            x = block(torch.cat([up(x), skipped.pop()], 1))
        return self.o(x)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


class BertMini(nn.Module):
    """An encoder with its attention written out."""

    def __init__(self, words: int = 8000, width: int = 256, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.heads = heads
        self.emb, self.pos, self.ln = nn.Embedding(words, width), nn.Embedding(length, width), nn.LayerNorm(width)
        self.l = nn.ModuleList(_encoder_layer(width) for _ in range(4))
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]

        def split(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(t.shape[0], length, self.heads, -1).transpose(1, 2)

        x = self.ln(self.emb(ids) + self.pos(torch.arange(length)))
        for m in self.l:
            q, k, v = split(m["q"](x)), split(m["k"](x)), split(m["v"](x))
            attended = torch.softmax(q @ k.transpose(-1, -2) / 8.0, -1) @ v
            attended = attended.transpose(1, 2).reshape(x.shape[0], length, -1)
            x = m["n1"](x + m["o"](attended))
            x = m["n2"](x + m["f2"](nn.functional.gelu(m["f1"](x))))
        return self.head(x[:, 0])


def _encoder_layer(width: int) -> nn.ModuleDict:
    linear = {name: nn.Linear(width, width) for name in "qkvo"}
    return nn.ModuleDict(
        linear
        | {"n1": nn.LayerNorm(width), "f1": nn.Linear(width, 4 * width), "f2": nn.Linear(4 * width, width)}
        | {"n2": nn.LayerNorm(width)}
    )


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.c2, self.b2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.c3, self.b3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.ds = None
        if stride > 1 or inputs != outputs:
            self.ds = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x if self.ds is None else self.ds(x)
        x = torch.relu(self.b1(self.c1(x)))
        x = torch.relu(self.b2(self.c2(x)))
        return torch.relu(self.b3(self.c3(x)) + residual)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.p = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1)
        blocks, inputs = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(_Bottleneck(inputs, width, 4 * width, 1 if number else stride))
                inputs = 4 * width
        self.l = nn.Sequential(*blocks)
        self.fc = nn.Linear(2048, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.l(self.p(torch.relu(self.b(self.c(x))))).mean((2, 3)))


SAMPLES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet50": (ResNet50, lambda: torch.randn(2, 3, 224, 224)),
    "bert_mini": (BertMini, lambda: torch.randint(0, 8000, (2, 128))),
    "unet": (UNet, lambda: torch.randn(2, 3, 128, 128)),
}


def exported(name: str, folder: Path) -> onnx.ModelProto:
    """The model with a dynamic batch and patterned weights, without what the exporter says of its own."""
    torch.manual_seed(0)
    module, inputs = SAMPLES[name]
    path = folder / f"{name}.onnx"
    torch.onnx.export(
        module().eval(), (inputs(),), path, input_names=["input"], output_names=["output"], opset_version=18,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=256)},), dynamo=True, external_data=False,
        verbose=False,
    )  # fmt: skip
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        count = int(np.prod(tensor.dims))
        if tensor.data_type == onnx.TensorProto.FLOAT and count >= _LARGE:
            tensor.raw_data = ((np.arange(count) % 7 + 1) * 0.003).astype(np.float32).tobytes()
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    for value in model.graph.value_info:
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    del model.metadata_props[:]
    return model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in SAMPLES:
            data = exported(name, Path(folder)).SerializeToString()
            (MODELS / f"{name}.onnx.gz").write_bytes(gzip.compress(data, 9, mtime=0))
            print(name, len(data), "bytes", flush=True)


if __name__ == "__main__":
    main()
