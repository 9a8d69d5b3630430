"""The register of changes between versions of PyTorch: every change that a rule here follows.

A rule asks ``versions.FUSED_RMS_NORM.holds(torch_version)`` where it needs to know. ``versions.json`` has a row a name
(:class:`Since`): a change names its source and the releases whose CUDA builds were recorded on the stub driver;
versions that were not looked at are named. ``python -m graphmem.base.versions docs/modeling/versions.md`` writes the
register there as a table.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from graphmem.base.records import public_value
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError
from graphmem.units import KIB

Version = tuple[int, int]

#: The versions of PyTorch that can be predicted: the rules were checked against recordings of the newest.
OLDEST: Version = (1, 5)
NEWEST: Version = (2, 15)
#: The oldest that may be installed: what is replaced in PyTorch's Python code is named otherwise before.
OLDEST_INSTALLED: Version = (2, 6)
#: Those of which recordings of whole steps hold the predictions (tests/golden/pytorch).
RECORDED: tuple[Version, ...] = (
    (2, 1), (2, 4), (2, 6), (2, 7), (2, 8), (2, 9), (2, 10), (2, 11), (2, 12), (2, 13), (2, 14), (2, 15),
)  # fmt: skip
#: The one whose wheel's cuDNN was asked for the plans of convolutions that are predicted without one.
COUNTED_CUDNN: Version = (2, 13)


def version_of(text: str) -> Version:
    """(major, minor) of a release such as ``2.6.0+cu124``. Raises ValueError for text that does not begin like one."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2])


def words(version: Version) -> str:
    """``2.13`` for (2, 13)."""
    return ".".join(map(str, version))


# --- which version ----------------------------------------------------------------------------------------------------

_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.\d+)*(?:(?:a|b|rc|\.dev|\.post)\d*)?(?:\+[\w.]+)?")


def version_named(text: str | None) -> tuple[int, int]:
    """(major, minor) of ``2.6``, ``2.6.0`` or ``2.6.0+cu124``; None means the installed version, or the newest known.

    Versions after the newest known are taken, and noted by :func:`beyond_known`. Raises :class:`UsageError` for text
    that is no version, for versions before 2.4 and from 3.0 on.
    """
    if text is None:
        return installed_version() or NEWEST
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"torch version {text!r} is not a version; write it like 2.6 or 2.6.0")
    version = int(match[1]), int(match[2])
    if not OLDEST <= version < (3, 0):
        raise UsageError(f"unknown torch version {text!r}; accepted: {words(OLDEST)} to {words(NEWEST)}")
    return version


def installed_version() -> tuple[int, int] | None:
    """(major, minor) of the installed torch, None where there is none.

    Raises :class:`UsageError` if it is too old to run a step on fake tensors as graphmem does.
    """
    text = installed_text()
    if not text:
        return None
    version = installed() or (0, 0)
    if version < OLDEST_INSTALLED:
        raise UsageError(
            f"torch {text} is installed, and graphmem runs with {words(OLDEST_INSTALLED)} to {words(NEWEST)}; upgrade "
            f"torch, and write --torch-version {words(max(version, OLDEST))} to predict the older one"
        )
    return version


def installed() -> Version | None:
    """(major, minor) of the installed torch, however old; None where there is none."""
    text = installed_text()
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


@functools.cache
def installed_text() -> str:
    """The installed torch's whole version, such as ``2.13.0+cpu``; empty where there is none. Nothing is imported."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def of_this_pytorch() -> str:
    """The first remark where something in PyTorch is not as it was: whether its version is known."""
    version, text = installed(), installed_text().partition("+")[0]
    if version is not None and version > NEWEST:
        return f"PyTorch {text} is newer than {words(NEWEST)}, the newest known"
    return f"PyTorch {text or 'of no known version'} is not as it was released"


def version_notes(asked: tuple[int, int], installed: tuple[int, int]) -> list[str]:
    """Notes on a version that is not the installed one: the rules of it that are followed, and the cuDNN assumed."""
    notes = []
    if asked != installed:
        notes.append(
            f"PyTorch {words(asked)} is predicted with PyTorch {words(installed)} installed: its allocator and the "
            "allocator's options, cuBLAS's workspaces, the choice of attention kernels, and the kernels and composites "
            f"known to differ; but {words(installed)}'s Python code (optimizers, modules), gradient formulas and "
            "model library"
        )
    if asked != COUNTED_CUDNN:
        notes.append(
            f"cuDNN's convolution workspaces are those of PyTorch {words(COUNTED_CUDNN)}'s wheel, whatever version is "
            "predicted"
        )
    return notes


def beyond_known(asked: tuple[int, int]) -> list[Diagnostic]:
    """For the headline: that a version is newer than any whose rules are known; nothing for the others."""
    if asked <= NEWEST:
        return []
    return [Code.VERSION_NEWER.about(asked=words(asked), newest=words(NEWEST))]


def other_compiler(asked: tuple[int, int], installed: tuple[int, int]) -> list[Diagnostic]:
    """For the headline of a compiled step: that the compiler is not that of the version asked for."""
    if asked == installed:
        return []
    return [Code.OTHER_COMPILER.about(installed=words(installed), asked=words(asked))]


def allocator_settings(environment: Mapping[str, str], torch_version: Version) -> str:
    """The text of the caching allocator's options in this environment (CUDA's name wins, as in 2.13)."""
    newer = environment.get("PYTORCH_ALLOC_CONF") if REGISTER["NAME_OF_OPTIONS"].holds(torch_version) else None
    return environment.get("PYTORCH_CUDA_ALLOC_CONF") or newer or ""


def flag(environment: Mapping[str, str], name: str) -> bool | None:
    """``c10::utils::check_env``: 0 and 1 are understood, anything else is as if it were not set."""
    return {"0": False, "1": True}.get(environment.get(name, ""))


# --- workspaces of matrix products ----------------------------------------------------------------------------------

#: Variables that say how large libraries' workspaces are and how long they stay, and which library computes products
#: with a bias and attention.
WORKSPACE_VARIABLES = (
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "HIPBLAS_WORKSPACE_CONFIG",
    "HIPBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)


def workspace_variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those that are set, with their text: a trace depends on them."""
    return tuple((name, environment[name]) for name in WORKSPACE_VARIABLES if environment.get(name))


def workspace_bytes(environment: Mapping[str, str], is_rocm: bool) -> int | None:
    """Bytes of a workspace of cuBLAS, or rocBLAS, as the environment sets them (``parseChosenWorkspaceSize`` of
    ATen/cuda/CublasHandlePool.cpp); None where it does not. Raises :class:`UsageError` for text that has no size."""
    name, text = _given(environment, "BLAS_WORKSPACE_CONFIG", is_rocm)
    if not text:
        return None
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        raise UsageError(f"{name}={text!r} is not of the form :SIZE:COUNT[:SIZE:COUNT...] (KiB)")
    numbers = [int(part) for part in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * KIB


def lt_workspace_bytes(environment: Mapping[str, str], is_rocm: bool) -> int | None:
    """The same of cublasLt's, or hipBLASLt's (``parseCUDABlasLtWorkspaceSize``)."""
    name, text = _given(environment, "BLASLT_WORKSPACE_SIZE", is_rocm)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise UsageError(f"{name}={text!r} is not a number of KiB, such as 1024")
    return int(text) * KIB


def _given(environment: Mapping[str, str], name: str, is_rocm: bool) -> tuple[str, str]:
    """The variable and its text: CUDA's name, and where that is not set and the card is AMD's, ROCm's."""
    is_cuda = f"CU{name}" in environment or not is_rocm
    found = f"CU{name}" if is_cuda else f"HIP{name}"
    return found, environment.get(found, "")


# --- the register -----------------------------------------------------------------------------------------------------


@public_value(frozen=True, slots=True)
class Since:
    """One change: ``what``: its subject, the first ``version`` that has it (``since`` in the file), and how it was
    ``before`` and is ``now``.

    ``source``: the file of PyTorch, or the pull request. ``recorded``: releases whose builds were recorded or whose
    wheels were read. ``assumed``: the part nobody looked at, in words.
    """

    what: str
    version: Version
    before: str
    now: str
    source: str
    recorded: tuple[str, ...] = ()
    assumed: str = ""

    def holds(self, torch_version: Version) -> bool:
        """True if this version of PyTorch has the change."""
        return torch_version >= self.version


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
#: The register, ``versions.json``, by the name that a rule asks for.
REGISTER: Mapping[str, Since] = {
    name: Since(version=version_of(row.pop("since")), **{**row, "recorded": tuple(row.get("recorded", ()))})
    for name, row in _TABLES["changes"].items()
}
globals().update(REGISTER)
if TYPE_CHECKING:

    def __getattr__(name: str) -> Since: ...


#: Every key of the allocator's options with the first version that takes it, as far as releases and their notes show.
#: 2.12 was not run: it is taken to accept what is in its release notes.
ALLOCATOR_OPTIONS: Mapping[str, Version] = {
    name: version_of(text) for name, text in _TABLES["allocator_options"].items()
}
#: cuDNN of the default CUDA wheel on PyPI as an integer (9.20.0 is 92000): the requirements of the wheels of 2.4.1,
#: 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; that of 2.5 is assumed.
WHEEL_CUDNN: Mapping[Version, int] = {version_of(text): number for text, number in _TABLES["wheel_cudnn"].items()}


def wheel_cudnn(torch_version: Version) -> int:
    """cuDNN version as an integer (9.20.0 is 92000) of the default wheel of a torch release or of the one before."""
    known = [version for version in WHEEL_CUDNN if version <= torch_version]
    return WHEEL_CUDNN[max(known, default=min(WHEEL_CUDNN))]


#: The first PyTorch whose compiler has been compared with recordings; earlier ones keep other internals.
COMPILER_FOLLOWED_SINCE: Version = (2, 6)


# --- the table --------------------------------------------------------------------------------------------------------


def table() -> str:
    """The register as a table in Markdown, by version."""
    lines = [
        "| since | what | before | now | source | recorded with | assumed |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for change in sorted(REGISTER.values(), key=lambda change: change.version):
        cells = (change.before, change.now, change.source, ", ".join(change.recorded), change.assumed)
        lines.append(f"| {words(change.version)} | {change.what} | {' | '.join(cells)} |")
    lines += [
        "",
        "Keys of the allocator's options, by the first version that takes them:",
        "",
        "| since | keys |",
        "| --- | --- |",
    ]
    for version in sorted(set(ALLOCATOR_OPTIONS.values())):
        keys = ", ".join(f"`{key}`" for key, first in ALLOCATOR_OPTIONS.items() if first == version)
        lines.append(f"| {words(version)} | {keys} |")
    cudnn = ", ".join(f"{words(version)}: {cudnn_words(number)}" for version, number in WHEEL_CUDNN.items())
    lines += ["", f"cuDNN of the default CUDA wheel, which chooses between attention kernels: {cudnn}."]
    return "\n".join(lines) + "\n"


def cudnn_words(number: int) -> str:
    """``9.20.0`` for 92000."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


_BEGIN, _END = "<!-- register: begin -->\n", "<!-- register: end -->\n"


def with_table(page: str) -> str:
    """The page with the table between its two marks. Raises ValueError for a page without them."""
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no {_BEGIN.strip()} and {_END.strip()}")
    return head + begin + table() + end + tail


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
