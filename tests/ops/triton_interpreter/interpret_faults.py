"""The sanitizer finds what it is there for: faults seeded on purpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(X, Y, n, shift, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * step + tl.arange(0, BLOCK)
    x = tl.load(X + at + shift, mask=at < n, other=0.0)
    tl.store(Y + at, x, mask=at < n)


def run(sanitizer, shift=0, step=16, same=False, n=64):
    whole = torch.arange(256, dtype=torch.float32)
    x, y = whole[:64], whole[:64] if same else torch.zeros(64)
    copy_kernel[(4,)](x, y, n, shift, step, BLOCK=16)
    return set(sanitizer.findings)


def test_a_clean_kernel_has_no_findings(sanitizer):
    assert run(sanitizer) == set()
    assert sanitizer.addresses == 128


def test_reading_past_the_end(sanitizer):
    assert run(sanitizer, shift=1) == {"copy_kernel: reads out of bounds"}
    assert sanitizer.findings["copy_kernel: reads out of bounds"] == 1


def test_a_mask_that_is_too_wide(sanitizer):
    assert run(sanitizer, step=20, n=100) == {"copy_kernel: reads out of bounds", "copy_kernel: writes out of bounds"}


@triton.jit
def mark_kernel(Y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_max(Y + at, at, mask=at < n)


def test_an_atomic_past_the_end(sanitizer):
    whole = torch.zeros(64, dtype=torch.int32)
    mark_kernel[(2,)](whole[:8], 8, BLOCK=16)
    assert not sanitizer.findings
    assert whole[:8].tolist() == list(range(8))
    mark_kernel[(2,)](whole[:8], 9, BLOCK=16)
    assert dict(sanitizer.findings) == {"mark_kernel: changes out of bounds": 2}
    assert not whole[8:].any()  # it was not carried out


def test_two_programs_that_write_one_address(sanitizer):
    assert run(sanitizer, step=12) == {"copy_kernel: two programs write one address"}


def test_a_program_that_reads_what_another_writes(sanitizer):
    found = run(sanitizer, shift=8, same=True, n=56)
    assert found & {"copy_kernel: reads what another program writes", "copy_kernel: writes what another program reads"}
