"""``torch.compile`` on the pretended device: PyTorch's own compiler runs, the kernels it writes do not.

Dynamo, AOTAutograd and Inductor need no GPU to decide which memory the compiled step keeps, fuses, reuses and frees;
the Python they generate allocates and drops every buffer itself. That Python runs under the recorder like any other
code, with its Triton kernels replaced by nothing. Answers that only a card has (timings) are assumed, with a remark.
"""

from graphmem.capture.compile.regions import CompiledCode as CompiledCode
from graphmem.capture.compile.regions import follow_compiled_code as follow_compiled_code
