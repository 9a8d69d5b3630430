"""Files that graphmem writes: whole or not at all, and temporary folders that no signal leaves behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from graphmem.base.environment import changed
from graphmem.errors import UsageError

#: Writes in the place of :func:`write_whole`, where this process itself cannot change real files.
hand_over: Callable[[Path, bytes], None] | None = None
_COMPILER_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write through a temporary file beside ``path``, so that no reader ever sees half. Raises :class:`UsageError`."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    if hand_over is not None:
        hand_over(path, data)
        return
    try:
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_bytes(data)
            return
        target = path.resolve()
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, _mode(target))
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


@contextlib.contextmanager
def without_compiler_folder() -> Iterator[None]:
    """PyTorch makes a folder for its compiler in ``TMPDIR``, and names it in the environment, as soon as something
    imports ``torch._dynamo`` (``cache_dir``, torch/_inductor/runtime/cache_dir_utils.py of 2.13). Afterwards the
    variable is as it was, and the folder is gone where nobody put anything into it."""
    before = os.environ.get(_COMPILER_FOLDER)
    try:
        yield
    finally:
        made = os.environ.get(_COMPILER_FOLDER)
        if before is None and made is not None:
            del os.environ[_COMPILER_FOLDER]
            with contextlib.suppress(OSError):
                os.rmdir(made)


@contextlib.contextmanager
def own_compiler_folder() -> Iterator[None]:
    """A context in which the compiler's files go to a folder that is removed."""
    temporary = tempfile.TemporaryDirectory(prefix="graphmem-", ignore_cleanup_errors=True)
    with temporary as folder, changed({_COMPILER_FOLDER: folder}):
        yield


def _mode(target: Path) -> int:
    """The permissions of the file to be replaced, or those of any new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
