"""Commands that accept the fields of a configuration besides their own options."""

from __future__ import annotations

import difflib
from typing import Any

import click

from suite.commands.ending import Wrong


class WithFields(click.Command):
    """Command that accepts the fields of a configuration besides its own options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": {"ignore_unknown_options": True}, **kwargs})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. If an option is missing, the message names the word that is a misspelling of it."""
        words = [word.partition("=")[0] for word in args if word.startswith("--")]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            options = error.param.opts if isinstance(error.param, click.Option) else []
            for option in options:
                for word in difflib.get_close_matches(option, words, n=1, cutoff=0.8):
                    raise Wrong(f"no such option: {word}; did you mean {option}?") from None
            raise
