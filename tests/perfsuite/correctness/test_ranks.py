"""Pairs in several processes: the part of each rank, wrong declarations, and pytest's output."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scale import FULLY, count
from scratch import lines_with
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import perfsuite
from perfsuite import Pair, listof, tensor
from perfsuite.correctness.ranks import group, parts
from perfsuite.declare.specs import Size
from perfsuite.draws import inputs as make
from perfsuite.draws import rank_parts
from perfsuite.errors import MachineError, NotEquivalent, PairError
from perfsuite.records import Case

pytest_plugins = ["pytester"]

ROWS = {"w": tensor("n"), "x": tensor("ranks * m", "n", by_rank=0), "y": [tensor("n", "ranks * m", by_rank=1)]}


def mean(w: torch.Tensor, x: torch.Tensor, y: Any) -> torch.Tensor:
    return w + x.mean(0)


def pair(**fields: Any) -> Pair:
    given: dict[str, Any] = {"reference": mean, "optimized": mean, "inputs": ROWS, "gradients": False, "ranks": (2, 3)}
    return Pair(**{**given, **fields})


# --- parts ----------------------------------------------------------------------------------------------------------


def test_each_rank_gets_its_part_and_all_shared_inputs() -> None:
    of = pair().at(3)
    values = make.build(of, Case(dtype="float32", sizes={"m": 2, "n": 5, "ranks": 3}, inputs={}, seed=0), "cpu")
    every = [rank_parts.of_rank(ROWS, values, rank, 3) for rank in range(3)]
    assert [tuple(one["x"].shape) for one in every] == [(2, 5)] * 3
    assert all(torch.equal(one["w"], values["w"]) for one in every)
    assert torch.equal(torch.cat([one["x"] for one in every]), values["x"])
    assert torch.equal(torch.cat([one["y"][0] for one in every], 1), values["y"][0])
    assert all(one["y"][0].is_contiguous() for one in every)


def test_equal_parts_repeat_the_part_of_the_first_rank() -> None:
    case = Case(dtype="float32", sizes={"m": 2, "n": 5, "ranks": 3}, inputs={}, seed=0)
    usual, alike = (make.build(of, case, "cpu") for of in (pair().at(3), pair().at(3, equal_parts=True)))
    assert torch.equal(alike["x"], usual["x"][:2].repeat(3, 1))
    assert torch.equal(alike["y"][0], usual["y"][0][:, :2].repeat(1, 3))
    assert torch.equal(alike["w"], usual["w"])


def test_parts_in_lists_and_dicts_are_found() -> None:
    spec = {"x": {"a": listof(2, tensor("ranks * m", by_rank=0)), "b": (tensor("n"),)}}
    value = {"x": {"a": [torch.arange(4), torch.arange(4, 8)], "b": (torch.arange(3),)}}
    found = rank_parts.of_rank(spec, value, 1, 2)["x"]
    assert [t.tolist() for t in found["a"]] == [[2, 3], [6, 7]]
    assert found["b"][0].tolist() == [0, 1, 2]


def test_parts_of_an_output_from_all_ranks_are_joined() -> None:
    truth = {"sum": torch.zeros(3), "rows": torch.zeros(4, 3), "columns": torch.zeros(3, 4), "number": 1.0}
    ranks: Any = [
        {"sum": torch.full((3,), r), "rows": torch.full((2, 3), r), "columns": torch.full((3, 2), r), "number": r}
        for r in (0.0, 1.0)
    ]
    found = parts.joined(ranks, truth)
    assert found.keys() == {"rows", "columns"}
    assert found["rows"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert found["columns"].tolist() == [[0.0, 0.0, 1.0, 1.0]] * 3


def test_parts_of_mismatched_shapes_are_not_joined() -> None:
    ranks: Any = [{"rows": torch.zeros(2, 3)}, {"rows": torch.zeros(3, 3)}]
    assert not parts.joined(ranks, {"rows": torch.zeros(4, 3)})


# --- declarations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: tensor("m", "n", by_rank=0), r"by_rank=0 must be the place of a dimension that is a multiple"),
        (lambda: tensor("ranks * m", by_rank=1), r"by_rank=1 must be the place"),
        (lambda: tensor("ranks + m", by_rank=0), r"by_rank=0 must be the place of a dimension that is a multiple"),
        (lambda: tensor("ranks * m", by_rank=True), r"by_rank=True must be the place"),
        (lambda: pair(ranks=(1,)), r"ranks=\(1,\): give different numbers of processes, each 2 or more"),
        (lambda: pair(ranks=("two",)), r"ranks=\('two',\): give different numbers of processes"),
        (lambda: pair(ranks=2), "ranks=2: give different numbers of processes"),
        (lambda: pair(ranks=(2, 2)), r"ranks=\(2, 2\): give different numbers of processes"),
        (
            lambda: pair(sizes={"ranks": Size(low=1, high=9)}),
            r"this size is the number of processes; say ranks=\(2, 4\)",
        ),
        (lambda: pair(gradients=True), "is compared by its outputs: make its sides stateful, or gradients=False"),
        (lambda: pair(ranks=()), r"depends on the size ranks: say in how many processes, as Pair\(ranks=\(2, 4\)\)"),
    ],
)
def test_a_wrong_declaration_is_rejected(declare: Any, words: str) -> None:
    with pytest.raises(PairError, match=words):
        declare()


def test_the_number_of_ranks_is_a_size_that_is_not_drawn() -> None:
    of = pair(workloads=[perfsuite.Workload("w", m=2, n=2)])
    of.validate()
    assert of.workloads[0].sizes["ranks"] == 1
    shared = [perfsuite.Workload("w", m=2, n=2)]
    pair(workloads=shared)
    assert "ranks" not in shared[0].sizes
    assert (of.size_of("ranks"), of.at(3).size_of("ranks")) == (Size(low=1, high=1), Size(low=3, high=3))


def test_too_few_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert group.lacking(4, "cuda") == "needs 4 CUDA devices; 2 here"
    assert group.lacking(2, "cuda") is None
    assert group.lacking(4, "cpu") is None


# --- one process ----------------------------------------------------------------------------------------------------


def test_a_pair_with_ranks_has_its_own_process_group_in_one_process() -> None:
    def counts(w: torch.Tensor, x: torch.Tensor, y: Any) -> torch.Tensor:
        return w * dist.get_world_size()

    assert not dist.is_initialized()
    perfsuite.check(pair(optimized=counts, reference=lambda w, x, y: w * 1), examples=3, device="cpu")
    assert not dist.is_initialized()
    with group.alone(pair(), "cpu"), group.alone(pair(), "cpu"):
        assert dist.get_world_size() == 1
    with group.alone(pair(ranks=(), inputs={"x": tensor("n")}), "cpu"):
        assert not dist.is_initialized()


def test_a_side_that_destroys_the_process_group_is_reported() -> None:
    def last(w: torch.Tensor, x: torch.Tensor, y: Any) -> torch.Tensor:
        dist.destroy_process_group()
        return w * 1

    words = "the optimized side sets torch.distributed's default process group to none .before: one of 1. for all"
    with pytest.raises(NotEquivalent, match=words):
        perfsuite.check(pair(optimized=last, reference=lambda w, x, y: w * 1), examples=3, device="cpu")
    with pytest.raises(PairError, match=words.replace("optimized side", "reference side")):
        perfsuite.check(pair(optimized=lambda w, x, y: w * 1, reference=last), examples=3, device="cpu")
    assert not dist.is_initialized()


def test_a_side_may_initialize_a_process_group_if_there_is_none() -> None:
    def begins(x: torch.Tensor) -> torch.Tensor:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return x * 1

    made = pair(optimized=begins, reference=lambda x: x * 1, ranks=(), inputs={"x": tensor("n")})
    try:
        assert perfsuite.check(made, examples=3, device="cpu")
    finally:
        dist.destroy_process_group()


def test_sides_with_distributed_tensors_are_proven() -> None:
    """A DTensor has no memory of its own to guard, and its rounding errors are those of its parts."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + x * 3 / 7

    def sharded(x: torch.Tensor) -> torch.Tensor:
        parts = distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
        whole: torch.Tensor = (torch.zeros_like(parts) + parts * 3 / 7).full_tensor()
        return whole

    inputs = {"x": tensor("n", values=perfsuite.floats(-1, 1))}
    both = ({"reference": plain, "optimized": sharded}, {"reference": sharded, "optimized": plain})
    for sides in both[: count(quick=1, full=2)]:
        made = pair(inputs=inputs, sizes={"n": Size(low=1, high=9)}, **sides)
        assert perfsuite.check(made, examples=3, device="cpu")


# --- pytest ---------------------------------------------------------------------------------------------------------

MODULE = """
import os, torch
import torch.distributed as dist
from perfsuite import Pair, Workload, floats, size, tensor

def reference(x):
    total = x.sum(0)
    dist.all_reduce(total)
    return total

def optimized(x):
    total = x.sum(0)
    {body}
    return total

totals = Pair(
    reference={reference},
    optimized=optimized,
    inputs={{"x": tensor("ranks * rows", "n", values=floats(-2, 2), by_rank=0)}},
    gradients=False,
    sizes={{"rows": size(1, 5), "n": size(1, 9)}},
    ranks=(2,),
    workloads=[Workload("w", rows=4, n=8)],
)
"""


def run(project: Any, body: str, reference: str = "reference") -> str:
    """Return the output of a process that proves the pair."""
    project.write("test_totals.py", MODULE.format(body=body, reference=reference))
    done = project.process("pytest", "-q", "-m", "correctness", "-k", "ranks", "test_totals.py")
    return str(done.stdout + done.stderr)


@pytest.fixture
def at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the processes that start ranks run some lines of Python first."""

    def run(lines: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    return run


ONE_AFTER_ANOTHER = """
import os, time
forks = []
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: time.sleep(2 * len(forks)))
"""


def test_ranks_may_start_seconds_apart(at_start: Callable[[str], None]) -> None:
    at_start(ONE_AFTER_ANOTHER)
    made = group.Group(2, "cpu", collective_s=1.0)
    try:
        assert not connection.wait(made.connections.values(), 1.0), "a rank has ended"
    finally:
        made.close()


ENDS_EARLY = """
import os, sys
from importlib.abc import MetaPathFinder

class Found(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "perfsuite.system.triton_interpreter" and "torch.distributed" in sys.modules:
            import torch.distributed as dist
            own = dist.init_process_group
            def begin(*given, **options):
                if os.environ["RANK"] == "1":
                    os._exit(7)
                return own(*given, **options)
            dist.init_process_group = begin

sys.meta_path.insert(0, Found())
"""


def test_the_rank_that_ends_at_the_start_is_named(at_start: Callable[[str], None]) -> None:
    at_start(ENDS_EARLY)
    with pytest.raises(MachineError, match=r"2 processes .* do not start: rank 1 ends with exit code 7"):
        group.Group(2, "cpu")


NO_INTERFACE = """
import os
os.environ["GLOO_SOCKET_IFNAME"] = "none0"
"""


def test_ranks_that_cannot_form_a_group_raise_machine_error(at_start: Callable[[str], None]) -> None:
    at_start(NO_INTERFACE)
    with pytest.raises(MachineError, match=r"2 processes of torch.distributed do not start: rank [01]: .*none0"):
        group.Group(2, "cpu")


def test_a_pair_is_proven_in_two_processes(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_groups", {})  # these processes belong to the scratch project
    project.write("test_totals.py", MODULE.format(body="dist.all_reduce(total)", reference="reference"))
    try:
        done = project.run("-m", "correctness", "-k", "ranks", "test_totals.py")
    finally:
        group.close_all()
    done.assert_outcomes(passed=1, deselected=6)


@FULLY
def test_a_rank_that_exits_is_named(project: Any) -> None:
    output = run(project, "dist.all_reduce(total) if dist.get_rank() == 0 else os._exit(7)")
    assert "totals: the optimized side in 2 processes ends the process of rank 1 with exit code 7" in output
    assert lines_with(output, "FAILED", "test_totals.py::totals::ranks[2]"), output


@FULLY
def test_a_reference_that_differs_in_several_processes_is_rejected(project: Any) -> None:
    output = run(project, "dist.all_reduce(total)", reference="lambda x: x.sum(0)")
    assert "in several processes it must be the function that it is in one" in output
