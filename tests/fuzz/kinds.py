"""The kinds of input: what is damaged, and which command reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fuzz import mutate, samples
from tests.fuzz.judge import BEFORE, Case

Maker = Callable[[random.Random, Path], Case]


def _asked(rng: random.Random, folder: Path, arguments: list[str], **more: Any) -> Case:
    """The command, now and then with a file to write, over an older one or on a full disk."""
    case = Case(arguments, **more)
    if rng.random() < 0.2:
        case.output = folder / "out.json"
        case.arguments += ["--format", "json", "-o", str(case.output)]
        if rng.random() < 0.5:
            case.output.write_bytes(BEFORE)
        if rng.random() < 0.2:
            case.disk = rng.choice((0, 1, 100, 3000))
    return case


def _rarely(rng: random.Random) -> bool:
    return rng.random() < 0.02


def onnx(rng: random.Random, folder: Path) -> Case:
    """Bytes of ONNX files."""
    sound = rng.choice(samples.onnx_models())
    path = samples.write(folder / "model.onnx", mutate.data(rng, sound, *samples.onnx_models()))
    options = rng.choice(([], [], ["--runtime", "tensorflow"], ["--alloc-conf", "graph_optimization_level:disabled"]))
    return _asked(rng, folder, ["analyze", str(path), "-b", "2", *options])


def onnx_values(rng: random.Random, folder: Path) -> Case:
    """ONNX files whose numbers, names and attributes are others: protobuf is sound, the model is not."""
    import onnx as library

    model = library.ModelProto()
    model.ParseFromString(rng.choice(samples.onnx_models()))
    for _ in range(rng.choice((1, 1, 2, 3))):
        _disturb(rng, model)
    path = samples.write(folder / "model.onnx", model.SerializeToString())
    options = rng.choice(([], [], ["--runtime", "tensorflow"], ["--alloc-conf", "graph_optimization_level:disabled"]))
    return _asked(rng, folder, ["analyze", str(path), "-b", "2", *options])


def _disturb(rng: random.Random, model: object) -> None:
    """One field of the message, or of one inside it, is given another value."""
    message = model
    while True:
        fields = message.ListFields()  # type: ignore[attr-defined]
        if not fields:
            return
        field, value = rng.choice(fields)
        repeated = hasattr(value, "append") or hasattr(value, "add")
        if field.message_type is not None:
            if repeated:
                if not len(value) or rng.random() < 0.1:
                    del value[:]
                    return
                if rng.random() < 0.1:
                    value.add().CopyFrom(rng.choice(value))
                    return
                if rng.random() < 0.05:
                    del value[rng.randrange(len(value))]
                    return
                message = rng.choice(value)
            else:
                message = value
            continue
        new = _scalar(rng, value[0] if repeated and len(value) else value)
        try:
            if repeated:
                value[rng.randrange(len(value))] = new
                if rng.random() < 0.2:
                    value.extend([new] * rng.choice((1, 8, 300)))
            else:
                setattr(message, field.name, new)
        except (ValueError, TypeError, UnicodeEncodeError):
            return
        return


def _scalar(rng: random.Random, old: object) -> object:
    if isinstance(old, bytes):
        return mutate.data(rng, old) if rng.random() < 0.5 else rng.randbytes(rng.choice((0, 1, 8, 64)))
    if isinstance(old, str):
        names = ("x", "w", "y", "h", "s", "k", "Loop", "If", "Sum", "Expand", "Range", "MatMul", "own", "com.microsoft")
        return rng.choice(names) if rng.random() < 0.5 else mutate.text(rng, old)
    if isinstance(old, float):
        return rng.choice(mutate.FLOATS)
    return rng.choice(mutate.INTEGERS)


def onnx_external(rng: random.Random, folder: Path) -> Case:
    """ONNX files whose tensors lie elsewhere: in a file that is missing, short, a link, a folder, a pipe, outside."""
    model = samples.external_model()
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if rng.random() < 0.3:
                entry.value = _elsewhere(rng) if entry.key == "location" else _utf8(mutate.number(rng))
            if rng.random() < 0.03:
                entry.key = _utf8(mutate.text(rng, entry.key))
        if rng.random() < 0.1:
            tensor.dims[:] = [rng.choice((-1, 0, 2, 2**31, 2**62)) for _ in range(rng.randrange(4))]
    what = rng.randrange(7)
    target = folder / "weights.bin"
    if what == 1:
        target.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", "weights.bin", "nothing")))
    elif what == 2:
        target.mkdir()
    elif what == 3:
        os.mkfifo(target)
    elif what != 4:
        target.write_bytes(mutate.data(rng, samples.EXTERNAL_WEIGHTS))
    content = model.SerializeToString()
    path = samples.write(folder / "model.onnx", mutate.data(rng, content) if rng.random() < 0.3 else content)
    return _asked(rng, folder, ["analyze", str(path), "-b", "4"])


def _elsewhere(rng: random.Random) -> str:
    found = rng.choice(("../weights.bin", "/etc/passwd", "/dev/zero", "a/b", ".", "..", "weights.bin/x", *mutate.TEXTS))
    return _utf8(found)


def _utf8(text: str) -> str:
    """Without what protobuf and the file system refuse to write."""
    return text.encode("utf-8", "replace").decode()


def pt2(rng: random.Random, folder: Path) -> Case:
    """Exported programs: bytes of the archive, its files, values of its JSON."""
    sound = rng.choice(samples.programs())
    content = mutate.data(rng, sound) if rng.random() < 0.2 else _repacked(rng, sound)
    path = samples.write(folder / "model.pt2", content)
    return _asked(rng, folder, ["analyze", str(path), "--inference", *rng.choice(([], [], ["-b", "4"]))])


def _repacked(rng: random.Random, sound: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(sound)) as archive, zipfile.ZipFile(target, "w") as out:
        names = archive.namelist()
        likely = [name for name in names if name.endswith((".json", "version"))]
        chosen = rng.choice(likely if rng.random() < 0.85 else names)
        for name in names:
            content = archive.read(name)
            if name == chosen:
                what = rng.random()
                if what < 0.05:
                    continue
                if what < 0.75 and name.endswith(".json"):
                    content = mutate.document(rng, json.loads(content))
                elif what < 0.78:
                    content = mutate.deep(rng)
                else:
                    content = mutate.data(rng, content)
                if rng.random() < 0.03:
                    name = mutate.text(rng, name).encode("utf-8", "replace").decode().replace("\0", "") or "x"
            out.writestr(name, content, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    return target.getvalue()


def snapshot(rng: random.Random, folder: Path) -> Case:
    """Memory snapshots: bytes of the pickle, and values of what it holds."""
    import pickle

    if rng.random() < 0.5:
        content = mutate.data(rng, rng.choice(samples.snapshot_pickles()), *samples.snapshot_pickles())
    else:
        try:
            damaged = json.loads(mutate.document(rng, json.loads(json.dumps(samples.snapshot()))))
            for segment in damaged.get("segments", ()):
                if isinstance(segment, dict) and isinstance(segment.get("segment_pool_id"), list):
                    segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        except (ValueError, TypeError, RecursionError, AttributeError):
            damaged = rng.choice(([], {}, None, "text", {"segments": [], "device_traces": []}))
        content = pickle.dumps(damaged, protocol=rng.choice((2, 3, 4, 5)))
    path = samples.write(folder / "snapshot.pickle", content)
    options = ["--snapshot-device", mutate.number(rng)] if rng.random() < 0.05 else []
    return _asked(rng, folder, ["replay", str(path), *options])


def trace(rng: random.Random, folder: Path) -> Case:
    """Exported traces."""
    content = mutate.deep(rng) if rng.random() < 0.01 else mutate.document(rng, rng.choice(samples.traces()))
    path = samples.write(folder / "trace.json", content)
    options = rng.choice(
        ([], [], [], ["--runtime", "tensorflow"], ["--runtime", "mxnet"], ["--runtime", "onnxruntime"])
    )
    return _asked(rng, folder, ["replay", str(path), *options])


def report(rng: random.Random, folder: Path) -> Case:
    """Reports that are compared."""
    sound, damaged = folder / "before.json", folder / "after.json"
    sound.write_text(json.dumps(samples.report()))
    damaged.write_bytes(mutate.deep(rng) if rng.random() < 0.01 else mutate.document(rng, samples.report()))
    both = [str(sound), str(damaged)]
    rng.shuffle(both)
    options = ["--max-growth", mutate.number(rng)] if rng.random() < 0.1 else []
    return _asked(rng, folder, ["compare", *both, *options])


def devices(rng: random.Random, folder: Path) -> Case:
    """The user's table of cards."""
    content = mutate.deep(rng) if rng.random() < 0.01 else mutate.document(rng, samples.DEVICES)
    path = samples.write(folder / "devices.json", content)
    trace_file = folder / "trace.json"
    trace_file.write_text(json.dumps(samples.traces()[0]))
    name = rng.choice(("MyCard", "RTX-4090", "mine", "H100"))
    commands = (["gpus"], ["gpus", name], ["replay", str(trace_file), "--gpu", name], ["replay", str(trace_file)])
    command = rng.choice(commands)
    environment = {"GRAPHMEM_DEVICES": str(path)}
    return (
        _asked(rng, folder, command, environment=environment) if command[0] == "replay" else Case(command, environment)
    )


def hf(rng: random.Random, folder: Path) -> Case:
    """Configurations of Hugging Face models."""
    content = mutate.deep(rng) if rng.random() < 0.01 else mutate.document(rng, rng.choice(samples.HF_CONFIGS))
    path = samples.write(folder / "config.json", content)
    sizes = ["-b", "1", "--iterations", "1", *rng.choice(([], ["-s", "8"], ["-s", "8"]))]
    return _asked(rng, folder, ["analyze", f"hf:{path}", "--inference", *sizes])


def options(rng: random.Random, folder: Path) -> Case:
    """The allocators' options of every runtime."""
    runtime = rng.choice(tuple(samples.ALLOCATOR_OPTIONS))
    damaged = mutate.text(rng, rng.choice(samples.ALLOCATOR_OPTIONS[runtime]))
    if runtime == "onnxruntime" and rng.random() < 0.5:
        path = samples.write(folder / "model.onnx", samples.onnx_models()[0])
        arguments = ["analyze", str(path), "-b", "2", "--alloc-conf", damaged]
    else:
        path = folder / "trace.json"
        path.write_text(json.dumps(rng.choice(samples.traces())))
        arguments = ["replay", str(path), "--runtime", runtime, "--alloc-conf", damaged]
        if rng.random() < 0.2:
            arguments += ["--torch-version", mutate.text(rng, rng.choice(("2.13", "2.4", "2.9")))]
        if runtime == "tensorflow" and rng.random() < 0.3:
            arguments += ["--tf-option", mutate.text(rng, "allow_growth=true")]
    return _asked(rng, folder, [part.replace("\0", "") for part in arguments])


def records(rng: random.Random, folder: Path) -> Case:
    """Records of measurements, and the recorded allocations beside them."""
    (folder / "perceptron.onnx").write_bytes(samples.onnx_models()[0])
    lines = [json.dumps(record).encode() for record in samples.RECORDS]
    chosen = rng.randrange(len(lines))
    lines[chosen] = mutate.deep(rng) if rng.random() < 0.01 else mutate.document(rng, samples.RECORDS[chosen])
    path = samples.write(folder / "records.jsonl", b"\n".join(lines))
    output = folder / "report"
    return Case(
        ["accuracy", str(path), "-o", str(output), "--sections", "onnxruntime", "--jobs", "1"], drawn=_rarely(rng)
    )


def allocations(rng: random.Random, folder: Path) -> Case:
    """Recorded allocations beside TensorFlow's records."""
    events = [[0, 1024, samples.BASE], [1, 2048, samples.BASE + 1024], [0], [1]]
    document = {"schema": 1, "events": events}
    damaged = mutate.document(rng, document)
    content = mutate.data(rng, gzip.compress(damaged)) if rng.random() < 0.3 else gzip.compress(damaged)
    (folder / "run.json.gz").write_bytes(content)
    record = json.loads(json.dumps(samples.RECORDS[0]))
    record["case"] |= {"runtime": "tensorflow", "model": "keras:none", "alloc_conf": ""}
    record["machine"]["source"] = "tensorflow on the CPU"
    record["trace"] = "run.json.gz"
    path = samples.write(folder / "records.jsonl", json.dumps(record).encode())
    return Case(
        ["accuracy", str(path), "-o", str(folder / "report"), "--sections", "tensorflow", "--jobs", "1"],
        drawn=_rarely(rng),
    )


def numbers(rng: random.Random, folder: Path) -> Case:
    """Numbers and words of the command line."""
    model = samples.write(folder / "model.onnx", samples.onnx_models()[rng.randrange(2)])
    path = folder / "trace.json"
    path.write_text(json.dumps(samples.traces()[0]))
    analysed, replayed = ["analyze", str(model)], ["replay", str(path)]
    makers: tuple[Callable[[str], list[str]], ...] = (
        lambda n: [*analysed, "-b", n],
        lambda n: [*analysed, "--dim", f"batch={n}"],
        lambda n: [*analysed, "--input-shape", f"x:{n}x8"],
        lambda n: [*analysed, "--input-shape", mutate.text(rng, "x:2x8")],
        lambda n: [*analysed, "--shapes", mutate.text(rng, "batch=1;batch=16")],
        lambda n: [*analysed, "--shapes", f"batch=1;batch={n}"],
        lambda n: (
            [*analysed, "-b", "2", "--iterations", n] if len(n) > 4 or not n.isdigit() else [*analysed, "-b", "1"]
        ),
        lambda n: [*analysed, "-b", "2", "--top", n],
        lambda n: [*analysed, "-b", "2", "--budget", n],
        lambda n: [*analysed, "-b", "2", "--gpu-memory", f"{n}{rng.choice(('', 'GiB', 'KB', 'T', 'x'))}"],
        lambda n: [*analysed, "-b", "2", "--gpu", mutate.text(rng, "RTX-4090")],
        lambda n: [*analysed, "-b", "2", "--runtime", mutate.text(rng, "onnxruntime")],
        lambda n: [*analysed, "-b", "2", "--data-dependent", n],
        lambda n: [*analysed, "-b", "2", "-s", n],
        lambda n: [mutate.text(rng, "analyze"), str(model)],
        lambda n: ["analyze", mutate.text(rng, str(model.name))],
        lambda n: [
            "analyze",
            mutate.text(rng, rng.choice(("hf:gpt", "zoo:bert", "a.py:build", "math:sqrt", "keras:x"))),
        ],
        lambda n: ["fit", str(model), "--gpu", "T4", "--at-most", n],
        lambda n: ["fit", str(model), "--gpu", "T4", "--at-most", "64", "--multiple-of", n],
        lambda n: ["fit", str(model), "--gpu", "T4", "--at-most", "64", "--spare", n],
        lambda n: ["fit", str(model), "--gpu", "T4", "--at-most", "4", "--find", mutate.text(rng, "dim:batch")],
        lambda n: ["sweep", str(model), "--vary", f"batch=1,{n}"],
        lambda n: ["sweep", str(model), "--vary", mutate.text(rng, "batch=1,2")],
        lambda n: ["sweep", str(model), "-b", "2", "--vary", mutate.text(rng, "gpu=T4,A10G")],
        lambda n: [*replayed, "--top", n],
        lambda n: [*replayed, "--gpu-memory", n],
        lambda n: [*replayed, "--snapshot-device", n],
        lambda n: [*replayed, "--torch-version", n],
        lambda n: ["gpus", mutate.text(rng, "RTX 4090")],
        lambda n: ["zoo", mutate.text(rng, "list")],
        lambda n: ["compare", str(path), str(path), "--max-growth", n],
    )
    arguments = [part.replace("\0", "") for part in rng.choice(makers)(mutate.number(rng))]
    has_format = arguments[:1] in (["analyze"], ["replay"], ["fit"], ["sweep"])
    return _asked(rng, folder, arguments) if has_format else Case(arguments)


#: Every kind, and its share of a run of all of them.
def gguf(rng: random.Random, folder: Path) -> Case:
    """Headers of GGUF files: bytes, counts and lengths, values of the metadata, sizes and types of tensors."""
    from tests.support import gguf as made

    sound = samples.gguf_files()
    if rng.random() < 0.5:
        content = mutate.data(rng, rng.choice(sound), *sound)
    else:
        metadata, tensors = samples.gguf_parts()
        for _ in range(rng.choice((1, 1, 2))):
            key = rng.choice(list(metadata))
            metadata[key] = rng.choice((0, 1, 2**31, 2**32 - 1, True, 1.5, "x", "llama", "gemma3", [1], [0, -1], ["a"]))
        if rng.random() < 0.5:
            index = rng.randrange(len(tensors))
            shape = [rng.choice((0, 1, 31, 32, 2**31, 2**49, 2**63)) for _ in range(rng.randrange(1, 5))]
            name = rng.choice(("", "blk.0.x", "blk.99999.x", "output.weight", "token_embd.weight"))
            tensors[index] = (name, tensors[index][1], shape)
        content = made.header(metadata, tensors, rng.choice((2, 3, 3, 3)))
    name = rng.choice(("model.gguf", "model.gguf", "model-00001-of-00001.gguf", "model-00001-of-99999.gguf"))
    path = samples.write(folder / name, content)
    engine = rng.choice((["--engine", "llamacpp"], ["--engine", "llamacpp", "-ngl", "1", "-c", "4096"], []))
    return _asked(rng, folder, ["serve", str(path), "--gpu", "RTX-3090", *engine])


def load(rng: random.Random, folder: Path) -> Case:
    """CSV files of requests over time."""
    rows = [
        f"{rng.choice((index, 0.5, -3, 1e9))},{rng.choice((1, 900, 5000))},{rng.choice((1, 50))}" for index in range(6)
    ]
    head = rng.choice(("timestamp,prompt,output", "TIMESTAMP,ContextTokens,GeneratedTokens", "output,time,prompt"))
    content = mutate.data(rng, "\n".join((head, *rows)).encode())
    path = samples.write(folder / "load.csv", content)
    model = ["opt-125m", "--gpu", "A10G", "--enforce-eager", "--no-advice"]
    return _asked(rng, folder, ["serve", *model, "--trace", str(path)])


KINDS: Mapping[str, tuple[Maker, float]] = {
    "onnx": (onnx, 0.07),
    "onnx-values": (onnx_values, 0.07),
    "onnx-external": (onnx_external, 0.05),
    "pt2": (pt2, 0.02),
    "snapshot": (snapshot, 0.14),
    "trace": (trace, 0.14),
    "report": (report, 0.13),
    "devices": (devices, 0.10),
    "hf": (hf, 0.02),
    "options": (options, 0.12),
    "records": (records, 0.04),
    "allocations": (allocations, 0.05),
    "numbers": (numbers, 0.05),
    "gguf": (gguf, 0.05),
    "load": (load, 0.01),
}


def make(kind: str, seed: int, index: int, folder: Path) -> Case:
    """The case of that number; the same for the same three."""
    return KINDS[kind][0](random.Random(f"{seed}/{kind}/{index}"), folder)
