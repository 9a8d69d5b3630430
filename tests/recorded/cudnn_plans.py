"""What plans of cuDNN take, for described cards: ``ops/conv_plans.jsonl.gz`` (the first plan of its heuristics),
``ops/conv_largest.jsonl.gz`` (the largest workspace of all plans) and ``ops/rnn_spaces.jsonl.gz`` (recurrent networks).

GRAPHMEM_CUDNN names the library to ask, a cuDNN 9.20 with NVIDIA's wheels for cuBLAS and NVRTC beside it; no card, no
driver. Recording asks the questions of the lines that are there again.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphmem.cudnn.library import Cudnn, find_library
from graphmem.cudnn.plans import Convolution
from graphmem.devices import device_named
from tests import places

FOLDER = places.PYTORCH / "ops"
Line = dict[str, Any]
CARDS = {
    "h200": "H200", "h100pcie": "H100-PCIE", "a100": "A100", "rtx4090": "RTX-4090", "rtx3090": "RTX-3090",
    "t4": "T4", "b200": "B200", "rtx5090": "RTX-5090",
}  # fmt: skip
DIRECTIONS = {"fwd": "forward", "bwd_data": "backward data", "bwd_weight": "backward weight"}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_WORKSPACES: dict[str, Callable[[Cudnn, Convolution], int | None]] = {
    "conv_plans": Cudnn.first_workspace,
    "conv_largest": Cudnn.largest_workspace,
}

_RECURRENT = "rnn_spaces"


def question(line: Line, direction: str) -> Convolution:
    """What a line asks of cuDNN in one direction."""
    side, taps, groups = line["HW"], line["R"], line["groups"]
    out = (side + 2 * line["pad"] - line.get("dil", 1) * (taps - 1) - 1) // line["stride"] + 1
    return Convolution(
        DIRECTIONS[direction],
        _DTYPES[line["dtype"]],
        (line["N"], line["C"], side, side),
        (line["K"], line["C"] // groups, taps, taps),
        (line["N"], line["K"], out, out),
        (line["stride"],) * 2,
        (line["pad"],) * 2,
        (line.get("dil", 1),) * 2,
        bool(line["channels_last"]),
        tf32=bool(line.get("tf32", 1)),
    )


def spaces(lines: list[Line], library: str) -> list[Line]:
    """The lines with the work and reserve spaces that this cuDNN tells for an H200."""
    from tests.oracles.cudnn.ask_rnn import Rnn

    card = device_named("H200")
    asked = Rnn(Path(find_library(library)), card.capability, card.sm_count)
    return [line | dict(zip(("workspace", "reserve"), asked.spaces(line), strict=True)) for line in lines]


def answered(lines: list[Line], family: str, library: str) -> list[Line]:
    """The lines with the answers of that cuDNN."""
    found = list(lines)
    for card, name in CARDS.items():
        with Cudnn(library, device_named(name)) as cudnn:
            for index, line in enumerate(lines):
                if line["card"] == card:
                    asked = {
                        direction: _WORKSPACES[family](cudnn, question(line, direction))
                        for direction in DIRECTIONS
                        if direction in line
                    }
                    found[index] = line | asked
    return found


class _Plans:
    """The three files as a kind of recording."""

    def record(self, arguments: list[str]) -> int:
        library = os.environ.get("GRAPHMEM_CUDNN")
        if not library:
            raise SystemExit("GRAPHMEM_CUDNN names the cuDNN to ask; see tests/oracles/cudnn/README.md")
        for family in arguments or (*_WORKSPACES, _RECURRENT):
            if family not in (*_WORKSPACES, _RECURRENT):
                raise SystemExit(f"{family!r} is none of {', '.join((*_WORKSPACES, _RECURRENT))}")
            path = FOLDER / f"{family}.jsonl.gz"
            lines = [json.loads(text) for text in gzip.decompress(path.read_bytes()).decode().splitlines()]
            found = spaces(lines, library) if family == _RECURRENT else answered(lines, family, library)
            texts = [json.dumps(line, separators=(",", ":")) for line in found]
            path.write_bytes(gzip.compress(("\n".join(texts) + "\n").encode(), 9, mtime=0))
            print(family, len(texts), "lines", flush=True)
        return 0

    def table(self, arguments: list[str]) -> int:
        print("held by tests/capture/kernels: python -m pytest tests/capture/kernels")
        return 0

    differ = table


KIND = _Plans()
