"""``graphmem doctor``: the installed libraries, whether their versions are known, and the loss where one is missing.

Versions are read from the packages' metadata, so nothing is imported, but for packages that load with one build of
PyTorch alone, in a process of their own. With ``--names`` PyTorch is: every private name that graphmem declares
(:mod:`graphmem.torch_names`) is looked up in it.

Exit codes: 0 all that is installed can be used (what is newer than the newest known is told); 3 something is older
than what is followed or does not load, or PyTorch lacks a name; 1 and 2 as everywhere.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import click

from graphmem.base import versions
from graphmem.base.options import option
from graphmem.cli.fields import takes
from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, publish
from graphmem.cudnn.library import AUTO, find_library
from graphmem.reports import Format
from graphmem.reports.document import Column, Document, Items, Table, Text, section
from graphmem.torch_names import Declaration, lacking

SCHEMA = "graphmem.doctor/1"
NOT_AS_KNOWN = 3


@dataclass(frozen=True)
class Library:
    """A library that graphmem follows. ``packages``: the distributions that bring it, of which one is installed.
    ``newest``: the newest version that was compared with recordings or read; ``without``: questions without an answer
    where it is not installed. ``module``: what is imported to see whether it loads, empty for nothing."""

    name: str
    packages: tuple[str, ...]
    newest: str
    without: str
    oldest: str = ""
    module: str = ""


CUDNN = "cuDNN"
#: Seconds that an import may take.
_PATIENCE = 120
LIBRARIES = (
    Library(
        "PyTorch",
        ("torch",),
        versions.words(versions.NEWEST),
        "only ONNX graphs, traces and serving engines are answered",
        oldest=versions.words(versions.OLDEST_INSTALLED),
    ),
    Library("transformers", ("transformers",), "5.23", "no model of transformers is loaded (hf:FOLDER)"),
    Library("timm", ("timm",), "", "no model of timm is loaded"),
    Library("torchvision", ("torchvision",), "", "no model of torchvision is loaded", module="torchvision"),
    Library("Keras", ("keras",), "3.15", "no model of Keras is loaded"),
    Library("ONNX Runtime", ("onnxruntime", "onnxruntime-gpu"), "1.32", "ONNX graphs are not optimised as it does"),
    Library(
        "TensorFlow",
        ("tensorflow", "tensorflow-cpu", "tensorflow-gpu"),
        "2.21",
        "steps of Keras on TensorFlow are not prepared",
    ),
    Library("vLLM", ("vllm",), "0.32", ""),
    Library(
        CUDNN,
        ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        versions.cudnn_words(max(versions.WHEEL_CUDNN.values())).rpartition(".")[0],
        "plans of convolutions are predicted, not asked",
        oldest="9.8",
    ),
    Library("matplotlib", ("matplotlib",), "", "no curves in reports"),
    Library("joblib", ("joblib",), "", "sweeps run one after another"),
    Library("NVML", ("nvidia-ml-py",), "", "nothing is measured on a card"),
)


@dataclass(frozen=True)
class Finding:
    """A library, installed or not. ``state``: ``known``, ``newer`` (than the newest known), ``older`` (than what is
    followed), ``broken`` (it does not load, for the reason in ``trouble``), ``not installed``, or ``installed`` where
    no version is held to be known."""

    name: str
    installed: str
    state: str
    newest: str
    oldest: str
    extra: str
    without: str
    trouble: str = ""


@dataclass(frozen=True)
class Lookup:
    """Look-ups beside those of versions."""

    names: bool = option(False, "Also import PyTorch and look up every private name that is used.")


@click.command("doctor")
@takes("", Lookup)
@form_options
def doctor_command(names: bool, form: Format, output: str | None) -> None:
    """Say which of the libraries that graphmem follows are installed, whether their versions are known, and what is
    lost without them. Exits with 3 where something is older than what is followed or does not load, or PyTorch lacks a
    name; what is newer than what is known is told."""
    check_output(output)
    findings = [found(library, _extras()) for library in LIBRARIES]
    lacks = lacking() if names and findings[0].installed else None
    publish(_document(findings, lacks), form, output)
    if lacks or any(finding.state in ("older", "broken") for finding in findings):
        click.get_current_context().exit(NOT_AS_KNOWN)


def found(library: Library, extras: Mapping[str, str]) -> Finding:
    """A library as it is installed. ``extras``: distribution -> the extra of graphmem that brings it."""
    text = next(filter(None, map(_version, library.packages)), "") or (_system_cudnn() if library.name == CUDNN else "")
    extra = next((extras[package] for package in library.packages if package in extras), "")
    trouble = _trouble(library.module) if text and library.module else ""
    state = "broken" if trouble else _state(text, library)
    return Finding(library.name, text, state, library.newest, library.oldest, extra, library.without, trouble)


def _trouble(module: str) -> str:
    """The last line of the error with which a module does not load; empty where it does, or takes minutes."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, errors="replace", check=False,
            timeout=_PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
    return lines[-1] if ran.returncode else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _system_cudnn() -> str:
    """The version in the file name of a cuDNN outside Python's packages; empty without one."""
    place = find_library(AUTO)
    numbered = re.search(r"\.so\.(\d+\.\d+[.\d]*)$", os.path.realpath(place)) if place else None
    return numbered[1] if numbered else ""


def _state(text: str, library: Library) -> str:
    if not text:
        return "not installed"
    version = versions.version_of(text)
    if library.oldest and version < versions.version_of(library.oldest):
        return "older"
    if not library.newest:
        return "installed"
    return "newer" if version > versions.version_of(library.newest) else "known"


def _extras() -> dict[str, str]:
    """The first extra, but for ``dev``, that names each distribution, from graphmem's own metadata."""
    extras: dict[str, str] = {}
    for requirement in _requirements():
        named = re.match(r"([\w.-]+)", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if named is not None and extra is not None and extra[1] != "dev":
            extras.setdefault(named[1].lower(), extra[1])
    return extras


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("graphmem") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _document(findings: Sequence[Finding], lacks: Sequence[Declaration] | None) -> Document:
    """A row a library, the losses, and the private names that PyTorch lacks, where they were looked up."""
    columns = [Column(title, wraps=False) for title in ("library", "installed", "newest known", "")]
    rows = [(one.name, one.installed or "-", one.newest or "-", one.state) for one in findings]
    table = Table(columns, rows)
    remarks = Text([remark for one in findings for remark in _remarks(one)])
    sections = [section("", table), section("", remarks)]
    if lacks is not None:
        title = f"private names of PyTorch: {f'{len(lacks)} gone' if lacks else 'all there'}"
        sections.append(section(title, Items([f"{one.path}: {one.lost} ({one.file})" for one in lacks])))
    return Document("doctor", "What is installed", sections, lambda: _data(findings, lacks), table)


def _data(findings: Sequence[Finding], lacks: Sequence[Declaration] | None) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "libraries": [asdict(finding) for finding in findings],
        "names": None if lacks is None else [asdict(one) for one in lacks],
    }


def _remarks(finding: Finding) -> Iterator[str]:
    name, text = finding.name, finding.installed
    if finding.state == "newer":
        yield f"{name} {text} is newer than {finding.newest}, the newest known: its rules are applied."
    elif finding.state == "older":
        yield f"{name} {text} is older than {finding.oldest}, the oldest followed: upgrade it."
    elif finding.state == "broken":
        yield f"{name} {text} does not load: {finding.trouble}. Install the one that belongs to this PyTorch."
    elif not text and finding.without:
        how = f" (pip install 'graphmem[{finding.extra}]')" if finding.extra else ""
        yield f"{name} is not installed: {finding.without}{how}."
