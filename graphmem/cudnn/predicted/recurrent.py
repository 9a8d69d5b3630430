"""Work and reserve space of cuDNN's recurrent networks, in bytes, and the algorithm that PyTorch chooses.

``get_algo`` is that of ``aten/src/ATen/native/cudnn/RNN.cpp`` of PyTorch 2.13. The sizes are those that
``cudnnGetRNNTempSpaceSizes`` of cuDNN 9.20 gives for described cards of compute capability 7.5 to 12.0; their parts
were found by asking for many thousands of networks, and give every one of these answers to the byte
(``tests/golden/pytorch/2.13/ops/rnn_spaces.jsonl.gz`` keeps some). What each part is for is what its size suggests.

Not known: fp32 without TF32 (``torch.backends.cudnn.allow_tf32 = False``), which takes other buffers: the sizes are
those of TF32, of which :func:`is_certain` is false.
"""

from __future__ import annotations

from graphmem.base.numbers import round_up
from graphmem.cudnn.recurrent import (
    GRU,
    LSTM,
    PERSIST_STATIC,
    PERSIST_STATIC_SMALL_H,
    RELU,
    STANDARD,
    TANH,
    Network,
)
from graphmem.devices.capabilities import limits_of

#: Gates of a cell by mode.
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
#: ``use_rnn_persist_small_h``: the most hidden values, (forward, backward).
_SMALL = {RELU: (384, 256), TANH: (384, 256), LSTM: (192, 128), GRU: (192, 128)}
#: ``use_persist_device_heuristics``: multiprocessors and sequences; where many sequences are slow with a wide state.
_MANY_SMS, _MOST_BATCH, _MUCH_BATCH, _WIDE = 98, 128, 96, 896

#: Bytes of one of cuDNN's random number generators, and how many make a block (asked of 9.20, which reads nothing but
#: these two figures of the device).
_GENERATOR_BYTES, _GENERATORS = 24, 512
_ALIGNMENT = 32
_CUBLAS_WORKSPACE = 8 << 20
_HEADER = 256
#: Values that a layer keeps of every step for its backward pass, as multiples of the state, each a buffer.
_KEPT = {RELU: (1,), TANH: (1,), LSTM: (4, 1), GRU: (6,)}
#: The gates of one direction alone are computed for so many steps at once.
_STEPS_AT_ONCE = 256
#: Persistent kernels go back with so many states of every step, and so many more by mode.
_PERSISTENT_STATES = 8
_PERSISTENT_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 6}
#: The persistent kernels for wide states have buffers for at least so many rows, less the sequences.
_PERSISTENT_ROWS = 2432


def algorithm(network: Network, capability: tuple[int, int], sm_count: int, *, forward: bool) -> int:
    """``get_algo``: how PyTorch asks cuDNN to run the network, whatever ``network.algorithm`` is."""
    if network.projected or network.lengths or network.dtype == "float64":
        return STANDARD
    if network.hidden <= _SMALL[network.mode][0 if forward else 1]:
        return PERSIST_STATIC_SMALL_H
    if network.dtype == "float16" and _persists(network) and _suits(network, capability, sm_count):
        return PERSIST_STATIC
    return STANDARD


def _persists(network: Network) -> bool:
    """``use_persist_common_heuristics``."""
    one = network.layers == network.directions == 1
    return one and network.hidden <= 1024 and network.hidden % 128 == network.inputs % 128 == 0


def _suits(network: Network, capability: tuple[int, int], sm_count: int) -> bool:
    """Whether persistent kernels suit the network (``use_persist_device_heuristics``, of capability 7.5 and later)."""
    if not limits_of(capability).rnn_persists or sm_count < _MANY_SMS or network.mode == GRU:
        return False
    batch = network.batch
    wide = network.mode != LSTM and batch >= _MUCH_BATCH and network.hidden >= _WIDE
    return batch % 8 == 0 and batch <= _MOST_BATCH and not wide


def states_bytes(sm_count: int, max_threads_per_sm: int) -> int:
    """``cudnnDropoutGetStatesSize``: a generator of 24 bytes for every thread that the card can hold, in blocks."""
    return round_up(sm_count * max_threads_per_sm, _GENERATORS) * _GENERATOR_BYTES


def is_certain(network: Network) -> bool:
    """Whether the sizes below were ever compared with cuDNN's."""
    return not network.multiplies_fully


def reserve_bytes(network: Network) -> int:
    """Reserve space: what every layer keeps, the outputs between layers, with a projection the states before it, and
    a bit for every value that dropout may take, padded ones too."""
    sizes = _Sizes(network)
    kept = sum(sizes.steps(parts * network.layers) for parts in _KEPT[network.mode])
    kept += sizes.steps(network.layers - 1)
    if network.projected:
        kept += sizes.steps(network.layers) + sizes.steps(network.layers, network.projected)
    if network.dropout:
        bits = network.directions * network.steps * network.batch * network.outputs
        kept += (network.layers - 1) * network.directions * _aligned(-(-bits // 8))
    return kept + _HEADER


def workspace_bytes(network: Network, capability: tuple[int, int], *, training: bool) -> int:
    """Work space: a cuBLAS workspace for every layer and direction, a copy of the weight matrices, and what the
    forward or the backward pass takes, whichever is more."""
    sizes = _Sizes(network, _is_persistent(network, capability))
    passes = max(_forward_part(sizes), _backward_part(sizes, capability) if training else 0)
    lengths = 0 if network.lengths else _aligned(2 * 4 * network.batch)
    return _cublas(network, capability) + _aligned(_weights(network) * network.itemsize) + passes + lengths + _HEADER


def _is_persistent(network: Network, capability: tuple[int, int]) -> bool:
    """bfloat16 and double have no persistent kernels, a projection neither; on Blackwell only small states have."""
    if network.algorithm == STANDARD or network.projected or network.dtype not in ("float32", "float16"):
        return False
    return network.algorithm == PERSIST_STATIC_SMALL_H or limits_of(capability).rnn_persistent_kernels


def _cublas(network: Network, capability: tuple[int, int]) -> int:
    """Layers that run one after the other have none on Ampere and Ada."""
    if network.layers > 1 and network.directions == 1 and not limits_of(capability).rnn_layer_workspaces:
        return 0
    return network.layers * network.directions * _CUBLAS_WORKSPACE


def _weights(network: Network) -> int:
    """Values of the weight matrices."""
    given, gates = network.directions * network.outputs, GATES[network.mode]
    inputs = network.inputs + (network.layers - 1) * given + network.layers * network.outputs
    return network.directions * (gates * network.hidden * inputs + network.layers * network.hidden * network.projected)


def _forward_part(sizes: _Sizes) -> int:
    """Bytes that the forward pass takes, as gates, states and padding."""
    network = sizes.network
    gates, two = GATES[network.mode], network.directions == 2
    if sizes.persistent:
        taken = sizes.steps(gates) + sizes.values(4 * gates * network.rows * network.hidden)
    else:
        rows = network.rows if two else min(network.rows, _STEPS_AT_ONCE * network.batch)
        taken = sizes.values(network.directions * rows * gates * network.hidden)
    taken += sizes.states(1 if sizes.persistent else gates)
    if two:
        taken += sizes.steps(2)
    elif network.dropout:
        taken += sizes.steps(1)
    if network.projected:
        taken += sizes.steps(1)
    return taken + sizes.padded()


def _backward_part(sizes: _Sizes, capability: tuple[int, int]) -> int:
    """Bytes that the backward pass takes, in the same memory as the forward pass."""
    network = sizes.network
    taken = sizes.states(1) + 2 * sizes.padded()
    if network.directions == 2:
        taken += sizes.values(4 * network.rows * max(network.hidden, network.inputs))
    else:
        taken += max(sizes.steps(1), sizes.values(network.rows * network.inputs))
    if network.layers == 1:
        taken += sizes.steps(1)
    elif network.directions == 2 or sizes.persistent:
        taken += sizes.steps(2)
    else:
        rows = min(network.rows, network.batch * _pipelined_steps(network, capability))
        taken += sizes.values(rows * network.hidden)
    if sizes.persistent:
        taken += sizes.values(_PERSISTENT_GATES[network.mode] * network.rows * network.hidden)
        taken += sizes.values(_persistent_rows(network) * network.hidden)
    return taken + (sizes.steps(1) if network.projected else 0)


def _pipelined_steps(network: Network, capability: tuple[int, int]) -> int:
    """Steps that layers of one direction have in flight: some of each layer, fewer with many sequences."""
    batch, steps = network.batch, 2
    for most, at_once in ((1, 32), (8, 16), (16, 8), (96, 4)):
        if batch <= most:
            steps = at_once
            break
    if network.steps >= 128 and limits_of(capability).rnn_long_pipelines:
        steps = max(steps, 8)
    return network.layers * steps + max(steps, 8)


def _persistent_rows(network: Network) -> int:
    rows = _PERSISTENT_STATES * network.rows
    return max(rows, _PERSISTENT_ROWS + network.batch) if network.algorithm == PERSIST_STATIC else rows


class _Sizes:
    """Bytes of buffers of one network, each rounded up."""

    def __init__(self, network: Network, persistent: bool = False) -> None:
        self.network = network
        self.persistent = persistent

    def values(self, count: int) -> int:
        return _aligned(count * self.network.itemsize)

    def steps(self, count: int, width: int = 0) -> int:
        """``count`` states of every step in every direction."""
        network = self.network
        return self.values(count * network.directions * network.rows * (width or network.hidden))

    def of_layers(self, count: int, width: int = 0) -> int:
        """``count`` states of one step in every layer and direction."""
        network = self.network
        return self.values(count * network.layers * network.directions * network.batch * (width or network.hidden))

    def states(self, gates: int) -> int:
        """Bytes that all layers hold of one step: the gates, for an LSTM its two states, for two directions more."""
        network = self.network
        counts = [2 if self.persistent and network.directions == 1 else gates]
        counts += [2] * (network.mode == LSTM) + [2] * (network.directions == 2)
        return sum(map(self.of_layers, counts))

    def padded(self) -> int:
        """Padded input, output and states are packed for the kernels, which know packed ones alone."""
        network = self.network
        if network.lengths:
            return 0
        taken = self.values(network.rows * network.inputs) + self.steps(1, network.outputs)
        taken += 2 * self.of_layers(1, network.outputs)
        return taken + (2 * self.of_layers(1) if network.mode == LSTM else 0)


def _aligned(size: int) -> int:
    return round_up(size, _ALIGNMENT)
