"""Write which kernels ONNX Runtime's CUDA provider has: ``graphmem/runtimes/onnxruntime/kernels/cuda_kernels.json``.

    LD_PRELOAD=.../libfakecuda.so python tests/oracles/onnxruntime/record_kernels.py

with onnxruntime-gpu on a card or on the stub driver. The wheel lists the kernels of all its providers, TensorRT's too,
so that libraries of that name must be found, which may be empty but for the functions that are imported. A kernel's
types are given by the names of its schema; here they stand by position (``i0`` the first input, ``o0`` the first
output).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from onnxruntime.capi import _pybind_state as state

TARGET = Path(__file__).parents[3] / "graphmem" / "runtimes" / "onnxruntime" / "kernels" / "cuda_kernels.json"
FOREVER = 2**31 - 1
NAMES = {"float": "float32", "double": "float64"}


def schemas() -> dict[tuple[str, str], dict[int, dict[str, list[str]]]]:
    """By operator and first version: positions by the names of types and of arguments."""
    found: dict[tuple[str, str], dict[int, dict[str, list[str]]]] = {}
    for schema in state.get_all_operator_schema():
        named: dict[str, list[str]] = {}
        for letter, arguments in (("i", schema.inputs), ("o", schema.outputs)):
            for position, argument in enumerate(arguments):
                for name in {argument.typeStr, argument.name}:
                    named.setdefault(name, []).append(f"{letter}{position}")
        domain = "" if schema.domain == "ai.onnx" else schema.domain
        found.setdefault((domain, schema.name), {})[schema.since_version] = named
    return found


def plain(types: list[str]) -> list[str]:
    """``tensor(float)`` -> ``float32``; other kinds of values as they are."""
    bare = [kind.removeprefix("tensor(").removesuffix(")") if kind.startswith("tensor(") else kind for kind in types]
    return sorted({NAMES.get(kind, kind) for kind in bare})


def main() -> None:
    known = schemas()
    sets: list[list[str]] = []
    table: dict[str, dict[str, list[object]]] = {}
    for kernel in state.get_all_opkernel_def():
        if kernel.provider != "CUDAExecutionProvider":
            continue
        domain = "" if kernel.domain == "ai.onnx" else kernel.domain
        first, last = kernel.version_range
        versions = known.get((domain, kernel.op_name), {})
        at = max((since for since in versions if since <= max(first, min(versions))), default=None)
        constraints: dict[str, int] = {}
        for name, types in kernel.type_constraints.items():
            allowed = plain(types)
            if allowed not in sets:
                sets.append(allowed)
            for place in versions.get(at, {}).get(name, ()):
                constraints[place] = sets.index(allowed)
        row = [first, None if last == FOREVER else last, constraints]
        rows = table.setdefault(domain, {}).setdefault(kernel.op_name, [])
        if row not in rows:
            rows.append(row)
    lines = [
        f'"{domain}": {{\n'
        + ",\n".join(
            f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in sorted(kernels.items())
        )
        + "\n}"
        for domain, kernels in sorted(table.items())
    ]
    head = f'"version": {json.dumps(state.get_version_string() if hasattr(state, "get_version_string") else "1.31.1")}'
    TARGET.write_text(
        "{\n"
        + head
        + ',\n"types": '
        + json.dumps(sets, separators=(",", ":"))
        + ',\n"kernels": {\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )
    print(sum(map(len, table.values())), "operators", len(sets), "sets of types")
    os._exit(0)


if __name__ == "__main__":
    main()
