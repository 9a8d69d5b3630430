"""Record TensorFlow's own allocator under random requests, in every kind of configuration.

    python tests/oracles/tensorflow/record_bfc.py OUTPUT.json.gz [--seeds N]

Needs an environment with ``tensorflow-cpu`` and g++; builds bfc_driver.cc against the headers of the wheel. The result
has the form that tests/allocators/test_tensorflow_bfc_golden.py reads.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.oracles.random_requests import PROFILES, random_requests

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
GIB = 1 << 30

#: limit, capacity of the device, coalescing, growth, garbage collection, fragmentation fraction, gap between regions.
CONFIGS: tuple[tuple[str, int, int, int, int, int, float, int], ...] = (
    ("gpu", 16 * GIB, 16 * GIB, 0, 0, 1, 0.0, 0),
    ("gpu", 16 * GIB, 16 * GIB, 0, 1, 1, 0.0, 0),
    ("gpu", 16 * GIB, 16 * GIB, 1, 1, 1, 0.0, 0),
    ("gpu", 2 * GIB, 2 * GIB * 85 // 100, 0, 0, 1, 0.0, 0),
    ("gpu", 2 * GIB, 2 * GIB * 85 // 100, 0, 1, 0, 0.0, 0),
    ("gpu", 2 * GIB, 2 * GIB * 85 // 100, 0, 1, 1, 0.0, 512),
    ("gpu", 2 * GIB, 2 * GIB, 1, 1, 1, 0.0, 0),
    ("gpu", 3 * GIB - 12345, 3 * GIB, 0, 1, 1, 0.001, 0),
    ("gpu", 1 * GIB, 1 * GIB, 0, 0, 1, 0.05, 0),
    ("bfc", 1 * GIB + 77, 3 * GIB, 1, 1, 1, 0.0, 4096),
    ("bfc", 777 * MIB, 700 * MIB, 0, 1, 0, 0.01, 0),
    ("gpu", 1 * GIB, 1 * GIB, 0, 1, 1, 0.0, 0),
    ("bfc", 777 * MIB, 700 * MIB, 1, 1, 1, 0.0, 512),
)
REQUESTS = 400


def framework_directory() -> Path:
    """Where the wheel keeps its headers and libraries."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("tensorflow-cpu is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


def build(source: str, output: Path, *extra: str) -> Path:
    """Compile one file of this folder against the wheel."""
    framework = framework_directory()
    flags = ["-O1", "-w", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64", *extra]
    link = [f"-L{framework}", "-l:libtensorflow_framework.so.2", f"-Wl,-rpath,{framework}"]
    command = ["g++", *flags, f"-I{framework / 'include'}", str(HERE / source), "-o", str(output), *link]
    subprocess.run(command, check=True)
    return output


def record(driver: Path, config: tuple[Any, ...], operations: list[list[Any]]) -> list[Any]:
    """What the real allocator answered to every operation."""
    lines = [" ".join(map(str, config)), *(" ".join(map(str, operation)) for operation in operations)]
    done = subprocess.run([str(driver)], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(answers) == len(operations)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    names = ("kind", "limit", "cap", "co", "ag", "gc", "ff", "gap")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        driver = build("bfc_driver.cc", Path(folder) / "driver")
        for seed, (profile, config) in enumerate(itertools.product(PROFILES, CONFIGS * arguments.seeds)):
            operations = random_requests(profile, f"{seed} {profile}", REQUESTS)
            expect = record(driver, config, operations)
            named = dict(zip(names, config, strict=True))
            cases.append({"profile": profile, "config": named, "ops": operations, "expect": expect})
    source = f"tensorflow {importlib.metadata.version('tensorflow-cpu')}, its allocator over a pretended device"
    document = json.dumps({"source": source, "cases": cases}, separators=(",", ":")).encode()
    arguments.output.write_bytes(gzip.compress(document, 9, mtime=0))
    print(f"{len(cases)} cases, {sum(len(case['ops']) for case in cases)} operations")


if __name__ == "__main__":
    main()
