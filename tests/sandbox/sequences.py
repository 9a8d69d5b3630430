"""Carries out a list of operations that a test has drawn (``steps.json``), and tells what each gave and what is there.

The lists are many, each in a folder of its own, so that one process does them all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

from tests.sandbox.operations import look


def carry_out(kind: str, first: str, second: str) -> Any:
    if kind == "write":
        with open(first, "w") as file:
            file.write(second)
    elif kind == "append":
        with open(first, "a") as file:
            file.write(second)
    elif kind == "update":
        with open(first, "r+") as file:
            file.write(second)
    elif kind == "read":
        with open(first) as file:
            return file.read()
    elif kind == "list":
        return sorted(os.listdir(first))
    elif kind == "stat":
        status = os.stat(first)
        return status.st_mode & 0o170000
    elif kind == "chmod":
        os.chmod(first, 0o640 if os.path.isfile(first) else 0o750)
    elif kind in ("rename", "replace", "link", "symlink"):
        getattr(os, kind)(os.path.basename(first) if kind == "symlink" else first, second)
    elif kind in ("copytree", "copy2", "move"):
        if f"{os.path.realpath(second)}/".startswith(f"{os.path.realpath(first)}/"):
            return "into itself"
        getattr(shutil, kind)(first, second)
    elif kind == "rmtree":
        shutil.rmtree(first)
    else:
        getattr(os, kind)(first)
    return None


def carry_out_all(steps: Sequence[Sequence[str]], folder: str) -> Any:
    """What each step gives, and what is in the folder then."""
    before = os.getcwd()
    os.chdir(folder)
    told: list[Any] = []
    try:
        for kind, first, second in steps:
            try:
                told.append(carry_out(kind, first, second))
            except shutil.Error:
                told.append("shutil.Error")
            except OSError as error:
                told.append([type(error).__name__, error.errno, str(error.filename), str(error.filename2)])
        return json.loads(json.dumps([told, look(folder)]).replace(folder, "FOLDER"))
    finally:
        os.chdir(before)


def main() -> None:
    with open("steps.json") as file:
        sequences = json.load(file)
    top = os.getcwd()
    for number, steps in enumerate(sequences):
        print(json.dumps(carry_out_all(steps, os.path.join(top, "folders", str(number)))), flush=True)


if __name__ == "__main__":
    main()
