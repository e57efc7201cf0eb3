"""The claims of ups: measurements on a CPU, and verdicts on given figures."""

from __future__ import annotations

import dataclasses
import math
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from scale import FULLY

from suite import configuration, trainers
from suite.ablation import Ratio
from suite.claims import record, ups, ups_measured, ups_parallel, ups_ranks, ups_setting
from suite.claims import ups_verdicts as judged
from suite.claims.record import CONFIRMED, DEPENDS, REFUTED, UNMEASURED, VERDICTS
from suite.commands.claims import claims
from suite.ups.config import TrainConfig
from suite.ups.model import make_operator, parameters

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = dataclasses.replace(ups.setting(CPU), rounds=2)
CHECKS = ups.CHECKS.all
IDS = [*(f"C{n}" for n in range(24, 39)), "C61"]
ON_GPU = ["C25", "C32", "C33", "C34", "C36", "C37", "C38", "C61"]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Create a process group that contains only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the launch of ranks by a given result per rank; return the list of its calls."""

    def plant(*by_rank: Any) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def launched(*given: Any) -> list[Any]:
            asked.append(given)
            return list(by_rank)

        ups_parallel.two_ranks.cache_clear()
        monkeypatch.setattr(ups_ranks, "launched", launched)
        return asked

    yield plant
    ups_parallel.two_ranks.cache_clear()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithGpus(ups_setting.Setting):
    """Setting with a given number of GPUs."""

    count: int = 0

    @property
    def gpus(self) -> int:
        return self.count


def with_gpus(count: int) -> WithGpus:
    values = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL)}
    return WithGpus(**values, count=count)


def ratio(value: float, half: float = 0.0) -> Ratio:
    return Ratio(value=value, low=value - half, high=value + half)


def test_every_claim_of_the_source_has_a_function_and_a_text() -> None:
    assert list(CHECKS) == IDS
    assert all(check.said.endswith(".") and callable(check.measure) for check in CHECKS.values())
    assert trainers.checks_of("ups") == (ups.CHECKS, ups.setting)


def test_claims_about_gpus_are_not_measured_without_a_gpu() -> None:
    assert [c.id for c in CHECKS.values() if c.gpu] == ON_GPU
    assert {CHECKS[name].answer(SMALL) for name in ON_GPU} == {(UNMEASURED, "there is no GPU")}


def test_setting_on_a_gpu_has_the_source_s_baseline() -> None:
    pytest.importorskip("jsonargparse")
    given = ups.setting(torch.device("cuda"))
    baseline, _ = configuration.read(
        [TrainConfig, trainers.data_config_of("ups")], ROOT / "configs/ups/4gpu_baseline.yaml"
    )
    assert dataclasses.replace(given.config, num_workers=given.workers[0]) == baseline
    assert given.cells == (1024, 128)
    assert parameters(make_operator(given.config)) == 21_445_120
    assert sum(ups_measured.source_sizes(SMALL, whole=False)) == 21_445_120


def test_source_s_phase_speedups_multiply_to_five() -> None:
    product = 1.0
    for gain in ups.PHASES.values():
        product *= gain
    assert product == pytest.approx(5.0, abs=0.02)


# --- on a CPU -------------------------------------------------------------------------------------------------------


def test_gradients_of_the_inverse_losses_do_not_reach_the_operator() -> None:
    verdict, finding = ups.regularises(SMALL)
    assert verdict == REFUTED
    assert "and 0 by the operator's: 38 of its 38 weights are not in their graph" in finding
    assert "After 2 steps with and without them the operator's weights are equal to the bit" in finding
    assert not finding.endswith("are equal to the bit")  # with clipped gradients the weights differ


def test_a_gradient_that_reaches_the_operator_confirms_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ups.inverse_tasks

    def of_predictions(trainer: Any, number: int = 0) -> list[Any]:
        return [
            dataclasses.replace(t, latents=trainer.networks.operator(t.latents, torch.ones(len(t.latents))))
            for t in real(trainer, number)
        ]

    monkeypatch.setattr(ups, "inverse_tasks", of_predictions)
    verdict, finding = ups.regularises(SMALL)
    assert verdict == CONFIRMED
    assert "and 0 by the operator's" not in finding


def test_query_loss_is_timed_and_counted_on_both_grids() -> None:
    verdict, finding = ups.queries(SMALL)
    assert verdict == DEPENDS
    assert finding.startswith("on the grid")
    assert "on a grid of 64 points" in finding
    assert "on a grid of 256 points" in finding
    assert "the source's grid of advection1d the query loss has 1 times fewer operations" in finding
    assert "the source's grid of darcy2d the query loss has 1.98 times fewer operations" in finding


@FULLY
def test_query_schedule_saves_three_quarters_of_the_operations() -> None:
    verdict, finding = ups.work(SMALL)
    assert verdict == REFUTED
    assert "advection1d: 532 GFLOP become 133 GFLOP, 75.0% less" in finding
    assert "both tasks: 2.63 TFLOP become 624 GFLOP, 76.2% less" in finding


def test_operations_are_proportional_to_the_decoded_points() -> None:
    """Except for the latents' keys and values, operations are proportional to the number of points."""
    few, many = (ups_measured.flops(["darcy2d"], count, "first") for count in (1024, 2048))
    apart, shared = (ups_measured.flops(["darcy2d"], 2048, which) for which in ("apart", "shared"))
    assert apart == pytest.approx(many + shared, rel=1e-6)
    assert 15 < (shared - few) / (many - few) < 15.1  # (16384 - 1024) / 1024 = 15, plus the encoder


def test_a_mixed_batch_has_the_inverse_losses_of_both_tasks() -> None:
    verdict, finding = ups.mixed(SMALL)
    assert verdict == CONFIRMED
    assert "a micro-batch of 2 and 2 examples" in finding


def test_a_mixed_batch_without_a_task_s_loss_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(tasks: Sequence[Any], *, shared: bool) -> torch.Tensor:
        return real(tasks[:1], shared=shared)

    real = ups_measured.inverse
    monkeypatch.setattr(ups_measured, "inverse", first_alone)
    verdict, finding = ups.mixed(SMALL)
    assert verdict == REFUTED
    assert "darcy2d 0" in finding


def test_optimizer_state_is_about_a_hundred_megabytes() -> None:
    verdict, finding = ups.offload_frees(SMALL)
    assert verdict == REFUTED
    assert finding.startswith("Muon keeps 4 bytes for each element of a matrix and AdamW 8 for each of the others")
    assert "of 24,129,794 parameters 96.8 MB, and with AdamW alone 193 MB" in finding


@FULLY
def test_peak_of_steps_includes_weights_averages_and_gradients() -> None:
    trainer = ups_setting.make_trainer(SMALL, ups_setting.tuned(SMALL))
    weights = sum(w.nbytes for w in trainer.weights.values())
    assert ups_measured.peak_of_steps(SMALL, ups_setting.tuned(SMALL)) > 3 * weights


def test_offloaded_optimizer_matches_the_one_on_the_device() -> None:
    verdict, finding = ups.offload_works(SMALL)
    assert verdict == CONFIRMED
    assert "74 of the trainer's 74 weights have changed" in finding
    assert "0 of an update apart" in finding


def test_an_offloaded_optimizer_that_does_nothing_refutes_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    from optimized.memory.cpu_offload_optimizer import OffloadedAdamW

    monkeypatch.setattr(OffloadedAdamW, "__call__", lambda self, grads: None)
    verdict, finding = ups.offload_works(SMALL)
    assert verdict == REFUTED
    assert "0 of an update apart where Muon makes it, and 1 where AdamW does" in finding


@FULLY
def test_two_cpu_ranks_give_verdicts_on_three_claims() -> None:
    ups_parallel.two_ranks.cache_clear()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    verdict, finding = ups.sharding_frees(SMALL)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert verdict == REFUTED
    assert "are 343 MB in float32: sharding frees 172 MB of them on each of two GPUs" in finding
    assert "Two ranks on the CPU, with 7,128 parameters, hold 0.114 MB each" in finding
    assert finding.endswith("and 0.0572 MB sharded")
    verdict, finding = ups.still_move(SMALL)
    assert verdict == DEPENDS
    assert finding.count("they move") == 4
    assert "fully_shard, optimizer built before wrapping: they stay" in finding
    verdict, finding = ups_parallel.accumulation(SMALL)
    assert verdict == DEPENDS
    assert "3 steps of one micro-batch have 3 all-reduces" in finding
    assert "A step of 3 micro-batches has 3, 0.0855 MB, as it is, and 1, 0.0285 MB, with no_sync" in finding


@FULLY
def test_nccl_variables_claim_times_an_all_reduce_between_two_ranks() -> None:
    config = dataclasses.replace(SMALL, rounds=1)
    verdict, finding = ups_parallel.nccl_variables(config, gpus=0)
    assert verdict in VERDICTS
    assert "an all-reduce of 85.8 MB between two ranks" in finding


@FULLY
def test_data_parallel_claim_times_a_step_on_two_ranks() -> None:
    verdict, finding = ups_parallel.data_parallel(SMALL, ranks=2)
    assert verdict in VERDICTS
    assert "with 8 examples a GPU a step takes" in finding


@FULLY
def test_error_of_a_rank_names_the_rank() -> None:
    with pytest.raises(ups_ranks.RankError, match="rank 1: ValueError: this rank"):
        ups_ranks.launched(fails_on_one, 2, 0, "this rank")


def fails_on_one(device: torch.device, said: str) -> None:
    if dist.get_rank() == 1:
        raise ValueError(said)


# --- on one rank ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_optimizer_built_before_fully_shard_moves_no_sharded_weight() -> None:
    found = ups_ranks.wrapped_weights(CPU, SMALL.config)
    assert {name for name, moved in found.items() if not moved} == {"fully_shard, optimizer built before wrapping"}


@pytest.mark.usefixtures("one_rank")
def test_a_rank_holds_sixteen_bytes_per_parameter() -> None:
    found = ups_ranks.held(CPU, SMALL.config, 2)
    assert {row["own"] // row["parameters"] for row in found.values()} == {16}
    assert list(found) == list(ups_ranks.KINDS)


@pytest.mark.usefixtures("one_rank")
def test_all_reduces_of_each_micro_batch_are_counted() -> None:
    found = ups_ranks.reductions(CPU, SMALL.config)
    size = 4 * parameters(make_operator(SMALL.config))
    assert (found["one"], found["without no_sync"], found["with no_sync"]) == (1, 3, 1)
    assert [found[f"{name}, bytes"] for name in ("one", "without no_sync", "with no_sync")] == [size, 3 * size, size]


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_compiled_and_eager_networks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(network: Any, device: torch.device) -> Any:
        return ups_ranks.wrapped(network, ups_ranks.KINDS[0])

    def around(network: Any, device: torch.device) -> Any:
        raise RuntimeError("no graph of it\nfor a reason")

    monkeypatch.setattr(ups_ranks, "_compiled_inside", inside)
    monkeypatch.setattr(ups_ranks, "_compiled_around", around)
    found = ups_ranks.graphed(CPU, SMALL.config, 1)
    assert found["compiled inside"]["right"]
    assert found["compiled inside"]["apart"] == 0
    assert found["compiled around"] == {"right": False, "error": "no graph of it"}
    assert [len(found[name]["seconds"]) for name in ("eager", "compiled inside")] == [1, 1]

    def other(network: Any, device: torch.device) -> Any:
        return inside(ups_ranks.make_operator(SMALL.config), device)

    monkeypatch.setattr(ups_ranks, "_compiled_inside", other)
    assert not ups_ranks.graphed(CPU, SMALL.config, 1)["compiled inside"]["right"]


@pytest.mark.usefixtures("one_rank")
def test_scaling_times_steps_alone_together_and_the_all_reduce() -> None:
    found = ups_ranks.scaling(CPU, SMALL.config, (2, 4), 2)
    assert list(found) == [2, 4]
    for row in found.values():
        assert {name: len(seconds) for name, seconds in row.items()} == {"alone": 2, "together": 2, "all-reduce": 2}


# --- GPU claims, at small size on a CPU -----------------------------------------------------------------------------


def test_steps_are_timed_in_both_precisions() -> None:
    verdict, finding = ups.precision(SMALL)
    assert verdict in VERDICTS
    assert "eager, a step takes" in finding
    assert "compiled" not in finding.removeprefix("on whether the step is compiled: ")


def test_batch_sizes_are_compared_by_examples_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(setting: Any, configs: Mapping[str, TrainConfig]) -> dict[str, list[float]]:
        assert [c.batch_size for c in configs.values()] == [4, 8]
        return {"4": [0.010, 0.011], "8": [0.010, 0.011]}

    monkeypatch.setattr(ups_measured, "timed", timed)
    verdict, finding = ups.batches(SMALL)
    assert verdict == CONFIRMED
    assert "762 with 4, 1520 with 8; 8 against 4 2 times as fast" in finding


@FULLY
def test_phases_are_timed_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ups_measured, "TOGETHER", 1)
    verdict, finding = ups.phases(SMALL)
    assert verdict in VERDICTS
    for name in "23568":
        assert f" {name} " in finding
    assert "and the source's own to 2.90" in finding
    assert finding.endswith(
        "Not measured: phase 1, which takes a compiler; phase 4, which takes workers; phase 7, which takes several GPUs"
    )


@pytest.mark.parametrize(
    ("fifth", "together", "verdict"), [(1.23, 4.2, CONFIRMED), (1.23, 2.0, DEPENDS), (0.2, 2, REFUTED)]
)
def test_verdict_on_phases_compares_each_gain_with_the_claimed_one(
    fifth: float, together: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = ups_measured.phases(ups.setting(torch.device("cuda")))
    examples = {name: c.batch_size * c.accumulation for name, c in configs.items()}
    each = {"before": 0.03, "resident": 0.01, "4": 0.03 / 1.07, "together": 0.03 / together}  # seconds per example
    gains = {**ups.PHASES, "5": fifth}
    each |= {name: 0.01 / gains[name] for name in configs if name not in each}
    found = {name: [seconds * examples[name]] * 2 for name, seconds in each.items()}
    monkeypatch.setattr(ups_measured, "timed_phases", lambda setting: (configs, found))
    answer, finding = ups.phases(SMALL)
    assert answer == verdict
    assert "phase 1 1.36 (1.36 to 1.36), claimed 1.36, 2 1.45" in finding
    assert "4 1.07 (1.07 to 1.07), claimed 1.07" in finding
    assert "and the source's own to 4.23" in finding
    assert finding.endswith("Not measured: phase 7, which takes several GPUs")


def test_phases_have_the_source_s_settings() -> None:
    on_gpu = ups.setting(torch.device("cuda"))
    found = ups_measured.phases(on_gpu)
    assert set(found) == {"before", "resident", "together", *"1234568"}
    together, before = found["together"], found["before"]
    assert (before.num_workers, together.num_workers, together.prefetch_factor) == (8, 12, 2)
    assert (together.batch_size, together.accumulation, together.precision) == (20, 2, "bf16")
    assert together.compile
    assert together.activation_checkpoint
    assert together.cpu_offload_optimizer
    assert not found["1"].activation_checkpoint
    assert (found["2"].batch_size, found["5"].batch_size) == (16, 10)
    assert (found["3"].inverse_loss_frequency, found["3"].num_queries) == (4, 1024)
    assert all(found[name].resident_latents for name in "123568")
    assert not found["4"].resident_latents


@pytest.mark.parametrize(("says", "left_out"), [("DataLoader worker (pid 7) is killed", True), ("another", False)])
def test_phase_4_is_omitted_if_data_loader_workers_die(
    says: str, left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(setting: Any, configs: Mapping[str, TrainConfig]) -> dict[str, list[float]]:
        if any(c.num_workers for c in configs.values()):
            raise RuntimeError(says)
        return {name: [1.0, 1.0] for name in configs}

    monkeypatch.setattr(ups_measured, "timed", timed)
    given = dataclasses.replace(SMALL, workers=(1, 2))
    if not left_out:
        with pytest.raises(RuntimeError, match=says):
            ups_measured.timed_phases(given)
        return
    configs, _ = ups_measured.timed_phases(given)
    assert "4" in ups_measured.phases(given)
    assert "4" not in configs


def test_checkpointing_claim_compares_time_and_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ups_measured, "timed", lambda *given: {"False": [1.0, 1.0], "True": [1.2, 1.2]})
    verdict, finding = ups.checkpointing(SMALL)
    assert verdict == CONFIRMED
    assert finding.startswith(
        "the operator's output is the same to the bit with it; eager, a step takes 1.00 s without"
    )
    assert "20% (20 to 20) longer" in finding
    monkeypatch.setattr(ups_measured, "same_forward", lambda setting: False)
    verdict, finding = ups.checkpointing(SMALL)
    assert verdict == REFUTED
    assert finding.startswith("the operator's output is different with it")


def test_same_forward_detects_a_different_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(operator: Any, *given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = operator(*given)
        return found * 1.0001

    assert ups_measured.same_forward(SMALL)
    real = ups_measured.implementation
    monkeypatch.setattr(
        ups_measured,
        "implementation",
        lambda *a, **k: rounded if a[0] == "memory.activation_checkpoint" else real(*a, **k),
    )
    assert not ups_measured.same_forward(SMALL)


def test_a_step_that_runs_uncompiled_leaves_the_claim_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ups_measured.make_trainer

    def uncompiled(setting: Any, config: TrainConfig) -> Any:
        trainer = make(setting, config)
        step = trainer.train_window

        def train_window(batch: Any) -> None:
            warnings.warn("fullgraph_model runs uncompiled: why", RuntimeWarning, stacklevel=2)
            step(batch)

        trainer.train_window = train_window
        return trainer

    monkeypatch.setattr(ups_measured, "make_trainer", uncompiled)
    assert ups.precision(SMALL) == (UNMEASURED, "fullgraph_model runs uncompiled: why")


@pytest.mark.parametrize("measure", [ups_parallel.nccl, ups_parallel.four])
def test_too_few_gpus_are_reported(measure: Any, planted: Any) -> None:
    asked = planted()
    assert measure(with_gpus(1)) == (UNMEASURED, "it takes 2 GPUs, and there is 1")
    assert not asked


def test_a_rank_that_fails_leaves_a_claim_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> list[Any]:
        raise ups_ranks.RankError("rank 1: no memory")

    ups_parallel.two_ranks.cache_clear()
    monkeypatch.setattr(ups_ranks, "launched", fails)
    assert CHECKS["C35"].answer(SMALL) == (UNMEASURED, "rank 1: no memory")


def test_sharding_claim_compares_the_peaks_on_two_gpus(planted: Any) -> None:
    held = {"own": 100, "peak": 8_000_000_000, "parameters": 7}
    planted({"held": {ups_ranks.KINDS[0]: held, ups_ranks.KINDS[1]: {**held, "peak": 7_900_000_000}}})
    verdict, finding = ups.sharding_frees(with_gpus(2))
    assert verdict == REFUTED
    assert "Two ranks, with 7 parameters" in finding
    assert finding.endswith("A step's peak is 8.00 GB and 7.90 GB, 100 MB less")


def test_verdict_on_graphs_depends_on_gradients_and_launches_of_two_ranks(planted: Any) -> None:
    eager = {"seconds": [0.02, 0.02], "launches": 900}
    good = {"right": True, "apart": 0.001, "seconds": [0.01, 0.01], "launches": 40}
    asked = planted({"eager": eager, "compiled inside": good, "compiled around": {"right": False, "error": "no"}})
    verdict, finding = ups_parallel.graphs(with_gpus(2))
    assert asked[0][1:3] == (2, 2)
    assert verdict == DEPENDS
    assert finding.startswith("on whether the compiled network is inside DistributedDataParallel or around it: ")
    assert ": a forward and backward of 2 blocks takes 20.0 ms eagerly" in finding
    assert "with 900 launches in 2 ranks; compiled inside, 10.0 ms with 40 launches, 2 times as fast" in finding
    assert "compiled around, it fails: no" in finding
    planted(
        {
            "eager": dict(eager),
            "compiled inside": {**good, "launches": 890},
            "compiled around": {**good, "right": False},
        }
    )
    assert ups_parallel.graphs(with_gpus(2))[0] == REFUTED
    planted({"eager": dict(eager), "compiled inside": good, "compiled around": good})
    assert ups_parallel.graphs(with_gpus(2))[0] == CONFIRMED


def test_graphs_on_a_single_gpu_do_not_confirm_the_claim(planted: Any) -> None:
    eager = {"seconds": [0.02, 0.02], "launches": 900}
    good = {"right": True, "apart": 0.001, "seconds": [0.01, 0.01], "launches": 40}
    asked = planted({"eager": eager, "compiled inside": good, "compiled around": good})
    verdict, finding = ups_parallel.graphs(with_gpus(1))
    assert asked[0][1:3] == (1, 1)
    assert verdict == UNMEASURED
    assert finding.startswith("there is no second GPU. In a group of one rank, which shows that it runs")
    wrong = {"right": False, "error": "no"}
    planted({"eager": dict(eager), "compiled inside": wrong, "compiled around": wrong})
    assert ups_parallel.graphs(with_gpus(1))[0] == REFUTED


@pytest.mark.parametrize(
    ("with_them", "verdict"), [([0.9, 0.91], CONFIRMED), ([1.0, 1.0], REFUTED), ([0.5, 1.5], UNMEASURED)]
)
def test_nccl_variables_are_confirmed_if_the_all_reduce_is_faster(
    with_them: list[float], verdict: str, planted: Any
) -> None:
    asked = planted((with_them, [1.0, 1.0]))
    found, finding = ups_parallel.nccl(with_gpus(2))
    assert found == verdict
    assert asked[0][1:4] == (4, 2, 21_445_120)
    assert asked[0][-1]["NCCL_MIN_NCHANNELS"] == "4"
    assert "an all-reduce of 85.8 MB between two ranks, joined by" in finding


def test_nccl_variables_are_measured_only_over_nvlink(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(([0.9, 0.9], [1.0, 1.0]))
    for link, verdict in {"NVLink": CONFIRMED, "PCIe or host": UNMEASURED}.items():
        monkeypatch.setattr(ups_parallel.machine, "links", lambda count, link=link: {"0-1": link})
        found, finding = ups_parallel.nccl(with_gpus(2))
        assert found == verdict
        assert f"joined by {link}, takes" in finding


@pytest.mark.parametrize("finite", [True, False])
def test_float16_steps_are_timed_after_the_loss_scale_has_settled(finite: bool) -> None:
    config = dataclasses.replace(SMALL.config, precision="fp16")
    trainer = ups_setting.make_trainer(SMALL, config)
    if not finite:
        trainer.scale.value = 2.0**40
    ups_setting.steps(trainer)
    assert trainer.scale.growth
    assert (trainer.steps == trainer.settles + 1) == finite


def test_speedup_of_four_gpus_is_estimated_from_two(planted: Any) -> None:
    row = {"alone": [0.1, 0.1], "together": [0.11, 0.11], "all-reduce": [0.02, 0.02]}
    asked = planted({4: row, 8: {**row, "together": [0.101, 0.101], "all-reduce": [0.002, 0.002]}})
    verdict, finding = ups_parallel.four(with_gpus(2))
    assert asked[0][1:3] == (2, 2)
    assert verdict == DEPENDS
    assert "1.82 times as many examples a second, and an all-reduce by itself 20.0 ms" in finding
    assert "For four that means 3.33 to 3.64 times" in finding
    assert "Four GPUs were not measured" in finding


def test_speedup_of_four_gpus_is_measured_if_available(planted: Any) -> None:
    row = {"alone": [0.1, 0.1], "together": [0.105, 0.105], "all-reduce": [0.02, 0.02]}
    asked = planted({4: row, 8: row})
    verdict, finding = ups_parallel.four(with_gpus(8))
    assert asked[0][1:3] == (4, 4)
    assert verdict == CONFIRMED
    assert "3.81 times as many" in finding
    assert "not measured" not in finding


# --- verdicts on given figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "changed", "repeated", "verdict"),
    [(0.0, 0.0, 0.0, REFUTED), (0.0, 3e-7, 1e-7, REFUTED), (0.0, 1e-3, 0.0, UNMEASURED), (1e-9, 0.0, 0.0, CONFIRMED)],
)
def test_regularisation_is_refuted_without_a_gradient(
    gradient: float, changed: float, repeated: float, verdict: str
) -> None:
    assert judged.regularises(gradient, changed, repeated) == verdict


@pytest.mark.parametrize(
    ("ratios", "verdict"), [((2.0, 1.9), CONFIRMED), ((1.0, 2.0), DEPENDS), ((1.0, 1.1), REFUTED), ((4.0,), REFUTED)]
)
def test_each_ratio_is_compared_with_the_claimed_multiple(ratios: tuple[float, ...], verdict: str) -> None:
    assert judged.is_multiple([ratio(r, 0.01) for r in ratios], 2) == verdict


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [
        (1.10, 0.01, CONFIRMED),
        (1.06, 0.04, CONFIRMED),
        (1.00, 0.01, REFUTED),
        (0.90, 0.01, REFUTED),
        (1.40, 0.01, REFUTED),
        (1.05, 0.10, UNMEASURED),
        (1.15, 0.14, UNMEASURED),
    ],
)
def test_a_gain_is_compared_with_the_claimed_one(value: float, half: float, verdict: str) -> None:
    assert judged.has_gain([ratio(value, half)], 1.10) == verdict


def test_a_gain_in_only_one_mode_depends() -> None:
    assert judged.has_gain([ratio(1.0, 0.01), ratio(1.1, 0.01)], 1.10) == DEPENDS


@pytest.mark.parametrize(
    ("freed", "most", "verdict"),
    [((8.1, 7.9), 9.0, CONFIRMED), ((0.1, 8.0), 9.0, DEPENDS), ((0.1,), 9.0, REFUTED), ((8.0,), 0.2, REFUTED)],
)
def test_freed_memory_is_limited_by_the_amount_that_exists(freed: tuple[float, ...], most: float, verdict: str) -> None:
    assert judged.frees(freed, most, 8.0) == verdict


@pytest.mark.parametrize(
    ("norms", "difference", "verdict"),
    [
        ((1.0, 2.0), 0.0, CONFIRMED),
        ((1.0, 0.0), 0.0, DEPENDS),
        ((0.0, 0.0), 0.0, REFUTED),
        ((1.0, 2.0), 0.1, REFUTED),
        ((1.0, 2.0), math.nan, UNMEASURED),
        ((1.0, math.nan), 0.0, UNMEASURED),
    ],
)
def test_both_tasks_requires_a_gradient_per_task_and_the_mean_loss(
    norms: tuple[float, float], difference: float, verdict: str
) -> None:
    assert judged.both_tasks(dict(zip("ab", norms, strict=True)), difference) == verdict


@pytest.mark.parametrize(
    ("moved", "distances", "verdict"),
    [
        ((True, True), (0.0, 1e-6), CONFIRMED),
        ((True, False), (0.0,), REFUTED),
        ((True,), (0.0, 0.1), REFUTED),
        ((True,), (0.0, math.nan), REFUTED),
    ],
)
def test_updates_requires_all_weights_to_move_the_same_distance(
    moved: tuple[bool, ...], distances: tuple[float, ...], verdict: str
) -> None:
    assert judged.updates(moved, distances) == verdict


@pytest.mark.parametrize(
    ("moved", "verdict"), [((True, True), CONFIRMED), ((True, False), DEPENDS), ((False, False), REFUTED)]
)
def test_moves_depends_if_weights_move_in_only_some_ways(moved: tuple[bool, bool], verdict: str) -> None:
    assert judged.moves(dict(zip("ab", moved, strict=True))) == verdict


@pytest.mark.parametrize(
    ("counts", "verdict"), [((12, 4, 12), DEPENDS), ((12, 4, 4), CONFIRMED), ((12, 12, 12), REFUTED)]
)
def test_all_reduces_are_compared_with_those_of_single_micro_batch_steps(
    counts: tuple[int, int, int], verdict: str
) -> None:
    assert judged.cuts(*counts) == verdict


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((1.5, 1.1), CONFIRMED),
        ((1.5, 0.9), DEPENDS),
        ((0.99, 1.0), REFUTED),
        ((0.8,), REFUTED),
    ],
)
def test_faster_is_confirmed_only_if_every_ratio_is_above_1(ratios: tuple[float, ...], verdict: str) -> None:
    assert judged.faster([ratio(r, 0.005) for r in ratios]) == verdict


def test_a_ratio_with_a_wide_interval_is_unmeasured() -> None:
    assert judged.faster([ratio(1.0, 0.2)]) == UNMEASURED


@pytest.mark.parametrize(
    ("together", "product", "verdict"),
    [(5.1, 4.9, CONFIRMED), (5.1, 9.0, DEPENDS), (2.0, 5.0, DEPENDS), (8.0, 9.0, REFUTED)],
)
def test_verdict_on_phases_covers_their_product_and_all_together(together: float, product: float, verdict: str) -> None:
    assert judged.multiply(ratio(together, 0.1), product, 5.0) == verdict


@pytest.mark.parametrize(
    ("longer", "unchanged", "verdict"),
    [((1.2,), True, CONFIRMED), ((1.2, 1.5), True, DEPENDS), ((1.5,), True, REFUTED), ((1.2,), False, REFUTED)],
)
def test_a_cost_is_compared_with_the_claimed_one(longer: tuple[float, ...], unchanged: bool, verdict: str) -> None:
    assert judged.costs([ratio(r, 0.01) for r in longer], 0.2, unchanged=unchanged) == verdict


@pytest.mark.parametrize(
    ("speedups", "verdict"), [((3.9, 3.5), CONFIRMED), ((3.9, 2.0), DEPENDS), ((1.0, 2.0), REFUTED)]
)
def test_scales_requires_at_least_the_claimed_speedup(speedups: tuple[float, ...], verdict: str) -> None:
    assert judged.scales(speedups, 3.8) == verdict


def test_four_gpus_take_at_most_half_an_all_reduce_longer_than_two() -> None:
    assert judged.of_four(1.0, 1.2, 0.6) == pytest.approx((4 / 1.5, 4 / 1.2))
    assert judged.of_four(1.0, 0.9, 0.0) == (4, 4)  # two GPUs faster than one: noise


# --- the command, and a GPU -----------------------------------------------------------------------------------------


def test_command_measures_the_claims_of_ups(tmp_path: Path) -> None:
    asked = ["ups", "--only", "C26", "--only", "C34", "--device", "cpu", "--out", str(tmp_path)]
    done = CliRunner().invoke(claims, asked)
    assert done.exit_code == 0, done.output
    found = record.load(tmp_path / "claims.json")
    assert {name: (c.trainer, c.verdict) for name, c in found.items()} == {
        "C26": ("ups", REFUTED),
        "C34": ("ups", UNMEASURED),
    }
    assert "87.5% less" in (tmp_path / "claims.md").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", IDS)
def test_every_claim_has_a_verdict_on_a_gpu(name: str) -> None:
    given = dataclasses.replace(SMALL, device=torch.device("cuda"))
    verdict, finding = CHECKS[name].answer(given)
    assert verdict in VERDICTS
    assert finding
