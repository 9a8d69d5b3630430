"""``hf:<config.json or folder>``, ``hf:<model type>``, ``hf:<org/model>`` (cached, or of the table): no weights."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from graphmem.base.documents import shown
from graphmem.base.imports import watched_imports
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import SourceError, first_line
from graphmem.sources import hub
from graphmem.sources.base import Built, Sizes, TorchModel, refuse_seq_len
from graphmem.sources.checkpoints import checkpoint_in
from graphmem.sources.configurations import generation_values, values_of
from graphmem.training import DTYPES
from graphmem.training.generation import Generation

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

#: Auto classes in the order they are tried when a configuration names no architecture: (name, task). Encoders have a
#: causal head too, and encoder-decoders all three, so the more particular task comes first.
_HEADS = (
    ("AutoModelForSpeechSeq2Seq", "speech"),
    ("AutoModelForSeq2SeqLM", "seq2seq"),
    ("AutoModelForMaskedLM", "masked"),
    ("AutoModelForCausalLM", "causal"),
    ("AutoModelForCTC", "ctc"),
    ("AutoModelForImageClassification", "image"),
    ("AutoModelForSemanticSegmentation", "image"),
    ("AutoModelForObjectDetection", "image"),
    ("AutoModelForAudioClassification", "audio"),
    ("AutoModel", "base"),
)

#: Longest default sequence; longer contexts have to be asked for with --seq-len.
DEFAULT_SEQ_LEN = 2048
_FALLBACK_SEQ_LEN = 512


def load_huggingface(name: str) -> TorchModel:
    """A transformers model by configuration file, folder with ``config.json``, model type with its defaults, or the
    name of a Hub model whose configuration is in the local cache or in the table of public models.

    Never touches the network. Raises :class:`SourceError` for a missing or unreadable configuration, an unknown model
    type, or a model family that has no class to build.
    """
    try:
        with reading_once():
            import transformers
    except Exception as error:
        raise SourceError(
            f"hf:{name} needs transformers; install it with: pip install 'graphmem[hf]' ({error})"
        ) from None
    with offline():
        return _load(transformers, name)


def reading_once() -> contextlib.AbstractContextManager[None]:
    """In which transformers is imported quickly."""
    return watched_imports({"transformers.utils.import_utils": _reading_once})


def _reading_once(module: ModuleType, run: Callable[[], None]) -> None:
    """While transformers is imported it reads the folders of all its models twice, as it remembers the last 128 of over
    400: here it remembers all. And it looks for the last ``__all__`` of each file in its lines, one by one."""
    run()
    name = "create_import_structure_from_path"
    read = getattr(getattr(module, name, None), "__wrapped__", None)
    if read is not None:
        setattr(module, name, cache(read))
    names = getattr(module, "fetch__all__", None)
    if names is not None:
        module.fetch__all__ = lambda text: names(text[text.rfind("\n__all__") + 1 :])  # type: ignore[attr-defined]


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """The Hub cannot be reached, from this thread. ``HF_HUB_OFFLINE`` would be read once, and hold for the process."""
    from huggingface_hub import constants

    from graphmem.capture.patches import Patches

    patches = Patches()
    try:
        if hasattr(constants, "is_offline_mode"):
            patches.set(constants, "is_offline_mode", lambda: True)
        else:  # before 1.0 there was only the flag
            patches.set(constants, "HF_HUB_OFFLINE", True)
        yield
    finally:
        patches.undo()


def _load(transformers: ModuleType, name: str) -> TorchModel:
    """The model of a name on the hub or of a folder, to be built later. A torchvision that does not import is taken to
    be absent. Raises :class:`SourceError`."""
    notes: tuple[str, ...] = ()
    path = _path(transformers, name)
    try:
        config, origin = _configuration(transformers, name, path)
        architecture = _architecture(transformers, config)
    except (ImportError, RuntimeError) as error:
        if not without_broken_torchvision():
            raise SourceError(f"hf:{name}: transformers cannot import its model class: {_root_cause(error)}") from None
        notes = ("torchvision is installed, but does not import beside this PyTorch: taken to be absent",)
        config, origin = _configuration(transformers, name, path)
        try:
            architecture = _architecture(transformers, config)
        except (ImportError, RuntimeError) as second:
            raise SourceError(
                f"hf:{name} needs torchvision, which does not import beside this PyTorch; install the torchvision made "
                f"for torch {_torch_version()} ({_root_cause(second)})"
            ) from None
    notes += (f"the model is that of transformers {transformers.__version__}", *origin, *_dtype_notes(config))
    notes += _checkpoint_notes(path)
    return TorchModel(
        f"hf:{name} ({architecture.__name__})",
        lambda sizes: _build(architecture, config, sizes, path),
        notes=notes,
        quantizes=True,
        masks=True,
        layers=_layers(config),
    )


def without_broken_torchvision() -> bool:
    """Whether torchvision is installed and does not import; from then on Python and transformers find none.

    That happens where PyTorch was installed for the CPU and torchvision for CUDA, or for another PyTorch: the operators
    of torchvision's library are not there.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return False
    except Exception:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        import_utils = importlib.import_module("transformers.utils.import_utils")
        for function in list(vars(import_utils).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()
        return True
    return False


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _path(transformers: ModuleType, name: str) -> Path | None:
    """The configuration's file; None for a model type, and for a model of the table."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json"
    if path.suffix == ".json" or path.exists():
        return path
    return None if name in transformers.CONFIG_MAPPING else hub.cached_configuration(name)


def _configuration(transformers: ModuleType, name: str, path: Path | None) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """The configuration that ``name`` means, in the file ``path`` if it has one, and a note of where it
    is from."""
    if path is not None:
        shadowed = path.parent == Path(name) and (name in transformers.CONFIG_MAPPING or hub.known_model(name))
        note = f"{name} is the folder of that name here, not transformers' model type or the public model"
        return configured(transformers, values_of(path), path), (note,) if shadowed else ()
    if name in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[name](), ()
    known = hub.known_model(name)
    if known is not None:
        note = f"its configuration is that of {known} in graphmem's table of public models"
        return configured(transformers, dict(hub.known_models()[known]), known), (note,)
    close = hub.close_names(name, transformers.CONFIG_MAPPING)
    hint = f"did you mean {' or '.join(close)}? Else " if close else ""
    raise SourceError(
        f"hf:{name} is neither a file, a model type of transformers, in this machine's Hugging Face cache nor in "
        f"graphmem's table, and graphmem uses no network; {hint}save its config.json and give hf:config.json"
    )


def configured(transformers: ModuleType, values: dict[str, object], path: Path | str) -> PreTrainedConfig:
    """transformers' configuration of these values; ``path`` names them in messages. Raises :class:`SourceError`."""
    kind = values["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise SourceError(f"{path} names the model type {shown(kind)}, which this transformers does not know")
    _check_values(values, path)
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(values)
    except (ImportError, RuntimeError):  # a broken installation, perhaps of torchvision: the caller finds out
        raise
    except Exception as error:
        raise SourceError(f"{path} is not a valid {kind} configuration: {first_line(error)}") from None


#: Names of counts of parts that are built one by one, and the most of them that a model may have.
_COUNTED = re.compile(r"(?:num|n)_(?:.*_)?(?:layers?|labels|experts|blocks?|stages)|.*(?:_layers|depths?)")
_MOST_PARTS = 1 << 16
_MOST_LAYERS = 1 << 12


def _check_values(values: object, path: Path | str, name: str = "") -> None:
    """Raises :class:`SourceError` for what would be analysed as something else, built for ever, or run as code."""
    if isinstance(values, dict):
        _check_keys(values, path)
        for key, value in values.items():
            _check_values(value, path, key)
    elif isinstance(values, list):
        for value in values:
            _check_values(value, path, name)
    elif type(values) is int and _COUNTED.fullmatch(name):
        most = _MOST_LAYERS if "layer" in name or "depth" in name else _MOST_PARTS
        if not 0 <= values <= most:
            raise SourceError(f"{path}: {name} is {shown(values)}; accepted: 0 to {most}")
    elif type(values) is int and abs(values) >= 1 << 63:
        raise SourceError(f"{path}: {name} is {shown(values)}")


def _check_keys(values: dict[str, object], path: Path | str) -> None:
    quantized = values.get("quantization_config")
    if quantized and not _is_of_bitsandbytes(quantized):
        method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
        raise SourceError(
            f"{path} is the configuration of a quantised model ({shown(method or quantized)}), whose packed weights "
            "and kernels are not modelled; remove quantization_config to analyse the model without it"
        )
    for key, chosen in values.items():
        if key.endswith("_implementation") and isinstance(chosen, (str, dict)) and "/" in str(chosen):
            raise SourceError(f"{path}: {key} is {shown(str(chosen))}: kernels of the Hub are code, and are not loaded")
    named = values.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise SourceError(f"{path}: architectures is no list of names of classes")


def _is_of_bitsandbytes(quantized: object) -> bool:
    """Whether ``quantization_config`` is one of :class:`transformers.BitsAndBytesConfig`."""
    if not isinstance(quantized, dict):
        return False
    named = quantized.get("quant_method") in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", None)
    return named and bool(quantized.get("load_in_4bit")) != bool(quantized.get("load_in_8bit"))


def _checkpoint_notes(path: Path | None) -> tuple[str, ...]:
    """A note of the tensors of the checkpoint beside a configuration, whose types the step may not have."""
    if path is None or path.name != "config.json":
        return ()
    try:
        found = checkpoint_in(path.parent)
    except SourceError as error:
        return (f"its checkpoint is not read: {error}",)
    if found is None:
        return ()
    types = f": {found.describe()}" if found.types else ", as its index says"
    return (f"its checkpoint has {len(found.tensors):,} tensors of {found.bytes / 1e9:,.2f} GB{types}",)


def _dtype_notes(config: PreTrainedConfig) -> tuple[str, ...]:
    """A note of the precision that a configuration names: its checkpoint's."""
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    if dtype in ("None", "float32"):
        return ()
    return (f"the configuration's dtype {dtype} is its checkpoint's; --dtype says which to analyse (default fp32)",)


def _architecture(transformers: ModuleType, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class the configuration names, or the first auto class that has one for it."""
    for named in config.architectures or ():
        found = getattr(transformers, named, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for head, _ in _HEADS if not _is_two_towered(config) else _HEADS[-1:]:
        mapping = getattr(transformers, head, None)
        if mapping is not None and type(config) in mapping._model_mapping:
            named = mapping._model_mapping[type(config)]
            chosen: type[PreTrainedModel] = named[0] if isinstance(named, tuple) else named
            return chosen
    raise SourceError(f"transformers has no model class for the configuration {type(config).__name__}")


def _is_two_towered(config: PreTrainedConfig) -> bool:
    """CLIP and its kin, whose own task is contrastive: the base model with its loss."""
    return hasattr(config, "text_config") and hasattr(config, "vision_config") and hasattr(config, "projection_dim")


def _root_cause(error: BaseException) -> str:
    """The first line of the error that began it: transformers wraps what a broken installation raised."""
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return first_line(error)


def _task(architecture: type[PreTrainedModel]) -> str:
    import transformers

    name = architecture.__name__
    for head, task in _HEADS:
        mapping = getattr(transformers, head, None)
        names = mapping._model_mapping._model_mapping.values() if mapping is not None else ()  # no class is imported
        if any(name in (known if isinstance(known, (list, tuple)) else (known,)) for known in names):
            return task
    for ending, task in (("ForSequenceClassification", "label"), ("ForTokenClassification", "tokens")):
        if name.endswith(ending):
            return task
    return "base"


def _build(architecture: type[PreTrainedModel], config: PreTrainedConfig, sizes: Sizes, path: Path | None) -> Built:
    task = _task(architecture)
    started = task in ("seq2seq", "speech") and getattr(config, "decoder_start_token_id", None) is None
    if started:  # a model type's default configuration leaves out what its checkpoints fill in
        config.decoder_start_token_id = config.pad_token_id = 0
    if sizes.layers is not None:
        config = _with_layers(config, sizes.layers)
    with offline():
        quantization = _quantization(config, sizes)
        model = architecture(config) if quantization is None else _quantized(architecture, config, quantization, sizes)
    of_generation: list[str] = []
    draft = None
    if sizes.generate is not None:
        _check_generates(model)
        _check_cache(sizes.generate)
        of_generation = _generation_beside(model, path)
        draft = _draft(model, sizes)
    inputs, notes = _inputs(model, task, sizes)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # as transformers takes it, which would warn of it
    remarks = () if sizes.generate is not None else _beyond_table(model, inputs)
    said = (*notes, *of_generation)
    return Built(model, inputs, None, said, lambda other: _inputs(model, task, other)[0], draft, tuple(remarks))


def _layers(config: PreTrainedConfig) -> int | None:
    """How many layers a model of one kind of them has; None of others."""
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is not int or config.sub_configs or getattr(config, "num_decoder_layers", None) is not None:
        return None
    by_layer = [one for one in vars(config).values() if isinstance(one, list) and len(one) == layers]
    return layers if all(one.count(one[0]) == layers for one in by_layer) else None


def _with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The configuration with so many layers."""
    chosen, had = copy.deepcopy(config), _layers(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == had:
            setattr(chosen, name, value[:1] * layers)
    chosen.num_hidden_layers = layers
    return chosen


def _draft(model: PreTrainedModel, sizes: Sizes) -> PreTrainedModel | None:
    """The model that drafts tokens, None for none. Raises :class:`SourceError` where it cannot for ``model``."""
    import transformers

    assert sizes.generate is not None
    if sizes.generate.is_assisted:
        _check_assisted(sizes)
    name = sizes.generate.assistant_model
    if name is None:
        return None
    path = _path(transformers, name.removeprefix("hf:"))
    with offline():
        config, _ = _configuration(transformers, name.removeprefix("hf:"), path)
        draft = _architecture(transformers, config)(config)
    _check_generates(draft)
    own, other = (one.config.get_text_config().vocab_size for one in (model, draft))
    if own != other:
        raise SourceError(
            f"{name} has a vocabulary of {other:,} tokens, the model one of {own:,}: transformers then translates with "
            "both tokenizers, which a program passes to generate; analyse it with graphmem run"
        )
    _generation_beside(draft, path)
    return draft


def _check_assisted(sizes: Sizes) -> None:
    """Raises :class:`SourceError` for options that transformers refuses beside drafted tokens
    (``_assisted_decoding``)."""
    assert sizes.generate is not None
    if (sizes.batch or 1) > 1:
        raise SourceError(f"assisted decoding is for one text, and the batch has {sizes.batch}; leave out --batch")
    kind = sizes.generate.cache_implementation
    if kind not in (None, "dynamic", "offloaded"):
        raise SourceError(f"assisted decoding takes tokens back, which a {kind} cache cannot; leave it out")
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(sizes.generate, name) or 1) > 1:
            raise SourceError(f"assisted decoding makes one text; leave out --{name.replace('_', '-')}")


def _generation_beside(model: PreTrainedModel, path: Path | None) -> list[str]:
    """Give the model the ``generation_config.json`` beside its configuration, as ``from_pretrained`` does; a note of
    it. Raises :class:`SourceError`."""
    file = None if path is None else path.with_name("generation_config.json")
    if file is None or not file.exists():
        return []
    import transformers

    values = generation_values(file)
    try:
        model.generation_config = transformers.GenerationConfig.from_dict(values)
    except Exception as error:
        raise SourceError(f"{file} is no configuration of a generation: {first_line(error)}") from None
    given = ", ".join(f"{name}={values[name]}" for name in sorted(values) if name in _DECIDING)
    return [f"generation_config.json beside it is followed{': ' if given else ''}{given}"]


#: The fields of a generation's configuration that decide memory, for the note.
_DECIDING = (
    "do_sample", "num_beams", "num_return_sequences", "cache_implementation", "prefill_chunk_size", "use_cache",
    "top_k", "top_p", "guidance_scale", "output_scores", "penalty_alpha",
)  # fmt: skip


def _check_cache(generation: Generation) -> None:
    """Raises :class:`SourceError` where the package of a quantised cache is missing."""
    if generation.cache_implementation != "quantized" or dict(generation.cache_config).get("backend") == "hqq":
        return
    if importlib.util.find_spec("optimum") is None or importlib.util.find_spec("optimum.quanto") is None:
        raise SourceError("a quantised cache is optimum-quanto's own code; install it: pip install optimum-quanto")


def _check_generates(model: PreTrainedModel) -> None:
    """Raises :class:`SourceError` for a model that does not generate."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise SourceError(f"{type(model).__name__} does not generate; give the configuration of a model that does")


def _quantization(config: PreTrainedConfig, sizes: Sizes) -> BitsAndBytesConfig | None:
    """The ``BitsAndBytesConfig`` that was asked for, or is the configuration's own; None for plain weights.

    Raises :class:`SourceError` for two of them, for training, and where a package is missing.
    """
    own = getattr(config, "quantization_config", None)
    if own is None and sizes.weights is None:
        return None
    if own is not None and sizes.weights is not None:
        raise SourceError("the configuration has a quantization_config of its own; leave out --weights, or remove it")
    if sizes.training:
        raise SourceError(
            "the configuration is of a quantised model, whose weights are not trained: give --inference; a program "
            "that trains adapters on it (QLoRA) is analysed by graphmem run"
        )
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise SourceError(f"quantised weights are {package}'s own layers; install it: pip install {package}")
    import torch
    import transformers

    if own is not None:
        return transformers.BitsAndBytesConfig.from_dict(own if isinstance(own, dict) else own.to_dict())
    if sizes.weights == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    compute = getattr(torch, DTYPES[sizes.dtype][0])
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=sizes.weights, bnb_4bit_compute_dtype=compute
    )


def _quantized(
    architecture: type[PreTrainedModel], config: PreTrainedConfig, quantization: BitsAndBytesConfig, sizes: Sizes
) -> PreTrainedModel:
    """The model as ``from_pretrained(quantization_config=..., device_map={"": 0})`` leaves it: transformers' own code,
    with the parameters of an unquantised twin in place of a checkpoint."""
    import copy

    import torch

    from graphmem.capture.program.missing_weights import checkpoint_of

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = getattr(torch, DTYPES[sizes.dtype][0])
    weights = checkpoint_of(architecture(config).to(dtype))
    try:
        return architecture.from_pretrained(
            None, config=config, state_dict=weights, quantization_config=quantization, dtype=dtype, device_map={"": 0}
        )
    except ImportError as error:
        raise SourceError(f"quantised weights: {first_line(error)}") from None


def _inputs(model: PreTrainedModel, task: str, sizes: Sizes) -> tuple[dict[str, Tensor | bool], list[str]]:
    """The inputs of one batch, by the kind of model, with targets for training; and notes on assumed sizes."""
    import torch

    batch = sizes.batch or 1
    notes = [] if sizes.batch else ["batch 1 (give --batch)"]
    main = getattr(model, "main_input_name", "input_ids")
    config = model.config
    inputs: dict[str, Tensor | bool] = {}
    length = 0
    if main == "pixel_values" or _is_two_towered(config):
        if not _is_two_towered(config):
            refuse_seq_len(sizes, type(model).__name__)
        shape = _image_shape(config)
        inputs["pixel_values"] = torch.empty((batch, *shape))
        notes.append("images of " + "x".join(map(str, shape)))
        if _is_two_towered(config):
            length = _sequence_length(config.text_config, sizes, notes)
            inputs = {"input_ids": torch.zeros((batch, length), dtype=torch.long), **inputs}
            if sizes.training:
                inputs["return_loss"] = True
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        frames = sizes.seq_len or 2 * getattr(config, "max_source_positions", 1500)
        inputs[main] = torch.empty((batch, bins, frames))
        notes.append(f"{frames} frames of {bins} mel bins")
    elif main == "input_values":
        samples = sizes.seq_len or 16000 * 10
        inputs[main] = torch.empty((batch, samples))
        notes.append(f"{samples} audio samples")
    else:
        length = _sequence_length(config, sizes, notes)
        inputs["input_ids"] = torch.zeros((batch, length), dtype=torch.long)
    masked = sizes.attention_mask
    if sizes.generate is not None:
        if "input_ids" in inputs:  # as a tokenizer returns it, and as generate warns where it is not given
            masked = masked or "ones"
            _check_positions(model, length, sizes.generate, notes)
    else:
        _add_targets(inputs, model, task, batch, length, sizes, notes)
    if masked is not None:
        side = "right" if sizes.generate is None else "left"
        inputs["attention_mask"] = _attention_mask(model, inputs, masked, side)
    return inputs, notes


#: How transformers' models name tables of positions.
_TABLES = re.compile(r"(.*\.)?(wpe|embed_positions|positions?_embed(ding)?s?|positional_embedding)")


def _check_positions(model: PreTrainedModel, prompt: int, generation: Generation, notes: list[str]) -> None:
    """A card looks a position up in a table, where the model has one: raises :class:`SourceError` where it ends before
    the last token that is read. Other positions are computed, and are noted beyond those of the configuration."""
    longest = _longest(model.config.get_text_config(decoder=True))
    read = generation.max_new_tokens if model.config.is_encoder_decoder else prompt + generation.max_new_tokens - 1
    if longest is None or read <= longest:
        return
    words = f"{prompt} tokens of the prompt and {generation.max_new_tokens} generated"
    if _has_table(model):
        raise SourceError(
            f"{type(model).__name__}: {words} need {read} positions, and the model's table has {longest}; give less "
            "with --seq-len or --generate"
        )
    notes.append(f"{words} are more than the {longest} positions of the configuration")


def _has_table(model: PreTrainedModel) -> bool:
    """True for a model that looks its positions up, and computes none."""
    import torch

    lookups = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))
    return any(_TABLES.fullmatch(name) for name in lookups)


def _beyond_table(model: PreTrainedModel, inputs: dict[str, Tensor | bool]) -> Iterator[Diagnostic]:
    """That a card fails where sequences are longer than the model's table of positions."""
    ids, longest = inputs.get("input_ids"), _longest(model.config.get_text_config(decoder=True))
    if (
        ids is not None
        and not isinstance(ids, bool)
        and longest is not None
        and ids.shape[-1] > longest
        and _has_table(model)
    ):
        yield Code.STEP_FAILS.about(tokens=ids.shape[-1], positions=longest)


def _attention_mask(model: PreTrainedModel, inputs: dict[str, Tensor | bool], which: str, side: str) -> Tensor:
    """The mask that a tokenizer returns beside ``input_ids``: ones, and a zero where a shorter text was padded, here in
    the last row, on the ``right`` or, as before a generation, on the ``left``. Raises :class:`SourceError` for a model
    that takes none."""
    import torch

    if "input_ids" not in inputs or "attention_mask" not in inspect.signature(model.forward).parameters:
        raise SourceError(f"{type(model).__name__} takes no attention_mask beside tokens; leave it out")
    mask = torch.ones_like(inputs["input_ids"])
    if which == "padded":
        mask[-1, -1 if side == "right" else 0] = 0
    return mask


def _add_targets(
    inputs: dict[str, Tensor | bool],
    model: PreTrainedModel,
    task: str,
    batch: int,
    length: int,
    sizes: Sizes,
    notes: list[str],
) -> None:
    import torch

    if task in ("causal", "masked", "seq2seq", "tokens") and "input_ids" in inputs:
        if sizes.training:
            own = task == "seq2seq"
            inputs["labels"] = torch.zeros((batch, length), dtype=torch.long) if own else inputs["input_ids"]
            notes.append("labels of the same length, all counted in the loss")
        elif task == "seq2seq":
            inputs["decoder_input_ids"] = torch.zeros((batch, length), dtype=torch.long)
    elif task == "speech":
        target = min(448, getattr(model.config, "max_target_positions", 448))
        name = "labels" if sizes.training else "decoder_input_ids"
        inputs[name] = torch.zeros((batch, target), dtype=torch.long)
        notes.append(f"{target} target tokens")
    elif task in ("image", "label", "audio") and sizes.training and "Classification" in type(model).__name__:
        inputs["labels"] = torch.zeros(batch, dtype=torch.long)
        notes.append("class labels")


def _sequence_length(config: PreTrainedConfig, sizes: Sizes, notes: list[str]) -> int:
    longest, asked = _longest(config), sizes.seq_len
    if asked is not None:
        if longest is not None and asked > longest and sizes.generate is None:
            notes.append(f"sequence length {asked} is longer than the {longest} positions of the configuration")
        return asked
    if longest is not None and sizes.generate is not None and not getattr(config, "is_encoder_decoder", False):
        longest = max(1, longest - sizes.generate.max_new_tokens)
    length = _FALLBACK_SEQ_LEN if longest is None else min(longest, DEFAULT_SEQ_LEN)
    notes.append(f"sequence length {length} (give --seq-len)")
    return length


def _longest(config: PreTrainedConfig) -> int | None:
    """The positions that the configuration provides for, None where it does not say."""
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"):
        longest = getattr(config, name, None)
        if isinstance(longest, int) and longest > 0:
            # RoBERTa and OPT style tables hold two or more positions that are never used.
            unused = getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") and longest % 2 == 0
            return longest - 2 if unused else longest
    return None


def _image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(vision, "num_channels", 3), height, width
