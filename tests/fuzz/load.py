"""Load trials for docs/reliability.md, each with its figure: `python -m tests.fuzz.load [name ...]`."""

import gc
import os
import random
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import residua


def tensors(batch: int, heads: int, tokens: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    spots = torch.randn(64, dim, generator=g)
    place = torch.arange(tokens) * 64 // tokens
    q, k, v = (torch.randn(batch, heads, tokens, dim, generator=g) for _ in range(3))
    return q + 2 * spots[place], k + 2 * spots[place], v


def resident() -> int:
    """Of this process, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def one_call(batch: int, heads: int, tokens: int) -> str:
    q, k, v = tensors(batch, heads, tokens, 64)
    before = resident()
    start = time.perf_counter()
    out, receipt = residua.attention(q, k, v, residua.Config(density=0.1), return_receipt=True)
    took = time.perf_counter() - start
    assert bool(out.isfinite().all())
    inputs = 3 * q.numel() * 4 >> 20
    return f"{took:.0f} s, {peak() - before} MiB above the inputs of {inputs} MiB, density {receipt.density:.3f}"


def long_call() -> str:
    return one_call(1, 1, 150_000)


def many_heads() -> str:
    return one_call(1, 64, 8_192)


def changing_shapes(calls: int = 1000) -> str:
    r = random.Random(0)
    state = residua.State()

    def run() -> None:
        q, k, v = tensors(r.choice((1, 2)), r.choice((1, 2, 4)), r.randrange(1, 400), r.choice((16, 64)))
        residua.attention(q, k, v, residua.Config(density=0.3), state, return_receipt=True)

    for _ in range(200):
        run()
    gc.collect()
    before = resident()
    for _ in range(calls):
        run()
    gc.collect()
    return f"{resident() - before} MiB grown over {calls} calls, from {before} MiB"


def threads(workers: int = 8, calls: int = 200) -> str:
    cases = [tensors(1, 2, 300 + 7 * i, 32, seed=i) for i in range(10)]
    config = residua.Config(density=0.3)
    serial = [residua.attention(*case, config) for case in cases]

    def work(worker: int) -> int:
        wrong = 0
        for i in range(calls):
            place = (i + worker) % len(cases)
            wrong += not torch.equal(residua.attention(*cases[place], config), serial[place])
        return wrong

    with ThreadPoolExecutor(workers) as pool:
        wrong = sum(pool.map(work, range(workers)))
    return f"{wrong} of {workers * calls} calls differ from serial ones"


def fork(children: int = 4) -> str:
    q, k, v = tensors(1, 2, 500, 32)
    wanted = residua.attention(q, k, v)
    pids = []
    for _ in range(children):
        pid = os.fork()
        if not pid:
            os._exit(0 if torch.equal(residua.attention(q, k, v), wanted) else 1)
        pids.append(pid)
    bad = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return f"{bad} of {children} children differ or fail"


def cycles(count: int = 10_000) -> str:
    """`accelerate` and `remove` on one transformer, again and again."""
    import diffusers

    from residua.hosts.diffusers.dispatch import _layers

    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    for _ in range(20):
        residua.accelerate(model, 0.3).remove()
    gc.collect()
    objects, memory, layers = len(gc.get_objects()), resident(), len(_layers)
    for _ in range(count):
        residua.accelerate(model, 0.3).remove()
    gc.collect()
    grown, left = len(gc.get_objects()) - objects, len(_layers) - layers
    return f"{grown} objects and {resident() - memory} MiB more after {count} cycles, {left} layers left"


TRIALS = {
    "150,000 tokens x 1 head": long_call,
    "64 heads x 8,192 tokens": many_heads,
    "1,000 calls with changing shapes": changing_shapes,
    "8 threads x 200 calls": threads,
    "fork after use": fork,
    "10,000 times accelerate and remove": cycles,
}


def main() -> int:
    chosen = sys.argv[1:] or list(TRIALS)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    for name, trial in TRIALS.items():
        if name in chosen or trial.__name__ in chosen:
            print(f"{name}: {trial()}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
