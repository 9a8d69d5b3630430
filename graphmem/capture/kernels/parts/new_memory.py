"""New memory under ``torch.use_deterministic_algorithms(True)``: it is filled, so that reads of it are reproducible.

``fill_resized`` is the fill of ``resize_`` (``fill_resize_deterministic_``, ATen/native/Resize.h, 2.13): a tensor of
one element is made, only to be set to the grown storage. ``empty`` fills in place and takes nothing.
"""

from __future__ import annotations

import torch
import torch.utils.deterministic

from graphmem.capture.kernels.parts.script import Script


def fill_resized(script: Script, element_bytes: int) -> Script:
    """After the birth of an output that was resized to its size, where ``fill_uninitialized_memory`` is on as by
    default; nothing in other modes."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        script.scratch(element_bytes, "element of new memory")
    return script
