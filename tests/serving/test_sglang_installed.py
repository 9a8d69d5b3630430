"""SGLang's own answer, with a stand-in of it that starts for real, and beside recorded starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from graphmem.devices import device_named
from graphmem.errors import UsageError
from graphmem.serving import engine_named, installed, shapes
from graphmem.serving.base import Question, ServedModel
from graphmem.serving.configurations import model_named
from graphmem.serving.sglang import installed as sglang_installed
from graphmem.serving.sglang.installed import PROGRAM
from tests.recorded import serving as recorded

#: As much of the engine as a start needs: weights of 64 MiB, a pool of what the fraction leaves in tokens of 1 MiB, a
#: table of 4 MiB, and graphs of 32 MiB.
_ENGINE = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/utils/__init__.py": "",
    "srt/utils/common.py": "def get_nvgpu_memory_capacity():\n    raise AssertionError('nvidia-smi')\n",
    "srt/server_args.py": """
from types import SimpleNamespace as Some
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model-path", "load-format", "context-length", "mem-fraction-static", "tp-size"):
            parser.add_argument("--" + name)
        for name in ("skip-tokenizer-init", "disable-cuda-graph", "disable-custom-all-reduce"):
            parser.add_argument("--" + name, action="store_true")
    @classmethod
    def from_cli_args(cls, args):
        if args.context_length == "7":
            raise ValueError("context length 7")
        args.resolve_once = lambda: None
        return args
PortArgs = Some(init_new=lambda args: None)
""",
    "srt/runtime_context.py": """
from types import SimpleNamespace as Some
SpawnRanks = Some
def spawn_world_rank(args, tp_rank, pp_rank):
    return 0
def publish(args, role, ranks):
    assert role == "scheduler"
def get_schedule():
    return Some(schedule_policy="fcfs", enable_mixed_chunk=False, chunked_prefill_size=2048, max_prefill_tokens=16384,
        schedule_conservativeness=1.0, disable_overlap_schedule=False)
def get_memory():
    return Some(disable_radix_cache=False)
def get_exec():
    return Some(graph=Some(cuda_graph_config=Some(decode=Some(max_bs=8))))
""",
    "srt/model_executor/__init__.py": "",
    "srt/model_executor/model_runner.py": """
import torch
from types import SimpleNamespace as Some
from sglang.srt.utils import common
MIB = 1 << 20
def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")
class ModelRunner:
    page_size = 1
    def __init__(self, args):
        assert common.get_nvgpu_memory_capacity() == 1024
        self.args, self.mem_fraction_static = args, float(args.mem_fraction_static or 0.5)
        self.model_config = Some(context_len=int(args.context_length), num_hidden_layers=2, dtype=torch.half,
            hf_config=Some(architectures=["OfNobody"]))
        self.free = torch.cuda.mem_get_info()[0]
    def load_model(self):
        self.weights = some(64)
    def alloc_memory_pool(self):
        left = torch.cuda.mem_get_info()[0] - self.free * (1 - self.mem_fraction_static)
        self.max_total_num_tokens, self.max_running_requests = int(left / MIB), 16
        if left < 0:
            raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
        self.table, pool = some(4), some(self.max_total_num_tokens)
        self.token_to_kv_pool = Some(size=self.max_total_num_tokens - 1, pool=pool,
            get_kv_size_bytes=lambda: (len(pool) // 2, len(pool) - len(pool) // 2))
    def init_attention_backends(self):
        pass
    def init_cuda_graphs(self):
        self.graphs = None if self.args.disable_cuda_graph else some(32)
""",
    "srt/managers/__init__.py": "",
    "srt/managers/scheduler.py": """
from sglang.srt.model_executor.model_runner import ModelRunner
class Scheduler:
    is_hybrid_swa = is_hybrid_ssm = False
    def __init__(self, args, ports):
        runner = ModelRunner(args)
        runner.load_model()
        runner.alloc_memory_pool()
        runner.init_attention_backends()
        runner.init_cuda_graphs()
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the stand-in is; memory of former starts is gone."""
    folder = tmp_path_factory.mktemp("sglang")
    for name, text in _ENGINE.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    installed.started.cache_clear()
    yield folder
    installed.started.cache_clear()


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is installed; equal starts of several tests are one."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(type(PROGRAM), "version", lambda _: "0.9.1")


def _question(**changes: Any) -> Question:
    card = replace(device_named("T4"), capacity_bytes=1 << 30, board_bytes=None, context_bytes=64 << 20)
    config = {"model_type": "of-nobody", "architectures": ["OfNobody"]}
    return Question(ServedModel("nobody/model", config), card, max_model_len=64).with_(**changes)


@pytest.mark.usefixtures("engine")
def test_the_engine_starts_and_its_figures_are_the_answer() -> None:
    served = engine_named("sglang").serve(_question())
    assert (served.basis, served.version, served.refusal) == ("engine", "0.9.1", None)
    sizes = {part.name: part.bytes >> 20 for part in served.parts}
    outside = sizes.pop("outside the engine")
    pool = (1024 - outside) // 2 - 64
    assert sizes == {"weights": 64, "segment slack": 0, "tables": 4, "kept free": 1024 - outside - 64 - 4 - pool}
    assert served.kv_cache.tokens == served.kv_cache.blocks == pool
    assert served.kv_cache.available_bytes >> 20 == pool
    assert served.graphs_bytes >> 20 == 32
    assert any("OfNobody of SGLang 0.9.1 was started" in note for note in served.notes)


@pytest.mark.usefixtures("engine")
def test_what_keeps_it_from_starting() -> None:
    sglang = engine_named("sglang")
    refused = sglang.serve(_question(arguments=(("mem_fraction_static", "0.01"),)))
    assert refused.refusal is not None
    assert refused.refusal.startswith("Not enough memory.")
    assert refused.kv_cache.tokens <= 0
    with pytest.raises(UsageError, match="does not start: context length 7"):
        sglang.serve(_question(max_model_len=7))
    with pytest.raises(UsageError, match=r"did not start: .*unrecognized arguments: --no-such-option"):
        sglang.serve(_question(arguments=(("basis", "engine"), ("no_such_option", "1"))))
    with pytest.raises(UsageError, match="neither in a pipeline nor in replicas"):
        sglang.serve(_question(arguments=(("basis", "engine"), ("pp_size", "2"))))
    with pytest.raises(UsageError, match="neither in a pipeline nor in replicas"):
        sglang.serve(_question(arguments=(("basis", "engine"), ("dp", "2"))))


@pytest.mark.usefixtures("engine")
def test_our_account_answers_where_it_is_asked_for() -> None:
    question = _question(model=model_named("meta-llama/Llama-3.1-8B"), device=device_named("H100"))
    assert engine_named("sglang").serve(question.with_(arguments=(("basis", "retold"),))).basis == "logs"
    assert engine_named("sglang").serve(question.with_(arguments=(("tp", "2"),))).basis == "logs"


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["tp", "tp_size", "tp-size"])
def test_one_of_several_cards_starts(name: str) -> None:
    """What NCCL holds is in use before the engine looks at what is free."""
    alone = engine_named("sglang").serve(_question())
    served = engine_named("sglang").serve(_question(arguments=((name, "2"),)))
    assert (served.basis, served.cards) == ("engine", 2)
    assert served.weights_bytes == alone.weights_bytes, "the stand-in shares nothing out"
    nccl = served.parts[0].bytes - alone.parts[0].bytes
    assert nccl > 0
    assert served.kv_cache.tokens == alone.kv_cache.tokens - (nccl >> 20) // 2


def _recorded(name: str, basis: str) -> Question:
    run = recorded.sglang_runs()[name]
    words = [*run["options"], "--"]
    options = [
        (word.removeprefix("--"), "true" if following.startswith("--") else following)
        for word, following in pairwise(words)
        if word.startswith("--")
    ]
    model = ServedModel(name, run["model_config"])
    return Question(model, recorded.card(run), arguments=(*options, ("basis", basis)))


#: MiB that our account has too many beyond segments of small tensors: of experts', and of latent attention's copies of
#: its weights (``w_kc``, ``w_vc``), which it does not place.
_MORE = {"qwen3-30b-a3b-tp2": 10, "deepseek-v2-lite-2": 150}


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded starts of several ranks have no communicators."""
    for module in (shapes, sglang_installed):
        monkeypatch.setattr(module, "outside", lambda device, cards: ())


@pytest.mark.usefixtures("without_nccl")
@pytest.mark.parametrize("name", [name for name in recorded.sglang_runs() if "gemma2" not in name])
def test_our_account_has_the_tokens_of_recorded_starts(name: str) -> None:
    """But for segments of small tensors, 2 MiB each, which it does not place."""
    served = engine_named("sglang").serve(_recorded(name, "retold"))
    run = recorded.sglang_runs()[name]
    assert served.settings["mem_fraction_static"] == run["mem_fraction_static"]
    more = (served.kv_cache.tokens - run["tokens"]) * served.kv_cache.block_bytes
    assert 0 <= more - (_MORE.get(name, 0) << 20) <= 4 << 20


@pytest.mark.slow
@pytest.mark.usefixtures("without_nccl")
@pytest.mark.parametrize("name", recorded.sglang_runs())
def test_a_recorded_start_is_repeated_by_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tokens, weights and what CUDA graphs take."""
    run = recorded.sglang_runs()[name]
    if PROGRAM.version() != run["version"]:
        pytest.skip("a recording of a version that is not installed here")
    for variable, value in run["environment"].items():
        monkeypatch.setenv(variable, value)
    served = engine_named("sglang").serve(_recorded(name, "engine"))
    stages = run["stages"]
    taken = {
        (method, level): stages[f"after {method}"][level] - stages[f"before {method}"][level]
        for method, level in (("load_model", "allocated"), ("init_cuda_graphs", "reserved"))
    }
    assert served.kv_cache.tokens == run["tokens"]
    assert served.weights_bytes == taken["load_model", "allocated"]
    assert served.graphs_bytes == taken["init_cuda_graphs", "reserved"]
