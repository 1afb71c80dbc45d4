"""Huge finite numbers give finite outputs and estimates, as in dense attention; receipts are always JSON."""

import json
import math

import pytest
import torch

from residua import attention
from residua.method.reconstructions import RECONSTRUCTIONS
from tests.support.oracle import masked_attention, qkv, small

pytestmark = pytest.mark.usefixtures("every_backend")


# by the rules of a GPU huge numbers are not scaled: the host would have to wait for their size
@pytest.mark.parametrize("every_backend", [("torch", "cpu"), ("native", "cpu")], indirect=True, ids="-".join)
@pytest.mark.parametrize("reconstruction", sorted(RECONSTRUCTIONS))
@pytest.mark.parametrize("where", ["qk", "v", "qkv"])
@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 1e32), (torch.float32, 1e37), (torch.bfloat16, 3.3e38)], ids=str
)
def test_finite_in_is_finite_out(dtype, size, where, reconstruction):
    tensors = dict(zip("qkv", qkv(queries=120, dtype=torch.float64), strict=True))
    for name in where:
        tensors[name] *= size / tensors[name].abs().max()
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    assert masked_attention(**tensors)[0].isfinite().all()
    out, receipt = attention(**tensors, config=small(reconstruction=reconstruction), return_receipt=True)
    assert out.isfinite().all()
    assert receipt.error is None or math.isfinite(receipt.error)


def test_a_receipt_of_nan_is_valid_json():
    q, k, v = qkv()
    q[0, 0] = math.nan
    _, receipt = attention(q, k, v, small(), return_receipt=True)
    assert math.isnan(receipt.error)
    told = json.loads(receipt.to_json(), parse_constant=lambda word: pytest.fail(word))
    assert told["error"] is None
