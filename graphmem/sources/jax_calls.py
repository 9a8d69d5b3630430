"""Arrays without memory, and what follows a JAX program that works on them. Imported where JAX is; written for 0.10.

JAX hands every operation to the current :class:`jax.core.Trace`. This one calls nothing: it notes each call, which
arrays go in and come out, and when Python lets them go, and has XLA compile the functions that are called.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, dtypes, pjit, source_info_util, xla_bridge
from jax._src.interpreters import mlir, pxla
from jax.sharding import SingleDeviceSharding

from graphmem.base.environment import having
from graphmem.errors import SourceError
from graphmem.runtimes.jax.assignment import read_assignment

#: Texts of XLA, by the ends of their names.
_TEXTS = ("buffer-assignment.txt", "buffer-assignment-values.txt", "live-range.txt", "gpu_after_optimizations.txt")
#: Figures of ``memory_analysis()``, XLA's own.
_ANALYSIS = ("argument", "output", "alias", "temp", "generated_code")

source_info_util.register_exclusion(str(Path(__file__).parent))  # source lines are the program's own


class _Buffer:
    """Bytes on the card, held by as many arrays as refer to them; ``calls`` hears when nobody does any more."""

    def __init__(self, calls: Any, number: int) -> None:
        self.number = number
        self.is_gone = False
        weakref.finalize(self, calls.events.append, ["drop", number]).atexit = False


class Array(core.Tracer):  # type: ignore[misc]
    """An array of the card. What the program reads of it is zeros."""

    __slots__ = ("buffer", "placed")

    def __init__(self, calls: Any, aval: Any, buffer: _Buffer, placed: Any) -> None:
        super().__init__(calls, aval)
        self.buffer, self.placed = buffer, placed

    @property
    def is_gone(self) -> bool:
        return self.buffer.is_gone

    @property
    def sharding(self) -> Any:
        return self.placed

    def block_until_ready(self) -> Any:
        return self

    def _read(self) -> Any:
        self._trace.reads += 1
        return np.zeros(self.aval.shape, self.aval.dtype)

    def __array__(self, *_: object, **__: object) -> Any:
        return self._read()

    def __bool__(self) -> bool:
        self._trace.decisions += 1
        return bool(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    __index__ = __int__

    def item(self, *_: int) -> Any:
        return self._read().item()

    def tolist(self) -> Any:
        return self._read().tolist()

    def __repr__(self) -> str:
        return f"Array({self.aval.str_short()})"

    def __format__(self, spec: str) -> str:
        return format(self._read()[()], spec)


class Calls(core.Trace):  # type: ignore[misc]
    """Follows a program: ``events`` in order, and the functions that were ``compiled`` for it."""

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__()
        self.before: list[list[Any]] = []  # arrays that were there before the program began
        self.events: list[list[Any]] = []
        self.compiled: list[dict[str, Any]] = []
        self.reads = self.decisions = 0
        self._devices = devices
        self._alone = SingleDeviceSharding(devices[0])
        self._numbers = itertools.count()
        self._places: dict[int, tuple[Any, int, Any]] = {}  # by computation, which is kept for its identity
        self._constants: dict[int, tuple[Any, Array]] = {}

    # --- arrays

    def array(self, aval: Any, placed: Any, label: str, kind: str) -> Array:
        """A new array on the card, sent from the host."""
        made = Array(self, aval, _Buffer(self, next(self._numbers)), placed)
        events = self.before if kind == "constant" else self.events
        events.append(["put", made.buffer.number, _bytes_of(aval, placed), label, kind])
        return made

    def arrays_of(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """The arguments with arrays of the card for shapes and JAX's arrays; NumPy's stay on the host."""
        names = _names(function, len(arguments))

        def placed(path: Any, leaf: Any) -> Any:
            if isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array)):
                aval = core.shaped_abstractify(leaf)
                label = names[path[0].idx] + jax.tree_util.keystr(path[1:])
                return self.array(aval, self._sharding_of(leaf), label, "argument")
            return leaf

        return list(jax.tree_util.tree_map_with_path(placed, list(arguments)))

    def carry(self, old: Any, new: Any) -> None:
        """Arrays take the places of others in the program."""
        for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            if isinstance(one, Array) and isinstance(other, Array):
                self.events.append(["carry", one.buffer.number, other.buffer.number])

    def _sharding_of(self, leaf: Any) -> Any:
        given = getattr(leaf, "sharding", None)
        if getattr(given, "memory_kind", None) == "pinned_host":
            raise SourceError("an argument is in the host's memory (memory_kind pinned_host), which is not followed")
        if given is None or len(given.device_set) == 1:
            return self._alone
        return given

    def stage_value(self, value: Any) -> Any:
        return value

    # --- calls

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        with core.set_current_trace(self):
            return self._dispatched(primitive, values, params)

    def _dispatched(self, primitive: Any, values: Any, params: Any) -> Any:
        if primitive is pjit.jit_p:
            return self._call(list(values), params)
        if primitive.name in ("random_wrap", "random_unwrap"):  # another look at the same bytes
            [value] = values
            if isinstance(value, Array):
                aval, _ = primitive.abstract_eval(value.aval, **params)
                return Array(self, aval, value.buffer, value.placed)
        if primitive is dispatch.device_put_p:
            return [self._put(value) for value in values]
        return dispatch.xla_primitive_callable(primitive, **params)(*values)

    def process_call(self, primitive: Any, function: Any, values: Any, params: Any, /) -> Any:
        with core.set_current_trace(self):
            return function.call_wrapped(*values)

    def process_custom_jvp_call(self, primitive: Any, function: Any, jvp: Any, values: Any, /, **_: Any) -> Any:
        return self.process_call(primitive, function, values, {})

    def process_custom_vjp_call(
        self, primitive: Any, function: Any, fwd: Any, bwd: Any, values: Any, /, **_: Any
    ) -> Any:
        return self.process_call(primitive, function, values, {})

    def _put(self, value: Any) -> Any:
        return value if isinstance(value, Array) else self.array(core.typeof(value), self._alone, "", "host")

    def _constant(self, value: Any) -> Array:
        """An array that the program's file made, and that is on the card from then on."""
        if id(value) not in self._constants:
            array = self.array(core.typeof(value), self._alone, "made before", "constant")
            self._constants[id(value)] = (value, array)
        return self._constants[id(value)][1]

    def _given(self, value: Any) -> Array:
        if isinstance(value, Array):
            return value
        if isinstance(value, jax.Array):
            return self._constant(value)
        return self.array(core.typeof(value), self._alone, "from the host", "host")

    def _call(self, values: list[Any], params: Any) -> list[Any]:
        given = [self._given(value) for value in values]
        for value in params["jaxpr"].consts:
            if isinstance(value, jax.Array):  # closed over: a constant of the module, and still an array
                self._constant(value)
        types = [pjit.MetaTy(one.aval, one.placed, None, True, False) for one in given]
        with having(xla_bridge, canonicalize_platform=lambda _: "cuda"):  # it knows platforms that are there
            computation = pjit._resolve_and_lower(
                types,
                **params,
                lowering_platforms=("cuda",),
                lowering_parameters=mlir.LoweringParameters(),
                pgle_profiler=None,
            )
        number, executable = self._executable(computation)
        given = [*map(self._constant, computation.const_args), *given]
        kept = sorted(computation.compile_args["kept_var_idx"])
        inputs = [given[position].buffer for position in kept]
        out = [
            Array(self, aval, _Buffer(self, next(self._numbers)), placed)
            for aval, placed in zip(params["jaxpr"].out_avals, executable._out_shardings, strict=True)
        ]
        self.events.append(["call", number, [one.number for one in inputs], [one.buffer.number for one in out]])
        for parameter in self.compiled[number]["donated"]:
            inputs[parameter].is_gone = True
        return out

    def _executable(self, computation: Any) -> tuple[int, Any]:
        if id(computation) not in self._places:
            executable, document = self._compiled(computation)
            self._places[id(computation)] = (computation, len(self.compiled), executable)
            self.compiled.append(document)
        return self._places[id(computation)][1:]

    def _compiled(self, computation: Any) -> tuple[Any, dict[str, Any]]:
        arguments = computation.compile_args
        arguments["host_callbacks"] = []  # nobody calls back
        if arguments["backend"] is not self._devices[0].client:  # it takes no array, and so none of the card
            arguments["backend"] = self._devices[0].client
            computation._device_list = pxla._create_device_list(tuple(self._devices[:1]))
        with tempfile.TemporaryDirectory() as folder:
            options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **_autotuning()}
            executable = computation.compile(compiler_options=options)
            document = _read_dump(Path(folder), computation.stablehlo().operation.attributes["sym_name"].value)
        if "product" in document["kinds"]:
            other = computation.compile(compiler_options={**_autotuning(), "xla_gpu_enable_triton_gemm": False})
            stats = other.xla_executable.get_compiled_memory_stats()
            document["other_temporary_bytes"] = stats.temp_size_in_bytes
        stats = executable.xla_executable.get_compiled_memory_stats()
        document["xla"] = {name: getattr(stats, f"{name}_size_in_bytes") for name in _ANALYSIS}
        document["xla"]["peak"] = stats.peak_memory_in_bytes
        return executable, document


def _autotuning() -> dict[str, Any]:
    """Nothing is tried out, as there is no card; unless XLA_FLAGS says otherwise."""
    return {} if "xla_gpu_autotune_level" in os.environ.get("XLA_FLAGS", "") else {"xla_gpu_autotune_level": 0}


def _bytes_of(aval: Any, placed: Any) -> int:
    """Bytes on each card."""
    shape = placed.shard_shape(aval.shape) if aval.shape else aval.shape
    physical = core.physical_aval(aval.update(shape=shape))
    bits: int = math.prod(physical.shape) * dtypes.itemsize_bits(physical.dtype)
    return -(-bits // 8)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of positional arguments."""
    with contextlib.suppress(TypeError, ValueError):
        found = [name for name, one in inspect.signature(function).parameters.items() if one.kind < one.VAR_POSITIONAL]
        if len(found) >= count:
            return found
    return [f"arguments[{number}]" for number in range(count)]


# --- what XLA writes --------------------------------------------------------------------------------------------------


def _read_dump(folder: Path, name: str) -> dict[str, Any]:
    """The assignment of the function's module; others in the folder are of parts that were tried out."""
    found = read_assignment(*(_text(folder, name, ending) for ending in _TEXTS))
    donated = [row.parameter for row in found.allocations if row.parameter is not None and row.output is not None]
    return {"name": name, "donated": donated, **found.document()}


def _text(folder: Path, name: str, ending: str) -> str:
    files = sorted(one for one in folder.iterdir() if one.name.endswith(ending) and f".{name}." in one.name)
    if not files:
        raise SourceError(f"XLA wrote no {ending} for {name}; graphmem reads those of jaxlib 0.10")
    return files[-1].read_text(encoding="utf-8", errors="replace")
