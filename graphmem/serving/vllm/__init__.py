"""vLLM: its start followed step by step on our allocator, then its own arithmetic.

``engine`` is the way in, and has the arithmetic. A question's options are read by ``arguments`` and made ``settings``
(``versions`` differ), its configuration is made sizes by ``families``, ``quantization`` and ``encoders``. ``order`` is
the start of one rank, written down by ``run``: buffers and the profile run (``runner``), weights and the forward pass
(``models``, of ``layers``, with ``lora``), drafts (``speculation``, ``prediction``), what ``compiling`` and ``graphs``
take. What is left is cut into blocks (``kv_cache``), over which the ``scheduler`` serves. Other ways to an answer are
captures of transformers' models (``backend``) and the installed engine itself (``installed``, ``starting``); ``log``
reads what it printed.
"""

from __future__ import annotations

from graphmem.serving.vllm.engine import ENGINE

__all__ = ["ENGINE"]
