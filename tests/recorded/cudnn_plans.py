"""What plans of cuDNN take, for described cards: ``ops/conv_plans.jsonl.gz`` (the first plan of its heuristics),
``ops/conv_largest.jsonl.gz`` (the largest workspace of all plans) and ``ops/rnn_spaces.jsonl.gz`` (recurrent networks).

GRAPHMEM_CUDNN names the library to ask, a cuDNN 9.20 with NVIDIA's wheels for cuBLAS and NVRTC beside it; no card, no
driver. Recording asks the questions of the lines that are there again; ``record rnn_spaces COUNT SEED`` asks about so
many more networks.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphmem.cudnn import recurrent
from graphmem.cudnn.card import description
from graphmem.cudnn.library import Cudnn, find_library
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.predicted.recurrent import algorithm
from graphmem.cudnn.recurrent import GRU, LSTM, RELU, STANDARD, TANH, Network
from graphmem.devices import device_named
from tests import places

FOLDER = places.PYTORCH / "ops"
Line = dict[str, Any]
CARDS = {
    "h200": "H200", "h100pcie": "H100-PCIE", "a100": "A100", "rtx4090": "RTX-4090", "rtx3090": "RTX-3090",
    "t4": "T4", "b200": "B200", "rtx5090": "RTX-5090",
}  # fmt: skip
DIRECTIONS = {"fwd": "forward", "bwd_data": "backward data", "bwd_weight": "backward weight"}
MODES = {"RELU": RELU, "RNN": TANH, "LSTM": LSTM, "GRU": GRU}
_RECURRENT_DTYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def first_workspace(cudnn: Cudnn, convolution: Convolution) -> int | None:
    """Bytes that the first plan asks for; None if there is no plan."""
    sizes = cudnn.workspaces(convolution)
    return None if sizes is None else sizes[0]


_WORKSPACES: dict[str, Callable[[Cudnn, Convolution], int | None]] = {
    "conv_plans": first_workspace,
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


def network(line: Line) -> tuple[Network, tuple[int, int], bool]:
    """The network that a line asks about, the compute capability of its card, and whether it is trained."""
    card = device_named(CARDS[line.get("card", "h200")])
    capability = card.compute_capability
    assert capability is not None
    asked = Network(
        MODES[line["mode"]], STANDARD, _RECURRENT_DTYPES[line["dtype"]], line["steps"], line["batch"], line["inputs"],
        line["hidden"], line["projected"], line["layers"], line["directions"], dropout=bool(line.get("dropout")),
        lengths=tuple(line.get("lengths", ())),
    )  # fmt: skip
    chosen = algorithm(asked, capability, card.sm_count, forward=bool(line.get("forward", 1)))
    return replace(asked, algorithm=chosen), capability, bool(line["train"])


def spaces(lines: list[Line], library: str) -> list[Line]:
    """The lines with the work and reserve spaces that this cuDNN tells for their cards."""
    loaded = ctypes.CDLL(find_library(library))
    loaded.cudnnGetVersion.restype = ctypes.c_size_t
    version, found = int(loaded.cudnnGetVersion()), []
    for line in lines:
        asked, _, training = network(line)
        card = description(device_named(CARDS[line.get("card", "h200")]))
        told = recurrent.spaces(loaded, version, card, asked, training)
        found.append(line | dict(zip(("workspace", "reserve"), told, strict=True)))
    return found


def random_networks(count: int, seed: int) -> list[Line]:
    """Questions about recurrent networks of all kinds; ``record`` answers them."""
    draw = random.Random(seed)
    return [_random_network(draw) for _ in range(count)]


def _random_network(draw: random.Random) -> Line:
    mode, card = draw.choice(list(MODES)), draw.choice(list(CARDS))
    dtypes = [name for name in _RECURRENT_DTYPES if card != "t4" or name != "bf16"]
    line: Line = {
        "mode": mode,
        "steps": draw.choice((1, 2, 7, 16, 50, 127, 128, 300)),
        "batch": draw.choice((1, 2, 7, 8, 16, 17, 64, 96, 97, 128)),
        "inputs": draw.choice((1, 8, 33, 64, 128, 333, 512, 1024)),
        "hidden": draw.choice((1, 8, 33, 64, 100, 128, 192, 256, 333, 384, 512, 1024)),
        "layers": draw.choice((1, 1, 2, 3, 5)),
        "directions": draw.choice((1, 1, 2)),
        "dtype": draw.choice(dtypes),
        "card": card,
        "forward": draw.choice((0, 1)),
    }
    narrow = [width for width in (1, 8, 64) if width < line["hidden"]]
    line["projected"] = draw.choice(narrow) if mode == "LSTM" and narrow and draw.random() < 0.3 else 0
    line["train"] = 1 if not line["forward"] else draw.choice((0, 1))
    line["dropout"] = line["train"] and draw.choice((0, 0, 1))
    if draw.random() < 0.3:
        shorter = [draw.randint(1, line["steps"]) for _ in range(line["batch"] - 1)]
        line["lengths"] = sorted([line["steps"], *shorter], reverse=True)
    return line


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
        more: list[Line] = []
        if arguments[:1] == [_RECURRENT] and len(arguments) == 3:
            more = random_networks(*map(int, arguments[1:]))
            arguments = arguments[:1]
        for family in arguments or (*_WORKSPACES, _RECURRENT):
            if family not in (*_WORKSPACES, _RECURRENT):
                raise SystemExit(f"{family!r} is none of {', '.join((*_WORKSPACES, _RECURRENT))}")
            path = FOLDER / f"{family}.jsonl.gz"
            lines = [json.loads(text) for text in gzip.decompress(path.read_bytes()).decode().splitlines()] + more
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
