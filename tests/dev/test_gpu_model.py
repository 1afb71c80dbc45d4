"""The static cost model: what it counts, and that its parts fit each other."""

import json

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dev.gate.cubin import spilled
from dev.gpu_model import model
from dev.gpu_model.__main__ import make_task
from dev.gpu_model.flash import compile_flash
from dev.gpu_model.route import count_tiles, pack, real_route
from dev.gpu_model.sass import Code, Loop, _natural_loops, _parse
from dev.gpu_model.work import Work
from residua.errors import InputError
from residua.tools.plan.speeds import GPUS, find_gpu

H100 = GPUS["h100"]


def test_packing_fills_tiles_over_runs():
    assert pack([64], 64) == (1, 0)
    assert pack([40, 24], 64) == (1, 0)
    assert pack([40, 88], 64) == (2, 0)
    assert pack([10, 10, 10], 64) == (0, 1)  # a tile takes from three runs at most
    assert pack([10, 10, 10, 10], 64) == (0, 2)
    assert pack([10, 10, 44], 64) == (0, 1)  # three runs are a cut tile, even if they fill it
    assert pack([], 64) == (0, 0)


@pytest.mark.parametrize("concentration", ["broad", "medium", "sparse"])
@pytest.mark.parametrize("density", [0.05, 0.1, 0.15, 0.22])
def test_utilisation_of_a_short_call(density, concentration):
    """Below .15 K/V groups are finer, and runs of them so short that a tile takes three."""
    route = real_route(8192, 128, density, concentration)
    tiles = count_tiles(route, 128, 64, low=True)
    assert tiles.utilisation >= 0.70
    assert tiles.utilisation > count_tiles(route, 128, 64, low=False).utilisation
    assert tiles.pairs <= tiles.issued_pairs


def test_loops_are_told_from_waits_that_branch_back():
    """A wait that the compiler moved to the end branches back into the middle of nothing."""
    code = [
        ("MOV", ""),
        ("FADD", ""),
        ("BRA.IF", "`(.L_x_3)"),
        ("FMUL", ""),
        ("BRA.IF", "`(.L_x_1)"),
        ("EXIT", ""),
        ("NOP", ""),
        ("BRA", "`(.L_x_2)"),
    ]
    labels = {".L_x_1": 1, ".L_x_2": 3, ".L_x_3": 6}
    ((header, body),) = _natural_loops(code, labels)
    assert header == 1
    assert body == {1, 2, 3, 4, 6, 7}


def test_what_bounds_a_kernel():
    loop = Loop(1, 100, 50, 0, 8, True)
    code = Code("k", 128, 1024, 8, 120, (loop,))
    programs = 132 * 100
    assert model.kernel_ms(Work(1e9), code, 1, H100)[1] == "memory"
    assert model.kernel_ms(Work(10.0), code, 1, H100)[1] == "launch"
    assert model.kernel_ms(Work(10.0, (1e6,), 1e15), code, programs, H100)[1] == "matrix"
    assert model.kernel_ms(Work(10.0, (1e9,), 1.0), code, programs, H100)[1] == "issue"
    ms, bound = model.kernel_ms(Work(10.0, serial_cycles=1.6e9), code, 132, H100)
    assert bound == "latency"
    assert ms == pytest.approx(1000)
    assert model.occupancy(code, H100) == 2


@pytest.mark.parametrize("gpu", [H100, GPUS["4090"]], ids=["sm_90", "sm_89"])
def test_instructions_stay_near_a_plain_dense_kernel(gpu):
    """The attention kernel's inner loop: at most 1.15 times that of a FlashAttention-2 style one, also in a
    low tile, where four warps load the keys that eight load in a tall one."""
    from functools import partial

    from dev.gate import cases as gate_cases
    from dev.gate import compile as gate
    from residua.ops.triton import TritonBackend

    launch = partial(gate_cases._attend, 128, gate_cases.BF16, ", drift")
    with gate.compile_only(gpu.arch) as seen:
        launch(TritonBackend())
    codes = [model.read_code(k) for k in seen if k.metadata.name == "attend_kernel"]
    flash = compile_flash(gpu.arch).products[0].instructions
    assert [len(code.products) for code in codes] == [3, 3]  # full tiles, cut tiles, summary
    assert max(code.products[0].instructions for code in codes) <= 1.15 * flash


def test_branches_in_all_their_forms():
    code, labels = _parse(
        """
.L_x_1:
        /*0000*/                   FADD R1, R2, R3 ;
        /*0010*/                   BRA.U !UP0, `(.L_x_1) ;
        /*0020*/              @P0  BRA `(.L_x_1) ;
        /*0028*/              @P1  CALL.REL.NOINC `(.L_x_2) ;
        /*0030*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0040*/                   EXIT ;
"""
    )
    assert [name for name, _ in code] == ["FADD", "BRA.U.IF", "BRA.IF", "CALL.REL.NOINC.IF", "BRA", "EXIT"]
    ((header, body),) = _natural_loops(code, labels)
    assert (header, body) == (0, {0, 1, 2})


def test_spills_are_read_from_the_machine_code():
    line = "        /*0170*/                   {} [R1+0x10], R86 ;\n"
    code = "".join(map(line.format, ("STL", "STL.64", "LDL.LU", "LDL.LU.64", "LDL.128", "STG.E", "LDS")))
    assert spilled(code) == 4 + 8 + 4 + 8 + 16


def test_tasks_and_gpus_by_name():
    task = make_task(None, None, None, 0.22, "wan2.2")
    assert (task.tokens, task.heads, task.head_dim) == (75600, 40, 128)
    assert make_task(8192, 24, None, 0.1, None).label == "a call"
    assert find_gpu("RTX 4090") is GPUS["4090"]
    assert find_gpu("nvidia_h100") is H100
    with pytest.raises(InputError, match="wanted one of h100"):
        find_gpu("voodoo2")
    with pytest.raises(InputError, match="density"):
        make_task(None, None, None, 0.0, None)


@pytest.mark.slow
def test_the_whole_estimate():
    found = model.estimate(model.Task(8192, 4, 128, 0.22), H100, workers=1)
    report = json.loads(json.dumps(found.to_dict()))
    first = ["estimated_ms", "launches", "gigabytes", "peak_gib", "mma_utilisation", "stages"]
    assert list(report)[:6] == first
    assert report["estimated_ms"] >= max(found.host_ms, 0)
    assert sum(stage["launches"] for stage in report["stages"]) == report["launches"]
    assert {"grouping", "routing", "summary", "probes", "attention"} <= {s["stage"] for s in report["stages"]}
