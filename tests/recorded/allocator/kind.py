"""The allocator's recordings as kinds: sequences of events, and those with private pools; and one memory snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests import places
from tests.recorded import stub
from tests.recorded.allocator.jobs import JOBS
from tests.recorded.allocator.pool_traces import TRACES
from tests.recorded.allocator.replayed import first_difference, load
from tests.recorded.kind import Kind

_SUFFIX = ".json.gz"


@dataclass(frozen=True)
class _Sequences:
    """``folder``: one file a sequence."""

    folder: Path

    def record(self, arguments: list[str]) -> int:
        """Record those whose names contain an argument, by default those that are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = {path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}")}
        status = 0
        for name, environment, command in self._commands():
            if any(part in name for part in arguments) if arguments else name in there:
                failed = stub.run(["-m", *command], environment)
                print(name, "FAILED" if failed else "recorded", flush=True)
                status = status or failed
        return status

    def _commands(self) -> Iterator[tuple[str, Mapping[str, str], list[str]]]:
        """Name, what the stub is told, and module with arguments of every sequence."""
        raise NotImplementedError

    def table(self, arguments: list[str]) -> int:
        return self._compare(arguments, verbose=False)

    def differ(self, arguments: list[str]) -> int:
        return self._compare(arguments, verbose=True)

    def _compare(self, parts: list[str], verbose: bool) -> int:
        equal = count = 0
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            if not parts or any(part in path.name for part in parts):
                difference = first_difference(load(path))
                count += 1
                equal += not difference
                if verbose and difference:
                    print(f"{path.name.removesuffix(_SUFFIX)}: {difference}", flush=True)
        print(f"{equal} of {count} equal in every column of every event")
        return int(equal < count)


class _Allocator(_Sequences):
    def _commands(self) -> Iterator[tuple[str, Mapping[str, str], list[str]]]:
        for name, job in JOBS.items():
            environment = {"FAKE_CUDA_TOTAL_MIB": str(job.total_mib(job.events())), **job.environment}
            if job.conf:
                environment["PYTORCH_CUDA_ALLOC_CONF"] = job.conf  # the name that every version reads
            file = str(self.folder / f"{name}{_SUFFIX}")
            yield name, environment, ["tests.recorded.allocator.record", name, file]


class _Pools(_Sequences):
    def _commands(self) -> Iterator[tuple[str, Mapping[str, str], list[str]]]:
        for name, (*_, environment) in TRACES.items():
            yield name, environment, ["tests.recorded.allocator.pool_record", name, str(self.folder)]


class _Snapshot:
    file = places.PYTORCH / "pool_snapshot.pickle.gz"

    def record(self, arguments: list[str]) -> int:
        return stub.run(["-m", "tests.recorded.allocator.pool_snapshot", str(self.file)])

    def table(self, arguments: list[str]) -> int:
        print("one file, read by tests/sources/test_snapshot.py; it is not predicted")
        return 0

    differ = table


def sequences(folder: Path) -> Kind:
    """Those of a folder."""
    return _Allocator(folder)


SEQUENCES = _Allocator(places.PYTORCH / "allocator")
POOLS = _Pools(places.PYTORCH / "allocator_pools")
SNAPSHOT = _Snapshot()
