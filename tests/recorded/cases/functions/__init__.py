"""The cases, group by group; importing this registers all of them."""

from tests.recorded.cases.functions import (
    activations,
    attention,
    autograd,
    images,
    indexing,
    layouts,
    losses,
    norms,
    orders,
    pooling,
    products,
    random,
    recurrent,
    reductions,
    shapes,
    softmax,
    special,
)
from tests.recorded.cases.functions.registry import CASES, Case

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
    "norms",
    "orders",
    "pooling",
    "products",
    "random",
    "recurrent",
    "reductions",
    "shapes",
    "softmax",
    "special",
]
