"""What a shell completes beyond the names of commands and options: cards, optimizers, models, engines, formats.

eval "$(_GRAPHMEM_COMPLETE=bash_source graphmem)"      # in ~/.bashrc; zsh_source in ~/.zshrc
_GRAPHMEM_COMPLETE=fish_source graphmem | source       # in ~/.config/fish/completions/graphmem.fish
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from click.shell_completion import BashComplete, CompletionItem, split_arg_string

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
Names = Callable[[click.Context], Iterable[str]]


class Bash(BashComplete):
    """For bash a word ends at a colon too: what is written is read from the line, and what is completed is given
    without what stands before its last colon."""

    source_template = """
%(complete_func)s() {
    local kind name
    COMPREPLY=()
    while IFS=, read -r kind name; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            *) COMPREPLY+=("$name"); [[ $name != *: ]] || compopt -o nospace ;;
        esac
    done < <(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
             %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the cursor, and the one that is begun there."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)[1:]
        begun = words.pop() if words and not line[-1:].isspace() else ""
        return words, begun

    def format_completion(self, item: CompletionItem) -> str:
        """Its kind and what bash puts in place of the last word."""
        _, begun = self.get_completion_args()
        given = begun.rpartition(":")[0] + ":" if ":" in begun and ":" in os.environ["COMP_WORDBREAKS"] else ""
        return f"{item.type},{item.value.removeprefix(given)}"


def of(parameter: str) -> Completion | None:
    """The completion of an option's values; None of one whose values are not known."""
    return _beginning(_NAMES[parameter]) if parameter in _NAMES else None


def models(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Models of the zoo behind ``zoo:``, else the ways to name a model, and files."""
    if begun.startswith("zoo:"):
        return _beginning(_zoo)(context, parameter, begun)
    ways = (
        way for way in ("zoo:", "hf:", "timm:", "torchvision:", "keras:", "jax:") if begun and way.startswith(begun)
    )
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
