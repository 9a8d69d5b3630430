"""Mixed questions of many clients to ``graphmem web``: python benchmarks/web.py [--requests N] [--clients N]

Starts a server, asks it questions about an ONNX file, a model of the zoo and an engine, and holds every answer against
the JSON of the command. Prints how many answers differ, seconds at the middle and at the 99th of a hundred requests,
those of the questions that were new, and the server's resident memory before and after.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import helper

Question = tuple[str, dict[str, Any]]
CARDS = ("T4", "L4", "A100-80GB", "H100-80GB")


def model(folder: Path) -> Path:
    """A perceptron with a batch of any size."""
    weights = [onnx.numpy_helper.from_array(np.zeros((512, 512), np.float32), f"w{layer}") for layer in range(4)]
    names = ["x", *(f"h{layer}" for layer in range(3)), "y"]
    nodes = [helper.make_node("MatMul", [names[at], f"w{at}"], [names[at + 1]]) for at in range(4)]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 512]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", ends[:1], ends[1:], weights)
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def questions(file: str) -> list[Question]:
    """What clients ask, each question in turn."""
    asked: list[Question] = [
        ("analyze", {"model": file, "batch": batch, "gpu": card}) for batch in (1, 16, 256) for card in CARDS
    ]
    asked += [("fit", {"model": file, "gpu": card, "at_most": 4096}) for card in CARDS]
    asked += [("serve", {"model": "Llama-3.1-8B", "gpu": card, "advice": False}) for card in CARDS[2:]]
    return [*asked, ("analyze", {"model": "zoo:mlp", "gpu": "T4"})]


def command_of(question: Question, path: Path) -> list[str]:
    """The same on the command line."""
    command, values = question
    words = [sys.executable, "-m", "graphmem", command, str(path) if "file:" in values["model"] else values["model"]]
    for name, value in values.items():
        flag = name.replace("_", "-")
        if name != "model":
            words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return [*words, "--format", "json"]


def plain(answer: Any) -> Any:
    """An answer without the names of the model's file, which differ."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items() if key != "model"}
    return [plain(one) for one in answer] if isinstance(answer, list) else answer


def resident(process: int) -> float:
    """Mebibytes of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        path = model(Path(folder))
        words = [sys.executable, "-m", "graphmem", "web", "--port", str(port), "--a-minute", "1000000"]
        server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            return measured(f"http://127.0.0.1:{port}", server.pid, path, options)
        finally:
            server.terminate()
            server.wait()


def measured(address: str, server: int, path: Path, options: argparse.Namespace) -> int:
    """Ask, compare and print; 1 where an answer differs."""
    client = httpx.Client(base_url=address, timeout=600)
    while True:
        try:
            client.get("/healthz")
            break
        except httpx.TransportError:
            time.sleep(0.1)
    file = client.post("/v1/files", params={"name": path.name}, content=path.read_bytes()).json()["file"]
    asked = questions(file)
    truth = [json.loads(subprocess.run(command_of(one, path), stdout=subprocess.PIPE).stdout) for one in asked]
    before = resident(server)

    def ask(number: int) -> tuple[float, bool, bool]:
        command, values = asked[number % len(asked)]
        started = time.perf_counter()
        answer = client.post(f"/v1/{command}", params={"wait": 300}, json=values).json()
        return time.perf_counter() - started, plain(answer) == plain(truth[number % len(asked)]), number < len(asked)

    started = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        found = list(pool.map(ask, range(options.requests)))
    seconds = np.array([one[0] for one in found])
    new = seconds[[one[2] for one in found]]
    differ = sum(not one[1] for one in found)
    middle, late = np.percentile(seconds, [50, 99])
    rate = options.requests / (time.perf_counter() - started)
    print(f"{options.requests} requests of {options.clients} clients, {len(asked)} questions: {differ} answers differ")
    print(f"p50 {1000 * middle:.1f} ms, p99 {1000 * late:.0f} ms, {rate:.0f} requests a second")
    print(f"the {len(new)} that were new: p50 {np.median(new):.2f} s, most {new.max():.2f} s")
    print(f"server {before:.0f} MiB before, {resident(server):.0f} MiB after")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
