"""A pytest plugin that makes mutants fail sooner: plain tests run before property tests, which do not shrink.

tools/mutate.py loads it with -p. The verdict is the same. Nobody reads the failures there, and a plain test fails at
once where a property test may need many examples. Every test still runs unless one before it failed.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest

SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute in which Hypothesis stores a test's settings. It is private; if it is missing, tests shrink as usual."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    properties = {item: tests for item in items if (tests := _property_tests(item))}
    # The sort is stable, so each kind keeps its order. Last are the other items of a pair, such as compiling its
    # kernels.
    items.sort(key=lambda item: 1 if item in properties else 0 if type(item) is pytest.Function else 2)
    for tests in properties.values():
        for test in tests:
            own = getattr(test, SETTINGS)
            phases = [p for p in own.phases if p not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
            setattr(test, SETTINGS, hypothesis.settings(own, phases=phases))


def _property_tests(item: pytest.Item) -> list[Any]:
    """Return the Hypothesis tests of an item; the integrity item of a pair has two, `obj` and `first`."""
    tests = [getattr(item, name, None) for name in ("obj", "first")]
    # The settings of a method are stored on its function.
    functions = [getattr(test, "__func__", test) for test in tests]
    return [f for f in functions if isinstance(getattr(f, SETTINGS, None), hypothesis.settings)]
