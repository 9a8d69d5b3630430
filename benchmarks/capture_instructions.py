"""What recording costs, in instructions: a captured training step in one checkout against the same step in others.

    python benchmarks/capture_instructions.py [name part] CHECKOUT [CHECKOUT ...]

Seconds differ by some percent from run to run where a machine is shared; instructions do not. Each step runs under
``valgrind --tool=callgrind`` in a process of its own; its third iteration is counted, the garbage collector off.
The cases are those of ``capture_overhead.py``; the first checkout is what the others are compared with.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_COUNTED = 2  # the iteration that is counted, from 0 on
_ITERATIONS = 3


def main() -> int:
    checkouts = [argument for argument in sys.argv[1:] if Path(argument).is_dir()]
    part = next((argument for argument in sys.argv[1:] if argument not in checkouts), "")
    if not checkouts or shutil.which("valgrind") is None:
        print("give the folders of checkouts, and install valgrind", file=sys.stderr)
        return 2
    for name in ("resnet50", "gpt2", "llama"):
        if part not in name:
            continue
        first = 0
        for checkout in checkouts:
            count = _count(checkout, name)
            first = first or count
            print(f"{name:10s} {checkout:40s} {count / 1e6:9.1f} million {count / first - 1:+7.1%}", flush=True)
    return 0


def _count(checkout: str, name: str) -> int:
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null"]
    said = subprocess.run(
        [*command, sys.executable, __file__, "--step", checkout, name],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},  # collisions of names in dictionaries are instructions too
    ).stderr
    found = re.search(r"I\s+refs:\s+([\d,]+)", said)
    if found is None:
        raise SystemExit(said[-2000:])
    return int(found[1].replace(",", ""))


def step(checkout: str, part: str) -> None:
    """The step of a checkout, in this process."""
    sys.path[:0] = [checkout, str(Path(checkout) / "benchmarks")]
    import capture_overhead

    case = next(make for name, make in capture_overhead.CASES.items() if part in name)()

    def run() -> None:
        model = capture_overhead._build(case).to("cuda")
        inputs, targets = case.recipe.make_batch(case.batch, "cuda")
        optimizer = case.optimizer(model.parameters())
        for iteration in range(_ITERATIONS):
            if iteration == _COUNTED:
                gc.collect()
                gc.disable()
                _counting("on")
            case.recipe.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        _counting("off")

    capture_overhead._capture(run)


def _counting(switch: str) -> None:
    subprocess.run(["callgrind_control", "-i", switch, str(os.getpid())], capture_output=True, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(*sys.argv[2:])
    else:
        sys.exit(main())
