"""Options that are given twice, of which click would take the last one and say nothing."""

from __future__ import annotations

from collections import Counter

import click

#: Options of which people try several values.
_VARIED = ("--gpu", "--batch", "--seq-len", "--dtype", "--amp", "--optimizer")


def check(context: click.Context, words: list[str]) -> None:
    """Raise :class:`click.UsageError` where the words give an option of one value more than once, or a switch both
    ways. What is wrong with them otherwise, their command says."""
    try:
        _, _, order = context.command.make_parser(context).parse_args(list(words))
    except click.UsageError:
        return
    for option, count in Counter(order).items():
        if count > 1 and isinstance(option, click.Option) and not option.multiple and not option.count:
            _check_option(option, context, words)


def _check_option(option: click.Option, context: click.Context, words: list[str]) -> None:
    ways = [next((flag for flag in flags if flag in words), "") for flags in (option.opts, option.secondary_opts)]
    if option.is_flag and all(ways):
        raise click.UsageError(f"{ways[0]} and {ways[1]} are both given; give one of them", context)
    if not option.is_flag:
        flag = next(one for one in option.opts if one.startswith("--"))
        varied = context.info_name == "analyze" and flag in _VARIED
        hint = f" (graphmem sweep --vary {flag[2:]}=V1,V2 tries several)"
        raise click.UsageError(f"{flag} is given more than once; give it once{hint * varied}", context)
