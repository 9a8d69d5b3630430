"""Files that graphmem writes: whole or not at all, and temporary folders that no signal leaves behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from graphmem.errors import UsageError

#: Writes in the place of :func:`write_whole`, where this process itself cannot change real files.
hand_over: Callable[[Path, bytes], None] | None = None


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


def _mode(target: Path) -> int:
    """The permissions of the file to be replaced, or those of any new file."""
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
