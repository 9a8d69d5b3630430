"""The outputs of backward operators, which an ``output_mask`` chooses."""

from __future__ import annotations

from collections.abc import Sequence

from graphmem.capture.kernels.parts.script import Script


class Gradients:
    """Gradients by their number in the mask. Masked ones are missing from the operator's output tensors."""

    def __init__(self, script: Script, mask: Sequence[bool]) -> None:
        wanted = [index for index, asked in enumerate(mask) if asked]
        self._script = script
        self._position = {index: position for position, index in enumerate(wanted)}
        self._made: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self._position

    def emit(self, *indices: int) -> bool:
        """Allocate those of them that are asked for and not made yet; whether there was one."""
        new = [index for index in indices if index in self._position and index not in self._made]
        self._made.update(new)
        self._script.outputs(*(self._position[index] for index in new))
        return bool(new)
