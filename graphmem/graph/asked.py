"""The part of a question that is about the inputs of ONNX files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from graphmem.base.records import dataclass

#: The smallest and the largest number of a dimension.
Range = tuple[int, int]


@dataclass(frozen=True)
class Asked:
    """The user's values for the inputs of ONNX files.

    batch: the batch dimension.
    seq_len: every dimension that is the length of a sequence.
    dims: named dimensions, each a number or the (smallest, largest) of a range.
    input_shapes: whole inputs.
    input_values: elements of small inputs, one for all of them or as many as there are.
    trip_count: how often loops run at most whose end data decides.
    selected: the share of candidates that operators select whose data decides; None: all.
    """

    batch: int | None = None
    seq_len: int | None = None
    dims: Mapping[str, int | Range] = field(default_factory=dict)
    input_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    input_values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    trip_count: int | None = None
    selected: float | None = None

    def ends(self) -> tuple[Asked, ...]:
        """The same with every range at its smallest and at its largest; alone where there is no range."""
        if not any(isinstance(value, tuple) for value in self.dims.values()):
            return (self,)
        return tuple(
            replace(self, dims={name: v[end] if isinstance(v, tuple) else v for name, v in self.dims.items()})
            for end in (0, 1)
        )
