"""Kernel rules: the memory that CUDA kernels take beyond the outputs of a fake operator.

Importing this package fills ``RULES``: every file of ``rules/`` is found by listing the folder."""

import importlib
import pkgutil

from graphmem.capture.kernels import rules
from graphmem.capture.kernels.parts.script import PROOFS as PROOFS
from graphmem.capture.kernels.parts.script import RULES as RULES
from graphmem.capture.kernels.parts.script import rule_of as rule_of
from graphmem.capture.kernels.parts.script import run_rule as run_rule

for _file in pkgutil.iter_modules(rules.__path__):
    importlib.import_module(f"{rules.__name__}.{_file.name}")
