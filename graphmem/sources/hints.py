"""Hints for a model given in a form that is none of the accepted ones: the form to write instead."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from graphmem.errors import SourceError
from graphmem.sources import hub

_DIRECTORY = "it is a directory; name a file in it"
#: End of a file's name -> the form to write.
_FORMS = {
    ".ipynb": "run a notebook as a whole program: graphmem run {path}",
    ".sh": "for what a script of the shell starts: graphmem run bash {path}",
    ".json": "for a Hugging Face configuration write hf:{path}; for a trace, 'graphmem replay {path}'",
    **dict.fromkeys((".pickle", ".pkl"), "for a memory snapshot use 'graphmem replay {path}'"),
    **dict.fromkeys(
        (".keras", ".h5", ".hdf5"), "write a function that builds the model and name it: keras:model.py:build"
    ),
    **dict.fromkeys(
        (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf", ".npz"),
        "it holds weights, which an analysis does not need; give what builds the model: "
        "a function (train.py:build) or a configuration (hf:config.json)",
    ),
}


def hint_for_file(path: Path) -> str:
    """The form to write for a file or folder that exists; empty where only the list of forms helps."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return f"write hf:{path}"
        weights = any(path.glob("*.safetensors")) or any(path.glob("*.bin"))
        return "it holds weights; put the model's config.json beside them" if weights else _DIRECTORY
    suffix = path.suffix.lower()
    framework = framework_of(path) if suffix == ".py" else ""
    if framework == "JAX":
        return f"name a jitted function, or one that returns (function, arguments): jax:{path}:step"
    if framework:
        return f"name the function that returns the model, or (model, x, y): keras:{path}:build"
    if suffix == ".py":
        return (
            f"name the function that returns (model, example inputs): {path}:build; or run it as a whole program: "
            f"graphmem run {path} (its largest batch: graphmem run --largest {path} --batch-size {{}})"
        )
    return _FORMS.get(suffix, "").format(path=path)


def hint_for_name(text: str) -> str:
    """The meanings that a bare word may have: ``gpt2``, ``resnet50``, ``org/model``; and a program with arguments."""
    program = text.partition(" ")[0]
    if program != text and program.endswith(".py"):
        return f"run a program with arguments as a whole: graphmem run {text}"
    if "/" in text or "\\" in text:
        return f"for a model of the Hugging Face Hub write hf:{text}" if text.count("/") == 1 else ""
    known = hub.known_model(text)  # before its end is taken for that of a file: Llama-3.1-8B
    if known is not None:
        return f"write hf:{text}, which is {known} in graphmem's table of public models"
    if Path(text).suffix:
        return ""
    return f"did you mean hf:{text}, timm:{text}, torchvision:{text} or zoo:{text}?"


def refuse_keras(program: Path) -> None:
    """Programs of Keras, TensorFlow or JAX are not run: PyTorch's operators alone are followed there.

    Raises :class:`SourceError` for a file that imports one and no PyTorch; KERAS_BACKEND=torch lets Keras pass.
    """
    framework = "" if os.environ.get("KERAS_BACKEND") == "torch" else framework_of(program)
    if framework == "JAX":
        raise SourceError(
            f"{program} is a program of JAX, and graphmem run follows PyTorch's; write a function in it that returns "
            f"(step, arguments), and run: graphmem analyze jax:{program}:FUNCTION"
        )
    if framework:
        raise SourceError(
            f"{program} is a program of {framework}, and graphmem run follows PyTorch's; write a function in it that "
            f"returns the compiled model with a batch, (model, x, y), and run: graphmem analyze "
            f"keras:{program}:FUNCTION"
        )


def framework_of(program: Path) -> str:
    """``Keras``, ``TensorFlow`` or ``JAX`` where a file imports it and no PyTorch; else nothing."""
    try:
        tree = ast.parse(program.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""  # whoever runs it says so
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    if "torch" in imported:
        return ""
    known = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX"}
    return next((framework for package, framework in known.items() if package in imported), "")
