"""Plant more work in one optimized side of this tree, to see the gate turn red: plant_slowdown.py NAME [SHARE].

Then `perfsuite gate -k NAME`, and `git checkout optimized` to undo. SHARE is 0.03 unless given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

WAIT = """    from time import perf_counter_ns
    begun = perf_counter_ns()
    while perf_counter_ns() - begun < {nanoseconds}:
        pass
"""
PLANTED = "\n# more work is planted here\n"
BASELINE = "baselines/nvidia-h200.json"


def accepted_ns(root: Path, name: str) -> float:
    """What a call of that technique took when it was accepted; ValueError where that is not known."""
    records = json.loads((root / BASELINE).read_text())["benchmarks"]
    found = [r["stats"]["median"] for r in records if r["fullname"].endswith(f"::{name}::speed[window64]@optimized")]
    if len(found) != 1:
        raise ValueError(f"{BASELINE} has {len(found)} workloads {name}[window64]; accept it first")
    return float(found[0]) * 1e9


def programs(root: Path, share: float) -> dict[str, list[tuple[str, str]]]:
    """Kernels: so many more programs, which do a part of the work again."""
    more = f"{1 + share}"
    return {
        "geometry/lior_and_speed": [
            (
                "_forward_kernel[(ceil_div(rows, block * tiles),)](",
                f"_forward_kernel[(int(ceil_div(rows, block * tiles) * {more}),)](",
            ),
            (
                "first = tl.program_id(0).to(tl.int64) * (BLOCK * TILES) + tl.arange(0, BLOCK)\n    vs = ()\n    curv",
                "first = (tl.program_id(0) % tl.cdiv(rows, BLOCK * TILES)).to(tl.int64) * (BLOCK * TILES)\n"
                "    first += tl.arange(0, BLOCK)\n    vs = ()\n    curv",
            ),
        ],
        "diversity/pairwise_cosine": [
            (
                "_forward_kernel[(tiles * (tiles + 1) // 2,)](",
                f"_forward_kernel[(int(tiles * (tiles + 1) // 2 * {more}),)](",
            ),
            (
                "_tile(tl.program_id(0))",
                "_tile(tl.program_id(0) % (tl.cdiv(n, BLOCK) * (tl.cdiv(n, BLOCK) + 1) // 2))",
            ),
        ],
    }


def copies(root: Path, share: float) -> dict[str, list[tuple[str, str]]]:
    """The optimizer: a copy that moves so much of the step's bytes again."""
    elements = f"int(sum(p.numel() for p in self.params) * {share} * 28 / 8)"
    return {
        "optimizers/fused_adamw": [
            (
                "        self.sent: list[int] | None = None\n",
                "        self.sent: list[int] | None = None\n"
                f"        self.pair = [torch.zeros({elements}, device=self.params[0].device) for _ in range(2)]\n",
            ),
            (
                "        beta1, beta2 = self.betas\n        self.powers",
                "        self.pair[0].copy_(self.pair[1])\n        beta1, beta2 = self.betas\n        self.powers",
            ),
        ]
    }


def waits(root: Path, share: float) -> dict[str, list[tuple[str, str]]]:
    """What is bound by the host: so much longer there."""
    rotor, metrics = (
        WAIT.format(nanoseconds=int(accepted_ns(root, name) * share)) for name in ("rotor_update", "metric_batching")
    )
    use = "    if use_triton(theta, velocity, loss_delta) and"
    sums = "    sums = (lior_acc, R_acc, speed_acc)\n"
    return {
        "geometry/rotor_update": [(use, rotor + use)],
        "synchronization/metric_batching": [(sums, metrics + sums)],
    }


KINDS: tuple[Callable[[Path, float], dict[str, list[tuple[str, str]]]], ...] = (programs, copies, waits)
NAMES = ["fused_adamw", "lior_and_speed", "metric_batching", "pairwise_cosine", "rotor_update"]


def plant(root: Path, name: str, share: float) -> Path:
    """The module that was changed; ValueError where it does not hold the lines that the change is made to."""
    every = {module: edits for kind in KINDS for module, edits in kind(root, share).items()}
    module = next(m for m in every if m.endswith(f"/{name}"))
    path = root / "optimized" / f"{module}.py"
    text = path.read_text()
    if text.endswith(PLANTED):
        raise ValueError(f"{path}: has more work already; `git checkout optimized` takes it away")
    for old, new in every[module]:
        if text.count(old) != 1:
            raise ValueError(f"{path}: {old.strip()!r} is there {text.count(old)} times; adapt {Path(__file__).name}")
        text = text.replace(old, new)
    path.write_text(text + PLANTED)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("share", type=float, nargs="?", default=0.03)
    given = parser.parse_args()
    try:
        print(plant(Path.cwd(), given.name, given.share))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
