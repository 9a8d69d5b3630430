"""Caches of keys and values, as transformers keeps them (``cache_utils.Cache``): and the labels of their tensors.

A cache is known when a model is called with it. Its contents are looked at where such a call begins and ends: between
two calls it holds the tensors that the next token reads (transformers 5.23, cache_utils.py: ``DynamicLayer``,
``StaticLayer``, ``QuantizedLayer``, ``LinearAttentionLayer``). One that lies on the host brings a layer at a time to
the card, in the middle of a call (``Cache.prefetch``); those copies are named there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from graphmem.capture.record.storages import Storages
from graphmem.capture.torch_internals import FakeTensor
from graphmem.trace import Category

#: How deep lists and dictionaries of tensors are nested in a layer.
_DEPTH = 3


class KeyValueCaches:
    """The caches that models were called with."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def note_call(self, given: Iterable[object]) -> None:
        """A model is called with these arguments; transformers' caches are imported."""
        module: Any = sys.modules["transformers.cache_utils"]
        for value in given:
            if isinstance(value, module.Cache) and value not in self._known:
                for cache in _parts(value):
                    self._known.add(cache)
                    if getattr(cache, "offloading", False):
                        self._name_prefetched(cache)
        self.label()

    def label(self) -> None:
        """Name the tensors that are in them now."""
        for cache in list(self._known):
            for number, layer in enumerate(cache.layers):
                self._label(number, layer)

    def _label(self, number: int, layer: object) -> None:
        for name, value in vars(layer).items():
            for tensor in _tensors_in(value, _DEPTH):
                self._storages.label(tensor, Category.KV_CACHE, f"cache of layer {number}: {name.strip('_')}")

    def _name_prefetched(self, cache: Any) -> None:
        """Every layer that comes to the card is named. The cache holds the function, and must not hold itself."""
        holder, prefetch = weakref.ref(cache), type(cache).prefetch

        def named(*args: object, **kwargs: object) -> None:
            cache = holder()
            if cache is not None:
                prefetch(cache, *args, **kwargs)
                for number, layer in enumerate(cache.layers):
                    keys = getattr(layer, "keys", None)
                    if isinstance(keys, FakeTensor) and keys.is_cuda:
                        self._label(number, layer)

        cache.prefetch = named


def _parts(cache: object) -> Iterator[Any]:
    """The caches of a cache: of an encoder-decoder's, its own and that of the encoder's output."""
    if hasattr(cache, "layers"):
        yield cache
    for name in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, name):
            yield from _parts(getattr(cache, name))


def _tensors_in(value: object, depth: int) -> Iterator[torch.Tensor]:
    """The tensors of a layer's attribute, those within quantised ones among them."""
    if isinstance(value, torch.Tensor):
        if isinstance(value, FakeTensor):
            yield value
        elif hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors_in(getattr(value, name), depth)
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth - 1)
