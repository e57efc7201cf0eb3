"""The pytest plugin: a module-level `Pair` becomes items that prove, time and gate it.

The plugin is light: it imports torch, Hypothesis and the stages only when a test module with a pair is collected.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.system import device_nodes
from perfsuite.system.garbage import uncollected

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from perfsuite.session.modes.base import Mode

MARKERS = (
    "correctness: proves that a pair's two sides are the same function",
    "perf: times a pair's sides against each other, and gates them with --benchmark-compare",
    "gpu: needs a CUDA device",
    "multi_gpu: needs two or more CUDA devices",
)
PROFILES = ("dev", "ci", "thorough")
JOB = "PERFSUITE_JOB"
"""Environment variable that makes this pytest process a measuring worker: the path of its job file."""

PROVEN_IN_FORKS = ("accept", "compare", "gate")
"""Kinds of run whose proofs are separate tasks."""
SANITIZER_LOG = "PERFSUITE_SANITIZER_LOG"
"""Environment variable of a process that runs under compute-sanitizer: the file to which that writes."""

MODE = pytest.StashKey["Mode"]()
SANITIZED = pytest.StashKey[Any]()
TIMED_ONLY = pytest.StashKey[bool]()
"""Stash key: whether this is a worker that needs only timed items. Others would take half of its collection time."""

WORKER = JOB in os.environ  # evaluated now, because JOB is removed before any code under test is imported
if WORKER:  # before anything else, since an orphan would disturb the next measurement
    from perfsuite.system.orphans import die_with_parent

    die_with_parent()

    from perfsuite.system import import_stubs

    import_stubs.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("perfsuite")
    group.addoption(
        "--perfsuite-profile",
        choices=PROFILES,
        help="draws a proof takes: dev (random), ci (the same each time; the default where CI is set), thorough",
    )
    group.addoption(
        "--perfsuite-isolate",
        choices=("auto", "always", "never"),
        default="auto",
        help="proofs in processes of their own, replaced when a kernel faults: auto (where there is a GPU)",
    )
    group.addoption("--perfsuite-case", metavar="CASE", help="prove this one draw: the line that a failure printed")
    group.addoption(
        "--perfsuite-report", metavar="DIR", help="write report.html, report.json and the job summary to DIR"
    )
    group.addoption(
        "--perfsuite-mode",
        choices=("accept", "list", "compare", "environments", "gate", "run"),
        help="used by `perfsuite`",
    )
    group.addoption("--perfsuite-argument", action="append", default=[], help="used by `perfsuite`")
    group.addoption("--perfsuite-project-argument", action="append", default=[], help="used by `perfsuite`")
    group.addoption(
        "--sanitize", action="store_true", help="run the proofs under compute-sanitizer; with -k, for it is slow"
    )
    group.addoption(
        "--sanitize-tool",
        choices=("memcheck", "racecheck", "synccheck"),
        default="memcheck",
        help="the compute-sanitizer tool of --sanitize (default: memcheck)",
    )
    group.addoption("--perfsuite-baselines", metavar="DIR", help="folder of the baselines (default: baselines)")
    group.addoption(
        "--perfsuite-partial", action="store_true", help="gate a part of the accepted workloads, as -k or paths say"
    )
    group.addoption(
        "--perfsuite-shard", metavar="I/N", help="part I of N of the workloads; see `perfsuite merge` for the whole"
    )
    group.addoption(
        "--perfsuite-changed", action="store_true", help="gate only the workloads that a change could have affected"
    )
    parser.addini(
        "perfsuite_ignore",
        "folders and files without pairs, which perfsuite's commands and the gate need not import",
        type="paths",
        default=[],
    )
    parser.addini("perfsuite_margin", "slowdown that matters for workloads that declare no margin=, e.g. 0.05")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    """Register the verdict that this run must reach, so that no conftest can end the run before and leave it green."""
    if JOB in os.environ:
        with uncollected():
            return (yield)
    from perfsuite.gate import conclusion

    awaited = conclusion.asked()
    if awaited is None and _wants_gate(early_config.known_args_namespace):
        awaited = conclusion.Awaited("gate")
    if awaited is not None or _proves_in_workers_again(early_config):
        from perfsuite.revisions import bytecode

        bytecode.keep_during(early_config)
    if awaited is None:
        return (yield)
    early_config.stash[conclusion.AWAITED] = awaited
    if awaited.mode in PROVEN_IN_FORKS:
        from perfsuite.session import preload

        if preload.is_useful():
            preload.server()  # imports torch while this process collects the items, which takes as long
            early_config.add_cleanup(preload.close)
    try:
        return (yield)
    except (SystemExit, pytest.exit.Exception) as error:
        raise pytest.UsageError(f"a conftest ended the run while it was imported: {error!r}; remove that") from None


@pytest.hookimpl(wrapper=True, specname="pytest_load_initial_conftests")
def pytest_note_options(early_config: pytest.Config, args: list[str]) -> Generator[None, object, object]:
    """Record the options that the project's conftests and plugins add, for worker processes. In a worker, add those
    that its run was given."""
    from perfsuite.session import project_options

    before, own = project_options.known(early_config), project_options.of_plugins(early_config)
    result = yield
    now = project_options.known(early_config)
    own |= {name: now[name] for name in now if name not in before}
    early_config.stash[project_options.OPTIONS] = own
    args[:0] = project_options.among(early_config.known_args_namespace.perfsuite_project_argument, own)
    return result


def _proves_in_workers_again(config: pytest.Config) -> bool:
    """Return whether this machine proves in worker processes, and an earlier run has left a folder in the project."""
    from perfsuite.system.folders import SCRATCH

    return device_nodes.are_visible() and (config.rootpath / SCRATCH).is_dir()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while test modules are imported, only in perfsuite's own processes."""
    with uncollected() if JOB in os.environ else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    _check_report_folder(config)
    if not device_nodes.are_visible():
        # Triton reads this when it is first imported. Without a GPU, its kernels can only run in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if SANITIZER_LOG in os.environ:
        from perfsuite.system.sanitizer import Watch

        config.stash[SANITIZED] = Watch()
        config.option.perfsuite_isolate = "never"  # the tool watches this process
    if config.args_source is config.ArgsSource.INVOCATION_DIR:
        config.args = [os.curdir]  # the whole path of the folder may have a "[", which pytest refuses in an argument
    config.stash[TIMED_ONLY] = WORKER and all("::speed[" in item for item in config.args)
    if _wants_mode(config):
        _mode(config)


def _check_report_folder(config: pytest.Config) -> None:
    """Raise UsageError if the report could not be written, before minutes of measuring."""
    if not config.option.perfsuite_report:
        return
    from perfsuite.errors import PerfsuiteError
    from perfsuite.report import files

    try:
        files.check(Path(config.option.perfsuite_report))
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_cmdline_main_concluded(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """Make a run red if it has not reached its expected verdict, whatever ended it. A worker exits at once."""
    from perfsuite.gate.conclusion import AWAITED

    code = yield
    if WORKER:
        # The results are written. The run would wait up to 7 s for the shutdown of Python, torch and the compiler.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))
    awaited = config.stash.get(AWAITED, None)
    return code if awaited is None else awaited.close(int(code or 0))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out `perfsuite_ignore` in a run of perfsuite's own, unless the command line names a path in it."""
    if JOB in os.environ or not _wants_mode(config) or collection_path not in config.getini("perfsuite_ignore"):
        return None
    given = [(config.invocation_params.dir / a.partition("::")[0]).resolve() for a in config.args]
    return None if any(path == collection_path or collection_path in path.parents for path in given) else True


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    option = config.option
    if not option.sanitize or SANITIZER_LOG in os.environ or option.help or option.collectonly:
        return None
    from perfsuite.errors import PerfsuiteError
    from perfsuite.system import sanitizer

    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else nullcontext():
            return sanitizer.run(option.sanitize_tool, [str(a) for a in config.invocation_params.args])
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Start a pair's other processes while it is proven, if there are enough cores."""
    begin_beside = getattr(item.parent, "begin_beside", None)  # only the collector of a pair has it
    if begin_beside is not None and not WORKER:
        begin_beside(item.session.items, item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    watch = item.config.stash.get(SANITIZED, None)
    if watch is None:
        return (yield)
    try:
        return (yield)
    finally:
        fault = watch.after_item()
        if fault is not None:
            pytest.fail(f"{item.name}: {fault}", pytrace=False)


def _wants_gate(option: Any) -> bool:
    """Return whether the command line requests the gate: `-m perf --benchmark-compare`, but not `-m 'not perf'`."""
    perf = re.search(r"(?<!not )\bperf\b", getattr(option, "markexpr", None) or "")
    return bool(perf and getattr(option, "benchmark_compare", None))


def _wants_mode(config: pytest.Config) -> bool:
    option = config.option
    beside = re.search(r"(?<!not )\bperf\b", option.markexpr or "") and getattr(option, "numprocesses", None)
    return bool(_wants_gate(option) or beside or option.perfsuite_mode or JOB in os.environ)


def _mode(config: pytest.Config) -> Mode:
    """Return the run's mode, which is created when the first pair (or a gate) needs it."""
    if MODE not in config.stash:
        from perfsuite.errors import PerfsuiteError
        from perfsuite.session.modes import mode_for
        from perfsuite.session.timed_item import MODE as NAME

        try:
            config.stash[MODE] = mode_for(config)
        except PerfsuiteError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(config.stash[MODE], NAME)
    return config.stash[MODE]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record the global state that the import of a module with a pair leaves changed, for the pair's item `effects`."""
    if not _declares_a_pair(collector):
        return (yield)
    from perfsuite.session.pytest_items import IMPORTED
    from perfsuite.state import patches, process_state

    before, bound = process_state.settings(), patches.functions()
    report = yield
    _say_in_one_line(collector, report)
    after = process_state.settings(before)
    collector.stash[IMPORTED] = process_state.differences(before, after) | patches.patched(bound)
    return report


def _say_in_one_line(collector: pytest.Collector, report: pytest.CollectReport) -> None:
    """Reduce the report of a PairError to one line: the place of the wrong declaration, and the remedy. Do the same for
    the UsageError of an option, which is found when the first pair is collected."""
    from perfsuite.errors import PairError

    call = getattr(report, "call", None)
    if call is None or call.excinfo is None or not isinstance(call.excinfo.value, (PairError, pytest.UsageError)):
        return
    lines = [entry.lineno + 1 for entry in call.excinfo.traceback if entry.path == collector.path]
    where = f"{collector.path.name}:{lines[-1]}: " if lines else ""
    report.longrepr = f"{where}{call.excinfo.value}"


def _declares_a_pair(collector: pytest.Collector) -> bool:
    if not isinstance(collector, pytest.Module) or collector.config.stash.get(TIMED_ONLY, False):
        return False
    try:
        text = collector.path.read_bytes()
    except OSError:
        return False
    return b"perfsuite" in text and b"Pair" in text


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    timed_only = collector.config.stash.get(TIMED_ONLY, False)
    found = _pairs(collector, name, obj)
    if not found:
        return [] if timed_only else None
    with uncollected():
        from perfsuite.session.pytest_items import PairCollector

    _mode(collector.config)
    made = [PairCollector.from_parent(collector, name=name, pair=pair, timed_only=timed_only) for name, pair in found]
    if timed_only or not isinstance(obj, type) or not isinstance(collector, pytest.Module):
        return made
    return [*made, *_collected(collector, name, obj)]  # a test class may also have tests


def _pairs(collector: pytest.Collector, name: str, obj: object) -> list[tuple[str, Any]]:
    if "perfsuite.declare.pair" not in sys.modules or not isinstance(collector, pytest.Module):
        return []
    from perfsuite.declare import discovery
    from perfsuite.errors import PairError

    try:
        found = list(discovery.pairs_of(name, obj, collector.obj.__name__))
    except PairError as error:
        raise collector.CollectError(str(error)) from None
    if found and "[" in collector.nodeid:
        raise collector.CollectError(
            f"pairs are declared in {collector.nodeid}, but pytest cannot select items by a path with [, which "
            "perfsuite's processes do; rename it"
        )
    return found


def _collected(collector: pytest.Module, name: str, obj: object) -> list[Any]:
    """Return the items that pytest itself makes from the object."""
    from _pytest.python import pytest_pycollect_makeitem as make_item

    found: Any = make_item(collector, name, obj)
    return found if isinstance(found, list) else [found] if found is not None else []


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip ordinary tests marked `gpu` or `multi_gpu`, with the reason, if there are too few devices."""
    needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
    if needed:
        from perfsuite.system import machine

        count = len(machine.survey_gpus().gpus) if machine.has_gpu() else 0
        if count < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device{'s' * (needed > 1)}; {count} here"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, Iterable[Any], Iterable[Any]]:
    every = list(items)
    result = yield
    if SANITIZED in config.stash:
        # Times under compute-sanitizer are meaningless.
        timed = [i for i in items if i.get_closest_marker("perf")]
        items[:] = [i for i in items if i not in timed]
        config.hook.pytest_deselected(items=timed)
    if MODE in config.stash:
        config.stash[MODE].collected(every, items)
    return result
