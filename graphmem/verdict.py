"""Whether a run fits a card, and how sure that is: what its process holds beside the allocator is an interval."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from graphmem.devices import Device
from graphmem.figures import Figure, Loads
from graphmem.runtimes.base import Runs, Setting
from graphmem.summarize import fits_card
from graphmem.trace import Trace

#: Operators of PyTorch, of ONNX and of Keras for which cuDNN loads its engines. Attention loads none of those that
#: were measured.
_ASKS_CUDNN = re.compile(
    r"convolution|_conv_|(?<![A-Za-z])conv[123]d|Conv(Transpose|2D|3D)?$|cudnn_(rnn|conv)|_rnn|LSTM|GRU"
)


def loads_of(trace: Trace, ranks: tuple[int, ...], card: Device, eager: bool) -> Loads:
    """What a run of this trace makes a process load."""
    uses_cudnn = any(_ASKS_CUDNN.search(operator.name) for operator in trace.operators)
    return Loads(uses_cudnn, ranks, eager, card.cuda_version)


def loads_eagerly() -> bool:
    """Whether the environment makes CUDA load all kernels at once."""
    return os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def holding(setting: Setting, context_bytes: int) -> Setting:
    """The setting with a context of this size."""
    return replace(setting, device=replace(setting.device, context_bytes=context_bytes))


def is_sure(runs: Runs, context: Sequence[Figure], run: Callable[[int], Runs], setting: Setting) -> bool:
    """Whether the run fits, or does not, with the least and the most context too; ``run`` runs it with one of a size.

    It runs again only where the sizes leave it open: where it fits as it is with the most there is nothing to try, nor
    where what is live at once exceeds the card with the least.
    """
    device = setting.device
    room = device.capacity_bytes - device.others_bytes
    if fits_card(runs.main, runs.limited, device):
        size = sum(figure.most_bytes for figure in context)
        if runs.limited is None and runs.main.peak_reserved_bytes + size <= room:
            return True
    else:
        size = sum(figure.least_bytes for figure in context)
        if runs.main.peak_requested_bytes + size > room:
            return True
    if size == device.context_bytes:
        return True
    other = run(size)
    return fits_card(runs.main, runs.limited, device) == fits_card(
        other.main, other.limited, holding(setting, size).device
    )
