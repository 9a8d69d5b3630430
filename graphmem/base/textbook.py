"""The usual formulas of training memory, as papers and guides give them: to stand beside a simulation.

Model states: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 3 and figure 1) counts for each of P parameters
the weight, its gradient and the optimizer's state: 2 + 2 + 12 bytes with Adam in mixed precision (a copy, a momentum
and a variance in fp32), and divides by the N processes the parts that a stage shares out: the optimizer's state (1),
gradients too (2), weights too (3). Without a copy of its own the optimizer's states are of the weights' precision.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198, equations 1 to 6): a layer of a transformer keeps
s b h (34 + 5 a s / h) bytes in 16 bits, 34 of them where attention is recomputed or fused, 2 where the layer is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: What a process shares out to the others, by stage: optimizer's state, gradients, weights.
SHARED_OUT = {0: (False, False, False), 1: (True, False, False), 2: (True, True, False), 3: (True, True, True)}
#: States of a parameter's size that an optimizer keeps; others are taken for Adam.
OPTIMIZER_STATES = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "FusedAdam": 2, "DeepSpeedCPUAdam": 2,
    "Adagrad": 1, "RMSprop": 1, "Lion": 1, "SGD": 0,
}  # fmt: skip
_ADAM = "Adam"


@dataclass(frozen=True, slots=True)
class Transformer:
    """The sizes in the formula of activations: of one process's micro-batch, and of a model of equal layers."""

    layers: int
    hidden: int
    heads: int
    batch: int
    seq_len: int
    fused_attention: bool
    recomputes: bool

    def activation_bytes(self) -> int:
        """Of all layers, in 16 bits."""
        tokens = self.seq_len * self.batch * self.hidden * self.layers
        if self.recomputes:
            return 2 * tokens
        scores = 0 if self.fused_attention else 5 * self.heads * self.seq_len * self.seq_len * self.batch * self.layers
        return 34 * tokens + scores

    def words(self) -> str:
        """The formula, and its numbers."""
        name = "2sbhL" if self.recomputes else "34sbhL" if self.fused_attention else "sbhL(34 + 5as/h)"
        numbers = f"s={self.seq_len}, b={self.batch}, h={self.hidden}, a={self.heads}, L={self.layers}"
        return f"{name}, {numbers}"


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model as a framework shares it out: ``parameters`` of the whole, over ``ranks`` processes by a ``stage`` of
    :data:`SHARED_OUT`; bytes of a weight and a gradient, and whether the optimizer has an fp32 copy of its own.
    ``buckets``: elements of the framework's buffers, by the option that sizes them."""

    framework: str
    parameters: int
    ranks: int
    stage: int
    weight_bytes: int
    has_copy: bool
    transformer: Transformer | None = None
    buckets: tuple[tuple[str, int], ...] = ()

    def state_bytes(self, optimizer: str) -> int:
        """Weights, gradients and the optimizer's state of one process."""
        return sum(size // (self.ranks if shares else 1) for size, shares in self._parts(optimizer))

    def _parts(self, optimizer: str) -> list[tuple[int, bool]]:
        shares_state, shares_gradients, shares_weights = SHARED_OUT[self.stage]
        each = self._bytes_of_state(optimizer)
        return [
            (self.parameters * self.weight_bytes, shares_weights),
            (self.parameters * self.weight_bytes, shares_gradients),
            (self.parameters * each, shares_state),
        ]

    def _bytes_of_state(self, optimizer: str) -> int:
        states = OPTIMIZER_STATES.get(optimizer, OPTIMIZER_STATES[_ADAM])
        return 4 + 4 * states if self.has_copy else self.weight_bytes * states

    def words(self, optimizer: str) -> str:
        """The formula with its numbers: ``16P/N, P=112,731,136, N=8``."""
        whole, shared = 0, 0
        for size, shares in zip(
            (self._bytes_of_state(optimizer), self.weight_bytes, self.weight_bytes), SHARED_OUT[self.stage], strict=True
        ):
            whole, shared = (whole, shared + size) if shares else (whole + size, shared)
        terms = " + ".join(filter(None, (f"{whole}P" if whole else "", f"{shared}P/N" if shared else "")))
        return f"{terms}, P={self.parameters:,}" + (f", N={self.ranks}" if shared else "")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The make-up of a model, read from it once it is built and before any step: numbers of elements, no bytes.

    ``units`` are the parameters of each repeated block, which frameworks gather and recompute one at a time; ``saved``
    the elements a token that the linear layers of each block keep for their weights' gradients at least: one input for
    every width. The rest is known of transformers' models only: 0 elsewhere, and ``predicts``, the width of the
    distribution that a language model's loss is of. ``plans``: kinds of parallelism that the model has a plan for
    (``tp``, ``ep``, ``pp``)."""

    name: str
    parameters: int
    trainable: int
    units: tuple[int, ...] = ()
    unit_names: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()
    hidden: int = 0
    heads: int = 0
    key_value_heads: int = 0
    experts: int = 0
    experts_of_token: int = 0
    predicts: int = 0
    plans: tuple[str, ...] = ()

    @property
    def expert_layers(self) -> int:
        """Blocks with experts: all of them, where there are any."""
        return len(self.units) if self.experts else 0


#: Categories of a breakdown that the formulas count as model states.
_STATES = ("PARAMETER", "GRADIENT", "OPTIMIZER_STATE")


def compared(
    model: Sharded, optimizer: str, breakdown: Mapping[str, int], peaks: Mapping[str, int], largest: Sequence[Any]
) -> dict[str, Any]:
    """The formulas beside the simulation, as values: ``difference`` sums to the bytes reserved at the peak less the
    formula of model states. ``largest``: storages alive then that a formula does not count, ``bytes`` and ``source``
    each."""
    formula = model.state_bytes(optimizer)
    rest = {name: size for name, size in breakdown.items() if name not in (*_STATES, "CONTEXT") and size}
    found: dict[str, Any] = {
        "framework": model.framework,
        "optimizer": optimizer,
        "model_states": {"formula": model.words(optimizer), "bytes": formula},
        "simulated": {**peaks, "model_states_bytes": sum(breakdown[name] for name in _STATES)},
        "difference": {"MODEL_STATES": sum(breakdown[name] for name in _STATES) - formula, **rest},
        "beyond": [_beyond(model, one.bytes, one.source or one.operator) for one in largest],
    }
    if model.transformer is not None:
        found["activations"] = {
            "formula": model.transformer.words(),
            "bytes": model.transformer.activation_bytes(),
            "simulated_bytes": breakdown["ACTIVATION"],
            **asdict(model.transformer),
        }
    return found


def _beyond(model: Sharded, size: int, source: str) -> dict[str, Any]:
    """The row of a storage of ``size`` bytes that no formula counts, and the option that sets it, or ''."""
    option = next(
        (f"{name}={count:,}" for name, count in model.buckets if size in (2 * count, 4 * count)),
        "",
    )
    return {"bytes": size, "source": source, "option": option}
