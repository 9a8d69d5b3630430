"""Operators that are known to hold memory which no rule models: for a report that counts what it does not know."""

from __future__ import annotations

#: Beginning of the operator's name -> what it holds. The longest beginning that fits counts.
_UNMODELLED = {
    "aten._fft_": "cuFFT's plan workspace, of which a part is estimated",
    "aten._linalg_det": "the factorization's workspace (cuSOLVER)",
    "aten._linalg_eigh": "the decomposition's workspace (cuSOLVER)",
    "aten._linalg_slogdet": "the factorization's workspace (cuSOLVER)",
    "aten._linalg_solve_ex": "the factorization's workspace (cuSOLVER)",
    "aten._linalg_svd": "the decomposition's workspace (cuSOLVER)",
    "aten._spdiags": "sparse matrices",
    "aten._sparse": "sparse matrices (cuSPARSE)",
    "aten.cholesky": "the factorization's workspace (cuSOLVER)",
    "aten.geqrf": "the decomposition's workspace (cuSOLVER)",
    "aten.linalg_cholesky_ex": "the factorization's workspace (cuSOLVER)",
    "aten.linalg_eig": "the decomposition's workspace (MAGMA or cuSOLVER)",
    "aten.linalg_householder_product": "the product's workspace (cuSOLVER)",
    "aten.linalg_inv_ex": "the factorization's workspace (cuSOLVER)",
    "aten.linalg_ldl": "the factorization's workspace (cuSOLVER)",
    "aten.linalg_lstsq": "the solver's workspace (cuSOLVER)",
    "aten.linalg_lu": "the factorization's workspace (cuSOLVER)",
    "aten.linalg_qr": "the decomposition's workspace (cuSOLVER)",
    "aten.linalg_solve_triangular": "copies of operands",
    "aten.lu_": "the factorization's workspace (cuSOLVER)",
    "aten.ormqr": "the product's workspace (cuSOLVER)",
    "aten.triangular_solve": "copies of operands",
}

#: Those that have a rule all the same, which estimates.
_ESTIMATED = ("aten._fft_",)

#: Namespaces of operators whose kernels have rules, or allocate nothing but outputs.
_MODELLED_LIBRARIES = frozenset(
    ("aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "profiler",
     "inductor", "rngprims", "streams", "graphmem", "bitsandbytes", "debugprims", "higher_order")
)  # fmt: skip


def unmodelled(name: str, has_rule: bool = False) -> str | None:
    """What the operator of this full name, for example ``aten._fft_r2c.default``, hides; None if nothing is known.
    An operator that ``has_rule`` hides nothing, unless the rule estimates."""
    if has_rule and not name.startswith(_ESTIMATED):
        return None
    if name.partition(".")[0] not in _MODELLED_LIBRARIES:
        return "a kernel outside PyTorch, of which only the outputs are known"
    found = [beginning for beginning in _UNMODELLED if name.startswith(beginning)]
    return _UNMODELLED[max(found, key=len)] if found else None
