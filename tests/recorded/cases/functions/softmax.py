"""Softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.common import SCORES
from tests.recorded.cases.functions.registry import BF16, FP16, add, group, index, t

group("softmax")
for name, dtype in (("fp32", torch.float32), ("fp16", FP16), ("bf16", BF16)):
    scores = t(8, 128, 1000, dtype=dtype)
    add(f"softmax_{name}", lambda x: F.softmax(x, -1), scores)
    add(f"softmax_middle_{name}", lambda x: F.softmax(x, 1), scores)
    add(f"log_softmax_{name}", lambda x: F.log_softmax(x, -1), scores)
    add(f"softmax_to_fp32_{name}", lambda x: F.softmax(x, -1, dtype=torch.float32), scores)
    add(f"log_softmax_to_fp32_{name}", lambda x: F.log_softmax(x, -1, dtype=torch.float32), scores)
    add(f"logsumexp_{name}", lambda x: torch.logsumexp(x, -1), scores)
add("softmax_transposed", lambda x: F.softmax(x, -1), t(8, 128, 1000, layout="transposed"))
add("softmin", lambda x: F.softmin(x, -1), SCORES)
add("softmax_to_bf16", lambda x: F.softmax(x, -1, dtype=BF16), SCORES)
add("softmax_then_cast", lambda x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype), t(8, 128, 1000, dtype=BF16))
add("log_softmax_permuted", lambda x: F.log_softmax(x, -1).permute(2, 1, 0).contiguous(), t(8, 128, 1000))
add("logsumexp_two", lambda x: torch.logsumexp(x, (1, 2)), SCORES)
add("log_softmax_gather", lambda x, i: F.log_softmax(x, -1).gather(-1, i), SCORES, index(8, 128, 1))
