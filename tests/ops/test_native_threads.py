"""The settings of torch's threads that a native call changes for its own thread, and for no other."""

import threading

import pytest
import torch

import residua
from residua.ops.native import library
from residua.ops.native.library import threads, torch_on_one_thread


@pytest.fixture
def several():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.skipif(library._switches() is None, reason="torch is not built on OpenMP and MKL here")
def test_only_the_calling_thread_is_held_to_one(several):
    seen = []
    with torch_on_one_thread():
        assert (torch.get_num_threads(), threads()) == (1, several)
        other = threading.Thread(target=lambda: seen.append((torch.get_num_threads(), threads())))
        other.start()
        other.join()
        with torch_on_one_thread():  # a call inside a call changes nothing
            assert threads() == several
        assert torch.get_num_threads() == 1
    assert seen == [(several, several)]
    assert (torch.get_num_threads(), threads()) == (several, several)


def test_an_error_gives_the_threads_back(several):
    with pytest.raises(RuntimeError, match="inside"), torch_on_one_thread():
        raise RuntimeError("inside")
    assert (torch.get_num_threads(), threads()) == (several, several)


def test_without_the_switches_nothing_changes(several, monkeypatch):
    monkeypatch.setattr(library, "_switches", lambda: None)
    with torch_on_one_thread():
        assert (torch.get_num_threads(), threads()) == (several, several)


def test_a_call_leaves_the_setting_as_it_was(several):
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    residua.attention(q, k, v, residua.Config(density=0.4, query_groups=4, kv_groups=8))
    assert torch.get_num_threads() == several
