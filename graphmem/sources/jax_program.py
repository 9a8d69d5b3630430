"""A program of its own, which imports JAX: runs a step on arrays without memory, and lets XLA's own compiler for GPUs
compile every function that it calls, for a card that is not there.

    python -m graphmem.sources.jax_program REQUEST.json STEP.json

REQUEST is ``{"text": "FILE.py:FUNCTION", "shapes", "batch", "seq_len", "iterations", "target", "cards"}``: ``target``
describes the card as XLA's ``GpuTargetConfigProto`` in text. STEP is the document that
:mod:`graphmem.runtimes.jax.program` reads, or ``{"error": TEXT}``. Nothing is computed. Written against JAX 0.10.

Outside of ``jax.jit`` each operation of JAX is a compiled function of its own. So a program is followed as JAX runs it:
every call, with the arrays that go in and come out, and the moments at which Python lets arrays go.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import json
import math
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmem.base.environment import changed, having
from graphmem.errors import GraphmemError, SourceError, said
from graphmem.runtimes.jax.assignment import read_assignment

if TYPE_CHECKING:
    pass

#: Texts of XLA, by the ends of their names.
_TEXTS = ("buffer-assignment.txt", "buffer-assignment-values.txt", "live-range.txt", "gpu_after_optimizations.txt")
#: Figures of ``memory_analysis()``, XLA's own.
_ANALYSIS = ("argument", "output", "alias", "temp", "generated_code")
#: Stands behind the last event of a program: what is dropped later is dropped with the program.
_END = ["end"]
#: Calls of a jitted function, if nothing is said: the third finds the memory that the second left.
ITERATIONS = 3


def main(request: str, result: str) -> None:
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    try:
        step = _step(asked)
    except GraphmemError as error:
        step = {"error": str(error)}
    except Exception as error:  # the program's own code
        step = {"error": f"{asked['text']}: {said(error)}"}
    Path(result).write_text(json.dumps(step), encoding="utf-8")


def _step(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the step that a file defines."""
    from graphmem.sources.factory import find_factory

    devices = _topology(asked["target"], asked["cards"])
    with _seeing(devices):
        found, name = find_factory(asked["text"])
        function, arguments = _called(found, name, asked)
    return _followed(function, arguments, devices, asked["iterations"])


# --- the function and its arguments -----------------------------------------------------------------------------------


def is_jitted(function: object) -> bool:
    """Whether this is what ``jax.jit`` gives."""
    return callable(function) and hasattr(function, "trace") and hasattr(function, "lower")


def _called(found: Callable[..., Any], name: str, asked: Mapping[str, Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function to call and its arguments: what a factory returns, or a jitted function and ``--shapes``."""
    from graphmem.sources.base import Sizes, known_arguments

    sizes = Sizes(asked["batch"], asked["seq_len"])
    wanted = f"let a function return ({name}, arguments), or name with --shapes what gives them"
    if is_jitted(found):
        if not asked["shapes"]:
            raise SourceError(f"{name} is a jitted function, and nothing says what it is called with; {wanted}")
        where = asked["text"].rpartition(":")[0]
        return found, _shapes(f"{where}:{asked['shapes']}", sizes)
    if asked["shapes"]:
        raise SourceError(
            f"{name} is not jitted, and --shapes gives the arguments of one that is: decorate it with jax.jit"
        )
    result = found(**known_arguments(found, name, sizes))
    if (
        not isinstance(result, tuple)
        or len(result) != 2
        or not callable(result[0])
        or not isinstance(result[1], (tuple, list))
    ):
        raise SourceError(
            f"{name} is not jitted and returned {_kind(result)}; it should be a function of jax.jit, or return "
            "(function, arguments): what is called, and a tuple of arrays or jax.ShapeDtypeStruct"
        )
    return result[0], result[1]


def _shapes(text: str, sizes: Any) -> Sequence[Any]:
    """The arguments that ``FILE.py:NAME`` gives: a tuple, or a function that returns one."""
    from graphmem.sources.base import known_arguments
    from graphmem.sources.factory import find_object

    found, name = find_object(text)
    value = found(**known_arguments(found, name, sizes)) if callable(found) else found
    if not isinstance(value, (tuple, list)):
        raise SourceError(f"{name} gives {_kind(value)}; it should be a tuple of the function's arguments")
    return value


def _kind(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


# --- the step ---------------------------------------------------------------------------------------------------------


def step_of(
    function: Callable[..., Any], arguments: Sequence[Any], target: str, cards: int, iterations: int | None
) -> dict[str, Any]:
    """The document of calling a function: a jitted one several times, each with the outputs of the call before it in
    place of the arguments that look like them; any other, which calls jitted ones itself, once."""
    return _followed(function, arguments, _topology(target, cards), iterations)


def _followed(
    function: Callable[..., Any], arguments: Sequence[Any], devices: Sequence[Any], iterations: int | None
) -> dict[str, Any]:
    import jax
    from jax._src import core

    calls = _calls_type()(devices)
    values = calls.arrays_of(function, arguments)
    with core.set_current_trace(calls):
        if is_jitted(function):
            _loop(calls, function, values, iterations or ITERATIONS)
        else:
            calls.events.append(["iteration", 1])
            out = function(*values)
            calls.events.append(_END)
            del out
    return {
        "jax": jax.__version__,
        "cards": len(devices),
        "iterations": iterations or ITERATIONS if is_jitted(function) else 1,
        "jitted": is_jitted(function),
        "reads": calls.reads,
        "decisions": calls.decisions,
        "executables": calls.compiled,
        "events": [*calls.before, *calls.events[: calls.events.index(_END)]],
    }


def _loop(calls: Any, step: Callable[..., Any], arguments: list[Any], iterations: int) -> None:
    out = None
    for number in range(1, iterations + 1):
        calls.events.append(["iteration", number])
        out = step(*arguments)
        for position, value in _carried(arguments, out):
            calls.carry(arguments[position], value)
            arguments[position] = value
        value = None
    calls.events.append(_END)


def _carried(arguments: Sequence[Any], out: Any) -> list[tuple[int, Any]]:
    """The outputs that take the place of arguments in the next call: each the first argument, not yet taken, of its
    structure, shapes and types. A step that carries no tree, and donates nothing, is called with the same arguments."""
    import jax

    def looks(value: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(value)
        return tree, tuple(getattr(leaf, "aval", None) or getattr(leaf, "shape", ()) for leaf in leaves)

    def is_array(value: Any) -> bool:
        return bool(jax.tree.structure(value) == jax.tree.structure(0))

    found: list[tuple[int, Any]] = []
    looked = [looks(argument) for argument in arguments]
    wholes = [out] if looks(out) in looked or not isinstance(out, (tuple, list)) else list(out)
    for value in wholes:
        taken = {position for position, _ in found}
        position = next((at for at, one in enumerate(looked) if at not in taken and one == looks(value)), None)
        if position is not None:
            found.append((position, value))
    is_state = any(not is_array(value) for _, value in found)
    donated = any(getattr(leaf, "is_gone", False) for argument in arguments for leaf in jax.tree.leaves(argument))
    return found if is_state or donated else []


# --- arrays without memory --------------------------------------------------------------------------------------------


class _Buffer:
    """Bytes on the card, held by as many arrays as refer to them; ``calls`` hears when nobody does any more."""

    def __init__(self, calls: Any, number: int) -> None:
        self.number = number
        self.is_gone = False
        weakref.finalize(self, calls.events.append, ["drop", number]).atexit = False


def _calls_type() -> Any:
    """The type of what follows a program; made here, as its base is JAX's."""
    import jax
    import numpy as np
    from jax._src import core, dispatch, pjit, source_info_util, xla_bridge
    from jax._src.interpreters import mlir, pxla
    from jax.sharding import SingleDeviceSharding

    source_info_util.register_exclusion(__file__)  # source lines are the program's own

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
                raise SourceError(
                    "an argument is in the host's memory (memory_kind pinned_host), which is not followed"
                )
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

    return Calls


def _topology(target: str, cards: int) -> Sequence[Any]:
    """The devices of a machine with so many cards, which are not there."""
    from jax.experimental import topologies

    described = partial(
        topologies.get_topology_desc,
        topology_name="graphmem",
        platform="cuda",
        target_config=target,
        topology=f"1x1x{cards}",
    )
    with changed({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):  # which would look for a driver
        try:
            return list(described().devices)
        except NotImplementedError:  # JAX has looked for one before, and put the plugin aside
            importlib.import_module("jax_plugins.xla_cuda13").initialize()
            return list(described().devices)


@contextlib.contextmanager
def _seeing(devices: Sequence[Any]) -> Iterator[None]:
    """A program that asks JAX for its devices sees the cards; what it computes meanwhile it computes on the host."""
    import jax

    def listed(*_: object, **__: object) -> list[Any]:
        return list(devices)

    def counted(*_: object, **__: object) -> int:
        return len(devices)

    def mesh(*arguments: Any, **options: Any) -> Any:
        return made(*arguments, **{"devices": list(devices), **options})

    made = jax.make_mesh
    with having(
        jax, devices=listed, local_devices=listed, device_count=counted, local_device_count=counted,
        default_backend=lambda: "gpu", make_mesh=mesh,
    ):  # fmt: skip
        yield


def _autotuning() -> dict[str, Any]:
    """Nothing is tried out, as there is no card; unless XLA_FLAGS says otherwise."""
    return {} if "xla_gpu_autotune_level" in os.environ.get("XLA_FLAGS", "") else {"xla_gpu_autotune_level": 0}


def _bytes_of(aval: Any, placed: Any) -> int:
    """Bytes on each card."""
    from jax._src import core, dtypes

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


if __name__ == "__main__":
    main(*sys.argv[1:])
