"""Saves, moves, copies, deletes and loads in every way, and prints all that can be known of the files."""

import copy
import glob
import gzip
import hashlib
import io
import os
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import nn

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(8, 300)).sum().backward()
optimizer.step()


def checkpoint():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "rng": torch.get_rng_state()}


def tell(*names):
    for name in names:
        print(name, os.path.getsize(name))


# a path, an open file, a buffer, a temporary file
torch.save(checkpoint(), "a.pt")
with open("b.pt", "wb") as f:
    torch.save(checkpoint(), f)
buffer = io.BytesIO()
torch.save(checkpoint(), buffer)
Path("c.pt").write_bytes(buffer.getvalue())
with tempfile.NamedTemporaryFile(dir=".", delete=False) as f:
    torch.save(checkpoint(), f)
os.chmod(f.name, 0o644)
os.replace(f.name, "d.pt")
torch.save(checkpoint(), "e.tmp")
os.rename("e.tmp", "e.pt")
torch.save(checkpoint(), Path("f.pt"), _use_new_zipfile_serialization=False)
with open("g.pkl", "wb") as f:
    pickle.dump(model.state_dict(), f)
with gzip.open("h.pt.gz", "wb") as f:
    torch.save(checkpoint(), f)
with zipfile.ZipFile("i.zip", "w") as z, z.open("inner.pt", "w") as f:
    torch.save(checkpoint(), f)
torch.save(model, "j.pt")
tell("a.pt", "b.pt", "c.pt", "d.pt", "e.pt", "f.pt", "g.pkl", "i.zip", "j.pt")
# the file system
os.makedirs("runs/old")
shutil.copy("a.pt", "runs/k.pt")
shutil.copy2("a.pt", "runs/old")
shutil.copytree("runs", "again")
shutil.move("runs/k.pt", "runs/l.pt")
os.link("a.pt", "m.pt")
os.symlink("a.pt", "n.pt")
print(
    sorted(glob.glob("**/*.pt", recursive=True)),
    sorted(e.name for e in os.scandir(".")),
    sorted(p.name for p in Path("again").iterdir()),
)
print([(d, sorted(n)) for d, _, n in sorted(os.walk("runs"))], Path("n.pt").stat().st_size, os.stat("m.pt").st_nlink)
print(
    hashlib.sha256(Path("a.pt").read_bytes()).digest() == hashlib.sha256(Path("runs/l.pt").read_bytes()).digest(),
    zipfile.is_zipfile("a.pt"),
    zipfile.ZipFile("b.pt").testzip(),
)
# back
for name in (
    "a.pt",
    "b.pt",
    "c.pt",
    "d.pt",
    "e.pt",
    "f.pt",
    "n.pt",
    "m.pt",
    "again/l.pt" if os.path.exists("again/l.pt") else "again/k.pt",
):
    for options in (
        {},
        {"map_location": "cpu"},
        {"weights_only": False},
        {"mmap": True},
        {"map_location": lambda storage, location: storage},
        {"map_location": {"cuda:0": "cpu"}},
    ):
        if name == "f.pt" and "mmap" in options:
            continue
        loaded = torch.load(name, **options)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        torch.set_rng_state(loaded["rng"])
    print(
        name,
        loaded["epoch"],
        {k: (tuple(v.shape), v.dtype, v.device.type) for k, v in loaded["model"].items()},
        loaded["model"]["1.num_batches_tracked"].item(),
        optimizer.state_dict()["state"][0]["step"].item(),
    )
with open("a.pt", "rb") as f:
    print(sorted(torch.load(f)))
print(sorted(torch.load(io.BytesIO(Path("c.pt").read_bytes()))))
with gzip.open("h.pt.gz", "rb") as f:
    print(sorted(torch.load(f)))
with zipfile.ZipFile("i.zip") as z:
    print(sorted(torch.load(io.BytesIO(z.read("inner.pt")))))
with open("g.pkl", "rb") as f:
    print([tuple(v.shape) for v in pickle.load(f).values()])
print(
    type(torch.load("j.pt", weights_only=False)[1]).__name__,
    len(pickle.dumps(model.state_dict())),
    len(copy.deepcopy(model.state_dict())),
)
other = nn.Sequential(nn.Linear(300, 200), nn.BatchNorm1d(200), nn.Linear(200, 5))
print(other.load_state_dict(torch.load("a.pt")["model"], assign=True))
for bad in (
    lambda: torch.load("j.pt"),
    lambda: torch.load("f.pt", mmap=True),
    lambda: torch.load("absent.pt"),
    lambda: torch.save(1, "no/such.pt"),
    lambda: torch.load(io.BytesIO(b"nothing")),
    lambda: torch.save({}, 3),
    lambda: torch.save(lambda: 1, "bad.pt"),
):
    try:
        bad()
    except Exception as e:
        print(type(e).__name__, str(e).split("0x")[0])
cut = Path("a.pt").read_bytes()[:-100]
Path("cut.pt").write_bytes(cut)
try:
    torch.load("cut.pt")
except Exception as e:
    print(type(e).__name__, str(e))
os.remove("a.pt")
Path("b.pt").unlink()
shutil.rmtree("again")
print(sorted(os.listdir(".")))
