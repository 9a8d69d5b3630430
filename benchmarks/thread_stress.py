"""Several threads that analyse at once, beside one that trains for real: the answers are those of one thread alone.

    python benchmarks/thread_stress.py [--threads 2,4,8] [--analyses 50] [--runs 1]
    python benchmarks/thread_stress.py --again 50    (the first and the fiftieth analysis of a process)

Every thread analyses the same models in another order: an MLP, a convolution, a small transformer with attention, in
training and inference, with and without autocast, compiled, and ONNX files under ONNX Runtime and PyTorch. The answers
are compared as the JSON that the command prints, byte by byte. The run ends with an error when one differs, or when
the thread that trains meanwhile, on the host, ends with other weights than alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import onnx
import torch
from onnx import TensorProto, helper
from torch import nn

from graphmem import Inference, Training, analyze

_ROOT = Path(__file__).parent.parent
Question = Callable[[], Any]


class Block(nn.Module):
    """A transformer's block: attention, normalization, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm, self.dropout = nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(2, 4, 2, 8).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.dropout(self.norm(mixed.transpose(1, 2).reshape(2, 4, 16)).softmax(-1))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.zeros(8, 16)


def convolution() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
    ), torch.zeros(2, 3, 8, 8)


def transformer() -> Any:
    return nn.Sequential(Block(), Block()), torch.zeros(2, 4, 16)


def compiled_step() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(8, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def write_onnx(folder: Path) -> str:
    """A file with two matrix products."""
    shape = (16, 16)
    weight = helper.make_tensor("w", TensorProto.FLOAT, shape, [0.0] * 256)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("MatMul", ["y", "w"], ["z"])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (4, 16)) for name in ("x", "z")]
    graph = helper.make_graph(nodes, "two products", ends[:1], ends[1:], [weight])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def questions(folder: Path) -> dict[str, Question]:
    """What is analysed, by name."""
    path = write_onnx(folder)
    return {
        "mlp, training": lambda: analyze(mlp),
        "mlp, inference": lambda: analyze(mlp, training=Inference()),
        "convolution, training": lambda: analyze(convolution, training=Training(optimizer="sgd")),
        "transformer, bf16 autocast": lambda: analyze(transformer, training=Training(amp="bf16")),
        "transformer, bf16 weights": lambda: analyze(transformer, training=Training(dtype="bf16")),
        "transformer, inference, fp16 autocast": lambda: analyze(transformer, training=Inference(amp="fp16")),
        "onnx, onnxruntime": lambda: analyze(path),
        "onnx, training": lambda: analyze(path, training=Training()),
        "compiled": lambda: analyze(compiled_step),
    }


def answer(question: Question) -> str:
    """The estimate as JSON."""
    return json.dumps(question().to_dict(), sort_keys=True)


def trained(steps: int, stop: threading.Event | None = None) -> tuple[int, list[torch.Tensor], set[bool]]:
    """(steps made, weights, what ``torch.cuda.is_available`` said) of a loop on the host with dropout and autocast.

    It makes at least ``steps``, and goes on until ``stop``.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    made, seen = 0, set()
    while made < steps or (stop is not None and not stop.is_set()):
        inputs = torch.randn(32, 16, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=made % 2 == 0):
            loss = nn.functional.mse_loss(model(inputs).float(), inputs[:, :4])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.add(torch.cuda.is_available())
        made += 1
    return made, [parameter.detach().clone() for parameter in model.parameters()], seen


def run(ask: dict[str, Question], alone: dict[str, str], threads: int, analyses: int) -> list[str]:
    """Names of what went wrong: answers that differ, errors, a training that is another one."""
    wrong: list[str] = []
    names = list(ask)

    def work(number: int) -> None:
        for turn in range(analyses):
            name = names[(turn + number) % len(names)]
            try:
                if answer(ask[name]) != alone[name]:
                    wrong.append(f"{name}: another answer")
            except BaseException as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")

    stop, beside = threading.Event(), []
    trainer = threading.Thread(target=lambda: beside.append(trained(50, stop)))
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in (trainer, *workers):
        thread.start()
    for worker in workers:
        worker.join()
    stop.set()
    trainer.join()
    if not beside:
        return [*wrong, "the training beside failed"]
    steps, weights, seen = beside[0]
    if seen != {torch.cuda.is_available()}:
        wrong.append(f"the training beside was told of a card: {seen}")
    if not all(map(torch.equal, weights, trained(steps)[1])):
        wrong.append("the training beside has other weights")
    print(
        f"  {threads} threads: {threads * analyses} analyses, {steps} training steps beside, {len(wrong)} wrong",
        flush=True,
    )
    return wrong


def same_again(times: int) -> list[str]:
    """Names of questions that the first, second, ... analysis of a fresh process answers otherwise."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name in questions(Path(folder)):
            code = (
                f"from benchmarks import thread_stress as t; ask = t.questions(t.Path({folder!r}))[{name!r}]; "
                f"print(len({{t.answer(ask) for _ in range({times})}}))"
            )
            done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True)
            different = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
            print(f"  {name}: {times} analyses of a process, {different} different answers", flush=True)
            if different != "1":
                wrong.append(f"{name}: analyses of one process differ")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,4,8")
    parser.add_argument("--analyses", type=int, default=50)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--again", type=int, default=0, help="only: so many analyses in a process each")
    parser.add_argument("--leave-out", default="", help="a question, such as the slow one: compiled")
    options = parser.parse_args()
    if options.again:
        sys.exit(1 if same_again(options.again) else 0)
    torch.set_num_threads(1)  # the machine is for the analyses
    with tempfile.TemporaryDirectory() as folder:
        ask = {name: question for name, question in questions(Path(folder)).items() if name != options.leave_out}
        alone = {name: answer(question) for name, question in ask.items()}
        wrong: list[str] = []
        for number in range(options.runs):
            start = time.perf_counter()
            for threads in map(int, options.threads.split(",")):
                wrong += run(ask, alone, threads, options.analyses)
            print(f"run {number + 1}: {time.perf_counter() - start:.0f} s", flush=True)
    for line in sorted(set(wrong)):
        print(f"{wrong.count(line)} x {line}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
