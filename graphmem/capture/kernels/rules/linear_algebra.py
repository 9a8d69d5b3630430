"""Buffers of LU factorizations and of operators made of them: determinants, systems of equations, inverses.

Batches of small matrices go to cuBLAS, which wants the address of every matrix on the device; single and large ones to
cuSOLVER, one by one, whose workspaces are not known. Sources: ATen/native/cuda/linalg/BatchLinearAlgebra.cpp and
BatchLinearAlgebraLib.cpp, ATen/native/BatchLinearAlgebra.cpp and LinearAlgebra.cpp; choices and orders observed on the
CUDA build of PyTorch 2.13, which has no MAGMA.
"""

from __future__ import annotations

import math

import torch

from graphmem.capture.kernels.parts.layout import Layout, bytes_of, lies_in_order
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule

_ADDRESS = 8
_INDEX = 8
#: cuSOLVER factors one matrix at a time from this size on, and whatever is not square or no batch.
_LOOPED_FROM = 512


def _batch(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-2])


def _addresses(script: Script, matrices: int, arrays: int) -> None:
    """A batched call of cuBLAS, with so many arrays of addresses."""
    tokens = [script.take(matrices * _ADDRESS, "addresses of matrices") for _ in range(arrays)]
    script.product().give(*reversed(tokens))


# --- factorization ----------------------------------------------------------------------------------------------------


def _factor(script: Script, matrices: torch.Tensor) -> None:
    """``lu_factor``. cuSOLVER's memory for single, large and rectangular ones is not known."""
    rows, columns = matrices.shape[-2:]
    batch = _batch(matrices)
    if rows == columns and batch > 1 and rows < _LOOPED_FROM and matrices.numel():
        _addresses(script, batch, 1)


@recorded_rule("aten.linalg_lu_factor_ex.default")
def lu_factor_rule(call: Call) -> Script:
    script = Script().outputs(0, 1, 2)
    _factor(script, call.A)
    return script


def _sign_of_permutation(script: Script, batch: int, size: int, card: Card) -> int:
    """``lu_det_P``: how many pivots are where they were, counted in 64 bits. Returns the token of the result."""
    identity = script.take(size * 4, "identity permutation")
    moved = script.take(batch * size, "moved pivots")
    sign = script.take(batch * _INDEX, "sign of the permutation")
    wide = script.take(batch * size * _INDEX, "cast of the reduced tensor")
    write_sum(script, Layout([batch, size]), [1], torch.int64, card)
    script.give(wide, moved, identity)
    return sign


def _diagonal(matrices: torch.Tensor) -> Layout:
    strides = matrices.stride()
    return Layout(matrices.shape[:-1], [*strides[:-2], strides[-2] + strides[-1]])


@recorded_rule("aten._linalg_det.default")
def det_rule(call: Call) -> Script | None:
    """The product of the diagonal of U, and the sign of the permutation."""
    matrices = call.A
    if not matrices.numel():
        return None
    batch, size = _batch(matrices), matrices.shape[-1]
    script = Script().outputs(0, 1, 2)
    infos = script.take(batch * 4, "errors")
    _factor(script, matrices)
    product = script.take(bytes_of(call.outputs[0]), "product of the diagonal")
    write_sum(script, _diagonal(call.outputs[1]), [-1], matrices.dtype, call.card)
    sign = _sign_of_permutation(script, batch, size, call.card)
    return script.give(sign, product, infos)


@recorded_rule("aten._linalg_slogdet.default")
def slogdet_rule(call: Call) -> Script | None:
    """The signs of the diagonal of U and their product, then the logarithms of its values and their sum."""
    matrices = call.A
    if not matrices.numel():
        return None
    batch, size = _batch(matrices), matrices.shape[-1]
    diagonal = Layout(matrices.shape[:-1])
    diagonal_bytes = batch * size * matrices.element_size()
    script = Script().outputs(0, 1, 2, 3)
    infos = script.take(batch * 4, "errors")
    _factor(script, matrices)
    sign = _sign_of_permutation(script, batch, size, call.card)
    signs = script.take(diagonal_bytes, "signs of the diagonal")
    product = script.take(bytes_of(call.outputs[0]), "product of the signs")
    write_sum(script, diagonal, [-1], matrices.dtype, call.card)
    script.give(product, signs, sign)
    logarithms = script.take(diagonal_bytes, "logarithms of the diagonal")
    write_sum(script, diagonal, [-1], matrices.dtype, call.card)
    return script.give(logarithms, infos)


# --- solving ----------------------------------------------------------------------------------------------------------


def _way_to_solve(batch: int, size: int, vectors: int, adjoint: bool) -> str:
    """``lu_solve_kernel``: ``batched`` by cuBLAS, ``looped`` by cuSOLVER, or two ``triangular`` systems."""
    if size == vectors:
        return "batched" if size <= 16 else "triangular"
    if size <= 8:
        return "batched"
    if size > 128:
        return "triangular"
    few = 8 if size <= 64 else 2
    if batch <= 2 and (vectors <= 2 if size > 64 else size <= 32 or vectors <= 64 or adjoint):
        return "looped"
    return "batched" if vectors <= few else "triangular"


def _triangular_system(script: Script, batch: int, size: int) -> None:
    """``triangular_solve_kernel``: a few large ones one by one, without addresses."""
    if batch <= 8 and size >= 64:
        script.product()
    else:
        _addresses(script, batch, 2)


def _triangular_systems(script: Script, batch: int, size: int, solution: int, adjoint: bool) -> None:
    """``lu_solve_triangular``: the permutation as indices, and the right sides in its order, of ``solution`` bytes."""
    permutation = [script.take(size * _INDEX, "indices")]
    if batch > 1:
        expanded = script.take(batch * size * _INDEX, "permutation")
        script.give(*permutation)
        permutation = [expanded]
    held = []
    if not adjoint:
        held = [script.take(size * _INDEX, "indices"), script.take(batch * size * _INDEX, "inverse permutation")]
        held.append(script.take(solution, "right sides in order"))
    for _ in range(2):
        _triangular_system(script, batch, size)
    if adjoint:
        script.scratch(solution, "right sides in order")
    script.give(*reversed(held), *permutation)


def _solve(script: Script, batch: int, size: int, vectors: int, solution: int, adjoint: bool) -> None:
    way = _way_to_solve(batch, size, vectors, adjoint)
    if way == "looped":
        script.scratch(4, "error")
    elif way == "batched":
        _addresses(script, batch, 2)
    else:
        _triangular_systems(script, batch, size, solution, adjoint)


@recorded_rule("aten.linalg_lu_solve.default")
def lu_solve_rule(call: Call) -> Script | None:
    """Factors that lie by rows, or fewer of them than right sides, are copied."""
    factors, pivots, result = call.LU, call.pivots, call.outputs[0]
    if not result.numel():
        return None
    size, batch = factors.shape[-1], _batch(result)
    adjoint = bool(call.adjoint) != (not call.left)  # from the right the transposed system is solved
    vectors = result.shape[-1] if call.left else result.shape[-2]
    script = Script().output(0)
    held = script.contiguous(pivots, "pivots")
    if not _lies_by_columns(factors):
        held.append(script.take(bytes_of(factors), "factors by columns"))
    if _batch(factors) != batch and _way_to_solve(batch, size, vectors, adjoint) != "looped":
        held.append(script.take(batch * size * size * factors.element_size(), "factors for every right side"))
        held.append(script.take(batch * size * 4, "pivots for every right side"))
    _solve(script, batch, size, vectors, bytes_of(result), adjoint)
    return script.give(*reversed(held))


def _lies_by_columns(matrices: torch.Tensor) -> bool:
    *batch, rows, columns = range(matrices.dim())
    return lies_in_order(matrices.shape, matrices.stride(), (*batch, columns, rows))


@recorded_rule("aten.linalg_solve_triangular.default")
def solve_triangular_rule(call: Call) -> Script | None:
    """The right sides are copied into the result and solved there; a matrix that lies by rows is read transposed."""
    matrices, result = call.self, call.outputs[0]
    if not result.numel():
        return None
    batch, size = _batch(result), matrices.shape[-1]
    script = Script().output(0)
    copies = []
    if _batch(matrices) != batch or not (matrices.is_contiguous() or _lies_by_columns(matrices)):
        copies.append(script.take(batch * size * size * matrices.element_size(), "matrices by columns"))
    _triangular_system(script, batch, size)
    return script.give(*copies)


@recorded_rule("aten._linalg_solve_ex.default")
def solve_rule(call: Call) -> Script | None:
    """The transposed system of a matrix that lies by rows, which saves a copy. A vector is solved beside the result."""
    matrices, result = call.A, call.outputs[0]
    if not result.numel() or not matrices.numel():
        return None
    size, batch = matrices.shape[-1], _batch(matrices)
    is_vector = result.dim() == matrices.dim() - 1
    if not is_vector and _batch(result) != batch:
        return None
    adjoint = (matrices.is_contiguous() and not matrices.is_complex()) != (not call.left)
    vectors = 1 if is_vector else result.shape[-1] if call.left else result.shape[-2]
    script = Script.of(call)
    _factor(script, matrices)
    beside = [script.take(bytes_of(result), "solution by columns")] if is_vector and size > 1 else []
    _solve(script, batch, size, vectors, bytes_of(result), adjoint)
    return script.give(*beside)


@recorded_rule("aten.linalg_inv_ex.default")
def inv_rule(call: Call) -> Script | None:
    """Solved for the identity, which the result holds at first."""
    matrices = call.A
    if not matrices.numel():
        return None
    size, batch = matrices.shape[-1], _batch(matrices)
    adjoint = matrices.is_contiguous() and not matrices.is_complex()
    script = Script().outputs(0, 1)
    factors = script.take(bytes_of(matrices), "factors")
    pivots = script.take(batch * size * 4, "pivots")
    _factor(script, matrices)
    _solve(script, batch, size, size, bytes_of(matrices), adjoint)
    return script.give(pivots, factors)


@recorded_rule("aten.lu_unpack.default")
def lu_unpack_rule(call: Call) -> Script | None:
    """The pivots become a permutation, counted from the identity."""
    factors = call.LU_data
    if not call.unpack_pivots or not factors.numel():
        return None
    rows, batch = factors.shape[-2], _batch(factors)
    script = Script.of(call)
    identity = script.take(rows * _INDEX, "identity permutation")
    permutation = [script.take(batch * rows * _INDEX, "permutation")] if batch > 1 else []
    return script.give(identity, *permutation)
