"""Dense attention, the reference for all others."""

from __future__ import annotations

import torch.nn.functional as F

from .methods import METHODS, Method
from .task import Outcome, Task


@METHODS.register
class Dense(Method):
    """Every row against every key, by PyTorch's own kernel."""

    name = "dense"
    title = "dense (SDPA)"
    source = "A. Vaswani et al., Attention Is All You Need, 2017, arXiv:1706.03762; the kernel is PyTorch's"
    reference = True

    def run(self, task: Task) -> Outcome:
        out = F.scaled_dot_product_attention(task.q, task.k, task.v, scale=task.scale)
        return Outcome(out, {"routed": task.possible})
