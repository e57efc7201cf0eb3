"""Pytest items of a pair: equivalence, gradients, integrity, contexts, effects, kernels, truth and speed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from perfsuite.correctness import compilations, contexts, effects, equivalence, execution, integrity, outside, proofs
from perfsuite.correctness.ranks import group
from perfsuite.correctness.ranks import proof as ranks_proof
from perfsuite.correctness.shared_truths import cached_results
from perfsuite.correctness.tally import Tally
from perfsuite.declare.pair import Pair
from perfsuite.draws.cases import case_line
from perfsuite.errors import NotEquivalent, PairError, PerfsuiteError
from perfsuite.records import Case
from perfsuite.session import aot_compile
from perfsuite.session.proof_item import Hang, ProofItem, Prove, device
from perfsuite.session.timed_item import SpeedItem
from perfsuite.system import triton_interpreter

IMPORTED = pytest.StashKey[dict[str, str]]()
"""Stash key of a module with pairs: the global state that its import left changed, name → words."""


class PairCollector(pytest.Collector):
    """Collector of a module-level Pair: collects the items that prove and time it, or only those that time it."""

    def __init__(self, *, pair: Pair, timed_only: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        triton_interpreter.quicken()
        self.pair, self.timed_only = pair, timed_only
        self._beside: dict[pytest.Item, Callable[[], None]] = {}
        bound = [n for n, v in vars(self.parent.obj).items() if v is pair]  # type: ignore[union-attr]  # has a module
        if len(bound) > 1:
            raise self.CollectError(f"one pair is bound to two names, {bound[0]!r} and {bound[1]!r}; keep one")
        pair.name = self.name

    @property
    def home(self) -> Path:
        return self.path.parent

    @property
    def _module(self) -> ModuleType:
        module = self.getparent(pytest.Module)
        assert module is not None
        return module.obj  # type: ignore[no-any-return]  # pytest does not type Module.obj

    def collect(self) -> Iterator[pytest.Item]:
        try:
            self.pair.validate()
        except PairError as error:
            raise self.CollectError(str(error)) from None
        if not self.timed_only:
            yield from self._correctness()
        for workload in self.pair.workloads:
            item = SpeedItem.from_parent(
                self, name=f"speed[{workload.name}]", pair=self.pair, workload=workload, home=self.home
            )
            item.add_marker(pytest.mark.perf)
            for mark in workload.marks:
                item.add_marker(mark)
            if workload.device == "cuda":
                item.add_marker("gpu")
            yield item

    def _correctness(self) -> Iterator[pytest.Item]:
        for proof in proofs.of(self.pair):
            yield self._item(proof)
        if aot_compile.kernels_of(self.pair):
            kernels = KernelsItem.from_parent(self, name=aot_compile.KERNELS, pair=self.pair)
            self._beside[kernels] = kernels.begin
            yield kernels

    def begin_beside(self, items: list[pytest.Item], first: pytest.Item) -> None:
        """Start the work that other processes can do during the pair's proofs: compile its kernels, and import its
        module outside of a test.

        `first` is the item that runs next. This is done once, and only for an item of `items` before which the run does
        nothing except proofs of this pair.
        """
        beside, self._beside = self._beside, {}
        if not beside or not aot_compile.beside_proofs(self.config):
            return
        for item, begin in beside.items():
            if item not in items:
                continue
            before = items[items.index(first) : items.index(item)]
            if all(isinstance(i, ProofItem) and i.parent is self for i in before):
                begin()

    def _item(self, proof: proofs.Proof) -> pytest.Item:
        kinds: dict[str, Prove] = {
            proofs.INTEGRITY: self._integrity,
            proofs.CONTEXTS: self._contexts,
            proofs.EFFECTS: self._effects,
            proofs.OUTSIDE: self._outside,
            proofs.RANKS: functools.partial(self._ranks, proof.ranks),
            proofs.TRUTH: self._truth,
        }
        prove = kinds.get(proof.kind) or functools.partial(self._equivalence, proof)
        item: ProofItem = ProofItem.from_parent(
            self,
            name=proof.name,
            pair=self.pair if proof.ranks == 1 else self.pair.at(proof.ranks),
            dtype=proof.dtype,
            prove=prove,
            side=proof.side,
        )
        item.add_marker(pytest.mark.correctness)
        unavailable = execution.unavailable(proof.side, device()) if proof.side is not None else None
        if proof.kind == proofs.RANKS:
            unavailable = group.lacking(proof.ranks, device())
        if unavailable:
            item.add_marker(pytest.mark.skip(reason=unavailable))
        elif proof.kind == proofs.OUTSIDE:
            self._beside[item] = self._prepare_outside
        return item

    def _equivalence(self, proof: proofs.Proof, case: Case, tally: Tally) -> None:
        equivalence.check_case(
            self.pair,
            case,
            device(),
            side=proof.side,
            side_name=proof.side_name,
            gradients=proof.kind == proofs.GRADIENTS,
            tally=tally,
            home=self.home,
            results=cached_results(self.pair),
        )

    def _number(self, line: str, tally: Tally) -> int | None:
        """Return the number of the draw with this line, which selects some checks by turns. None if the draw makes all
        checks: if it is the only one, to reproduce a failure, or if there are too few draws for turns."""
        if self.config.option.perfsuite_case or (self.pair.max_examples or proofs.TURNS) < proofs.TURNS:
            return None
        return tally.number(line)

    def _integrity(self, case: Case, tally: Tally) -> None:
        tally.draws += 1
        line = case_line(case)
        number = self._number(line, tally)
        if line in tally.large:  # only few draws have several blocks
            number = None
        integrity.check(self.pair, case, device(), home=self.home, number=number)

    def _contexts(self, case: Case, tally: Tally) -> None:
        thorough = device() == "cuda" or self.config.option.perfsuite_profile == "thorough"
        line = case_line(case)
        tally.first = tally.first or line
        thorough &= line == tally.first  # the thorough checks do not depend on the draw
        number = self._number(line, tally)
        self._once_if_compiled(functools.partial(contexts.check, thorough=thorough, number=number), case, tally)

    def _effects(self, case: Case, tally: Tally) -> None:
        imported = self.parent.stash.get(IMPORTED, {}) if self.parent is not None else {}
        number = self._number(case_line(case), tally)
        self._once_if_compiled(functools.partial(effects.check, imported=imported, number=number), case, tally)

    def _prepare_outside(self) -> None:
        outside.prepare(self.pair, device(), module=self._module)

    def _outside(self, case: Case, tally: Tally) -> None:
        check = functools.partial(outside.check, module=self._module)
        try:
            self._once_if_compiled(check, case, tally)
        except outside.Hangs as error:
            self._hang(error)

    def _ranks(self, ranks: int, case: Case, tally: Tally) -> None:
        tally.draws += 1
        try:
            ranks_proof.check(self.pair.at(ranks), case, device(), module=self._module, home=self.home, tally=tally)
        except ranks_proof.RanksApart as error:
            self._hang(error)

    def _hang(self, error: NotEquivalent) -> NoReturn:
        """End the proof at once, because a smaller draw would hang for as long."""
        raise Hang(str(error).removeprefix(f"{self.pair.name}: ")) from None

    def _once_if_compiled(self, check: Callable[..., None], case: Case, tally: Tally) -> None:
        """Run the check on only one draw if the side compiles. It would compile again for each draw, which takes
        seconds, and one draw shows as much as several."""
        if tally.compiles:
            return
        tally.draws += 1
        before = compilations.graphs()
        check(self.pair, case, device(), home=self.home)
        tally.compiles = compilations.graphs() > before

    def _truth(self, case: Case, tally: Tally) -> None:
        tally.draws += 1
        equivalence.check_truth(self.pair, case, device())


class KernelsItem(pytest.Function):
    """Item that compiles every Triton kernel that the pair's sides launch at its workloads' sizes for sm_90, without a
    GPU."""

    def __init__(self, *, name: str, parent: PairCollector, pair: Pair, **kwargs: Any) -> None:
        self.pair = pair
        self._compiling: aot_compile.Compiling | None = None
        super().__init__(name=name, parent=parent, callobj=self._compile, **kwargs)
        self.add_marker(pytest.mark.correctness)

    def begin(self) -> None:
        """Start compiling in another process."""
        self._compiling = aot_compile.Compiling(self)

    def _compile(self) -> None:
        __tracebackhide__ = True
        out = os.environ.get(aot_compile.AHEAD)
        if out:
            aot_compile.compile_pair(self.pair, Path(out), self.config.rootpath, self._others())
        else:
            compiling, self._compiling = self._compiling or aot_compile.Compiling(self), None
            kernels = compiling.kernels(self.pair.time_limit)
            self.user_properties.append(("kernels", json.dumps(kernels)))

    def _others(self) -> list[Pair]:
        """Return the other pairs of the file. One may launch a kernel that this pair can reach but does not launch."""
        return [found for found in vars(self.module).values() if isinstance(found, Pair) and found is not self.pair]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, PerfsuiteError):
            return f"{self.pair.name}: {excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.nodeid.partition("::")[2].replace("::", ".")
