"""What programs do to files, operation by operation; each in a folder of its own, and told as the program sees it.

Run as a program it carries out all of them below the working directory, and prints for each what it gave and how the
folder then looks: names, kinds, sizes, permissions, contents.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import pathlib
import shutil
import sqlite3
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

OPERATIONS: dict[str, Callable[[], Any]] = {}


def operation(function: Callable[[], Any]) -> Callable[[], Any]:
    OPERATIONS[function.__name__] = function
    return function


def prepare(folder: pathlib.Path) -> None:
    """The files that every operation finds."""
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "a.txt").write_text("alpha\n")
    (folder / "b.bin").write_bytes(bytes(range(256)) * 64)
    (folder / "read_only.txt").write_text("keep")
    (folder / "read_only.txt").chmod(0o444)
    (folder / "sub" / "c.txt").write_text("gamma")
    (folder / "sub" / "deep" / "d.txt").write_text("delta")
    (folder / "link").symlink_to("a.txt")
    (folder / "folder_link").symlink_to("sub")
    (folder / "dangling").symlink_to("nowhere")
    with contextlib.closing(sqlite3.connect(folder / "data.db")) as base:
        base.execute("create table t (x integer, y text)")
        base.executemany("insert into t values (?, ?)", [(i, str(i)) for i in range(100)])
        base.commit()


# --- writing ----------------------------------------------------------------------------------------------------------


@operation
def write_new() -> Any:
    with open("new.txt", "w") as file:
        file.write("new")
    return open("new.txt").read(), os.path.getsize("new.txt"), file.name


@operation
def overwrite() -> Any:
    with open("a.txt", "w") as file:
        file.write("other")
    return open("link").read()


@operation
def append() -> Any:
    with open("a.txt", "a") as file:
        file.write("more")
    return open("a.txt").read()


@operation
def update() -> Any:
    with open("b.bin", "r+b") as file:
        file.seek(100)
        file.write(b"changed")
    return hashlib.md5(open("b.bin", "rb").read()).hexdigest()


@operation
def exclusive() -> Any:
    with open("fresh.txt", "x") as file:
        file.write("x")
    open("a.txt", "x")


@operation
def through_link() -> Any:
    with open("folder_link/c.txt", "a") as file:
        file.write("+")
    with open("dangling", "w") as file:
        file.write("there")
    return open("sub/c.txt").read(), open("nowhere").read()


@operation
def write_missing_folder() -> Any:
    open("none/x.txt", "w")


@operation
def write_folder() -> Any:
    open("sub", "w")


@operation
def write_below_file() -> Any:
    open("a.txt/x", "w")


@operation
def path_write() -> Any:
    path = pathlib.Path("sub/p.bin")
    path.write_bytes(b"12345")
    pathlib.Path("a.txt").write_text("text")
    return path.stat().st_size, path.exists(), sorted(map(str, pathlib.Path(".").rglob("*.bin")))


@operation
def low_level() -> Any:
    descriptor = os.open("low", os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o640)
    os.write(descriptor, b"abc")
    os.close(descriptor)
    descriptor = os.open("a.txt", os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b"abc")
    os.close(descriptor)
    return oct(os.stat("low").st_mode)


@operation
def sparse() -> Any:
    with open("hollow", "wb") as file:
        file.truncate(1 << 33)
    os.rename("hollow", "sub/hollow")
    os.replace("sub", "moved")
    shutil.copyfile("a.txt", "copy")
    size = os.path.getsize("moved/hollow")
    os.remove("moved/hollow")
    return size


@operation
def truncate() -> Any:
    os.truncate("b.bin", 10)
    with open("a.txt", "r+") as file:
        file.truncate(2)
    return os.path.getsize("b.bin")


@operation
def mapped() -> Any:
    with open("b.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[0:4] = b"mmap"
        view.flush()
    return open("b.bin", "rb").read(6)


@operation
def atomic() -> Any:
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("atomic")
    os.replace(file.name, "a.txt")
    return open("a.txt").read(), os.path.exists(file.name)


@operation
def temporary() -> Any:
    with tempfile.NamedTemporaryFile("w", dir=".") as file:
        file.write("gone")
        file.flush()
        size = os.path.getsize(file.name)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        open(f"{folder}/x", "w").close()
        names = os.listdir(folder)
    with tempfile.TemporaryFile() as file:
        file.write(b"12")
    with tempfile.TemporaryDirectory() as elsewhere, open(f"{elsewhere}/y", "w") as file:
        file.write("y")
    return size, names, os.path.exists(elsewhere)


# --- names ------------------------------------------------------------------------------------------------------------


@operation
def remove() -> Any:
    os.remove("a.txt")
    os.unlink("link")
    pathlib.Path("sub/c.txt").unlink()
    return os.path.exists("a.txt"), os.listdir("sub"), os.path.lexists("link")


@operation
def remove_twice() -> Any:
    os.remove("a.txt")
    os.remove("a.txt")


@operation
def remove_folder() -> Any:
    os.remove("sub")


@operation
def remove_and_make() -> Any:
    os.remove("a.txt")
    with open("a.txt", "w") as file:
        file.write("again")
    shutil.rmtree("sub")
    os.mkdir("sub")
    return os.listdir("sub"), open("a.txt").read()


@operation
def rmdir_full() -> Any:
    os.rmdir("sub")


@operation
def rmdir_empty() -> Any:
    os.rmdir("empty")
    shutil.rmtree("sub/deep")
    os.remove("sub/c.txt")
    os.rmdir("sub")


@operation
def rmtree() -> Any:
    shutil.rmtree("sub")
    return os.path.isdir("sub"), os.path.exists("folder_link/c.txt")


@operation
def makedirs() -> Any:
    os.makedirs("x/y/z")
    os.makedirs("sub/deep", exist_ok=True)
    os.mkdir("sub/new", 0o750)
    os.removedirs("x/y/z")
    os.mkdir("sub")


@operation
def rename_file() -> Any:
    os.rename("a.txt", "sub/z.txt")
    os.rename("sub/z.txt", "a2.txt")
    return os.path.exists("link"), sorted(os.listdir("."))


@operation
def rename_folder() -> Any:
    os.rename("sub", "other")
    open("other/e.txt", "w").close()
    os.rename("other/deep", "empty")
    return sorted(os.listdir("other")), os.path.exists("folder_link")


@operation
def rename_over() -> Any:
    os.rename("a.txt", "b.bin")
    pathlib.Path("b.bin").rename("sub/c.txt")
    os.rename("sub", "empty")
    os.rename("empty", "data.db")


@operation
def rename_over_full() -> Any:
    os.rename("empty", "sub")


@operation
def rename_file_over_folder() -> Any:
    os.rename("a.txt", "empty")


@operation
def rename_into_itself() -> Any:
    os.rename("sub", "sub/deep/sub")


@operation
def rename_missing() -> Any:
    os.rename("none", "x")


@operation
def rotate() -> Any:
    for step in range(4):
        os.makedirs(f"ck-{step}")
        pathlib.Path(f"ck-{step}/w").write_text(str(step))
        for old in sorted(glob.glob("ck-*"))[:-2]:
            shutil.rmtree(old)
    os.replace("ck-3", "best")
    os.makedirs("ck-3")
    return sorted(glob.glob("**/*", recursive=True))


@operation
def move() -> Any:
    shutil.move("a.txt", "sub")
    shutil.move("sub", "empty")
    return sorted(os.listdir("empty/sub"))


@operation
def copy() -> Any:
    shutil.copy("a.txt", "sub/copied.txt")
    shutil.copy2("b.bin", "b2.bin")
    shutil.copytree("sub", "sub2")
    shutil.copytree("sub", "sub3", symlinks=True, copy_function=shutil.copyfile)
    return sorted(os.listdir("sub2"))


@operation
def links() -> Any:
    os.symlink("a.txt", "new_link")
    os.symlink("sub", "new_folder_link")
    os.link("a.txt", "hard")
    with open("hard", "a") as file:
        file.write("both")
    return (
        os.readlink("new_link"),
        os.listdir("new_folder_link/deep"),
        os.stat("hard").st_nlink,
    )


@operation
def link_circle() -> Any:
    os.symlink("one", "two")
    os.symlink("two", "one")
    open("one")


@operation
def up_and_down() -> Any:
    os.chdir("sub/deep")
    with open("../here.txt", "w") as file:
        file.write("up")
    os.mkdir("lower")
    os.chdir("lower")
    with open("low.txt", "w") as file:
        file.write("low")
    top = os.path.join("..", "..", "..")
    where = os.path.relpath(os.getcwd(), os.path.realpath(top))
    found = open(os.path.join(top, "folder_link", "..", "a.txt")).read()
    os.chdir(top)
    return where, found, os.path.exists("sub/deep/lower/low.txt")


@operation
def descriptors() -> Any:
    folder = os.open("sub", os.O_RDONLY)
    os.mkdir("made", dir_fd=folder)
    os.close(os.open("inside", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.unlink("c.txt", dir_fd=folder)
    names = sorted(os.listdir(folder)), sorted(entry.name for entry in os.scandir(folder))
    os.close(folder)
    return names, sorted((one[0], sorted(one[1]), sorted(one[2])) for one in os.fwalk("sub"))


# --- attributes -------------------------------------------------------------------------------------------------------


@operation
def attributes() -> Any:
    os.chmod("a.txt", 0o600)
    os.utime("b.bin", (1e9, 1e9))
    os.chmod("sub", 0o755)
    os.utime("link", (5, 5), follow_symlinks=False)
    pathlib.Path("touched").touch()
    pathlib.Path("a.txt").touch()
    return oct(os.stat("a.txt").st_mode), os.path.getmtime("b.bin"), os.lstat("link").st_mtime


@operation
def ask() -> Any:
    os.remove("a.txt")
    return (
        os.access("a.txt", os.F_OK), os.access("b.bin", os.R_OK | os.W_OK), os.path.isdir("folder_link"),
        os.path.islink("link"), os.path.exists("link"), os.path.lexists("link"), stat.S_ISDIR(os.lstat("sub").st_mode),
    )  # fmt: skip


@operation
def missing() -> Any:
    os.stat("sub/none")


@operation
def walk() -> Any:
    os.mkdir("sub/made")
    os.remove("sub/deep/d.txt")
    found = [(place, sorted(folders), sorted(files)) for place, folders, files in os.walk(".")]
    entries = sorted((e.name, e.is_dir(), e.is_file(), e.is_symlink(), e.path) for e in os.scandir("."))
    return sorted(found), entries, sorted(map(str, pathlib.Path("sub").iterdir())), os.listdir(b"empty")


# --- libraries --------------------------------------------------------------------------------------------------------


@operation
def database() -> Any:
    with contextlib.closing(sqlite3.connect("data.db")) as base:
        base.execute("update t set y = 'changed' where x < 10")
        base.execute("delete from t where x > 50")
        base.commit()
    with contextlib.closing(sqlite3.connect("new.db")) as base:
        base.execute("create table n (x)")
        base.commit()
    with contextlib.closing(sqlite3.connect("file:data.db?mode=ro", uri=True)) as base:
        return base.execute("select count(*), max(y) from t").fetchall()


@operation
def archives() -> Any:
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.write("a.txt")
        archive.writestr("more/x", "x")
    with zipfile.ZipFile("a.zip") as archive:
        archive.extractall("unzipped")
    with tarfile.open("t.tar.gz", "w:gz") as archive:
        archive.add("sub")
    with tarfile.open("t.tar.gz") as archive:
        archive.extractall("untarred")
    shutil.make_archive("made", "zip", "sub")
    return sorted(glob.glob("un*/**", recursive=True))


@operation
def arrays() -> Any:
    import numpy as np

    np.save("x.npy", np.arange(10))
    np.savez("x.npz", a=np.ones(3))
    view = np.memmap("b.bin", dtype=np.uint8, mode="r+", shape=(16,))
    view[:] = 7
    view.flush()
    made = np.memmap("m.dat", dtype=np.float32, mode="w+", shape=(4, 4))
    made[1] = 2
    made.flush()
    np.arange(5).tofile("raw")
    return (
        np.load("x.npy").tolist(),
        np.load("x.npz")["a"].tolist(),
        np.fromfile("raw", dtype=int).tolist(),
        open("b.bin", "rb").read(3),
    )


@operation
def hdf5() -> Any:
    try:
        h5py: Any = import_module("h5py")
    except ImportError:
        return None
    with h5py.File("x.h5", "w") as file:
        file["a"] = [1, 2, 3]
    with h5py.File("x.h5", "a") as file:
        file["b"] = 1
    with h5py.File("x.h5", "r") as file:
        found = list(file), file["a"][:].tolist()
    os.remove("x.h5")
    return found


@operation
def vocabularies() -> Any:
    try:
        models: Any = import_module("tokenizers.models")
    except ImportError:
        return None
    vocab, merges, words, table = "vocab.json", "merges.txt", "words.txt", "table.json"
    models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]).save(".")
    pathlib.Path(words).write_text("[UNK]\nword")
    pathlib.Path(table).write_text('{"<unk>": 0, "c": 1}')
    read = models.BPE.read_file(vocab, merges)[0], models.WordPiece.read_file(words), models.WordLevel.read_file(table)
    made = (
        models.BPE(vocab, merges), models.BPE.from_file(vocab=vocab, merges=merges),
        models.WordPiece(words), models.WordPiece(vocab=words), models.WordPiece.from_file(words),
        models.WordLevel(table, "<unk>"), models.WordLevel.from_file(table, "<unk>"),
    )  # fmt: skip
    for name in (vocab, merges, words, table):
        os.remove(name)
    return list(map(sorted, read)), [type(one).__name__ for one in made], models.WordPiece({"[UNK]": 0}).id_to_token(0)


@operation
def imports() -> Any:
    pathlib.Path("written_module.py").write_text("VALUE = 5\n")
    sys.path.insert(0, os.getcwd())
    try:
        return import_module("written_module").VALUE
    finally:
        sys.path.pop(0)
        sys.modules.pop("written_module", None)
        shutil.rmtree("__pycache__", ignore_errors=True)


@operation
def workers() -> Any:
    import multiprocessing

    found = []
    for method in ("fork", "spawn"):
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=_work, args=(method,))
        process.start()
        process.join()
        found.append((process.exitcode, open(f"{method}.txt").read()))
    return found


def _work(name: str) -> None:
    with open(f"{name}.txt", "w") as file:
        file.write(name)


# --- told -------------------------------------------------------------------------------------------------------------


def look(folder: str) -> dict[str, Any]:
    """A folder as a program sees it."""
    found: dict[str, Any] = {}
    for place, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = os.path.join(place, name)
            status = os.lstat(path)
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and not name.endswith((".zip", ".gz", ".npz", ".db")):
                with open(path, "rb") as file:
                    content = hashlib.md5(file.read()).hexdigest()
            # Kinds, and permissions of files; folders may show more to their owner.
            mode = oct(status.st_mode) if not stat.S_ISDIR(status.st_mode) else "folder"
            found[os.path.relpath(path, folder)] = (mode, content)
    return dict(sorted(found.items()))


def main() -> None:
    top = os.getcwd()
    for name, carry_out in OPERATIONS.items():
        os.chdir(os.path.join(top, name))
        try:
            result = repr(carry_out())
        except Exception as error:
            parts = [type(error).__name__, getattr(error, "errno", None), getattr(error, "filename", None)]
            result = " ".join(map(str, parts))
        os.chdir(top)
        result = result.replace(top, "TOP")
        print(json.dumps([name, result, look(name)]), flush=True)


if __name__ == "__main__":
    main()
