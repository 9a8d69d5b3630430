"""In a command's own process imports wait (``graphmem.answering.waiting``): the trace is the same, and less is run."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graphmem.answering import waiting as waiting_imports
from graphmem.answering.question import Question
from graphmem.answering.runs import RunCache
from graphmem.sources import huggingface
from graphmem.trace import to_json
from tests.support.examples import first_quick

_PROGRAM = """
import json, sys
from graphmem.answering import waiting
from graphmem.answering import waiting as waiting_imports
from graphmem.answering.question import Question
from graphmem.answering.runs import RunCache
from graphmem.base import deferred
from graphmem.trace import to_json
from tests.support.examples import first_quick
waiting.is_own_process = True
run = RunCache().run(Question(sys.argv[1], batch=2, **json.loads(sys.argv[2])))
print(json.dumps({"trace": to_json(run.trace), "waiting": [name for name in sys.modules if deferred.is_waiting(name)]}))
"""
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_COMPILED = """
import torch
from torch import nn

def build(batch):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return torch.compile(model), torch.randn(batch, 16)

def own_step(batch):
    import torch._dynamo
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        run = model if number == 0 else torch._dynamo.optimize("inductor")(model)
        run(torch.randn(batch, 16, device="cuda")).sum().backward()
        optimizer.step()
"""


def waiting(model: str, **options: Any) -> tuple[Any, list[str]]:
    """The trace in a process of its own, and the modules that were not run in it."""
    command = [sys.executable, "-c", _PROGRAM, model, json.dumps(options)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(_without_folders(said.splitlines()[-1]))
    return found["trace"], found["waiting"]


def here(model: str, **options: Any) -> Any:
    """The trace in this process, where nothing waits."""
    run = RunCache().run(Question(model, batch=2, **options))
    return json.loads(_without_folders(json.dumps({"trace": to_json(run.trace)})))["trace"]


def _without_folders(text: str) -> str:
    """Compiled code lies in folders of any name."""
    return re.sub(r"[^\\\"]*/graphmem-[^\\\"]*", "", text)


def test_a_file_that_runs_the_compiler_while_it_is_imported(tmp_path: Path) -> None:
    """As peft does where torchao is installed; beside it ``torch.cuda`` is the card's."""
    file = tmp_path / "model.py"
    file.write_text(f"import torch._dynamo\ntorch._dynamo.reset()\nassert torch.cuda.is_available()\n{_COMPILED}")
    trace, waited = waiting(f"{file}:build")
    assert "torch._dynamo" not in waited
    assert trace == here(f"{file}:build")


@pytest.mark.slow
def test_a_model_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(_LLAMA), encoding="utf-8")
    trace, left = waiting(f"hf:{file}", seq_len=32)
    assert trace == here(f"hf:{file}", seq_len=32)
    assert {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"} <= set(left)


@pytest.mark.slow
def test_a_model_of_the_zoo() -> None:
    trace, left = waiting("zoo:electra-small", seq_len=32)
    assert trace == here("zoo:electra-small", seq_len=32)
    assert {"torch._dynamo", "torch.distributed.tensor", "sympy"} <= set(left)


def test_of_numbers_the_functions_on_symbols_give_what_pytorch_gives() -> None:
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    of_shapes = next(one for one in waiting_imports._SYMBOLS if one.name == shapes.__name__)
    meanwhile: dict[str, Any] = {**of_shapes.meanwhile}
    numbers: dict[str, tuple[Any, ...]] = {"guard_int": (3,), "is_symbolic": (3,), "is_nested_int": (3,)}
    numbers |= {"guarding_hint_or_throw": (3,), "has_guarding_hint": (3,), "sym_eq": ((1, 2), [1, 2])}
    numbers |= {"sym_and": (True, False), "sym_or": (True, False), "compute_unbacked_bindings": (None, 3)}
    numbers |= {"free_unbacked_symbols": ((3, 4),), "has_free_unbacked_symbols": ((3, 4),)}
    for name, function in meanwhile.items():
        if name.startswith("_iterate"):
            assert [*function((1, 2))] == [*getattr(shapes, name)((1, 2))] == []
            continue
        arguments = numbers.get(name, (True,))
        assert function(*arguments) == getattr(shapes, name)(*arguments), name
    for x, y in (((1, 2), (1, 3)), ((1,), (1, 1)), (2, 2), (((1,), 2), ((1,), 2))):
        assert meanwhile["sym_eq"](x, y) == shapes.sym_eq(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("function", first_quick(["build", "own_step"], 1))
def test_a_step_that_compiles(tmp_path: Path, function: str) -> None:
    file = tmp_path / "compiled.py"
    file.write_text(_COMPILED, encoding="utf-8")
    trace, left = waiting(f"{file}:{function}")
    assert trace == here(f"{file}:{function}")
    assert "torch._dynamo" not in left, "it has run"


def test_transformers_reads_the_folders_of_its_models_once() -> None:
    """It keeps the last 128 of over 400 folders, and asks for all of them twice."""
    module = ModuleType("transformers.utils.import_utils")
    read: list[str] = []

    def run() -> None:
        module.create_import_structure_from_path = lru_cache(maxsize=1)(read.append)  # type: ignore[attr-defined]

    huggingface._reading_once(module, run)
    for path in ("a", "b", "a", "b"):
        module.create_import_structure_from_path(path)
    assert read == ["a", "b"]


def test_names_of_a_file_are_those_that_transformers_finds() -> None:
    module = importlib.import_module("transformers.utils.import_utils")
    find = module.fetch__all__
    files = [
        'x = 1\n__all__ = ["a"]\n__all__ = ["b",]\n',
        '__all__ = [\n    "a",\n    "b",\n]\n',
        "x = '__all__'\n",
        "",
    ]
    files += [path.read_text(encoding="utf-8") for path in sorted(Path(str(module.__file__)).parent.glob("*.py"))]
    other = ModuleType("transformers.utils.import_utils")
    huggingface._reading_once(other, lambda: vars(other).update(fetch__all__=find))
    assert [other.fetch__all__(text) for text in files] == [find(text) for text in files]


def test_another_transformers_is_left_as_it_is() -> None:
    module = ModuleType("transformers.utils.import_utils")
    huggingface._reading_once(module, lambda: None)
    assert not hasattr(module, "create_import_structure_from_path")
