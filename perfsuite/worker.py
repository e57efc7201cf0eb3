"""A measuring process: prove and time each workload of the job, and write a line for each."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from perfsuite import revision
from perfsuite.errors import PerfsuiteError, RevisionError
from perfsuite.pair import Side
from perfsuite.records import Status
from perfsuite.speed import SpeedItem
from perfsuite.workers import UNLOADED, Failure, Job, Journal, die_with_parent


def run(job: Job, journal: Journal, items: Sequence[pytest.Item], device: str) -> None:
    """Measure the job's workloads in the order of the job."""
    from perfsuite import execution

    die_with_parent()
    found = {i.nodeid: i for i in items if isinstance(i, SpeedItem)}
    accepted = _load_accepted(job, found)
    for id in job.ids:
        # What lives between two workloads stays: to look through it at each collection takes a fifth of a second.
        execution.forget_compiled()
        gc.collect()
        gc.freeze()
        journal.begin(id)
        item = found.get(id)
        side = accepted.get(id)
        if item is None:
            outcome = Failure(status=Status.UNMEASURED, message="it could not be collected again for measuring")
        elif isinstance(side, RevisionError) and not job.twin:
            outcome = Failure(status=Status.UNMEASURED, message=f"{UNLOADED}{side}")
        else:
            measured = _measure(item, journal, device, None if isinstance(side, RevisionError) else side, job)
            if measured is None:
                continue
            outcome = measured
        journal.failure(id, outcome)


def _measure(item: SpeedItem, journal: Journal, device: str, accepted: Side | None, job: Job) -> Failure | None:
    """Write the measurement, or give the failure."""
    import torch

    from perfsuite import sampling
    from perfsuite.equivalence import NotEquivalent

    phase = ["start"]

    known = job.counts.get(item.nodeid)
    counts = {name: (found[0], found[1]) for name, found in known.items()} if known else None

    def report(name: str) -> None:
        phase[0] = name
        journal.phase(item.nodeid, name)

    try:
        # A warning inside a timed call is the user's own affair; it must not turn into an error here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measurement = sampling.measure(
                item.pair,
                item.workload,
                workload_id=item.nodeid,
                device=device,
                home=item.home,
                accepted=accepted,
                with_rivals=job.rivals,
                counts=counts,
                report=report,
            )
    except NotEquivalent as error:
        return Failure(status=Status.NOT_EQUIVALENT, message=str(error))
    except torch.OutOfMemoryError:
        return Failure(status=Status.UNMEASURED, message=f"the {phase[0]} side runs out of device memory")
    except PerfsuiteError as error:
        return Failure(status=Status.UNMEASURED, message=str(error))
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        return Failure(
            status=Status.UNMEASURED, message=f"the {phase[0]} side raises {type(error).__name__}: {lines[0][:300]}"
        )
    finally:
        if device == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    journal.measurement(measurement)
    return None


def _load_accepted(job: Job, found: dict[str, SpeedItem]) -> dict[str, Side | RevisionError]:
    sides: dict[str, Side | RevisionError] = {}
    for id, (tree, _) in job.accepted.items():
        item = found.get(id)
        if item is None:
            continue
        module = item.getparent(pytest.Module)
        assert module is not None
        try:
            sides[id] = revision.load_side(item.pair, module.obj.__name__, Path(tree), item.config.rootpath)
        except RevisionError as error:
            sides[id] = error
    return sides
