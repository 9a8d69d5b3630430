"""Files made to run code, to read other files or to fill the memory: every kind is opened beside an audit hook.

Each test writes hostile files and opens them in a process of its own, which notes everything that Python's audit hooks
report: processes, unpickled classes, imports of the attacker's module, compiled source of his, files opened.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import samples
from tests.support import hostile, platforms
from tests.support.hostile import Gotcha

pytest.importorskip("torch")

#: Run in the fresh process: opens every file named, and prints what each said and what was noted.
OPENER = """
import json, os, sys, tempfile
import click.testing, numpy, torch, onnx, onnxruntime, transformers
import graphmem
from graphmem.cli.main import cli

noted, watching = [], False
temporary = os.path.realpath(tempfile.gettempdir())
EVENTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
          "socket.connect", "socket.bind", "os.rename", "os.symlink", "os.link", "os.chmod")
TEXTS = ("compile", "import", "open", "os.mkdir", "os.remove", "shutil.rmtree")

def watch(event, arguments):
    if not watching:
        return
    text = repr(arguments)[:20000]
    inside = temporary in text
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    named = event in TEXTS and ("gotcha" in text or "SECRET" in text)
    if (event in EVENTS and not inside) or (writes and not inside) or named:
        noted.append(event + " " + text[:200])

sys.addaudithook(watch)
answers = {}
for name in json.load(sys.stdin):
    watching = True
    result = click.testing.CliRunner().invoke(cli, name)
    watching = False
    answers[" ".join(name)] = [result.exit_code, result.output[-3000:], noted[:]]
    noted.clear()
print(json.dumps(answers))
"""


def opened(folder: Path, commands: list[list[str]]) -> dict[str, Any]:
    """What every command said, and what was noted meanwhile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "PYTHONWARNINGS": "ignore"}
    temporary = folder / "temporary"
    temporary.mkdir()
    environment |= {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # what Python itself would keep of modules not yet compiled
    done = subprocess.run(
        [sys.executable, "-c", OPENER],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def repacked(content: bytes, change: Callable[[str, bytes], bytes | None], **added: bytes) -> bytes:
    """The archive with every file as ``change`` gives it, and more files under its root."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(target, "w") as out:
        root = archive.namelist()[0].split("/")[0]
        for name in archive.namelist():
            changed = change(name, archive.read(name))
            if changed is not None:
                out.writestr(name, changed)
        for name, data in added.items():
            out.writestr(f"{root}/{name}", data)
    return target.getvalue()


def program_with(**replaced: str) -> bytes:
    """An exported program of whose JSON some text is other text, written ``old=new`` as pairs of JSON strings."""

    def change(name: str, data: bytes) -> bytes:
        if name.endswith("models/model.json"):
            text = data.decode()
            for old, new in replaced.items():
                assert old in text, old
                text = text.replace(old, new)
            return text.encode()
        return data

    return repacked(samples.programs()[1], change)


def changed_program(change: Callable[[Any], None], which: int = 1) -> bytes:
    """An exported program whose document ``change`` was applied to."""

    def apply(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return repacked(samples.programs()[which], apply)


RUN = "__import__('os').mkdir('gotcha')"


def _set(*path: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


def _signature(document: Any) -> Any:
    return document["graph_module"]["module_call_graph"][0]["signature"]


def _size(document: Any, text: str) -> None:
    values = document["graph_module"]["graph"]["tensor_values"]
    sizes = next(meta["sizes"] for meta in values.values() if "as_expr" in meta["sizes"][0])
    sizes[0]["as_expr"]["expr_str"] = text


def _renamed(document: Any, new: str) -> Any:
    """Every mention of the node ``relu`` under another name."""
    return json.loads(json.dumps(document).replace('"relu"', json.dumps(new)))


def _rename(document: Any) -> None:
    renamed = _renamed(document, f"relu):\n    {RUN}\n    (x")
    document.clear()
    document.update(renamed)


def _spec(kind: str, context: str) -> str:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


_ENUM = json.dumps({"__enum__": True, "fqn": "gotcha_module:Kind", "name": "A"})
_NODE = ("graph_module", "graph", "nodes", 0)
_CALL = [{"name": "", "arg": {"as_string": "mkdir gotcha"}, "kind": 1}]


def hostile_programs(folder: Path) -> dict[str, bytes]:
    """Exported programs that run code when PyTorch's own loader opens them, or their module is called."""
    payload = pickle.dumps(Gotcha(folder))
    torch_payload = repacked(samples.programs()[0], lambda name, data: None, **{"data.pkl": payload, "version": b"3"})

    def pickled(ending: str) -> bytes:
        return repacked(samples.programs()[0], lambda name, data: torch_payload if name.endswith(ending) else data)

    def unpickled_weights(name: str, data: bytes) -> bytes:
        if name.endswith("weights_config.json"):
            return data.replace(b'"use_pickle": false', b'"use_pickle": true')
        return torch_payload if "/weights/weight_" in name else data

    def opaque(document: Any) -> None:
        specs = document["graph_module"]["signature"]["input_specs"]
        held = {"arg": {"name": "x", "class_fqn": "gotcha_module.Kind"}, "custom_obj_name": "o"}
        specs.append({"custom_obj": held})

    legacy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(samples.programs()[0])) as archive, zipfile.ZipFile(legacy, "w") as out:
        document = next(archive.read(name) for name in archive.namelist() if name.endswith("models/model.json"))
        out.writestr("version", "8.0")
        out.writestr("serialized_exported_program.json", document)
        for name in ("state_dict", "constants", "example_inputs"):
            out.writestr(f"serialized_{name}.pt", torch_payload)
    system = lambda d: (_set(*_NODE, "target", value="torch.os.system")(d), _set(*_NODE, "inputs", value=_CALL)(d))  # noqa: E731
    return {
        "sample inputs": pickled("data/sample_inputs/model.pt"),
        "weights": repacked(samples.programs()[0], unpickled_weights),
        "older layout": legacy.getvalue(),
        "size": changed_program(lambda d: _size(d, RUN)),
        "size behind a symbol": changed_program(lambda d: _size(d, f"Symbol('s0', integer=True) + {RUN}")),
        "size with an attribute": changed_program(lambda d: _size(d, "Max.__class__.__mro__")),
        "size with a power": changed_program(lambda d: _size(d, "9**9**9**9")),
        "range": changed_program(_set("range_constraints", RUN, value={"min_val": 2, "max_val": 3})),
        "guards": changed_program(_set("guards_code", value=[RUN])),
        "operator of a module": changed_program(lambda d: system(d) and None),
        "operator that loads": changed_program(_set(*_NODE, "target", value="torch.hub.load")),
        "operator of a file": changed_program(_set(*_NODE, "target", value="torch.ops.aten.from_file.default")),
        "operator of TorchScript": changed_program(_set(*_NODE, "target", value="torch.ops.aten.save.default")),
        "library": changed_program(_set(*_NODE, "target", value="torch.ops.load_library")),
        "name of a node": changed_program(_rename),
        "name of an argument": changed_program(lambda d: _signature(d).update(forward_arg_names=[f"x={RUN}"])),
        "name of a keyword": changed_program(
            lambda d: _signature(d).update(in_spec=_signature(d)["in_spec"].replace('\\"y\\"', f'\\"y={RUN}\\"')), 2
        ),
        "imported type": changed_program(lambda d: _signature(d).update(out_spec=_spec("gotcha_module.Kind", "null"))),
        "imported enum": changed_program(lambda d: _signature(d).update(out_spec=_spec("builtins.dict", _ENUM))),
        "imported factory": changed_program(
            lambda d: _signature(d).update(
                out_spec=_spec("collections.defaultdict", json.dumps(["gotcha_module", "Kind", ["a"]]))
            )
        ),
        "custom object": changed_program(opaque),
        "parameter": changed_program(
            lambda d: d["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
                parameter_name=f'a"), {RUN}, getattr(self, "b'
            )
        ),
        "compiled code": repacked(
            samples.programs()[0], lambda name, data: data, **{"data/aotinductor/model/gotcha.so": b"\x7fELF"}
        ),
    }


#: Those that are analysed nevertheless, since what is hostile in them is not looked at.
HARMLESS = ("sample inputs", "weights", "older layout", "guards")


def test_an_exported_program_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "gotcha_module.py").write_text("import os\nos.mkdir('gotcha')\nKind = dict\n")
    commands = {}
    for name, content in hostile_programs(tmp_path).items():
        path = tmp_path / f"{name.replace(' ', '-')}.pt2"
        path.write_bytes(content)
        commands[name] = ["analyze", str(path), "--inference"]
    answers = opened(tmp_path, list(commands.values()))
    for name, command in commands.items():
        code, said, noted = answers[" ".join(command)]
        assert not noted, (name, noted)
        assert code == (0 if name in HARMLESS else 1), (name, said)
        assert "bug in graphmem" not in said, (name, said)
    assert not (tmp_path / "gotcha").exists()


@pytest.mark.slow
def test_the_samples_are_hostile(tmp_path: Path) -> None:
    """What PyTorch's own loader does with one of them, which is why it is not used unless the file is trusted."""
    path = tmp_path / "sample.pt2"
    path.write_bytes(hostile_programs(tmp_path)["size"])
    code = f"import os; os.chdir({str(tmp_path)!r}); import torch; torch.export.load({str(path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False, timeout=300)
    assert (tmp_path / "gotcha").exists()


@platforms.LINKS
def test_other_files_run_nothing_and_read_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "gotcha_module.py").write_text("import os\nos.mkdir('gotcha')\nKind = dict\n")
    secret = tmp_path / "SECRET"
    secret.write_bytes(samples.EXTERNAL_WEIGHTS)
    commands = []
    for name, content in hostile.snapshots(tmp_path).items():
        commands.append(["replay", str(samples.write(tmp_path / name, content))])
    model = tmp_path / "model"
    model.mkdir()
    (model / "link.bin").symlink_to(secret)
    for name, content in hostile.models(("../SECRET", str(secret), "link.bin", "a/../../SECRET")).items():
        commands.append(["analyze", str(samples.write(model / name, content)), "-b", "4"])
    for name, content in hostile.configurations().items():
        commands.append(["analyze", f"hf:{samples.write(tmp_path / name, content)}", "--inference"])
    answers = opened(tmp_path, commands)
    for command in commands:
        _, said, noted = answers[" ".join(command)]
        own = [line for line in noted if not line.startswith(("open ", "import "))]
        others = [line for line in noted if line.startswith("open ") and "SECRET" in line]
        assert not own, (command, own)
        assert not others, (command, others)
        assert "bug in graphmem" not in said, (command, said)
    assert not (tmp_path / "gotcha").exists()


def test_a_small_archive_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    from graphmem.base.documents import read_gzipped_json
    from graphmem.errors import SourceError
    from graphmem.sources.pt2_archive import read_archive

    path = tmp_path / "bomb.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("m/models/model.json", "w") as file:
        for _ in range(80):
            file.write(b" " * (1 << 20))
    with pytest.raises(SourceError, match=r"bomb\.pt2: m/models/model\.json is larger than 64 MiB$"):
        read_archive(path)
    packed = tmp_path / "bomb.json.gz"
    with gzip.open(packed, "wb", 1) as stream:
        for _ in range(257):
            stream.write(b" " * (1 << 20))
    with pytest.raises(ValueError, match="more than 256 MiB"):
        read_gzipped_json(packed)


@pytest.mark.parametrize("shape", ["deep", "shared"])
def test_tuples_as_keys_of_a_snapshot_are_refused(shape: str) -> None:
    from graphmem.errors import TraceError
    from graphmem.sources.plain_pickle import load_plain_pickle

    count = 100_000 if shape == "deep" else 20_000
    nested = b"N" + (b"\x85" * count if shape == "deep" else b"\x94h\x00\x86"[0:1] + b"2" * 0)
    if shape == "shared":
        nested = b")" + b"".join(b"r" + index.to_bytes(4, "little") + b"j" + index.to_bytes(4, "little") + b"\x86"
                                 for index in range(count))  # fmt: skip
    with pytest.raises(TraceError, match="tuple as the key"):
        load_plain_pickle(b"\x80\x04}(" + nested + b"Nu.")


def test_weights_are_not_read(tmp_path: Path) -> None:
    import torch

    from graphmem.sources.exported_program import read_program

    path = tmp_path / "net.pt2"
    path.write_bytes(samples.programs()[0])
    program = read_program(path)
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"meta"}
    ours = {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in program.state_dict.items()}
    real = torch.export.load(path).state_dict
    assert ours == {name: (tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in real.items()}
    assert [tuple(value.shape) for value in program.example_inputs[0]] == [(2, 8)]
