"""The registered reconstructions: what they promise, and that a new one is a class and a name."""

import subprocess
import sys

import pytest
import torch

from residua import Config, InputError, attention
from residua.config import RECONSTRUCTION_TRAITS
from residua.method.grouping.partition import PARTITIONERS
from residua.method.reconstructions import RECONSTRUCTIONS, Reconstruction
from tests.support.oracle import masked_attention, qkv, small, worst


def test_the_four_are_registered():
    assert set(RECONSTRUCTIONS) == {"none", "probe", "tail", "anchored"}
    for name, method in RECONSTRUCTIONS.items():
        assert method.name == name and method.about and isinstance(method, Reconstruction)
    assert {name for name, method in RECONSTRUCTIONS.items() if method.all_in} == {"tail", "anchored"}
    policies = {name: method.probe_policy for name, method in RECONSTRUCTIONS.items()}
    assert policies == {"none": None, "probe": "stratified", "tail": "scattered", "anchored": "scattered"}


def test_a_config_knows_what_is_registered():
    """Also before anything of the method is imported."""
    code = "from residua.config import PARTITIONS, RECONSTRUCTION_TRAITS as traits; print((sorted(PARTITIONS), traits))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == str((sorted(PARTITIONERS), RECONSTRUCTION_TRAITS))
    for name, method in RECONSTRUCTIONS.items():
        assert RECONSTRUCTION_TRAITS[name] == (method.all_in, method.probe_policy is not None)


def test_an_unknown_reconstruction_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"Config\.reconstruction='taill': wanted one of") as refused:
        Config(reconstruction="taill")
    assert all(repr(name) in str(refused.value) for name in RECONSTRUCTIONS)


@pytest.mark.parametrize("reconstruction", sorted(RECONSTRUCTIONS))
def test_density_one_changes_nothing(reconstruction):
    """No probes, no summary, no router: dense attention through the kernel."""
    q, k, v = qkv(2, 4, 2, 130, 140)
    out, receipt = attention(q, k, v, small(density=1, reconstruction=reconstruction), return_receipt=True)
    assert worst(out, masked_attention(q, k, v)[0]) < 1e-6
    assert torch.equal(out, attention(q, k, v, small(density=1, reconstruction="none")))
    assert receipt.density == receipt.cost == 1.0 and receipt.flops == receipt.dense_flops
    assert receipt.pairs.probe == 0 and receipt.error is None and receipt.notes == ()


def test_a_new_reconstruction_is_a_class():
    @RECONSTRUCTIONS.register
    class Halved(Reconstruction):
        name = "halved"
        about = "for this test"

        def finish(self, grouped, verdict, out):
            return out / 2, None

    try:
        q, k, v = qkv()
        halved = attention(q, k, v, small(reconstruction="halved", probes=0))
        assert torch.equal(halved, attention(q, k, v, small(reconstruction="none", probes=0)) / 2)
    finally:
        RECONSTRUCTIONS.remove("halved")
    with pytest.raises(InputError, match="halved"):
        Config(reconstruction="halved")
