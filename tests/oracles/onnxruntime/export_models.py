"""Export ten usual architectures with small random weights and a dynamic batch.

    python -m tests.oracles.onnxruntime.export_models DIRECTORY [NAME ...]

Sizes are far below the published ones: what is recorded is how ONNX Runtime plans their graphs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]


class Picked(nn.Module):
    """A Hugging Face model that takes positional tensors, named ``inputs``, and returns tensors only."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...], inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.outputs, self.inputs = model, outputs, inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(getattr(output, name) for name in self.outputs)


class WithPast(nn.Module):
    """One decoding step of GPT-2: keys and values come in and go out as plain tensors."""

    def __init__(self, model: nn.Module, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, input_ids: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self.layers):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        output = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        kept = [t for layer in output.past_key_values.layers for t in (layer.keys, layer.values)]
        return output.logits, torch.stack(kept)


def _ids(length: int, words: int = 500) -> torch.Tensor:
    return torch.randint(0, words, (2, length))


def bert() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    inputs = {"input_ids": _ids(32), "attention_mask": torch.ones(2, 32, dtype=torch.long)}
    return Picked(t.BertModel(config), ("last_hidden_state", "pooler_output"), tuple(inputs)), inputs


def gpt2() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    past = torch.randn(4, 2, 4, 16, 16)  # layer and kind, batch, heads, length, size
    return WithPast(t.GPT2LMHeadModel(config), 2), {"input_ids": _ids(1), "past": past}


def vit() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=64, patch_size=16
    )
    return Picked(t.ViTForImageClassification(config), ("logits",), ("pixel_values",)), {
        "pixel_values": torch.randn(2, 3, 64, 64)
    }


def whisper() -> tuple[nn.Module, Inputs]:
    import transformers as t
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = t.WhisperConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, max_source_positions=100,
        num_mel_bins=20,
    )  # fmt: skip
    return Picked(WhisperEncoder(config), ("last_hidden_state",), ("input_features",)), {
        "input_features": torch.randn(2, 20, 200)
    }


def clip() -> tuple[nn.Module, Inputs]:
    import transformers as t

    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text, vision = {**common, "vocab_size": 500}, {**common, "image_size": 64, "patch_size": 16}
    config = t.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    inputs = {
        "input_ids": _ids(16), "pixel_values": torch.randn(2, 3, 64, 64),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
    }  # fmt: skip
    return Picked(t.CLIPModel(config), ("logits_per_image", "text_embeds", "image_embeds"), tuple(inputs)), inputs


def segformer() -> tuple[nn.Module, Inputs]:
    import transformers as t

    config = t.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=32, num_attention_heads=[1, 2, 2, 4],
        num_labels=10,
    )  # fmt: skip
    return Picked(t.SegformerForSemanticSegmentation(config), ("logits",), ("pixel_values",)), {
        "pixel_values": torch.randn(2, 3, 64, 64)
    }


def _timm(name: str, **options: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    def build() -> tuple[nn.Module, Inputs]:
        from models_zoo.libraries import make_torchvision_importable

        make_torchvision_importable()
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options), {"x": torch.randn(2, 3, 64, 64)}

    return build


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "bert": bert,
    "gpt2_past": gpt2,
    "vit": vit,
    "whisper_encoder": whisper,
    "clip": clip,
    "segformer": segformer,
    "timm_resnet18": _timm("resnet18"),
    "timm_convnext_atto": _timm("convnext_atto"),
    "timm_efficientnet_b0": _timm("efficientnet_b0"),
    "timm_mobilenetv3_small": _timm("mobilenetv3_small_100"),
}


def export(name: str, directory: Path) -> Path:
    """Write ``name`` as ONNX with its weights inside. A dimension is dynamic where it is the batch."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    batch = torch.export.Dim("batch", min=1, max=256)
    shapes = tuple({1 if key == "past" else 0: batch} for key in inputs)
    path = directory / f"{name}.onnx"
    torch.onnx.export(
        model.eval(), tuple(inputs.values()), path, input_names=list(inputs),
        dynamic_shapes=(shapes,) if isinstance(model, Picked) else shapes,
        opset_version=18, dynamo=True, external_data=False, verbose=False,
    )  # fmt: skip
    return path


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        try:
            path = export(name, directory)
            print(name, path.stat().st_size, flush=True)
        except Exception:
            print(name, "failed:", traceback.format_exc().splitlines()[-1][:300], flush=True)


if __name__ == "__main__":
    main()
