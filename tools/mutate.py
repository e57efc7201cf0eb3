"""Mutation testing: put one small fault at a time into a module, and check whether its tests notice.

    python tools/mutate.py [MODULE ...] [--sample N] [--seed N] [--fresh]

cosmic-ray finds the places, makes the mutants and runs the tests on each. This file chooses what to mutate and which
tests to run, reads what has been reviewed, and writes the report. Files are changed only in a copy of the tree. Results
are kept in .perfsuite/mutation/, so a run that was ended can be resumed. See docs/mutation.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

try:
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_and_test, mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkItem, WorkResult
except ModuleNotFoundError:
    sys.exit("cosmic-ray is missing: run `make mutate`, or pip install -c constraints.txt cosmic-ray")

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".perfsuite" / "mutation"
REVIEWED = ROOT / "tests" / "mutation" / "equivalent.toml"
CATEGORIES = ("speed_only", "needs_gpu", "equivalent")
"""Tables of REVIEWED, in the order in which they are searched."""

PURE = {
    f"perfsuite/{name}.py": [f"tests/perfsuite/{name.replace('/', '/test_')}.py"]
    for name in (
        "statistics/hierarchical",
        "statistics/blocks",
        "gate/decision",
        "gate/causes",
        "gate/counts",
        "gate/throughput",
        "gate/planning",
        "baseline/accepted_entries",
        "session/changed",
        "revisions/digests",
        "session/lanes",
        "session/gpu_sharing",
        "system/time_limit",
    )
}
for name in ("gate/estimates", "baseline/priors", "gate/stages", "gate/soundness"):
    PURE[f"perfsuite/{name}.py"] = PURE["perfsuite/gate/decision.py"]
PURE["perfsuite/baseline/storage.py"] = PURE["perfsuite/baseline/accepted_entries.py"]
for name in ("rule", "comparison", "truths", "tally", "forms", "reference_task", "equivalence"):
    tests = ("equivalence", "bias", "shared_truths")
    PURE[f"perfsuite/correctness/{name}.py"] = [f"tests/perfsuite/correctness/test_{test}.py" for test in tests]
SHARED = {
    "optimized/addresses.py": ["tests/optimizers/test_fused_adamw.py"],
    "optimized/kernels.py": ["tests/test_kernels.py", "tests/geometry/test_rotor_update.py"],
    "optimized/rotor.py": ["tests/geometry/test_rotor_apply.py", "tests/geometry/test_rotor_cache.py"],
    "optimized/diversity/pairwise_cosine_cuda.py": ["tests/diversity/test_pairwise_cosine.py"],
}
"""Modules of `optimized/` that are not a technique by themselves, and the tests that use them."""

# One replacement for each arithmetic operator, and the boundary and the negation of each comparison. cosmic-ray has
# dozens of others, but the same assertions find them, and they would take ten times as long.
OPERATORS = re.compile(
    r"core/(AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|NumberReplacer"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ExceptionReplacer|RemoveDecorator|ZeroIterationForLoop"
    r"|ReplaceUnaryOperator_(USub_UAdd|UAdd_USub|Delete_Invert|Delete_Not)"
    r"|ReplaceComparisonOperator_(Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt"
    r"|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul|Pow_Mul|RShift_LShift"
    r"|LShift_RShift|BitOr_BitAnd|BitAnd_BitOr|BitXor_BitAnd))"
)
TIMEOUT_FACTOR, TIMEOUT_SECONDS = 3.0, 15.0
"""Time limit of a mutant: TIMEOUT_FACTOR × the time of the unmutated module + TIMEOUT_SECONDS. Beyond it, it hangs."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault as it is reported: its line, the operator, and the lines before and after."""

    row: int
    operator: str
    before: str
    after: str
    compiles: bool
    annotation: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts for one module.

    found  number of mutants that were run, by outcome
    aside  number of mutants that were not run, by category
    """

    module: str
    total: int
    chosen: int
    found: Counter[str]
    aside: Counter[str]
    survivors: list[Mutant]
    stale: list[str]

    @property
    def rate(self) -> float:
        ran = self.found["killed"] + self.found["timeout"] + self.found["survived"]
        return 1 - self.found["survived"] / ran if ran else 1.0


# --- what to mutate ------------------------------------------------------------------------------------------------


def tests_of(module: str) -> list[str]:
    """Return the test files of a module."""
    if module in PURE or module in SHARED:
        return {**PURE, **SHARED}[module]
    path = Path(module)
    test = Path("tests", *path.parts[1:-1], f"test_{path.name}")
    if path.parts[0] != "optimized" or not (ROOT / test).is_file():
        raise SystemExit(f"{module}: no tests are known for it; name one of {', '.join(modules())}")
    return [str(test)]


def modules() -> list[str]:
    """Return every module that is mutated: the pure stages first, then the others from small to large."""
    found = sorted((p for p in (ROOT / "optimized").rglob("*.py") if p.stat().st_size), key=lambda p: p.stat().st_size)
    return [*PURE, *(str(p.relative_to(ROOT)) for p in found)]


def digest(names: Sequence[str]) -> str:
    """Return a digest of the given files, and of all Python files in the given folders."""
    files = [f for n in names for f in (sorted((ROOT / n).rglob("*.py")) if (ROOT / n).is_dir() else [ROOT / n])]
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:16]


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[None]:
    """Change the working directory to a copy of all files that git lists, for the duration of the block."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    with tempfile.TemporaryDirectory(prefix="perfsuite-mutation-", ignore_cleanup_errors=True) as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (target := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        # Keep the kernels of mutants out of the user's cache.
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, ".triton"))
        with contextlib.chdir(folder):
            yield


# --- mutants -------------------------------------------------------------------------------------------------------


def annotation_rows(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the spans of annotations, which `from __future__ import annotations` leaves unevaluated."""
    spans = []
    for node in ast.walk(tree):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        spans += [
            ((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in notes if n is not None
        ]
    return spans


def describe(item: WorkItem, source: str, spans: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> Mutant:
    (spec,) = item.mutations
    mutated = mutate_code(source, get_operator(spec.operator_name)(**spec.operator_args), spec.occurrence)
    lines = [d for d in difflib.ndiff(source.splitlines(), (mutated or "").splitlines()) if d[:2] in ("- ", "+ ")]
    try:
        compile(mutated, "mutant", "exec")
        compiles = True
    except (SyntaxError, ValueError):
        compiles = False
    return Mutant(
        row=spec.start_pos[0],
        operator=spec.operator_name.removeprefix("core/"),
        before=" ".join(d[2:].strip() for d in lines if d[0] == "-"),
        after=" ".join(d[2:].strip() for d in lines if d[0] == "+"),
        compiles=compiles,
        annotation=any(start <= spec.start_pos < end for start, end in spans),
    )


def prepared(module: str, *, fresh: bool) -> tuple[Path, dict[str, Any]]:
    """Return the session's database and the recorded data of its mutants.

    Both are created again if the module or the operators have changed.
    """
    stem = STATE / module.removesuffix(".py").replace("/", ".")
    database, known = Path(f"{stem}.sqlite"), Path(f"{stem}.json")
    source = (ROOT / module).read_text()
    identity = hashlib.sha256((source + OPERATORS.pattern).encode()).hexdigest()[:16]
    if not fresh and database.exists() and known.exists():
        data = json.loads(known.read_text())
        if data["identity"] == identity:
            return database, data
    STATE.mkdir(parents=True, exist_ok=True)
    known.unlink(missing_ok=True)
    database.unlink(missing_ok=True)
    spans = annotation_rows(ast.parse(source))
    with use_db(database) as db:
        init([Path(module)], db, {})
        kept = [i for i in db.work_items if OPERATORS.fullmatch(i.mutations[0].operator_name)]
        data = {
            "identity": identity,
            "tests": None,
            "mutants": {i.job_id: asdict(describe(i, source, spans)) for i in kept},
        }
    known.write_text(json.dumps(data))
    return database, data


# --- what was reviewed ---------------------------------------------------------------------------------------------


def spans_by_name(module: str) -> dict[str, tuple[int, int]]:
    """Return the rows of each function, class and assignment, by name, e.g. FORWARD_CONFIGS."""
    spans = {}
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        names = [getattr(node, "name", None)]
        names += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        names += [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []
        first = min([d.lineno for d in getattr(node, "decorator_list", [])] + [getattr(node, "lineno", 0)])
        spans.update({n: (first, node.end_lineno or 0) for n in names if n and isinstance(node, ast.stmt)})
    return spans


def reviewed(module: str) -> list[dict[str, str]]:
    """Return the reviewed entries for a module. SystemExit if an entry lacks a field or has an unknown one."""
    tables = tomllib.loads(REVIEWED.read_text()) if REVIEWED.exists() else {}
    entries = [{"category": c, **entry} for c in CATEGORIES for entry in tables.pop(c, [])]
    for entry in entries:
        unknown = set(entry) - {"category", "module", "line", "mutant", "next", "operator", "within", "reason"}
        if unknown or not entry.get("reason") or "module" not in entry or not {"line", "within"} & set(entry):
            raise SystemExit(f"{REVIEWED.name}: an entry needs module, line or within, and a reason: {entry}")
    if tables:
        raise SystemExit(f"{REVIEWED.name}: unknown table {next(iter(tables))!r}")
    return [e for e in entries if e["module"] == module]


def same(text: str, other: str) -> bool:
    """Return whether two lines are equal except for blanks, some of which cosmic-ray adds."""
    return "".join(text.split()) == "".join(other.split())


def matches(entry: dict[str, str], mutant: Mutant, spans: dict[str, tuple[int, int]], lines: Sequence[str]) -> bool:
    first, last = spans.get(entry.get("within", ""), (0, -1))
    return (
        ("within" not in entry or first <= mutant.row <= last)
        and ("next" not in entry or same(entry["next"], "".join(lines[mutant.row : mutant.row + 1])))
        and same(entry.get("line", mutant.before), mutant.before)
        and same(entry.get("mutant", mutant.after), mutant.after)
        and fnmatch(mutant.operator, entry.get("operator", "*"))
    )


# --- running -------------------------------------------------------------------------------------------------------


def outcome(result: WorkResult) -> str:
    if result.test_outcome is TestOutcome.KILLED and result.output == "timeout":
        return "timeout"
    return str(result.test_outcome.value) if result.test_outcome else "failed"


def measured_timeout(module: str, command: str) -> float:
    """Return the time limit for one mutant in seconds. SystemExit if the tests fail without any fault."""
    began = time.perf_counter()
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{module}: its tests fail before anything is mutated:\n{done.stdout[-2000:]}")
    return TIMEOUT_FACTOR * (time.perf_counter() - began) + TIMEOUT_SECONDS


def run(db: WorkDB, module: str, jobs: Sequence[str], again: bool, mutants: dict[str, Mutant]) -> None:
    """Test those of `jobs` that have no result and, with `again`, the survivors too."""
    results = {job: outcome(r) for job, r in db.results}
    todo = [j for j in jobs if j not in results or (again and results[j] == "survived")]
    if not todo:
        return
    # With `-m pytest` this folder comes first on the path, before an installed perfsuite.
    tests = " ".join(tests_of(module))
    options = "-x -q -p no:cacheprovider -p tools.quick_to_fail -m 'not perf'"
    command = f"{shlex.quote(sys.executable)} -m pytest {options} {tests}"
    timeout = measured_timeout(module, command)
    items = {i.job_id: i for i in db.work_items}
    for number, job in enumerate(todo, 1):
        result = mutate_and_test(items[job].mutations, command, timeout)
        db.set_result(job, result)
        mutant, found = mutants[job], outcome(result)
        print(f"[{number}/{len(todo)}] {module}:{mutant.row} {mutant.operator}: {found}", file=sys.stderr, flush=True)


def examine(module: str, *, sample: int | None, seed: int, fresh: bool) -> Report:
    """Run the remaining mutants of a module, and count them all."""
    tests = digest(tests_of(module))
    database, data = prepared(module, fresh=fresh)
    mutants = {job: Mutant(**fields) for job, fields in data["mutants"].items()}
    spans, entries = spans_by_name(module), reviewed(module)
    lines = (ROOT / module).read_text().splitlines()
    category: dict[str, str] = {}
    for job, m in mutants.items():
        # The `*` of keyword-only arguments is not a multiplication.
        if not m.compiles or m.annotation or same(m.before.replace("*,", "/,", 1), m.after):
            category[job] = "no mutant"
        else:
            category[job] = next((e["category"] for e in entries if matches(e, m, spans, lines)), "")
    judged = [m for job, m in mutants.items() if category[job] != "no mutant"]
    stale = [
        f"{REVIEWED.relative_to(ROOT)}: no mutant of {module} matches any more: {e.get('line') or e['within']}"
        for e in entries
        if not any(matches(e, m, spans, lines) for m in judged)
    ]
    # A larger sample with the same seed extends a smaller one.
    order = sorted(mutants, key=lambda j: (mutants[j].row, mutants[j].operator, mutants[j].after, j))
    random.Random(seed).shuffle(order)
    eligible = [j for j in order if category[j] != "no mutant"]
    chosen = eligible if sample is None else eligible[:sample]
    jobs = [j for j in chosen if not category[j]]
    with use_db(database) as db:
        run(db, module, jobs, data["tests"] != tests, mutants)
        results = {job: outcome(r) for job, r in db.results}
    # Written last: if the run ends before this line, the next run tests the survivors again.
    database.with_suffix(".json").write_text(json.dumps({**data, "tests": tests}))
    return Report(
        module=module,
        total=len(eligible),
        chosen=len(chosen),
        found=Counter(results[j] for j in jobs),
        aside=Counter(category[j] for j in chosen if category[j]),
        survivors=sorted((mutants[j] for j in jobs if results[j] == "survived"), key=lambda m: (m.row, m.after)),
        stale=stale,
    )


# --- the report ----------------------------------------------------------------------------------------------------


def shown(reports: Sequence[Report], seed: int) -> Iterator[str]:
    for report in reports:
        for m in report.survivors:
            yield f"SURVIVED {report.module}:{m.row} {m.operator}\n  - {m.before}\n  + {m.after}"
    yield ""
    yield "| module | mutants | killed | by timeout | survived | equivalent | speed only | needs a GPU | rate |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for r in reports:
        size = f"{r.chosen}" if r.chosen == r.total else f"{r.chosen} of {r.total}, sampled"
        killed, late, survived = r.found["killed"] + r.found["timeout"], r.found["timeout"], r.found["survived"]
        aside = " | ".join(str(r.aside[c]) for c in ("equivalent", "speed_only", "needs_gpu"))
        yield f"| {r.module} | {size} | {killed} | {late} | {survived} | {aside} | {r.rate:.1%} |"
    if any(r.chosen < r.total for r in reports):
        yield f"\nA rate of a sample is an estimate: the mutants were drawn at random, with seed {seed}."
    for r in reports:
        failed = sum(r.found.values()) - sum(r.found[k] for k in ("killed", "timeout", "survived"))
        if failed:
            yield f"{r.module}: {failed} mutants could not be run"
    yield from (line for r in reports for line in r.stale)


def main() -> int:
    parser = argparse.ArgumentParser(description="Puts small faults into modules, and asks whether their tests notice.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="e.g. optimized/geometry/rotor_update.py")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many mutants of each module, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    chosen = parser.parse_args()
    # Let SIGTERM end the run as an interrupt does, so that the copy of the tree is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wanted = [os.path.relpath(Path(m).resolve(), ROOT) for m in chosen.modules] or modules()
    for module in wanted:
        tests_of(module)
    with copy_of_the_tree():
        reports = [examine(m, sample=chosen.sample, seed=chosen.seed, fresh=chosen.fresh) for m in wanted]
    print("\n".join(shown(reports, chosen.seed)))
    return 1 if any(r.stale for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
