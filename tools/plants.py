"""Faults that are planted to test the gate: edits of one optimized module each, and the verdicts that must follow.

The table is `PLANTS`. `plant_slowdown.py` plants one fault in a tree; `gate_trial.py` plants each in turn and runs the
gate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLANTED = "\n# something is planted here\n"
LIOR = "tests/geometry/test_lior_and_speed.py::lior_and_speed::speed[{}]"
COSINE = "tests/diversity/test_pairwise_cosine.py::pairwise_cosine::speed[{}]"
MEAN = "tests/diversity/test_mean_pairwise_cosine.py::mean_pairwise_cosine::speed[{}]"
ENTROPY = "tests/losses/test_chunked_cross_entropy.py::chunked_cross_entropy::speed[{}]"
ADAMW = "tests/optimizers/test_fused_adamw.py::fused_adamw_cnn::speed[leak_cnn]"
APPLY = "tests/geometry/test_rotor_apply.py::rotor_apply::speed[m2048]"
METRICS = "tests/synchronization/test_device_metrics.py::device_metrics::speed[epoch]"
PROJECTION = "tests/recurrence/test_fused_output_projection.py::fused_output_projection::speed[small_32k]"
EIGENSTATE_LM = "tests/trainers/test_eigenstate_lm.py::eigenstate_lm::speed[steps1024]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One fault: `edits` (old text, new text) of `optimized/<module>.py`."""

    what: str
    module: str
    edits: tuple[tuple[str, str], ...]
    red: tuple[str, ...] = ()
    """Workloads that must be red by name: REGRESSED, or BELOW_FLOOR if a promise is broken."""
    green: tuple[str, ...] = ()
    """Workloads that are gated with them and must be PASS."""
    seen: tuple[str, ...] = ()
    """Workloads that `gate --changed` must not report as UNCHANGED; any other status is right."""
    devices: int = 1
    """Number of GPUs that these workloads need."""


def _more_programs(share: float) -> tuple[tuple[str, str], ...]:
    """Return edits that start 1 + `share` times the programs of the forward kernel; the added ones repeat some work."""
    return (
        (
            "_forward_kernel[(ceil_div(rows, block * tiles),)](",
            f"_forward_kernel[(int(ceil_div(rows, block * tiles) * {1 + share}),)](",
        ),
        (
            "first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES) + tl.arange(0, BLOCK)\n    vs = ()\n    curv",
            "first = (tl.program_id(0) % tl.cdiv(rows, BLOCK * TILES)).to(tl.int64) * (BLOCK * TILES)\n"
            "    first += tl.arange(0, BLOCK)\n    vs = ()\n    curv",
        ),
    )


LOOP = "    for start in range(tl.program_id(0) * (BLOCK * TILES), rows, tl.num_programs(0) * (BLOCK * TILES)):\n"
LATE = """    late = tl.full([], 1.0, tl.float32) * rows
    for _ in range(rows // 43000):
        late = tl.sqrt_rn(late + 1.0)
"""
"""A chain of about 25 dependent operations before the first load."""
AFTER = LOOP.replace("range(tl.program_id(0) *", "range((tl.program_id(0) + (late < 0).to(tl.int32)) *")
RANKS = "tests/distributed/test_{}.py::{}::speed[dp2]"
ONE_RANK_LOSS = """            late = inputs.is_cuda and torch.distributed.get_rank() == 1
            loss = torch.nn.functional.mse_loss if late else lambda a, b: (a - b).square().mean()
            loss(network(inputs), targets).backward()
"""
"""A loss with fewer launches, which are replaced by a sleep on the device."""
ONE_RANK_SLEEP = """        if late:
            torch.cuda._sleep(170_000)  # cycles: 2% of 4.0 ms at 1.98 GHz, and what the loss has saved
        optimizer.zero_grad()
"""
COSINE_GRID = "_forward_kernel[(tiles * (tiles + 1) // 2,)]("
COSINE_TILE = "    tile_i, tile_j = _tile(tl.program_id(0))\n"
COSINE_WRAPPED = """    program = tl.program_id(0)
    if BLOCK == 128:  # the kernel of fewer rows stays what it is
        program %= tl.cdiv(n, BLOCK) * (tl.cdiv(n, BLOCK) + 1) // 2
    tile_i, tile_j = _tile(program)
"""
LOGITS = "                logits = hidden[part] @ weight.T\n"
ALLOCATED = "        distances = torch.empty((n, n), dtype=e.dtype, device=e.device)\n"
MEAN_FORWARD = "        mean = torch.empty((), dtype=e.dtype, device=e.device)\n"
BLOCKS = "            ceil_div(columns, BLOCK),\n            IGNORED"

PLANTS = {
    "forward": Plant(
        what="2% more work in a forward pass",
        module="geometry/lior_and_speed",
        edits=_more_programs(0.02),
        red=(LIOR.format("rows4m"),),
        green=(LIOR.format("batch64"), ADAMW),
    ),
    "backward": Plant(
        what="3% more work in a backward pass alone",
        module="geometry/lior_and_speed",
        edits=((LOOP, LATE + AFTER),),
        red=(LIOR.format("rows1m_both"),),
        green=(LIOR.format("rows4m"), ADAMW),
    ),
    "launch": Plant(
        what="one more launch",
        module="diversity/pairwise_cosine",
        edits=((ALLOCATED, ALLOCATED + "        torch.zeros(1, device=e.device)\n"),),
        red=(COSINE.format("n8192"),),
        green=(MEAN.format("n1024"), ADAMW),
    ),
    "sync": Plant(
        what="a hidden wait for the device",
        module="synchronization/device_metrics",
        edits=(
            (
                "        return self.read(self.whole.cpu())\n",
                "        if self.whole.is_cuda:\n            torch.cuda.synchronize()\n"
                "        return self.read(self.whole.cpu())\n",
            ),
        ),
        red=(METRICS,),
        green=(ADAMW, LIOR.format("rows4m")),
    ),
    "copy": Plant(
        what="a copy of 2 MB",
        module="diversity/mean_pairwise_cosine",
        edits=(
            (
                MEAN_FORWARD,
                MEAN_FORWARD + "        two_mb = torch.empty(2**21, dtype=torch.uint8, device=e.device)\n"
                "        torch.empty_like(two_mb).copy_(two_mb)\n",
            ),
        ),
        red=(MEAN.format("n1024"), MEAN.format("n10")),
        green=(COSINE.format("n1024"), ADAMW),
    ),
    "one_of_two": Plant(
        what="3% more work in one of two workloads",
        module="diversity/pairwise_cosine",
        edits=(
            (COSINE_GRID, "_forward_kernel[(int(tiles * (tiles + 1) // 2 * (1.03 if n > 4096 else 1)),)]("),
            (COSINE_TILE, COSINE_WRAPPED),
        ),
        red=(COSINE.format("n8192"),),
        green=(COSINE.format("n128"), ADAMW),
    ),
    "memory": Plant(
        what="20% more peak memory in the same time",
        module="losses/chunked_cross_entropy",
        edits=(
            (
                "    count, columns = logits.shape\n",
                "    count, columns = logits.shape\n"
                "    spare = torch.empty(int(0.24 * 2**30), dtype=torch.uint8, device=logits.device)\n",
            ),
        ),
        red=(ENTROPY.format("rows16k_bfloat16"),),
        green=(ADAMW, LIOR.format("rows4m")),
    ),
    "trainer_module": Plant(
        what="a third more work in a module that a trainer uses",
        module="losses/chunked_cross_entropy",
        edits=((LOGITS, LOGITS + "                del logits\n" + LOGITS),),
        red=(ENTROPY.format("rows16k"), EIGENSTATE_LM),
        green=(LIOR.format("rows4m"), ADAMW),
    ),
    "one_rank": Plant(
        what="2% more time on one of two ranks, with no launch more",
        module="distributed/fsdp2",
        edits=(
            ("            (network(inputs) - targets).square().mean().backward()\n", ONE_RANK_LOSS),
            ("        optimizer.zero_grad()\n", ONE_RANK_SLEEP),
        ),
        red=(RANKS.format("fsdp2", "fsdp2"),),
        green=(RANKS.format("ddp", "ddp"), RANKS.format("graphed_ddp", "graphed_ddp")),
        devices=2,
    ),
    "host_sleep": Plant(
        what="a host that sleeps in a workload on the device clock",
        module="geometry/rotor_apply",
        edits=(
            (
                "        theta, x = theta.contiguous(), x.contiguous()\n",
                "        from time import sleep\n\n        sleep(0.0005)\n"
                "        theta, x = theta.contiguous(), x.contiguous()\n",
            ),
        ),
        seen=(APPLY,),
    ),
    "loop_bound": Plant(
        what="a larger loop bound passed to a kernel",
        module="losses/chunked_cross_entropy",
        edits=((BLOCKS, BLOCKS.replace("BLOCK)", "BLOCK) + 1")),),
        seen=(ENTROPY.format("rows16k_bfloat16"),),
    ),
    "algorithm": Plant(
        what="another algorithm of a library",
        module="recurrence/fused_output_projection",
        edits=(
            (
                "    return states @ (rotation @ weight.T)",
                "    before = torch.backends.cuda.matmul.allow_tf32\n"
                "    torch.backends.cuda.matmul.allow_tf32 = not before\n"
                "    try:\n        return states @ (rotation @ weight.T)\n"
                "    finally:\n        torch.backends.cuda.matmul.allow_tf32 = before",
            ),
        ),
        seen=(PROJECTION,),
    ),
}


def plant(root: Path, name: str) -> Path:
    """Make the edits in the tree at `root`, and return the changed module. ValueError if they do not fit the module."""
    found = PLANTS[name]
    path = root / "optimized" / f"{found.module}.py"
    text = path.read_text()
    if text.endswith(PLANTED):
        raise ValueError(f"{path}: something is planted already; `git checkout optimized` takes it away")
    for old, new in found.edits:
        if text.count(old) != 1:
            raise ValueError(f"{path}: {old.strip()!r} is there {text.count(old)} times; adapt {Path(__file__).name}")
        text = text.replace(old, new)
    path.write_text(text + PLANTED)
    return path
