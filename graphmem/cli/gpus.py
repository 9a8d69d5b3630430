"""``graphmem gpus``: the cards graphmem knows, and where each figure comes from."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from graphmem.cli.output import check_output, emit
from graphmem.devices import DEFAULT_DEVICE, Device, Loads, all_devices, device_named
from graphmem.figures import Communicator, Figure
from graphmem.reports.tables import plain_table
from graphmem.units import format_bytes

SCHEMA = "graphmem.gpus/1"


@click.command("gpus", short_help="The known cards, each figure with its source.")
@click.argument("name", required=False)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="Default table.")
@click.option("-o", "--output", metavar="FILE", help="Write there (whole or not at all) instead of to stdout.")
def gpus_command(name: str | None, form: str, output: str | None) -> None:
    """List the known cards, or show one (NAME) with the source of each figure."""
    check_output(output)
    devices = all_devices() if name is None else (device_named(name),)
    if form == "json":
        document = {"schema": SCHEMA, "default": DEFAULT_DEVICE, "gpus": [asdict(device) for device in devices]}
        emit(json.dumps(document, indent=2) + "\n", output)
    else:
        emit(_card(devices[0]) if name is not None else _list(devices), output)


def _list(devices: tuple[Device, ...]) -> str:
    titles = ("name", "memory>", "context>", "capability>", "SMs>")
    rows = [
        (
            device.name,
            format_bytes(device.capacity_bytes) + ("~" if device.capacity_assumed else " "),
            format_bytes(device.context_bytes) + (" " if device.context_measured else "~"),
            _capability(device),
            str(device.sm_count or "-"),
        )
        for device in devices
    ]
    notes = (
        "memory: what the driver reports; context: what a PyTorch process holds outside its allocator; ~ not measured.",
        f"'graphmem gpus NAME' shows the sources. Without --gpu, {DEFAULT_DEVICE} is assumed.",
    )
    return "\n".join([plain_table(titles, rows), *notes]) + "\n"


def _card(device: Device) -> str:
    capability = _capability(device)
    threads = f"{device.sm_count} SMs of {device.max_threads_per_sm} threads" if device.sm_count else "not known"
    rows = (
        ("name", device.name),
        ("also called", ", ".join(device.aliases) or "-"),
        ("vendor", device.vendor),
        ("memory", f"{format_bytes(device.capacity_bytes)} ({device.capacity_bytes:,} B)"),
        ("  source", device.capacity_source),
        ("context", f"{format_bytes(device.context_bytes)}{'' if device.context_measured else ' (not measured)'}"),
        *((f"  {figure.name}", _interval(figure)) for figure in device.outside(_EVERYTHING)),
        ("driver's share", "not known" if device.driver_bytes is None else format_bytes(device.driver_bytes)),
        ("capability", capability),
        ("size", threads),
        ("shared with host", "yes" if device.unified_memory else "no"),
    )
    return "\n".join(f"{title:<30}{value}" for title, value in rows) + "\n"


#: What a convolutional network in two processes loads.
_EVERYTHING = Loads(cudnn=True, communicators=(Communicator(2),))


def _interval(figure: Figure) -> str:
    return (
        f"{format_bytes(figure.bytes)} ({format_bytes(figure.least_bytes)} to {format_bytes(figure.most_bytes)}); "
        f"{figure.source}"
    )


def _capability(device: Device) -> str:
    return ".".join(str(part) for part in device.compute_capability) if device.compute_capability else "-"
