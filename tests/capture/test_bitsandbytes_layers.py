"""4-bit and 8-bit layers of bitsandbytes in a capture; whole programs: :mod:`tests.capture.test_libraries_golden`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")

from torch import nn  # noqa: E402

from graphmem.capture.operators.bitsandbytes import NO_OUTLIERS  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.trace import EventKind  # noqa: E402
from tests.recorded.device import CARD, TORCH_VERSION  # noqa: E402

_N, _K = 1024, 512


def _captured(step: Any) -> Any:
    return capture(step, source="bitsandbytes", device=CARD, torch_version=TORCH_VERSION)


def _held(trace: Any) -> list[int]:
    """Bytes of the storages alive at the end."""
    freed = set(trace.subjects[trace.kinds == EventKind.FREE].tolist())
    return sorted(s.bytes for i, s in enumerate(trace.storages) if i not in freed and "workspace" not in s.label)


def _four_bit(**options: Any) -> nn.Module:
    import bitsandbytes

    return bitsandbytes.nn.Linear4bit(_K, _N, bias=False, compute_dtype=torch.bfloat16, **options).to("cuda")


def test_weights_are_four_bits_wide_with_nested_statistics() -> None:
    layers: list[nn.Module] = []
    trace = _captured(lambda _: layers.append(_four_bit(quant_type="nf4"))).trace
    blocks = _N * _K // 64
    # Packed weights, the table of 16 numbers, statistics in 8 bits with their own (a block of 256, a table of 256
    # numbers that the package keeps and one that the state keeps, an offset).
    assert _held(trace) == sorted([_N * _K // 2, 16 * 4, blocks, blocks // 256 * 4, 1024, 1024, 4])


def test_a_parameter_keeps_its_class_and_its_attributes_when_it_is_moved() -> None:
    import bitsandbytes

    def step(_: Any) -> None:
        layer = bitsandbytes.nn.Linear4bit(_K, _N, bias=False)
        before = layer.weight
        assert isinstance(before, bitsandbytes.nn.Params4bit)
        assert isinstance(before, nn.Parameter)
        assert type(before).__name__ == "Params4bit"
        assert before.device.type == "cpu"
        layer.cuda()
        assert layer.weight is before
        assert before.quant_state is not None
        assert before.device.type == "cuda"
        assert before.dtype is torch.uint8
        assert before.shape == (_N * _K // 2, 1)

    _captured(step)


@pytest.mark.parametrize(("rows", "fused"), [(4, True), (2048, False)])
def test_few_rows_are_multiplied_without_dequantised_weights(rows: int, fused: bool) -> None:
    """bitsandbytes chooses by shape and card (``backends/cuda/ops.py``)."""

    def step(_: Any) -> None:
        with torch.no_grad():
            _four_bit()(torch.empty(rows, _K, device="cuda", dtype=torch.bfloat16))

    sizes = {storage.bytes for storage in _captured(step).trace.storages}
    assert (_N * _K * 2 not in sizes) == fused


def test_outliers_of_eight_bits_are_assumed_and_said() -> None:
    import bitsandbytes

    def step(_: Any) -> None:
        layer = bitsandbytes.nn.Linear8bitLt(_K, _N, bias=False, has_fp16_weights=False, threshold=6.0).cuda()
        layer(torch.empty(8, _K, device="cuda", dtype=torch.float16))

    assert _captured(step).assumed[NO_OUTLIERS] == 1


def test_two_captures_of_one_process_do_not_share_tensors() -> None:
    for _ in range(2):
        _captured(lambda _: _four_bit(quant_type="nf4"))


_PROGRAM = """
import bitsandbytes, torch
CHOSEN = "cuda" if torch.cuda.is_available() else "cpu"
def run():
    assert CHOSEN == "cuda"
    layer = bitsandbytes.nn.Linear4bit(512, 512, bias=False).to(CHOSEN)
    layer(torch.ones(2, 512, device=CHOSEN, dtype=torch.bfloat16))
"""


def test_a_file_may_import_it_at_its_top(tmp_path: Path) -> None:
    """In a process of its own: the package cannot be imported a second time."""
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM, encoding="utf-8")
    analyse = f"import graphmem; print(graphmem.analyze({str(file)!r} + ':run', device='H200').allocated > 0)"
    done = subprocess.run([sys.executable, "-c", analyse], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip().endswith("True"), done.stderr[-2000:]
