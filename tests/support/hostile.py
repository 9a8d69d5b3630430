"""Files that are made to run code, or to have other files read."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fuzz import samples
from tests.support import gguf

#: What configurations name that nobody may import or fetch.
_CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"architectures": ["pipeline"]},
    {"architectures": ["gotcha_module.Kind"], "auto_map": {"AutoModel": "gotcha_module.Kind"}},
    {"_attn_implementation": "gotcha/kernels"},
    {"attn_implementation": {"": "gotcha/kernels"}},
)


class Gotcha:
    """Makes the folder ``gotcha`` when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gotcha"

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def snapshots(folder: Path) -> Mapping[str, bytes]:
    """Memory snapshots that make a folder in ``folder`` where they are unpickled, in every protocol."""
    content = {"segments": [Gotcha(folder)], "device_traces": []}
    return {f"snapshot{protocol}.pickle": pickle.dumps(content, protocol) for protocol in range(6)}


def models(elsewhere: Sequence[str]) -> Mapping[str, bytes]:
    """ONNX files whose weights are said to be in files of these names."""
    found = {}
    for number, location in enumerate(elsewhere):
        proto = samples.external_model()
        for tensor in proto.graph.initializer:
            for entry in tensor.external_data:
                entry.value = location if entry.key == "location" else entry.value
        found[f"model{number}.onnx"] = proto.SerializeToString()
    return found


def configurations() -> Mapping[str, bytes]:
    """Configurations of models whose classes or kernels would come from elsewhere."""
    changed = (json.dumps(samples.HF_CONFIGS[0] | change).encode() for change in _CONFIGURATIONS)
    return {f"config{number}.json": content for number, content in enumerate(changed)}


def bombs() -> Mapping[str, bytes]:
    """Snapshots and GGUF files that are small and say that they are huge, deep, or something else."""
    metadata, tensors = samples.gguf_parts()
    sound = gguf.header(metadata, tensors)
    return {
        "deep.pickle": b"\x80\x04" + b"(" * 500_000 + b".",
        "long.pickle": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "many.gguf": sound[:8] + struct.pack("<QQ", 1 << 60, 1 << 60) + sound[24:],
        "name.gguf": sound[:24] + struct.pack("<Q", (1 << 64) - 1) + sound[32:],
        "sizes.gguf": gguf.header(metadata, [(name, kind, (1 << 62, 1 << 62)) for name, kind, _ in tensors]),
        "layers.gguf": gguf.header(metadata | {"llama.block_count": (1 << 32) - 1}, tensors),
        "pickle.gguf": pickle.dumps(Gotcha(Path("/nowhere"))),
    }
