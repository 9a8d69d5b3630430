"""Messages for options of other tools (``--fp16``, ``--bs``): the option of graphmem that means the same."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

import click

_BATCH = "-b N (graphmem fit looks for the largest)"
_PRECISION = "--amp bf16 (autocast) or --dtype bf16 (the weights too)"
_QUANTIZED = "--weights nf4, fp4 or int8 for inference; to train so, a function or a program that does it: train.py"
_LORA = "a function that returns the adapted model, peft.get_peft_model(...): graphmem analyze train.py:build, or run"
_CARDS = "--world-size N with --ddp, --fsdp, --zero 3 or --tp N (graphmem plan MODEL --gpus 8xH100 looks for a layout)"
_NOTHING = "no size depends on it: leave it out"

#: option of other tools -> what to write here
ELSEWHERE = {
    **dict.fromkeys(
        ("--bs", "--per-device-train-batch-size", "--micro-batch-size", "--micro-batch", "--max-batch-size"), _BATCH
    ),
    **dict.fromkeys(("--precision", "--mixed-precision", "--fp16", "--bf16", "--half", "--torch-dtype"), _PRECISION),
    **dict.fromkeys(
        ("--quantization", "--quantize", "--quant", "--bits", "--load-in-4bit", "--load-in-8bit", "--qlora"), _QUANTIZED
    ),
    **dict.fromkeys(("--lora", "--use-lora", "--use-peft", "--peft", "--lora-r", "--lora-rank"), _LORA),
    **dict.fromkeys(("--num-gpus", "--gpus", "--devices", "--n-gpus", "--num-processes", "--deepspeed"), _CARDS),
    **dict.fromkeys(("--lr", "--learning-rate", "--epochs", "--num-train-epochs", "--seed"), _NOTHING),
    **dict.fromkeys(("--device", "--card", "--gpu-name"), "--gpu NAME (graphmem gpus lists them)"),
    **dict.fromkeys(("--vram", "--memory", "--gpu-mem"), "--gpu-memory 24GiB"),
    **dict.fromkeys(("--max-length", "--max-seq-length", "--context-length", "--ctx", "--seqlen"), "-s N"),
    **dict.fromkeys(("--gradient-checkpointing", "--activation-checkpointing"), "--checkpoint-activations"),
    "--gradient-accumulation-steps": "--grad-accum N",
    "--tensor-parallel-size": "--tp N",
    "--pipeline-parallel-size": "--pp N",
    "--json": "--format json",
    "--html": "-o report.html",
    "--open": "-o report.html",
}

#: What ``graphmem help WORD`` says of what is no command and no option.
TOPICS = {
    "jax": "a JAX step: graphmem analyze jax:step.py:build --batch 64 --gpu A100, where build returns (function, "
    "arguments), or a jitted function with --shapes NAME (docs/modeling/jax.md)",
    "onnx": "an ONNX file: graphmem analyze model.onnx --batch 16 --gpu T4, under ONNX Runtime; with --training under "
    "PyTorch (docs/modeling/onnxruntime.md)",
    "keras": "a Keras model: graphmem analyze keras:train.py:build, training as TensorFlow runs it",
    "remat": "recomputing within a budget: --checkpoint-activations of a step, in Python plan_memory.remat for graphs "
    "of torch.fx and ONNX (docs/REMATERIALISATION.md)",
    "vllm": "an inference engine: graphmem serve MODEL --gpu H100 (how many requests at once)",
    "oom": "a run that died: graphmem replay snapshot.pickle (or a log), in Python graphmem.explain_oom(error)",
    "notebook": "a notebook: graphmem run train.ipynb, or inside of one %load_ext graphmem and %%graphmem --gpu T4",
}


def topic(name: str) -> str:
    """What is said of a subject by its name, or the beginning of it; empty for an unknown one."""
    word = name.lower()
    return next((text for one, text in TOPICS.items() if word.startswith(one) or (len(word) > 3 and one in word)), "")


def words_for(name: str) -> str:
    """What to write for an option of another tool; empty for an unknown one."""
    return ELSEWHERE.get(_plain(name), "")


def _meant(name: str, own: Iterable[str]) -> str:
    """The option of another tool that a misspelt one is nearer to than to any of the command's ``own``; else empty."""
    own = set(own)
    nearest = next(iter(difflib.get_close_matches(_plain(name), own | ELSEWHERE.keys(), n=1, cutoff=0.8)), "")
    return "" if nearest in own else nearest


def _plain(name: str) -> str:
    return f"--{name.lstrip('-').replace('_', '-').lower()}"


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """An option that there is not, and that is known from elsewhere, is answered with the one that there is."""
    try:
        yield
    except click.NoSuchOption as error:
        name = error.option_name
        own = [] if error.ctx is None else [flag for one in error.ctx.command.params for flag in one.opts]
        known = words_for(name) or words_for(_meant(name, own))
        is_near = bool(difflib.get_close_matches(_plain(name), own, n=1, cutoff=0.8))
        if error.ctx is not None and error.ctx.info_name == "run" and not is_near and not known.startswith("--gpu"):
            known = f"those of the program go after it: graphmem run train.py {name} ..."
        if not known:
            raise
        raise click.UsageError(f"no option {name}; here: {known}", error.ctx) from None
