"""The installed engine's own answer: with a stand-in of it that starts for real, and beside recorded starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

from graphmem.answering import capture_cache
from graphmem.devices import device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.serving import engine_named
from graphmem.serving import installed as common
from graphmem.serving.answer import serve
from graphmem.serving.base import Question, ServedModel, for_searches
from graphmem.serving.starting import Asked
from graphmem.serving.vllm import installed
from tests.recorded import serving as recorded

_VLLM: Any = engine_named("vllm")
_CONFIG = {"model_type": "of-nobody", "architectures": ["OfNobody"]}
#: As much of the engine as a start needs: weights of 64 MiB in two pieces, one of 1 MiB that stays, a profile run that
#: takes 32 MiB, and a cache of what is left in blocks of 1 MiB.
_ENGINE = {
    "__init__.py": "",
    "config/__init__.py": "",
    "config/vllm.py": """
class VllmConfig:
    def _get_v2_model_runner_unsupported_features(self):
        return ["pipeline parallelism with external_launcher"]
""",
    "engine/__init__.py": "",
    "engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        for name in ("model", "load-format", "tensor-parallel-size", "max-model-len", "gpu-memory-utilization",
                     "distributed-executor-backend", "pipeline-parallel-size", "data-parallel-size"):
            parser.add_argument("--" + name)
        for name in ("skip-tokenizer-init", "enforce-eager", "disable-custom-all-reduce"):
            parser.add_argument("--" + name, action="store_true")
        return parser
    @classmethod
    def from_cli_args(cls, args):
        return args
""",
    "usage/__init__.py": "",
    "usage/usage_lib.py": "class UsageContext:\n    OPENAI_API_SERVER, LLM_CLASS = 'server', 'llm'\n",
    "utils/__init__.py": "",
    "utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "v1/__init__.py": "",
    "v1/core/__init__.py": "",
    "v1/core/kv_cache_utils.py": """
def get_max_concurrency_for_kv_cache_config(config, cache):
    return cache.num_blocks / 4 / bool(cache.kv_cache_groups)
""",
    "v1/executor/__init__.py": "",
    "v1/executor/abstract.py": """
class Executor:
    def compile_or_warm_up_model(self):
        raise AssertionError("graphs are captured for use")
""",
    "v1/worker/__init__.py": "",
    "v1/worker/worker_base.py": "",
    "v1/worker/gpu_worker.py": """
import gc
import torch
from types import SimpleNamespace as Some
MIB = 1 << 20
class Worker:
    def __init__(self, args):
        free, total = torch.cuda.mem_get_info()
        if args.max_model_len == "1":
            raise ValueError("max_model_len is too small")
        self.init_snapshot = Some(total_memory=total)
        self.requested_memory = int(total * float(args.gpu_memory_utilization))
        self.model_runner = Some(model_memory_usage=64 * MIB)
        self.vllm_config = Some(
            model_config=Some(max_model_len=int(args.max_model_len), enforce_eager=args.enforce_eager, dtype=torch.half,
                quantization=None, architectures=["OfNobody"]),
            cache_config=Some(gpu_memory_utilization=float(args.gpu_memory_utilization), cache_dtype="auto",
                block_size=16),
            scheduler_config=Some(max_num_seqs=4, max_num_batched_tokens=64),
            parallel_config=Some(tensor_parallel_size=1), compilation_config=Some(cudagraph_capture_sizes=[]))
        self.free, self.args = free, args
    def load_model(self):
        ranks = 1
        if self.args.distributed_executor_backend == "external_launcher":
            torch.distributed.init_process_group("nccl", init_method="env://")
            ranks = torch.distributed.get_world_size()
        self.model_runner.model_memory_usage //= ranks
        if self.args.pipeline_parallel_size and torch.distributed.get_rank() > 0:  # the head
            self.head = torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")
            self.model_runner.model_memory_usage += 16 * MIB
        self.weights = [torch.empty(32 * MIB // ranks, dtype=torch.uint8, device="cuda") for _ in range(2)]
    def determine_available_memory(self):
        self.kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        gc.collect()
        torch.cuda.empty_cache()
        consumed = self.free - torch.cuda.mem_get_info()[0]
        self.available_kv_cache_memory_bytes = self.requested_memory - consumed - 32 * MIB
        if self.available_kv_cache_memory_bytes <= 0:
            raise ValueError("No available memory for the cache blocks. Try more.")
        return self.available_kv_cache_memory_bytes
""",
    "v1/engine/__init__.py": "",
    "v1/engine/llm_engine.py": """
import tempfile
from types import SimpleNamespace as Some
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import MIB, Worker
class FullAttentionSpec:
    page_size_bytes, block_size = MIB // 2, 16
class LLMEngine:
    @classmethod
    def from_engine_args(cls, args, usage_context):
        assert usage_context == "llm", usage_context
        tempfile.mkstemp()  # as libraries of the engine do, and leave it there
        from vllm.config.vllm import VllmConfig
        lacks = VllmConfig()._get_v2_model_runner_unsupported_features()
        assert not args.pipeline_parallel_size or not lacks, lacks
        worker = Worker(args)
        worker.load_model()
        is_encoder = args.max_model_len == "2"
        available = 0 if is_encoder else worker.determine_available_memory()
        Executor().compile_or_warm_up_model()
        groups = [] if is_encoder else [Some(kv_cache_spec=FullAttentionSpec(), layer_names=["0", "1"])]
        cache = Some(num_blocks=available // MIB, kv_cache_groups=groups)
        core = Some(scheduler=Some(kv_cache_config=cache), vllm_config=worker.vllm_config)
        return Some(engine_core=Some(engine_core=core))
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the stand-in is; memory of former starts is gone."""
    folder = tmp_path_factory.mktemp("engine")
    for name, text in _ENGINE.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    common.started.cache_clear()
    yield folder
    common.started.cache_clear()


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is installed; equal starts of several tests are one."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(installed, "version", lambda: "0.99.1")


def _question(**changes: Any) -> Question:
    card = replace(device_named("T4"), capacity_bytes=1 << 30, context_bytes=64 << 20)
    asked = Question(ServedModel("nobody/model", _CONFIG), card, entry="llm", max_model_len=64, enforce_eager=True)
    return asked.with_(gpu_memory_utilization=0.5, **changes)


@pytest.mark.usefixtures("engine")
def test_the_engine_starts_and_its_figures_are_the_answer() -> None:
    served = engine_named("vllm").serve(_question())
    assert (served.basis, served.version, served.refusal) == ("engine", "0.99.1", None)
    sizes = {part.name: part.bytes >> 20 for part in served.parts}
    assert sizes == {
        "not asked for": 512, "weights": 64, "buffers": 0, "workspaces": 1, "segment slack": 1, "activation peak": 32
    }  # fmt: skip
    assert served.kv_cache.available_bytes >> 20 == served.kv_cache.blocks == 512 - 64 - 2 - 32
    assert served.concurrency_at([64]) == served.kv_cache.concurrency == served.kv_cache.blocks / 4
    assert any("the class OfNobody" in note for note in served.notes)


_KNOWN = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1000,
    "max_position_embeddings": 64, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.usefixtures("engine")
def test_the_engine_is_asked_before_our_account_and_searches_ask_that(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_named("vllm")
    question = _question().with_(model=ServedModel("known/model", _KNOWN))
    served = engine.serve(question)
    assert served.basis == "engine", served.notes
    monkeypatch.setattr(installed, "stages_of", _no_start)
    quick = for_searches(engine, question)
    assert engine.serve(quick).basis != "engine"
    assert for_searches(engine, _question()) == _question()  # our account has no answer
    instead = engine.serve(question)
    assert instead.kv_cache == engine.serve(quick).kv_cache
    assert any("its code took another way" in note for note in instead.notes)
    with pytest.raises(UsageError, match=r"another way; .*of-nobody"):
        engine.serve(_question())


def _no_start(_: Question) -> NoReturn:
    raise common.NotFollowed("its code took another way")


@pytest.mark.usefixtures("engine")
def test_what_the_engine_refuses_our_account_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "started", lambda *_: {"error": "ValueError: no such option", "stages": {}})
    question = _question().with_(model=ServedModel("known/model", _KNOWN))
    with pytest.raises(UsageError, match="does not start: no such option") as raised:
        engine_named("vllm").serve(question)
    assert not isinstance(raised.value, common.NotFollowed)


@pytest.mark.usefixtures("engine")
def test_of_several_processes_the_first_is_followed() -> None:
    served = _VLLM.by_itself(_question(tensor_parallel_size=2))
    one = _VLLM.by_itself(_question())
    assert (served.cards, served.weights_bytes, one.weights_bytes) == (2, 32 << 20, 64 << 20)
    assert served.kv_cache.available_bytes == one.kv_cache.available_bytes + (32 << 20)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["pipeline-parallel-size", "pp"])
def test_every_stage_of_a_pipeline_starts_and_the_fullest_decides(name: str) -> None:
    served = _VLLM.by_itself(_question(arguments=((name, "2"),)))
    one = _VLLM.by_itself(_question())
    assert (served.cards, served.weights_bytes) == (2, (32 + 16) << 20)
    assert served.kv_cache.blocks == one.kv_cache.blocks + 32 - 16
    assert "the figures are those of stage 2" in served.notes[0]


@pytest.mark.usefixtures("engine")
def test_of_several_replicas_the_first_is_followed() -> None:
    served = _VLLM.by_itself(_question(tensor_parallel_size=2, arguments=(("data_parallel_size", "2"),)))
    assert (served.cards, served.weights_bytes) == (4, 16 << 20)


@pytest.mark.usefixtures("engine")
def test_an_encoder_has_no_cache_and_is_profiled_all_the_same() -> None:
    served = _VLLM.by_itself(_question(max_model_len=2))
    assert (served.kv_cache.blocks, served.kv_cache.available_bytes >> 20, served.refusal) == (
        0,
        512 - 64 - 2 - 32,
        None,
    )


@pytest.mark.usefixtures("engine")
def test_an_engine_that_lacks_memory_is_an_answer_and_another_error_is_its_own() -> None:
    refused = _VLLM.by_itself(_question().with_(gpu_memory_utilization=0.05))
    assert refused.refusal == "No available memory for the cache blocks. Try more."
    assert refused.kv_cache.blocks == 0
    with pytest.raises(UsageError, match="does not start: max_model_len is too small"):
        _VLLM.by_itself(_question(max_model_len=1))


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": (0, 98)}, "0.99.1 is installed, and 0.98 is asked for"),
        ({"cold": True}, "nothing is to be compiled"),
        ({"non_torch_bytes": 1}, "a card that is its own"),
    ],
)
def test_what_the_installed_engine_is_not_asked(changes: dict[str, Any], said: str) -> None:
    question = _question(**changes)
    with pytest.raises(UsageError, match=said):
        _VLLM.by_itself(question)
    with pytest.raises(GraphmemError, match="of-nobody"):
        engine_named("vllm").serve(question)


def test_without_an_engine_our_account_refuses_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda: None)
    with pytest.raises(GraphmemError, match="of-nobody"):
        engine_named("vllm").serve(_question())
    with pytest.raises(UsageError, match="not installed"):
        engine_named("vllm").serve(_question(arguments=(("basis", "engine"),)))
    with pytest.raises(UsageError, match="accepted"):
        engine_named("vllm").serve(_question(arguments=(("basis", "neither"),)))


@pytest.mark.usefixtures("engine")
def test_a_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without a folder one is made, for as long as the engine starts; so long its own files stay."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    common.started.cache_clear()
    engine_named("vllm").serve(_question())
    assert list(scratch.iterdir()) == []


@pytest.mark.usefixtures("engine")
def test_a_start_is_kept_for_the_next_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as what it depends on, the engine's files among it, is as it was. The first start is a real one, and
    the others give its figures."""
    monkeypatch.setattr(capture_cache, "in_use", capture_cache.CaptureCache(tmp_path))
    common.started.cache_clear()
    started: list[Asked] = []
    start, figures = common.start, dict[str, Any]()

    def starting(program: common.Program, version: str, asked: Asked, *others: Any) -> dict[str, Any]:
        started.append(asked)
        if not figures:
            figures.update(start(program, version, asked, *others))
        return dict(figures)

    monkeypatch.setattr(common, "start", starting)
    found = []
    for _ in range(2):
        found.append(engine_named("vllm").serve(_question()))
        common.started.cache_clear()
    assert found[0].kv_cache == found[1].kv_cache
    assert len(started) == 1
    engine_named("vllm").serve(_question().with_(gpu_memory_utilization=0.6))
    assert len(started) == 2
    worker = folder / "vllm" / "v1" / "worker" / "gpu_worker.py"
    worker.write_text(worker.read_text() + "# another release\n")
    common.started.cache_clear()
    engine_named("vllm").serve(_question())
    assert len(started) == 3


def test_options_are_spelled_as_the_engine_reads_them(tmp_path: Path) -> None:
    arguments = (
        ("enable_expert_parallel", "true"), ("enable_prefix_caching", "false"), ("cudagraph_capture_sizes", "[1, 2]"),
        ("limit_mm_per_prompt", '{"image": 2}'), ("model_runner", "v2"), ("outside", "0"),
    )  # fmt: skip
    options = " ".join(installed._options(_question(arguments=arguments, kv_cache_dtype="fp8"), tmp_path))
    assert options == (
        f"--model {tmp_path} --load-format dummy --skip-tokenizer-init --tensor-parallel-size 1 --max-model-len 64 "
        "--gpu-memory-utilization 0.5 --kv-cache-dtype fp8 --enforce-eager --enable-expert-parallel "
        '--no-enable-prefix-caching --cudagraph-capture-sizes 1 2 --limit-mm-per-prompt {"image": 2}'
    )


#: Recorded starts that the engine of that version repeats: eager ones in every column, a compiled one with graphs, of
#: two processes, kernels that are timed and kept, CuTe's, packed weights. Bytes of weights that it has not: those
#: recorded import FlashInfer with the first layer that asks for it, which so left its table on the card.
_REPEATED = {
    "opt-125m-eager": 0, "llama3-8b-eager-srv": 0, "llama3.2-1b-l4-warm": 0, "llama3-8b-tp2-eager": 512,
    "falcon-h1-1.5b-8l": 0, "qwen3-next-8l": 512, "mixtral-awq-tp2-a100-40": 0, "qwen3-32b-nvfp4-b200": 0,
    "deepseek-v2-lite-eager": 0,
}  # fmt: skip
#: Others of one stage of a pipeline, and of one replica of several that share experts.
_SHARED_OUT = ("qwen2.5-7b-pp3-middle", "qwen3-moe-tp2-dp2-ep")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_REPEATED, *_SHARED_OUT, *recorded.versions()])
def test_a_recorded_start_is_repeated_by_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = (recorded.runs() | recorded.families() | recorded.captured() | recorded.versions())[name]
    if installed.version() != run.get("version", "0.32.0"):
        pytest.skip("a recording of a version that is not installed here")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")  # recorded without a compiler, so without FlashInfer's kernels
    for variable, value in run["environment"].items():
        monkeypatch.setenv(variable, value)
    question = recorded.question(name, run)
    handed_on = [pair for pair in question.arguments if pair[0] != "outside"]  # the card's own context is none
    question = question.with_(arguments=(*handed_on, ("basis", "engine")))
    served = installed.stages_of(question)[run.get("rank", 0)]
    cache = served.kv_cache
    assert (cache.available_bytes, cache.blocks) == (run["available"], run["blocks"])
    if name not in _SHARED_OUT:  # which print the least of all ranks
        assert cache.tokens == run["tokens"]
    assert served.weights_bytes == run["weights"] - _REPEATED.get(name, 0)


def test_the_reason_of_an_engine_is_a_line_that_says_something() -> None:
    assert common.first_line("ValueError: too long\nmore") == "too long"
    pydantic = "ValidationError: 1 validation error for ModelConfig\n  Value error, no such model [type=value_error]"
    assert common.first_line(pydantic) == "Value error, no such model [type=value_error]"


def test_a_report_says_by_whose_code(monkeypatch: pytest.MonkeyPatch, engine: None) -> None:
    del engine
    question = _question()
    monkeypatch.setattr("graphmem.serving.answer._question", lambda *_: question)
    report = serve("nobody/model", device=question.device, lengths="p50=32")
    assert "from its own installed code" in report.report()
    assert report.changes == ()


def test_a_report_says_what_our_account_has_beside_it(monkeypatch: pytest.MonkeyPatch, engine: None) -> None:
    del engine
    question = _question().with_(model=ServedModel("known/model", _KNOWN))
    monkeypatch.setattr("graphmem.serving.answer._question", lambda *_: question)
    said: list[str] = []
    report = serve("known/model", device=question.device, say=said.append)
    account = engine_named("vllm").serve(for_searches(engine_named("vllm"), question)).kv_cache.blocks
    difference = account - report.served.kv_cache.blocks
    assert difference
    assert any(f"has {account:,} blocks ({difference:+,})" in one for one in report.assumptions)
    assert [one for one in said if "starts on the pretended card" in one]
