"""The memory of cuDNN under kernels of the CUDA provider: its plans, asked of a library where there is one, else
predicted.

``core/providers/cuda/nn/conv.cc`` and ``conv_transpose.cc`` (1.20 on, with cuDNN 9) build one operation, take the first
plan of one list of cuDNN's heuristics that builds, and its workspace from the arena for the time of the call;
``cudnn_conv_algo_search`` names the list (EXHAUSTIVE: mode B, HEURISTIC: mode A, DEFAULT: the fallback list). Nothing
is timed, and ``cudnn_conv_use_max_workspace`` is not looked at. ``core/providers/cuda/rnn/cudnn_rnn_base.cc`` asks for
the spaces of one layer run by the standard algorithm, for inference.
"""

from __future__ import annotations

import atexit
import math
from dataclasses import field
from functools import cache
from pathlib import Path

from graphmem.base.records import dataclass
from graphmem.cudnn.library import Cudnn
from graphmem.cudnn.plans import FALLBACK, INSTANT, MODE_B, Convolution
from graphmem.cudnn.predicted.choice import choose_on
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.recurrent import states_bytes
from graphmem.cudnn.predicted.recurrent import workspace_bytes as recurrent_bytes
from graphmem.cudnn.predicted.workspaces import workspace_bytes
from graphmem.cudnn.recurrent import GRU, LSTM, RELU, STANDARD, TANH, Network
from graphmem.devices import Device, as_cuda
from graphmem.graph.model import ELEMENT_BITS
from graphmem.runtimes.onnxruntime.kernels.context import Context, as_text

SEARCHES = {"EXHAUSTIVE": MODE_B, "HEURISTIC": INSTANT, "DEFAULT": FALLBACK}
#: Alignment that cuDNN's frontend declares of every tensor, bytes (``Tensor_attributes``).
_ALIGNMENTS = (16, 16, 16)
#: How far plans that are predicted may be off: between no workspace and copies of all tensors, and a quarter more. Of
#: 969 shapes asked of 9.20 for an H200, 955 lie there.
LEAST, MOST = "least", "most"
_QUARTER_MORE = 1.25


@cache
def _asked(library: str | Path, card: Device) -> Cudnn:
    """One for all plans of this process: it takes seconds to load, and keeps its answers."""
    found = Cudnn(library, card)
    atexit.register(found.close)
    return found


@dataclass
class Libraries:
    """cuDNN on ``card``. ``library``: what to ask, None to predict; ``predicted``: shapes that were, with
    ``extreme`` at one end of what their plans may take. ``unmodelled``: (operator, key) of nodes whose kernel's room
    is not known."""

    card: Device
    search: str = "EXHAUSTIVE"
    tf32: bool = True
    pad_to_nc1d: bool = False
    library: str | Path | None = None
    extreme: str = ""
    predicted: set[Convolution] = field(default_factory=set)
    unmodelled: set[tuple[str, str]] = field(default_factory=set)
    _asked: Cudnn | None = None
    _sizes: dict[Convolution, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The card as a CUDA card, and the process that asks."""
        self.card = as_cuda(self.card)
        if self.library is not None:
            self._asked = _asked(self.library, self.card)

    def notes(self) -> list[str]:
        """Remarks on the answers."""
        return [] if self._asked is None else self._asked.notes()

    @property
    def capability(self) -> tuple[int, int]:
        """Of the card."""
        return self.card.capability

    # -- convolutions -------------------------------------------------------------------------------------------------

    def convolution_workspace(self, kernel: Context) -> int:
        """Bytes of the plan that runs a ``Conv`` or ``ConvTranspose`` node."""
        question = convolution_of(kernel, self)
        if 0 in question.input or 0 in question.output or 0 in question.filter:
            return 0
        if question not in self._sizes:
            found = None
            if self._asked is not None:
                found = self._asked.first_workspace(question, SEARCHES[self.search])
            if found is None:
                self.predicted.add(question)
                found = self._predict(question)
            self._sizes[question] = found
        return self._sizes[question]

    def _predict(self, question: Convolution) -> int:
        if self.extreme == LEAST:
            return 0
        found = self._by_trees(question)
        if self.extreme != MOST:
            return found
        values = math.prod(question.input) + math.prod(question.filter) + math.prod(question.output)
        return max(found, int(_QUARTER_MORE * values * ELEMENT_BITS[question.dtype] // 8))

    def _by_trees(self, question: Convolution) -> int:
        problem = Problem.of(question)
        direction = Direction(question.direction)
        if direction is Direction.FORWARD and problem.groups == problem.channels > 1:
            return 0  # 121 of 121 depthwise convolutions asked of 9.20; the trees know them channels last alone
        leaf = choose_on(self.card.limits, problem, direction)
        return 0 if leaf is None else workspace_bytes(leaf.form, problem, direction)

    # -- recurrent networks -------------------------------------------------------------------------------------------

    def recurrent_workspace(self, network: Network) -> int:
        """Bytes of work space for inference; reserve space is none then."""
        if self._asked is not None:
            spaces = self._asked.recurrent_spaces(network, training=False)
            if spaces is not None:
                return spaces[0]
        return recurrent_bytes(network, self.capability, training=False)

    def dropout_states(self) -> int:
        """Bytes of the generators of a dropout descriptor, which every recurrent kernel has."""
        return states_bytes(self.card.sm_count or 0, self.card.max_threads_per_sm)


def convolution_of(kernel: Context, libraries: Libraries) -> Convolution:
    """A node as its kernel describes it to cuDNN: rows of values are images of one column, or of one row with
    ``cudnn_conv1d_pad_to_nc1d``."""
    image, weight, output = kernel.shape(0), kernel.shape(1), kernel.output_shape()
    rank = len(image) - 2
    strides, dilations = (kernel.numbers(name, (1,) * rank) for name in ("strides", "dilations"))
    before, after = _paddings(kernel, strides, dilations)
    if rank == 1:
        first = libraries.pad_to_nc1d
        image, weight, output = ((*shape[:2], *_plane(shape[2:], 1, first)) for shape in (image, weight, output))
        strides, dilations = (_plane(steps, 1, first) for steps in (strides, dilations))
        before, after = (_plane(sizes, 0, first) for sizes in (before, after))
    transposed = kernel.node.op_type == "ConvTranspose"
    return Convolution(
        "backward data" if transposed else "forward",
        kernel.input().dtype,
        output if transposed else image,
        weight,
        image if transposed else output,
        strides,
        before,
        dilations,
        False,
        tf32=libraries.tf32,
        alignments=_ALIGNMENTS,
        padding_after=after,
        down_converts=True,
    )


def _plane(row: tuple[int, ...], other: int, is_first: bool) -> tuple[int, ...]:
    """A figure of a row with that of the other dimension, which comes first or last."""
    return (other, *row) if is_first else (*row, other)


def _paddings(
    kernel: Context, strides: tuple[int, ...], dilations: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding before and after each dimension; ``auto_pad`` gives what the shapes need (``ComputePad``,
    ``core/providers/common.h``)."""
    image, window, output = (shape[2:] for shape in (kernel.shape(0), kernel.shape(1), kernel.output_shape()))
    automatic, none = kernel.text("auto_pad", "NOTSET"), (0,) * (2 * len(window))
    if automatic in ("NOTSET", "VALID", ""):
        pads = none if automatic == "VALID" else kernel.numbers("pads", none)
        return pads[: len(window)], pads[len(window) :]
    if kernel.node.op_type == "ConvTranspose":
        image, output = output, image
    needed = [
        max(0, (o - 1) * s + (k - 1) * d + 1 - i)
        for i, k, o, s, d in zip(image, window, output, strides, dilations, strict=True)
    ]
    halves = tuple(size // 2 for size in needed)
    rest = tuple(size - half for size, half in zip(needed, halves, strict=True))
    return (halves, rest) if automatic == "SAME_UPPER" else (rest, halves)


_MODES = {"LSTM": LSTM, "GRU": GRU}


def network_of(kernel: Context, libraries: Libraries) -> Network:
    """A recurrent node as its kernel describes it to cuDNN: one layer, the standard algorithm."""
    steps, batch, inputs = kernel.shape()
    directions, _, hidden = kernel.shape(2)
    first = as_text((kernel.node.attributes.get("activations") or ["Tanh"])[0])
    mode = _MODES.get(kernel.node.op_type, RELU if first.lower() == "relu" else TANH)
    dtype = kernel.input().dtype
    return Network(mode, STANDARD, dtype, steps, batch, inputs, hidden, 0, 1, directions, tf32=libraries.tf32)
