"""Models of our own for sessions of the CUDA provider: PyTorch's two exporters, and graphs written by hand.

    python -m tests.oracles.onnxruntime.cuda_models FOLDER [NAME ...]

Weights are zeros or random and nobody looks at them. Needs torch, transformers and onnxscript.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Made = Callable[[Path], None]
MODELS: dict[str, Made] = {}
_OPSETS = (("", 17), ("com.microsoft", 1))


def model(function: Made) -> Made:
    """Register a model under the name of the function that writes it."""
    MODELS[function.__name__] = function
    return function


# --- by PyTorch's exporters -------------------------------------------------------------------------------------------


def exported(
    module: Any, arguments: Sequence[Any], path: Path, names: Sequence[str], dynamic: Any, **options: Any
) -> None:
    """By the exporter over ``torch.export``; ``dynamic`` gives the named dimensions of each input."""
    import torch

    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in dynamic)
    torch.onnx.export(
        module.eval(), tuple(arguments), str(path), dynamo=True, dynamic_shapes=shapes, external_data=False,
        input_names=list(names), verbose=False, **options,
    )  # fmt: skip


def traced(
    module: Any, arguments: Sequence[Any], path: Path, names: Sequence[str], dynamic: Any, opset: int = 17
) -> None:
    """By the older exporter, from a trace."""
    import torch

    axes = {
        name: {axis: f"{name}_{axis}" if axis else "batch" for axis in some}
        for name, some in zip(names, dynamic, strict=True)
    }
    torch.onnx.export(
        module.eval(), tuple(arguments), str(path), dynamo=False, opset_version=opset, input_names=list(names),
        dynamic_axes=axes,
    )  # fmt: skip


def _vision(make: Callable[[Any, Any], Any], side: int = 64, export: Any = exported, kind: str = "float32") -> Made:
    def write(path: Path) -> None:
        import torch

        dtype = getattr(torch, kind)
        module, image = make(torch, torch.nn).to(dtype), torch.zeros(2, 3, side, side, dtype=dtype)
        export(module, (image,), path, ["x"], [(0,)])

    return write


def _small_net(torch: Any, nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.Conv2d(64, 128, 1), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


MODELS["small_net"] = _vision(_small_net)
MODELS["small_net_traced"] = _vision(_small_net, export=traced)
MODELS["small_net_fp16"] = _vision(_small_net, export=traced, kind="float16")


def _transformers(name: str, side: int = 64, traced_: bool = False, **config: Any) -> Made:
    """An image model of transformers, small."""

    def make(torch: Any, nn: Any) -> Any:
        import transformers

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                made = getattr(transformers, f"{name}Config")(**config)
                self.inner = getattr(transformers, f"{name}Model")(made)

            def forward(self, x: Any) -> Any:
                return self.inner(x, return_dict=False)[0]

        return First()

    return _vision(make, side, traced if traced_ else exported)


_RESNET = {"embedding_size": 32, "hidden_sizes": [64, 128, 256], "depths": [2, 2, 2], "layer_type": "basic"}
_VIT = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192, "image_size": 64}
MODELS["resnet"] = _transformers("ResNet", **_RESNET)
MODELS["resnet_traced"] = _transformers("ResNet", traced_=True, **_RESNET)
MODELS["resnet_bottleneck"] = _transformers("ResNet", embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2])
MODELS["mobilenet_v2"] = _transformers("MobileNetV2", image_size=64)
MODELS["vit"] = _transformers("ViT", **_VIT)
MODELS["vit_traced"] = _transformers("ViT", traced_=True, **_VIT)
MODELS["deit"] = _transformers("DeiT", **_VIT)
MODELS["convnext"] = _transformers("ConvNext", hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1])
MODELS["regnet"] = _transformers(
    "RegNet", embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 2, 1], groups_width=16
)
MODELS["segformer"] = _transformers(
    "Segformer", hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], decoder_hidden_size=64
)
MODELS["swin"] = _transformers(
    "Swin", image_size=64, embed_dim=48, depths=[1, 1, 2], num_heads=[2, 4, 8], window_size=4, side=64
)
MODELS["poolformer"] = _transformers("PoolFormer", hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1])
MODELS["efficientnet"] = _transformers(
    "EfficientNet", image_size=64, width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=320
)


def _text(
    name: str, traced_: bool = False, kind: str = "Model", mask: bool = True, dtype: str = "float32", **config: Any
) -> Made:
    def write(path: Path) -> None:
        import torch
        import transformers

        class First(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                made = getattr(transformers, f"{name}Config")(**config)
                made._attn_implementation = "eager" if traced_ else "sdpa"
                self.inner = getattr(transformers, f"{name}{kind}")(made)

            def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
                given = {} if attention_mask is None else {"attention_mask": attention_mask}
                return self.inner(input_ids=input_ids, return_dict=False, use_cache=False, **given)[0]

        ids = torch.zeros(2, 16, dtype=torch.long)
        arguments = (ids, torch.ones_like(ids)) if mask else (ids,)
        module = First().to(getattr(torch, dtype))
        names = ["input_ids", "attention_mask"][: len(arguments)]
        (traced if traced_ else exported)(module, arguments, path, names, [(0, 1)] * len(arguments))

    return write


_BERT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
_LLAMA = _BERT | {"num_key_value_heads": 2}
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
MODELS["bert"] = _text("Bert", **_BERT)
MODELS["bert_traced"] = _text("Bert", traced_=True, **_BERT)
MODELS["bert_fp16"] = _text("Bert", traced_=True, dtype="float16", **_BERT)
MODELS["bert_bf16"] = _text("Bert", dtype="bfloat16", **_BERT)
MODELS["roberta"] = _text("Roberta", **_BERT)
MODELS["distilbert_traced"] = _text(
    "DistilBert", traced_=True, dim=128, n_layers=2, n_heads=4, hidden_dim=256, vocab_size=1000
)
MODELS["electra"] = _text("Electra", embedding_size=64, **_BERT)
MODELS["gpt2"] = _text("GPT2", kind="LMHeadModel", mask=False, **_GPT2)
MODELS["llama"] = _text("Llama", kind="ForCausalLM", mask=False, **_LLAMA)
MODELS["qwen2"] = _text("Qwen2", kind="ForCausalLM", mask=False, **_LLAMA)
MODELS["mistral"] = _text("Mistral", kind="ForCausalLM", mask=False, **_LLAMA)
MODELS["gpt_neox"] = _text("GPTNeoX", kind="ForCausalLM", mask=False, **_BERT)
MODELS["opt"] = _text(
    "OPT",
    kind="ForCausalLM",
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=256,
    vocab_size=1000,
    word_embed_proj_dim=128,
)


def _decoder(family: str = "Llama", kind: str = "float32") -> Made:
    """A decoder with past keys and values as inputs and outputs."""

    def write(path: Path) -> None:
        import torch
        import transformers

        class Decoder(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                made = getattr(transformers, f"{family}Config")(**_LLAMA)
                made._attn_implementation = "eager"
                self.inner = getattr(transformers, f"{family}ForCausalLM")(made)

            def forward(self, input_ids: Any, attention_mask: Any, k0: Any, v0: Any, k1: Any, v1: Any) -> Any:
                cache = transformers.DynamicCache()
                cache.update(k0, v0, 0)
                cache.update(k1, v1, 1)
                out = self.inner(
                    input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True
                )
                first, second = out.past_key_values.layers
                return out.logits, first.keys, first.values, second.keys, second.values

        dtype = getattr(torch, kind)
        past = [torch.zeros(2, 2, 6, 32, dtype=dtype) for _ in range(4)]
        ids = torch.zeros(2, 3, dtype=torch.long)
        names = ["input_ids", "attention_mask", "k0", "v0", "k1", "v1"]
        arguments = (ids, torch.ones(2, 9, dtype=torch.long), *past)
        exported(Decoder().to(dtype), arguments, path, names, [(0, 1), (0, 1), *[(0, 2)] * 4])

    return write


MODELS["llama_past"] = _decoder()
MODELS["llama_past_fp16"] = _decoder(kind="float16")
MODELS["llama_past_bf16"] = _decoder(kind="bfloat16")
MODELS["qwen2_past"] = _decoder("Qwen2")


def _recurrent(
    kind: str, layers: int = 1, both: bool = False, hidden: int = 128, export: Any = traced, half: bool = False
) -> Made:
    def write(path: Path) -> None:
        import torch

        module = getattr(torch.nn, kind)(64, hidden, layers, batch_first=True, bidirectional=both)
        x = torch.zeros(2, 50, 64)
        if half:
            module, x = module.half(), x.half()
        export(module, (x,), path, ["x"], [(0, 1)] if export is traced else [(0,)])

    return write


for _kind in ("LSTM", "GRU", "RNN"):
    MODELS[f"{_kind.lower()}"] = _recurrent(_kind)
    MODELS[f"{_kind.lower()}_both"] = _recurrent(_kind, both=True)
    MODELS[f"{_kind.lower()}_deep"] = _recurrent(_kind, layers=2, both=True, hidden=96)
MODELS["lstm_wide"] = _recurrent("LSTM", hidden=512)
MODELS["lstm_fp16"] = _recurrent("LSTM", half=True)
MODELS["gru_wide"] = _recurrent("GRU", hidden=320)


def _speech(path: Path) -> None:
    import torch

    class Speech(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            nn = torch.nn
            self.convolutions = nn.Sequential(
                nn.Conv1d(1, 32, 10, stride=5), nn.GELU(), nn.Conv1d(32, 64, 3, stride=2, padding=1), nn.GELU(),
                nn.Conv1d(64, 64, 5, padding=2, groups=16), nn.BatchNorm1d(64), nn.ReLU(),
            )  # fmt: skip
            self.recurrent = nn.LSTM(64, 96, batch_first=True, bidirectional=True)
            self.head = nn.Linear(192, 32)

        def forward(self, x: Any) -> Any:
            return torch.log_softmax(self.head(self.recurrent(self.convolutions(x).transpose(1, 2))[0]), -1)

    traced(Speech(), (torch.zeros(2, 1, 4000),), path, ["x"], [(0,)])


MODELS["speech"] = _speech


def _unet(torch: Any, nn: Any) -> Any:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
            self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(32, 16, 2, 2)
            self.c, self.d = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 4, 1)

        def forward(self, x: Any) -> Any:
            first = torch.relu(self.a(x))
            second = torch.relu(self.b(self.pool(first)))
            return self.d(torch.relu(self.c(torch.cat([self.up(second), first], 1))))

    return UNet()


MODELS["unet"] = _vision(_unet)
MODELS["unet_traced"] = _vision(_unet, export=traced)


def _upsampling(torch: Any, nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2), nn.PReLU(16), nn.InstanceNorm2d(16, affine=True), nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2), nn.Hardswish(), nn.GroupNorm(3, 3),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.AvgPool2d(2), nn.Sigmoid(),
    )  # fmt: skip


MODELS["upsampling"] = _vision(_upsampling, export=traced)


def _three(path: Path) -> None:
    import torch

    nn = torch.nn
    net = nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), nn.BatchNorm3d(32),
        nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    traced(net, (torch.zeros(2, 3, 8, 32, 32),), path, ["x"], [(0,)])


MODELS["volumes"] = _three


def _encoder_layer(path: Path) -> None:
    import torch

    layer = torch.nn.TransformerEncoderLayer(96, 4, 256, batch_first=True)
    exported(
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        (torch.zeros(2, 24, 96),),
        path,
        ["x"],
        [(0,)],
    )


MODELS["encoder_layer"] = _encoder_layer


def _perceptron(path: Path) -> None:
    import torch

    nn = torch.nn
    net = nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.LayerNorm(512),
        nn.Linear(512, 512),
        nn.Tanh(),
        nn.Linear(512, 16),
        nn.Softmax(-1),
    )
    traced(net, (torch.zeros(2, 256),), path, ["x"], [(0,)])


MODELS["perceptron"] = _perceptron


# --- by hand ----------------------------------------------------------------------------------------------------------


def written(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[Any]]],
    outputs: Mapping[str, int],
    weights: Mapping[str, Any] = {},
    opsets: Sequence[tuple[str, int]] = _OPSETS,
) -> None:
    """A graph of ``nodes``; inputs are (element type, shape), outputs element types, weights arrays."""
    graph = helper.make_graph(
        list(nodes), path.stem,
        [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid(*opset) for opset in opsets], ir_version=9)
    onnx.save(made, str(path))


FLOAT, HALF, INT64, INT32, BOOL, UINT8 = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.UINT8,
)  # fmt: skip


def _f(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def one(
    name: str, operator: str, shapes: Sequence[Sequence[Any]], weights: Sequence[Any] = (), *,
    kinds: Sequence[int] = (), outputs: int = 1, domain: str = "", opset: int = 17, result: Sequence[int] = (),
    **attributes: Any,
) -> None:  # fmt: skip
    """A model of one operator between two that move data, so that it neither reads an input nor writes an output."""

    def write(path: Path) -> None:
        given = {f"x{i}": (kinds[i] if kinds else FLOAT, shape) for i, shape in enumerate(shapes)}
        before = [
            helper.make_node("Neg", [key], [f"{key}_"])
            if kind in (FLOAT, HALF)
            else helper.make_node("Identity", [key], [f"{key}_"])
            for key, (kind, _) in given.items()
        ]
        named = {f"w{i}": array for i, array in enumerate(weights) if array is not None}
        read = [
            *(f"{key}_" for key in given),
            *(f"w{i}" if array is not None else "" for i, array in enumerate(weights)),
        ]
        made = [f"y{i}" for i in range(outputs)]
        node = helper.make_node(operator, read, made, domain=domain, **attributes)
        kinds_of = list(result) or [next(iter(given.values()))[0]] * outputs
        after = [
            helper.make_node("Neg" if kind in (FLOAT, HALF) else "Identity", [key], [f"{key}_"])
            for key, kind in zip(made, kinds_of, strict=True)
        ]
        written(
            path,
            [*before, node, *after],
            given,
            {f"{key}_": kind for key, kind in zip(made, kinds_of, strict=True)},
            named,
            (("", opset), ("com.microsoft", 1)),
        )

    MODELS[name] = write


_X = ("batch", 64, 32, 32)
one("op_softmax", "Softmax", [_X])
one("op_softmax_axis", "Softmax", [_X], axis=1)
one("op_log_softmax", "LogSoftmax", [("batch", 1000)])
one("op_reduce_mean", "ReduceMean", [_X], axes=[2, 3])
one("op_reduce_mean_inner", "ReduceMean", [_X], axes=[1])
one("op_reduce_sum", "ReduceSum", [_X], [np.array([2, 3])])
one("op_reduce_sum_all", "ReduceSum", [_X])
one("op_reduce_max", "ReduceMax", [_X], axes=[1, 3])
one("op_reduce_l2", "ReduceL2", [_X], axes=[1])
one("op_reduce_log_sum_exp", "ReduceLogSumExp", [_X], axes=[1])
one("op_argmax", "ArgMax", [_X], axis=1, result=[INT64])
one("op_argmax_last", "ArgMax", [("batch", 16, 1000)], axis=-1, result=[INT64])
one("op_argmin_first", "ArgMin", [("batch", 64)], axis=0, result=[INT64])
one("op_topk", "TopK", [("batch", 4096)], [np.array([10])], outputs=2, result=[FLOAT, INT64])
one("op_topk_long", "TopK", [("batch", 100000)], [np.array([100])], outputs=2, result=[FLOAT, INT64])
one("op_cumsum", "CumSum", [_X], [np.array(3)])
one("op_transpose", "Transpose", [_X], perm=[0, 2, 3, 1])
one("op_pad", "Pad", [_X], [np.array([0, 0, 1, 1, 0, 0, 1, 1])])
one("op_resize", "Resize", [_X], [None, np.array([1, 1, 2, 2], np.float32)], mode="linear")
one("op_resize_nearest", "Resize", [_X], [None, np.array([1, 1, 2, 2], np.float32)], mode="nearest")
one("op_gather", "Gather", [("batch", 128, 64)], [np.array([3, 5, 7])], axis=1)
one("op_split", "Split", [_X], axis=1, outputs=4)
one(
    "op_where",
    "Where",
    [("batch", 1, 1), ("batch", 64, 64), ("batch", 64, 64)],
    kinds=[BOOL, FLOAT, FLOAT],
    result=[FLOAT],
)
one("op_expand", "Expand", [("batch", 1, 64)], [np.array([1, 32, 64])])
one("op_tile", "Tile", [("batch", 16, 64)], [np.array([1, 3, 2])])
one("op_layer_norm", "LayerNormalization", [("batch", 128, 256)], [_f(256), _f(256)])
one("op_instance_norm", "InstanceNormalization", [_X], [_f(64), _f(64)])
one("op_batch_norm", "BatchNormalization", [_X], [_f(64), _f(64), _f(64), abs(_f(64))])
one("op_group_norm", "GroupNormalization", [_X], [_f(8), _f(8)], num_groups=8, opset=18)
one("op_lrn", "LRN", [_X], size=5)
one("op_max_pool", "MaxPool", [_X], kernel_shape=[2, 2], strides=[2, 2])
one("op_global_average_pool", "GlobalAveragePool", [_X])
one("op_matmul", "MatMul", [("batch", 128, 256)], [_f(256, 512)])
one("op_matmul_batched", "MatMul", [("batch", 8, 128, 64), ("batch", 8, 64, 128)])
one("op_matmul_broadcast", "MatMul", [("batch", 8, 128, 64), (1, 8, 64, 128)])
one("op_gemm", "Gemm", [("batch", 256)], [_f(512, 256), _f(512)], transB=1)
one("op_einsum", "Einsum", [("batch", 16, 32), ("batch", 32, 24)], equation="bij,bjk->bik")
one("op_einsum_transposed", "Einsum", [("batch", 16, 8, 32), ("batch", 24, 8, 32)], equation="bqhd,bkhd->bhqk")
one("op_conv", "Conv", [_X], [_f(128, 64, 3, 3), _f(128)], pads=[1, 1, 1, 1])
one("op_conv_no_bias", "Conv", [_X], [_f(128, 64, 3, 3)], pads=[1, 1, 1, 1])
one("op_conv_pointwise", "Conv", [_X], [_f(256, 64, 1, 1), _f(256)])
one("op_conv_depthwise", "Conv", [_X], [_f(64, 1, 3, 3), _f(64)], group=64, pads=[1, 1, 1, 1])
one("op_conv_grouped", "Conv", [_X], [_f(64, 16, 3, 3)], group=4, pads=[1, 1, 1, 1])
one("op_conv_strided", "Conv", [_X], [_f(96, 64, 5, 5)], strides=[2, 2], pads=[2, 2, 2, 2])
one("op_conv_dilated", "Conv", [_X], [_f(64, 64, 3, 3)], dilations=[2, 2], pads=[2, 2, 2, 2])
one("op_conv_uneven", "Conv", [_X], [_f(64, 64, 3, 3)], strides=[2, 2], auto_pad="SAME_UPPER")
one("op_conv_line", "Conv", [("batch", 64, 400)], [_f(128, 64, 5), _f(128)], pads=[2, 2])
one("op_conv_volume", "Conv", [("batch", 16, 8, 16, 16)], [_f(32, 16, 3, 3, 3)], pads=[1] * 6)
one("op_conv_half", "Conv", [_X], [_f(128, 64, 3, 3, dtype=np.float16)], kinds=[HALF], pads=[1, 1, 1, 1])
one("op_conv_transpose", "ConvTranspose", [_X], [_f(64, 32, 4, 4), _f(32)], strides=[2, 2], pads=[1, 1, 1, 1])
one("op_conv_transpose_line", "ConvTranspose", [("batch", 64, 100)], [_f(64, 32, 8)], strides=[4])
one(
    "op_lstm_sequence",
    "LSTM",
    [(100, "batch", 80)],
    [_f(1, 512, 80), _f(1, 512, 128), _f(1, 1024)],
    outputs=3,
    hidden_size=128,
)
one(
    "op_gru_reset",
    "GRU",
    [(100, "batch", 80)],
    [_f(1, 384, 80), _f(1, 384, 128), _f(1, 768)],
    outputs=2,
    hidden_size=128,
    linear_before_reset=1,
)
one(
    "op_gru_before",
    "GRU",
    [(100, "batch", 80)],
    [_f(1, 384, 80), _f(1, 384, 128), _f(1, 768)],
    outputs=2,
    hidden_size=128,
)
one("op_nonzero", "NonZero", [("batch", 64)], kinds=[FLOAT], result=[INT64])
one(
    "op_one_hot", "OneHot", [("batch", 16)], [np.array(32), np.array([0, 1], np.float32)], kinds=[INT64], result=[FLOAT]
)
one("op_scatter_nd", "ScatterND", [("batch", 64)], [np.array([[0]]), _f(1, 64)])
one("op_gather_nd", "GatherND", [("batch", 64)], [np.array([[0, 1]])])
one("op_clip", "Clip", [_X], [np.array(0, np.float32), np.array(6, np.float32)])
one("op_hard_swish", "HardSwish", [_X])
one("op_erf", "Erf", [_X])
one("op_gelu", "Gelu", [_X], opset=20)
one("op_cast", "Cast", [_X], to=HALF, result=[HALF])
one("op_quantize", "QuantizeLinear", [_X], [np.array(0.1, np.float32), np.array(0, np.uint8)], result=[UINT8])
one("op_rms_norm", "RMSNormalization", [("batch", 128, 256)], [_f(256)], opset=23)
one("op_attention", "Attention", [("batch", 4, 64, 32)] * 3, opset=23)
one("op_rotary", "RotaryEmbedding", [("batch", 4, 64, 32)], [_f(128, 16), _f(128, 16), None], opset=23)
_MS = "com.microsoft"
one("ms_attention", "Attention", [("batch", 64, 256)], [_f(256, 768), _f(768)], domain=_MS, num_heads=4)
one(
    "ms_attention_half",
    "Attention",
    [("batch", 64, 256)],
    [_f(256, 768, dtype=np.float16), _f(768, dtype=np.float16)],
    kinds=[HALF],
    domain=_MS,
    num_heads=4,
)
one(
    "ms_attention_masked",
    "Attention",
    [("batch", 64, 256)],
    [_f(256, 768), _f(768), np.ones((16, 64), np.int32)],
    domain=_MS,
    num_heads=4,
)
one("ms_multi_head_attention", "MultiHeadAttention", [("batch", 64, 256)] * 3, domain=_MS, num_heads=4)
one(
    "ms_multi_head_attention_half",
    "MultiHeadAttention",
    [("batch", 64, 256)] * 3,
    kinds=[HALF] * 3,
    domain=_MS,
    num_heads=4,
)
one("ms_skip_layer_norm", "SkipLayerNormalization", [("batch", 64, 256)] * 2, [_f(256), _f(256)], domain=_MS)
one("ms_simplified_layer_norm", "SkipSimplifiedLayerNormalization", [("batch", 64, 256)] * 2, [_f(256)], domain=_MS)
one("ms_fast_gelu", "FastGelu", [("batch", 64, 256)], [_f(256)], domain=_MS)
one("ms_bias_gelu", "BiasGelu", [("batch", 64, 256)], [_f(256)], domain=_MS)
one("ms_quick_gelu", "QuickGelu", [("batch", 64, 256)], domain=_MS)
one("ms_gelu", "Gelu", [("batch", 64, 256)], domain=_MS)
one("ms_fused_matmul", "FusedMatMul", [("batch", 64, 256)], [_f(512, 256)], domain=_MS, transB=1)
one(
    "ms_group_norm",
    "GroupNorm",
    [("batch", 32, 32, 64)],
    [_f(64), _f(64)],
    domain=_MS,
    groups=8,
    activation=1,
    epsilon=1e-5,
)
one(
    "ms_matmul_nbits",
    "MatMulNBits",
    [("batch", 64, 256)],
    [np.zeros((512, 8, 16), np.uint8), _f(512 * 8)],
    domain=_MS,
    K=256,
    N=512,
    bits=4,
    block_size=32,
)
one(
    "ms_matmul_nbits_half",
    "MatMulNBits",
    [("batch", 64, 256)],
    [np.zeros((512, 8, 16), np.uint8), _f(512 * 8, dtype=np.float16)],
    kinds=[HALF],
    domain=_MS,
    K=256,
    N=512,
    bits=4,
    block_size=32,
)
one("ms_fused_conv", "FusedConv", [_X], [_f(128, 64, 3, 3), _f(128)], domain=_MS, pads=[1, 1, 1, 1], activation="Relu")
one(
    "ms_group_query_attention",
    "GroupQueryAttention",
    [
        ("batch", 1, 256),
        ("batch", 1, 128),
        ("batch", 1, 128),
        ("batch", 2, 128, 64),
        ("batch", 2, 128, 64),
        ("batch",),
        (),
    ],
    kinds=[HALF, HALF, HALF, HALF, HALF, INT32, INT32],
    outputs=3,
    result=[HALF] * 3,
    domain=_MS,
    num_heads=4,
    kv_num_heads=2,
)
one(
    "ms_moe",
    "MoE",
    [("batch", 64, 128), (64, 8)],
    [_f(8, 128, 256, dtype=np.float16), None, _f(8, 256, 128, dtype=np.float16)],
    kinds=[HALF, HALF],
    domain=_MS,
    k=2,
    activation_type="gelu",
)
one("ms_bias_split_gelu", "BiasSplitGelu", [("batch", 64, 2560)], [_f(2560)], domain=_MS)
one(
    "ms_rotary",
    "RotaryEmbedding",
    [("batch", 64, 128), ("batch", 64)],
    [_f(128, 16), _f(128, 16)],
    kinds=[FLOAT, INT64],
    domain=_MS,
    num_heads=4,
)


# --- kernels that choose among several implementations ----------------------------------------------------------------

_HALF = np.float16
_QKV, _HEADS = [("batch", "s", 256)] * 3, [("batch", 4, "s", 64)] * 3
_CROSS = [("batch", 4, "s", 64), ("batch", 4, "t", 64), ("batch", 4, "t", 64)]
_GROUPED = [("batch", 4, "s", 64), ("batch", 2, "s", 64), ("batch", 2, "s", 64)]
_WIDE = [("batch", 4, "s", 256)] * 3
for _name, _inputs, _weights in (
    ("", _QKV, []),
    ("_bias", _QKV, [_f(768, dtype=_HALF)]),
    ("_packed", [("batch", "s", 4, 3, 64)], []),
    ("_packed_keys", [("batch", "s", 256), ("batch", "s", 4, 2, 64)], []),
    ("_lengths", _QKV, [None, np.ones(16, np.int32)]),
):
    one(
        f"mha_half{_name}",
        "MultiHeadAttention",
        _inputs,
        _weights,
        kinds=[HALF] * len(_inputs),
        domain=_MS,
        num_heads=4,
    )
one("mha_float", "MultiHeadAttention", _QKV, domain=_MS, num_heads=4)
one(
    "ms_attention_lengths", "Attention", [("batch", "s", 256)],
    [_f(256, 768, dtype=_HALF), _f(768, dtype=_HALF), np.ones(16, np.int32)], kinds=[HALF], domain=_MS, num_heads=4,
)  # fmt: skip
one(
    "ms_attention_lines", "Attention", [("batch", "s", 256)], [_f(256, 768, dtype=_HALF), _f(768, dtype=_HALF)],
    kinds=[HALF], domain=_MS, num_heads=4,
)  # fmt: skip
for _name, _inputs in (("", _HEADS), ("_cross", _CROSS), ("_grouped", _GROUPED), ("_wide", _WIDE)):
    one(f"attention_half{_name}", "Attention", _inputs, kinds=[HALF] * 3, opset=23)
one("attention_float_grouped", "Attention", _GROUPED, opset=23)
one("attention_mask", "Attention", [*_HEADS, ("s", "s")], kinds=[HALF] * 3 + [BOOL], opset=23)
one("attention_rows", "Attention", _QKV, kinds=[HALF] * 3, opset=24, q_num_heads=4, kv_num_heads=4)


def _group_query(packed: bool, **attributes: Any) -> Made:
    """Grouped queries of a decoder: past keys are inputs, present ones outputs."""

    def write(path: Path) -> None:
        widths = [512] if packed else [256, 128, 128]
        inputs: dict[str, tuple[int, Sequence[Any]]] = {
            f"x{i}": (HALF, ("batch", "s", width)) for i, width in enumerate(widths)
        }
        read = [*(f"{name}_" for name in inputs), *["", ""][: 2 * packed]]
        nodes = [helper.make_node("Neg", [name], [f"{name}_"]) for name in inputs]
        given = dict.fromkeys(("k", "v"), (HALF, ("batch", 2, "p", 64)))
        inputs |= {**given, "lengths": (INT32, ("batch",)), "total": (INT32, ())}
        weights = {"cos": _f(2048, 32, dtype=_HALF), "sin": _f(2048, 32, dtype=_HALF)} if attributes else {}
        read += ["k", "v", "lengths", "total", *weights]
        nodes += [
            helper.make_node(
                "GroupQueryAttention", read, ["y0", "y1", "y2"], domain=_MS, num_heads=4, kv_num_heads=2, **attributes
            ),
            helper.make_node("Neg", ["y0"], ["y0_"]),
        ]
        written(path, nodes, inputs, dict.fromkeys(("y0_", "y1", "y2"), HALF), weights)

    return write


MODELS["gqa"], MODELS["gqa_packed_rotary"] = _group_query(False), _group_query(True, do_rotary=1)
for _name, _depth, _columns in (("even", 256, 512), ("uneven", 200, 300)):
    one(
        f"nbits_{_name}", "MatMulNBits", [("batch", "s", _depth)],
        [np.zeros((_columns, -(-_depth // 32), 16), np.uint8), _f(_columns * -(-_depth // 32), dtype=_HALF)],
        kinds=[HALF], domain=_MS, K=_depth, N=_columns, bits=4, block_size=32,
    )  # fmt: skip
for _length, _count in ((5000, 17), (20000, 5), (100000, 5000)):
    one(
        f"topk_{_length}_{_count}", "TopK", [("batch", _length)], [np.array([_count])], outputs=2,
        result=[FLOAT, INT64],
    )  # fmt: skip
one(
    "product_int8", "MatMulInteger", [("batch", 64, 255)], [np.zeros((255, 510), np.int8)], kinds=[TensorProto.INT8],
    result=[INT32],
)  # fmt: skip
_TWICE = [None, np.array([1, 1, 2, 2], np.float32)]
one("resize_cubic", "Resize", [_X], _TWICE, mode="cubic")
one("resize_volume", "Resize", [("batch", 4, 8, 16, 16)], [None, np.array([1, 1, 2, 2, 2], np.float32)], mode="linear")
one(
    "resize_smooth", "Resize", [_X], [None, np.array([1, 1, 0.5, 0.5], np.float32)], mode="cubic", antialias=1, opset=18
)
one("square_rows", "ReduceSumSquare", [("batch", 60000, 2)], axes=[2])
one(
    "lstm_reverse", "LSTM", [(100, "batch", 80)], [_f(1, 512, 80), _f(1, 512, 128), _f(1, 1024)], outputs=3,
    hidden_size=128, direction="reverse",
)  # fmt: skip
one("conv_after", "Conv", [("batch", 1, 1, 1600)], [_f(160, 1, 1, 475)], strides=[1, 441], pads=[0, 17, 0, 458])


def _dynamic_int8(float_model: str) -> Made:
    def write(path: Path) -> None:
        from onnxruntime.quantization import quantize_dynamic

        quantize_dynamic(str(_written(float_model, path)), str(path))

    return write


def _written(name: str, beside: Path) -> Path:
    """The model of this name in the same folder."""
    source = beside.with_name(f"{name}.onnx")
    if not source.exists():
        MODELS[name](source)
    return source


def _static_int8(path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = [{"x": np.random.default_rng(0).random((2, 3, 64, 64), dtype=np.float32)}]

        def get_next(self) -> Any:
            return self.rest.pop() if self.rest else None

    source = _written("small_net_traced", path)
    quantize_static(str(source), str(path), Images(), quant_format=QuantFormat.QDQ)


def _fused_bert(path: Path, half: bool = False) -> None:
    from onnxruntime.transformers import optimizer

    source = _written("bert_traced", path)
    fused = optimizer.optimize_model(str(source), model_type="bert", num_heads=4, hidden_size=128)
    if half:
        fused.convert_float_to_float16()
    fused.save_model_to_file(str(path))


for _name in ("perceptron", "bert_traced", "llama_past", "small_net_traced", "lstm", "gru"):
    MODELS[f"{_name}_int8"] = _dynamic_int8(_name)
MODELS["small_net_qdq"] = _static_int8
MODELS["bert_fused"] = _fused_bert
MODELS["bert_fused_fp16"] = lambda path: _fused_bert(path, half=True)


def _fp8(path: Path) -> None:
    """A perceptron whose activations and weights are quantized to float8."""
    nodes, weights = [], {"s": np.array(0.05, np.float32)}
    float8 = onnx.numpy_helper.to_array(helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0]))
    weights["z"] = float8
    for layer, (width, columns) in enumerate(((256, 512), (512, 512), (512, 64))):
        given = f"h{layer}"
        weights[f"w{layer}"] = np.zeros((width, columns), np.float32)
        for name in (given, f"w{layer}"):
            nodes += [
                helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{name}q"]),
                helper.make_node("DequantizeLinear", [f"{name}q", "s", "z"], [f"{name}d"]),
            ]
        nodes += [
            helper.make_node("MatMul", [f"{given}d", f"w{layer}d"], [f"m{layer}"]),
            helper.make_node("Relu", [f"m{layer}"], [f"h{layer + 1}"]),
        ]
    written(path, nodes, {"h0": (FLOAT, ("batch", 256))}, {"h3": FLOAT}, weights, (("", 19),))


MODELS["perceptron_fp8"] = _fp8


def _merged(path: Path) -> None:
    """A decoder for the first token and for those after it in one file: an ``If`` over what they share, as exporters
    of merged decoders write it."""
    first, later = (onnx.load(str(_written(name, path))) for name in ("llama", "llama_past"))
    shared: dict[bytes, str] = {}
    kept: list[onnx.TensorProto] = []

    def branch(graph: onnx.GraphProto, prefix: str) -> onnx.GraphProto:
        """Its nodes under names of their own; weights go out into ``kept``, equal ones once."""
        names = {}
        for tensor in graph.initializer:
            content = tensor.SerializeToString().replace(tensor.name.encode(), b"")
            if content not in shared:
                shared[content] = f"{prefix}{tensor.name}"
                kept.append(onnx.TensorProto())
                kept[-1].CopyFrom(tensor)
                kept[-1].name = shared[content]
            names[tensor.name] = shared[content]
        given = {value.name for value in graph.input}
        name_of = lambda name: names.get(name) or (name if name in given or not name else f"{prefix}{name}")  # noqa: E731
        for node in graph.node:
            node.input[:] = [name_of(name) for name in node.input]
            node.output[:] = [name_of(name) for name in node.output]
            node.name = f"{prefix}{node.name}"
        logits = name_of(graph.output[0].name)
        return helper.make_graph(
            graph.node, f"{prefix}branch", [], [helper.make_tensor_value_info(logits, FLOAT, None)]
        )

    inputs = list(later.graph.input)
    branches = {"then_branch": branch(later.graph, "later/"), "else_branch": branch(first.graph, "first/")}
    node = helper.make_node("If", ["use_cache_branch"], ["logits"], **branches)
    graph = helper.make_graph(
        [node], "merged", [*inputs, helper.make_tensor_value_info("use_cache_branch", BOOL, [1])],
        [helper.make_tensor_value_info("logits", FLOAT, None)], kept,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=later.opset_import, ir_version=9), str(path))


MODELS["llama_merged"] = _merged


# --- subgraphs --------------------------------------------------------------------------------------------------------

_ROWS = (256, 300)


def _value(name: str, shape: Sequence[int] | None = _ROWS, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _chain(*steps: tuple[str, str, str]) -> list[onnx.NodeProto]:
    """Nodes from (operator, inputs, output)."""
    to = {"Cast": {"to": TensorProto.FLOAT}}
    return [helper.make_node(kind, given.split(), [made], **to.get(kind, {})) for kind, given, made in steps]


def _loop(
    name: str, *inside: tuple[str, str, str], before: tuple[tuple[str, str, str], ...] = (), runs: int = 1
) -> None:
    """A loop: of one run, as on the stub driver no kernel computes the condition of a second one, or of several, whose
    condition is a constant."""
    collected = ["o"] if any(made == "o" for _, _, made in inside) else []
    body = helper.make_graph(
        [*_chain(("Identity", "c" if runs == 1 else "true", "c2"), *inside)], "body",
        [_value("i", [], TensorProto.INT64), _value("c", [], TensorProto.BOOL), _value("v")],
        [_value("c2", [], TensorProto.BOOL), *map(_value, ("v2", *collected))],
        [] if runs == 1 else [onnx.numpy_helper.from_array(np.array(True), "true")],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["count", "go", "r"], ["l", *collected], body=body)
    constants = {"count": np.array(runs, np.int64), "go": np.array(True), "w": _f(300, 300)}
    last = _chain(("Neg", collected[0] if collected else "l", "y"))
    graph = helper.make_graph(
        [*_chain(("Relu", "x", "r"), *before), loop, *last], "g", [_value("x")], [_value("y", None)],
        [onnx.numpy_helper.from_array(value, key) for key, value in constants.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    MODELS[name] = lambda path: onnx.save(made, path)


_loop("loop_carried", ("MatMul", "v w", "m"), ("Sigmoid", "m", "s"), ("Tanh", "s", "v2"))
_loop("loop_collected", ("Sigmoid", "v", "v2"), ("Tanh", "v2", "o"))
_loop("loop_captured", ("Cast", "n", "f"), ("Div", "v f", "m"), ("Tanh", "m", "v2"), before=(("Size", "r", "n"),))
_loop("loop_counter", ("Cast", "i", "f"), ("Mul", "v f", "m"), ("Tanh", "m", "v2"))
_loop("loop_carried_often", ("MatMul", "v w", "m"), ("Sigmoid", "m", "s"), ("Tanh", "s", "v2"), runs=4)
_loop("loop_collected_often", ("Sigmoid", "v", "v2"), ("Tanh", "v2", "o"), runs=4)
_loop("loop_counter_often", ("Cast", "i", "f"), ("Mul", "v f", "m"), ("Tanh", "m", "v2"), runs=4)


def _scan(name: str, axis: int) -> None:
    row, rows = [5000], [40, 5000] if not axis else [5000, 40]
    body = helper.make_graph(
        _chain(("Add", "s t", "a"), ("Tanh", "a", "s2"), ("Sigmoid", "a", "o")), "body",
        [_value("s", row), _value("t", row)], [_value("s2", row), _value("o", row)],
    )  # fmt: skip
    axes = {"num_scan_inputs": 1, "scan_input_axes": [axis], "scan_output_axes": [axis]}
    scan = helper.make_node("Scan", ["q", "r"], ["e", "k"], body=body, **axes)
    graph = helper.make_graph(
        [*_chain(("Relu", "x", "r"), ("Relu", "s0", "q")), scan, *_chain(("Neg", "k", "y"))], "g",
        [_value("x", rows), _value("s0", row)], [_value("y", None), _value("e", row)],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    MODELS[name] = lambda path: onnx.save(made, path)


_scan("scan_rows", 0)
_scan("scan_columns", 1)


def main(folder: str, *names: str) -> None:
    warnings.filterwarnings("ignore")
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name, write in MODELS.items():
        target = place / f"{name}.onnx"
        if (names and name not in names) or target.exists():
            continue
        try:
            write(target)
        except Exception as error:  # whatever an exporter raises: the others are still wanted
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr, flush=True)
        else:
            print(name, target.stat().st_size, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
