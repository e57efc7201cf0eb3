from contextlib import contextmanager

import pytest
import torch

from suite.backends import tf32_products

BACKENDS = torch.backends
OPERATORS = (BACKENDS.cuda.matmul, BACKENDS.mkldnn.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
OWNERS = {"all": BACKENDS, "products": OPERATORS[0], "products on CPUs": OPERATORS[1], "convolutions": OPERATORS[2]}


def precisions():
    return [operator.fp32_precision for operator in OPERATORS]


@contextmanager
def chosen(owner, precision):
    """Set a newer setting, and restore all of them, also those that inherit it."""
    before = precisions()
    own, owner.fp32_precision = owner.fp32_precision, precision
    try:
        yield
    finally:
        owner.fp32_precision = own
        for operator, value in zip(OPERATORS, before, strict=True):
            operator.fp32_precision = value


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("owner", OWNERS)
def test_tf32_is_set_and_restored_where_a_newer_setting_was_used(owner, precision, allowed):
    with chosen(OWNERS[owner], precision):
        before = precisions()
        with tf32_products(allowed=allowed):
            assert precisions() == ["tf32" if allowed else "ieee"] * 4
        assert precisions() == before


@pytest.mark.parametrize("allowed", [True, False])
def test_older_settings_can_be_read_while_tf32_is_set(allowed):
    before = torch.get_float32_matmul_precision(), BACKENDS.cudnn.allow_tf32, precisions()
    with tf32_products(allowed=allowed):
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert BACKENDS.cudnn.allow_tf32 is allowed
    assert before == (torch.get_float32_matmul_precision(), BACKENDS.cudnn.allow_tf32, precisions())
