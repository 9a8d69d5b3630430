"""What a shell completes beyond the names of commands and options: cards, optimizers, models, engines, formats.

eval "$(_GRAPHMEM_COMPLETE=bash_source graphmem)"      # in ~/.bashrc; zsh_source in ~/.zshrc
_GRAPHMEM_COMPLETE=fish_source graphmem | source       # in ~/.config/fish/completions/graphmem.fish
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Names = Callable[[click.Context], Iterable[str]]


def of(parameter: str) -> Completion | None:
    """The completion of an option's values; None of one whose values are not known."""
    return _beginning(_NAMES[parameter]) if parameter in _NAMES else None


def models(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Models of the zoo behind ``zoo:``, else the ways to name a model, and files."""
    if begun.startswith("zoo:"):
        return _beginning(_zoo)(context, parameter, begun)
    ways = (way for way in ("zoo:", "hf:", "timm:", "torchvision:", "keras:") if begun and way.startswith(begun))
    return [*map(CompletionItem, ways), CompletionItem(begun, "file")]


def _beginning(names: Names) -> Completion:
    """Those of the names that begin as what is written."""
    return lambda context, _, begun: [
        CompletionItem(one) for one in names(context) if one.lower().startswith(begun.lower())
    ]


def _zoo(_: click.Context) -> Iterable[str]:
    from graphmem.sources.zoo import zoo_entries

    return (f"zoo:{entry.name}" for entry in zoo_entries())


def _cards(_: click.Context) -> Iterable[str]:
    from graphmem.devices import all_devices

    return (device.name for device in all_devices())


def _optimizers(_: click.Context) -> Iterable[str]:
    from graphmem.training.optimizers import OPTIMIZERS

    return OPTIMIZERS


def _runtimes(_: click.Context) -> Iterable[str]:
    from graphmem.runtimes import built_in

    return built_in()


def _engines(context: click.Context) -> Iterable[str]:
    """Of ``serve`` those that serve, of ``sweep`` those that run many analyses."""
    if context.info_name == "serve":
        from graphmem.serving import engine_names

        return engine_names()
    from graphmem.workers.crew import ENGINES

    return ENGINES.names()


def _formats(context: click.Context) -> Iterable[str]:
    from graphmem.exports import EXPORTS
    from graphmem.reports import FORMATS

    return (EXPORTS if context.command.name == "export" else FORMATS).names()


_NAMES: dict[str, Names] = {
    "gpu": _cards,
    "gpu_like": _cards,
    "optimizer": _optimizers,
    "runtime": _runtimes,
    "engine": _engines,
    "format": _formats,
}
