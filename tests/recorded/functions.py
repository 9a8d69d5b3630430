"""Single functions and modules (:mod:`tests.recorded.cases.functions`): run, predicted, and where they are kept."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphmem.cudnn.library import Cudnn
from tests import places
from tests.recorded import differ
from tests.recorded.case import Documents, named
from tests.recorded.cases.functions import CASES, Case
from tests.recorded.kind import Changes
from tests.recorded.predict import predicted_changes, predicted_together
from tests.recorded.record import load, record_version

FOLDER = places.PYTORCH / "functions"
#: In the folder of a version of which not every kind is recorded.
OTHER_FILE = "functions.jsonl.gz"


def run(case: Case, mark: Callable[[], None]) -> None:
    """Set the case up, then run it between two calls of ``mark``; everything that it returns stays alive."""
    torch.manual_seed(0)
    tensors = [tensor.make() for tensor in case.tensors]
    arguments = [case.module().to("cuda"), *tensors] if case.module is not None else tensors
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(case.grad):
            mark()
            outputs = case.run(*arguments)
            roots = [out for out in leaves(outputs) if out.requires_grad]
            gradients = [torch.empty_like(root) for root in roots]
            if roots:
                torch.autograd.backward(roots, gradients)
            mark()
    finally:
        gc.enable()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def predict(case: Case, selected: float | None = 0.0, cudnn: Cudnn | None = None) -> list[int]:
    """Allocations (positive bytes) and frees (negative) of the case, in order. Raises what a capture raises.

    ``selected``: the share that masks and the like select; none in recordings, where every value is 0. ``cudnn``: the
    library that is asked.
    """
    return predicted_changes(lambda mark: run(case, mark), case.name, data_dependent=selected, cudnn=cudnn)


def predict_version(names: Sequence[str], torch_version: tuple[int, int]) -> dict[str, list[int] | None]:
    """Those cases as that version would run them; None for those that raise. In one capture, as they were recorded in
    one process: what a thread keeps, as cublasLt's buffer of some versions, is in the first case that takes it."""
    runs = [functools.partial(run, CASES[name]) for name in names]
    return dict(zip(names, predicted_together(runs, "functions", torch_version=torch_version), strict=True))


def recordings() -> Documents:
    """Every recording by name of its case."""
    return load(FOLDER)


def other_recordings(version: places.Version) -> dict[str, list[int]]:
    """What was recorded of a version of which not every kind was, by name of the case; those that it could run."""
    documents = load(places.of_torch(version))
    return {name: document["changes"] for name, document in documents.items() if "changes" in document}


def done_otherwise(version: places.Version) -> list[str]:
    """The cases that this version does otherwise than the recorded one that all kinds are of, but for convolutions:
    their workspaces are those of the wheel's cuDNN, which the stub can ask from 9.10 on."""
    here = recordings()
    return [
        name
        for name, changes in other_recordings(version).items()
        if changes != here[name].get("changes") and not name.startswith("deterministic_conv")
    ]


class _OtherVersions:
    """Functions of versions of which not every kind was recorded: ``record`` with the environment of one."""

    def record(self, arguments: list[str]) -> int:
        record_version(CASES, run, arguments)
        return 0

    def table(self, arguments: list[str]) -> int:
        """How close the predictions for each version come, in what it does otherwise."""
        for version in other_versions():
            print(".".join(map(str, version)), end=": ")
            differ.table(*self._compared(version, arguments), [])
        return 0

    def differ(self, arguments: list[str]) -> int:
        """Where predictions leave the recordings, of the cases whose names contain an argument."""
        for version in other_versions():
            print(".".join(map(str, version)))
            differ.show(*self._compared(version, arguments), [])
        return 0

    def _compared(self, version: places.Version, parts: list[str]) -> tuple[Any, Any, Callable[[Case], list[int]]]:
        names = [name for name in done_otherwise(version) if named(CASES[name], parts)]
        predicted = predict_version(names, version)
        return {name: CASES[name] for name in names}, other_recordings(version), lambda case: predicted[case.name] or []


def other_versions() -> list[places.Version]:
    return [v for v in places.RECORDED if v not in places.WHOLE and (places.of_torch(v) / OTHER_FILE).is_file()]


KIND = Changes(CASES, FOLDER, run, predict)
OTHER_VERSIONS = _OtherVersions()
