"""Where things lie: the checkout and the recordings that tests compare with."""

from __future__ import annotations

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).resolve().parent.parent
#: Recordings of real programs, by what was recorded.
GOLDEN = ROOT / "tests" / "golden"
#: Of PyTorch's CUDA build, on the stub driver.
PYTORCH = GOLDEN / "pytorch"
#: Of ONNX Runtime's CPU build.
ONNXRUNTIME = GOLDEN / "onnxruntime"
#: Of TensorFlow's CPU build.
TENSORFLOW = GOLDEN / "tensorflow"
