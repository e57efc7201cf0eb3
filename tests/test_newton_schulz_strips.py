"""Tests of the Gluon kernel for Newton–Schulz iterations, run on a CPU by threads."""

import pytest
import torch
from gluon_threads import on_cpu
from scale import FULLY

from optimized import newton_schulz, newton_schulz_strips
from optimized.optimizers.muon import COEFFICIENTS, ITERATIONS, orthogonalized

PROGRAMS = 3


@pytest.fixture
def strips(monkeypatch):
    module = on_cpu(newton_schulz_strips)
    monkeypatch.setattr(module, "serves", lambda *_: True)
    monkeypatch.setattr(module, "programs", lambda device: PROGRAMS)
    monkeypatch.setattr(newton_schulz, "strips", module)
    return module


def panels_of(room, first, rows, columns):
    """Return a buffer of `room`, a matrix, as a view of its panels: [panels, rows, columns of a panel]."""
    return room[first : first + rows * columns // room.shape[1]].view(-1, rows, room.shape[1])


def put(room, first, matrix):
    columns = room.shape[1]
    panels_of(room, first, *matrix.shape).copy_(matrix.unflatten(1, (-1, columns)).transpose(0, 1))


def iterated(matrices, dtype):
    """Orthogonalize wide matrices by strips."""
    shapes = [tuple(m.shape) for m in matrices]
    sums = torch.stack([m.float().square().sum() for m in matrices])[:, None]
    products = newton_schulz.NewtonSchulz(shapes, sums, COEFFICIENTS, ITERATIONS, dtype, in_strips=True)
    assert products.in_strips
    products.room.fill_(torch.nan)  # no product may read memory that none has written
    for matrix, (rows, columns), place in zip(matrices, products.shapes, products.places, strict=True):
        padded = torch.zeros(rows, columns)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        put(products.room, place, padded)
    products.run()
    return [
        panels_of(products.room, place, *padded).transpose(0, 1).reshape(padded)[:rows, :columns]
        for place, padded, (rows, columns) in zip(products.results, products.shapes, shapes, strict=True)
    ]


SHAPES = {
    "square": [(256, 256), (130, 200), (128, 128)],
    "larger than shared memory": [(640, 640)],
    "wide": [(128, 1152), (200, 512)],
    "different": [(128, 128), (384, 384), (256, 640)],
}


@pytest.mark.parametrize("name", ["square", "wide", *(pytest.param(n, marks=FULLY) for n in [*SHAPES][1::2])])
def test_iteration_by_strips_is_as_accurate_as_by_matrices(strips, name):
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).bfloat16().float() for shape in SHAPES[name]]
    for matrix, found in zip(matrices, iterated(matrices, torch.bfloat16), strict=True):
        truth = orthogonalized(matrix[None])[0]
        plain = orthogonalized(matrix[None].bfloat16())[0].float()
        assert (found.float() - truth).norm() < 2 * (plain - truth).norm()
