"""``python -m graphmem.serving.starting MODULE ANSWER.json``: an installed engine starts on the pretended card.

A process of its own, which :mod:`graphmem.serving.installed` begins: an engine changes the process it runs in. What to
start comes pickled on standard input from there; the engine's own figures go to the file, as JSON. The module knows the
engine: ``start(asked, watched)`` starts it, ``figures(watched)`` are what is known of it, however far it came.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from graphmem.base.dependencies import CannotTell, Watch
from graphmem.devices import Device

_COUNTERS = {
    "allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current",
    "requested": "requested_bytes.all.current", "peak": "allocated_bytes.all.peak",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A start: the engine's options as on its command line, whether as a server, the card, the allocator's options, and
    the processes, one card each, that share the model, and the number of the one that is followed."""

    options: tuple[str, ...]
    is_server: bool
    device: Device
    alloc_conf: str
    processes: int = 1
    rank: int = 0


class Watched:
    """What is read while the engine starts: ``stages`` and what methods gave, by name, the ``owner`` of those methods,
    and the ``engine``, which ends with the process alone: its own end may look for garbage twice."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, int]] = {}
        self.results: dict[str, Any] = {}
        self.owner: Any = None
        self.engine: Any = None

    @contextmanager
    def methods(self, owner_class: Any, names: Sequence[str]) -> Iterator[None]:
        """Until the end, the allocator is read around these methods of a class."""
        before = {name: getattr(owner_class, name) for name in names}
        for name, method in before.items():
            setattr(owner_class, name, self._marked(name, method))
        try:
            yield
        finally:
            for name, method in before.items():
                setattr(owner_class, name, method)

    def _marked(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def marking(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self.owner = owner
            gc.freeze()
            self._note(f"before {name}")
            self.results[name] = method(owner, *args, **kwargs)
            self._note(f"after {name}")
            return self.results[name]

        return marking

    def _note(self, stage: str) -> None:
        cuda = import_module("torch").cuda
        counters = cuda.memory_stats()
        self.stages[stage] = {name: int(counters.get(counter, 0)) for name, counter in _COUNTERS.items()}
        self.stages[stage]["free"] = int(cuda.mem_get_info()[0])


def main() -> None:
    """Start, and write the figures; an error of the engine's is among them."""
    asked: Asked = pickle.load(sys.stdin.buffer)
    engine: Any = import_module(sys.argv[1])
    out = Path(sys.argv[2])
    watch = Watch((str(out.parent),), programs=True)
    # Engines look for garbage at every stage, among a million objects of their modules and of the model, which stay.
    # Put aside from the beginning on, they are not given back by the capture either.
    gc.freeze()

    def step() -> None:
        """The process ends with the start: what an analysis makes of a step is not asked for, and the engine's own end
        asks for a card."""
        watched, found = Watched(), dict[str, Any]()
        try:
            found.update(engine.start(asked, watched))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found.update(engine.figures(watched), stages=watched.stages)
        watching.close()
        with suppress(CannotTell):
            found["dependencies"] = watch.written()
        out.write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)

    with ExitStack() as watching:
        watching.enter_context(watch.on())
        from graphmem import Training, analyze

        training = Training(world_size=asked.processes, rank=asked.rank) if asked.processes > 1 else None
        analyze(step, training=training, device=asked.device, alloc_conf=asked.alloc_conf or None)


if __name__ == "__main__":
    main()
