"""Sizes that are data, of values that are not all zero; recorded with true read-backs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.registry import add, group, t

group("values")


def _numbers(count: int = 3000, modulus: int = 7) -> torch.Tensor:
    """0, 1, ... below ``modulus``, over and over."""
    return torch.arange(count, device="cuda") % modulus


def _mask(count: int = 64, modulus: int = 3) -> torch.Tensor:
    return _numbers(count, modulus) == 0


def _set_by_mask(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[_mask()] = 0.5
    return x


def _longest(x: torch.Tensor) -> torch.Tensor:
    """A batch is cut to its longest sequence."""
    mask = torch.arange(64, device="cuda") < _numbers(32, 50)[:, None]
    return x[:, : int(mask.sum(1).max())] * 2


def _experts(x: torch.Tensor) -> list[torch.Tensor]:
    """Rows go to their expert, expert after expert."""
    expert = _numbers(64, 5)
    return [x[expert == index] * 2 for index in range(5)]


_CASES: dict[str, Any] = {
    "unique": lambda: _numbers().unique(),
    "unique_all": lambda: _numbers().unique(return_inverse=True, return_counts=True),
    "unique_unsorted": lambda: _numbers().unique(sorted=False),
    "unique_consecutive": lambda: (_numbers() // 2).unique_consecutive(return_counts=True),
    "unique_rows": lambda: _numbers().view(1000, 3).unique(dim=0),
    "nonzero": lambda: _mask(3000).nonzero(),
    "where_positions": lambda: torch.where(_mask(3000)),
    "argwhere": lambda: _mask(3000).view(30, 100).argwhere(),
    "bincount": lambda: _numbers(3000, 900).bincount(),
    "bincount_minlength": lambda: _numbers(3000, 900).bincount(minlength=2000),
    "one_hot": lambda: F.one_hot(_numbers(500, 130)),
    "repeat_interleave_alone": lambda: torch.repeat_interleave(_numbers(500, 9)),
}
_OF_ROWS: dict[str, Any] = {
    "index_mask": lambda x: x[_mask()] * 2,
    "index_mask_put": _set_by_mask,
    "masked_select": lambda x: x.masked_select(_numbers(64 * 256, 5).view(64, 256) > 2),
    "repeat_interleave": lambda x: x.repeat_interleave(_numbers(64, 6), 0),
    "split_by_lengths": lambda x: [part * 2 for part in x.split((_numbers(8, 4) * 4 + 2).tolist())],
    "longest": _longest,
    "experts": _experts,
}
for _name, _run in _CASES.items():
    add(f"values_{_name}", _run, true_values=True)
for _name, _run in _OF_ROWS.items():
    add(f"values_{_name}", _run, t(64, 256), true_values=True)
