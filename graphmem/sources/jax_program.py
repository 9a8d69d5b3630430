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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from graphmem.base.environment import changed, having
from graphmem.errors import SourceError, said
from graphmem.sources import is_jitted
from graphmem.sources.own_process import answer

#: Stands behind the last event of a program: what is dropped later is dropped with the program.
_END = ["end"]
#: Calls of a jitted function, if nothing is said: the third finds the memory that the second left.
ITERATIONS = 3


def _step(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the step that a file defines."""
    from graphmem.sources.factory import find_factory

    devices = _topology(asked["target"], asked["cards"])
    with _seeing(devices):
        found, name = find_factory(asked["text"])
        function, arguments = _called(found, name, asked)
    return _followed(function, arguments, devices, asked["iterations"])


# --- the function and its arguments -----------------------------------------------------------------------------------


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

    from graphmem.sources.jax_calls import Calls

    calls = Calls(devices)
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


# --- cards that are not there -----------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    answer(_step, sys.argv, said)
