"""Registry of trainers: name, configuration, data and both sides, each imported on demand."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from perfsuite.errors import PerfsuiteError
from suite.configuration import ConfigurationError

if TYPE_CHECKING:
    import torch

    from suite.runtime import Trainer

Side = Literal["reference", "optimized"]
Build = Callable[[Any, Any, "torch.device"], "Trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A trainer. Strings of the form "module:name" are imported when they are needed.

    `config` and `data_config` are dataclasses. `data` is called with an instance of `data_config`. Like
    `suite.text.Loaded`, its result has `batches`, `trainer_data` (the part of the data that a trainer needs; for
    text, the size of the vocabulary) and `summary`, a line for the user. A side is called with (config, trainer_data,
    device) and returns a `suite.runtime.Trainer`.
    """

    config: str | type[Any]
    reference: str | Build
    optimized: str | Build
    data_config: str | type[Any] = "suite.text:Data"
    data: str | Callable[..., Any] = "suite.text:load"
    techniques: str | tuple[str, ...] = ()
    """Fields of `config` that switch techniques on and off, in the order in which `ablate` turns them on."""
    claims: str | Mapping[str, str] = field(default_factory=dict)
    """Technique → claim of its source."""
    short: str | Callable[[Any], tuple[Any, Any, int] | None] | None = None
    """Shorter windows for `ablate`'s counts, if a window has many equal steps; see `suite.ablation.measure`."""
    ablated: str | Callable[..., tuple[Any, Any]] | None = None
    """(config, data config, device) → (trainer_data, endless iterator of batches) for `ablate`; None: random tokens."""
    finish: str | Callable[[Any, Path], str | None] | None = None
    """(trainer, run's folder) → line for the user, or None. Called at the end of a run."""
    ranks: bool = False
    """True if several ranks may train together. `data` is then also called with the rank and the number of ranks."""
    quality: str | Callable[[Any, Any], Mapping[str, float]] | None = None
    """(trained trainer, trainer_data) → evaluation metrics, which `ab` compares; None: only the loss is compared."""
    checks: str | Any = None
    """Checks of the source's claims, `suite.claims.record.Checks`; None if no claim is measured."""
    setting: str | Callable[..., Any] = ""
    """device → setting that is passed to these checks."""
    lowered: tuple[str, ...] = ("batch_size", "sequence_length")
    """Fields of `config` to lower if memory runs out."""


TRAINERS: dict[str, Entry] = {
    "trainer2": Entry(
        config="suite.trainer2.config:TrainConfig",
        reference="reference.trainers.trainer2:Trainer",
        optimized="optimized.trainers.trainer2:Trainer",
        techniques="suite.trainer2.config:TECHNIQUES",
        claims="suite.trainer2.config:CLAIMS",
        short="suite.trainer2.config:short_windows",
        checks="suite.claims.trainer2:CHECKS",
        setting="suite.claims.trainer2:setting",
    ),
    "leak_cnn": Entry(
        config="suite.leak_cnn.config:TrainConfig",
        reference="reference.trainers.leak_cnn:Trainer",
        optimized="optimized.trainers.leak_cnn:Trainer",
        data_config="suite.leak_cnn.epochs:Data",
        data="suite.leak_cnn.epochs:load",
        techniques="suite.leak_cnn.config:TECHNIQUES",
        claims="suite.leak_cnn.config:CLAIMS",
        ablated="suite.leak_cnn.epochs:for_ablation",
        finish="suite.leak_cnn.report:finish",
        quality="suite.leak_cnn.report:quality",
        checks="suite.claims.leak_cnn:CHECKS",
        setting="suite.claims.leak_cnn:setting",
        lowered=("batch_size",),
    ),
    "eigenstate_lm": Entry(
        config="suite.eigenstate_lm.config:TrainConfig",
        reference="reference.trainers.eigenstate_lm:Trainer",
        optimized="optimized.trainers.eigenstate_lm:Trainer",
        data_config="suite.eigenstate_lm.data:Data",
        data="suite.eigenstate_lm.data:load",
        techniques="suite.eigenstate_lm.config:TECHNIQUES",
        claims="suite.eigenstate_lm.config:CLAIMS",
        ablated="suite.eigenstate_lm.data:for_ablation",
        finish="suite.eigenstate_lm.report:finish",
        quality="suite.eigenstate_lm.report:quality",
        checks="suite.claims.eigenstate_lm:CHECKS",
        setting="suite.claims.eigenstate_lm:setting",
    ),
    "ups": Entry(
        config="suite.ups.config:TrainConfig",
        reference="reference.trainers.ups:Trainer",
        optimized="optimized.trainers.ups:Trainer",
        data_config="suite.ups.batches:Data",
        data="suite.ups.batches:load",
        techniques="suite.ups.config:TECHNIQUES",
        claims="suite.ups.config:CLAIMS",
        ablated="suite.ups.batches:for_ablation",
        finish="suite.stepping:finish",
        ranks=True,
        quality="suite.ups.evaluation:quality",
        checks="suite.claims.ups:CHECKS",
        setting="suite.claims.ups:setting",
        lowered=("batch_size", "num_queries"),
    ),
    "polychromic": Entry(
        config="suite.polychromic.config:TrainConfig",
        reference="reference.trainers.polychromic:Trainer",
        optimized="optimized.trainers.polychromic:Trainer",
        data_config="suite.polychromic.data:Data",
        data="suite.polychromic.data:load",
        techniques="suite.polychromic.config:TECHNIQUES",
        claims="suite.polychromic.config:CLAIMS",
        ablated="suite.polychromic.data:for_ablation",
        finish="suite.stepping:finish",
        quality="suite.polychromic.evaluation:quality",
        checks="suite.claims.polychromic:CHECKS",
        setting="suite.claims.polychromic:setting",
        lowered=("batch_size", "length", "prompts"),
    ),
}


def register(name: str, entry: Entry) -> None:
    """Add a trainer; PerfsuiteError if the name is taken."""
    if name in TRAINERS:
        raise PerfsuiteError(f"a trainer is called {name!r} already; take another name")
    TRAINERS[name] = entry


def find(name: str) -> Entry:
    """Return the trainer of that name. If there is none, ConfigurationError suggests the most similar name."""
    if name in TRAINERS:
        return TRAINERS[name]
    if name.startswith("-"):
        raise ConfigurationError(f"the name of a trainer comes first, before {name}; there are: {', '.join(TRAINERS)}")
    near = difflib.get_close_matches(name, TRAINERS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(TRAINERS))}"
    raise ConfigurationError(f"no trainer is called {name!r}; {hint}")


def config_of(name: str) -> type[Any]:
    """Return the dataclass of a trainer's configuration."""
    return cast("type[Any]", _loaded(find(name).config, name))


def data_config_of(name: str) -> type[Any]:
    """Return the dataclass that describes a trainer's data."""
    return cast("type[Any]", _loaded(find(name).data_config, name))


def data_of(name: str) -> Callable[..., Any]:
    """Return the function that loads a trainer's data."""
    return cast("Callable[..., Any]", _loaded(find(name).data, name))


def techniques_of(name: str) -> tuple[str, ...]:
    """Return the switches of a trainer's techniques; PerfsuiteError if it has none."""
    found = cast("tuple[str, ...]", _loaded(find(name).techniques, name))
    if not found:
        raise PerfsuiteError(f"trainer {name} has no switches for its techniques, so that there is nothing to ablate")
    return found


def claims_of(name: str) -> Mapping[str, str]:
    """Return technique → claim of its source."""
    return cast("Mapping[str, str]", _loaded(find(name).claims, name))


def short_of(name: str) -> Callable[[Any], tuple[Any, Any, int] | None]:
    """Return the function that defines the shorter windows in which a trainer's launches are counted.

    For a trainer without shorter windows, the function returns None.
    """
    found = cast("Callable[..., Any] | None", _loaded(find(name).short, name))
    return found if found is not None else lambda config: None


def memory_remedy(name: str) -> str:
    """Return the remedy if a trainer runs out of memory. The name need not be registered."""
    fields = TRAINERS[name].lowered if name in TRAINERS else ("batch_size",)
    if not fields:
        return "free the device"
    *first, last = fields
    return f"lower {', '.join(first)}{' or ' * bool(first)}{last}, or free the device"


def ablated_of(name: str) -> Callable[..., tuple[Any, Any]] | None:
    """Return the function that creates the data for `ablate`; None if these are random tokens."""
    return cast("Callable[..., tuple[Any, Any]] | None", _loaded(find(name).ablated, name))


def finish_of(name: str) -> Callable[[Any, Path], str | None]:
    """Return the function to call at the end of a run. For a trainer without one, it does nothing."""
    found = cast("Callable[[Any, Path], str | None] | None", _loaded(find(name).finish, name))
    return found if found is not None else lambda trainer, folder: None


def quality_of(name: str) -> Callable[[Any, Any], Mapping[str, float]]:
    """Return the function that computes a trained trainer's evaluation metrics.

    For a trainer without metrics, the function returns an empty dict.
    """
    found = cast("Callable[[Any, Any], Mapping[str, float]] | None", _loaded(find(name).quality, name))
    return found if found is not None else lambda trainer, trainer_data: {}


def checks_of(name: str) -> tuple[Any, Callable[..., Any]]:
    """Return (checks of a trainer's claims, device → setting for them); PerfsuiteError if no claim is measured."""
    entry = find(name)
    if entry.checks is None or not entry.setting:
        raise PerfsuiteError(f"no claim of trainer {name} is measured")
    return _loaded(entry.checks, name), _loaded(entry.setting, name)


def build(name: str, config: Any, trainer_data: Any, device: torch.device, side: Side) -> Trainer:
    """Build a trainer of the given side; `trainer_data` is that of its loaded data, see `Entry`."""
    entry = find(name)
    make = _loaded(entry.reference if side == "reference" else entry.optimized, name)
    return cast("Trainer", make(config, trainer_data, device))


def _loaded(target: Any, trainer: str) -> Any:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            reason = f"there is no module {module}; work in a checkout that has it, or name another trainer"
        else:
            reason = f"{module} needs {error.name}, which is not installed"
    except (ImportError, AttributeError) as error:
        reason = f"{target} cannot be loaded: {error}"
    raise PerfsuiteError(f"trainer {trainer}: {reason}") from None
