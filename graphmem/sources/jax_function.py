"""JAX programs: ``jax:file.py:function``, or what ``jax.jit`` gave with example arguments. XLA's own compiler for GPUs
compiles them for the card of the question; its plan of buffers, the calls and the client's allocator are followed here.
Nothing is computed, and no card is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from graphmem.base.figures import BOUNDS, Cause, Communicator, Figure, Loads, bounded, unknown
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, SourceError, said
from graphmem.runtimes.base import Taken
from graphmem.runtimes.jax.program import Executable, Program, read_program, returned_bytes, trace_of
from graphmem.runtimes.jax.runtime import TRIED_BYTES, trials
from graphmem.runtimes.jax.target import target_config
from graphmem.sources.base import Arguments, Built, Sizes, TorchModel
from graphmem.sources.own_process import answer_of
from graphmem.units import format_bytes

_PROGRAM = "graphmem.sources.jax_program"
#: The JAX that this was written against.
_VERSION = "0.10"
#: Temporary blocks of this share of the largest are described.
_NOTABLE = 0.2
_READS = "values that the program reads back from the card are taken to be 0"
#: Values of a temporary block that are named, and XLA's figures of a function.
_SHOWN = 5
_ANALYSIS = (
    ("argument", "arguments"), ("output", "outputs"), ("alias", "of these donated"), ("temp", "temporary"),
    ("peak", "peak"),
)  # fmt: skip
#: Levels that a process reaches inside its allocator, whatever that holds.
_IN_USE = ("requested", "allocated")
_PRODUCTS = (
    "kernels of products",
    "XLA takes Triton's or cuBLAS's, whichever is faster on the card: Triton's are counted, and the step is compiled "
    "once more with cuBLAS's",
)
_DECISIONS = ("values read", f"the program decides by them: {_READS}")
_UNKNOWN = {
    "convolution": (
        "cuDNN's workspaces",
        "XLA takes the fastest plan of those it tries; that of its first choice is 0",
    ),
    "transform": ("cuFFT's work areas", "transforms take what cuFFT says on the card; it counts as 0"),
    "solver": ("cuSOLVER's workspaces", "solvers take what their library says on the card; it counts as 0"),
    "sort": (
        "XLA's sorts",
        "on a card XLA sorts more than 16,384 elements by kernels of CUB, whose scratch it knows there alone; here it "
        "takes a sort of its own, which needs less",
    ),
}


def load_jax(name: str, shapes: str | None = None) -> TorchModel:
    """The program of ``file.py:function``. Raises :class:`SourceError` where JAX is not installed, or not for CUDA."""
    if not name:
        raise SourceError("'jax:' names no function; write for example jax:step.py:build")
    _require_jax(f"jax:{name}")

    def prepared(asked: dict[str, Any]) -> dict[str, Any]:
        return _in_own_process({"text": name, "shapes": shapes, **asked})

    return _model(f"jax:{name}", prepared)


def from_jitted(function: Callable[..., Any], inputs: Any) -> TorchModel:
    """The program of calling a function of ``jax.jit`` in this process, whose closure knows no other. ``inputs``: its
    only argument, or :class:`Arguments`. Raises :class:`SourceError` where there are none."""
    name = getattr(function, "__name__", type(function).__name__)
    _require_jax(name)
    if inputs is None:
        raise SourceError(
            f"{name} needs the arguments that it is called with, of arrays or jax.ShapeDtypeStruct: "
            f"graphmem.analyze({name}, state, batch)"
        )
    arguments = inputs if isinstance(inputs, Arguments) else (inputs,)

    def prepared(asked: dict[str, Any]) -> dict[str, Any]:
        from graphmem.sources.jax_program import step_of

        try:
            return step_of(function, arguments, asked["target"], asked["cards"], asked["iterations"])
        except GraphmemError:
            raise
        except Exception as error:  # the function's own code, or XLA's compiler
            raise SourceError(f"{name}: {said(error)}") from None

    return _model(name, prepared)


def _model(name: str, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> TorchModel:
    def planned(sizes: Sizes, card: Device, cudnn: Cudnn | None) -> Taken:
        asked = {
            "batch": sizes.batch,
            "seq_len": sizes.seq_len,
            "iterations": sizes.iterations,
            "target": target_config(card),
            "cards": sizes.cards,
        }
        try:
            return _taken(read_program(prepare(asked)), name, card)
        except SourceError as error:
            raise SourceError(f"{error}{_of_version()}") from None

    def build(_: Sizes) -> Built | None:
        return None  # it is planned

    return TorchModel(
        name, build, framework="JAX", runtime="jax", step_words="the program's own", planned=planned, captured=False
    )


def _require_jax(model: str) -> None:
    if find_spec("jax") is None:
        raise SourceError(f"{model} needs JAX; install it with: pip install 'graphmem[jax]'")
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda13") is None:
        raise SourceError(
            f"{model} needs JAX's compiler for NVIDIA's cards, which works without one; install it with: pip install "
            "'graphmem[jax]'"
        )


def _of_version() -> str:
    """Words behind an error where JAX is not the one that this was written against."""
    installed = version("jax")
    known = installed.startswith(f"{_VERSION}.")
    return "" if known else f" (JAX {installed} is installed; its insides are known here as they are in {_VERSION})"


def _in_own_process(asked: Mapping[str, Any]) -> dict[str, Any]:
    failed = f"jax:{asked['text']}: JAX could not compile it"
    return answer_of(_PROGRAM, asked, failed, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")


# --- what is known of it ----------------------------------------------------------------------------------------------


def _taken(program: Program, name: str, card: Device) -> Taken:
    return Taken(
        trace_of(program, name),
        tuple(_notes(program, card)),
        diagnostics=tuple(_not_donated(program)),
        doubts=tuple(_doubts(program)),
        outside=tuple(_outside(program, card)),
        proven="tests/golden/jax",
    )


def _not_donated(program: Program) -> Iterator[Diagnostic]:
    """That arguments are held twice, where that is much of what the largest call needs."""
    returned = returned_bytes(program)
    if returned > _NOTABLE * max((one.xla["peak"] for one in program.executables), default=0):
        yield Code.NOT_DONATED.about(size=format_bytes(returned))


def _outside(program: Program, card: Device) -> Iterator[Figure]:
    """What the program's functions and collectives hold outside of the allocator."""
    rows = (row for one in program.executables for row in one.assignment.allocations)
    constants = sum(row.bytes for row in rows if row.kind == "constant")
    if constants:
        yield Figure("constants of compiled functions", constants, constants, constants, "XLA's assignment")
    if any("collective" in one.assignment.kinds for one in program.executables):
        group = Communicator(program.cards, on_node=program.cards)
        yield from card.outside(Loads(communicators=(group,)))[len(card.outside(Loads())) :]


def _notes(program: Program, card: Device) -> Iterator[str]:
    yield f"compiled by XLA of JAX {program.version} for {card.name}, without trying kernels out"
    if program.is_jitted:
        yield (
            f"the function is called {program.iterations} times (--iterations); outputs take the place of arguments "
            "that look like them, other outputs are held until the next call's"
        )
    if program.reads:
        yield _READS
    largest = max((one.xla["temp"] for one in program.executables), default=0)
    for one in program.executables:
        if one.xla["temp"] >= _NOTABLE * largest:
            yield from _of_executable(one)


def _of_executable(one: Executable) -> Iterator[str]:
    parts = ", ".join(f"{words} {format_bytes(one.xla[key])}" for key, words in _ANALYSIS if one.xla[key])
    yield f"{one.name}: XLA's own memory_analysis() says {parts}"
    rows = "; ".join(
        f"{format_bytes(size)} {operator}{f' ({source})' if source else ''} {shape}"
        for size, operator, source, shape in one.assignment.values[:_SHOWN]
    )
    if rows:
        yield f"{one.name}: its temporary block is fullest, {format_bytes(one.assignment.filled_bytes)}, with {rows}"


def _doubts(program: Program) -> Iterator[Cause]:
    """Why a card may take other memory than XLA's first choice of kernels."""
    yield trials(_IN_USE, TRIED_BYTES)
    others = [
        one.assignment.other_temporary_bytes - one.assignment.temporary_bytes
        for one in program.executables
        if one.assignment.other_temporary_bytes
    ]
    if others:
        spread = bounded(min(0, *others), max(0, *others))
        yield Cause(_PRODUCTS[0], BOUNDS, _PRODUCTS[1], dict.fromkeys(_IN_USE, spread))
    if program.decisions:
        yield unknown(*_DECISIONS, below=True)
    kinds = {kind for one in program.executables for kind in one.assignment.kinds}
    for kind, words in _UNKNOWN.items():
        if kind in kinds:
            yield unknown(*words, below=kind == "sort")
