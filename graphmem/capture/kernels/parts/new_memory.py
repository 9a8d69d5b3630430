"""New memory under ``torch.use_deterministic_algorithms(True)``: it is filled, so that reads of it are reproducible.

``resize_`` then makes a tensor of one element, only to set it to the grown storage (``fill_resize_deterministic_``,
ATen/native/Resize.h, 2.13). ``empty`` fills in place and takes nothing.
"""

from __future__ import annotations

import torch
import torch.utils.deterministic

from graphmem.capture.kernels.parts.script import Script


def scratch_of_deterministic_fill(script: Script, element_bytes: int) -> Script:
    """Add the scratch to the end of ``script``, after an output was resized: one element, where deterministic
    algorithms and ``fill_uninitialized_memory`` are on, else nothing. The same script is returned."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        script.scratch(element_bytes, "element of new memory")
    return script
