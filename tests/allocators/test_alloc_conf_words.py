"""Any text given as PYTORCH_ALLOC_CONF is accepted or refused in words, never with a traceback."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.base import versions
from graphmem.errors import UsageError

alloc_conf = pytest.importorskip("graphmem.allocators.alloc_conf")

KEYS = st.sampled_from([*versions.ALLOCATOR_OPTIONS, "nonsense", ""])
VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["True", "False", "true", "[256:1,512:2,>:4]", "[", "]", "[1:2"]),
    st.sampled_from(["cudaMallocAsync", "native", "9" * 400]),
)
CONFS = st.lists(st.tuples(KEYS, st.sampled_from([":", ",", "=", ""]), VALUES).map("".join), max_size=4).map(",".join)


@given(CONFS | st.text(max_size=80))
def test_no_configuration_text_raises_anything_but_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        alloc_conf.parse_alloc_conf(text)
