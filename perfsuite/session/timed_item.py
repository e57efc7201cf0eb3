"""Pytest item of a workload: `speed[name]`. It reports the measurements of worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perfsuite.codec import to_json
from perfsuite.declare.pair import Pair
from perfsuite.declare.workload import Workload
from perfsuite.errors import PerfsuiteError
from perfsuite.records import Measurement, PromiseRecord, Verdict
from perfsuite.session import benchmark_records

MODE = "perfsuite-mode"
"""Name under which a run's `Mode` is registered with pytest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of one timed item."""

    measurements: tuple[Measurement, ...] = ()
    verdict: Verdict | None = None
    message: str = ""
    red: bool = False
    skipped: bool = False


class SpeedFailure(Exception):  # noqa: N818 - a verdict in one line
    """A workload is red. The message is the reason, in one line."""


class SpeedItem(pytest.Function):
    """Item that times one workload of a pair, and reports its verdict if the run is a gate."""

    def __init__(
        self, *, name: str, parent: pytest.Collector, pair: Pair, workload: Workload, home: Path, **kwargs: Any
    ) -> None:
        self.pair, self.workload, self.home = pair, workload, home
        with_benchmark = parent.config.pluginmanager.hasplugin("benchmark")
        timed: Callable[..., None] = self._timed_with_benchmark if with_benchmark else self._timed
        super().__init__(name=name, parent=parent, callobj=timed, **kwargs)

    @property
    def promises(self) -> PromiseRecord:
        return self.workload.promises

    def _result(self) -> Result:
        mode: Any = self.config.pluginmanager.get_plugin(MODE)
        result: Result = mode.result(self)
        return result

    def _timed(self) -> None:
        __tracebackhide__ = True
        self._conclude(self._result())

    def _timed_with_benchmark(self, benchmark: Any) -> None:
        __tracebackhide__ = True
        benchmark_records.silence(benchmark)
        result = self._result()
        for side in ("reference", "optimized"):
            samples = tuple(t for m in result.measurements if side in m.sides for t in m.sides[side].blocks_s)
            extra = {"perfsuite": to_json(result.measurements[-1])} if result.measurements else {}
            benchmark_records.record(benchmark, self.nodeid, side, samples, extra if side == "optimized" else {})
        self._conclude(result)

    def _conclude(self, result: Result) -> None:
        __tracebackhide__ = True
        if result.skipped:
            pytest.skip(result.message)
        if result.red:
            raise SpeedFailure(result.message)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (SpeedFailure, PerfsuiteError)):
            # pytest's summary truncates lines at the terminal's width, and already shows the item's id.
            return str(excinfo.value).replace(f" {self.nodeid}: ", ": ", 1)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid.partition("::")[2].replace("::", ".")
