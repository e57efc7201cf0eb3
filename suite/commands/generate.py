"""The command `perfsuite generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line
from suite.naming import shown, typed
from suite.panics import no_panic
from suite.terminal import silence, tell

TRAINER = "eigenstate_lm"


@click.command()
@click.argument("checkpoint", type=NamedPath())
@click.option("--prompt", default="", metavar="TEXT", help="What the text begins with.  [default: nothing]")
@click.option("--tokens", type=int, default=200, show_default=True, metavar="N", help="At most so many are drawn.")
@click.option(
    "--temperature",
    type=float,
    default=0.8,
    show_default=True,
    metavar="T",
    help="Higher is more varied; 0 takes the most likely token.",
)
@click.option(
    "--top-k", type=int, default=50, show_default=True, metavar="K", help="Draw of the K most likely tokens; 0 of all."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option("--last", is_flag=True, help="Take the last weights, and not those of the least held-out loss.")
@click.option("--past-end", is_flag=True, help="Go on with another text where one ends.")
@click.option("--device", help="cpu, cuda or cuda:1.  [default: the GPU, if any]")
def generate(
    checkpoint: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    last: bool,
    past_end: bool,
    device: str | None,
) -> None:
    """Write text with a network that eigenstate_lm has trained.

    CHECKPOINT is one of its files, or the folder of a run, whose latest checkpoint is used. If sequences were held out,
    the best weights are used.

    The prompt and the text are written to stdout as the tokens are drawn. The text ends after --tokens, or where the
    network ends it. Memory use does not grow with the length of the text.
    """
    with in_one_line("interrupted", "free some, or name another --device"):
        _generate(checkpoint, prompt, tokens, temperature, top_k, seed, last, past_end, device)


def _generate(
    checkpoint: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    use_last: bool,
    past_end: bool,
    device: str | None,
) -> None:
    import torch

    from suite.commands.train import device_called
    from suite.eigenstate_lm.generation import Characters, Options, Reader, generated

    options = Options(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, past_end=past_end)
    prompt = typed(prompt)
    there = device_called(device)
    weights, tokenizer = loaded(checkpoint, best=not use_last)
    given = encoded(tokenizer, prompt)
    reader = Reader({name: weight.to(there, torch.float32) for name, weight in weights.items()})
    characters = Characters(tokenizer, given)
    count, first, last = 0, 0.0, 0.0
    begun = time.perf_counter()
    try:
        show(prompt)
        for token in generated(reader, given, options):
            count, last = count + 1, time.perf_counter() - begun
            first = first or last
            show(characters.of(token))
        show(characters.rest())
        show("\n")
    except BrokenPipeError:  # the reader has closed the pipe
        silence(err=False)
        return
    except OSError as error:
        silence(err=False)
        raise PerfsuiteError(f"cannot write the text: {error.strerror or error}; send it elsewhere") from None
    except BaseException:
        with suppress(OSError):
            show("\n")
        raise
    tell(summary(len(given), count, first, last), err=True)


def loaded(checkpoint: str, *, best: bool = True) -> tuple[Mapping[str, Any], Any]:
    """Return (weights, tokenizer) of a checkpoint file, or of the latest one in a folder.

    best  return the weights of the least held-out loss, if the checkpoint has any

    PerfsuiteError if either is missing or damaged, or the two do not fit together.
    """
    from suite import text
    from suite.eigenstate_lm.generation import sizes_of
    from suite.eigenstate_lm.held_out import best_of
    from suite.finding import checkpoint_of

    path, found = checkpoint_of(checkpoint, TRAINER)
    weights, content = found.trainer.get("weights"), found.trainer.get("tokenizer")
    if best:
        weights, _ = best_of(found.trainer)
    if not isinstance(weights, Mapping) or not isinstance(content, str):
        raise PerfsuiteError(f"{shown(path)} is damaged: it lacks weights or a tokenizer; name another")
    try:
        sizes = sizes_of(weights)
    except PerfsuiteError as error:
        raise PerfsuiteError(f"{shown(path)} is damaged: {error}; name another") from None
    if not content:
        raise PerfsuiteError(f"{shown(path)} was trained on random tokens, which no text belongs to; train on text")
    tokenizers = text.library()
    try:
        with no_panic():
            tokenizer = tokenizers.Tokenizer.from_str(content)
            tokenizer.no_padding()
            tokenizer.no_truncation()
    except Exception as error:  # the library raises bare Exception
        raise PerfsuiteError(
            f"{shown(path)} is damaged: its tokenizer is none ({str(error)[:200]}); name another"
        ) from None
    count = tokenizer.get_vocab_size()
    if count != sizes.vocabulary:
        raise PerfsuiteError(
            f"{shown(path)} is damaged: its tokenizer has {count} tokens, its network {sizes.vocabulary}; name another"
        )
    if max(tokenizer.get_vocab().values()) >= count:
        raise PerfsuiteError(f"{shown(path)} is damaged: its tokenizer has a token beyond its last one; name another")
    if tokenizer.token_to_id(text.END) != text.END_ID:
        raise PerfsuiteError(
            f"{shown(path)}: its tokenizer has no token {text.END} of number {text.END_ID}, by which texts end; "
            "train on text of `perfsuite data pack`"
        )
    return weights, tokenizer


def encoded(tokenizer: Any, prompt: str) -> list[int]:
    """Return the prompt's tokens after an end token, as at the beginning of a text; PerfsuiteError if this fails."""
    from suite import text

    try:
        with no_panic():
            (tokens,) = text.encode(tokenizer, [prompt])
    except Exception as error:  # TypeError if it is not UTF-8; the library raises bare Exception
        reason = "it is not UTF-8" if isinstance(error, TypeError) else error
        raise PerfsuiteError(f"--prompt: the tokenizer cannot encode it: {reason}; give other text") from None
    return [text.END_ID, *tokens[:-1]]


def show(text: str) -> None:
    """Write to stdout at once; characters that it cannot encode become question marks."""
    if sys.stdout is None:  # closed
        return
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def summary(prompt: int, count: int, first: float, last: float) -> str:
    """Return a one-line summary of the generation.

    prompt, count  number of tokens that were read, and drawn
    first, last    seconds from the start until the first and the last token were drawn
    """
    from suite.runtime.display import quantity

    if not count:
        return f"{prompt} tokens read; the text ended at once"
    rate = f" ({quantity((count - 1) / (last - first))} tokens/s)" if last > first else ""
    return f"{prompt} tokens read and the first drawn in {first:.3g} s; {count - 1} more in {last - first:.3g} s{rate}"
