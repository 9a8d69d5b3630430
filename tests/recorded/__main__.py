"""Recordings: ``python -m tests.recorded KIND record|table|differ [options] [part of a name ...]``.

``record`` makes the goldens of a kind anew (or those whose names contain a PART) with a CUDA build of PyTorch: this
one, where it has a card or runs on the stub driver, else the one that ``--python`` and ``--stub`` name
(``tests/oracles/stub_cuda/setup.sh`` makes them). ``table`` says how close predictions come, ``differ`` where they go
another way. ``python -m tests.recorded`` alone lists the kinds. tests/README.md has the whole way of a new rule.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.recorded import kinds, stub


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=__doc__)
    parser.add_argument("kind", choices=sorted(kinds.KINDS), nargs="?", help="what is recorded")
    parser.add_argument("what", choices=("record", "table", "differ"), nargs="?", default="table")
    parser.add_argument("--python", metavar="PATH", help="interpreter with a CUDA build of PyTorch, for record")
    parser.add_argument("--stub", metavar="PATH", help="libfakecuda.so, for record")
    parser.add_argument(
        "--true-values",
        metavar="FILE",
        help="follow small tensors on the host, so that what is read back from the card is true and not zeros; "
        "FILE takes the list of read-backs that stayed unknown",
    )
    options, rest = parser.parse_known_args(arguments)
    if options.kind is None:
        print(*(f"{name:20s} {kind.about}" for name, kind in kinds.KINDS.items()), sep="\n")
        return 0
    if options.what != "record":
        return int(getattr(kinds.load(options.kind), options.what)(rest))
    for variable, value in (("GRAPHMEM_CUDA_PYTHON", options.python), ("GRAPHMEM_STUB_DRIVER", options.stub)):
        if value:
            os.environ[variable] = os.path.abspath(value)
    if options.true_values:
        os.environ["GRAPHMEM_TRUE_VALUES"] = os.path.abspath(options.true_values)
    return _record(options.kind, rest)


def _record(name: str, arguments: list[str]) -> int:
    """Record here, where a card or the stub is, else in a process of its own on the stub."""
    listed = kinds.KINDS[name]
    if not listed.on_stub:
        return kinds.load(name).record(arguments)
    if not kinds.has_card():
        try:
            return stub.run(["-m", "tests.recorded", name, "record", *arguments], listed.environment)
        except FileNotFoundError as error:
            print(f"tests.recorded: {error}", file=sys.stderr)
            return 2
    from tests.recorded import true_values

    with true_values.follow():
        return kinds.load(name).record(arguments)


if __name__ == "__main__":
    sys.exit(main())
