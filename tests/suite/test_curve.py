"""`perfsuite curve`: plots of a run's loss and throughput."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from suite import plotting
from suite.commands import curve as module
from suite.commands.curve import curve
from suite.runtime import curve_log
from suite.runtime.curve_log import CurveLog

LOSSES = [(1, 100.0, 2.0), (3, 101.0, 1.0), (5, 102.0, 0.5)]


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(curve, arguments)


def test_summary_of_a_run_without_a_duration_has_no_rate() -> None:
    points = [(window, 0.1, loss) for window, _, loss in LOSSES]
    assert module.summary({"loss": points}) == "windows 1 to 5 in 0 s; loss 2 at first, 0.5 at last"


def test_summary_describes_a_run_in_one_line() -> None:
    assert module.summary({"loss": LOSSES}) == "windows 1 to 5 in 2 s: 2 windows/s; loss 2 at first, 0.5 at last"


@pytest.mark.parametrize(
    ("values", "scale"),
    [([2.0, 0.5], "linear"), ([0.4, 2e-6], "log"), ([0.4, 0.0], "linear"), ([0.4, -2e-6], "linear"), ([], "linear")],
)
def test_scale_is_logarithmic_for_positive_values_of_several_magnitudes(values: list[float], scale: str) -> None:
    assert plotting.scale(values) == scale


def test_plot_has_a_logarithmic_axis_if_the_loss_falls_by_magnitudes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    for name, losses in {"log": (0.4, 4e-3, 4e-6), "linear": (0.4, 0.3, 0.2)}.items():
        module.plot({"loss": [(i, float(i), loss) for i, loss in enumerate(losses)]}, tmp_path / f"{name}.svg")
    power = "mathdefault{10^{-"  # the labels of a logarithmic axis
    assert power in (tmp_path / "log.svg").read_text()
    assert power not in (tmp_path / "linear.svg").read_text()


def test_tensorboard_files_of_a_run_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for window, seconds, loss in LOSSES:
            writer.add_scalar("loss", loss, window, walltime=seconds)
    done = invoked(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "windows 1 to 5 in 2 s: 2 windows/s" in done.output
    picture = (tmp_path / "curve.svg").read_text()
    for words in ("loss", "windows/s", "window"):
        assert f"<!-- {words} -->" in picture
    again = tmp_path / "elsewhere/again.svg"
    assert invoked(str(tmp_path), "--out", str(again)).exit_code == 0
    assert again.read_text() == picture


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_without_a_curve_is_an_error(exists: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    done = invoked(str(folder))
    assert done.exit_code == 1
    assert f"Error: {folder} has no metrics.jsonl with a finished window, and no TensorBoard files" in done.output


def test_metrics_log_of_a_run_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    log = CurveLog(tmp_path, 0)
    for window in (1, 2, 3):
        log.add(window, {"loss": 4.0 - window, "accuracy": float("nan")})
    log.close()
    done = invoked(str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "windows 1 to 3" in done.output
    assert "loss 3 at first, 1 at last" in done.output
    assert (tmp_path / "curve.svg").exists()
    assert (tmp_path / "run.html").exists()


def test_run_page_shows_trainer_device_and_configuration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    configuration = {"side": "optimized", "loader": True, "use_compile": False, "seed": 3, "data": "<b>&.h5"}
    log = CurveLog(
        tmp_path, 0, {"trainer": "leak_cnn", "window": "epoch", "device": "some GPU", "configuration": configuration}
    )
    for window in (1, 2, 3):
        log.add(window, {"loss": 4.0 - window, "accuracy": 0.25 * window})
    log.close()
    assert invoked(str(tmp_path)).exit_code == 0
    page = (tmp_path / "run.html").read_text()
    assert page.count("<svg") == page.count("<figure>") == 3
    for words in (
        "leak_cnn, optimized side",
        "some GPU",
        "<span>loader</span>",
        "use_compile (off)",
        "&lt;b&gt;&amp;.h5",
    ):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "run.json").write_text(damaged)
        assert invoked(str(tmp_path)).exit_code == 0  # the damaged run.json is ignored


def test_log_of_a_resumed_run_omits_replaced_windows_and_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(curve_log.time, "monotonic", lambda: now)
    first = CurveLog(tmp_path, 0)
    for window in (1, 2, 3):
        now += 2
        first.add(window, {"loss": float(window)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"window": 4, "sec')  # a killed run's incomplete line
    now += 1000
    CurveLog(tmp_path, 1).close()  # a run that trains nothing leaves the log unchanged
    assert [line["window"] for line in curve_log.read(tmp_path)] == [1, 2, 3]
    second = CurveLog(tmp_path, 2)
    for window in (2, 3, 4):
        now += 2
        second.add(window, {"loss": 10.0 * window})
    second.close()
    found = [(line["window"], line["seconds"], line["loss"]) for line in curve_log.read(tmp_path)]
    assert found == [(1, 2, 1), (2, 4, 2), (3, 8, 30), (4, 10, 40)]


@pytest.mark.parametrize(
    "damaged",
    [
        "[" * 100_000,
        "[]",
        '{"window": 2, "seconds": 1' + "0" * 400 + "}",
        '{"window": 2, "seconds": 2, "loss": 1' + "0" * 400 + "}",
        '{"window": 2, "seconds": Infinity}',
    ],
    ids=["nested", "list", "seconds", "loss", "infinity"],
)
def test_a_resumed_run_skips_damaged_lines_of_its_log(damaged: str, tmp_path: Path) -> None:
    first = '{"window": 1, "seconds": 2, "loss": 1}'
    (tmp_path / "metrics.jsonl").write_text(f"{first}\n{damaged}\n")
    resumed = CurveLog(tmp_path, 3)
    resumed.add(4, {"loss": 0.5})
    resumed.close()
    assert [line["window"] for line in curve_log.read(tmp_path)] == [1, 4]
    assert invoked(str(tmp_path)).exit_code == 0


def test_windows_after_the_hundredth_are_logged_every_ten_windows(tmp_path: Path) -> None:
    log = CurveLog(tmp_path, 0)
    for window in range(1, 131):
        log.add(window, {"loss": 1.0})
    log.close()
    assert [line["window"] for line in curve_log.read(tmp_path)] == [*range(1, 101), 110, 120, 130]


def test_joined_removes_the_pause_before_a_resumption() -> None:
    given = [(1, 100.2, 2.0), (2, 101.2, 1.5), (3, 102.2, 1.0), (5, 900.0, 0.5), (6, 901.0, 0.4)]
    joined = module.joined(given, [100, 890])
    assert [p[0] for p in joined] == [1, 2, 3, 5, 6]
    assert [p[1] for p in joined] == pytest.approx([100.2, 101.2, 102.2, 104.2, 105.2])
    assert "windows 1 to 6 in 5 s: 1 windows/s" in module.summary({"loss": joined})
    assert module.joined(given, [100]) == given
    assert module.joined([], [100]) == []


@pytest.mark.parametrize(("name", "says"), [("x.png", "name one that ends in .svg"), ("file/x.svg", "cannot write")])
def test_an_unwritable_plot_is_reported_in_one_line(name: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    from torch.utils.tensorboard import SummaryWriter

    (tmp_path / "file").write_text("")
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for window, seconds, loss in LOSSES:
            writer.add_scalar("loss", loss, window, walltime=seconds)
    done = invoked(str(tmp_path), "--out", str(tmp_path / name))
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    assert says in line


def one_line(done: Result, *record: str) -> None:
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    for words in record:
        assert words in line


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "dead link"])
def test_an_events_path_that_is_no_regular_file_is_reported_in_one_line(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    path = tmp_path / "a\nb" / "tensorboard" / "events.out.tfevents.1.x"
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/nowhere/at/all")
    one_line(
        invoked(str(tmp_path / "a\nb")), f"cannot read {tmp_path}/a\\nb/tensorboard/events", "it is no file; move it"
    )


def length(of: int) -> bytes:
    """Return the header of a record: its length and a checksum."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    head = struct.pack("<Q", of)
    return head + struct.pack("<I", masked_crc32c(head))


@pytest.mark.parametrize("kind", ["a record beyond memory", "a record beyond counting", "no event", "noise"])
def test_a_damaged_events_file_is_reported_in_one_line(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = tmp_path / "tensorboard" / "events.out.tfevents.1.x"
    path.parent.mkdir()
    with path.open("wb") as file:
        if kind == "no event":
            RecordWriter(file).write(b"\xff" * 50)
        else:
            lengths = {"a record beyond memory": 1 << 60, "a record beyond counting": (1 << 63) - 1}
            file.write(length(lengths[kind]) if kind in lengths else bytes(range(256)) * 9)
    one_line(invoked(str(tmp_path)), "holds no curve" if kind == "noise" else "holds a damaged file (", str(tmp_path))


def test_a_file_instead_of_a_folder_is_reported_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    (tmp_path / "window-00000001.pt").write_text("")
    one_line(invoked(str(tmp_path / "window-00000001.pt")), "window-00000001.pt is a file; name the folder of a run")


def test_a_folder_name_that_is_not_utf_8_is_supported(tmp_path: Path) -> None:
    """TensorBoard accepts only names in UTF-8."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'perfsuite[train]'")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'perfsuite[test]'")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run" / "tensorboard")) as writer:
        for window, seconds, loss in LOSSES:
            writer.add_scalar("loss", loss, window, walltime=seconds)
    folder = (tmp_path / "run").rename(tmp_path / "a\udcff\nb")
    done = invoked(str(folder))
    assert done.exit_code == 0, done.output
    names = ("curve.svg", "run.html")
    assert done.output.splitlines()[1:] == [f"wrote {tmp_path}/a\\xff\\nb/{name}" for name in names]
    assert (folder / "curve.svg").exists()
