"""The rule by which two sides count as the same function: a bound on the error against a float64 truth.

The truth t is the reference in float64 on the inputs, rounded to the working dtype and upcast. Let e be the reference's
own error in the working dtype, m the change of t by one rounding of the inputs, and eps that of the working dtype. Then
every element o of an optimized output must satisfy

    |o − t|  ≤  hypot(K · max(e, RMS(e)), MOVED · max(m, RMS(m)))  +  C · eps · (|t| + RMS(t))

and the output as a whole, with n elements,

    RMS(o − t)  ≤  hypot(k · RMS(e), j · RMS(m))  +  (C_NORM + (C − C_NORM) / √n) · eps · RMS(t)

where k = K_NORM + (K − K_NORM) / √n, and j = MOVED_NORM + (MOVED − MOVED_NORM) / √n.

The error e of an element is an RMS too, because a single run can be exact by luck. It is taken over the draw itself and
REPLICAS neighbours (more for an output of few elements). The inputs of a neighbour are within two units in the last
place, and the result of every operation changes by up to one unit, which is a new sample of its rounding. In half
precision, both are half a unit: sums are accumulated in float32, so their order matters less than the rounding of the
output. TF32 truncates the inputs, by up to one unit. Rounding a value between two operations may change the output by
as much as rounding the inputs changes t, by m. It changes many elements together, so it does not average out. A jump
does not count as such a change.

An RMS over n samples is at least √(m/n) of the RMS over m of them. So an output that is far enough within the budget
without replicas, or with the fewest, satisfies the rule whatever further replicas would show (`sure`), and these are
not computed (`hold`). Without replicas, this decides 97 of 100 draws of this repository's pairs.

Biased errors are tested over all draws (perfsuite.correctness.bias).

The constants are global; no pair has its own tolerances.

K = 16      The largest of 10⁹ Gaussian errors is near 6 RMS. A reference with pairwise summation is up to several times
            more accurate than a correct kernel that sums sequentially: on an H200, cuBLAS in float32 over 2048 terms
            reached 9.2 RMS(e) of such a reference.
K_NORM = 6  Over many elements the tail averages out, but another order of summation does not. No lower precision
            passes: TF32 has over 1000 times the error of float32.
            Here n counts only different values, because equal rows have equal errors, which do not average out. n is 1
            for an output that is only rounding error (see CAP): the gradient of the only key of an attention is the
            rounding error of one number times a row.
C = 4       An output may differ in its last places even if the reference happens to be exact.
C_NORM = 1  As K_NORM. One rounding to the working dtype costs 0.3 eps.
MOVED = 16  A layer norm of rows of nearly equal values rounds its mean, its differences and its variance. For a few
            thousand rows over many draws, the largest error was 10.4 m.
MOVED_NORM = 8
            Of 60 correct kernels of 31 functions in float32, none exceeded the other terms by more than 0.16 m. On an
            H200, the gradients of flash-attn in float16, which stores its output in float16 for the backward pass,
            needed 4, and attention in TF32 2.
CAP         If K · RMS(e), without the change of t, exceeds √(K · eps) · RMS(t), the draw is ill-conditioned. It is
            still checked, but does not count as proof. If only the reference is not finite, the draw is discarded. Both
            are counted, and too few remaining draws are a failure, never a pass.

If all values are tiny, the budget is K times the smallest normal number, since GPUs flush smaller values to zero, in
each term of a sum. In float16, which they do not flush, it is C times the smallest step. -0.0 is equal to 0.0 unless
the pair declares `signed_zeros=True`: correct kernels differ in it, such as x·(x > 0) and max(x, 0). NaN and ±inf must
be in the same places; in gradients, only the places of non-finite elements must agree. The gradient of an element that
is NaN is not compared, since a function has no derivative there. Integers and bools must be equal; dtype, shape, device
and the class of strides must agree. Elements that the pair's `excuse` names, within rounding of a declared threshold,
are left out and counted; more than EXCUSED_SHARE of all elements is a failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from perfsuite.correctness.execution import Leaf
from perfsuite.declare.workload import TF32
from perfsuite.draws.tensor_values import dtype_of

K = 16.0
K_NORM = 6.0
C = 4.0
C_NORM = 1.0
MOVED = 16.0
MOVED_NORM = 8.0
REPLICAS = 3
MAX_REPLICAS = 7
FEW = 0
"""Value of `replicas` with which `establish` makes the fewest: one, or two for a small output."""
NONE = -1
"""Value of `replicas` with which `establish` makes none. Only the reference's own error on the draw is then known."""
REPLICAS_UP_TO = 1 << 16
"""Most elements of all inputs for which more than the fewest replicas are made. With more elements, one draw shows the
reference's error well."""
CAREFUL, NEAR = 15, 4.0
"""Number of replicas that are made before a side fails, if its error is within NEAR times its budget."""
SAMPLES = 64
"""Number of samples of the reference's error in the smallest output up to which replicas are added, at most
MAX_REPLICAS."""
TRUTH_EPS = 2.0**-42
"""eps of the rule for a cheaper truth: 1024 times that of float64, and 2¹⁹ times finer than that of float32."""
TF32_EPS = 2.0**-10


@dataclass(frozen=True, slots=True)
class Nearness:
    """Distance of a neighbour from its draw, in units in the last place of the working precision."""

    inputs: float
    """Largest change of an element of an input."""
    results: float
    """Largest change of the result of an operation of the reference."""
    rounding: float
    """Largest change of an element of an input by one rounding."""


FULL = Nearness(inputs=2.0, results=1.0, rounding=0.5)
HALF = Nearness(inputs=0.5, results=0.5, rounding=0.5)
NEARNESS = {"bfloat16": HALF, "float16": HALF, TF32: Nearness(inputs=1.0, results=0.5, rounding=1.0)}


def sure(made: int, needed: int) -> float:
    """Return the share of the budget by `made` replicas within which an output is surely within the budget by `needed`.

    The draw itself is one more sample of the reference's error, but not of the change of the truth.
    """
    return math.sqrt(made / needed if made else 1 / (1 + needed))


def eps_of(precision: str) -> float:
    return TF32_EPS if precision == TF32 else torch.finfo(dtype_of(precision)).eps


def underflow(leaf: Leaf) -> float:
    """Return the largest error of a device that flushes values below the smallest normal number to zero."""
    dtype = dtype_of_leaf(leaf)
    if not dtype.is_floating_point:
        return K * float(torch.finfo(torch.float32).tiny)
    info = torch.finfo(dtype)
    return C * info.tiny * info.eps if dtype == torch.float16 else K * info.tiny


def dtype_of_leaf(leaf: Leaf) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.float64


@dataclass(frozen=True, slots=True)
class Norms:
    """RMS values of one output: its truth, the reference's error, and the change of the truth by one rounding."""

    eps: float
    truth: float
    error: float
    moved: float
    least: float

    def of_elements(self, error: torch.Tensor, moved: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Return the budget of each element, from the reference's error, the change of the truth, and its size."""
        budget = (K * error.clamp_min(self.error)).hypot(MOVED * moved.clamp_min(self.moved))
        return budget + ((size + self.truth) * (C * self.eps)).clamp_min(self.least)

    def budget(self, count: int) -> float:
        """Return the budget of the RMS error for this number of independent elements."""
        tail = 1 / math.sqrt(count)
        moved = MOVED_NORM + (MOVED - MOVED_NORM) * tail
        floor = max((C_NORM + (C - C_NORM) * tail) * self.eps * self.truth, self.least)
        return math.hypot((K_NORM + (K - K_NORM) * tail) * self.error, moved * self.moved) + floor
