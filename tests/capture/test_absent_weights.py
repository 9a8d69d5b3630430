"""Models of transformers that are loaded from a folder without weights, and quantised ones by configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.errors import GraphmemError, UsageError  # noqa: E402
from tests.recorded import libraries  # noqa: E402
from tests.recorded.cases.libraries import text  # noqa: E402
from tests.recorded.device import CARD  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402

_PROGRAM = """
import torch
from transformers import AutoModelForCausalLM
def run():
    model = AutoModelForCausalLM.from_pretrained({folder!r}, {options}).to("cuda")
    tokens = torch.zeros((2, 64), dtype=torch.long, device="cuda")
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
"""


def _peaks(tmp_path: Path, folder: str, options: str = "") -> tuple[int, int]:
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM.format(folder=folder, options=options), encoding="utf-8")
    peak = analyze(f"{file}:run", device="H200").peak
    return peak.allocated_bytes, peak.reserved_bytes


def _configured(folder: str, **more: Any) -> str:
    """The same folder's configuration, elsewhere, without weights."""
    target = Path(folder + "-configured")
    target.mkdir(exist_ok=True)
    settings = json.loads(Path(folder, "config.json").read_text(encoding="utf-8")) | more
    (target / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(target)


@pytest.mark.parametrize("options", first_quick(["dtype=torch.float32", ""], 1))
def test_a_model_loads_as_with_its_weights(tmp_path: Path, options: str) -> None:
    folder = text.llama_folder(num_hidden_layers=2)
    assert _peaks(tmp_path, _configured(folder), options) == _peaks(tmp_path, folder, options)


def test_the_report_says_so(tmp_path: Path) -> None:
    folder = _configured(text.llama_folder(num_hidden_layers=1))
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM.format(folder=folder, options=""), encoding="utf-8")
    estimate = analyze(f"{file}:run", device="H200")
    (said,) = (one for one in estimate.diagnostics if "there are no weights in" in one.message)
    assert said.place == str(folder)
    assert [cause.name for cause in estimate.doubts.about("reserved")] == ["real cards"], "it has all sizes"


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes"])
def test_packed_weights_have_to_be_there(tmp_path: Path, method: str) -> None:
    quantized = {"quant_method": method, "load_in_4bit": True, "bits": 4}
    folder = _configured(text.llama_folder(num_hidden_layers=1), quantization_config=quantized)
    with pytest.raises(GraphmemError) as raised:
        _peaks(tmp_path, folder)
    assert "\n" not in str(raised.value)


# --- --weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["nf4", "int8"])
def test_quantised_weights_are_as_recorded(weights: str) -> None:
    """The same model, loaded by a program, on the stub driver."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    recorded = libraries.KIND.load(f"pretrained_{weights}_forwards")
    step = Inference(dtype="bf16", weights=weights)
    folder = _configured(text.llama_folder())
    peak = analyze(f"hf:{folder}", batch=2, seq_len=256, training=step, device=CARD).peak
    assert (peak.allocated_bytes, peak.reserved_bytes) == (recorded.peak_allocated_bytes, recorded.peak_reserved_bytes)


def test_a_quantised_configuration_is_never_another_model() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    quantized = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    folder = text.llama_folder(num_hidden_layers=2)
    asked = analyze(
        f"hf:{_configured(folder)}", batch=2, seq_len=64, training=Inference(dtype="bf16", weights="nf4"), device=CARD
    ).peak
    own = f"hf:{_configured(folder, quantization_config=quantized)}"
    found = analyze(own, batch=2, seq_len=64, training=Inference(dtype="bf16"), device=CARD).peak
    assert (found.allocated_bytes, found.reserved_bytes) == (asked.allocated_bytes, asked.reserved_bytes)
    with pytest.raises(GraphmemError, match="--inference"):
        analyze(own, batch=2, seq_len=64, training=Training(), device=CARD)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "mxfp4"])
def test_other_quantised_configurations_are_refused(method: str) -> None:
    folder = _configured(text.llama_folder(num_hidden_layers=1), quantization_config={"quant_method": method})
    with pytest.raises(GraphmemError, match="quantised model"):
        analyze(f"hf:{folder}", batch=1, training=Inference(), device=CARD)


@pytest.mark.parametrize("weights", ["fp8", "gptq", "three bits", ""])
def test_unknown_weights_are_refused(weights: str) -> None:
    with pytest.raises(UsageError, match="nf4, fp4, int8"):
        Inference(weights=weights)


def test_only_transformers_models_are_quantised() -> None:
    with pytest.raises(UsageError, match="hf:"):
        analyze(torch.nn.Linear(4, 4), torch.zeros(2, 4), training=Inference(weights="nf4"), device=CARD)
