"""A program of its own, which imports TensorFlow: traces a Keras model's step and lets TensorFlow's own graph
optimizer (Grappler) prepare it for a card that is not there.

    python -m graphmem.sources.tensorflow_program REQUEST.json STEP.json

REQUEST is ``{"text": "FILE.py:FACTORY", "batch", "seq_len", "training", "architecture"}``. STEP is the document that
:mod:`graphmem.runtimes.tensorflow.step` reads, or ``{"error": TEXT}``. Grappler takes the card from a description;
which kernels a card has comes from the registry of a CUDA build, with or without a card: other builds give
``{"unprepared": TEXT}``. No variable has memory behind it, and nothing is computed. Written against TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from graphmem.base.environment import having
from graphmem.sources.own_process import answer

if TYPE_CHECKING:
    import keras
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2, kernel_def_pb2, node_def_pb2, op_def_pb2
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

_TASK = "/job:localhost/replica:0/task:0/device:"
GPU, CPU = f"{_TASK}GPU:0", f"{_TASK}CPU:0"
#: Attributes that say something of what a kernel allocates.
_ATTRIBUTES = (
    "strides", "padding", "data_format", "dilations", "explicit_paddings", "ksize", "keep_dims", "transpose_a",
    "transpose_b",
    "adj_x", "adj_y", "is_training", "rnn_mode", "direction", "num_split", "fused_ops", "axis", "shrink_axis_mask",
    "new_axis_mask", "begin_mask", "end_mask", "num_proj", "use_cudnn_on_gpu", "equation", "time_major", "paddings",
    "frame_name", "is_constant", "parallel_iterations",
)  # fmt: skip
_SCOPE, _RETURN, _HANDLE = "step", "returned_", "/handle"
#: Constants of so many elements at most are written out: axes, permutations, shapes.
_SHORT = 16
#: The graphs that an operator runs, and what stands before the names of their operators once it is replaced by them.
_FUNCTIONS = {"While": ("cond", "body"), "StatelessWhile": ("cond", "body")}
_INLINED = re.compile(r"/(?:cond|body)/_\d+/")
#: The smallest dimension of a tensor that an initializer really makes, to be watched; larger ones are larger by one.
_FEW = 4


def _step(asked: dict[str, Any]) -> dict[str, Any]:
    """Build a Keras model and trace its step for a card that is not there; the answer, ready for JSON: the graph, the
    variables and how it runs. Sets variables of the environment."""
    os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    if not _has_card_kernels():
        return {"unprepared": "this build of TensorFlow has no kernels of a GPU"}
    from graphmem.sources.base import Sizes
    from graphmem.sources.factory import find_factory
    from graphmem.sources.keras_data import model_with_data

    factory, name = find_factory(asked["text"])
    sizes = Sizes(asked["batch"], asked["seq_len"], asked["training"])
    with _a_card(), _empty_variables() as made:
        model, x, y = model_with_data(factory, name, sizes)
        if sizes.training and model.compiled:
            if type(model).train_step is keras.Model.train_step:  # one of its own builds the optimizers that it uses
                model.optimizer.build(model.trainable_variables)
            data: tuple[Any, ...] = (x, y)
            body = model.train_step
        else:
            data, body = (x,), model.predict_step
        specs = keras.tree.map_structure(lambda one: tf.TensorSpec(tuple(one.shape), one.dtype), data)
        step = tf.function(lambda data: body(data), autograph=False).get_concrete_function(specs)
    eager = bool(model.compiled and model.run_eagerly)
    graph = _as_function_body(step) if eager else _optimized(step, asked["architecture"])
    return {
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "training": bool(sizes.training and model.compiled),
        "jit": bool(model.compiled and model.jit_compile and not model.run_eagerly),
        "eager": eager,
        "variables": made,
        **_written(step, graph, model),
    }


# --- a machine with a card, and no memory behind its variables --------------------------------------------------------


def _a_card() -> contextlib.AbstractContextManager[None]:
    """Keras asks TensorFlow for GPUs before it takes cuDNN's recurrent layers, or XLA."""
    import tensorflow as tf

    logical = tf.config.LogicalDevice("/device:GPU:0", "GPU")
    physical = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    def with_card(one: object, listed: Callable[[str | None], list[object]]) -> Callable[..., list[object]]:
        return lambda device_type=None: [
            *listed(device_type if device_type != "GPU" else "CPU")[: 0 if device_type == "GPU" else None],
            *([one] if device_type in (None, "GPU") else []),
        ]

    return having(
        tf.config,
        list_logical_devices=with_card(logical, tf.config.list_logical_devices),
        list_physical_devices=with_card(physical, tf.config.list_physical_devices),
    )


@contextlib.contextmanager
def _empty_variables() -> Iterator[list[dict[str, Any]]]:
    """Variables are made of untouched memory; yields them in the order of their making, each with the rows of
    :func:`_initializer_steps`."""
    import tensorflow as tf
    from keras.src.backend.tensorflow.core import Variable

    made: list[dict[str, Any]] = []
    kept, placed = Variable._initialize_with_initializer, Variable._initialize

    def initialize(self: keras.Variable, value: tf.Tensor) -> None:
        placed(self, value)
        own = self._value
        handles.append(own.handle)
        made.append({"handle": id(own.handle), "name": self.path, "trainable": bool(self.trainable),
                     "dtype": own.dtype.name, "shape": list(own.shape), "steps": []})  # fmt: skip

    scalars_on_card: set[int] = set()
    handles: list[tf.Tensor] = []  # also of variables that are dropped: no other gets their identity

    def with_initializer(self: keras.Variable, initializer: keras.Initializer) -> None:
        shape, dtype = tuple(self._shape), tf.as_dtype(self._dtype)
        steps: list[list[Any]] = []
        with contextlib.suppress(Exception):  # one that computes in Python has none
            steps = _initializer_steps(initializer, shape, self._dtype, scalars_on_card)
        if dtype.is_floating and len(shape) > 0:
            self._initialize(tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False))
        else:
            kept(self, initializer)
        made[-1]["steps"] = steps

    with having(Variable, _initialize_with_initializer=with_initializer, _initialize=initialize):
        yield made


def _initializer_steps(
    initializer: keras.Initializer, shape: tuple[int, ...], dtype: str, scalars_on_card: set[int]
) -> list[list[Any]]:
    """The tensors that an initializer makes on the card, in order: ``["+", PLACE, DTYPE, SHAPE]`` a tensor, ``["=",
    PLACE, OF]`` one that shares another's buffer, ``["-", PLACE]`` one that Python lets go; the last made is the value.
    Scalars from Python stay on the card once they were there; ``scalars_on_card`` holds their hashes and grows. The
    initializer runs on a few elements, for the order, and is traced with ``shape``, for the sizes."""
    import tensorflow as tf

    traced = tf.Graph()
    with traced.as_default():
        initializer(shape, dtype=dtype)
    operations = [op for op in traced.get_operations() if op.type != "Const"]
    ranks = {size: _FEW + rank for rank, size in enumerate(sorted(set(shape)))}
    few = tuple(min(size, ranks[size]) for size in shape)
    with _fans_of(shape):
        rows, ran = _watched(initializer, few, dtype, scalars_on_card)
    alike = ran == [op.type for op in operations]
    for row in rows:
        if row[0] == "+" and isinstance(row[2], int):  # the output of an operator
            number, output, own = row[2:]
            known = _tensor(operations[number].outputs[output]) if alike else own
            row[2:] = [known[0], list(shape) if not alike and known[1] == list(few) else known[1]]
    return rows


def _fans_of(shape: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
    """Initializers scale by the fans of ``shape``, whatever they fill: one scalar a scale is kept on the card."""
    from keras.src.initializers import random_initializers

    kept = random_initializers.compute_fans
    return having(random_initializers, compute_fans=lambda _, **axes: kept(shape, **axes))


def _watched(
    initializer: keras.Initializer, shape: tuple[int, ...], dtype: str, scalars_on_card: set[int]
) -> tuple[list[list[Any]], list[str]]:
    """The rows of an initializer that runs eagerly, outputs as (operator's number, position, tensor), and its
    operators."""
    from tensorflow.python.framework import constant_op, op_callbacks

    watch = _Watch(scalars_on_card)
    made_constant = constant_op.convert_to_eager_tensor

    def converted(*arguments: object, **options: object) -> tf.Tensor:
        tensor = made_constant(*arguments, **options)
        if tensor.dtype.name != "int32":
            watch.constant(tensor)
        return tensor

    op_callbacks.add_op_callback(watch.after)
    try:
        with having(constant_op, convert_to_eager_tensor=converted):
            value = initializer(shape, dtype=dtype)
            found = list(watch.rows)  # before Python lets the value go
            del value
    finally:
        op_callbacks.remove_op_callback(watch.after)
    return found, watch.ran


class _Watch:
    """Tensors that eager operators make and Python lets go, as rows of :func:`_initializer_steps`."""

    def __init__(self, scalars_on_card: set[int]) -> None:
        self.rows: list[list[Any]] = []
        self.ran: list[str] = []
        self._scalars_on_card = scalars_on_card
        self._places: dict[int, int] = {}
        self._numbers = itertools.count()

    def constant(self, tensor: tf.Tensor) -> None:
        """A constant comes onto the card; a scalar that was there before is there."""
        row = ["+", *_tensor(tensor)]
        if tensor.shape.rank != 0:
            self._placed(tensor, row)
            return
        value = hash((tensor.dtype.name, float(tensor.numpy())))
        if value not in self._scalars_on_card:
            self._placed(tensor, row, stays=True)
        self._scalars_on_card.add(value)

    def after(
        self, kind: str | bytes, inputs: Sequence[tf.Tensor], attributes: Sequence[Any], outputs: Sequence[tf.Tensor],
        *_: object,
    ) -> None:  # fmt: skip
        """Called by TensorFlow after every operator."""
        kind = kind.decode() if isinstance(kind, bytes) else kind
        for position, tensor in enumerate(inputs):
            if id(tensor) not in self._places and position not in _host_inputs(kind, attributes):
                self.constant(tensor)
        for position, tensor in enumerate(outputs):
            if kind in ("Reshape", "Identity") and id(inputs[0]) in self._places:
                self._placed(tensor, ["=", self._places[id(inputs[0])]])
            else:
                self._placed(tensor, ["+", len(self.ran), position, _tensor(tensor)])
        self.ran.append(kind)

    def _placed(self, tensor: tf.Tensor, row: list[object], *, stays: bool = False) -> None:
        place = next(self._numbers)
        self._places[id(tensor)] = place
        self.rows.append([row[0], place, *row[1:]])
        if not stays:
            weakref.finalize(tensor, self._let_go, id(tensor), place).atexit = False

    def _let_go(self, identity: int, place: int) -> None:
        self._places.pop(identity, None)
        self.rows.append(["-", place])


def _host_inputs(kind: str, attributes: Sequence[Any]) -> set[int]:
    """Positions of the inputs that an operator's kernel for a card keeps on the host. ``attributes`` are names and
    values in turn."""
    from tensorflow.python.framework import kernels, op_def_registry

    given = dict(zip(attributes[::2], attributes[1::2], strict=True))
    named: set[str] = set()
    for kernel in kernels.get_registered_kernels_for_op(kind).kernel:
        types = [(given.get(one.name), one.allowed_values.list.type) for one in kernel.constraint]
        if kernel.device_type in ("GPU", "DEFAULT") and all(
            not allowed or value is None or int(value) in allowed for value, allowed in types
        ):
            named.update(kernel.host_memory_arg)
    arguments = op_def_registry.get(kind).input_arg
    return {position for position, argument in enumerate(arguments) if argument.name in named}


# --- Grappler ---------------------------------------------------------------------------------------------------------


def _optimized(step: ConcreteFunction, architecture: str) -> graph_pb2.GraphDef:
    """The graph that TensorFlow would run: inlined, placed, and rewritten by Grappler for a card of ``architecture``
    (``"9.0"``)."""
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    meta = meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(_as_function_body(step))
    signature = meta.signature_def["step"]
    for index, tensor in enumerate(step.outputs):
        signature.outputs[str(index)].name = f"{_RETURN}{index}:0"
        signature.outputs[str(index)].dtype = tensor.dtype.as_datatype_enum
    kept = [op.name for op in step.graph.control_outputs]
    meta.collection_def["train_op"].node_list.value.extend(kept)

    def described(name: str, kind: str, **environment: str) -> device_properties_pb2.NamedDevice:
        device = device_properties_pb2.NamedDevice(name=name)
        device.properties.type = kind
        device.properties.num_cores, device.properties.frequency = 16, 1000
        device.properties.memory_size = 1 << 36
        device.properties.environment.update(environment)
        return device

    devices = [described(CPU, "CPU"), described(GPU, "GPU", architecture=architecture, cuda="12050", cudnn="90000")]
    settings = config_pb2.ConfigProto()
    settings.graph_options.rewrite_options.min_graph_nodes = -1
    return tf_optimizer.OptimizeGraph(settings, meta, graph_id=b"step", cluster=cluster.Cluster(devices=devices))


def _as_function_body(step: ConcreteFunction) -> graph_pb2.GraphDef:
    """The graph as the runtime hands it to Grappler: arguments first, nodes in the order of their making, returned
    values last (``FunctionDefToBodyHelper``, function_def_utils.cc). The order decides in which order kernels run."""
    from tensorflow.core.framework import graph_pb2

    graph = step.graph.as_graph_def()
    nodes = {node.name: node for node in graph.node}
    arguments = [tensor.op.name for tensor in step.inputs]
    body = graph_pb2.GraphDef(versions=graph.versions, library=graph.library)
    for index, tensor in enumerate(step.inputs):
        _add_argument(body, index, tensor)
    rest = [op.name for op in step.graph.get_operations() if op.name not in set(arguments)]
    body.node.extend(nodes[name] for name in rest)
    for node in body.node:
        node.device = GPU if _kernel(node) is not None else CPU
    for index, tensor in enumerate(step.outputs):
        returned = body.node.add(op="_Retval", name=f"{_RETURN}{index}", input=[tensor.name], device=GPU)
        returned.attr["T"].type = tensor.dtype.as_datatype_enum
        returned.attr["index"].i = index
    return body


def _add_argument(body: graph_pb2.GraphDef, index: int, tensor: tf.Tensor) -> None:
    """An argument with its shape, as the runtime knows it (``SetArgShape``, process_function_library_runtime.cc).
    Grappler's reader forgets the shapes of tensors and keeps those of variables, so that a tensor is read from one."""
    from tensorflow.python.framework import dtypes
    from tensorflow.python.ops import handle_data_util

    name, is_variable = tensor.op.name, tensor.dtype == dtypes.resource
    argument = body.node.add(op="_Arg", name=name if is_variable else f"{name}{_HANDLE}")
    argument.attr["T"].type = dtypes.resource.as_datatype_enum
    argument.attr["index"].i = index
    handle = handle_data_util.get_resource_handle_data(tensor) if is_variable else None
    if handle is not None and handle.is_set:
        argument.attr["_handle_dtypes"].list.type.append(handle.shape_and_type[0].dtype)
        argument.attr["_handle_shapes"].list.shape.add().CopyFrom(handle.shape_and_type[0].shape)
    if not is_variable:
        argument.attr["_handle_dtypes"].list.type.append(tensor.dtype.as_datatype_enum)
        argument.attr["_handle_shapes"].list.shape.add().CopyFrom(tensor.shape.as_proto())
        read = body.node.add(op="ReadVariableOp", name=name, input=[argument.name])
        read.attr["dtype"].type = tensor.dtype.as_datatype_enum


def _has_card_kernels() -> bool:
    """Whether this build knows which kernels a card has, as the Linux wheel ``tensorflow`` does on any machine."""
    from tensorflow.python.framework import kernels

    return any(kernel.device_type == "GPU" for kernel in kernels.get_registered_kernels_for_op("MatMul").kernel)


def _kernel(node: node_def_pb2.NodeDef) -> kernel_def_pb2.KernelDef | None:
    """The kernel that a card has for a node; None where there is none."""
    from tensorflow.python.framework import kernels

    registered = kernels.get_registered_kernels_for_op(node.op).kernel
    for kernel in sorted(registered, key=lambda one: one.device_type == "DEFAULT"):  # of any device without its own
        if (
            kernel.device_type in ("GPU", "DEFAULT")
            and not kernel.label
            and all(
                not constraint.allowed_values.list.type
                or node.attr[constraint.name].type in constraint.allowed_values.list.type
                for constraint in kernel.constraint
            )
        ):
            return kernel
    return None


# --- the document -----------------------------------------------------------------------------------------------------


def _written(step: ConcreteFunction, graph: graph_pb2.GraphDef, model: keras.Model) -> dict[str, object]:
    import tensorflow as tf
    from tensorflow.python.ops import handle_data_util

    shaped = tf.Graph()
    read = {node.name for node in graph.node}
    with shaped.as_default():
        arguments = {}
        for inner in step.inputs:
            if inner.op.name not in read:  # a part of the batch that the step does not look at
                continue
            made = tf.compat.v1.placeholder(inner.dtype, inner.shape, inner.op.name)
            if inner.dtype == tf.resource:
                handle_data_util.set_handle_data(made, handle_data_util.get_resource_handle_data(inner))
            arguments[inner.name] = made
        tf.import_graph_def(graph, input_map=arguments, name=_SCOPE)
    inputs = {tensor.op.name for tensor in step.inputs}
    inner = _inner_shapes(step.graph)
    rows = [_node(node, shaped, inner) for node in graph.node if node.name not in inputs and node.op != "_Arg"]
    slots = {id(variable._value.handle) for optimizer in _optimizers(model) for variable in optimizer.variables}
    captured = {inner.op.name: id(outer) for outer, inner in step.graph.captures}
    data = [[*_tensor(t), t.op.name] for t in step.inputs if t.op.name not in captured]
    return {
        "nodes": rows,
        "captured": captured,
        "optimizer": sorted(slots),
        "data": data,
    }


def _optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizer that the model was compiled with, and those that its own ``train_step`` has as attributes."""
    import keras

    return [
        value for value in (model.optimizer, *vars(model).values()) if isinstance(value, keras.optimizers.Optimizer)
    ]


def _inner_shapes(graph: tf.Graph) -> dict[str, list[Any]]:
    """The outputs of operators in bodies and conditions of loops, by their name there. Where such graphs have become
    part of the outer one, shapes of what a gradient takes from lists are lost."""
    found: dict[str, list[Any]] = {}
    for operation in graph.get_operations():
        for name in _FUNCTIONS.get(operation.type, ()):
            function = graph._get_function(operation.get_attr(name).name).graph
            for inner in function.get_operations():
                found[inner.name] = [_tensor(output) for output in inner.outputs]
            found.update(_inner_shapes(function))
    return found


def _with_shapes(outputs: list[Any], name: str, inner: dict[str, list[Any]]) -> list[Any]:
    """The outputs of a node, those of unknown shapes as they were in the loop from whose body it comes."""
    known = inner.get(_INLINED.split(name)[-1], [])
    if len(known) != len(outputs):
        return outputs
    return [
        was if shape is None or None in shape else [dtype, shape]
        for (dtype, shape), was in zip(outputs, known, strict=True)
    ]


def _node(node: node_def_pb2.NodeDef, shaped: tf.Graph, inner: dict[str, list[object]]) -> dict[str, object]:
    operation = shaped.get_operation_by_name(f"{_SCOPE}/{node.name}")
    kernel = _kernel(node)
    row: dict[str, Any] = {
        "op": node.op,
        "name": node.name,
        "device": "gpu" if "GPU" in node.device else "cpu",
        "inputs": list(node.input),
        "outputs": _with_shapes([_tensor(out) for out in operation.outputs], node.name, inner),
        "host": _host_arguments(operation, kernel),
    }
    attributes = {name: operation.get_attr(name) for name in _ATTRIBUTES if name in node.attr}
    row["attributes"] = {key: _plain(value) for key, value in attributes.items()}
    if node.op == "Const":
        tensor = node.attr["value"].tensor
        elements = 1
        for dimension in tensor.tensor_shape.dim:
            elements *= dimension.size
        if elements <= _SHORT:
            from tensorflow.python.framework import tensor_util

            with contextlib.suppress(Exception):
                row["value"] = _plain(tensor_util.MakeNdarray(tensor).tolist())
    return row


def _host_arguments(operation: tf.Operation, kernel: kernel_def_pb2.KernelDef | None) -> list[list[int]]:
    """Positions of the inputs and of the outputs that the kernel keeps on the host."""
    if kernel is None or not kernel.host_memory_arg:
        return [[], []]
    named = set(kernel.host_memory_arg)
    return [
        _positions(operation, arguments, named)
        for arguments in (operation.op_def.input_arg, operation.op_def.output_arg)
    ]


def _positions(operation: tf.Operation, arguments: Iterable[op_def_pb2.OpDef.ArgDef], named: set[str]) -> list[int]:
    """Where the arguments of these names stand, each of which may be several tensors."""
    position, found = 0, list[int]()
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        if argument.name in named:
            found += range(position, position + count)
        position += count
    return found


def _tensor(tensor: tf.Tensor) -> list[Any]:
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
    return [tensor.dtype.base_dtype.name, shape]


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (bool, int, float, str)) else str(value)


if __name__ == "__main__":
    answer(_step, sys.argv, lambda error: f"{type(error).__name__}: {error}")
