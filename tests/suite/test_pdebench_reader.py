"""The reader of PDEBench's files: both equations, lazy reading, batches, and errors for invalid files."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from perfsuite.errors import PerfsuiteError
from suite.ups import advection, darcy
from suite.ups.fields import Fields, Normalisation
from suite.ups.pde_build import build
from suite.ups.pdebench import Examples, open_pde
from suite.ups.recipe import Recipe
from suite.ups.task_fields import from_file

h5py = pytest.importorskip("h5py", reason="h5py is not installed: pip install 'perfsuite[train]'")

WAVES = "1D_Advection_Sols_beta0.4.hdf5"
FLOW = "2D_DarcyFlow_beta10.0_Train.hdf5"
REMEDY = "; name another file, or make one with `perfsuite data pde`"


class Quiet:
    """Progress that ignores everything."""

    def progress(self, what: str, done: int, total: int) -> None: ...

    def say(self, line: str) -> None: ...


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder with a file of ten samples per equation. Tests that change a file use a copy."""
    folder = tmp_path_factory.mktemp("pde")
    build(folder / WAVES, Recipe(task="advection1d", samples=10, seed=0, beta=0.4, size=32), Quiet())
    build(folder / FLOW, Recipe(task="darcy2d", samples=10, seed=0, beta=10.0, size=8), Quiet())
    return folder


def write(path: str, attributes: dict[str, Any] | None = None, **datasets: Any) -> str:
    """Write an HDF5 file; `t_coordinate` is the dataset t-coordinate."""
    with h5py.File(path, "w") as file:
        for name, value in datasets.items():
            file[name.replace("_coordinate", "-coordinate")] = value
        file.attrs.update(attributes or {})
    return path


def scalar(frames: int = 5, points: int = 6, **changes: Any) -> dict[str, Any]:
    """Return PDEBench's datasets of a scalar equation in one dimension, with one more time than frames."""
    random = numpy.random.default_rng(0)
    found = {
        "tensor": random.standard_normal((3, frames, points)).astype("f4"),
        "t_coordinate": (numpy.arange(frames + 1) / 100).astype("f4"),
        "x_coordinate": ((numpy.arange(points) + 0.5) / points).astype("f4"),
    }
    return {**found, **changes}


def porous(cells: int = 4, **changes: Any) -> dict[str, Any]:
    """Return the datasets of Darcy flow, with the t-coordinate of PDEBench's published files."""
    random = numpy.random.default_rng(0)
    x = ((numpy.arange(cells) + 0.5) / cells).astype("f4")
    found = {
        "nu": random.choice([0.1, 1.0], (3, cells, cells)).astype("f4"),
        "tensor": random.standard_normal((3, 1, cells, cells)).astype("f4"),
        "x_coordinate": x,
        "y_coordinate": x,
        "t_coordinate": (numpy.arange(10) / 4).astype("f4"),
    }
    return {**found, **changes}


# --- valid files ----------------------------------------------------------------------------------------------------


def test_examples_of_generated_advection_are_consecutive_frames(made: Path) -> None:
    found = open_pde(made / WAVES)
    assert (found.task, found.beta, found.samples, found.frames, found.shape) == ("advection1d", 0.4, 10, 201, (32,))
    assert numpy.allclose(found.times, numpy.arange(201) / 100, atol=1e-7)
    assert numpy.array_equal(found.coordinates[0], (numpy.arange(32) + 0.5) / 32)
    examples = Examples(found)
    assert len(examples) == 10 * 200
    for index, sample, frame in ((0, 0, 0), (199, 0, 199), (200, 1, 0), (777, 3, 177), (-1, 9, 199)):
        before, after, time, of = examples[index]
        wanted = advection.solution(advection.drawn(0, sample), 0.4, 32)[frame : frame + 2].astype("f4")
        assert (before.dtype, after.dtype) == (numpy.float32, numpy.float32)
        assert numpy.array_equal([before, after], wanted)
        assert (of, time) == (sample, pytest.approx(frame / 100))
    for index in (2000, -2001):
        with pytest.raises(IndexError):
            examples[index]
    examples.close()


def test_examples_of_generated_darcy_are_coefficient_and_solution(made: Path) -> None:
    found = open_pde(str(made / FLOW))
    assert (found.task, found.beta, found.samples, found.frames, found.shape) == ("darcy2d", 10.0, 10, 1, (8, 8))
    examples = Examples(found)
    assert len(examples) == 10
    before, after, time, sample = examples[6]
    a = darcy.coefficient(0, 6, 8)
    assert numpy.array_equal(before, a.astype("f4"))
    assert numpy.allclose(after, darcy.solve(a, 10.0), rtol=1e-6, atol=0)
    assert (time, sample) == (0.0, 6)
    examples.close()


@pytest.mark.parametrize(
    ("name", "attributes", "beta"),
    [
        ("a.hdf5", {"beta": 0.7}, 0.7),
        ("1D_Advection_Sols_beta0.1.hdf5", {"beta": 4.0}, 4.0),
        ("1D_Advection_Sols_beta0.1.hdf5", {}, 0.1),
        ("advection.hdf5", {}, None),
        ("a.hdf5", {"beta": numpy.array([2.0])}, 2.0),
    ],
)
def test_advection_files_of_pdebench_are_read(name: str, attributes: dict[str, Any], beta: float | None) -> None:
    content = scalar()
    found = open_pde(write(name, attributes, **content))
    assert (found.task, found.beta, found.frames, found.shape) == ("advection1d", beta, 5, (6,))
    assert len(found.times) == 5, "the last of six times has no frame"
    assert numpy.array_equal(Examples(found)[5].after, content["tensor"][1, 2])


def test_darcy_files_of_pdebench_are_read() -> None:
    content = porous()
    found = open_pde(write("a.hdf5", {"beta": 0.01}, **content))
    assert (found.task, found.beta, found.shape) == ("darcy2d", 0.01, (4, 4))
    assert numpy.array_equal(Examples(found)[2].before, content["nu"][2])
    assert numpy.array_equal(Examples(found)[2].after, content["tensor"][2, 0])


def test_float64_is_read_as_float32() -> None:
    content = scalar(tensor=numpy.full((1, 2, 6), 1 / 3))
    assert Examples(open_pde(write("a.hdf5", {"beta": 1.0}, **content)))[0].before.dtype == numpy.float32


def test_open_examples_can_be_pickled(made: Path) -> None:
    examples = Examples(open_pde(made / FLOW))
    first = examples[3].after
    other = pickle.loads(pickle.dumps(examples))
    assert other._file is None
    assert numpy.array_equal(other[3].after, first)
    examples.close()
    assert numpy.array_equal(examples[3].after, first), "it opens again"
    examples.close()
    other.close()


# --- invalid files --------------------------------------------------------------------------------------------------


def message(path: str | Path) -> str:
    """Return the error of opening the file, and assert that it is one line that names the file."""
    with pytest.raises(PerfsuiteError) as error:
        open_pde(path)
    line = str(error.value)
    assert line.startswith("data: ")
    assert str(path) in line
    assert "\n" not in line
    return line


def test_a_missing_file_and_a_folder_are_reported() -> None:
    Path("folder").mkdir()
    assert message("a.hdf5") == (
        "data: there is no file a.hdf5; make it with `perfsuite data pde a.hdf5 --task advection1d|darcy2d`"
    )
    assert message("folder") == "data: folder is a folder; name an HDF5 file in it"


@pytest.mark.parametrize("content", [b"", b"no HDF5", b"\x93NUMPY\x01\x00" + bytes(200)])
def test_a_file_that_is_not_hdf5_is_reported(content: bytes) -> None:
    Path("a.hdf5").write_bytes(content)
    assert message("a.hdf5") == f"data: a.hdf5 is not an HDF5 file{REMEDY}"


@pytest.mark.parametrize("keep", [0.02, 0.5, 0.999])
@pytest.mark.parametrize("name", [WAVES, FLOW])
def test_a_truncated_file_is_reported(made: Path, name: str, keep: float) -> None:
    shutil.copy(made / name, name)
    os.truncate(name, int(os.path.getsize(name) * keep))
    line = message(name)
    assert line.startswith(f"data: {name} is truncated or damaged: ")
    assert line.endswith(REMEDY)


@pytest.mark.parametrize(
    ("name", "attributes", "datasets", "equation"),
    [
        ("a.hdf5", {"Nu": 0.01}, scalar(), "Burgers"),
        ("1D_Burgers_Sols_Nu0.01.hdf5", {}, scalar(), "Burgers"),
        ("a.hdf5", {"Nu": 0.5, "rho": 1.0}, scalar(), "reaction-diffusion"),
        ("ReacDiff_Nu0.5_Rho1.0.hdf5", {}, scalar(), "reaction-diffusion"),
        (
            "a.hdf5",
            {"eta": 0.1},
            {"density": numpy.ones((1, 2, 3)), "Vx": numpy.ones((1, 2, 3))},
            "compressible Navier-Stokes",
        ),
        (
            "a.h5",
            {},
            {name: numpy.ones((1, 2, 3, 3, 2)) for name in ("velocity", "particles", "force", "t")},
            "incompressible Navier-Stokes",
        ),
        ("a.h5", {}, {"0000/data": numpy.ones((5, 6, 1)), "0001/data": numpy.ones((5, 6, 1))}, "diffusion-sorption"),
        ("a.h5", {}, {"0000/data": numpy.ones((5, 6, 6, 2))}, "diffusion-reaction or shallow-water"),
    ],
)
def test_files_of_other_equations_are_reported(
    name: str, attributes: dict[str, Any], datasets: dict[str, Any], equation: str
) -> None:
    assert message(write(name, attributes, **datasets)) == (
        f"data: {name} is PDEBench's file of the {equation} equation, where advection1d or darcy2d is needed{REMEDY}"
    )


def without(content: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != name}


@pytest.mark.parametrize(
    ("datasets", "what"),
    [
        ({}, "is not laid out as PDEBench does: it has no dataset tensor, but nothing"),
        (
            {"u": numpy.ones(3), "v": numpy.ones(3)},
            "is not laid out as PDEBench does: it has no dataset tensor, but u, v",
        ),
        (scalar(tensor=numpy.ones((3, 5), "f4")), "has a tensor of the shape [3, 5], where [samples, frames, points]"),
        (
            scalar(tensor=numpy.ones((0, 5, 6), "f4")),
            "has a tensor of the shape [0, 5, 6], where [samples, frames, poin",
        ),
        (scalar(frames=1), "has 1 frame of each sample, where 2 or more are needed"),
        (scalar(t_coordinate=numpy.arange(4.0)), "has 4 times for 5 frames"),
        (scalar(t_coordinate=numpy.zeros(6)), "has a t-coordinate that does not increase"),
        (scalar(x_coordinate=numpy.arange(7.0)), "has coordinates of [7] cells for fields of [6]"),
        (scalar(x_coordinate=numpy.full(6, numpy.nan)), "has a x-coordinate that is no list of numbers"),
        (scalar(x_coordinate=numpy.ones((6, 1))), "has a x-coordinate that is no list of numbers"),
        (scalar(tensor=numpy.ones((3, 5, 6), "i4")), "has tensor of the type int32, where floating-point numbers are"),
        (without(scalar(), "t_coordinate"), "has no dataset t-coordinate"),
        (without(porous(), "y_coordinate"), "has no dataset y-coordinate"),
        (without(porous(), "nu"), "has a tensor of four dimensions, as Darcy flow has, but no dataset nu"),
        (porous(nu=numpy.ones((3, 4, 5), "f4")), "has nu [3, 4, 5] and tensor [3, 1, 4, 4], where [samples, x, y] and"),
        (porous(tensor=numpy.ones((3, 2, 4, 4), "f4")), "has nu [3, 4, 4] and tensor [3, 2, 4, 4], where [samples"),
        (porous(tensor=numpy.ones((3, 4, 4), "f4")), "has a tensor of the shape [3, 4, 4], where [samples, 1, x, y]"),
        (porous(nu=numpy.ones((3, 4, 4), "i8")), "has nu of the type int64, where floating-point numbers are needed"),
    ],
)
def test_a_wrong_layout_is_reported(datasets: dict[str, Any], what: str) -> None:
    line = message(write("a.hdf5", {"beta": 1.0}, **datasets))
    assert line.startswith(f"data: a.hdf5 {what}")
    assert line.endswith(REMEDY)


def test_frames_at_uneven_times_are_refused() -> None:
    path = write("a.hdf5", {"beta": 1.0}, **scalar(t_coordinate=numpy.array([0.0, 1, 2, 4, 5, 6])))
    with pytest.raises(PerfsuiteError, match=r"a\.hdf5 has frames 1 to 2 s apart; the trainer needs even steps"):
        from_file(path, "advection1d", validation=0.5, seed=0)


def test_a_file_that_does_not_say_its_equation_is_reported() -> None:
    line = message(write("a.hdf5", **scalar()))
    assert "does not say whether it is of advection or of Burgers' equation" in line
    assert "give it PDEBench's name 1D_Advection_Sols_beta<beta>.hdf5 or the attribute beta" in line


def test_an_attribute_beta_that_is_no_number_is_reported() -> None:
    assert "has the attribute beta nan, which is no number" in message(write("a.hdf5", {"beta": numpy.nan}, **scalar()))
    assert "is truncated or damaged: could not convert" in message(write("b.hdf5", {"beta": "fast"}, **scalar()))


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf])
def test_nan_and_infinite_values_are_reported_when_they_are_read(value: float) -> None:
    waves = scalar()
    waves["tensor"][1, 3, 2] = value
    examples = Examples(open_pde(write("a.hdf5", {"beta": 1.0}, **waves)))
    assert numpy.isfinite(examples[5].after).all(), "the frames before are right"
    for index in (6, 7):
        with pytest.raises(PerfsuiteError, match=r"^data: a.hdf5 has NaN or infinite values in tensor, sample 1; name"):
            examples[index]
    flow = porous()
    flow["nu"][2, 0, 0] = value
    with pytest.raises(PerfsuiteError, match="has NaN or infinite values in nu, sample 2; name another file"):
        Examples(open_pde(write("b.hdf5", **flow)))[2]
    with pytest.raises(PerfsuiteError, match=r"^data: a.hdf5 has NaN or infinite values in tensor, sample 1; name"):
        Fields("a.hdf5", seed=seed_where(3, 1))


def seed_where(samples: int, trained: int) -> int:
    """Return a seed that puts the sample into the training set, in a file with this number of samples."""
    write("other.hdf5", {"beta": 1.0}, **scalar(tensor=numpy.random.default_rng(0).random((samples, 2, 6))))
    return next(seed for seed in range(99) if trained in Fields("other.hdf5", seed=seed).samples["train"])


def test_a_file_that_is_replaced_during_use_raises_error(made: Path) -> None:
    shutil.copy(made / FLOW, "a.hdf5")
    examples = Examples(open_pde("a.hdf5"))
    shutil.copy(made / WAVES, "a.hdf5")
    with pytest.raises(PerfsuiteError, match=r"^data: a.hdf5 was replaced while it was used; begin anew$"):
        examples[0]
    os.remove("a.hdf5")
    with pytest.raises(PerfsuiteError, match=r"^data: a.hdf5 can no longer be read: .*; begin anew$"):
        examples[0]


def test_a_dataset_that_cannot_be_read_is_reported(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Examples(open_pde(made / FLOW))
    monkeypatch.setattr(examples, "_open", lambda: {"nu": None})
    with pytest.raises(PerfsuiteError, match=r" is truncated or damaged: .*; name another file"):
        examples[0]


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WAVES, FLOW])
def test_split_depends_only_on_the_seed(made: Path, name: str) -> None:
    fields = Fields(made / name, validation=0.3, seed=5)
    train, validation = fields.samples["train"], fields.samples["validation"]
    assert (len(train), len(validation)) == (7, 3)
    assert sorted(train + validation) == list(range(10))
    assert Fields(made / name, validation=0.3, seed=5).samples == fields.samples
    assert any(Fields(made / name, validation=0.3, seed=seed).samples != fields.samples for seed in range(3))
    assert fields.count("train") == 7 * (200 if name == WAVES else 1)


@pytest.mark.parametrize(("part", "held"), [(0.001, 1), (0.999, 9)])
def test_each_split_has_at_least_one_sample(made: Path, part: float, held: int) -> None:
    assert len(Fields(made / FLOW, validation=part).samples["validation"]) == held


def test_advection_batch_has_normalised_consecutive_frames(made: Path) -> None:
    fields = Fields(made / WAVES, validation=0.2, seed=1)
    with h5py.File(made / WAVES) as file:
        tensor = file["tensor"][()]
    train = tensor[fields.samples["train"]].astype("f8")
    assert fields.before is fields.after, "what goes in and what comes out are the same quantity"
    assert (fields.before.mean, fields.before.std) == pytest.approx((train.mean(), train.std()), rel=1e-12)
    batch = fields.batch("validation", [0, 399, 203])
    assert (batch.task, batch.before.dtype, batch.before.shape) == ("advection1d", torch.float32, (3, 32))
    places = [(fields.samples["validation"][s], t) for s, t in ((0, 0), (1, 199), (1, 3))]
    for row, (sample, frame) in enumerate(places):
        for found, wanted in ((batch.before, tensor[sample, frame]), (batch.after, tensor[sample, frame + 1])):
            assert torch.allclose(fields.before.undo(found[row]), torch.from_numpy(wanted), atol=1e-6)
    assert batch.times.tolist() == pytest.approx([0.0, 1.99, 0.03])
    assert torch.equal(batch.points, (torch.arange(32)[:, None] + 0.5) / 32)
    for index in (400, -1):
        with pytest.raises(IndexError):
            fields.batch("validation", [index])
    fields.close()


def test_darcy_batch_has_normalised_coefficients_and_solutions(made: Path) -> None:
    fields = Fields(made / FLOW)
    everything = fields.batch("train", range(9))
    assert (everything.before.shape, everything.after.shape) == ((9, 8, 8), (9, 8, 8))
    for values in (everything.before, everything.after):
        assert values.mean().item() == pytest.approx(0, abs=1e-6)
        assert values.std(correction=0).item() == pytest.approx(1, rel=1e-6)
    assert everything.times.tolist() == [0.0] * 9
    assert everything.points.shape == (64, 2)
    assert everything.points[9].tolist() == [1.5 / 8, 1.5 / 8]
    assert everything.points[1].tolist() == [0.5 / 8, 1.5 / 8], "row-major: the last coordinate changes first"
    with h5py.File(made / FLOW) as file:
        sample = fields.samples["train"][4]
        flat = fields.before.undo(everything.before[4]).flatten()
        assert torch.allclose(flat, torch.from_numpy(file["nu"][sample].reshape(-1)), atol=1e-6)


def test_normalisation_apply_and_undo_are_inverse() -> None:
    chosen = Normalisation(mean=2.0, std=4.0)
    assert chosen.apply(torch.tensor([2.0, 10.0])).tolist() == [0.0, 2.0]
    assert chosen.undo(chosen.apply(torch.tensor([3.0]))).tolist() == [3.0]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: Fields(write("a.hdf5", **scalar(tensor=numpy.ones((1, 5, 6)))), seed=0),
            "data: a.hdf5 does not say whether it is of advection or of Burgers' equation",
        ),
        (
            lambda: Fields(write("a.hdf5", {"beta": 1.0}, **scalar(tensor=numpy.ones((1, 5, 6))))),
            "data: a.hdf5 has 1 sample, where training and validation need one each; make more with",
        ),
        (
            lambda: Fields(write("a.hdf5", {"beta": 1.0}, **scalar(tensor=numpy.ones((3, 5, 6))))),
            "data: a.hdf5 has the same value everywhere in its training samples; name a file with fields that vary",
        ),
        (
            lambda: Fields(write("a.hdf5", {"beta": 1.0}, **scalar()), validation=1.0),
            "validation: 1.0 is out of range; give more than 0 and less than 1",
        ),
    ],
)
def test_data_that_cannot_be_split_are_reported(make: Callable[[], Fields], what: str) -> None:
    with pytest.raises(PerfsuiteError) as error:
        make()
    assert what in str(error.value)
    assert "\n" not in str(error.value)
