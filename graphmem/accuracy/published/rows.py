"""Published figures as cases: from a folder of tables or of programs (``cases.json``,
:mod:`graphmem.accuracy.published.scripts`), or the programs of graphmem's source and the cited rows of one source.

A table is a CSV with the columns ``source, model, framework_version, gpu, batch, input_shape_or_seq, optimizer,
precision, extras, metric, value_mib, path``. What a row leaves open is filled in here by what its source does by
default; a row that leaves too much open is skipped, and counted with the reason.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from graphmem.accuracy.published.case import ModelSpec, OwnLoop, PublishedCase, Skipped
from graphmem.accuracy.published.models import configurations
from graphmem.accuracy.published.scripts import cited_scripts
from graphmem.errors import SourceError
from graphmem.training import Training
from graphmem.units import MIB

Row = Mapping[str, str]
Found = PublishedCase | Skipped

#: Oldest PyTorch that graphmem predicts; what was measured with an older one, or an unknown one, is predicted as this.
OLDEST_TORCH = "2.4"

_XMEM_NAMES = {
    "ConvNeXtTiny": "convnext_tiny", "ConvNeXtBase": "convnext_base", "ResNet101": "resnet101",
    "ResNet152": "resnet152", "VGG16": "vgg16", "VGG19": "vgg19", "MobileNetV2": "mobilenet_v2",
    "RegNetX400MF": "regnet_x_400mf", "RegNetY400MF": "regnet_y_400mf", "MobeNetV3Small": "mobilenet_v3_small",
    "MobeNetV3Large": "mobilenet_v3_large", "MnasNet": "mnasnet1_0",
}  # fmt: skip
#: What xMem's process takes beside its allocator after the first sample. Each run is repeated in the same process under
#: a cap of the estimate, where kernels and libraries are there already; of runs that the cap does not bind the repeated
#: figure (``2nd verification`` of ``solution``) is less by this: T5-small b10, GPT-Neo b13, DistilGPT-2 b28 and b37,
#: GPT-2 b27 and OPT-350M b13 by 18 MiB each, MobileNetV3-small b258, b378 and b638 and MobileNetV2 b638 by 26. A repeat
#: in a new process (``DNNmem``: T5-small b10, OPT-350M b13, MobileNetV3-small b258) has the first figure to the MiB.
_XMEM_GROWTH = {"transformers": 18 * MIB, "torchvision": 26 * MIB}
#: SchedTune names its cards by their CUDA cores.
_SCHEDTUNE_CARDS = {"2560": "T4-16GB", "5120": "V100-16GB", "10496": "RTX-3090"}


def published_rows(folder: Path | None) -> list[Found]:
    """The cases of every table and program in ``folder``, or those that come with graphmem. Raises
    :class:`SourceError`."""
    if folder is None:
        return [*cited_scripts(), *(found for row in cited_rows() for found in _xmem(row))]
    paths = [folder / f"{name}.csv" for name in _READERS if (folder / f"{name}.csv").exists()]
    scripts = cited_scripts(folder) if (folder / "cases.json").exists() else []
    if not paths and not scripts:
        raise SourceError(f"{folder} holds none of {', '.join(f'{name}.csv' for name in _READERS)}, cases.json")
    return [*scripts, *(found for path in paths for row in _rows(path) for found in _READERS[path.stem](row))]


def cited_rows() -> Sequence[Row]:
    """The rows of the table that comes with graphmem."""
    table = json.loads(files("graphmem.accuracy.published").joinpath("cited.json").read_text(encoding="utf-8"))["runs"]
    return [dict(zip(table["columns"], row, strict=True)) | table["common"] for row in table["rows"]]


def _rows(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is not a table of published figures: {error}") from None


# --- the sources ------------------------------------------------------------------------------------------------------


def _xmem(row: Row) -> Iterator[Found]:
    """torch 2.6, fp32, ``zero_grad`` before each iteration, the output in a variable; 4 iterations of CNNs
    and 3 of language models.

    The measure is NVML's used memory less its first sample, which is taken when the training loop begins: the context
    is there by then and falls out, so that what is left is the reserved level (``evaluation_result.json`` and the
    plugin that takes the samples, Stone-ResearchLife/xMem). The plugin's thread starts just before the model is moved
    to the card. The loop of language models waits two seconds in between; that of images does not
    (``exp/trainer/train_loop.py``), and its first sample sees the model there. Its runs under a cap show it:
    ConvNeXt-Tiny, RMSprop, batch 500 (not among the cases) is 7,628 MiB without a cap and 7,556 with one of 7,704,
    which would not have bound 7,628. How much of a large model it sees is chance: ResNet-152 is 10,648 MiB at first and
    10,702 when repeated, under a cap above both.

    What is loaded after the first sample, kernels and libraries, is in the figure (:data:`_XMEM_GROWTH`).
    """
    source, extras = "xMem", _pairs(row["extras"])
    if extras.get("real_oom") == "True":
        yield Skipped(source, "the run was out of memory, so its peak says little of what it needs")
        return
    library, name = row["model"].split(" ", 1)
    if library == "torchvision":
        classes = 10 if "10 classes" in name else 1000
        model = ModelSpec("torchvision", _XMEM_NAMES[name.split(" ")[0]], side=86, classes=classes)
    else:
        model = ModelSpec("transformers", name.split(" ")[0], length=128)
        if model.name not in configurations():
            yield Skipped(source, f"no configuration of {model.name} at hand")
            return
    optimizer = row["optimizer"].split()[0].lower()
    names = {"xMem": "xMem_estimate_mib", "DNNMem": "DNNMem_estimate_mib"}
    estimates = {estimator: extras.get(key, "nan") for estimator, key in names.items()}
    yield PublishedCase(
        source=source,
        run=OwnLoop(
            model,
            Training(optimizer=optimizer, optimizer_args=(("lr", 1e-3),), zero_grad_at="before_forward"),
            batch=int(row["batch"]),
            iterations=4 if library == "torchvision" else 3,
        ),
        gpu=_CARDS[row["gpu"]],
        torch_version="2.6",
        level="reserved",
        measured_bytes=_bytes(row["value_mib"]),
        estimates=tuple((key, _bytes(value)) for key, value in estimates.items() if value != "nan"),
        beyond_model=library == "torchvision",
        grown_bytes=_XMEM_GROWTH[library],
        why=row.get("why", ""),
    )


_CARDS = {
    "NVIDIA RTX 3060": "RTX-3060-12GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "Tesla V100-SXM2-16GB": "V100-16GB",
}


#: Bytes of an idle A100 in a DGX that belong to no process: what NVML says of the card less what it says of the
#: processes, in the published reports of optimum-benchmark.
_DGX_OTHERS = 884 * MIB
#: What SchedTune's cards ran: PyTorch of 2021, before CUDA 11.7 loaded kernels lazily.
_CUDA_OF_2021 = (11, 2)


def _gpumemnet(row: Row) -> Iterator[Found]:
    """timm's ``train.py`` with its defaults: SGD with Nesterov's momentum, fp32, the model's own image size. The output
    is a variable of its function ``_forward``, and gone when that returns the loss."""
    yield PublishedCase(
        source="GPUMemNet",
        run=OwnLoop(
            ModelSpec("timm", row["model"]),
            Training(optimizer="sgd", optimizer_args=(("momentum", 0.9), ("nesterov", True)), loop="drop"),
            batch=int(row["batch"]),
            iterations=3,
        ),
        gpu="A100-40GB",
        torch_version=OLDEST_TORCH,
        level="device",
        others_bytes=_DGX_OTHERS,
        measured_bytes=_bytes(row["value_mib"]),
        estimates=(("FakeTensor tracking", _bytes(_pairs(row["extras"])["faketensor_peak_mib"])),),
    )


def _schedtune(row: Row) -> Iterator[Found]:
    """torchvision's classifiers in fp32. The optimizer is not stated; SGD with momentum is PyTorch's own example."""
    source = "SchedTune"
    cores = _pairs(row["gpu"], ",")["cores"]
    if cores not in _SCHEDTUNE_CARDS:
        yield Skipped(source, f"the card with {cores} CUDA cores is not in the table of cards")
        return
    yield PublishedCase(
        source=source,
        run=OwnLoop(
            ModelSpec("torchvision", row["model"]),
            Training(optimizer="sgd", optimizer_args=(("momentum", 0.9),)),
            batch=int(row["batch"]),
            iterations=3,
        ),
        gpu=_SCHEDTUNE_CARDS[cores],
        torch_version=OLDEST_TORCH,
        level="device",
        cuda_version=_CUDA_OF_2021,
        measured_bytes=_bytes(row["value_mib"]),
    )


#: What the guide measured with an empty context and one small tensor.
_HF_CONTEXT_MIB = 1343


def _hf_docs(row: Row) -> Iterator[Found]:
    """The guide to training BERT-large on one V100 with transformers' Trainer."""
    source, extras = "HF documentation", row["extras"]
    if row["optimizer"] == "none":
        yield Skipped(source, "no step: an empty context, or weights alone")
    elif row["optimizer"].startswith("none ("):
        old = "TensorFlow 2.2" if row["framework_version"].startswith("tensorflow") else "PyTorch 1.4"
        yield Skipped(source, f"{old} on a TITAN RTX, which is not in the table of cards")
    else:
        optimizer, arguments = {
            "AdamW(hf)": ("adamw", (("foreach", False),)),  # transformers' own class went parameter by parameter
            "Adafactor": ("transformersadafactor", ()),
            "bnb Adam8bit": ("adam8bit", ()),
        }[row["optimizer"]]
        step = Training(
            optimizer=optimizer,
            optimizer_args=arguments,
            amp="fp16" if "AMP" in row["precision"] else None,
            grad_accum=4 if re.search(r"grad acc\w* 4", extras) else 1,
            checkpoint_activations="ckpt" in extras or "checkpointing" in extras,
            loop="drop",  # Trainer.compute_loss returns the loss alone
        )
        yield PublishedCase(
            source=source,
            run=OwnLoop(
                ModelSpec("transformers", "bert-large-uncased", length=512, labels="class"),
                step,
                batch=int(row["batch"]),
                iterations=2,
            ),
            gpu=_CARDS[row["gpu"]],
            torch_version=OLDEST_TORCH,
            level="device",
            measured_bytes=_bytes(row["value_mib"]),
            context_bytes=_bytes(_HF_CONTEXT_MIB),
        )


def _torchtitan(_: Row) -> Iterator[Found]:
    yield Skipped("torchtitan", "sharded over 4 to 512 cards by torchtitan's own code, which is not rebuilt here")


def _fms(_: Row) -> Iterator[Found]:
    yield Skipped("fms-acceleration", "the lengths of the sequences are not published, and kernels are flash-attn's")


_READERS: dict[str, Callable[[Row], Iterator[Found]]] = {
    "xmem": _xmem,
    "gpumemnet_timm_subset": _gpumemnet,
    "schedtune": _schedtune,
    "hf_docs": _hf_docs,
    "torchtitan": _torchtitan,
    "fms_acceleration_1gpu": _fms,
}


# --- cells ------------------------------------------------------------------------------------------------------------


def _pairs(text: str, separator: str = ";") -> dict[str, str]:
    """``a=1;b=2`` as a mapping; parts without ``=`` are words for people."""
    return dict(part.split("=", 1) for part in text.split(separator) if "=" in part)


def _bytes(mib: Any) -> int:
    return round(float(mib) * MIB)
