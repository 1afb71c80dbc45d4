"""XAttention: blocks of neighbouring tokens, scored by the antidiagonals of their attention maps."""

import torch.nn.functional as F
from torch import Tensor

from ..types import Partition, Route
from .groups import blocks, local_order
from .methods import METHODS, Method
from .selection import top_p
from .task import Task

STRIDE = 16
CHUNK = 1 << 22  # entries of the strided map at a time


def strided(x: Tensor, stride: int) -> Tensor:
    """Neighbouring rows side by side; the end is padded with zeros.  # [N, D] -> [N / S, S, D]"""
    return F.pad(x, (0, 0, 0, -len(x) % stride)).unflatten(0, (-1, stride))


def antidiagonal_map(q: Tensor, k: Tensor, scale: float, stride: int) -> Tensor:
    """Mean logit on the antidiagonal of every stride x stride tile: row i meets column stride - 1 - i.

    q [Nq, D], k [Nk, D] -> [Nq / S, Nk / S]
    """
    rows, columns = strided(q, stride), strided(k, stride).flip(1)
    return rows.flatten(1) @ columns.flatten(1).mT * (scale / stride)


def block_scores(task: Task, query: Partition, kv: Partition, stride: int) -> Tensor:
    """Softmax of the strided map, summed over blocks; its log.  # [B, H, Cq, Ck]"""
    score = task.q.new_zeros(*task.q.shape[:2], query.groups, kv.groups)
    row_order, column_order = local_order(task, task.rows), local_order(task, task.keys)
    step = max(1, CHUNK * stride // task.keys) * stride
    for b, h in task.each_head:
        q, k = task.q[b, h, row_order], task.k[b, h, column_order]
        rows = query.labels[b, h, row_order[::stride]]
        columns = kv.labels[b, h, column_order[::stride]]
        for first in range(0, task.rows, step):
            strip = antidiagonal_map(q[first : first + step], k, task.scale, stride)
            shares = strip.new_zeros(len(strip), kv.groups).index_add_(1, columns, strip.softmax(-1))
            score[b, h].index_add_(0, rows[first // stride :][: len(strip)], shares)
    return score.log()


@METHODS.register
class XAttention(Method):
    """Every token of a block lies on one antidiagonal of a strided tile, so the sum over it sees all tokens
    at 1/stride of the products; top-p per query block."""

    name = "xattention"
    title = "XAttention"
    source = "R. Xu et al., XAttention, 2025, arXiv:2503.16428"
    simplified = "p is what meets the target in each head instead of tuned thresholds; stride 16, in tile order"

    def group(self, task: Task) -> tuple[Partition, Partition, int]:
        return blocks(task, STRIDE)

    def route(self, task: Task, query: Partition, kv: Partition) -> tuple[Route, int]:
        return top_p(task, block_scores(task, query, kv, STRIDE), query, kv), task.possible // STRIDE
