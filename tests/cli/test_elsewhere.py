"""Words of other tools, and slips of new users: one line that says what to write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli
from graphmem.errors import SourceError
from graphmem.sources.base import Sizes, known_arguments
from graphmem.sources.hints import framework_of, hint_for_file


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, words, prog_name="graphmem")
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (("analyze", "zoo:gpt2", "-s", "4k"), 2, "4k may be 4096 or 4000"),
        (("analyze", "zoo:gpt2", "-s", "four"), 2, "'four' is not a whole number"),
        (("analyze", "zoo:gpt2", "--quant", "int4"), 2, "no option --quant; here: --weights nf4"),
        (("serve", "Qwen2.5-7B", "--gpu", "L4", "--users", "32"), 1, "no option --users; here: --load N"),
        (("serve", "Qwen2.5-7B", "--gpu", "L4", "-b", "8"), 1, "no option -b; here: --max-num-seqs N"),
        (
            ("serve", "Qwen2.5-7B", "--engine", "sglang", "--gpu", "L4", "--users", "8"),
            1,
            "no option --users; here: --load N",
        ),
        (("run", "--bs", "8", "train.py"), 2, "go after it: graphmem run train.py --bs"),
        (("run", "--larges", "train.py"), 2, "'--largest'"),
        (("run", "--device", "T4", "train.py"), 2, "no option --device; here: --gpu NAME"),
        (("help", "--lora"), 0, "there is no --lora; here: a function"),
        (("help", "precision"), 0, "there is no --precision; here: --amp bf16"),
        (("help", "tp"), 0, "--tp is an option of analyze, fit"),
        (("help", "optimizer"), 0, "All of them: sgd, adam, adamw"),
        (("help", "gpu-memory"), 0, "Memory of the card instead of its own"),
        (("help", "gpus"), 0, "Usage: graphmem gpus"),
        (("help",), 0, "Usage: graphmem [OPTIONS] COMMAND"),
        (("help", "JAX"), 0, "graphmem analyze jax:step.py:build"),
        (("help", "rematerialization"), 0, "recomputing within a budget: --checkpoint-activations"),
        (("fit", "zoo:gpt2", "--html", "f.html"), 2, "no option --html; here: -o report.html"),
        (("sweep", "zoo:gpt2", "--gpu", "T4,L4"), 1, "'T4,L4' is several cards: graphmem sweep MODEL --vary gpu=T4,L4"),
        (("help", "nothing"), 2, "no command and no option 'nothing'"),
    ],
)
def test_what_to_write_here(words: tuple[str, ...], code: int, answer: str) -> None:
    found, text = said(*words)
    assert found == code
    assert answer in text


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import keras", "Keras"),
        ("from keras import layers\nimport tensorflow as tf", "Keras"),
        ("import tensorflow as tf", "TensorFlow"),
        ("import keras\nimport torch", ""),
        ("import torch", ""),
    ],
)
def test_a_file_of_keras_is_known_by_its_imports(tmp_path: Path, text: str, framework: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(text, encoding="utf-8")
    assert framework_of(file) == framework
    assert (f"keras:{file}:build" in hint_for_file(file)) == bool(framework)


def test_what_is_a_whole_program_is_sent_to_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("train.ipynb", "train.sh"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert f"graphmem run {tmp_path}/train.ipynb" in said("analyze", str(tmp_path / "train.ipynb"))[1]
    assert f"graphmem run bash {tmp_path}/train.sh" in said("analyze", str(tmp_path / "train.sh"))[1]
    program = tmp_path / "train.py"
    program.write_text("import sys\n\ndef main():\n    sys.exit(2)\n", encoding="utf-8")
    assert f"graphmem run {program}" in said("analyze", f"{program}:main")[1]


def test_a_function_of_keras_needs_no_prefix(tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("needs Keras")
    file = tmp_path / "model.py"
    file.write_text(
        "import keras\n\ndef build():\n    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(8)])\n",
        encoding="utf-8",
    )
    code, text = said("analyze", f"{file}:build", "--gpu", "L4")
    assert code == 0, text
    assert f"keras:{file}:build" in text.replace(" ", "")


def test_a_factory_of_one_size_is_told_how_to_take_the_batch() -> None:
    def build() -> None: ...

    with pytest.raises(SourceError, match=r"write def build\(batch\): "):
        known_arguments(build, "build", Sizes(batch=2))
