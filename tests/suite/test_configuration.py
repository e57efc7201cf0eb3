"""Fields from a YAML file and the command line: values, and a one-line message for each mistake."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from perfsuite.errors import PerfsuiteError
from suite import trainers
from suite.configuration import ConfigurationError, as_yaml, read
from suite.runtime import Options

pytest.importorskip("jsonargparse", reason="jsonargparse is not installed: pip install 'perfsuite[train]'")
pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'perfsuite[train]'")

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Model:
    layers: int = 2
    width: int = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    eta_update: float = 0.01
    use_cudagraphs: bool = True
    betas: tuple[float, float] = (0.9, 0.95)
    mode: Literal["full", "diagonal"] = "full"
    windows: int | None = None
    title: str = "x"
    seed: int = 0
    model: Model = field(default_factory=Model)
    derived: int = field(init=False, default=3)

    def __post_init__(self) -> None:
        if self.eta_update < 0:
            raise ValueError("eta_update must not be negative")


@dataclass(frozen=True, kw_only=True)
class Run:
    seed: int = 0
    keep: int = 3


def given(text: str, *arguments: str) -> Config:
    Path("c.yaml").write_text(text)
    (config,) = read([Config], "c.yaml", arguments)
    assert isinstance(config, Config)
    return config


def test_fields_have_their_defaults_without_input() -> None:
    assert read([Config], None) == (Config(),)
    assert given("") == Config()


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("eta_update: 0.5", [], {"eta_update": 0.5}),
        ("eta_update: 1e-3", [], {"eta_update": 0.001}),  # PyYAML reads it as a string
        ("eta_update: 1", [], {"eta_update": 1.0}),
        ("eta_update: 0.5", ["--eta_update", "0.02"], {"eta_update": 0.02}),
        ("", ["--eta-update=1e-3"], {"eta_update": 0.001}),
        ("use_cudagraphs: false", [], {"use_cudagraphs": False}),
        ("use_cudagraphs: false", ["--use_cudagraphs"], {"use_cudagraphs": True}),
        ("", ["--use_cudagraphs", "false"], {"use_cudagraphs": False}),
        ("", ["--use_cudagraphs", "--windows", "3"], {"windows": 3}),
        ("windows: 7", ["--windows", "null"], {}),
        ("betas: [0.8, 0.9]", [], {"betas": (0.8, 0.9)}),
        ("", ["--betas", "[0.8,0.9]"], {"betas": (0.8, 0.9)}),
        ("mode: diagonal", [], {"mode": "diagonal"}),
        ("", ["--title", "5"], {"title": "5"}),
        ("", ["--title="], {"title": ""}),
        ("model: {layers: 4}", ["--model.width", "16"], {"model": Model(4, 16)}),
    ],
)
def test_fields_are_read_from_the_file_and_the_command_line(
    text: str, arguments: list[str], expected: dict[str, Any]
) -> None:
    assert given(text, *arguments) == Config(**expected)


def test_a_field_of_two_dataclasses_is_given_once() -> None:
    config, run = read([Config, Run], None, ["--seed", "5", "--keep", "9"])
    assert (config.seed, run.seed, run.keep) == (5, 5, 9)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("eta_updat: 1", [], "c.yaml: no field is called 'eta_updat'; did you mean 'eta_update'?"),
        ("", ["--eta_updat", "1"], "--eta_updat: no field is called 'eta_updat'; did you mean 'eta_update'?"),
        (
            "",
            ["--nothing_like_it"],
            "--nothing_like_it: no field is called 'nothing_like_it'; `perfsuite train NAME --show` lists them all",
        ),
        ("", ["--eta", "1"], "--eta: no field is called 'eta'; "),  # no abbreviations: a new field would break them
        ("", ["--layers", "1"], "--layers: no field is called 'layers'; did you mean 'model.layers'?"),
        ("model: {layer: 3}", [], "c.yaml: no field is called 'model.layer'; did you mean 'model.layers'?"),
        ("model: 3", [], "c.yaml: no field is called 'model'"),
        ("derived: 3", [], "c.yaml: no field is called 'derived'"),
        ("5: 3", [], "c.yaml: no field is called '5'"),
        ("eta_update: fast", [], "c.yaml: eta_update must be a number, got 'fast'"),
        ("", ["--eta_update", "fast"], "--eta_update must be a number, got 'fast'"),
        ("eta_update: [1]", [], "c.yaml: eta_update must be a number, got [1]"),
        ("use_cudagraphs: perhaps", [], "c.yaml: use_cudagraphs must be true or false, got 'perhaps'"),
        ("windows: 1.5", [], "c.yaml: windows must be a whole number or null, got 1.5"),
        ("title: 3", [], "c.yaml: title must be text, got 3"),
        ("title:", [], "c.yaml: title must be text, got nothing"),
        ("mode: half", [], "c.yaml: mode must be one of full, diagonal, got 'half'"),
        ("betas: [1]", [], "c.yaml: betas must be a list of 2 values: a number, a number, got [1]"),
        ("model: {layers: x}", [], "c.yaml: model.layers must be a whole number, got 'x'"),
        ("windows: 1.5\nseed: x", ["--seed", "1"], "c.yaml: windows must be"),
        ("", ["--eta_update"], "--eta_update needs a value, a number"),
        ("", ["--eta_update", "--windows", "1"], "--eta_update needs a value, a number"),
        ("", ["--windows", ""], "--windows: windows must be a whole number or null, got nothing"),
        ("windows: ''", [], "c.yaml: windows must be a whole number or null, got nothing"),
        ("", ["--eta_update", "nan"], "--eta_update must be a number, got 'nan'"),
        ("", ["--eta_update", "1e400"], "--eta_update: eta_update must be finite in float32, got 1e400"),
        ("", ["--eta_update", "1e39"], "--eta_update: eta_update must be finite in float32, got 1e39"),
        ("eta_update: .inf", [], "c.yaml: eta_update must be finite in float32, got inf"),
        ("betas: [.nan, 1]", [], "c.yaml: betas must be finite in float32, got [nan, 1]"),
        ("", ["3"], "'3' belongs to no field; fields are given as --name value"),
        ("", ["--eta_update=-1"], "--eta_update: eta_update must not be negative"),
        ("eta_update: -1", [], "c.yaml: eta_update must not be negative"),
        ("seed: 1\nseed: 2", [], "c.yaml: 'seed' is there twice, in the mapping of line 1"),
        ("- 1", [], "c.yaml: holds a list; it must hold fields"),
        ("just words", [], "c.yaml: holds a str; it must hold fields"),
        ("seed: 2020-99-99\n", [], "c.yaml: holds a value that cannot be read: month must be in 1..12"),
        ("[" * 5000, [], "c.yaml: holds a value that cannot be read: maximum recursion depth"),
        ("title: &a [*a]", [], "c.yaml: title contains itself; write its value without an alias"),
        ("a: [1\n", [], "c.yaml, line 2: not YAML: expected ',' or ']'"),
        ("a: !!python/object/apply:os.getcwd []", [], "c.yaml, line 1: not YAML: could not determine a constructor"),
        ("{a: 1}: 3", [], "c.yaml, line 1: not YAML: found unhashable key"),
    ],
)
def test_mistakes_are_reported_in_one_line(text: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        given(text, *arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_unreadable_files_raise_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    for name, message in (("nowhere.yaml", "No such file"), (".", "Is a directory"), ("binary.yaml", "not UTF-8 text")):
        with pytest.raises(ConfigurationError, match=message):
            read([Config], tmp_path / name)


def test_output_of_as_yaml_can_be_read_again() -> None:
    config = Config(eta_update=0.5, betas=(0.1, 0.2), model=Model(5, 6), title="a: b")
    text = as_yaml([config, Run(keep=7)])
    assert "derived" not in text
    Path("again.yaml").write_text(text)
    assert read([Config, Run], "again.yaml") == (config, Run(keep=7))


@pytest.mark.parametrize("library", ["yaml", "jsonargparse"])
def test_a_missing_library_is_reported_with_its_install_command(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(PerfsuiteError, match=r"not installed; install it with: pip install 'perfsuite\[train\]'"):
        given("seed: 1")


@pytest.mark.parametrize("text", [r'title: "a\0b"', r'title: "a\ud800b"', r'title: ["a", "\0"]'])
def test_text_with_nul_or_surrogate_characters_is_rejected(text: str) -> None:
    """A configured text may be a file's name, which cannot contain such characters."""
    with pytest.raises(ConfigurationError, match=r"c\.yaml: title is .*; name it otherwise") as caught:
        given(text)
    assert str(caught.value).isprintable()


def test_surrogate_escaped_bytes_survive_as_yaml_and_read() -> None:
    shown = as_yaml([Config(title="a\udcff λ")])
    assert given(shown).title == "a\udcff λ"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_file_in_configs_is_a_valid_configuration(path: Path) -> None:
    name = path.parent.name
    kinds = [trainers.config_of(name), Options, trainers.data_config_of(name)]
    assert len(read(kinds, path)) == len(kinds)
