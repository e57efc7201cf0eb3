"""Words for regimes of input values, in the likely cause of a failure."""

from __future__ import annotations

from collections.abc import Iterable

from perfsuite.draws.tensor_values import HALVES, LARGE, OTHERS

WORDS = {
    "sorted": "sorted values",
    "repeated": "rows of equal values",
    "zeros": "zeros",
    HALVES: "multiples of 0.5, many of them equal",
    "offset": "large values with small differences",
    "mixed": "values of very different magnitudes",
    "tiny": "tiny values",
    "huge": "huge values",
    LARGE: "values of magnitude 512",
    "denormal": "subnormal values",
    "nonfinite": "NaN and infinities",
    "edges": "values at the ends of their bounds",
    OTHERS: "the values in also=(…) alone",
}
"""Regime → the values that it draws."""
REMEDIES = {
    LARGE: "in float16 their squares overflow: compute these in float32",
    "huge": "if it is never called with values near the ends of the range, bound them: values=floats(-10, 10)",
    "mixed": "if its values never differ so much, bound them: values=floats(-10, 10)",
    "nonfinite": "if it is never called with NaN or infinity, declare it: values=floats(nonfinite=False)",
    "offset": "a variance from two sums loses their digits; if it is never called with them, declare it: "
    "values=floats(offset=False)",
}
"""Regime → what to do if a side is wrong only for it."""
OVERFLOWS = "an intermediate result overflows there, as exp(x) does without subtracting the largest x"
DIVIDES_BY_ZERO = "it divides by 0 there, as the gradient of sqrt(x) does at 0"
SMALL = {"zeros", "tiny", "denormal"}
"""Regimes whose values do not overflow, but whose squares and products may underflow to 0."""


def only_for(regimes: Iterable[str], *, infinite: bool) -> str:
    """Return the clause for a side that is wrong only for values of these regimes.

    infinite  whether its result is infinite or NaN where the truth is finite
    """
    special = sorted(set(regimes) - {"normal"})
    words = " and ".join(WORDS.get(regime, regime) for regime in special)
    causes = [DIVIDES_BY_ZERO if SMALL.issuperset(special) else OVERFLOWS] if infinite else []
    causes += [REMEDIES[regime] for regime in special if len(special) == 1 and regime in REMEDIES]
    return "; ".join([f"it is right for ordinary values, and wrong for {words}", *causes])
