"""Sound input of every kind, small, made here: what is then damaged."""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BASE = 0x7F00_0000_0000
MIB = 1 << 20


def _value(name: str, shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _constant(name: str, array: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(array, dtype=dtype), name)


def _onnx(nodes: Any, inputs: Any, outputs: Any, constants: Any = (), **options: Any) -> onnx.ModelProto:
    functions = options.pop("functions", [])
    graph = helper.make_graph(nodes, "sample", inputs, outputs, list(constants), **options)
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid("own", 1)] if functions else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


@cache
def onnx_models() -> tuple[bytes, ...]:
    """A perceptron, a convolution net with shape arithmetic, and one with local functions."""
    perceptron = _onnx(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
            helper.make_node("Relu", ["h"], ["r"], name="relu"),
            helper.make_node("MatMul", ["r", "v"], ["y"], name="second"),
        ],
        [_value("x", ["batch", 8])],
        [_value("y", ["batch", 4])],
        [_constant("w", np.zeros((8, 16)), np.float32), _constant("v", np.zeros((16, 4)), np.float32)],
    )
    images = _onnx(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1], strides=[2, 2], group=1),
            helper.make_node("MaxPool", ["c"], ["p"], name="pool", kernel_shape=[2, 2]),
            helper.make_node("Shape", ["p"], ["s"], name="shape"),
            helper.make_node("Gather", ["s", "zero"], ["n"], name="gather", axis=0),
            helper.make_node("Unsqueeze", ["n", "axis"], ["u"], name="unsqueeze"),
            helper.make_node("Concat", ["u", "minus"], ["k"], name="target", axis=0),
            helper.make_node("Reshape", ["p", "k"], ["f"], name="flat"),
            helper.make_node("Expand", ["one", "big"], ["e"], name="expand"),
            helper.make_node("ReduceSum", ["e", "axis"], ["z"], name="sum", keepdims=0),
            helper.make_node("Cast", ["f"], ["h"], name="cast", to=TensorProto.FLOAT16),
            helper.make_node("Concat", ["f", "f"], ["y"], name="concat", axis=1),
        ],
        [_value("x", ["batch", 3, 8, 8])],
        [_value("y", None), helper.make_tensor_value_info("h", TensorProto.FLOAT16, None), _value("z", None)],
        [
            _constant("w", np.zeros((4, 3, 3, 3)), np.float32),
            _constant("zero", 0),
            _constant("axis", [0]),
            _constant("minus", [-1]),
            _constant("one", [1.0], np.float32),
            _constant("big", [16, 16]),
        ],
        value_info=[_value("c", ["batch", 4, 4, 4])],
    )
    body = [helper.make_node("Add", ["a", "a"], ["b"]), helper.make_node("Relu", ["b"], ["c"])]
    double = helper.make_function("own", "Double", ["a"], ["c"], body, [helper.make_opsetid("", 18)])
    functions = _onnx(
        [
            helper.make_node("Double", ["x"], ["t"], domain="own"),
            helper.make_node("Double", ["t"], ["y"], domain="own"),
        ],
        [_value("x", ["batch", 8])],
        [_value("y", ["batch", 8])],
        functions=[double],
    )
    return tuple(model.SerializeToString() for model in (perceptron, images, functions))


def external_model() -> onnx.ModelProto:
    """A perceptron whose weights, and a shape, lie in ``weights.bin`` beside it."""
    weight = _constant("w", np.zeros((8, 64)), np.float32)
    target = _constant("k", [-1, 32])
    for tensor, offset in ((weight, 0), (target, 2048)):
        size = len(tensor.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", str(offset)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "k"], ["y"])]
    return _onnx(nodes, [_value("x", ["batch", 8])], [_value("y", None)], [weight, target])


EXTERNAL_WEIGHTS = bytes(2048) + np.array([-1, 32], dtype=np.int64).tobytes()


def snapshot() -> dict[str, Any]:
    """A memory snapshot of PyTorch: two blocks alive at its start, two events of a life, stacks."""
    frames = [
        {"filename": "??", "line": 0, "name": "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"},
        {"filename": "/home/me/model.py", "line": 12, "name": "forward"},
    ]

    def event(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1, "frames": frames}

    def segment(address: int, used: int, requested: int, stream: int = 0) -> dict[str, Any]:
        blocks = [
            {"size": used, "requested_size": requested, "state": "active_allocated", "frames": frames},
            {"size": 2 * MIB - used, "requested_size": 0, "state": "inactive", "frames": []},
        ]
        return {
            "device": 0, "address": address, "total_size": 2 * MIB, "allocated_size": used, "active_size": used,
            "requested_size": requested, "stream": stream, "segment_type": "small", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": frames, "blocks": blocks,
        }  # fmt: skip

    return {
        "segments": [segment(BASE, 512, 300), segment(BASE + 4 * MIB, 512, 100, 7777)],
        "device_traces": [
            [
                event("alloc", BASE + 1024, 600),
                event("free_requested", BASE + 512, 400),
                event("free_completed", BASE + 512, 400),
                event("segment_alloc", BASE + 4 * MIB, 2 * MIB, 7777),
                event("alloc", BASE + 4 * MIB, 100, 7777),
                event("free_requested", BASE + 1024, 600),
                event("free_completed", BASE + 1024, 600),
                event("snapshot", 0, 0),
            ]
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        "external_annotations": [],
    }


@cache
def snapshot_pickles() -> tuple[bytes, ...]:
    """The snapshot under every protocol that PyTorch has written."""
    return tuple(pickle.dumps(snapshot(), protocol=protocol) for protocol in (2, 4, 5))


@cache
def traces() -> tuple[Any, ...]:
    """Exported traces, one with private pools, one with limits too."""
    from graphmem.trace import Category, EventKind, Place, TraceBuilder, to_json

    documents = []
    for pooled, limited in ((False, False), (True, False), (True, True)):
        builder = TraceBuilder("a test", notes=[("allocator settings", ""), ("recorded peak reserved", "2097152")])
        pool = builder.pool("graph") if pooled else 0
        operator = builder.operator("aten.mm", "model.layer", builder.phase(1, "forward"), "model.py:1")
        if pooled:
            builder.event(EventKind.CREATE_POOL, operator, pool)
        first = builder.alloc(1024, operator, Category.ACTIVATION, pool=pool)
        second = builder.alloc(3 * MIB, operator, Category.PARAMETER, label="weight", stream=1)
        builder.alloc(4096, operator, Category.INPUT, place=Place.HOST)
        builder.event(EventKind.RECORD_STREAM, operator, second, 2)
        builder.free(first, operator)
        builder.event(EventKind.SYNCHRONIZE, operator)
        builder.free(second, operator)
        builder.event(EventKind.EMPTY_CACHE, operator)
        if limited:
            builder.memory_fraction(0.5, operator)
            builder.allocator_settings("max_split_size_mb:20", operator)
            builder.refuse(builder.alloc(8 * MIB, operator))
        documents.append(json.loads(to_json(builder.build())))
    return tuple(documents)


@cache
def report() -> Any:
    """What ``analyze --format json`` writes."""
    from graphmem.analyze import replay_trace
    from graphmem.trace import from_json

    return replay_trace(from_json(json.dumps(traces()[0]))).to_dict()


DEVICES: list[Any] = [
    {
        "name": "MyCard", "aliases": ["mine"], "vendor": "NVIDIA", "capacity_bytes": 25 << 30,
        "capacity_source": "measured", "compute_capability": [8, 9], "sm_count": 128, "max_threads_per_sm": 1536,
        "context_bytes": 500 << 20, "context_source": "measured", "context_measured": True, "unified_memory": False,
        "cublas_workspace_bytes": 8 << 20, "clocks_khz": [2520000, 10501000],
    },
    {
        "name": "RTX-4090", "capacity_bytes": 25 << 30, "compute_capability": [8, 9], "sm_count": 128,
        "max_threads_per_sm": 1536, "context_bytes": 500 << 20,
    },
]  # fmt: skip

HF_CONFIGS: tuple[Any, ...] = (
    {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_embd": 16, "n_layer": 1,
        "n_head": 2, "n_positions": 32, "n_inner": None, "activation_function": "gelu_new", "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True, "use_cache": True,
    },
    {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "hidden_act": "silu",
        "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 0,
        "attention_bias": False, "rms_norm_eps": 1e-6, "mlp_bias": False,
    },
    {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 64, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.1, "id2label": {"0": "a", "1": "b"}, "type_vocab_size": 2,
    },
    {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32, "patch_size": 16, "num_channels": 3,
        "qkv_bias": True,
    },
)  # fmt: skip

RECORDS: tuple[Any, ...] = (
    {
        "schema": 2,
        "case": {
            "name": "perceptron-inference", "model": "perceptron.onnx", "batch": 2, "seq_len": None, "iterations": 2,
            "alloc_conf": "provider:cpu", "runtime": "onnxruntime", "shapes": "",
            "step": {"training": False, "dtype": "fp32", "amp": None, "data_dependent": None, "compile": None},
        },
        "status": "ok",
        "machine": {
            "source": "onnxruntime on the CPU", "gpu": "some CPU", "capability": [0, 0], "sm_count": 0,
            "threads_per_sm": 0, "total_bytes": 0, "versions": {"onnxruntime": "1.31.1"},
        },
        "measured": {
            "requested_bytes": None, "allocated_bytes": 4096, "reserved_bytes": 8192, "retries": 0, "device": None,
            "iterations": [{"allocated_bytes": 4096, "reserved_bytes": 8192}],
        },
        "error": "", "date": "2025-01-01", "seconds": 1.5, "cap_bytes": None, "trace": "",
    },
    {
        "schema": 2,
        "case": {
            "name": "gone", "model": "zoo:none", "batch": 2, "seq_len": None, "iterations": 2, "alloc_conf": "",
            "runtime": "pytorch", "shapes": "",
            "step": {"training": True, "optimizer": "sgd", "optimizer_args": [["lr", 0.1]]},
        },
        "status": "failed", "machine": None, "measured": None, "error": "it broke", "date": "", "seconds": 0.0,
    },
)  # fmt: skip


def recorded_allocations() -> Any:
    """What ``measure --traces`` writes, before it is compressed."""
    events = [["alloc", BASE, 1024, 0], ["alloc", BASE + 1024, 2048, 0], ["free_requested", BASE, 1024, 0]]
    return {"schema": 1, "events": events}


@cache
def programs() -> tuple[bytes, ...]:
    """Programs saved by ``torch.export.save``: fixed sizes, a dynamic batch, inputs by name."""
    import torch
    from torch import nn

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Any, *, y: Any) -> Any:
            return {"sum": self.linear(x) * self.scale + y}

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    dynamic = torch.export.Dim("batch", min=2, max=64)
    exported = (
        torch.export.export(net, (torch.zeros(2, 8),)),
        torch.export.export(net, (torch.zeros(3, 8),), dynamic_shapes=({0: dynamic},)),
        torch.export.export(Named(), (torch.zeros(2, 4),), {"y": torch.zeros(2, 4)}),
    )
    saved = []
    for program in exported:
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        saved.append(buffer.getvalue())
    return tuple(saved)


def gguf_parts() -> tuple[dict[str, Any], list[Any]]:
    """Metadata and tensors of a small model like Llama."""
    name = "llama"
    metadata = {
        "general.architecture": name, f"{name}.block_count": 2, f"{name}.embedding_length": 64,
        f"{name}.attention.head_count": 4, f"{name}.attention.head_count_kv": [2, 2],
        f"{name}.feed_forward_length": 128, f"{name}.context_length": 2048, f"{name}.attention.sliding_window": 512,
        f"{name}.expert_used_count": 0, "tokenizer.ggml.tokens": ["a", "b", "c"],
    }  # fmt: skip
    tensors = [
        ("token_embd.weight", "q8_0", (64, 100)), ("blk.0.attn_q.weight", "q8_0", (64, 64)),
        ("blk.1.ffn_down.weight", "q8_0", (128, 64)), ("output.weight", "f16", (64, 100)),
    ]  # fmt: skip
    return metadata, tensors


@cache
def gguf_files() -> tuple[bytes, ...]:
    """Headers of GGUF files."""
    from tests.support import gguf

    return gguf.header(*gguf_parts()), gguf.llama(2, 64, 4, 2, 128, 100, kind="q8_0", head_kind="q8_0")


ALLOCATOR_OPTIONS = {
    "pytorch": (
        "max_split_size_mb:128,garbage_collection_threshold:0.8",
        "expandable_segments:True",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "large_segment_size_mb:64,per_process_memory_fraction:0.5",
        "backend:native,max_non_split_rounding_mb:40,pinned_use_cuda_host_register:True",
    ),
    "onnxruntime": (
        "gpu_mem_limit:2GiB,arena_extend_strategy:kSameAsRequested",
        "initial_chunk_size_bytes:1048576,max_dead_bytes_per_chunk:1024,max_power_of_two_extend_bytes:1GiB",
        "provider:cpu,intra_op_num_threads:4,enable_mem_pattern:0,graph_optimization_level:basic",
        "cudnn_conv_algo_search:HEURISTIC,cudnn_workspace_bytes:32MiB,cublas_workspace_bytes:4MiB",
    ),
    "tensorflow": (
        "allow_growth=true,per_process_gpu_memory_fraction=0.5",
        "memory_limit=4096,internal_fragmentation_fraction=0.1",
        "TF_GPU_ALLOCATOR=cuda_malloc_async,TF_FORCE_GPU_ALLOW_GROWTH=true",
        "gpu_system_memory_size_in_mb=512,num_virtual_devices_per_gpu=1",
    ),
    "mxnet": ("MXNET_GPU_MEM_POOL_TYPE=Round,MXNET_GPU_MEM_POOL_RESERVE=5", "MXNET_GPU_MEM_POOL_PAGE_SIZE=4096"),
}


def write(path: Path, content: bytes) -> Path:
    """The file with that content."""
    path.write_bytes(content)
    return path
