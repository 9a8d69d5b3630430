"""Files of ``torch.save`` and safetensors that a capture writes: of PyTorch's size and form, hollow where unknown."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from tests.support.examples import examples

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from graphmem.capture.program import file_storages, saved_files, torch_archives  # noqa: E402
from graphmem.capture.program.torch_archives import (  # noqa: E402
    ArchiveWriter,
    checksum_of_zeros,
    deflated_zeros,
    write_zeros,
)
from graphmem.capture.session.session import capture  # noqa: E402
from tests.recorded.device import CARD, TORCH_VERSION  # noqa: E402

GIB = 1 << 30
PROGRAMS = Path(__file__).parent / "programs"


def captured(step: Callable[[], Any]) -> Any:
    """What a function returns in a capture."""
    returned: list[Any] = []
    capture(lambda _: returned.append(step()), source="x", device=CARD, torch_version=TORCH_VERSION)
    return returned[0]


# --- objects ----------------------------------------------------------------------------------------------------------

DTYPES = ["float32", "bfloat16", "float64", "complex64", "int64", "uint8", "bool", "float8_e4m3fn", "uint16"]


def made(spec: Any) -> Any:
    """The object of a description: tensors, views of one storage, parameters, empty ones, lists and dictionaries."""
    kind, value = spec
    if kind == "list":
        return [made(item) for item in value]
    if kind == "dict":
        return {f"key {number}": made(item) for number, item in enumerate(value)}
    if kind == "tensor":
        dtype, shape = value
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))
    if kind == "parameter":
        return torch.nn.Parameter(torch.ones(value))
    if kind == "views":
        whole = torch.arange(float(value))
        return [whole, whole[1:3], whole.view(2, -1).t()]
    if kind == "module":
        return torch.nn.Linear(value, 3).state_dict()
    return value


SPECS = st.recursive(
    st.one_of(
        st.tuples(st.just("tensor"), st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3))),
        st.tuples(st.just("parameter"), st.lists(st.integers(0, 40), max_size=2)),
        st.tuples(st.just("views"), st.integers(2, 30).map(lambda n: 2 * n)),
        st.tuples(st.just("module"), st.integers(1, 200)),
        st.tuples(st.just("plain"), st.one_of(st.none(), st.text(), st.integers(), st.floats(allow_nan=False))),
    ),
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, max_size=4)), st.tuples(st.just("dict"), st.lists(inner, max_size=4))
    ),
    max_leaves=8,
)


def shown(value: Any) -> Any:
    """Everything about an object but the values of its floats."""
    if isinstance(value, torch.Tensor):
        facts = tuple(value.shape), value.dtype, value.stride(), value.storage_offset(), value.requires_grad
        is_integer = value.dtype in (torch.int64, torch.uint8, torch.bool)
        return isinstance(value, torch.nn.Parameter), *facts, value.tolist() if is_integer else None
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list) else value


def saved(spec: Any, older: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(made(spec), buffer, _use_new_zipfile_serialization=not older)
    return buffer.getvalue()


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS)
def test_an_archive_is_as_long_as_pytorchs_and_holds_the_same(spec: Any) -> None:
    """PyTorch outside any capture reads it: the same tensors, zeros where values were unknown."""
    real, hollow = saved(spec), captured(lambda: saved(spec))
    assert len(hollow) == len(real)
    assert zipfile.ZipFile(io.BytesIO(hollow)).testzip() is None
    assert shown(torch.load(io.BytesIO(hollow))) == shown(made(spec))
    assert captured(lambda: shown(torch.load(io.BytesIO(hollow)))) == shown(made(spec))
    assert captured(lambda: shown(torch.load(io.BytesIO(real)))) == shown(made(spec))


@pytest.mark.parametrize("how", ["older", "pickle"])
def test_the_older_format_is_as_long(how: str) -> None:
    spec = ("dict", [("module", 70), ("views", 20), ("parameter", [3, 3]), ("tensor", ("int64", [4, 2]))])

    def write() -> bytes:
        return saved(spec, older=True) if how == "older" else pickle.dumps(made(spec))

    def read(data: bytes) -> Any:
        return torch.load(io.BytesIO(data)) if how == "older" else pickle.loads(data)

    real, hollow = write(), captured(write)
    assert abs(len(hollow) - len(real)) <= 2 * 14  # addresses are keys, and have 14 or 15 digits
    assert shown(read(hollow)) == shown(read(real))
    assert captured(lambda: shown(read(hollow))) == shown(read(real))


def test_weights_are_unknown_after_loading_and_counters_known() -> None:
    def step() -> tuple[Any, Any]:
        norm = torch.nn.BatchNorm1d(3)
        norm(torch.ones(4, 3))
        buffer = io.BytesIO()
        torch.save(norm.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        return loaded["num_batches_tracked"].item(), type(loaded["weight"]).__name__

    assert captured(step) == (1, "FakeTensor")


# --- long files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[3 * GIB, 5 * GIB, 10, 0xFFFFFFFF, 0], [0xFFFFFFFE, 64, 1]])
def test_a_file_beyond_four_gibibytes_is_pytorchs(tmp_path: Path, sizes: list[int]) -> None:
    """PyTorch's own writer leaves holes too, when it is asked to skip the data."""
    hollow, real = tmp_path / "ours" / "big.pt", tmp_path / "big.pt"
    hollow.parent.mkdir()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fakes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fakes, real)

    def step() -> None:
        with hollow.open("wb") as file:
            torch.save([torch.empty(size, dtype=torch.uint8) for size in sizes], file)
        loaded = torch.load(hollow, mmap=True)
        assert [tensor.numel() for tensor in loaded] == sizes

    captured(step)
    ours, theirs = (zipfile.ZipFile(path).infolist() for path in (hollow, real))
    assert [(info.file_size, info.header_offset % 64) for info in ours if "/data/" in info.filename]
    # Of a stream the archive's folder has the name "archive", of a path the file's.
    longer = len("archive") - len("big")
    assert [info.file_size for info in ours[4:-2]] == [info.file_size for info in theirs[4:-2]] == sizes
    ends = [path.stat().st_size for path in (hollow, real)]
    assert 0 <= ends[0] - ends[1] - longer * len(ours) <= 64 * len(ours)
    assert hollow.stat().st_blocks * 512 < 1 << 20
    assert [tensor.numel() for tensor in torch.load(hollow, mmap=True)] == sizes
    for path in (hollow, real):
        path.unlink()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 3 << 20))
def test_checksums_and_deflated_zeros(count: int) -> None:
    assert checksum_of_zeros(count) == zlib.crc32(bytes(count))
    assert zlib.decompress(deflated_zeros(count), -15) == bytes(count)


def test_checksums_of_many_zeros_are_combined() -> None:
    assert checksum_of_zeros(1 << 28) == zlib.crc32(bytes(1 << 28))


def test_a_hole_over_what_a_file_had_is_zeros(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with path.open("r+b") as file:
        file.seek(10)
        write_zeros(file, 20)
        file.write(b"end")
    assert path.read_bytes() == b"x" * 10 + bytes(20) + b"end" + b"x" * 67


# --- streams ----------------------------------------------------------------------------------------------------------


def test_beyond_the_limit_a_streams_archive_is_deflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_archives, "IN_FULL", 1 << 16)
    spec = ("list", [("module", 1 << 18), ("module", 100)])
    data = captured(lambda: saved(spec))
    assert len(data) < 1 << 16
    assert shown(torch.load(io.BytesIO(data))) == shown(made(spec))
    assert captured(lambda: shown(torch.load(io.BytesIO(data)))) == shown(made(spec))


def test_many_weights_are_pickled_without_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_storages.Books, "has_room", lambda self, size: False)

    def step() -> tuple[int, list[tuple[int, ...]]]:
        data = pickle.dumps([torch.nn.Linear(100, 100).weight for _ in range(4)])
        return len(data), [tuple(tensor.shape) for tensor in pickle.loads(data)]

    size, shapes = captured(step)
    assert size < 4_000
    assert shapes == [(100, 100)] * 4


def test_the_writer_asks_a_stream_for_nothing_but_write(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.data = b""

        def write(self, data: Any) -> int:
            self.data += bytes(data)
            return len(data)

    sink = Sink()
    writer = ArchiveWriter(cast("BinaryIO", sink))
    writer.write_record("data/0", None, 1000)
    writer.write_record("text", "words", 5)
    known = writer.serialization_id()
    writer.write_end_of_file()
    reader = torch._C.PyTorchFileReader(io.BytesIO(sink.data))
    assert (reader.get_record("data/0"), reader.get_record("text")) == (bytes(1000), b"words")
    assert reader.serialization_id() == writer.serialization_id() != known
    with gzip.open(tmp_path / "a.gz", "wb") as packed:
        writer = ArchiveWriter(cast("BinaryIO", packed))
        writer.write_record("data/0", None, 1 << 20)
        writer.write_end_of_file()
    with gzip.open(tmp_path / "a.gz") as packed:
        assert zipfile.ZipFile(packed).read("archive/data/0") == bytes(1 << 20)


# --- safetensors ------------------------------------------------------------------------------------------------------


def test_safetensors_are_as_long_and_hold_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")

    def tensors() -> dict[str, Any]:
        linear = torch.nn.Linear(50, 40)
        named = {f"é {dtype}": made(("tensor", (dtype, [3, 5]))) for dtype in DTYPES if dtype != "bool"}
        return {**linear.state_dict(), "none": torch.empty(0, 3), "scalar": torch.tensor(3), **named}

    def write() -> bytes:
        data: bytes = library.save(tensors(), {"format": "pt"})
        return data

    real, hollow = write(), captured(write)
    assert len(hollow) == len(real)
    for read in (library.load, lambda data: captured(lambda: library.load(data))):
        ours, theirs = read(hollow), read(real)
        assert sorted(ours) == sorted(theirs)
        assert {name: (t.shape, t.dtype) for name, t in ours.items()} == {
            name: (t.shape, t.dtype) for name, t in theirs.items()
        }
    assert library.load(hollow)["scalar"].item() == 3
    assert not library.load(hollow)["weight"].any()
    path = tmp_path / "model.safetensors"

    def files() -> list[Any]:
        library.save_file(tensors(), path)
        loaded = library.load_file(path)
        return [sorted(loaded), loaded["scalar"].item(), path.exists()]

    assert captured(files) == [sorted(tensors()), 3, False]  # a step's files are its own


def test_safetensors_refuses_what_it_refuses() -> None:
    library = pytest.importorskip("safetensors.torch")

    def refusals() -> list[str]:
        shared = torch.ones(4, 4)
        refused = []
        for tensors in ({"a": shared, "b": shared}, {"a": shared.t()[1:]}, [shared], {"a": 3}):
            try:
                library.save(tensors)
            except (RuntimeError, ValueError) as error:
                refused.append(f"{type(error).__name__}: {error}")
        return refused

    assert captured(refusals) == refusals()


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_step_has_its_files_to_itself(tmp_path: Path) -> None:
    """It runs in its caller's process: a checkpoint that is there stays as it was."""
    path = tmp_path / "model.pt"
    torch.save({"mine": 1}, path)
    before = path.read_bytes()

    def step() -> Any:
        first = torch.load(path)
        torch.save({"weight": torch.ones(3, device="cuda")}, path)
        return list(first), list(torch.load(path)), os.listdir(tmp_path)

    assert captured(step) == (["mine"], ["weight"], ["model.pt"])
    assert path.read_bytes() == before


def test_every_way_to_save_is_as_in_a_real_run(tmp_path: Path) -> None:
    """The program prints sizes, names, hashes' equality, what it loads and the errors that it gets. Each run has a
    process of its own: how long a pickle is depends on which of the equal strings in it are one object."""
    program = PROGRAMS / "ways_to_save.py"
    analysed = (
        "from graphmem.analyze import analyze; from graphmem.training.program import Program;"
        f"assert analyze(Program({str(program)!r}, ())).details['program']['how'] == 'itself'"
    )
    printed = []
    for name, words in (("real", [str(program)]), ("pretended", ["-c", analysed])):
        (tmp_path / name).mkdir()
        ran = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / name, capture_output=True, text=True, check=True, timeout=300
        )
        printed.append(ran.stdout)
    assert printed[1] == printed[0]
    assert os.listdir(tmp_path / "pretended") == []


def test_the_directory_of_a_real_archive_says_nothing_is_hollow(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    with (tmp_path / "model.pt").open("rb") as file:
        sizes, hollow = saved_files._directory(file)
    assert (sizes["data/0"], hollow) == (12, set())
