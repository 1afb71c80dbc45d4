"""How much each Triton launch of a call does: loop trips, FLOPs, bytes. One function per kernel."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dev.gpu_model.route import RouteTiles
from dev.gpu_model.trace import Launch, Shape

TF32 = 2  # a TF32 product takes the tensor cores as long as two in bf16


@dataclass(frozen=True)
class Work:
    """Totals of one launch."""

    bytes: float  # of device memory, each tensor once
    trips: tuple[float, ...] = ()  # of the loops that multiply, outer before inner, in program order
    flops: float = 0.0  # issued to the tensor cores, in units of bf16
    useful: float = 0.0  # FLOPs that the result needs
    cache_bytes: float = 0.0  # of the second-level cache, if that is more
    serial_cycles: float = 0.0  # of one program that waits for itself, where that decides


def cdiv(value: float, step: float) -> int:
    return math.ceil(value / step)


def tensors(launch: Launch, *skip: str) -> float:
    """Bytes of all tensors of a launch, each once: a kernel may know one by two names."""
    shapes = [x for name, x in launch.arguments.items() if isinstance(x, Shape) and name not in skip]
    return float(sum({x.storage: x.bytes for x in shapes}.values()))


def _attend(a: Launch, tiles: RouteTiles) -> Work:
    batch, heads, rows, _ = a["Q"].sizes
    heads *= batch
    low, room = a["LOW"], a["T"] if a["SUMMARY"] else 0
    if rows == tiles.tokens:
        count = tiles.low_tiles if low else tiles.tall_tiles
        full, cut = (tiles.low_full_trips, tiles.low_cut_trips) if low else (tiles.full_trips, tiles.cut_trips)
        share = count * a["BM"] / max(1.0, tiles.tall_tiles * a["ROWS"] + tiles.low_tiles * a["ROWS"] / 2)
        useful = tiles.pairs * (full + cut) * a["BM"] * a["BN"] / max(1.0, tiles.issued_pairs)
    else:  # probe rows, a few in each query group, without a single cell
        count = min(rows, a["CQ"]) if low else 0
        full = cut = useful = 0.0
        share = 1.0
    summary = count * cdiv(room, a["BT"])
    elements = a["Q"].dtype.itemsize
    trip = 2 * a["BM"] * (a["BD"] + a["BDV"])
    slot = (a["SUMMARY_K"].bytes + a["SUMMARY_V"].bytes) / max(1, heads * a["CQ"] * room) if room else 0
    own = count * room * slot
    drift = 4 * (a["R"] + 1) if a["DRIFT"] and not a["MOVES"] else 0
    moved = share * rows * (a["D"] * elements + a["DV"] * a["OUT"].dtype.itemsize + 12 + drift)
    moved += tiles.tokens * (a["BD"] + a["BDV"]) * elements if full else 0
    moved += min(own, a["CQ"] * room * slot) + (full + cut) / max(1.0, count) * 16 * a["CQ"]
    cached = (full + cut) * a["BN"] * (a["BD"] + a["BDV"]) * elements + own
    parts = 1 if not room or a["SUMMARY_K"].dtype == a["Q"].dtype else 2
    flops = (full + cut) * a["BN"] * trip + summary * 2 * a["BM"] * a["BT"] * (parts * a["BD"] + a["BDV"])
    loops = [full, cut] + ([summary] if a["SUMMARY"] else [])
    return Work(
        heads * moved,
        tuple(heads * trips for trips in loops),
        heads * flops,
        heads * 2 * (useful + count * min(a["BM"], 64) * room) * (a["D"] + a["DV"]),
        heads * cached,
    )


def _mass(a: Launch, tiles: RouteTiles) -> Work:
    heads = a["ANCHORS"].sizes[0] * a["ANCHORS"].sizes[1]
    rows = cdiv(a["CQ"], a["BM"]) * heads
    trips = rows * tiles.small_key_tiles * 32 / a["BN"]
    key = a["BD"] * a["K"].dtype.itemsize
    return Work(
        tensors(a),
        (rows * a["CK"], trips),
        2 * 2 * a["BM"] * a["BN"] * a["BD"] * trips,
        2 * heads * a["CQ"] * a["NK"] * a["D"],
        trips * a["BN"] * key + a.grid * a["BM"] * a["D"] * 4,
    )


def _slots(a: Launch, tiles: RouteTiles) -> Work:
    heads = a["ANCHORS"].sizes[0] * a["ANCHORS"].sizes[1]
    rows = cdiv(a["CQ"], a["BM"]) * heads
    trips = rows * tiles.small_key_tiles * 32 / a["BN"]
    return Work(
        tensors(a),
        (rows * a["hoods"], rows * a["CK"], trips),
        2 * a["BM"] * a["BN"] * (3 * a["BD"] + a["BDV"]) * trips,
        2 * heads * a["CQ"] * a["NK"] * (2 * a["D"] + a["DV"]),
        trips * a["BN"] * (a["BD"] + a["BDV"]) * a["K"].dtype.itemsize + a["SLOTS"].bytes + a["OUT_K"].bytes,
    )


def _rows(a: Launch, tiles: RouteTiles) -> Work:
    sums = 1 if a["KEPT"] is None else 2
    heads = a["Q"].sizes[0] * a["Q"].sizes[1]
    trips = heads * a["tiles"] * cdiv(a["NK"], a["BN"])
    flops = 2 * a["BM"] * a["BN"] * (a["BD"] + sums * a["BDV"]) * trips
    return Work(
        tensors(a, "Q"),
        (trips,),
        flops,
        2 * heads * a["M"] * a["NK"] * (a["D"] + sums * a["DV"]),
        trips * a["BN"] * (a["D"] + a["DV"]) * a["K"].dtype.itemsize,
    )


def _assign(a: Launch, tiles: RouteTiles) -> Work:
    steps = cdiv(a["C"], a["BC"])
    trips = a.grid * steps
    groups = a["X"].sizes[0]
    return Work(
        tensors(a, "VALID"),
        (trips,),
        (3 if a["PARTS"] else 1) * 2 * a["BN"] * a["BC"] * a["BR"] * trips,
        2 * groups * a["N"] * a["C"] * a["R"],
        trips * a["BC"] * a["BR"] * (4 if a["PARTS"] else 2),
    )


def _project(a: Launch, tiles: RouteTiles) -> Work:
    x = a.arguments.get("X") or a["Q"]
    trips = a.grid * cdiv(a["D"], a["BK"])
    heads = x.sizes[0] * x.sizes[1]
    width = TF32 if x.dtype.itemsize == 4 or a.name == "drift" else 1
    flops = 3 * width * 2 * a["BN"] * a["BK"] * a["BR"] * trips
    return Work(tensors(a), (trips,), flops, 2 * heads * x.sizes[2] * a["D"] * a["R"])


def _covariance(a: Launch, tiles: RouteTiles) -> Work:
    heads = a["X"].sizes[0] * a["X"].sizes[1]
    # a neighbourhood of groups ends in a block that is half full
    trips = heads * (a["N"] / a["BN"] + a["C"] / 2)
    flops = 3 * TF32 * 2 * a["BR"] * a["BN"] * a["BDV"] * trips
    useful = 2 * heads * a["N"] * a["R"] * a["DV"]
    return Work(tensors(a), (trips,), flops, useful, 2 * (a["X"].bytes + a["V"].bytes))


def _key_covariance(a: Launch, tiles: RouteTiles) -> Work:
    heads = a["K"].sizes[0] * a["K"].sizes[1]
    trips = heads * tiles.small_key_tiles * 32 / a["BN"]
    flops = 2 * a["BR"] * a["BN"] * (3 * a["BD"] + 2 * a["BDV"]) * trips
    return Work(tensors(a), (trips,), flops, 2 * heads * a["N"] * a["R"] * (a["D"] + a["DV"]))


def _moment(a: Launch, tiles: RouteTiles) -> Work:
    trips = a.grid * cdiv(a["M"], a["BM"])
    exact = a["X"].dtype.itemsize == 2 and not a["CENTRED"]
    flops = (1 if exact else 3 * TF32) * 2 * a["BD"] * a["BD"] * a["BM"] * trips
    # one program per head: its rows one block after the other
    useful = 2 * a.grid * a["M"] * a["D"] ** 2
    cycles = (600.0 if exact else 1500.0) * cdiv(a["M"], a["BM"])
    return Work(tensors(a), (trips,), flops, useful, serial_cycles=cycles)


def _small_kmeans(a: Launch, tiles: RouteTiles) -> Work:
    blocks = a["steps"] * cdiv(a["N"], a["BN"])
    flops = 5 * 2 * a["BC"] * a["BN"] * a["BR"] * blocks * a.grid
    useful = 4 * a.grid * a["steps"] * a["N"] * a["C"] * a["R"]
    return Work(tensors(a), (), flops, useful, serial_cycles=2500.0 * blocks)


def _subspace(a: Launch, tiles: RouteTiles) -> Work:
    pivots = a["rank"] * (a["rounds"] + 1 + bool(a["FACTOR"]))
    products = 12 * cdiv(a["n"], a["BK"]) * 3
    return Work(tensors(a), serial_cycles=1000.0 * pivots + 600.0 * products)


def _key_tiles(a: Launch, tiles: RouteTiles) -> Work:
    written = a.grid * 16 * (tiles.full_trips + tiles.cut_trips) / max(1.0, tiles.tall_tiles)
    written += a.grid * 16 * tiles.runs  # once written, once read
    # blocks of K/V groups, then every run in turn: one wait for the cache each
    cycles = 1500.0 * cdiv(a["C"], a["BC"]) + 500.0 * tiles.runs
    return Work(a["CELLS"].bytes + written, serial_cycles=cycles)


def _fill(a: Launch, tiles: RouteTiles) -> Work:
    share = tiles.pairs / tiles.tokens**2
    blocks = cdiv(share * a["CQ"] * a["CK"], a["BC"])
    moved = a.grid * blocks * a["BC"] * 8 + a["CELLS"].bytes * share
    # where the budget overflows a bucket is read three times, and about sixteen sums are compared
    overflow = 3 * 2500.0 + 16 * 300.0
    return Work(moved, serial_cycles=2500.0 * blocks + a["passes"] * overflow)


def _place(a: Launch, tiles: RouteTiles) -> Work:
    return Work(tensors(a), serial_cycles=2000.0 * cdiv(min(a["STRETCH"], a["N"]), a["BLOCK"]))


def _candidates(a: Launch, tiles: RouteTiles) -> Work:
    own = a.grid * a["R"] * (a["DV"] * a["SLOPE"].dtype.itemsize + 8) if a["DRIFT"] else 0
    return Work(tensors(a, "ORIGIN", "CURVE", "SLOPE") + own)


WORK: dict[str, Callable[[Launch, RouteTiles], Work]] = {
    "attend": _attend,
    "mass": _mass,
    "slots": _slots,
    "rows": _rows,
    "assign": _assign,
    "project": _project,
    "drift": _project,
    "covariance": _covariance,
    "key_covariance": _key_covariance,
    "moment": _moment,
    "small_kmeans": _small_kmeans,
    "subspace": _subspace,
    "key_tiles": _key_tiles,
    "fill": _fill,
    "starts": lambda a, _: Work(tensors(a), serial_cycles=600.0 * a["stretches"]),
    "place": _place,
    "permute": lambda a, _: Work(a["OUT"].bytes + a["OUT"].bytes * a["D"] / a["DO"] + a["ORDER"].bytes),
    "segment_mean": lambda a, _: Work(tensors(a, "SPARE")),
    "candidates": _candidates,
    "spread": lambda a, _: Work((a["K"].bytes + a["V"].bytes + a["ORDER"].bytes) / a["every"] + a["SPREAD"].bytes),
    "switch": lambda a, _: Work(a["CHOICE"].bytes),  # most heads switch nothing off
    "spoil": lambda a, _: Work(a["LOST"].bytes),  # nothing is lost in a sound call
}


def work_of(launch: Launch, tiles: RouteTiles) -> Work:
    """The work of a launch; a kernel without a function of its own moves its tensors once."""
    known = WORK.get(launch.name)
    return known(launch, tiles) if known else Work(tensors(launch))
