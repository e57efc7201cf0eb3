"""The data of ups: the latents and fields of both tasks, and the assignment of examples to micro-batches.

The seed and the number of a micro-batch determine its examples, query points and drop-path multipliers. Every trainer,
process and resumed run therefore builds the same micro-batches.

Source: ups, technique 002 (data)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from suite.batching import WORD, mixed, permutation, word_of
from suite.building import digest_of
from suite.configuration import ConfigurationError, need
from suite.stepping import NumberedSteps
from suite.ups.advection import FRAMES
from suite.ups.latents import Latents, latents_of
from suite.ups.losses import boundary_tokens, query_indices
from suite.ups.model import drop_path_rates, drop_path_scales
from suite.ups.recipe import TASKS
from suite.ups.task_fields import TaskFields, from_file, synthetic, token_grid

if TYPE_CHECKING:
    from suite.ups.config import TrainConfig

PATTERNS = {"advection1d": "*Advection*.hdf5", "darcy2d": "*DarcyFlow*.hdf5"}
"""Task → glob pattern that matches the names of PDEBench's files."""
LARGEST_DENOMINATOR = 1000
"""Maximum denominator of the fraction that `advection_share` is rounded to."""
CODED_STREAM = -2000
"""Random stream of a micro-batch that selects the latents for the inverse losses."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The fields of a configuration that describe the data."""

    data: str | None = None
    """Folder with a PDEBench file for one task or for each; null: use the named files, or fields made in memory."""
    advection: str | None = None
    """Data file for advection1d."""
    darcy: str | None = None
    """Data file for darcy2d."""
    latents: str | None = None
    """Folder of the latent cache; null: the folder of each data file."""
    validation: float = 0.1
    """Fraction of the samples used for validation."""
    advection_share: float = 0.5
    """Fraction of a batch that is advection, if both tasks are trained."""
    synthetic: int = 16
    """Samples per task that are made in memory if no file is named."""
    synthetic_frames: int = 11
    """Frames of each advection sample that is made in memory; a sample has at most 201."""
    steps: int | None = None
    """Total number of training steps; null: `epochs` determines it."""
    epochs: int = 40
    """Passes over the training examples. It has no effect if `steps` is set."""
    batch_size: int = 8
    accumulation: int = 3
    tokens: int = 128
    latent_width: int = 128
    seed: int = 0
    """Seed for the splits, the frozen encoders, the order of the examples and the samples made in memory."""

    def __post_init__(self) -> None:
        for name, least in {"synthetic": 2, "synthetic_frames": 2, "epochs": 1}.items():
            need(getattr(self, name) >= least, name, getattr(self, name), f"use {least} or more")
        need(self.synthetic_frames <= FRAMES, "synthetic_frames", self.synthetic_frames, f"use {FRAMES} or less")
        need(self.steps is None or self.steps >= 1, "steps", self.steps, "use 1 or more, or null")
        need(0 < self.validation < 1, "validation", self.validation, "use more than 0 and less than 1")
        need(0 < self.advection_share < 1, "advection_share", self.advection_share, "use more than 0 and less than 1")
        named = self.advection is not None or self.darcy is not None
        need(not (named and self.data is not None), "data", self.data, "name a folder, or files, and not both")


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The fields and latents of a task."""

    fields: TaskFields
    latents: Latents
    tokens: tuple[int, ...]
    """Number of tokens along each dimension."""

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.fields.task

    @property
    def at_boundary(self) -> torch.Tensor:
        """Indices of the boundary tokens, int64. Indexing with a mask would make the host wait for the device."""
        return boundary_tokens(self.tokens).nonzero().flatten()

    def count(self, split: str = "train") -> int:
        """Return the number of examples of a split."""
        return len(getattr(self.fields, split)) * (self.fields.states - 1)

    def rows(self, indices: Sequence[int], split: str = "train") -> torch.Tensor:
        """Return the row of each example's latents before the step, int64; the latents after it are in the next row."""
        samples = getattr(self.fields, split)
        places = (divmod(index, self.fields.states - 1) for index in indices)
        return torch.tensor([samples[sample] * self.fields.states + state for sample, state in places])


@dataclass(frozen=True, kw_only=True)
class TaskPart:
    """The examples of one task in a micro-batch."""

    task: str
    before: torch.Tensor
    """float32 [B, tokens, latent width]."""
    after: torch.Tensor
    """Shape and dtype as for `before`."""
    dt: torch.Tensor
    """float32 [B], in s."""
    coded: torch.Tensor
    """Latents for the inverse losses: for each example, those before or after the step, chosen at random. Shape and
    dtype as for `before`; B is 0 if the batch has no inverse losses."""
    field: torch.Tensor
    """float32 [B, *grid, 1]: the fields that `coded` was encoded from."""
    queries: torch.Tensor
    """int64 [Q]: indices into the flattened grid; empty if the batch has no inverse losses."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The examples of all tasks that pass through the networks together."""

    number: int
    """Number of the micro-batch, counted from 0."""
    parts: tuple[TaskPart, ...]
    scales: torch.Tensor
    """float32 [depth, 2, B]: drop-path multipliers of the operator's sublayers; the B examples are in part order."""

    def __len__(self) -> int:
        return sum(len(part.before) for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The tasks to train on, and the share of each in a batch."""

    tasks: tuple[TaskData, ...]
    share: Fraction = Fraction(1, 2)
    """Fraction of a batch that is advection, if both tasks are trained."""
    rank: int = 0
    ranks: int = 1
    """Number of processes that train together. Each process has its own examples."""

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """Return the number of examples of each task in a micro-batch; ValueError if it is not a whole number."""
        if len(self.tasks) == 1:
            return (batch_size,)
        first = self.share * batch_size
        need(
            first.denominator == 1,
            "batch_size",
            batch_size,
            f"a share of {float(self.share):g} of advection1d is no whole number of examples; "
            f"use a multiple of {self.share.denominator}, or another advection_share",
        )
        return (int(first), batch_size - int(first))

    def examples(self) -> int:
        """Return the number of training examples of all tasks."""
        return sum(task.count() for task in self.tasks)

    def task(self, name: str) -> TaskData:
        """Return the task with this name."""
        return next(task for task in self.tasks if task.task == name)

    @functools.cached_property
    def digest(self) -> str:
        """Digest over the data of all tasks."""
        return digest_of([task.fields.digest for task in self.tasks])


@dataclass(frozen=True, kw_only=True)
class Maker:
    """The micro-batches of a configuration as a sequence; each is built when it is indexed.

    ValueError if the batch size does not divide into the shares of the tasks.
    """

    mixture: Mixture
    config: TrainConfig
    every: bool = False
    """If True, batches without inverse losses also contain fields and query points."""
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", self.mixture.counts(self.config.batch_size))

    def __getitem__(self, number: int) -> MicroBatch:
        parts = [self._part(place, number) for place in range(len(self.mixture.tasks))]
        return MicroBatch(number=number, parts=tuple(parts), scales=self.scales(number))

    def scales(self, number: int) -> torch.Tensor:
        """Return the drop-path multipliers of a micro-batch, float32 [depth, 2, B]."""
        rates = drop_path_rates(self.config.depth, self.config.drop_path)
        return drop_path_scales(rates, sum(self.counts), self.generator(number, 0))

    def rows(self, place: int, number: int) -> torch.Tensor:
        """Return the rows of a task's latents before the step for a micro-batch, int64 [B]."""
        task, count = self.mixture.tasks[place], self.counts[place]
        first = self._of_all(number) * count
        examples = task.count()
        indices = []
        for at in range(first, first + count):
            epoch, position = divmod(at, examples)
            indices.append(_order(examples, mixed(self.config.seed + place), epoch)[position])
        return task.rows(indices)

    def coded(self, place: int, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of the latents for the inverse losses, int64 [B]: each row of `rows` or the row after it."""
        after = torch.randint(2, rows.shape, generator=self.generator(number, CODED_STREAM - place))
        return rows + after

    def queries(self, place: int, number: int) -> torch.Tensor:
        """Return the query points of a task for a micro-batch, int64 [Q], as indices into the flattened grid."""
        points = self.mixture.tasks[place].fields.points.shape[:-1].numel()
        return query_indices(points, self.config.num_queries, self.generator(number, -1 - place))

    def fields(self, place: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the fields that belong to rows of the latents, float32 [B, *grid, 1]."""
        fields = self.mixture.tasks[place].fields
        return torch.stack([fields.at(*divmod(row, fields.states)) for row in rows.tolist()]).unsqueeze(-1)

    def _part(self, place: int, number: int) -> TaskPart:
        task, rows = self.mixture.tasks[place], self.rows(place, number)
        with_fields = self.every or self.config.has_inverse(number)
        coded = self.coded(place, number, rows) if with_fields else rows[:0]
        field = self.fields(place, coded) if with_fields else torch.empty(0, *task.fields.grid, 1)
        return TaskPart(
            task=task.task,
            before=task.latents.rows[rows],
            after=task.latents.rows[rows + 1],
            dt=torch.full((len(rows),), task.fields.dt),
            coded=task.latents.rows[coded],
            field=field,
            queries=self.queries(place, number) if with_fields else coded,
        )

    def generator(self, number: int, stream: int) -> torch.Generator:
        """Return a CPU generator for random draws of a micro-batch; each stream has its own generator."""
        word = mixed(word_of(self.config.seed, self._of_all(number)) + stream & WORD)
        return torch.Generator().manual_seed(word & 2**63 - 1)

    def first(self) -> MicroBatch:
        """Return the first micro-batch of rank 0, whichever rank calls it."""
        return dataclasses.replace(self, mixture=dataclasses.replace(self.mixture, rank=0))[0]

    def _of_all(self, number: int) -> int:
        """Return the global number of a micro-batch, counted over all ranks.

        The ranks' micro-batches are interleaved, so the micro-batches of a step depend only on ranks × accumulation.
        """
        return number * self.mixture.ranks + self.mixture.rank


class Feed:
    """Micro-batches in order, built in this process or ahead of time by worker processes.

    A request for any number other than the next one restarts the workers at that number.
    """

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._next = -1
        self._made: Iterator[MicroBatch] = iter(())

    def batch(self, number: int) -> MicroBatch:
        """Return micro-batch `number`, counted from 0, on the CPU."""
        config = self._maker.config
        if not config.num_workers:
            return self._maker[number]
        if number != self._next:
            loader: DataLoader[MicroBatch] = DataLoader(
                self._maker,  # type: ignore[arg-type]  # by number, without an end
                batch_size=None,
                sampler=itertools.count(number),
                num_workers=config.num_workers,
                prefetch_factor=config.prefetch_factor,
                collate_fn=_as_it_is,
                worker_init_fn=_end_with_parent,
                multiprocessing_context="forkserver",
            )
            self._made = iter(loader)
        self._next = number + 1
        return next(self._made)


def _as_it_is(batch: Any) -> Any:
    return batch


def _end_with_parent(number: int) -> None:
    """End this worker when the training process ends, even if that process was killed.

    PyTorch's own check watches the worker's parent. The parent is the fork server, which lives as long as its workers.
    """
    trains = multiprocessing.parent_process()
    assert trains is not None

    def watch() -> None:
        trains.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.lru_cache(maxsize=4)
def _order(examples: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the examples in an epoch. The cache avoids computing it for each batch."""
    order: list[int] = permutation(examples, seed, epoch, "cpu").tolist()
    return order


class Steps(NumberedSteps):
    """Step numbers. A trainer builds the micro-batches of a step from its number."""

    unit = "examples"
    raised_by = "steps or epochs"

    def __init__(self, mixture: Mixture, data: Data) -> None:
        self.mixture, self.data = mixture, data
        self.count = data.batch_size * data.accumulation * mixture.ranks
        epoch = max(mixture.examples() // self.count, 1)
        super().__init__(data.steps if data.steps is not None else data.epochs * epoch)

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Return the number of examples per step, summed over all ranks."""
        return self.count

    def identity(self) -> dict[str, Any]:
        return {
            "batch_size x accumulation x ranks": self.count,
            "advection_share": self.data.advection_share,
            "seed": self.data.seed,
            "digest": self.mixture.digest,
        }


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The data of a trainer, and a line that names their origin."""

    batches: Steps
    trainer_data: Mixture
    summary: str


def load(data: Data, rank: int = 0, ranks: int = 1) -> Loaded:
    """Open the data that a configuration describes; PerfsuiteError if they are missing or invalid."""
    mixture = mixture_of(data, rank, ranks)
    parts = [f"{task.count():,} training examples of {task.fields.name}" for task in mixture.tasks]
    summary = f"data: {' and '.join(parts)}"
    return Loaded(batches=Steps(mixture, data), trainer_data=mixture, summary=summary)


def mixture_of(data: Data, rank: int = 0, ranks: int = 1) -> Mixture:
    """Open the tasks and their latents. Latents that are not cached are encoded.

    PerfsuiteError if the data are missing or invalid, or the batch size does not divide into the tasks' shares.
    """
    files = files_of(data)
    if files:
        opened = [from_file(path, task, validation=data.validation, seed=data.seed) for task, path in files.items()]
    else:
        opened = [_made(task, data) for task in TASKS]
    tasks = []
    for fields in opened:
        latents = latents_of(fields, data.tokens, data.latent_width, data.seed, data.latents)
        tasks.append(TaskData(fields=fields, latents=latents, tokens=token_grid(fields.task, data.tokens)))
    share = Fraction(data.advection_share).limit_denominator(LARGEST_DENOMINATOR)
    mixture = Mixture(tasks=tuple(tasks), share=share, rank=rank, ranks=ranks)
    try:
        mixture.counts(data.batch_size)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return mixture


def files_of(data: Data) -> dict[str, Path]:
    """Return task → file for each task that has one; empty if the configuration names neither files nor a folder.

    PerfsuiteError if a named file is missing, or the folder has no matching file or several for one task.
    """
    named = {"advection1d": data.advection, "darcy2d": data.darcy}
    if data.data is None:
        files = {task: Path(path) for task, path in named.items() if path is not None}
        for path in files.values():
            if not path.exists():
                raise ConfigurationError(f"data: there is no file {path}; make it with `perfsuite data pde {path}`")
        return files
    folder = Path(data.data)
    if not folder.is_dir():
        raise ConfigurationError(f"data: {folder} is no folder; name one, or files with --advection and --darcy")
    found: dict[str, Path] = {}
    for task, pattern in PATTERNS.items():
        matching = sorted(folder.glob(pattern))
        if len(matching) > 1:
            option = "--advection" if task == "advection1d" else "--darcy"
            raise ConfigurationError(f"data: {folder} has {len(matching)} files {pattern}; name one with {option}")
        if matching:
            found[task] = matching[0]
    if not found:
        raise ConfigurationError(
            f"data: {folder} has no file {' or '.join(PATTERNS.values())}; make one with `perfsuite data pde`"
        )
    return found


def for_ablation(
    config: TrainConfig, data: Data, device: torch.device
) -> tuple[Mixture, Iterator[Mapping[str, torch.Tensor]]]:
    """Return (data, endless iterator of empty batches) for `perfsuite ablate`; each trainer counts its own steps."""
    return mixture_of(data), itertools.repeat({})


def _made(task: str, data: Data) -> TaskFields:
    # A small grid with at least two cells per token along each dimension, so that fields vary within a token.
    line = task == "advection1d"
    cells = 2 * max(token_grid(task, data.tokens)) if line else 2 * _plane(token_grid(task, data.tokens))
    frames = data.synthetic_frames
    return synthetic(
        task, samples=data.synthetic, cells=cells, frames=frames, validation=data.validation, seed=data.seed
    )


def _plane(tokens: tuple[int, ...]) -> int:
    """Return the smallest side, in cells, of a square grid that divides evenly into the tokens."""
    return math.lcm(*tokens)
