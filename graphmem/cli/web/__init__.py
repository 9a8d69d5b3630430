"""``graphmem web``: the answers as an HTTP service, and a page for a browser."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import click

from graphmem.base.options import Whole, option
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.errors import UsageError
from graphmem.units import parse_size


@dataclass(frozen=True)
class Served:
    """Where the service listens, and what it gives one question and one client."""

    host: str = option("127.0.0.1", "The address to listen at.", heading="Service")
    port: int = option(8642, "Its port.", Whole(0, 65535))
    workers: int = option(2, "Analyses at once, each a process.", Whole())
    seconds: int = option(300, "Seconds of an analysis.", Whole())
    memory_bytes: int = option(8 << 30, "Memory of an analysis. Default 8GiB.", flags="--memory", read=parse_size)
    upload_bytes: int = option(512 << 20, "Bytes of a file. Default 512MiB.", flags="--upload", read=parse_size)
    a_minute: int = option(120, "Requests of a client in a minute.", Whole())


@click.command("web", cls=GroupedCommand, short_help="An HTTP service and a page.")
@takes("served", Served)
def web_command(served: Served) -> None:
    """Answer over HTTP: POST /v1/analyze, fit, sweep, advise, serve, plan, replay, compare; a page for people at /,
    the reference of the interface at /docs.

    It takes names and data files alone, never code. Every analysis is a process of its own with limits, in an empty
    folder. Logs are lines of JSON on stderr; /healthz and /metrics are for those who watch it. Needs the extra 'web'.
    """
    try:
        import uvicorn

        from graphmem.cli.web.app import create_app
        from graphmem.cli.web.jobs import Limits
        from graphmem.cli.web.patience import Impatient
    except ImportError as error:
        raise UsageError(f"the service needs {error.name}; pip install 'graphmem[web]'") from None

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    limits = Limits(
        workers=served.workers,
        seconds=served.seconds,
        memory_bytes=served.memory_bytes,
        upload_bytes=served.upload_bytes,
    )
    app = create_app(limits, a_minute=served.a_minute)
    listening = _listening(served.host, served.port)
    click.echo(f"graphmem web: http://{served.host}:{served.port}", err=True)
    quiet: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": 10,
        "http": Impatient,
    }
    uvicorn.Server(uvicorn.Config(app, **quiet)).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises :class:`UsageError` with the system's reason where it may not."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]  # Python adds the address
        raise UsageError(f"cannot listen on {host}, port {port}: {why}; give another --port") from None
