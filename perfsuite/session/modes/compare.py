"""`perfsuite compare REV`: time the optimized sides of two revisions against each other; no baseline is needed."""

from __future__ import annotations

from perfsuite.errors import BaselineError
from perfsuite.records import Status
from perfsuite.revisions import revision
from perfsuite.session.modes.base import failed
from perfsuite.session.modes.paired import Paired
from perfsuite.session.modes.whole import Whole
from perfsuite.session.tasks import Failure


class Compare(Whole, Paired):
    """Comparison of the work tree with another revision."""

    mode = "compare"

    def check(self) -> None:
        revision.resolve(self.arguments["revision"], self.root)

    def whole(self) -> None:
        full = revision.resolve(self.arguments["revision"], self.root)
        ids = self.measurable()
        if not ids:
            self.refuse("nothing to compare: no timed item of a pair for this machine was selected")
            return
        try:
            self.baselines.load()
        except BaselineError as error:  # of another schema, for instance, in an old commit that `bisect` checks out
            self.notes.append(f"compared without the noise that a baseline records: {error}")
        with revision.extracted([full], self.root, self.scratch / "revisions") as (trees, refused):
            if refused:
                raise refused[full]
            self.trees = dict.fromkeys(ids, trees[full])
            self.prove(ids)
            self.verdicts = {i: failed(i, self.failures[i]) for i in ids if i in self.failures}
            self.verdicts |= self.decide([i for i in ids if i not in self.failures])

    def without_revision(self, id: str, reason: str) -> None:
        self.failures[id] = Failure(status=Status.UNMEASURED, message=reason)  # there is nothing to compare with

    def _sample(self, ids: object) -> set[str]:
        return set(self.items)  # without a baseline, only a second process shows how noisy a workload is

    def reference(self, id: str, *, first: bool) -> int | None:
        return 0
