"""The cases, group by group; importing this registers all of them."""

from tests.functions.cases import (
    activations,
    attention,
    autograd,
    images,
    indexing,
    layouts,
    losses,
    more,
    norms,
    orders,
    pooling,
    products,
    random,
    reductions,
    shapes,
    softmax,
    special,
)
from tests.functions.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "activations",
    "attention",
    "autograd",
    "images",
    "indexing",
    "layouts",
    "losses",
    "more",
    "norms",
    "orders",
    "pooling",
    "products",
    "random",
    "reductions",
    "shapes",
    "softmax",
    "special",
]
