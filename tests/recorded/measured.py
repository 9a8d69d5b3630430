"""``graphmem measure`` where kernels compute nothing: ``python -m tests.recorded.measured zoo:gpt2 -o FILE``.

On the stub driver a program reads back zeros, and may take a path that no card takes (transformers' masks). Here every
case, in a process of its own as ever, has its small values followed (:mod:`tests.recorded.true_values`).
``models_zoo/measured/stub-driver`` has transformers' training steps so, other models' as ``graphmem measure`` has them.
"""

from __future__ import annotations

import os
import sys


def main(arguments: list[str]) -> None:
    """The command; without arguments, the process of one case, which is told on its standard input."""
    if not arguments:
        from graphmem.accuracy import child
        from tests.recorded import true_values

        with true_values.follow(os.devnull):
            child.main()
        return
    from graphmem.accuracy import measure
    from graphmem.cli.main import main as graphmem

    measure._CHILDREN["pytorch"] = "tests.recorded.measured"
    sys.argv[1:] = ["measure", *arguments]
    graphmem()


if __name__ == "__main__":
    main(sys.argv[1:])
