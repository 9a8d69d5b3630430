#!/usr/bin/env bash
# Makes what recordings need, beside this file: venv/ with a CUDA build of PyTorch and the libraries of the recorded
# models, and build/ with the stub of the CUDA driver. No GPU, no CUDA toolkit; g++, make, 8 GB of disk, minutes.
#
#     tests/oracles/stub_cuda/setup.sh [PYTORCH_VERSION]        2.13.0 by default
set -euo pipefail
cd "$(dirname "$0")"
version=${1:-2.13.0}

[ -x venv/bin/python ] || "${PYTHON:-python3}" -m venv venv
# Three equals signs: this version and no local build of it (+cpu). On Linux the plain one from PyPI is the CUDA build.
venv/bin/python -m pip install --quiet "torch===$version" numpy "onnx>=1.16" click rich transformers==5.23.0
# The rest must not change PyTorch. torchvision has a release for each PyTorch: 0.28 goes with 2.13, and so downwards.
vision=$(venv/bin/python -c "import sys; print(int(sys.argv[1].split('.')[1]) + 15)" "$version")
venv/bin/python -m pip install --quiet --no-deps "torchvision===0.$vision.0" timm==1.0.31 pillow
venv/bin/python -m pip install --quiet --no-deps accelerate peft psutil bitsandbytes lion-pytorch expecttest
venv/bin/python -c "import torch; assert torch.version.cuda, 'this is no CUDA build of PyTorch'"
make --quiet PYTHON=venv/bin/python
LD_PRELOAD=$PWD/build/libfakecuda.so venv/bin/python - <<'PROGRAM'
import torch

values = torch.arange(1000, device="cuda").flip(0).sort().values
print("PyTorch", torch.__version__, "on", torch.cuda.get_device_name(), "sorted", values.numel(), "numbers into nothing")
PROGRAM
