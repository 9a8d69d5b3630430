"""Training steps of Keras models, run by TensorFlow's CUDA build on the stub driver: ``tensorflow/steps.jsonl``.

GRAPHMEM_TENSORFLOW_PYTHON names the interpreter of an environment with ``tensorflow[and-cuda]``, GRAPHMEM_STUB_DRIVER
a stub that was built for it (tests/oracles/stub_cuda). ``record`` runs the named cases anew, each in a process of its
own, and keeps beside the figures what a prediction starts from: the step as TensorFlow prepared it and cuDNN's answers
(``tensorflow/prepared/NAME.json.gz``), so that ``table`` and the tests need neither. ``record --prepare`` makes those
alone and ``record --answers`` only asks cuDNN again; ``record --again`` runs one more process beside those that were
recorded, and ``record --requested`` adds what the tensors asked for at their peak, from the allocator's log.
``table`` shows what nine of ten recorded processes stay at or under beside the prediction, which is the same of drawn
ones, and the range of both: in which order kernels run differs from process to process, and peaks by some per cent.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import IO, Any

from graphmem.allocators.ideal import IdealAllocator
from graphmem.cudnn.library import Cudnn
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.recurrent import Network
from graphmem.devices import device_named
from graphmem.replay import replay
from graphmem.runtimes.tensorflow.card import run_on_card
from graphmem.runtimes.tensorflow.dataflow import trace_of
from graphmem.runtimes.tensorflow.library import CudnnSpaces
from graphmem.runtimes.tensorflow.options import read_options
from graphmem.runtimes.tensorflow.orders import SHARE, Drawn, draw
from graphmem.runtimes.tensorflow.step import Step, read_step
from tests import places
from tests.recorded import stub
from tests.recorded.case import Documents

FILE = places.GOLDEN / "tensorflow" / "steps.jsonl"
PREPARED = FILE.parent / "prepared"
MODELS = Path(__file__).parent / "cases" / "keras_steps" / "models.py"
STEPS = 3
#: What the allocator of the card writes of a request that it granted, and of one given back.
_GRANTED = re.compile(rb"\] AllocateRaw GPU_0_bfc +(\d+) 0x")
_GIVEN_BACK = re.compile(rb"\] DeallocateRaw GPU_0_bfc +(\d+)")
_PROGRAM = places.ROOT / "tests" / "oracles" / "tensorflow" / "record_steps.py"
#: The card that the stub stands for.
CARD, TOTAL_MIB = "H200-141GB", 143771


@dataclass(frozen=True)
class Case:
    """``model``: a function of :data:`MODELS`; ``memory``, ``loop`` and ``flags`` as of ``record_steps.py``;
    ``options`` are graphmem's for the same. Those ``kept_back`` were recorded before the rules were written and looked
    at after the last, the second eight of them before the next rules."""

    model: str
    memory: str = "memory_growth"
    options: str = "allow_growth:true"
    environment: Mapping[str, str] = field(default_factory=dict)
    kept_back: bool = False
    loop: str = "train_on_batch"
    flags: str = ""


_OPEN = (
    "mlp", "mlp_eager", "mlp_sgd", "mlp_bfloat16", "mlp_xla", "mlp_wide", "cnn", "cnn_bfloat16", "cnn_xla", "resnet",
    "resnet_sgd", "resnet50", "lstm", "bidirectional", "simple_rnn", "attention", "attention_xla", "decoder",
)  # fmt: skip
_KEPT_BACK = (
    "autoencoder", "two_towers", "mobilenet", "unet", "conv1d", "lstm_tagger", "vit", "attention_bfloat16",
)  # fmt: skip
_KEPT_BACK_AGAIN = (
    "unet_deep", "gru", "depthwise", "encoder_float16", "gan", "classifier", "autoencoder_norm",
)  # fmt: skip
#: Predicted before anything was recorded, and not looked at before.
FORETOLD = ("mixer", "text_cnn", "gru_tagger", "inception", "recommender")
_XLA = (
    "resnet_xla", "lstm_xla", "unet_xla", "vit_xla", "autoencoder_xla", "mlp_wide_xla", "mlp_bfloat16_xla",
)  # fmt: skip
CASES = {
    **{name: Case(name) for name in (*_OPEN, *_XLA)},
    **{name: Case(name, kept_back=True) for name in (*_KEPT_BACK, *_KEPT_BACK_AGAIN, *FORETOLD)},
    "simple_rnn": Case("simple_rnn", flags="1" * 50 + "0"),
    "fitted": Case("fitted", kept_back=True, loop="fit"),
    "mlp_at_once": Case("mlp", "whole_limit", ""),
    "cnn_limited": Case("cnn", "memory_limit=1024", "memory_limit:1024"),
    "cnn_async": Case(
        "cnn", "cuda_malloc_async", "use_cuda_malloc_async:true", {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}
    ),
}


def recorded() -> Documents:
    """What was recorded, by case."""
    if not FILE.exists():
        return {}
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {row["case"]: row for row in rows}


# --- predictions ------------------------------------------------------------------------------------------------------


def _question(asked: Convolution) -> str:
    """A question as the goldens spell it: fields that came later are left out where they say nothing."""
    return repr(asked).replace(", padding_after=(), down_converts=False)", ")")


@dataclass
class Answers:
    """cuDNN's answers by question, as they were given when the step was prepared."""

    given: dict[str, Any]
    cudnn: CudnnSpaces | None = None

    def convolution(self, asked: Convolution, *, fused: bool = False) -> tuple[int, ...]:
        question = ("fused " if fused else "") + _question(asked)
        if self.cudnn is not None:
            self.given[question] = self.cudnn.convolution(asked, fused=fused)
        return tuple(self.given[question])

    def recurrent(self, network: Network, training: bool) -> tuple[int, int]:
        if self.cudnn is not None:
            self.given[repr(network)] = self.cudnn.recurrent(network, training)
        work, reserve = self.given[repr(network)]
        return work, reserve


def prepared(name: str) -> tuple[Step, Answers]:
    """What a prediction of the case starts from."""
    document = _document(name)
    return read_step(document), Answers(document["answers"])


def _document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((PREPARED / f"{CASES[name].model}.json.gz").read_bytes()))
    return found


def predicted_requests(name: str) -> int:
    """What the tensors ask for at their peak, in bytes."""
    return replay(drawn(name).shown, IdealAllocator()).peak_requested_bytes


@cache
def drawn(name: str) -> Drawn:
    """The processes that are drawn for the case."""
    step, answers = prepared(name)
    return draw(step, name, STEPS, answers)


@cache
def predicted(name: str) -> int:
    """The largest peak of chunks in use of the process that is shown, as ``get_memory_info`` tells it."""
    run = run_on_card(drawn(name).shown, read_options(CASES[name].options, {}), device_named(CARD)).main
    return run.peak_allocated_bytes


def known() -> list[str]:
    """The cases that can be predicted here: recorded and prepared."""
    return [name for name in recorded() if (PREPARED / f"{CASES[name].model}.json.gz").exists()]


def runs(row: Mapping[str, Any]) -> list[int]:
    """By process that recorded the case, the largest peak of its steps, the one that was measured alone included."""
    return [max(row["steps"][-1]["peak"], row["steady"] or 0), *row.get("again", ())]


def upper(peaks: Sequence[int]) -> int:
    """The peak that nine of ten processes stay at or under: what a prediction is of, and is compared with."""
    return sorted(peaks)[ceil(SHARE * len(peaks)) - 1]


def off_percent(name: str) -> float:
    """How many per cent the prediction is more than what nine of ten recorded processes stay at or under."""
    return 100 * (predicted(name) / upper(runs(recorded()[name])) - 1)


def more_percent(name: str) -> list[float]:
    """By recorded process, how many per cent more it took than was predicted."""
    return [100 * (run / predicted(name) - 1) for run in runs(recorded()[name])]


def outside_percent(name: str) -> list[float]:
    """By recorded process, how many per cent it lay above (below: less than 0) all that were drawn."""
    least, *_, most = (*drawn(name).peaks, drawn(name).peaks[-1])
    return [100 * (run - min(max(run, least), most)) / drawn(name).peak for run in runs(recorded()[name])]


def is_followed(name: str) -> bool:
    """Whether the case is a step that runs operator by operator under memory growth, of operators that are followed."""
    step = prepared(name)[0]
    return not step.jit and not step.unfollowed and CASES[name].memory == "memory_growth"


# --- the kind ---------------------------------------------------------------------------------------------------------


class _Kind:
    def record(self, arguments: list[str]) -> int:
        found = recorded()
        for name in _named([one for one in arguments if not one.startswith("--")]):
            if "--answers" in arguments:
                _answer(CASES[name].model, _document(name))
            elif not {"--again", "--requested"} & {*arguments}:
                _prepare(CASES[name].model)
            if "--prepare" in arguments or "--answers" in arguments:
                continue
            if "--requested" in arguments:
                found[name]["requested"] = _requested(CASES[name])
                print(name, found[name]["requested"], flush=True)
                _write(found)
                continue
            row = _run(CASES[name])
            if row is None:
                print(f"{name}: failed", file=sys.stderr)
                continue
            if "--again" in arguments:
                row = {**found[name], "again": [*found[name].get("again", ()), *runs(row)]}
            found[name] = {"case": name, **row}
            print(name, row["steps"][-1]["peak"], row["steady"], flush=True)
            _write(found)
        return 0

    def table(self, arguments: list[str]) -> int:
        for name in known():
            if not arguments or any(part in name for part in arguments):
                print(_row(name), flush=True)
        return 0

    differ = table


def _row(name: str) -> str:
    recorded_peaks, drawn_peaks = sorted(runs(recorded()[name])), drawn(name).peaks
    shown = predicted(name)
    ends = [100 * (one / shown - 1) for one in (*recorded_peaks[:: len(recorded_peaks) - 1 or 1], *drawn_peaks)]
    return (
        f"{name:20} {len(recorded_peaks):2} recorded {upper(recorded_peaks):>13,} shown {shown:>13,} "
        f"{off_percent(name):+7.2f} %  of that recorded {ends[0]:+.1f} to {ends[len(recorded_peaks) > 1]:+.1f}, "
        f"drawn {ends[-len(drawn_peaks)]:+.1f} to {ends[-1]:+.1f} %{'  kept back' * CASES[name].kept_back}"
    )


def _prepare(model: str) -> None:
    """Let TensorFlow, without a card, prepare the step of a model, and cuDNN answer what it will be asked."""
    PREPARED.mkdir(exist_ok=True)
    asked = {"text": f"{MODELS}:{model}", "batch": None, "seq_len": None, "training": True, "architecture": "9.0"}
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "step.json")
        request.write_text(json.dumps(asked))
        command = [os.environ["GRAPHMEM_TENSORFLOW_PYTHON"], "-m", "graphmem.sources.tensorflow_program"]
        environment = {**os.environ, "PYTHONPATH": str(places.ROOT)}
        subprocess.run([*command, str(request), str(result)], env=environment, stderr=subprocess.DEVNULL, check=True)
        _answer(model, json.loads(result.read_text()))


def _answer(model: str, document: dict[str, Any]) -> None:
    """Keep the prepared step with cuDNN's answers."""
    card = device_named(CARD)
    with Cudnn(os.environ["GRAPHMEM_CUDNN"], card) as cudnn:
        answers = Answers({}, CudnnSpaces(card, cudnn))
        trace_of(read_step(document), model, 1, answers)
    data = json.dumps({**document, "answers": answers.given}, separators=(",", ":")).encode()
    (PREPARED / f"{model}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def _write(found: Documents) -> None:
    lines = [json.dumps(found[known], separators=(",", ":")) for known in CASES if known in found]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _requested(case: Case) -> int:
    """What the tensors of a run asked for at their peak, in bytes, from a process whose allocator writes a log."""
    now = most = 0
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "bfc_allocator=3"}
    with tempfile.TemporaryFile() as lines:
        _run(replace(case, environment={**case.environment, **log}), lines)
        lines.seek(0)
        for line in lines:
            granted, given_back = _GRANTED.search(line), _GIVEN_BACK.search(line)
            now += int(granted[1]) if granted else -int(given_back[1]) if given_back else 0
            most = max(most, now)
    return most


def _named(parts: list[str]) -> list[str]:
    return [name for name in CASES if not parts or any(part in name for part in parts)]


def _run(case: Case, errors: IO[bytes] | None = None) -> dict[str, Any] | None:
    python = Path(os.environ["GRAPHMEM_TENSORFLOW_PYTHON"])
    [site] = python.parents[1].glob("lib/python3.*/site-packages")
    libraries = [stub.driver().parent / "cudalib", *site.glob("nvidia/*/lib")]
    environment = {
        **os.environ,
        **stub.REAL_CUDNN,
        "FAKE_CUDNN_PATH": str(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"),
        "FAKE_CUDA_TOTAL_MIB": str(TOTAL_MIB),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "LD_PRELOAD": str(stub.driver()),
        **case.environment,
    }
    command = [str(python), str(_PROGRAM), f"{MODELS}:{case.model}", str(STEPS), case.memory, case.loop, case.flags]
    # Nobody may wait for what a failing run prints without end.
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors or subprocess.DEVNULL, timeout=1500,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    rows = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return json.loads(rows[-1]) if rows else None


KIND = _Kind()
