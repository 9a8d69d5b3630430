"""``model.pt2``: a program saved by ``torch.export.save``. No weight is read, and nothing of the file is run.

The archive is read by :mod:`graphmem.sources.pt2_archive`, its document checked by :mod:`graphmem.sources.pt2_schema`,
and only then handed to PyTorch's own deserializer, with tensors without storage in place of the weights and with
inputs made of the sizes in the document in place of the pickled ones. What needs more (custom objects, operators of
other libraries, types of inputs that PyTorch would import) is refused, or opened by ``torch.export.load`` when the
user says that the file is trusted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from graphmem.capture.torch_internals import unset_fake_temporarily
from graphmem.errors import SourceError, first_line
from graphmem.sources.base import Built, Sizes, TorchModel, refuse_seq_len
from graphmem.sources.pt2_archive import KEPT_CONSTANT_BYTES, Archive, read_archive
from graphmem.sources.pt2_schema import Refused, checked_program, payload
from graphmem.torch_names import private

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn
    from torch.export import ExportedProgram

#: Positional and keyword inputs of a program.
Inputs: TypeAlias = tuple[tuple[object, ...], dict[str, object]]

_LOST = "programs of torch.export cannot be read"

_TRUST = "if you know where it comes from, open it with --trust (trust=True), which lets PyTorch run what it holds"


def load_exported_program(text: str, *, trust: bool = False) -> TorchModel:
    """Find the file; it is read later, on fake tensors. With ``trust`` PyTorch's own loader reads it, which can run
    code of the file. Raises :class:`SourceError` if it is missing."""
    path = Path(text)
    if not path.exists():
        raise SourceError(f"{path} does not exist")
    if not path.is_file():
        raise SourceError(f"{path} is not a file")
    return TorchModel(path.name, lambda sizes: _build(path, sizes, trust))


def _build(path: Path, sizes: Sizes, trust: bool) -> Built:
    with unset_fake_temporarily():
        program = _loaded_by_torch(path) if trust else read_program(path)
    return build_program(program, str(path), sizes)


def build_program(program: ExportedProgram, name: str, sizes: Sizes) -> Built:
    """The module of an ``ExportedProgram`` with its own example inputs; ``--batch`` resizes those dimensions 0 that it
    was exported with as dynamic. Raises :class:`SourceError` where there is none, or not for that size."""
    from graphmem.sources.module_object import fake_copy

    refuse_seq_len(sizes, name)
    with unset_fake_temporarily():
        inputs, keywords = _example_inputs(program)
        if sizes.batch is not None:
            inputs, keywords = _with_batch(program, name, (inputs, keywords), sizes.batch)
        module = program.module(check_guards=False) if _has_guards() else program.module()
    example: Any = dict(keywords) if keywords and not inputs else tuple(inputs)
    if inputs and keywords:
        example = _all_by_name(module, inputs, keywords)
    built = fake_copy(module, example, Sizes(training=sizes.training))
    but = "" if sizes.batch is None else f", with a batch of {sizes.batch}"
    return Built(built.model, built.inputs, None, (f"inputs of the sizes the program was exported with{but}",))


def _loaded_by_torch(path: Path) -> ExportedProgram:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        raise SourceError(f"{path} is not a program saved by torch.export.save: {first_line(error)}") from None


def read_program(path: Path) -> ExportedProgram:
    """The ``ExportedProgram`` of the file, its weights without storage. Raises :class:`SourceError`."""
    archive = read_archive(path)
    try:
        document = checked_program(archive.program)
        weights, constants = _tensors(archive, document)
        return _deserialized(document, weights, constants)
    except Refused as error:
        raise SourceError(f"{path} is not opened: {error}; {_TRUST}") from None
    except SourceError:
        raise
    except Exception as error:  # PyTorch's deserializer asserts and indexes as it pleases
        raise SourceError(f"{path} is not a program that this PyTorch reads: {first_line(error)}") from None


def _deserialized(
    document: Mapping[str, object], weights: dict[str, Tensor], constants: dict[str, Tensor]
) -> ExportedProgram:
    schema = private("torch._export.serde.schema", _LOST)
    serialize = private("torch._export.serde.serialize", _LOST)

    program = serialize._dict_to_dataclass(schema.ExportedProgram, document)
    loaded = serialize.ExportedProgramDeserializer().deserialize(program, weights, constants, None)
    loaded._example_inputs = _sample_inputs(document, loaded)
    return loaded


# --- tensors without storage ------------------------------------------------------------------------------------------


def _tensors(archive: Archive, document: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters and buffers, constants) by their names in the model."""
    import torch

    module = document["graph_module"]
    known = module["graph"]["tensor_values"]
    weights: dict[str, Tensor] = {}
    constants: dict[str, Tensor] = {}
    for spec in module["signature"]["input_specs"]:
        kind, held = next(iter(spec.items()))
        if kind not in ("parameter", "buffer", "tensor_constant"):
            continue
        name = held[f"{kind}_name"]
        is_weight = kind == "parameter" or held.get("persistent", False)
        place = (archive.weights if is_weight else archive.constants).get(name)  # the older layout does not say
        where = {} if place is None else cast("dict[str, Any]", payload(place))
        meta = where.get("tensor_meta") or known.get(held["arg"]["name"])
        if meta is None:
            raise Refused(f"nothing says how large {name} is")
        tensor = _small_value(archive, where, meta) if kind != "parameter" else None
        if tensor is None:
            tensor = _without_storage(meta)
        if kind == "parameter":
            tensor = torch.nn.Parameter(tensor, requires_grad=meta["requires_grad"])
        (weights if is_weight else constants)[name] = tensor
    return weights, constants


def _without_storage(meta: Mapping[str, Any]) -> Tensor:
    import torch

    return torch.empty_strided(_numbers(meta["sizes"]), _numbers(meta["strides"]), dtype=_dtype(meta), device="meta")


def _small_value(archive: Archive, payload: Mapping[str, Any], meta: Mapping[str, Any]) -> Tensor | None:
    """A small constant with its values, from raw bytes; None where there are none, or they lie in a pickle."""
    import torch

    data = archive.values.get(payload.get("path_name", ""))
    if data is None or payload["use_pickle"]:
        return None
    sizes, strides, dtype = _numbers(meta["sizes"]), _numbers(meta["strides"]), _dtype(meta)
    if len(data) % dtype.itemsize or math.prod(sizes) * dtype.itemsize > KEPT_CONSTANT_BYTES:
        return None
    flat = torch.frombuffer(bytearray(data), dtype=dtype)
    return flat.as_strided(sizes, strides, _numbers([meta["storage_offset"]])[0]).clone()


def _dtype(meta: Mapping[str, Any]) -> dtype:
    known = private("torch._export.serde.serialize._SERIALIZE_TO_TORCH_DTYPE", _LOST)

    if meta["dtype"] not in known:
        raise Refused(f"this PyTorch has no type number {meta['dtype']}")
    return known[meta["dtype"]]


def _numbers(sizes: list[Any]) -> tuple[int, ...]:
    """Sizes as numbers; a symbolic one is that of the sample inputs."""
    return tuple(_number(size) for size in sizes)


def _number(size: Mapping[str, Any]) -> int:
    if "as_int" in size:
        found = size["as_int"]
    else:
        hint = size["as_expr"].get("hint")
        if hint is None or "as_int" not in hint:
            raise Refused(f"nothing says how large {size['as_expr']['expr_str']} is in the sample inputs")
        found = hint["as_int"]
    if not found >= 0:
        raise Refused(f"a size of {found}")
    return int(found)


def _sample_inputs(document: Mapping[str, Any], program: ExportedProgram) -> Inputs:
    """The inputs that the program was exported with, as far as they matter: sizes, types, and plain values."""
    _pytree = private("torch.utils._pytree", _LOST)

    module = document["graph_module"]
    graph, specs = module["graph"], module["signature"]["input_specs"]
    values = [
        _sample(spec, graph["inputs"][index], graph)
        for index, spec in enumerate(specs)
        if next(iter(spec)) in ("user_input", "constant_input")
    ]
    args, kwargs = _pytree.tree_unflatten(values, program.module_call_graph[0].signature.in_spec)
    return tuple(args), dict(kwargs)


def _sample(spec: Mapping[str, Any], argument: Mapping[str, Any], graph: Mapping[str, Any]) -> object:
    kind, held = next(iter(spec.items()))
    if kind == "constant_input":
        return _plain(held["value"])
    kind, held = next(iter(argument.items()))
    if kind == "as_tensor":
        return _without_storage(graph["tensor_values"][held["name"]])
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool") and "as_name" in held:
        return _number(graph[f"{kind.removeprefix('as_')}_values"][held["as_name"]])
    return _plain(argument)


def _plain(value: Mapping[str, Any]) -> object:
    kind, held = next(iter(value.items()))
    if kind == "as_none":
        return None
    if kind in ("as_int", "as_float", "as_bool", "as_string"):
        return float(held) if kind == "as_float" else held
    raise Refused(f"an input of the kind {kind}")


def _example_inputs(program: ExportedProgram) -> Inputs:
    if program.example_inputs is None:
        raise SourceError("the exported program carries no example inputs; save it with torch.export.save")
    inputs, keywords = program.example_inputs
    return tuple(inputs), dict(keywords)


def _with_batch(program: ExportedProgram, name: str, inputs: Inputs, batch: int) -> Inputs:
    """The example inputs, those with a dynamic dimension 0 made ``batch`` long. Raises :class:`SourceError`."""
    import torch

    _pytree = private("torch.utils._pytree", _LOST)

    values, form = _pytree.tree_flatten(inputs)
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


def _all_by_name(module: nn.Module, inputs: tuple[object, ...], keywords: dict[str, object]) -> dict[str, object]:
    """Positional inputs beside keyword ones, under the names that ``forward`` has for them."""
    return dict(inspect.signature(module.forward).bind_partial(*inputs, **keywords).arguments)


def _has_guards() -> bool:
    import torch

    return "check_guards" in inspect.signature(torch.export.ExportedProgram.module).parameters
