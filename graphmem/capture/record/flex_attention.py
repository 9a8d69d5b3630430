"""``flex_attention`` outside of ``torch.compile``: PyTorch computes it as plain attention, with all scores in memory.

It is an operator of higher order, which asks the topmost mode how it runs there. Under the recorder its own dense
implementation runs (``sdpa_dense``, torch/_higher_order_ops/flex_attention.py), operator by operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from graphmem.base.environment import having
from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.record.started_threads import let_recorder_run
from graphmem.diagnostics import Code
from graphmem.torch_names import private

_LOST = "flex_attention is followed in compiled code alone"
_OPERATORS: tuple[Any, ...] = (
    private("torch._higher_order_ops.flex_attention", _LOST),
    private("torch._higher_order_ops.flex_attention_backward", _LOST),
)
_TRACED = Code.FLEX_TRACED.about()
_DENSE: Any = private("torch._C.DispatchKey.CompositeExplicitAutograd", _LOST)


@contextlib.contextmanager
def flex_attention_followed() -> Iterator[None]:
    """Let the recorder run the operator and its gradient as a card does. For all captures of the process."""
    for operator in _OPERATORS:
        let_recorder_run(operator, _under(operator.py_kernels[_DENSE]))
    yield


def _under(dense: Callable[..., object]) -> Callable[..., object]:
    """``dense`` under the recording mode, as part of a decomposition."""

    def run(mode: RecordingMode, *args: object, **kwargs: object) -> object:
        mode.recorder.assumed[_TRACED] += 1
        with having(mode, in_decomposition=True), mode:
            return dense(*args, **kwargs)

    return run
