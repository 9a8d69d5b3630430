"""What libraries keep for the whole process is after a capture what it was before."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.distributed.process_groups import library_state_put_back  # noqa: E402


def test_what_was_there_is_put_back_and_what_came_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    there, came = ModuleType("deepspeed.comm.comm"), ModuleType("deepspeed.utils.groups")
    there.cdb = "before"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, there.__name__, there)
    monkeypatch.delitem(sys.modules, came.__name__, raising=False)
    linear = torch.nn.functional.linear
    with library_state_put_back():
        there.cdb = "of the capture"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, came.__name__, came)
        came._WORLD_GROUP, came._ALL_TO_ALL_GROUP = "a group", {"of": "it"}  # type: ignore[attr-defined]
        torch.nn.functional.linear = lambda *_: None
    assert there.cdb == "before"
    assert (came._WORLD_GROUP, came._ALL_TO_ALL_GROUP) == (None, {})
    assert torch.nn.functional.linear is linear
