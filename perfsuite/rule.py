"""The rule by which two sides are the same function: the error against a float64 truth.

Truth t is the reference in float64 on the inputs rounded to the working dtype and upcast. With e the reference's
own error in the working dtype, m how far one rounding of the inputs moves t, and eps the working dtype's, every element
o of an optimized output must hold

    |o − t|  ≤  hypot(K · max(e, RMS(e)), MOVED · max(m, RMS(m)))  +  C · eps · (|t| + RMS(t))

and the output as a whole, over its n elements,

    RMS(o − t)  ≤  hypot(k · RMS(e), j · RMS(m))  +  (C_NORM + (C − C_NORM) / √n) · eps · RMS(t)

where k = K_NORM + (K − K_NORM) / √n, and j = MOVED_NORM + (MOVED − MOVED_NORM) / √n.

The error e of an element is an RMS too, because a single run can be exact by luck: over the draw itself and REPLICAS
neighbours (more for an output of few elements), whose inputs lie within two units in the last place, and in which the
result of every operation moves by up to one, so that its rounding is drawn anew. In half precision both are half a
unit: sums are kept in float32 there, and their order matters less than the rounding of the output. TF32 cuts digits of
the inputs off, which is up to one unit. A rounding of a value between two operations may move the output as far as a
rounding of the inputs moves t, by m. It moves many elements together, so that it does not average out. A jump is no
such movement.

An RMS over n samples is at least √(m/n) of the RMS over m of them. An output that is far enough within the budget
without replicas, or with the fewest, therefore holds the rule whatever further replicas give (`sure`), and these are
not made (`hold`). Without replicas this settles 97 of 100 draws of the pairs here.

Errors that lean to one side are looked for over all draws (perfsuite.bias).

The constants are global; no pair has tolerances of its own.

K = 16      The largest of 10⁹ Gaussian errors lies near 6 RMS. A reference that sums in a tree is up to several times
            more accurate than an honest kernel that sums in sequence: on an H200, cuBLAS in float32 over 2048 terms
            reached 9.2 RMS(e) of such a reference.
K_NORM = 6  Over many elements the tail averages out; what remains is the other order of summation. No lower precision
            passes: TF32 is over 1000 times the error of float32.
            Here n counts different values only: equal rows have equal errors, which do not average out. It is 1 for
            an output that is nothing but rounding (see CAP): the gradient of the only key of an attention is the
            rounding of one number times a row.
C = 4       An output may differ in its last places also where the reference happens to be exact.
C_NORM = 1  As K_NORM; rounding once to the working dtype costs 0.3 eps.
MOVED = 16  A layer norm of rows of nearly equal values rounds its mean, its differences and its variance: of a few
            thousand rows over many draws the largest error was 10.4 m.
MOVED_NORM = 8
            Of 60 right kernels of 31 functions in float32 none was beyond the other terms by more than 0.16 of m. On an
            H200 the gradients of flash-attn in float16, which keeps its output in float16 for the backward pass, needed
            4, and attention in TF32 2.
CAP         Where K · RMS(e), without the movement of t, exceeds √(K · eps) · RMS(t) the draw is ill-conditioned: it is
            still checked, but does not count as proof. Where the reference alone is not finite it is discarded. Both
            are counted, and too few remaining draws are a failure, never a pass.

Where all is tiny the budget is K times the smallest normal number, since GPUs flush what is below it to zero, in each
term of a sum; in float16, which they do not flush, it is C of the smallest steps. -0.0 is equal to 0.0 unless the pair
says `signed_zeros=True`: right kernels differ in it, as x·(x > 0) and max(x, 0) do. NaN and ±inf must stand in the same
places, of gradients only what is not finite; the gradient of an element that is NaN is not compared, since a function
has no derivative there. Integers and bools must be equal; dtype, shape, device and the class of strides must agree.
Elements that the pair's `excuse` names, within rounding of a declared threshold, are left out and counted; more than
EXCUSED_SHARE of all is a failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from perfsuite.execution import Leaf
from perfsuite.tensor_values import dtype_of
from perfsuite.workload import TF32

K = 16.0
K_NORM = 6.0
C = 4.0
C_NORM = 1.0
MOVED = 16.0
MOVED_NORM = 8.0
REPLICAS = 3
MAX_REPLICAS = 7
FEW = 0
"""The value of `replicas` with which `establish` makes the fewest: one, or two for a small output."""
NONE = -1
"""The value with which `establish` makes none: the only error known is the reference's own on the draw."""
REPLICAS_UP_TO = 1 << 16
"""Most elements of inputs with which more than the fewest replicas are made: with more, one draw shows the reference's
error well."""
CAREFUL, NEAR = 15, 4.0
"""Number of replicas that are made before a side fails whose error is within NEAR times its budget."""
SAMPLES = 64
"""Samples of the reference's error in the smallest output up to which replicas are added, at most MAX_REPLICAS."""
TRUTH_EPS = 2.0**-42
"""The eps of the rule for a cheaper truth: 1024 times float64's, and 2¹⁹ times finer than float32's."""
TF32_EPS = 2.0**-10


@dataclass(frozen=True, slots=True)
class Nearness:
    """Distance of a neighbour from its draw, in units in the last place of the working precision."""

    inputs: float
    """Most that an element of an input moves."""
    results: float
    """Most that the result of an operation of the reference moves."""
    rounding: float
    """Most that one rounding moves an element of an input."""


FULL = Nearness(inputs=2.0, results=1.0, rounding=0.5)
HALF = Nearness(inputs=0.5, results=0.5, rounding=0.5)
NEARNESS = {"bfloat16": HALF, "float16": HALF, TF32: Nearness(inputs=1.0, results=0.5, rounding=1.0)}


def sure(made: int, needed: int) -> float:
    """Return the share of the budget by `made` replicas within which an output is surely within that by `needed`.

    The draw itself is one more sample of the reference's error, but none of the movement of the truth.
    """
    return math.sqrt(made / needed if made else 1 / (1 + needed))


def eps_of(precision: str) -> float:
    return TF32_EPS if precision == TF32 else torch.finfo(dtype_of(precision)).eps


def underflow(leaf: Leaf) -> float:
    """Return the most that a device may lose which flushes values below the smallest normal number to zero."""
    dtype = dtype_of_leaf(leaf)
    if not dtype.is_floating_point:
        return K * float(torch.finfo(torch.float32).tiny)
    info = torch.finfo(dtype)
    return C * info.tiny * info.eps if dtype == torch.float16 else K * info.tiny


def dtype_of_leaf(leaf: Leaf) -> torch.dtype:
    return leaf.dtype if isinstance(leaf, torch.Tensor) else torch.float64


@dataclass(frozen=True, slots=True)
class Norms:
    """RMS values of one output: its truth, the reference's error, and the movement of the truth by one rounding."""

    eps: float
    truth: float
    error: float
    moved: float
    least: float

    def of_elements(self, error: torch.Tensor, moved: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        """Return the budget of each element, from the reference's error, its truth's movement and its size."""
        budget = (K * error.clamp_min(self.error)).hypot(MOVED * moved.clamp_min(self.moved))
        return budget + ((size + self.truth) * (C * self.eps)).clamp_min(self.least)

    def budget(self, count: int) -> float:
        """Return the budget of the RMS error for this many independent elements."""
        tail = 1 / math.sqrt(count)
        moved = MOVED_NORM + (MOVED - MOVED_NORM) * tail
        floor = max((C_NORM + (C - C_NORM) * tail) * self.eps * self.truth, self.least)
        return math.hypot((K_NORM + (K - K_NORM) * tail) * self.error, moved * self.moved) + floor
