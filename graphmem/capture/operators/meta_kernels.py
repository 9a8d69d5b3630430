"""Meta kernels (shapes of outputs) of operators that PyTorch gives none, or only one that wants values; and where fake
implementations are put, in the spellings of PyTorch 2.6 and later."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Shapes
from graphmem.capture.patches import Patches
from graphmem.capture.threads import Threads
from graphmem.torch_names import private

_NONE = 0


@named("aten._grouped_mm.default")
def _grouped_mm(call: Arguments) -> Tensor:
    """Of any precision, and with rows padded to 16 bytes, as CUDA builds do (``create_grouped_gemm_output_tensor``)."""
    first, second = call.self, call.mat2
    if (first.dim() == 3 or second.dim() == 3) and first.shape[-1] != second.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    dtype = call.out_dtype or first.dtype
    alignment = 16 // dtype.itemsize
    rows, columns = first.shape[-2], second.shape[-1]
    row_stride = -(-columns // alignment) * alignment
    if first.dim() != second.dim():
        return first.new_empty_strided((rows, columns), (row_stride, 1), dtype=dtype)
    groups = first.shape[0] if call.offs is None else call.offs.shape[0]
    return first.new_empty_strided((groups, rows, columns), (rows * row_stride, row_stride, 1), dtype=dtype)


@named("aten._scaled_dot_product_efficient_attention_backward.default")
def _efficient_attention_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients have the heads of their tensors; meta kernels before 2.15 know no fewer key than query heads."""
    query, key, value = (
        torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)
        for tensor in (call.query, call.key, call.value)
    )
    bias = None
    if call.attn_bias is not None and call.grad_input_mask[3]:
        *rows, columns = call.attn_bias.shape
        bias = call.attn_bias.new_empty((*rows, -(-columns // 16) * 16))[..., :columns]
    return query, key, value, bias


@named("aten._ctc_loss.default")
def _ctc_loss(call: Arguments) -> tuple[Tensor, Tensor]:
    log_probs = call.log_probs
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = max(call.target_lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))


def _like(position: int, **options: torch.memory_format) -> Shapes:
    """As the argument of this position."""

    def like(*args: Tensor, **_: object) -> Tensor:
        return torch.empty_like(args[position], **options)

    return like


_FIRST, _SECOND = (_like(position, memory_format=torch.contiguous_format) for position in (0, 1))


def _statistics(input: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of every channel, of ``SyncBatchNorm``; of half types in fp32."""
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    return input.new_empty(input.shape[1], dtype=dtype), input.new_empty(input.shape[1], dtype=dtype)


@named("aten.batch_norm_backward_reduce.default")
def _batch_norm_sums(call: Arguments) -> tuple[Tensor | None, ...]:
    """Two sums of every channel, and the gradients of weight and bias, as far as they are asked for."""
    channels, own = call.input.shape[1], call.mean if call.weight is None else call.weight
    sums = [call.mean.new_empty(channels) if call.input_g else None for _ in range(2)]
    return (*sums, *(own.new_empty(channels) if wanted else None for wanted in (call.weight_g, call.bias_g)))


@named("aten.multi_margin_loss.default")
def _margin_loss(call: Arguments) -> Tensor:
    return call.self.new_empty(call.target.shape if call.reduction == _NONE else ())


def _multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    rows = self.shape[:-1] if reduction == _NONE else ()
    return self.new_empty(rows), self.new_empty(target.shape)


@named("aten.fractional_max_pool3d.default")
def _fractional_max_pool3d(call: Arguments) -> tuple[Tensor, Tensor]:
    shape = (*call.self.shape[:-3], *call.output_size)
    return call.self.new_empty(shape), call.self.new_empty(shape, dtype=torch.int64)


@named("aten.linalg_lstsq.default")
def _least_squares(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CUDA has the driver ``gels`` alone: no ranks and no singular values; residuals of more equations than unknowns
    (``ATen/native/BatchLinearAlgebra.cpp``)."""
    matrix, right = call.self, call.b
    is_vector = right.dim() == matrix.dim() - 1
    equations, unknowns = matrix.shape[-2:]
    columns = () if is_vector else right.shape[-1:]
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[: -1 if is_vector else -2])
    residuals = matrix.new_empty((*batch, *columns) if equations > unknowns else 0, dtype=matrix.real.dtype)
    ranks = matrix.new_empty(0, dtype=torch.int64)
    return matrix.new_empty((*batch, unknowns, *columns)), residuals, ranks, residuals.new_empty(0)


def _factored(self: Tensor) -> tuple[Tensor, Tensor]:
    """``geqrf``: a copy by columns, and a number for every reflection."""
    return _by_columns(self), self.new_empty((*self.shape[:-2], min(self.shape[-2:])))


def _by_columns(like: Tensor) -> Tensor:
    return torch.empty_like(like.mT, memory_format=torch.contiguous_format).mT


def _turned(self: Tensor, tau: Tensor, other: Tensor, *_: bool) -> Tensor:
    """``ormqr``: a copy of the matrix."""
    return _by_columns(other)


def _itself(self: Tensor, *_: object, **__: object) -> Tensor:
    """What is drawn in place. PyTorch's references refuse a generator (torch/_refs/__init__.py, 2.13)."""
    return self


#: By operator name: a function of fake tensors that returns fake outputs.
META_KERNELS: dict[str, Shapes] = {
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": _SECOND,
    "aten::_dirichlet_grad": _FIRST,
    "aten::_sample_dirichlet": _FIRST,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "aten::_standard_gamma_grad": _FIRST,
    "aten::batch_norm_backward_elemt": _like(1),
    "aten::batch_norm_backward_reduce": _batch_norm_sums,
    "aten::batch_norm_elemt": _like(0),
    "aten::batch_norm_gather_stats": _statistics,
    "aten::batch_norm_gather_stats_with_counts": _statistics,
    "aten::batch_norm_stats": _statistics,
    "aten::binomial": _FIRST,
    "aten::cauchy_": _itself,
    "aten::exponential_": _itself,
    "aten::fractional_max_pool3d": _fractional_max_pool3d,
    "aten::fractional_max_pool3d_backward": _SECOND,
    "aten::geometric_": _itself,
    "aten::geqrf": _factored,
    "aten::glu_jvp": _like(0),
    "aten::linalg_lstsq": _least_squares,
    "aten::log_normal_": _itself,
    "aten::multi_margin_loss": _margin_loss,
    "aten::multi_margin_loss_backward": _SECOND,
    "aten::multilabel_margin_loss_backward": _SECOND,
    "aten::multilabel_margin_loss_forward": _multilabel_margin_loss,
    "aten::ormqr": _turned,
}
if hasattr(torch.ops.aten, "_grouped_mm"):  # since 2.8
    META_KERNELS["aten::_grouped_mm"] = _grouped_mm


_registry: Any = private(
    "torch._library.simple_registry.singleton", "operators that exist on GPUs alone, as cuDNN's, have no shapes", None
)
# FakeTensorMode imports it when first made; that must be before torch.cuda's classes are replaced.
private("torch._dynamo.config", "PyTorch's compiler is imported during the analysis", None)


class ExistingFakes:
    """Fake implementations that stand for those PyTorch has, for the threads of the capture, until they are restored.

    ``register_fake(allow_override=True)`` came after 2.6, and means every thread. The tables it writes to are written
    directly.
    """

    def __init__(self) -> None:
        self._threads = Patches().threads
        self._replaced: list[tuple[Any, Any]] = []

    def replace(self, fakes: Mapping[str, Callable[..., object]]) -> None:
        """``fakes`` by qualified operator name."""
        for name, fake in fakes.items() if _registry is not None else ():
            entry: Any = _registry.find(name)
            holder = entry.fake_impl
            kernel = _FakeKernel(fake, holder.kernel, self._threads)
            self._replaced.append((holder, kernel))
            if hasattr(holder, "kernels"):  # since 2.7 those before it are kept
                holder.kernels.append(kernel)
            else:
                holder.kernel = kernel

    def restore(self) -> None:
        """Put back those that were there before."""
        while self._replaced:
            holder, kernel = self._replaced[-1]
            if not hasattr(holder, "kernels"):
                holder.kernel = kernel.found
            elif kernel in holder.kernels:
                holder.kernels.remove(kernel)
            self._replaced.pop()


class _FakeKernel:
    """A ``torch._library.utils.Kernel`` that is there for some threads; for others it is the one ``found``, or false,
    which PyTorch takes for none."""

    source = "graphmem"

    def __init__(self, func: Callable[..., object], found: Callable[..., object], threads: Threads) -> None:
        self.func = func
        self.found = found
        self._threads = threads

    def _is_here(self) -> bool:
        return get_ident() in self._threads or self._threads.adopts()

    def __bool__(self) -> bool:
        return self._is_here() or bool(self.found)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return (self.func if self._is_here() else self.found)(*args, **kwargs)
