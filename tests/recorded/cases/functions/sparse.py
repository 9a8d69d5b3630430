"""Products with sparse matrices (COO and CSR), and sparse gradients of embedding bags; recorded with true counts.

Nothing is recorded of cuSPARSE: the stub gives its products no buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.registry import add, group, index, t

group("sparse")

_ROWS, _COLUMNS = 3000, 5000


def _on_host(count: int = 20000) -> torch.Tensor:
    """Of distinct indices, coalesced."""
    positions = torch.arange(count) * 37 % (_ROWS * _COLUMNS)
    indices = torch.stack([positions // _COLUMNS, positions % _COLUMNS])
    return torch.sparse_coo_tensor(indices, torch.ones(count), (_ROWS, _COLUMNS)).coalesce()


def _matrix(count: int = 20000) -> torch.Tensor:
    return _on_host(count).to("cuda")


def _of_parts() -> torch.Tensor:
    parts = torch.arange(_ROWS + 1), torch.arange(_ROWS), torch.ones(_ROWS)
    return torch.sparse_csr_tensor(*parts, (_ROWS, _COLUMNS), device="cuda")


_CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: torch.sparse.mm(_matrix(), x),
    "spmm": lambda x: torch.spmm(_matrix(), x),
    "matmul": lambda x: _matrix() @ x,
    "mv": lambda x: _matrix() @ x[:, 0],
    "addmm": lambda x: torch.sparse.addmm(torch.zeros(_ROWS, 64, device="cuda"), _matrix(), x, beta=0.5),
    "mm_of_transposed": lambda x: torch.sparse.mm(_matrix(), x.t().contiguous().t()),
    "mm_of_slice": lambda x: torch.sparse.mm(_matrix(), x[:, :32]),
    "mm_large": lambda x: torch.sparse.mm(_matrix(600_000), x),
    "mm_of_values": lambda x: torch.sparse.mm(_matrix().requires_grad_(), x),
    "compressed": lambda x: _matrix().to_sparse_csr(),
    "compressed_mm": lambda x: _matrix().to_sparse_csr() @ x,
    "compressed_mm_of_slice": lambda x: torch.sparse.mm(_matrix().to_sparse_csr(), x[:, :32]),
    "compressed_mv": lambda x: _matrix().to_sparse_csr() @ x[:, 0],
    "compressed_addmm": lambda x: torch.sparse.addmm(
        torch.zeros(_ROWS, 64, device="cuda"), _matrix().to_sparse_csr(), x, beta=0.5
    ),
    "compressed_transposed_mm": lambda x: _matrix().to_sparse_csr().t() @ x[:_ROWS],
    "compressed_transposed_mv": lambda x: _matrix().to_sparse_csr().t() @ x[:_ROWS, 0],
    "compressed_on_host": lambda x: _on_host().to_sparse_csr().cuda() @ x,
    "compressed_of_parts": lambda x: _of_parts() @ x,
    "compressed_dense": lambda x: x.detach().to_sparse_csr(),
    "transposed": lambda x: _matrix().t(),
    "of_dense": lambda x: torch.eye(60).cuda().to_sparse(),
    "of_dense_rows": lambda x: torch.eye(60).cuda().to_sparse(1),
    "of_dense_on_host": lambda x: torch.ones(300, 400).tril().to_sparse().cuda() @ x[:400],
    "of_dense_small": lambda x: torch.tensor([[0, 2], [3, 0]], dtype=torch.bool).to_sparse().cuda(),
    "compressed_of_dense_on_host": lambda x: torch.ones(300, 400).tril().to_sparse_csr().cuda() @ x[:400],
    "negative": lambda x: -_matrix(),
}

for _name, _case in _CASES.items():
    add(f"sparse_{_name}", _case, t(_COLUMNS, 64), true_values=True)


def _bag(**options: Any) -> Callable[..., Any]:
    def run(at: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
        per_sample = {"per_sample_weights": rest[0]} if rest else {}
        return F.embedding_bag(at, weight, sparse=True, **per_sample, **options)

    return run


#: Indices are zeros: of those with a padding nothing is left. A count within the backward pass is none but on a card.
for _name, _options in {
    "sum": {"mode": "sum"}, "mean": {"mode": "mean"}, "padding": {"mode": "sum", "padding_idx": 0},
    "mean_padding": {"mode": "mean", "padding_idx": 0},
}.items():  # fmt: skip
    add(f"embedding_bag_sparse_{_name}", _bag(**_options), index(256, 40), t(4000, 64), true_values=True)
add("embedding_bag_sparse_weighted", _bag(mode="sum"), index(256, 40), t(4000, 64), t(256, 40), true_values=True)
