"""Settings of JAX's GPU client: its environment variables, by their names.

Source: ``generate_pjrt_gpu_plugin_options`` (jaxlib/xla_client.py, 0.10) reads them; ``GpuAllocatorConfig`` and
``CreateBFCAllocator`` (xla/pjrt/gpu/gpu_helpers.{h,cc}) have the defaults and what follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from graphmem.allocators.tensorflow_bfc import BFCOptions
from graphmem.errors import UsageError

PREALLOCATE, FRACTION, ALLOCATOR = (
    "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR",
)  # fmt: skip
#: The deprecated name of :data:`FRACTION`, which most people know; both together are an error.
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
VARIABLES = (PREALLOCATE, FRACTION, OLD_FRACTION, ALLOCATOR)
#: What is accepted of :data:`ALLOCATOR`, and what it stands for here: the BFC allocator, or a pool of the driver.
#: ``platform`` is the BFC allocator too, as recorded of 0.10: without preallocation, up to the whole card.
ALLOCATORS = {"default": "bfc", "bfc": "bfc", "platform": "bfc", "cuda_async": "pool", "vmm": "pool"}


@dataclass(frozen=True, slots=True)
class JaxOptions:
    """``memory_fraction``: of the card's memory; ``allocator`` a value of :data:`ALLOCATORS`."""

    preallocate: bool = True
    memory_fraction: float = 0.75
    allocator: str = "bfc"

    def bfc(self) -> BFCOptions:
        """The options of the BFC allocator, which gives no region back: ``BFCAllocator::Options`` as they are."""
        return BFCOptions(allow_growth=not self.preallocate, garbage_collection=False)


def read_options(text: str, environment: Mapping[str, str]) -> JaxOptions:
    """The options of ``text``, such as ``XLA_PYTHON_CLIENT_PREALLOCATE=false,XLA_CLIENT_MEM_FRACTION=0.9``, and of the
    environment; a variable in the text wins. Raises :class:`UsageError` listing what is accepted."""
    given: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, value = _named(entry)
        if name in given:
            raise UsageError(f"{name} is given twice; give it once")
        given[name] = value
    fractions = (FRACTION, OLD_FRACTION)
    overruled = fractions if any(name in given for name in fractions) else ()
    values = {name: environment[name] for name in VARIABLES if name not in overruled and environment.get(name)} | given
    if all(values.get(name) for name in fractions):
        raise UsageError(f"JAX refuses {FRACTION} together with {OLD_FRACTION}, its old name; give the first")
    if values.get(ALLOCATOR, "").lower() == "platform":
        return JaxOptions(preallocate=False, memory_fraction=1.0)
    return JaxOptions(
        preallocate=values.get(PREALLOCATE, "true") not in ("false", "False", "0"),
        memory_fraction=_fraction(values.get(FRACTION) or values.get(OLD_FRACTION) or "0.75"),
        allocator=_allocator(values.get(ALLOCATOR, "default").lower()),
    )


def _named(entry: str) -> tuple[str, str]:
    match = re.fullmatch(r"(\w+)\s*[:=]\s*(.*)", entry)
    if match is None or match[1] not in VARIABLES:
        raise UsageError(f"JAX has no memory option {entry!r}; accepted, as NAME=VALUE: {', '.join(VARIABLES)}")
    return match[1], match[2]


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise UsageError(f"{FRACTION} is {text!r}; accepted: a number above 0, up to 1")
    return value


def _allocator(text: str) -> str:
    if text not in ALLOCATORS:
        raise UsageError(f"{ALLOCATOR} is {text!r}; accepted: {', '.join(ALLOCATORS)}")
    return ALLOCATORS[text]
