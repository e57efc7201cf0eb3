"""tools/bisect_trial.py: the commits among which it searches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scratch import ROOT

sys.path.insert(0, str(ROOT / "tools"))
try:
    import bisect_trial
finally:
    sys.path.remove(str(ROOT / "tools"))

MODULE = "optimized/diversity/pairwise_cosine.py"


def git(root: Path, *arguments: str) -> str:
    command = ["git", *bisect_trial.AUTHOR, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def test_only_the_chosen_commit_and_later_ones_have_the_fault(tmp_path: Path) -> None:
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).write_text((ROOT / MODULE).read_text())
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=first")
    bisect_trial.commit_all(tmp_path, "launch", commits=4, at=3)
    fault = bisect_trial.PLANTS["launch"].edits[0][1]
    texts = [git(tmp_path, "show", f"HEAD~{back}:{MODULE}") for back in (4, 3, 2, 1, 0)]
    assert [fault in text for text in texts] == [False, False, False, True, True]
    assert len(set(texts)) == len(texts)
    assert git(tmp_path, "log", "-1", "--format=%s", "HEAD~1").strip() == bisect_trial.SUBJECT.format(3)


def test_a_fault_that_no_longer_fits_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODULE).parent.mkdir(parents=True)
    (tmp_path / MODULE).write_text("")
    with pytest.raises(ValueError, match=r"is there 0 times; adapt plants\.py"):
        bisect_trial.commit_all(tmp_path, "launch", commits=1, at=1)
