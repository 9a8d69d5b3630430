"""CUDA's autocast on fake device tensors.

The C++ autocast kernels ask a tensor's C++ device whether it may be cast and would find ``meta``. While a capture
runs, the entries of the dispatcher's AutocastCUDA key are therefore replaced by these, which follow the same lists
(``aten/src/ATen/autocast_mode.h``, PyTorch 2.13: ``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_FP32``,
``AT_FORALL_FP32_SET_OPT_DTYPE``, ``AT_FORALL_PROMOTE``) and the same weight cache (``cached_cast``,
``aten/src/ATen/autocast_mode.cpp``): a float32 leaf that requires a gradient is cast once until the outermost context
ends, with a gradient function even where gradients are off, and every time anew in inference mode. Sitting in the
dispatcher, they also act inside C++ composites.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphmem.base import versions
from graphmem.base.tables import read_table
from graphmem.capture.kernels.parts.conv_backend import Backend
from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.convolution_layout import select_convolution_backend
from graphmem.capture.operators.recurrent.cudnn import weights_in_half
from graphmem.capture.patches import Kernels, Patches
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.tensors import HALF_TYPES
from graphmem.torch_names import private

#: The lists, by what autocast does: PyTorch's, in ``autocast.json``.
_LISTS: dict[str, list[str]] = read_table("graphmem.capture.operators", "autocast.json")
T = TypeVar("T")
_LOST = "autocast cannot be followed"
_excluded: Any = private("torch._C._ExcludeDispatchKeyGuard", _LOST)
_key_set: Any = private("torch._C.DispatchKeySet", _LOST)
_key: Any = private("torch._C.DispatchKey.AutocastCUDA", _LOST)


@functools.cache
def _keys() -> Any:
    return _key_set(_key if _key else None)


_IN_WORDS = {
    "lower_precision": "arguments are cast to the lower precision",
    "fp32": "arguments are cast to float32",
    "fp32_dtype_argument": "computes in float32, by its argument dtype",
    "promote": "arguments are cast to the widest type among them",
}


def autocast_of(func: OpOverload) -> str | None:
    """The casts of an overload's arguments under autocast, in words; None where it leaves them."""
    name = str(func).removeprefix("aten.").removesuffix(".default")
    return next((words for kind, words in _IN_WORDS.items() if name in _LISTS[kind]), None)


class _WeightCache:
    """Casts of float32 leaves, kept until the outermost autocast context ends.

    Who casts first may do so without gradients (a teacher, pseudo labels, the forward of an ``autograd.Function``), and
    training takes the same cast later: it is made with gradients on. Inference tensors are of no use to training and
    are not kept. Both since pull request 165068; before, a cast was kept as it came.
    """

    def __init__(self, torch_version: versions.Version) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._serves_training = versions.AUTOCAST_CACHE_SERVES_TRAINING.holds(torch_version)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._serves_training and torch.is_inference_mode_enabled():
            return tensor.to(dtype)
        held = self._casts.get(id(tensor))
        if held is not None:
            return held[1]
        with torch.enable_grad() if self._serves_training else contextlib.nullcontext():
            cast = tensor.to(dtype)
        self._casts[id(tensor)] = (tensor, cast)
        return cast

    def clear(self) -> None:
        self._casts.clear()


_Arguments = Sequence[object]


def _eligible(value: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: T, dtype: torch.dtype, cache: _WeightCache | None) -> T:
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype, cache) for item in value)
    if not _eligible(value) or value.dtype is dtype:
        return value
    cacheable = (
        dtype in HALF_TYPES
        and value.dtype is torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    cast: T = cache.cast(value, dtype) if cacheable and cache is not None else value.to(dtype)
    return cast


#: The type that the arguments of a call are cast to.
_Choice = Callable[[_Arguments], torch.dtype]


def _lower(_: _Arguments) -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _single(_: _Arguments) -> torch.dtype:
    return torch.float32


def _widest(values: _Arguments) -> torch.dtype:
    items = itertools.chain.from_iterable(value if isinstance(value, (list, tuple)) else (value,) for value in values)
    has_single = any(_eligible(item) and item.dtype is torch.float32 for item in items)
    return torch.float32 if has_single else torch.get_autocast_dtype("cuda")


def _casting(choice: _Choice, op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """Cast the last argument first: the C++ wrappers cast inside a call's argument list, and GCC, which builds the
    Linux wheels, evaluates that from right to left. Temporaries die the other way round (both seen in every recorded
    autocast run)."""

    def kernel(*args: object, **kwargs: object) -> object:
        dtype = choice((*args, *kwargs.values()))
        with _excluded(_keys()):
            named = {name: _cast(value, dtype, cache) for name, value in reversed(kwargs.items())}
            cast = [_cast(arg, dtype, cache) for arg in reversed(args)]
            out = op(*reversed(cast), **named)
            while cast:
                cast.pop()
            return out

    return kernel


def _with_dtype(op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """The operator computes in float32 unless its own argument names another type."""
    del cache
    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    keyword = op._schema.arguments[position].kwarg_only

    def kernel(*args: object, **kwargs: object) -> object:
        given = kwargs.get("dtype") is not None or (not keyword and len(args) > position and args[position] is not None)
        with _excluded(_keys()):
            if not given and _eligible(args[0]):
                args = args[:position] if not keyword else args
                kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _norm(op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """``norm`` has overloads that compute in another type, and they are called."""
    del cache
    norm = torch.ops.aten.norm
    with_dtype = norm.ScalarOpt_dtype if op is norm.Scalar else norm.ScalarOpt_dim_dtype

    def kernel(self: torch.Tensor, p: float | None = 2, *args: object, **kwargs: object) -> object:
        with _excluded(_keys()):
            if _eligible(self):
                return with_dtype(self, p, *args, **{**kwargs, "dtype": torch.float32})
            return op(self, p, *args, **kwargs)

    return kernel


def _recurrent(op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """``_cudnn_rnn_cast_reflatten`` (``aten/src/ATen/cudnn/AutocastRNN.cpp``): cuDNN's networks run in float16,
    whatever autocast's type is, on weights that are cast and laid out anew for every call."""
    half = torch.float16

    @named("aten._cudnn_rnn.default")
    def kernel(call: Arguments) -> object:
        with _excluded(_keys()):
            weight, weight_buf, mode, sizes = (
                call.weight,
                call.weight_buf,
                call.mode,
                (call.hidden_size, call.proj_size),
            )
            held = weight[0] if weight_buf is None else weight_buf
            if _eligible(held) and held.dtype is not half:
                layers = int(call.hx.shape[0])
                weight_buf, weight = weights_in_half(weight, call.weight_stride0, mode, *sizes, layers)
            cx = _cast(call.cx, half, cache)
            hx = _cast(call.hx, half, cache)
            input = _cast(call.input, half, cache)
            rest = (
                call.num_layers, call.batch_first, call.dropout, call.train, call.bidirectional, call.batch_sizes,
                call.dropout_state,
            )  # fmt: skip
            return op(input, weight, call.weight_stride0, weight_buf, hx, cx, mode, *sizes, *rest)

    return kernel


#: Backends of convolutions whose kernels, or what is behind them, call ``sum`` for the gradient of a bias.
_SUM_BIAS = (Backend.CUDNN, Backend.CUDNN_TRANSPOSE, Backend.DEPTHWISE_2D, Backend.DEPTHWISE_3D)
#: Backward operators of fused cells (native/cuda/RNN.cu): output that is summed -> output that is its sum.
_CELL_BIASES = {"_thnn_fused_lstm_cell_backward_impl": {0: 2}, "_thnn_fused_gru_cell_backward": {0: 3, 1: 4}}


def _sums_apart(values: torch.Tensor, has_bias: bool) -> bool:
    """Whether a backward operator's ``sum`` for the gradient of a bias gives another type than the operator without
    autocast. It is not cast itself, but ``sum`` is an operator of its own, which autocast has in float32. What a
    compiler traces stays one operator."""
    return has_bias and values.dtype in HALF_TYPES and get_proxy_mode() is None


def _convolution_backward(op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """``convolution_backward`` (ATen/native/Convolution.cpp) in a backward pass within autocast."""
    del cache

    @named("aten.convolution_backward.default")
    def kernel(call: Arguments) -> object:
        grad, mask = call.grad_output, list(call.output_mask)
        form = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups)
        apart = _sums_apart(grad, mask[2]) and select_convolution_backend(call.input, call.weight, *form) in _SUM_BIAS
        with _excluded(_keys()):
            mask[2] = mask[2] and not apart
            found = op(grad, call.input, call.weight, call.bias_sizes, *form, mask)
            return (*found[:2], grad.sum([0, *range(2, grad.dim())], dtype=torch.float32)) if apart else found

    return kernel


def _cell_backward(op: OpOverload, cache: _WeightCache | None) -> Decomposition:
    """The same of fused cells."""
    del cache
    biases = _CELL_BIASES[op._schema.name.removeprefix("aten::")]

    def kernel(*args: Any) -> object:
        *tensors, has_bias = args
        apart = _sums_apart(tensors[-1], has_bias)  # the workspace
        with _excluded(_keys()):
            found = list(op(*tensors, has_bias and not apart))
            for gates, bias in biases.items() if apart else ():
                found[bias] = found[gates].sum(0, dtype=torch.float32)
            return tuple(found)

    return kernel


def _overload(name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None) if found is not None else None


#: The operators of each list, and what makes their kernel.
_TABLES: tuple[tuple[Sequence[str], Callable[[OpOverload, _WeightCache | None], Decomposition]], ...] = (
    (_LISTS["lower_precision"], functools.partial(_casting, _lower)),
    (_LISTS["fp32"], functools.partial(_casting, _single)),
    (_LISTS["fp32_dtype_argument"], _with_dtype),
    (_LISTS["promote"], functools.partial(_casting, _widest)),
    (("norm.Scalar", "norm.ScalarOpt_dim"), _norm),
    (("_cudnn_rnn",), _recurrent),
    (("convolution_backward",), _convolution_backward),
    (tuple(_CELL_BIASES), _cell_backward),
)


def _reduced(x: torch.Tensor, cuda: bool, _cpu: bool, dtype: torch.dtype, _cpu_dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if cuda and x.is_cuda and x.dtype is torch.float32 else x


def _full(x: torch.Tensor, cuda: bool, _cpu: bool) -> torch.Tensor:
    return x.to(torch.float32) if cuda and x.is_cuda and x.dtype in HALF_TYPES else x


#: What TorchScript writes into its graphs for autocast; C++ would ask for the device (TensorConversions.cpp).
SCRIPTED: dict[OpOverload, Decomposition] = {
    torch.ops.aten._autocast_to_reduced_precision.default: _reduced,
    torch.ops.aten._autocast_to_full_precision.default: _full,
}


@contextlib.contextmanager
def cuda_autocast(torch_version: versions.Version) -> Iterator[None]:
    """Autocast for fake device tensors works as in the CUDA build of that version for the duration."""
    with _excluded(_keys()):  # raises MissingName here, not in the middle of a step
        cache = _WeightCache(torch_version)
    kernels, patches = Kernels(), Patches()
    try:
        for names, make in _TABLES:
            for op in filter(None, map(_overload, names)):
                kernels.set(
                    op, make(op, cache), "AutocastCUDA", make(op, None)
                )  # nobody follows other threads' contexts
        patches.set(torch, "clear_autocast_cache", cache.clear)
        yield
    finally:
        cache.clear()
        patches.undo()
        kernels.undo()
