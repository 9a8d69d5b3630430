"""Where a made-up handle of cuDNN has the fields of a card, in the order of cuDNN's own description."""

from __future__ import annotations

import ctypes

import pytest

from graphmem.cudnn import recurrent
from graphmem.cudnn.card import description
from graphmem.devices import device_named

#: By version: byte offsets, from the order of names in ``libcudnn_graph.so`` of that version. Those of 9.20 were found
#: before by trying every word.
_AT = {
    92000: {"multiProcessorCount": 28, "maxThreadsPerSM": 60, "supportCoopLaunch": 72, "deviceVer": 104},
    92800: {"multiProcessorCount": 28, "smCountOrigin": 32, "maxThreadsPerSM": 68, "supportCoopLaunch": 80,
            "totalGlobalMem": 88, "memoryBusWidth": 104, "deviceVer": 116},
}  # fmt: skip


@pytest.mark.parametrize("version", _AT)
def test_fields_lie_where_the_version_has_them(version: int) -> None:
    described = description(device_named("H200"))
    handle = recurrent._handle(version, described)
    for name, offset in _AT[version].items():
        kind = ctypes.c_int64 if name == "totalGlobalMem" else ctypes.c_int
        assert kind.from_buffer(handle, offset).value == described[name], name


def test_the_same_card_for_newer_versions() -> None:
    described = description(device_named("A100"))
    assert described["smCountOrigin"] == described["oversizedSharedMemoryPerBlock"] == 0
    assert bytes(recurrent._handle(92000, described)) != bytes(recurrent._handle(92800, described))
