"""Every kind of recording, and which goldens it records. Nothing here needs PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests import places
from tests.recorded import stub

if TYPE_CHECKING:
    from tests.recorded.kind import Kind


@dataclass(frozen=True)
class Listed:
    """One kind. ``where``: ``module:object``. ``goldens``: patterns of its files below ``tests/golden``.

    ``environment``: what the stub is told. ``on_stub``: the whole kind is recorded in one process on the stub; the
    others start their own processes, or need no CUDA build.
    """

    about: str
    where: str
    goldens: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    on_stub: bool = True


_LARGE = stub.REAL_CUDNN | {"FAKE_CUDA_TOTAL_MIB": "1000000"}


def _below(version: places.Version) -> str:
    return str(places.of_torch(version).relative_to(places.GOLDEN))


def _whole(*patterns: str) -> tuple[str, ...]:
    """Patterns of the files of a kind that is recorded of every whole version."""
    return tuple(f"{_below(version)}/{pattern}" for version in places.WHOLE for pattern in patterns)


#: Of the other versions, single kinds.
_OTHERS = tuple(_below(version) for version in places.RECORDED if version not in places.WHOLE)
_FAMILIES = ("reduce", "linear", "sdpa", "embed", "norm", "conv", "conv_layouts", "conv_unusual", "rnn")
KINDS = {
    "functions": Listed(
        "single functions and modules, forward and backward",
        "tests.recorded.functions:KIND",
        _whole("functions/*.jsonl.gz"),
        _LARGE,
    ),
    "functions_of_versions": Listed(
        "the same, of versions of PyTorch of which not every kind is recorded: --python of one",
        "tests.recorded.functions:OTHER_VERSIONS",
        ("pytorch/*/functions.jsonl.gz",),
        _LARGE,
    ),
    "op_db": Listed(
        "PyTorch's own operator database, forward and backward",
        "tests.recorded.op_db.kind:OP_DB",
        _whole("op_db/*.jsonl.gz"),
        on_stub=False,
    ),
    "outputs_only": Listed(
        "operators that take nothing but their outputs (a list beside the kernel rules, no golden)",
        "tests.recorded.op_db.kind:OUTPUTS_ONLY",
        (),
    ),
    "loops": Listed("training loops", "tests.recorded.loops:KIND", _whole("loops/*.jsonl.gz")),
    "recurrent": Listed(
        "training loops of recurrent networks, whose spaces cuDNN tells",
        "tests.recorded.loops:RECURRENT",
        _whole("recurrent/*.jsonl.gz"),
        _LARGE,
    ),
    "parallel": Listed(
        "streams, data parallel, sharded, CUDA graphs",
        "tests.recorded.parallel:KIND",
        _whole("parallel/*.jsonl.gz"),
        # DistributedDataParallel reads back what it has just sent, through a group that does nothing.
        {"FAKE_CUDA_SENT": "1"},
    ),
    "conversions": Listed(
        "what a program sees of parameters and buffers that .cuda(), .to() and the like convert",
        "tests.recorded.conversions:KIND",
        _whole("conversions.json.gz"),
        stub.REAL_CUDNN,
    ),
    "answering": Listed(
        "whole programs that ask the allocator while they run, on a small card: batch size finders",
        "tests.recorded.answering:KIND",
        _whole("answering.json"),
        on_stub=False,
    ),
    "steps": Listed(
        "whole runs: models, optimizers, allocator options, compute capabilities",
        "tests.recorded.steps.kind:STEPS",
        _whole("steps/*.json.gz"),
        on_stub=False,
    ),
    "scripts": Listed(
        "whole programs in the style of published ones, for three optimizer steps",
        "tests.recorded.scripts:KIND",
        _whole("scripts/*.json.gz"),
        on_stub=False,
    ),
    "compiled": Listed(
        "whole runs under torch.compile",
        "tests.recorded.steps.kind:COMPILED",
        _whole("compiled/*.json.gz"),
        on_stub=False,
    ),
    "libraries": Listed(
        "whole programs of libraries, from their first line to their last",
        "tests.recorded.libraries:KIND",
        (f"{_below((2, 13))}/libraries/*.json.gz",),
        on_stub=False,
    ),
    "generations": Listed(
        "transformers' generate, as graphmem analyze --generate predicts it",
        "tests.recorded.generations:KIND",
        (f"{_below((2, 13))}/generations/*.json.gz",),
        on_stub=False,
    ),
    "everyday": Listed(
        "whole programs as colleagues write them: files, from their first line to their last",
        "tests.recorded.everyday:KIND",
        (f"{_below((2, 13))}/everyday/*.json.gz",),
        on_stub=False,
    ),
    "lines": Listed(
        "command lines of training tools, as their users type them",
        "tests.recorded.lines:KIND",
        (f"{_below((2, 13))}/lines.json",),
        on_stub=False,
    ),
    "left_early": Listed(
        "whole programs that train in several runs or on batches of many sizes, of which a few steps are predicted",
        "tests.recorded.left_early:KIND",
        (f"{_below((2, 13))}/left_early/*.json.gz",),
        on_stub=False,
    ),
    "sharded": Listed(
        "one rank of several: FSDP, ZeRO, Accelerate, Trainer, tensor, context and pipeline parallelism, adapters",
        "tests.recorded.sharded:KIND",
        (f"{_below((2, 13))}/sharded/*.json.gz",),
        on_stub=False,
    ),
    "written": Listed(
        "loops written by hand, predicted by the built-in step with the options that ask for the same",
        "tests.recorded.written:KIND",
        (f"{_below((2, 13))}/written/*.json.gz",),
        on_stub=False,
    ),
    "operators": Listed(
        "single operators over thousands of sizes",
        "tests.recorded.operators:KIND",
        _whole(*(f"ops/{name}.jsonl.gz" for name in _FAMILIES)),
        on_stub=False,
    ),
    "allocator": Listed(
        "the caching allocator, event by event: options, streams, out of memory, address policies",
        "tests.recorded.allocator.kind:SEQUENCES",
        _whole("allocator/*.json.gz"),
        on_stub=False,
    ),
    "pools": Listed(
        "the same with private pools: CUDA graphs, MemPool",
        "tests.recorded.allocator.kind:POOLS",
        _whole("allocator_pools/*.json.gz"),
        on_stub=False,
    ),
    "pool_snapshot": Listed(
        "a memory snapshot with private pools",
        "tests.recorded.allocator.kind:SNAPSHOT",
        _whole("pool_snapshot.pickle.gz"),
        on_stub=False,
    ),
    "dead": Listed(
        "snapshots of runs that ran out of memory, and which settings would have saved them",
        "tests.recorded.dead:KIND",
        (f"{_below((2, 13))}/dead/*",),
        on_stub=False,
    ),
    "cudnn": Listed(
        "workspaces of convolutions' plans and of recurrent networks, asked of cuDNN for described cards",
        "tests.recorded.cudnn_plans:KIND",
        _whole("ops/conv_plans.jsonl.gz", "ops/conv_largest.jsonl.gz", "ops/rnn_spaces.jsonl.gz"),
        on_stub=False,
    ),
    "versions": Listed(
        "runs and allocator sequences that other versions of PyTorch do differently",
        "tests.recorded.versions:KIND",
        tuple(f"{version}/*/*.json.gz" for version in _OTHERS),
        on_stub=False,
    ),
    "onnxruntime": Listed(
        "arena, kernels and sessions of ONNX Runtime's CPU build, and the models that they are of",
        "tests.recorded.programs:ONNXRUNTIME",
        (
            "onnxruntime/ort_arena_traces.json.gz",
            "onnxruntime/operators.json.gz",
            "onnxruntime/models/*",
            "onnxruntime/ort_sessions.json.gz",
            "onnxruntime/ort_planner.json.gz",
            "onnxruntime/exports.json.gz",
            "onnxruntime/executed/*",
        ),
        on_stub=False,
    ),
    "onnxruntime_cuda": Listed(
        "arenas of sessions of ONNX Runtime's CUDA provider, real cuDNN planning",
        "tests.recorded.onnx_cuda:KIND",
        ("onnxruntime/cuda/*",),
        on_stub=False,
    ),
    "tensorflow": Listed(
        "TensorFlow's allocator, executor and Keras steps on the CPU",
        "tests.recorded.programs:TENSORFLOW",
        (
            "tensorflow/tf_bfc_traces.json.gz",
            "tensorflow/tf_forwarding.json",
            "tensorflow/tf_executor.json",
            "tensorflow/tf_train.json.gz",
        ),
        on_stub=False,
    ),
    "tensorflow_steps": Listed(
        "training steps of Keras models under TensorFlow's CUDA build, and the steps as TensorFlow prepared them",
        "tests.recorded.tensorflow_steps:KIND",
        ("tensorflow/steps.jsonl", "tensorflow/foretold.json", "tensorflow/prepared/*.json.gz"),
        on_stub=False,
    ),
    "jax_steps": Listed(
        "steps of JAX programs under JAX's CUDA client, and the programs as graphmem followed them",
        "tests.recorded.jax_steps:KIND",
        ("jax/steps.jsonl", "jax/tuned.jsonl", "jax/followed/*.json.gz"),
        on_stub=False,
    ),
    "serving": Listed(
        "starts of vLLM and SGLang: what they leave for the KV cache, and why",
        "tests.recorded.serving:KIND",
        (
            "vllm/runs.json.gz",
            "vllm/families.json.gz",
            "vllm/encoders.json.gz",
            "vllm/captured.json.gz",
            "vllm/versions.json.gz",
            "sglang/runs.json.gz",
        ),
        on_stub=False,
    ),
    "scheduling": Listed(
        "steps of the schedulers of vLLM and SGLang over random loads",
        "tests.recorded.scheduling:KIND",
        ("vllm/scheduler.json.gz", "sglang/scheduler.json.gz"),
        on_stub=False,
    ),
}
#: What tests write themselves, under ``--update-goldens``: reached figures, texts.
WRITTEN_BY_TESTS = (
    *_whole("*_ratchet.json", "ops/equal_cases.json"),
    "onnxruntime/cuda_ratchet.json",
    "reports/*.txt",
    f"{_below((2, 13))}/verdicts.jsonl",
    f"{_below((2, 13))}/suites.json",
    "tensorflow/foretold.json",
    "tensorflow/steps_ratchet.json",
    "public_api.txt",
)
#: Figures that others published: each names its source.
PUBLISHED = ("serving/*_logs.json", "serving/speed.csv")


def load(name: str) -> Kind:
    """The kind of that name."""
    module, _, attribute = KINDS[name].where.partition(":")
    kind: Kind = getattr(importlib.import_module(module), attribute)
    return kind


def has_card() -> bool:
    """Whether this process has a CUDA build of PyTorch and a card, real or pretended."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()
