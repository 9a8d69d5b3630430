"""Weights of safetensors that are on the disk: their header is read, and small tensors that are no weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import examples

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from graphmem.capture.program.safetensors_files import SafeFile, saved_on_disk  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from tests.recorded.device import CARD, TORCH_VERSION  # noqa: E402


def _written(path: Path, tensors: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_weights_have_shapes_and_small_integers_their_values(tmp_path: Path) -> None:
    state = torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8)
    path = _written(tmp_path / "model.safetensors", {"weight": torch.ones(64, 32).bfloat16(), "state": state})
    seen: list[Any] = []

    def step(_: Any) -> None:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            assert sorted(file.keys()) == ["state", "weight"]
            assert file.metadata() == {"format": "pt"}
            piece = file.get_slice("weight")
            assert (piece.get_shape(), piece.get_dtype()) == ([64, 32], "BF16")
            seen.append(bytes(file.get_tensor("state").numpy()))
            seen.append(piece[...].to("cuda").device.type)

    trace = capture(step, source="x", device=CARD, torch_version=TORCH_VERSION).trace
    assert seen == [b'{"quant_type": "nf4"}', "cuda"]
    assert 64 * 32 * 2 in {storage.bytes for storage in trace.storages}


def test_weights_are_never_read(tmp_path: Path) -> None:
    """The file ends behind its header; what it says would be a terabyte."""
    header = json.dumps(
        {"weight": {"dtype": "F32", "shape": [1 << 19, 1 << 19], "data_offsets": [0, 1 << 40]}}
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("rb") as file:
        saved = saved_on_disk(file)
    assert saved is not None
    assert SafeFile(*saved).get_slice("weight").get_shape() == [1 << 19, 1 << 19]


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_damaged_file_is_left_to_safetensors(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    header = json.dumps({"n": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(12)
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    path.write_bytes(whole[: min(at, len(whole))] + noise)
    with path.open("rb") as file:
        saved = saved_on_disk(file)
    tensors = {} if saved is None else saved[0]
    assert all(min(tensor.shape, default=0) >= 0 for tensor in tensors.values())


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "I32", "shape": "1", "data_offsets": [0, 4]},
        {"dtype": "I32", "shape": [1]},
        7,
    ],
)
def test_a_wrong_description_is_left_to_safetensors(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with path.open("rb") as file:
        assert saved_on_disk(file) is None
