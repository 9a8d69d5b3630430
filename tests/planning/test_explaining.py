"""An out-of-memory error explained from its words, from this process's record, and from a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import graphmem
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.planning.explaining import OomMessage
from graphmem.units import GIB, MIB
from tests.support.shapes import differences

_MESSAGE = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 15.00 GiB of which {free} is free. "
    "Process 1234 has 4.00 GiB memory in use. Including non-PyTorch memory, this process has {process} memory in use. "
    "Of the allocated memory {allocated} is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)


def _message(asked: str, free: str, cached: str, process: str = "14.00 GiB") -> str:
    return _MESSAGE.format(asked=asked, free=free, process=process, allocated="8.00 GiB", cached=cached)


def test_the_figures_of_the_message_are_read() -> None:
    answer = graphmem.explain_oom(RuntimeError(_message("2.00 GiB", "512.50 MiB", "100.00 MiB")))
    assert isinstance(answer, OomMessage)
    assert differences(answer.to_dict()) == []
    assert answer == OomMessage(
        asked_bytes=2 * GIB, capacity_bytes=15 * GIB, free_bytes=512 * MIB + MIB // 2, process_bytes=14 * GIB,
        allocated_bytes=8 * GIB, cached_bytes=100 * MIB,
    )  # fmt: skip
    assert "At least 1.40 GiB are missing" in str(answer)
    assert json.loads(answer.report("json"))["asked_bytes"] == 2 * GIB


@pytest.mark.parametrize(
    ("asked", "free", "cached", "process", "words"),
    [
        ("1.00 GiB", "512.00 MiB", "3.00 GiB", "14.00 GiB", "expandable_segments:True may be enough"),
        ("1.00 GiB", "900.00 MiB", "200.00 MiB", "14.00 GiB", "fragmentation is the cause"),
        ("1.00 GiB", "20.00 MiB", "20.00 MiB", "9.00 GiB", "Other processes hold 5.98 GiB"),
    ],
)
def test_the_cause_is_named(asked: str, free: str, cached: str, process: str, words: str) -> None:
    assert words in " ".join(str(graphmem.explain_oom(_message(asked, free, cached, process))).split())


def test_an_error_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match="no out-of-memory error of PyTorch: division by zero"):
        graphmem.explain_oom(ZeroDivisionError("division by zero"))
    with pytest.raises(graphmem.GraphmemError, match=r"cannot read nowhere\.pickle"):
        graphmem.explain_oom("nowhere.pickle")


def test_a_log_is_explained_by_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    first, last = _message("1.00 GiB", "0 bytes", "0 bytes"), _message("2.00 GiB", "512.50 MiB", "100.00 MiB")
    log.write_bytes(f"step 1 \u00b5\n{first}\nagain\n{last}\n".encode()[8:])  # its beginning is cut off in a letter
    assert graphmem.explain_oom(log) == graphmem.explain_oom(RuntimeError(last))
    said = CliRunner().invoke(cli, ["replay", str(log)])
    assert said.exit_code == 0
    assert said.output.startswith("OUT OF MEMORY: 2.00 GiB were asked for")
