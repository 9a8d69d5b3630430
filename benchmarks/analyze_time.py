"""How long ``graphmem analyze`` takes and how much memory it needs: python benchmarks/analyze_time.py [name part]

Every analysis runs in a fresh process, as a user runs it, so imports count. Prints wall time, processor time and peak
resident memory of the process, and the predicted peak. The models are configurations; no weights exist.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESNET = ROOT / "tests" / "golden" / "onnxruntime" / "models" / "resnet50.onnx.gz"

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
#: The published shapes of Llama 2.
LLAMA_7B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_70B = _LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}

#: The command line, also beside a torchvision that does not import: see ``models_zoo/README.md``.
PROGRAM = """
import sys
if any(argument.startswith("hf:") for argument in sys.argv):
    from models_zoo.libraries import make_torchvision_importable
    make_torchvision_importable()
from graphmem.cli.main import main
main()
"""

_TRAINING = ("--training", "--seq-len", "2048", "--batch", "1", "--dtype", "bf16")


def commands(folder: Path) -> dict[str, tuple[str, ...]]:
    """Name -> arguments of ``graphmem analyze``; the models are written into ``folder``."""
    found: dict[str, tuple[str, ...]] = {}
    if RESNET.exists():
        model = folder / "resnet50.onnx"
        model.write_bytes(gzip.decompress(RESNET.read_bytes()))
        found["onnx resnet50, inference, batch 32"] = (str(model), "--batch", "32")
    for name, config in (("llama 7b", LLAMA_7B), ("llama 70b", LLAMA_70B)):
        path = folder / name.replace(" ", "-") / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        found[f"{name}, training, bf16, 2048 tokens"] = (f"hf:{path}", *_TRAINING)
    found["llama 70b, inference, bf16, 2048 tokens"] = (f"hf:{path}", "--inference", *_TRAINING[1:])
    return found


def run(arguments: tuple[str, ...]) -> tuple[float, float, int, str]:
    """(wall seconds, processor seconds, peak resident bytes, predicted device bytes or the error) of one analysis."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "analyze", *arguments, "--format", "json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # the only way to the memory of one child
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    said = f"{json.loads(answer)['peak']['device_bytes'] / 2**30:.2f} GiB" if process.returncode == 0 else "failed"
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return seconds, usage.ru_utime + usage.ru_stime, peak, said


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"{'analysis':44s} {'wall s':>7s} {'cpu s':>7s} {'RSS MiB':>8s}  predicted")
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in commands(Path(folder)).items():
            if part in name:
                wall, processor, peak, said = run(arguments)
                print(f"{name:44s} {wall:7.2f} {processor:7.2f} {peak / 2**20:8.0f}  {said}", flush=True)


if __name__ == "__main__":
    main()
