"""Write weak stubs, which do nothing, for every CUDA symbol that the libraries in some folders import.

    python gen_stubs.py INCLUDE FOLDER ... > stubs.c

INCLUDE holds ``cuda.h``; a FOLDER holds shared libraries (``torch/lib``, vLLM's). The strong definitions of
``src/*.cpp`` win over the stubs. The first call of each is written to the file that FAKE_CUDA_LOG_STUBS names.
"""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path

IMPORTED = re.compile(
    r"_*cuda[A-Z]|cublas[A-Z]|cublasLt|cudnn[A-Z]|cusparse(?!Lt)[A-Z]|cusolver[A-Z]|cufft[A-Z]|cu(?!File|pti)[A-Z]"
)
#: The same as a whole string of a library.
_NAMES = re.compile(rb"\0((?:cuda|cublas|cublasLt|cudnn|cusparse|cusolver|cufft|nvJitLink|cu)[A-Z]\w{2,80})(?=\0)")
#: What cuDNN's run-time compiled engines, cuBLAS and Triton look up by name instead of importing it.
LOOKED_UP = [
    "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuEventDestroy",
    "cuEventQuery", "cuEventRecord", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuGraphAddKernelNode",
    "cuKernelSetAttribute", "cuLaunchCooperativeKernel", "cuLibraryUnload", "cuLinkAddData", "cuLinkAddFile_v2",
    "cuLinkDestroy", "cuMemcpyDtoH_v2", "cuMemsetD32Async", "cuModuleLoadFatBinary", "cuModuleUnload",
    "cuStreamDestroy", "cuStreamSynchronize", "cuStreamWaitEvent", "cuStreamWriteValue32", "cuTensorMapEncodeTiled",
]  # fmt: skip
#: These may write on the device: what was sent there before is no longer known (FAKE_CUDA_SENT).
WRITES = re.compile(
    r"cu(blas|sparse)(?!.*(Set|Get|Create|Destroy))|cudnn(?!.*(Set|Get|Create|Destroy))|cuLaunch|cu(da)?Mem(set|cpy)|cudaGraphLaunch"
)


def imported(library: Path) -> set[str]:
    """CUDA symbols that a library leaves to others, and those of TensorFlow, which defines stubs of its own that open
    the real libraries: the preloaded ones win over them. JAX's libraries look all of them up by name: they are strings
    in them."""
    if library.parent.name.startswith(("xla_cuda", "jax_cuda")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return {match.group(1).decode() for match in _NAMES.finditer(data)}
    which = [] if library.name.startswith("libtensorflow") else ["--undefined-only"]
    command = ["nm", "-D", *which, str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return {name for line in lines if IMPORTED.match(name := line.split()[-1].partition("@")[0])}


def declared(header: Path) -> set[str]:
    """Functions that a header of CUDA declares, without the variants for per-thread default streams."""
    names = {match.group(1) for match in re.finditer(r"\b(cu(?:da)?[A-Z]\w+)\(", header.read_text(encoding="utf-8"))}
    return {name for name in names if not (name.startswith("cuda") and name.endswith(("_ptsz", "_ptds")))}


def stub(name: str) -> str:
    counted = "fake_stub_calls++; " if WRITES.match(name) else ""
    told = f'static int told; if (!told) {{ told = 1; fake_stub_called("{name}"); }}'
    return f'__attribute__((weak, visibility("default"))) int {name}(void) {{ {counted}{told} return 0; }}'


def main(include: str, *folders: str) -> None:
    names = set(LOOKED_UP)
    for folder in folders:
        for library in sorted(Path(folder).glob("*.so*")):
            names |= imported(library)
    for header in ("cuda.h", "cuda_runtime_api.h"):
        names |= declared(Path(include) / header)
    print("#include <stddef.h>\nextern volatile unsigned long fake_stub_calls;\nvoid fake_stub_called(const char *);")
    print(*map(stub, sorted(names)), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
