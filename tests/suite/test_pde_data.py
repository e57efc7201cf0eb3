"""`perfsuite data pde`: comparison with independent solutions, PDEBench's layout, reproducibility, and errors."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from click.testing import CliRunner, Result
from scale import FULLY
from scipy import sparse
from scipy.sparse import linalg
from training import environment

from suite import hdf5, parallel
from suite.building import StoppedError
from suite.commands.data import data
from suite.configuration import ConfigurationError
from suite.ups import advection, darcy, pde_build
from suite.ups.advection import Initial
from suite.ups.pde_build import build
from suite.ups.recipe import Recipe

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")

ADVECTION = ("--task", "advection1d", "--samples", "7", "--points", "32")
DARCY = ("--task", "darcy2d", "--samples", "7", "--resolution", "8")
SMALL = {
    "advection1d": Recipe(task="advection1d", samples=7, seed=0, beta=1.0, size=32),
    "darcy2d": Recipe(task="darcy2d", samples=7, seed=0, beta=1.0, size=8),
}
BOTH = pytest.mark.parametrize("task", list(SMALL))


class Quiet:
    """Progress that counts its calls and raises KeyboardInterrupt in call number `last`."""

    def __init__(self, last: int | None = None) -> None:
        self.calls = 0
        self.last = last

    def progress(self, what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        self.calls += 1
        if self.calls == self.last:
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        raise AssertionError(line)


def sha(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(data, ["pde", *arguments])


def one_line(done: Result, code: int, *words: str) -> None:
    assert done.exit_code == code, done.output
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


# --- advection against the exact solution ---------------------------------------------------------------------------


def exact(initial: Initial, beta: float, x: float, t: float) -> float:
    """Compute u0(x - beta t) at one point."""
    origin = (x - beta * t) % 1.0
    waves = zip(initial.periods, initial.amplitudes, initial.phases, strict=True)
    u = sum(a * math.sin(2 * math.pi * n * origin + phi) for n, a, phi in waves)
    u = initial.sign * (abs(u) if initial.absolute else u)
    if initial.window is None:
        return u
    left, right = initial.window
    return u * (math.tanh((origin - left) / 0.01) - math.tanh((origin - right) / 0.01)) / 2


def of_kind(absolute: bool, windowed: bool) -> Initial:
    """Return the first initial state of seed 3 that has (or lacks) the absolute value and the window."""
    drawn = (advection.drawn(3, index) for index in range(2000))
    return next(i for i in drawn if (i.absolute, i.window is not None) == (absolute, windowed))


@pytest.mark.parametrize("beta", advection.BETAS)
@pytest.mark.parametrize(("absolute", "windowed"), [(False, False), (True, False), (False, True), (True, True)])
def test_advection_solution_is_exact(beta: float, absolute: bool, windowed: bool) -> None:
    initial = of_kind(absolute, windowed)
    found = advection.solution(initial, beta, 64)
    assert (found.shape, found.dtype) == ((201, 64), numpy.float64)
    for frame in (0, 1, 57, 100, 200):
        wanted = [exact(initial, beta, (i + 0.5) / 64, frame / 100) for i in range(64)]
        assert numpy.abs(found[frame] - wanted).max() < 1e-11  # rounding of x - beta t, times the window's slope of 50


@pytest.mark.parametrize("beta", [0.4, 2.0])
def test_advection_solution_satisfies_the_equation(beta: float) -> None:
    """du/dt = -beta du/dx is integrated from frame 0 with a spectral derivative and Runge-Kutta steps."""
    found = advection.solution(of_kind(False, False), beta, 32)
    wavenumbers = 2j * math.pi * numpy.fft.rfftfreq(32, 1 / 32)

    def slope(u: Any) -> Any:
        return -beta * numpy.fft.irfft(wavenumbers * numpy.fft.rfft(u), 32)

    u, step = found[0].copy(), 0.002
    for _ in range(165):
        one = slope(u)
        two = slope(u + step / 2 * one)
        three = slope(u + step / 2 * two)
        u += step / 6 * (one + 2 * two + 2 * three + slope(u + step * three))
    assert numpy.abs(u - found[33]).max() < 1e-4
    assert numpy.abs(found[33] - found[0]).max() > 0.1, "it moves"


def test_initial_conditions_have_pdebench_s_distribution() -> None:
    drawn = [advection.drawn(0, index) for index in range(3000)]
    assert {n for i in drawn for n in i.periods} == set(range(1, 9))
    assert all(len(i.periods) == 2 for i in drawn)
    amplitudes = numpy.array([i.amplitudes for i in drawn])
    assert (amplitudes.min() < 0.01, amplitudes.max() > 0.99, abs(amplitudes.mean() - 0.5) < 0.02) == (True,) * 3
    assert 0.08 < numpy.mean([i.absolute for i in drawn]) < 0.12
    assert 0.08 < numpy.mean([i.window is not None for i in drawn]) < 0.12
    assert 0.45 < numpy.mean([i.sign > 0 for i in drawn]) < 0.55
    windows = numpy.array([i.window for i in drawn if i.window is not None])
    assert ((windows > (0.1, 0.55)) & (windows < (0.45, 0.9))).all()


# --- Darcy flow against independent solutions -----------------------------------------------------------------------


def directly(a: Any, source: Any) -> Any:
    """Assemble the same discretisation cell by cell and solve it with a direct solver."""
    n = len(a)
    rows, columns, values = [], [], []
    for i in range(n):
        for j in range(n):
            diagonal = 0.0
            for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= k < n and 0 <= m < n:
                    flux = 2 / (1 / a[i, j] + 1 / a[k, m])
                    rows, columns, values = [*rows, i * n + j], [*columns, k * n + m], [*values, -flux]
                else:
                    flux = 2 * a[i, j]
                diagonal += flux
            rows, columns, values = [*rows, i * n + j], [*columns, i * n + j], [*values, diagonal]
    matrix = sparse.csc_matrix((values, (rows, columns)), shape=(n * n, n * n))
    return linalg.spsolve(matrix, numpy.broadcast_to(source, a.shape).reshape(-1) / n**2).reshape(n, n)


@pytest.mark.parametrize("index", range(3))
def test_darcy_solution_matches_a_direct_solver(index: int) -> None:
    a = darcy.coefficient(5, index, 16)
    wanted = directly(a, 1.0)
    assert numpy.abs(darcy.solve(a, 1.0) - wanted).max() < 1e-11 * wanted.max()


def test_darcy_solution_matches_a_direct_solver_for_random_coefficients() -> None:
    random = numpy.random.default_rng(0)
    a, source = random.uniform(0.1, 1.0, (13, 13)), random.standard_normal((13, 13))
    wanted = directly(a, source)
    assert numpy.abs(darcy.solve(a, source) - wanted).max() < 1e-11 * numpy.abs(wanted).max()


def smooth(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return a = 1 + xy/2, u = sin(pi x) sin(2 pi y), and their source."""
    sin_x, cos_x = numpy.sin(math.pi * x), numpy.cos(math.pi * x)
    sin_y, cos_y = numpy.sin(2 * math.pi * y), numpy.cos(2 * math.pi * y)
    a = 1 + x * y / 2
    slopes = y / 2 * math.pi * cos_x * sin_y + x / 2 * 2 * math.pi * sin_x * cos_y
    return a, sin_x * sin_y, 5 * math.pi**2 * a * sin_x * sin_y - slopes


def jumping(x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Return a, with a jump at x = 1/2, u = x (1 - x)(x - 1/2) sin(pi y)/a, and their source; a u_x is continuous."""
    a = numpy.where(x < 0.5, 1.0, 0.1) + 0 * y
    g, bend = x * (1 - x) * (x - 0.5), 3 - 6 * x
    return a, g * numpy.sin(math.pi * y) / a, (math.pi**2 * g - bend) * numpy.sin(math.pi * y)


@pytest.mark.parametrize("made", [smooth, jumping])
def test_darcy_converges_to_a_manufactured_solution(made: Any) -> None:
    errors = []
    for n in (16, 32, 64):
        x = advection.centres(n)
        a, u, source = made(x[:, None], x[None, :])
        errors.append(numpy.abs(darcy.solve(a, source) - u).max())
    orders = numpy.log2(numpy.array(errors[:-1]) / errors[1:])
    assert (orders > 1.9).all(), "second order, where a jumps too"
    assert errors[-1] < 0.01


def test_darcy_solve_raises_error_without_convergence() -> None:
    with pytest.raises(ArithmeticError, match="no solution after 300 steps"):
        darcy.solve(numpy.full((8, 8), numpy.nan), 1.0)


@pytest.mark.parametrize("n", [8, 65])
def test_darcy_field_is_a_sum_of_cosines(n: int) -> None:
    kept = min(n, 64)
    white = numpy.random.default_rng([7, 3]).standard_normal((64, 64))[:kept, :kept]
    m = numpy.arange(kept)
    cosines = numpy.where(m > 0, math.sqrt(2), 1) * numpy.cos(math.pi * m * advection.centres(n)[:, None])
    weights = white / (math.pi**2 * (m[:, None] ** 2 + m**2) + 9)
    weights[0, 0] = 0
    wanted = cosines @ weights @ cosines.T
    assert numpy.abs(darcy.field(7, 3, n) - wanted).max() < 1e-14
    assert numpy.array_equal(darcy.coefficient(7, 3, n), numpy.where(wanted > 0, 1.0, 0.1))


def test_darcy_coefficients_are_two_valued_and_independent_of_the_resolution() -> None:
    fine = darcy.coefficient(1, 2, 192)
    assert numpy.array_equal(fine[1::3, 1::3], darcy.coefficient(1, 2, 64)), "more cells resolve the same field"
    drawn = numpy.stack([darcy.coefficient(0, index, 16) for index in range(200)])
    assert set(numpy.unique(drawn)) == {0.1, 1.0}
    assert 0.45 < (drawn == 1).mean() < 0.55
    assert (drawn[:, 1:] == drawn[:, :-1]).mean() > 0.85, "neighbours mostly agree"
    assert 0.03 < (drawn[:, 0, 0] != drawn[:, -1, -1]).mean() < 0.97


# --- the file -------------------------------------------------------------------------------------------------------


def test_advection_file_has_pdebench_s_layout() -> None:
    done = invoked("a.hdf5", *ADVECTION, "--beta", "0.4")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{sha('a.hdf5')}  a.hdf5\n"
    assert done.stderr == "wrote a.hdf5: 7 samples of advection1d, beta 0.4, 32 cells\n"
    assert os.listdir() == ["a.hdf5"], "nothing is left beside it"
    with h5py.File("a.hdf5") as file:
        assert sorted(file) == ["t-coordinate", "tensor", "x-coordinate"]
        assert {file[name].dtype for name in file} == {numpy.dtype("f4")}
        assert file["tensor"].shape == (7, 201, 32)
        assert file["tensor"].chunks is None, "contiguous, as PDEBench's"
        assert (file["t-coordinate"].shape, file["x-coordinate"].shape) == ((202,), (32,))
        assert numpy.allclose(file["t-coordinate"], numpy.arange(202) / 100, rtol=1e-6, atol=0)
        assert numpy.array_equal(file["x-coordinate"], (numpy.arange(32) + 0.5) / 32)
        assert (file.attrs["beta"], file.attrs["beta"].dtype) == (0.4, numpy.float64)
        for index in range(7):
            wanted = advection.solution(advection.drawn(0, index), 0.4, 32)
            assert numpy.array_equal(file["tensor"][index], wanted.astype("f4"))


def test_darcy_file_has_pdebench_s_layout() -> None:
    done = invoked("d.hdf5", *DARCY, "--beta", ".01", "--seed", "4")
    assert done.exit_code == 0, done.output
    assert "wrote d.hdf5: 7 samples of darcy2d, beta 0.01, 8 x 8 cells\n" in done.output
    with h5py.File("d.hdf5") as file:
        assert sorted(file) == ["nu", "tensor", "x-coordinate", "y-coordinate"]
        assert {file[name].dtype for name in file} == {numpy.dtype("f4")}
        assert (file["nu"].shape, file["tensor"].shape) == ((7, 8, 8), (7, 1, 8, 8))
        assert file.attrs["beta"] == 0.01
        for index in range(7):
            a = darcy.coefficient(4, index, 8)
            assert numpy.array_equal(file["nu"][index], a.astype("f4"))
            assert numpy.allclose(file["tensor"][index, 0], directly(a, 0.01), rtol=1e-6, atol=0)


def test_several_betas_are_written_to_a_file_each() -> None:
    done = invoked("folder", *ADVECTION, "--beta", "7", "--beta", "0.1", "--beta", "7.0")
    assert done.exit_code == 0, done.output
    names = ["1D_Advection_Sols_beta0.1.hdf5", "1D_Advection_Sols_beta7.0.hdf5"]
    assert sorted(os.listdir("folder")) == names
    assert done.stdout == "".join(f"{sha(f'folder/{name}')}  folder/{name}\n" for name in names)
    with h5py.File(f"folder/{names[0]}") as slow, h5py.File(f"folder/{names[1]}") as fast:
        assert numpy.array_equal(slow["tensor"][:, 0], fast["tensor"][:, 0]), (
            "the same initial conditions, as PDEBench's"
        )
        assert numpy.array_equal(slow["tensor"][:, 70], fast["tensor"][:, 1])
    done = invoked("darcy", *DARCY, "--beta", "all")
    assert sorted(os.listdir("darcy")) == sorted(
        f"2D_DarcyFlow_beta{b}_Train.hdf5" for b in (0.01, 0.1, 1.0, 10.0, 100.0)
    )


def test_default_sizes_are_pdebench_s() -> None:
    assert invoked("a.hdf5", "--task", "advection1d", "--samples", "1").exit_code == 0
    assert invoked("d.hdf5", "--task", "darcy2d", "--samples", "1").exit_code == 0
    with h5py.File("a.hdf5") as a, h5py.File("d.hdf5") as d:
        assert (a["tensor"].shape, d["tensor"].shape) == ((1, 201, 1024), (1, 1, 128, 128))
        assert (a.attrs["beta"], d.attrs["beta"]) == (1.0, 1.0)


# --- reproducibility ------------------------------------------------------------------------------------------------


@BOTH
def test_an_identical_file_is_kept(task: str) -> None:
    first = build(Path("a.hdf5"), SMALL[task], Quiet())
    before = Path("a.hdf5").stat()
    again = build(Path("a.hdf5"), SMALL[task], Quiet())
    assert (first.kept, again.kept, first.sha256, Path("a.hdf5").stat()) == (False, True, again.sha256, before)
    elsewhere = build(Path("b.hdf5"), SMALL[task], Quiet())
    assert elsewhere.sha256 == first.sha256 == sha("b.hdf5")
    assert build(Path("b.hdf5"), replace(SMALL[task], seed=1), Quiet(), overwrite=True).sha256 != first.sha256


@BOTH
def test_a_sample_depends_only_on_seed_and_index(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build(Path("a.hdf5"), SMALL[task], Quiet())
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    build(Path("b.hdf5"), replace(SMALL[task], samples=5), Quiet())
    with h5py.File("a.hdf5") as a, h5py.File("b.hdf5") as b:
        assert numpy.array_equal(a["tensor"][:5], b["tensor"])
        assert not numpy.array_equal(a["tensor"][0], a["tensor"][1])


@BOTH
def test_number_of_workers_does_not_change_the_bytes(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(Path("one.hdf5"), SMALL[task], Quiet())
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    watcher = Quiet()
    assert build(Path("two.hdf5"), SMALL[task], watcher, workers=2).sha256 == whole.sha256
    assert watcher.calls >= 4, "it tells of each block"
    assert sorted(os.listdir()) == ["one.hdf5", "two.hdf5"]


def test_first_samples_match_stored_values() -> None:
    """Samples must not change between versions of the code; a change requires another VERSION."""
    initial = advection.drawn(0, 0)
    assert initial.periods == (7, 6)
    assert initial.amplitudes == pytest.approx((0.2697867137638703, 0.04097352393619469), rel=1e-12)
    field = darcy.coefficient(0, 0, 8)
    drawn = ["".join("#" if value == 1 else "." for value in row) for row in field]
    assert drawn == ["#...####", "##...###", "##....##", "##.....#", "###..##.", ".###.##.", "..##....", "...#...."]


@BOTH
def test_a_run_interrupted_anywhere_resumes_to_the_same_bytes(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pde_build, "BLOCK", 3)
    watcher = Quiet()
    whole = build(Path("whole.hdf5"), SMALL[task], watcher)
    for last in range(1, watcher.calls + 1):
        with pytest.raises(KeyboardInterrupt):
            build(Path("a.hdf5"), SMALL[task], Quiet(last))
        assert not Path("a.hdf5").exists()
        assert list(Path("a.hdf5.parts").glob("part-samples-*.npy"))
        assert build(Path("a.hdf5"), SMALL[task], Quiet()).sha256 == whole.sha256
        assert sorted(os.listdir()) == ["a.hdf5", "whole.hdf5"]
        Path("a.hdf5").unlink()


def test_parts_with_another_block_size_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may divide the samples differently."""
    whole = build(Path("whole.hdf5"), SMALL["darcy2d"], Quiet())
    monkeypatch.setattr(pde_build, "BLOCK", 3)
    with pytest.raises(KeyboardInterrupt):
        build(Path("a.hdf5"), SMALL["darcy2d"], Quiet(2))
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    assert build(Path("a.hdf5"), SMALL["darcy2d"], Quiet()).sha256 == whole.sha256


KILLED = """
import os, signal, sys
from pathlib import Path
from suite.ups import pde_build, recipe
task, moment = sys.argv[1], int(sys.argv[2])
replace, calls = os.replace, 0

def replaced(source, target):
    global calls
    calls += 1
    if calls == moment and moment % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)

class Quiet:
    progress = say = lambda self, *shown: None

os.replace = replaced
pde_build.BLOCK = 2
size = {"advection1d": 32, "darcy2d": 8}[task]
made = recipe.Recipe(task=task, samples=7, seed=0, beta=1.0, size=size)
pde_build.build(Path("a.hdf5"), made, Quiet())
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize(
    ("task", "moment"),
    [("advection1d", 1), *(pytest.param(*p, marks=FULLY) for p in (("darcy2d", 2), ("advection1d", 5)))],
)
def test_a_killed_run_is_resumed(task: str, moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is killed before or after it renames one of its files: 4 blocks, then the whole file."""
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    whole = build(Path("whole.hdf5"), SMALL[task], Quiet())
    killed = subprocess.run([sys.executable, "-c", KILLED, task, str(moment)], env=environment())
    assert killed.returncode == -signal.SIGKILL
    have = len(list(Path("a.hdf5.parts").glob("part-samples-*.npy")))
    assert (Path("a.hdf5").exists(), have) == (False, moment - moment % 2)
    made: list[int] = []
    sample = pde_build.sample
    monkeypatch.setattr(pde_build, "sample", lambda recipe, index: (made.append(index), sample(recipe, index))[1])
    assert build(Path("a.hdf5"), SMALL[task], Quiet()).sha256 == whole.sha256 == sha("a.hdf5")
    assert len(made) == max(7 - 2 * have, 0), "what was done is not done again"
    assert sorted(os.listdir()) == ["a.hdf5", "whole.hdf5"]


INTERRUPTED = """
import os, signal
from pathlib import Path
from suite.ups import pde_build, recipe

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored

class Interrupted:
    say = None

    def progress(self, *shown):
        os.killpg(0, signal.SIGINT)  # as a terminal does for Ctrl-C

pde_build.BLOCK = 1
made = recipe.Recipe(task="darcy2d", samples=7, seed=0, beta=1.0, size=8)
try:
    pde_build.build(Path("a.hdf5"), made, Interrupted(), workers=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_workers_print_nothing_when_the_run_is_interrupted() -> None:
    whole = build(Path("whole.hdf5"), SMALL["darcy2d"], Quiet())
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment(), capture_output=True, text=True, start_new_session=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
    assert list(Path("a.hdf5.parts").glob("part-samples-*.npy"))
    assert build(Path("a.hdf5"), SMALL["darcy2d"], Quiet()).sha256 == whole.sha256


ORPHANED = """
import multiprocessing, os, signal, time
from suite import parallel

def killed(ends):
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

parallel.connection.wait = killed
list(parallel.each(time.sleep, [3600, 3600], 2))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker finishes its task first")
def test_workers_end_when_the_run_is_killed() -> None:
    """The workers are in a task of one hour."""
    with Path("pids").open("w") as pids:  # a pipe would be read until the workers have ended
        done = subprocess.run([sys.executable, "-c", ORPHANED], env=environment(), stdout=pids)
    assert done.returncode == -signal.SIGKILL
    workers = Path("pids").read_text().split()
    assert len(workers) == 2
    try:
        deadline = time.monotonic() + 60
        while any(map(alive, workers)):
            assert time.monotonic() < deadline, "a worker outlived the run"
            time.sleep(0.01)
    finally:
        for pid in filter(alive, workers):
            os.kill(int(pid), signal.SIGKILL)


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_damaged_parts_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    watcher = Quiet()
    whole = build(Path("whole.hdf5"), SMALL["darcy2d"], watcher)
    with pytest.raises(KeyboardInterrupt):
        build(Path("a.hdf5"), SMALL["darcy2d"], Quiet(watcher.calls))
    parts = sorted(Path("a.hdf5.parts").glob("*.npy"))
    os.truncate(parts[0], 100)
    parts[1].write_bytes(b"")
    parts[2].unlink()
    assert build(Path("a.hdf5"), SMALL["darcy2d"], Quiet()).sha256 == whole.sha256


# --- several processes ----------------------------------------------------------------------------------------------


def test_an_exception_in_a_worker_is_raised_in_the_main_process() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        list(parallel.each(time.sleep, [-1, -2], 2))  # type: ignore[arg-type]
    assert list(parallel.each(time.sleep, [0], 2)) == [0], "one task needs no other process"


@pytest.mark.parametrize(
    ("work", "tasks", "message"), [(os._exit, [3, 3], "exit code 3"), (signal.raise_signal, [9, 9], "signal SIGKILL")]
)
def test_error_says_how_a_worker_ended(work: Any, tasks: list[int], message: str) -> None:
    with pytest.raises(StoppedError, match=rf"^a worker process ended unexpectedly \({message}\); lower --workers"):
        list(parallel.each(work, tasks, 2))


def test_parts_are_kept_after_a_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pde_build, "BLOCK", 2)
    whole = build(Path("whole.hdf5"), SMALL["darcy2d"], Quiet())

    def ends(work: Any, tasks: list[int], workers: int) -> Any:
        work(tasks[0])
        yield tasks[0]
        raise StoppedError("a worker process ended unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "each", ends)
        one_line(invoked("a.hdf5", *DARCY, "--workers", "2"), 1, "a worker process ended unexpectedly")
    assert len(list(Path("a.hdf5.parts").glob("*.npy"))) == 1
    assert build(Path("a.hdf5"), SMALL["darcy2d"], Quiet()).sha256 == whole.sha256


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--task is missing; give advection1d or darcy2d"]),
        (["--task", "burgers"], ["--task burgers: there is no such task; give advection1d or darcy2d"]),
        ([*ADVECTION, "--samples", "0"], ["--samples 0: give 1 to 1000000"]),
        ([*ADVECTION, "--samples", str(10**12)], ["--samples 1000000000000: give 1 to 1000000"]),
        (
            [*ADVECTION, "--beta", "3"],
            ["--beta 3: advection1d has no such beta; give 0.1, 0.2, 0.4, 0.7, 1, 2, 4, 7 or"],
        ),
        ([*DARCY, "--beta", "0.2"], ["--beta 0.2: darcy2d has no such beta; give 0.01, 0.1, 1, 10, 100 or all"]),
        ([*DARCY, "--beta", "nan"], ["--beta nan"]),
        ([*DARCY, "--beta", "fast\nly"], [r"--beta fast ly: darcy2d has no such beta"]),
        ([*DARCY, "--points", "64"], ["--points 64: it is an option of advection1d; give --resolution"]),
        ([*ADVECTION, "--resolution", "64"], ["--resolution 64: it is an option of darcy2d; give --points"]),
        ([*ADVECTION, "--points", "8"], ["--points 8: give 32 to 16384"]),
        ([*DARCY, "--resolution", "-1"], ["--resolution -1: give 8 to 1024"]),
        ([*DARCY, "--workers", "0"], ["--workers 0: give 1 to 256"]),
    ],
)
def test_a_wrong_option_is_reported_in_one_line(arguments: list[str], words: list[str]) -> None:
    one_line(invoked("a.hdf5", *arguments), 2, *words)
    assert os.listdir() == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("out", "arguments", "words"),
    [
        ("folder", DARCY, ["folder is a folder; name the file to write, e.g. folder/2D_DarcyFlow_beta1.0_Train.hdf5"]),
        ("text", DARCY, ["text exists and was not made by `perfsuite data pde`", "--overwrite"]),
        ("text", (*DARCY, "--beta", "all"), ["text is a file, and 5 betas make a file each; name a folder"]),
        ("text/a.hdf5", DARCY, ["cannot write text/a.hdf5: ", "name another file"]),
        ("/proc/a.hdf5", DARCY, ["cannot write /proc/a.hdf5: ", "name another file"]),
        (
            "made",
            (*DARCY, "--seed", "1"),
            ["made exists and has seed 0, not 1; name another file, or give --overwrite"],
        ),
        ("made", (*DARCY, "--beta", "10"), ["made exists and has beta 1.0, not 10.0; name another file"]),
        ("made", ADVECTION, ["made exists and has task darcy2d, not advection1d; name another file"]),
        ("damaged", DARCY, ["damaged exists and is damaged; give --overwrite to make it again"]),
        ("group", DARCY, ["group exists and is damaged; give --overwrite to make it again"]),
        ("betas", (*DARCY, "--beta", "all"), ["betas/2D_DarcyFlow_beta10.0_Train.hdf5 is a folder; name another"]),
    ],
)
def test_a_wrong_output_path_is_reported_in_one_line(out: str, arguments: tuple[str, ...], words: list[str]) -> None:
    Path("folder").mkdir()
    Path("betas/2D_DarcyFlow_beta10.0_Train.hdf5").mkdir(parents=True)
    Path("text").write_text("mine")
    for name in ("made", "damaged", "group"):
        build(Path(name), SMALL["darcy2d"], Quiet())
    with h5py.File("damaged", "r+") as file:
        file["tensor"][3, 0, 2, 2] = 0
    with h5py.File("group", "r+") as file:
        del file["nu"]
        file.create_group("nu")
    one_line(invoked(out, *arguments), 2, *words)
    assert Path("text").read_text() == "mine"
    assert not list(Path().rglob("*.parts"))


def test_a_name_that_is_too_long_is_reported_in_one_line() -> None:
    one_line(invoked("a" * 300, *DARCY), 1, f"cannot access {'a' * 300}: File name too long; name another path")


def test_overwrite_replaces_an_existing_file() -> None:
    whole = build(Path("whole.hdf5"), SMALL["darcy2d"], Quiet())
    Path("a.hdf5").write_text("mine")
    assert invoked("a.hdf5", *DARCY, "--overwrite").stdout == f"{whole.sha256}  a.hdf5\n"


def test_a_second_process_for_the_same_file_is_rejected() -> None:
    from filelock import FileLock

    with FileLock("a.hdf5.parts.lock"):
        one_line(invoked("a.hdf5", *DARCY), 1, "another process is making a.hdf5")


def test_a_full_disk_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numpy, "save", full)
    one_line(
        invoked("a.hdf5", *DARCY), 1, "cannot write a.hdf5: No space left on device; name another file, or make room"
    )


def test_interruption_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "write", stop)
        done = invoked("a.hdf5", *DARCY)
    assert (done.exit_code, done.output) == (130, "interrupted; the same command goes on from here\n")
    assert invoked("a.hdf5", *DARCY).exit_code == 0


def test_missing_h5py_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    one_line(invoked("a.hdf5", *DARCY), 1, "the package h5py", "pip install 'perfsuite[train]'")


def test_importing_pde_build_does_not_import_torch_or_h5py() -> None:
    code = "import suite.ups.pde_build, sys; print([m for m in ('torch', 'h5py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recipes_are_checked_before_the_first_file_is_written() -> None:
    build(Path("all/1D_Advection_Sols_beta7.0.hdf5"), replace(SMALL["advection1d"], beta=7.0, seed=3), Quiet())
    one_line(invoked("all", *ADVECTION, "--beta", "all"), 2, "beta7.0.hdf5 exists and has seed 3, not 0")
    assert os.listdir("all") == ["1D_Advection_Sols_beta7.0.hdf5"]
    with pytest.raises(ConfigurationError, match="--workers 257: give 1 to 256"):
        build(Path("a.hdf5"), SMALL["darcy2d"], Quiet(), workers=257)
