"""``model.pt2``: a program saved by ``torch.export.save``. Its weights are loaded as fake tensors, never as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel


def load_exported_program(text: str) -> TorchModel:
    """Find the file; it is read later, on fake tensors. Raises :class:`SourceError` if it is missing."""
    path = Path(text)
    if not path.exists():
        raise SourceError(f"{path} does not exist")
    if not path.is_file():
        raise SourceError(f"{path} is not a file")
    return TorchModel(path.name, lambda sizes: _build(path, sizes))


def _build(path: Path, sizes: Sizes) -> Built:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        program = _read(path)
        inputs, keywords = _example_inputs(program)
        module = program.module(check_guards=False) if _has_guards() else program.module()
    from graphmem.sources.module_object import _fake_copy

    if sizes.batch is not None:
        raise SourceError(f"{path} was exported for fixed sizes; export it with the batch you want and drop --batch")
    example: Any = dict(keywords) if keywords and not inputs else tuple(inputs)
    built = _fake_copy(module, example, Sizes(training=sizes.training))
    return Built(built.model, built.inputs, None, ("inputs of the sizes the program was exported with",))


def _read(path: Path) -> Any:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise SourceError(f"{path} is not a program saved by torch.export.save: {first}") from None


def _example_inputs(program: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if program.example_inputs is None:
        raise SourceError("the exported program carries no example inputs; save it with torch.export.save")
    inputs, keywords = program.example_inputs
    return tuple(inputs), dict(keywords)


def _has_guards() -> bool:
    import inspect

    import torch

    return "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters
