"""The layers of a capture: what they replace is what they say, no two without a word, and the page shows them."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from graphmem.capture.patches import Patches
from graphmem.capture.session import layers, session
from graphmem.capture.session.layers import LAYERS, Context, Layer
from tests import places
from tests.support.captures import record

_INSTALLED = Layer.installed


class _Replaced:
    """Notes which layer replaces which name while it is installed, and later."""

    def __init__(self) -> None:
        self.by_layer: dict[str, set[str]] = {layer.name: set() for layer in LAYERS}
        self._of_patches: dict[int, str] = {}
        self._installing = ""

    @contextlib.contextmanager
    def installed(self, layer: Layer, context: Context) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            before, self._installing = self._installing, layer.name
            try:
                stack.enter_context(_INSTALLED(layer, context))
            finally:
                self._installing = before
            yield

    @staticmethod
    def _opened_later() -> str:
        """The layer of a replacement that the step brought about: only compiled code makes new ones so late."""
        room = places.ROOT / "graphmem" / "capture" / "compile"
        made_there = any(Path(frame.filename).parent == room for frame in traceback.extract_stack(limit=8))
        return "compiled code" if made_there else ""

    def note(self, name: str, patches: Patches | None = None) -> None:
        layer = self._installing or self._opened_later()
        if patches is not None:  # one that is used later too belongs to the layer that made it
            layer = self._of_patches.setdefault(id(patches), layer)
        if layer:
            self.by_layer[layer].add(name)


def _watched(monkeypatch: pytest.MonkeyPatch) -> _Replaced:
    """What the captures of this test replace."""
    noted = _Replaced()
    set_name, register = Patches.set, torch.library.Library.impl

    def set_(self: Patches, owner: Any, name: str, value: Any) -> None:
        noted.note(_name_of(owner, name), self)
        set_name(self, owner, name, value)

    def impl(self: Any, op: Any, function: Any, key: str = "", **options: Any) -> None:
        name = op if isinstance(op, str) else f"{op._schema.name}.{op._overloadname}"
        noted.note(f"aten::{name.removeprefix('aten::').removesuffix('.default')} @ {key}")
        register(self, op, function, key, **options)

    monkeypatch.setattr(Patches, "set", set_)
    monkeypatch.setattr(torch.library.Library, "impl", impl)
    monkeypatch.setattr(Layer, "installed", lambda layer, context: noted.installed(layer, context))
    at_once = tuple(replace(layer, doors=(), libraries=(), serves=lambda _: True) for layer in LAYERS)
    monkeypatch.setattr(session, "LAYERS", at_once)
    return noted


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> _Replaced:
    """What a small step with a process group replaces."""
    noted = _watched(monkeypatch)

    def step() -> None:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.Linear(4, 4).to("cuda")
        model(torch.ones(2, 4, device="cuda")).sum().backward()

    record(step, world_size=2, leave_after=3)
    return noted


def _name_of(owner: Any, name: str) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{name}".replace("torch._tensor.Tensor", "torch.Tensor")
    known = getattr(owner, "__name__", None) or f"{type(owner).__module__}.{type(owner).__qualname__}"
    return f"{known}.{name}"


def test_no_two_layers_replace_the_same_name_without_saying_so(replaced: _Replaced) -> None:
    """Compiled code, the last, has a test of its own."""
    first: dict[str, str] = {}
    twice: dict[str, set[str]] = {layer.name: set() for layer in LAYERS[:-1]}
    for layer in LAYERS[:-1]:
        for name in replaced.by_layer[layer.name]:
            if first.setdefault(name, layer.name) != layer.name:
                twice[layer.name].add(name)
    assert twice == {layer.name: set(layer.again) for layer in LAYERS[:-1]}


def test_layers_replace_what_they_say_and_nothing_else(replaced: _Replaced) -> None:
    assert sum(map(len, replaced.by_layer.values())) > 400
    unsaid = {
        f"{layer.name}: {name}"
        for layer in LAYERS
        for name in replaced.by_layer[layer.name]
        if not any(fnmatchcase(name, pattern) for pattern in layer.replaces)
    }
    assert not unsaid


def test_compiled_code_replaces_what_it_says_and_what_no_other_layer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is opened when something is compiled."""
    noted = _watched(monkeypatch)

    def step() -> None:
        torch.compile(torch.nn.Linear(4, 4).to("cuda"))(torch.ones(2, 4, device="cuda")).sum().backward()

    record(step, leave_after=3)
    layer = LAYERS[-1]
    names = noted.by_layer.pop(layer.name)
    assert not {name for name in names if not any(fnmatchcase(name, pattern) for pattern in layer.replaces)}
    assert not {pattern for pattern in layer.replaces if not any(fnmatchcase(name, pattern) for name in names)}
    assert names & set().union(*noted.by_layer.values()) == set(layer.again)


#: Those that replace no attribute in this step: nothing is generated, this PyTorch is the newest, what hides a class
#: changes how two modules answer, and an operator of higher order is told how it runs.
_IDLE = {
    "generation", "fake mode", "recorder", "unnoticed", "flex attention", "numbered devices",
}  # fmt: skip
#: Those that have nothing to replace until a library is imported, which another test of this process may have done.
_OF_LIBRARIES = {
    "bitsandbytes": "bitsandbytes",
    "built kernels": "flashinfer.jit.core",
    "NVML": "pynvml",
    "serving engine": "vllm",
    "Triton kernels": "trl.kernels.chunked_logprob",
}


def test_every_pattern_stands_for_a_name_that_is_replaced(replaced: _Replaced) -> None:
    """But those of what is replaced when code is compiled, when a library is imported or missing, or for old ones."""
    later = {"torch.Tensor.__getitem__", "transformers.modeling_utils.*", "trl.kernels.*", "triton.runtime.jit.*"}
    later |= {"triton.runtime.driver.*", "builtins.__import__", "transformers.distributed.expert_parallel.*"}
    later |= {
        "transformers.utils.hub.cached_files",
        "transformers.models.auto.tokenization_auto.AutoTokenizer.from_pretrained",
    }
    later |= {"cutlass.base_dsl.compiler.*", "cutlass.cute.runtime.*", "sglang.kernels.jit.*"}
    later.add("torch.optim.optimizer._foreach_supported_types")  # one list for all threads
    later |= {"torch.optim.optimizer.Optimizer.zero_grad", "torch.nn.modules.module.Module.zero_grad"}  # before 2.0
    later.update(next(layer for layer in LAYERS if layer.name == "compiled code").replaces)
    idle = _IDLE | {layer for layer, library in _OF_LIBRARIES.items() if library not in sys.modules}
    unused = {
        f"{layer.name}: {pattern}"
        for layer in LAYERS
        if layer.name not in idle
        for pattern in set(layer.replaces) - later
        if not any(fnmatchcase(name, pattern) for name in replaced.by_layer[layer.name])
    }
    assert not unused
    assert {layer.name for layer in LAYERS if not replaced.by_layer[layer.name]} == idle


def test_layers_have_different_names_and_files_that_exist() -> None:
    assert len({layer.name for layer in LAYERS}) == len(LAYERS)
    capture = places.ROOT / "graphmem" / "capture"
    assert [layer.where for layer in LAYERS if not (capture / f"{layer.where}.py").is_file()] == []
    assert all(callable(layer.function()) for layer in LAYERS)


def test_the_page_shows_the_layers() -> None:
    page = (places.ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert layers.BEGIN in page
    assert layers.END in page
    assert page == layers.with_table(page), "run: python -m graphmem.capture.session.layers docs/ARCHITECTURE.md"
