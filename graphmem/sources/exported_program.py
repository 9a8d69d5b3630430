"""``model.pt2``: a program saved by ``torch.export.save``. Its weights are loaded as fake tensors, never as data."""

from __future__ import annotations

import inspect
import zipfile
from pathlib import Path
from typing import Any

from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel, refuse_seq_len


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
    return build_program(program, str(path), sizes)


def build_program(program: Any, name: str, sizes: Sizes) -> Built:
    """The module of an ``ExportedProgram`` with its own example inputs; ``--batch`` resizes those dimensions 0 that it
    was exported with as dynamic. Raises :class:`SourceError` where there is none, or not for that size."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from graphmem.sources.module_object import _fake_copy

    refuse_seq_len(sizes, name)
    with unset_fake_temporarily():
        inputs, keywords = _example_inputs(program)
        if sizes.batch is not None:
            inputs, keywords = _with_batch(program, name, inputs, keywords, sizes.batch)
        module = program.module(check_guards=False) if _has_guards() else program.module()
    example: Any = dict(keywords) if keywords and not inputs else tuple(inputs)
    if inputs and keywords:
        example = _all_by_name(module, inputs, keywords)
    built = _fake_copy(module, example, Sizes(training=sizes.training))
    but = "" if sizes.batch is None else f", with a batch of {sizes.batch}"
    return Built(built.model, built.inputs, None, (f"inputs of the sizes the program was exported with{but}",))


def _read(path: Path) -> Any:
    import torch

    if not zipfile.is_zipfile(path):
        raise SourceError(f"{path} is not a program saved by torch.export.save, or is cut off: it is no zip archive")
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


def _with_batch(
    program: Any, name: str, inputs: tuple[Any, ...], keywords: dict[str, Any], batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs, those with a dynamic dimension 0 made ``batch`` long. Raises :class:`SourceError`."""
    import torch
    from torch.utils import _pytree

    values, form = _pytree.tree_flatten((inputs, keywords))
    traced = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    changed = False
    for index, (placeholder, value) in enumerate(zip(program.graph_signature.user_inputs, values, strict=True)):
        shape: Any = getattr(traced.get(placeholder), "shape", ())
        if not len(shape) or not isinstance(shape[0], torch.SymInt):
            continue
        allowed = program.range_constraints.get(shape[0].node.expr)
        if allowed is not None and not int(allowed.lower) <= batch <= allowed.upper:
            raise SourceError(
                f"{name} was exported for batches of {allowed.lower} to {allowed.upper}, not {batch}; "
                "give one of those, or export it for more"
            )
        values[index], changed = value.new_empty((batch, *value.shape[1:])), True
    if not changed:
        raise SourceError(
            f"{name} was exported for fixed sizes; export it with the batch you want, or with a dynamic dimension 0 "
            "(torch.export.Dim), or drop --batch"
        )
    resized, named = _pytree.tree_unflatten(values, form)
    return tuple(resized), dict(named)


def _all_by_name(module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Positional inputs beside keyword ones, under the names that ``forward`` has for them."""
    return dict(inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments)


def _has_guards() -> bool:
    import torch

    return "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters
