"""Parses command lines of Python: flags, program, arguments. Every followed process imports it: it imports little."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # that of ``typing``, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence

#: Options of Python that have a value behind them.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
#: Programs that start others and never use a card, as files and as modules.
_LAUNCHERS = frozenset((
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate-launch",
    "accelerate.commands.launch", "accelerate.commands.accelerate_cli", "deepspeed", "ds", "deepspeed.launcher.runner",
    "deepspeed.launcher.launch", "composer", "composer.cli.launcher",
))  # fmt: skip
#: Programs that are talked to from outside once they run, and have to be analysed from their first line.
_SERVERS = frozenset(("ipykernel_launcher", "ipykernel"))
#: Workers that others hand functions to, and what to write in their place.
WORKERS = {
    "default_worker.py": "run the training function by itself, or by graphmem run torchrun",
    "multiprocessing": "write torch.multiprocessing.spawn(function, nprocs=...), or graphmem run torchrun",
}


class PythonLine:
    """``python FLAGS -m package.module ...``: ``kind`` is ``module``, ``file``, ``code`` or ``none``; ``target`` the
    module, file or program text, ``arguments`` what follows."""

    def __init__(self, words: Sequence[str]) -> None:
        at, kind = 1, "none"
        while at < len(words) and words[at].startswith("-") and words[at] != "-":
            word, letters = words[at], words[at][1:] if words[at][1:].isalpha() else words[at][1:2]
            if word == "--":
                at += 1
                break
            if not word.startswith("--") and ("c" in letters or "m" in letters) and letters[:1] not in ("X", "W"):
                kind = "code" if "c" in letters else "module"
                break
            at += 2 if word in _WITH_VALUE else 1
        self.kind, self.flags = kind, list(words[1:at])
        if kind == "none":
            self._read_file(words, at)
            return
        letter = "c" if kind == "code" else "m"
        before, _, behind = words[at][1:].partition(letter)
        self.flags += [f"-{before}"] if before else []
        rest = [*([behind] if behind else []), *words[at + 1 :]]
        self.target, self.arguments = (rest[0] if rest else ""), rest[1:]

    def _read_file(self, words: Sequence[str], at: int) -> None:
        self.target, self.arguments = (words[at] if at < len(words) else "-"), list(words[at + 1 :])
        self.kind = "file" if self.target != "-" else "none" if sys.stdin is None or sys.stdin.isatty() else "code"

    @property
    def name(self) -> str:
        """The program without its folder: ``torchrun``, ``torch.distributed.run``."""
        base = os.path.basename(self.target) if self.kind == "file" else self.target
        return base.removesuffix("-script.py").removesuffix(".__main__")

    @property
    def is_launcher(self) -> bool:
        """True for a program that only starts others."""
        return self.kind in ("file", "module") and self.name in _LAUNCHERS

    @property
    def cards(self) -> int:
        """The cards of a machine that a launcher's options ask for, at least one. ``accelerate launch`` starts one
        process where it finds a single card, and as many as ``--num_processes`` says where it finds more."""
        return max(1, self._number("num_processes") // max(1, self._number("num_machines")))

    def _number(self, option: str) -> int:
        """The value of a launcher's option, 0 where it is not given."""
        for at, word in enumerate(self.arguments):
            name, _, value = word.partition("=")
            value = value or "".join(self.arguments[at + 1 : at + 2])
            if name.startswith("--") and name[2:].replace("-", "_") == option and value.isdecimal():
                return int(value)
        return 0

    @property
    def is_server(self) -> bool:
        """True for a program that has to be analysed from its first line."""
        return self.kind == "module" and self.name in _SERVERS

    @property
    def worker(self) -> str:
        """The command to write in place of a worker that is handed functions; empty for any other program."""
        if self.kind == "code" and "multiprocessing" in self.target[:200]:
            return WORKERS["multiprocessing"]
        return WORKERS.get(self.name, "") if self.kind == "file" else ""

    def shown(self) -> str:
        """The program and its arguments as one line, without what a program text holds."""
        target = {"module": f"-m {self.target}", "code": "-c ..."}.get(self.kind, self.target)
        return " ".join([target, *self.arguments])[:200]


def rank_of(environment: os._Environ[str] | dict[str, str]) -> int | None:
    """The number of this process among those that a launcher has started; None where none has."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    return None


def launched_options(environment: os._Environ[str] | dict[str, str]) -> list[str]:
    """The options of ``graphmem run`` for a process of several, by the variables that launchers set."""
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        each = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world)
    except (KeyError, ValueError):
        return []
    if world < 2 or world % each:
        return []
    return ["--nproc-per-node", str(each), "--nnodes", str(world // each), "--rank", str(rank)]
