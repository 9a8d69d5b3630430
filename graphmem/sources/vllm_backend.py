"""transformers' model as vLLM's own backend for such models makes it and runs it, from a capture.

Followed from vllm 0.32.0, ``model_executor/models/transformers`` (``base.py``, ``causal.py``, ``fusers``): the model is
made on the meta device, its layers are replaced by the engine's own, and what is left of its code runs as it is. So
that code is run here (:mod:`graphmem.sources.vllm_capture`) on fake tensors, with modules in place of the engine's that
only return what those return; what the engine's own layers allocate beside it is theirs to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphmem.base.documents import shown
from graphmem.errors import CaptureError, SourceError, UsageError, first_line
from graphmem.sources.vllm_layers import Backend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: What the engine reads of a configuration, by the names that transformers' classes have for it.
_READ = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "intermediate_size", "tie_word_embeddings", "sliding_window", "layer_types",
    "final_logit_softcapping", "use_sliding_window", "attention_chunk_size",
    "rope_parameters", "mamba_ssm_cache_dtype",
)  # fmt: skip


def values_of_class(values: dict[str, object], name: str) -> dict[str, object]:
    """The configuration with its class's defaults, and by the names that most have. Raises :class:`SourceError`."""
    _, config = _configured(values, name)
    config.allow_global_per_layer_attribute_access = True  # what layers differ in, as config.json has it
    found = {key: getattr(config, key, None) for key in _READ if _is_kept(type(config), key)}
    return {**values, **{key: value for key, value in found.items() if value is not None}}


def _is_kept(kind: type[PreTrainedConfig], key: str) -> bool:
    """True if the class keeps such a value; False if it makes it from others and takes none."""
    made = getattr(kind, kind.attribute_map.get(key, key), None)
    return not isinstance(made, property) or made.fset is not None


def _configured(values: dict[str, object], name: str) -> tuple[str, PreTrainedConfig]:
    """(transformers' version, its configuration without how weights are quantised)."""
    try:
        import transformers
    except Exception as error:
        raise SourceError(
            f"{name}: model_type {shown(values.get('model_type'))} is captured with transformers' own code; install it "
            f"with: pip install 'graphmem[hf]' ({first_line(error)})"
        ) from None
    from graphmem.sources.huggingface import configured, offline

    plain = {key: one for key, one in values.items() if key != "quantization_config"}
    with offline():
        return transformers.__version__, configured(transformers, plain, name)


def followed(
    values: dict[str, Any], name: str, dtype: str, tp: int, *, own_code: bool = False, latent: bool = False
) -> Backend:
    """The backend on one of ``tp`` ranks; ``own_code``: fused as the engine's own models are; ``latent``: attention
    with latent keys is the engine's.

    Raises :class:`SourceError` for a configuration that transformers does not know, :class:`UsageError` for a model
    that the backend does not run or that is not followed.
    """
    from graphmem.base.versions import installed_version
    from graphmem.capture.session.run import Subject, capture_subject
    from graphmem.devices import device_named
    from graphmem.sources.base import Sizes
    from graphmem.sources.huggingface import offline
    from graphmem.training import Inference

    version, config = _configured(values, name)
    torch_version = installed_version()
    if torch_version is None:
        raise SourceError(f"{name}: a capture runs PyTorch; install it with: pip install 'graphmem[hf]'")
    from graphmem.sources.vllm_capture import Making

    making = Making(config, name, dtype, tp, own_code=own_code, latent=latent)
    try:
        with offline():
            captured = capture_subject(
                Subject(making.run, Sizes(), Inference(), name, iterations=1),
                device=device_named("H100"),
                torch_version=torch_version,
            )
    except CaptureError as error:
        raise UsageError(
            f"{name}: {config.model_type} does not run with the engine's layers in place of its own, which is what is "
            f"captured here ({first_line(error)})"
        ) from error
    return making.read(captured.trace, version)
