"""Reference trainers run their own networks; optimized trainers run the modules of their techniques."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scale import FULL, FULLY, some

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ("eigenstate_lm", "leak_cnn", "polychromic", "trainer2", "ups")
NETWORKS = ("model", "loss", "losses", "networks", "stages", "llama", "lora", "lora_nf4", "nf4", "objective", "encoder",
            "advantages")  # fmt: skip
"""Modules of a trainer's folder in suite/ that hold networks, losses, or parts of them."""
SHARED = {
    "trainer2/model": {"make_weights", "make_weights.<locals>.normal", "make_field"},  # initial weights
    "leak_cnn/model": {"make_weights", "shapes"},
    "leak_cnn/loss": {"class_weights"},  # computed from the data
    "eigenstate_lm/model": {"make_weights", "parameters", "shapes"},
    "ups/model": {"make_operator", "make_decoder", "drop_path_rates", "drop_path_scales"},  # weights, random numbers
    "ups/losses": {"query_indices", "boundary_tokens"},
    "ups/networks": {"Networks.weights", "Networks.encoder", "grouped", "rate_of"},
    "ups/stages": {"networks_of", "Parts.weights"},
    "polychromic/lora": {"attach", "LoRALinear.freeze", "LoRALinear.scale", "Settings.__post_init__", "kept",
                         "places_of", "starts_of"},
    # Shared on purpose: a frozen encoder, rows of tokens, and two formulas that are tested against the objective.
    "polychromic/encoder": {f"{layer}.forward" for layer in ("SentenceEncoder", "Embeddings", "Layers", "Layer",
                            "Attention", "SelfAttention", "Intermediate", "Output")},
    "polychromic/objective": {"nucleus", "rows_of", "sets_of", "texts", "widened_loss"},
    "polychromic/advantages": {"without_own_reply"},
}  # fmt: skip
"""Module in suite/ → its functions that the reference trainer runs, without constructors and comprehensions."""
SMALL: dict[str, dict[str, Any]] = {
    "leak_cnn": {"train_files": 10, "validation_files": 5, "batch_size": 100, "epochs": 2, "use_compile": FULL},
    "trainer2": {"synthetic": 64, "validation": 0, "compiled_function": FULL},
    "eigenstate_lm": {"synthetic": 64, "validation": 0, "use_compile": FULL},
    "ups": {"grad_clip": 1.0},
    "polychromic": {},
}
"""Trainer → options added to its configuration tiny.yaml."""


def traced(name: str, side: str, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run tests/trainers/traced_training.py and return what it prints."""
    program, options = Path(__file__).with_name("traced_training.py"), json.dumps(SMALL[name])
    done = subprocess.run(
        [sys.executable, str(program), name, side, options, *changes],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def own_functions(names: Sequence[str]) -> set[str]:
    """Return the names without constructors, comprehensions and lambdas."""
    return {name for name in names if not name.endswith((".__init__", "comp>", "genexpr>", "<lambda>"))}


@pytest.mark.parametrize("name", some(TRAINERS, ("trainer2", "eigenstate_lm")))
def test_reference_trainer_runs_only_the_listed_shared_functions(name: str) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    found = traced(name, "reference")
    (ran,) = found["ran"]
    shared = {f"{name}/{module}": own_functions(ran.get(f"suite/{name}/{module}.py", ())) for module in NETWORKS}
    assert {module: names for module, names in shared.items() if names} == {
        module: names for module, names in SHARED.items() if module.startswith(f"{name}/")
    }
    assert own_functions(ran[f"reference/trainers/{name}.py"])
    assert found["optimized"] == []


FILES = {
    "use_cudagraphs": "graphs/cuda_graph_step",
    "cuda_graphs": "graphs/cuda_graph_step",
    "use_compile": "compilation/compiled_function",
    "compile": "compilation/compiled_function",
    "use_channels_last": "memory/channels_last",
    "fused_optimizers": "optimizers/hybrid_muon_adamw",
    "fused_clip": "optimizers/clip_grad_norm",
}
"""Switch → the module that it runs, where their names differ."""
NOT_ON_A_CPU = {"use_cudagraphs", "cuda_graphs", "cuda_graph_step", "compile"}
COMPILES = {"use_compile", "compiled_function"}
"""Switches that compile, which takes up to a minute; they are tested in make test-all."""
BESIDE: dict[tuple[str, str], dict[str, int]] = {
    # A compiled module's Python code runs only once, when the compiler traces it.
    ("leak_cnn", "conv_relu_pool"): {"use_compile": False},
    ("leak_cnn", "inplace_activation"): {"use_compile": False},
    ("leak_cnn", "cudnn_autotune"): {},  # off by default, as are the following
    ("leak_cnn", "tf32"): {},
    ("eigenstate_lm", "tf32"): {},
    ("leak_cnn", "autocast_bf16"): {"use_compile": False},
    ("eigenstate_lm", "autocast_bf16"): {"use_compile": False},
    ("trainer2", "metric_batching"): {"step_progress_every": 1},  # reports within a window
    ("eigenstate_lm", "fused_output_projection"): {"use_compile": False},
    ("leak_cnn", "loader"): {"resident_dataset": False},  # with all examples on the device nothing is loaded
    ("leak_cnn", "sync_free_scaler_step"): {"fused_adamw": False},  # fused_adamw runs that module's AdamW
    ("ups", "query_sampling"): {"inverse_losses": False},  # otherwise one decoded field serves both losses
}
"""(trainer, switch) → other settings with which the switch alone decides whether its module runs."""
NO_MODULE = {
    "trainer2": {
        "autocast_bf16": "frozen weights are cast once, which autocast would do at each step",
    },
    "leak_cnn": {
        "fused_adamw": "`sync_free_scaler_step` runs AdamW in one kernel with the rest of its step",
        "fullgraph_model": "an argument of `use_compile`",
    },
    "eigenstate_lm": {},
    "ups": {"resident_latents": "suite.ups.resident: latents and fields, which are no examples of one array"},
    "polychromic": {
        "fused_blocks": "optimized.block_kernels: norms, rotations and gates, which have tests of their own",
        "packed_examples": "suite.polychromic.batches",
    },
}
"""Trainer → switches that run no module of a technique here, and why."""


def switches(name: str) -> list[str]:
    found: tuple[str, ...] = importlib.import_module(f"suite.{name}.config").TECHNIQUES
    left_out = NOT_ON_A_CPU | set(NO_MODULE[name]) | (set() if FULL else COMPILES)
    return [switch for switch in found if switch not in left_out]


def module_of(switch: str) -> str:
    """Return the file of the module that a switch runs."""
    named = [str(path.relative_to(ROOT)) for path in (ROOT / "optimized").glob(f"*/{switch}.py")]
    return f"optimized/{FILES[switch]}.py" if switch in FILES else named[0]


@FULLY  # takes a minute
@pytest.mark.parametrize("name", TRAINERS)
def test_switch_decides_whether_its_module_runs(name: str) -> None:
    """Functions of the module run if the switch is on, and none if it is off."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'perfsuite[train]'")
    every = switches(name)
    beside = {switch: BESIDE[name, switch] for switch in every if (name, switch) in BESIDE}
    changes = [{**beside.get(switch, {}), switch: False} for switch in every]
    changes += [{**others, switch: True} for switch, others in beside.items()]
    whole, *ran = traced(name, "optimized", tuple(json.dumps(change) for change in changes))["ran"]
    with_others = dict(zip(beside, ran[len(every) :], strict=True))
    for switch, off in zip(every, ran, strict=False):
        on, module = with_others.get(switch, whole), module_of(switch)
        assert on.get(module), f"{switch} does not run {module}"
        assert not off.get(module), f"without {switch}, {module} runs: {off[module]}"


def test_exceptions_are_existing_switches() -> None:
    for name, exceptions in NO_MODULE.items():
        every = importlib.import_module(f"suite.{name}.config").TECHNIQUES
        assert set(exceptions) <= set(every)
