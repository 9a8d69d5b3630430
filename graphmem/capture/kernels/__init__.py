"""CUDA kernels: what they allocate beyond what a fake operator shows. Importing this package fills ``script.RULES``."""

from graphmem.capture.kernels.parts.script import RULES as RULES
from graphmem.capture.kernels.rules import attention as attention
from graphmem.capture.kernels.rules import convolution as convolution
from graphmem.capture.kernels.rules import copies as copies
from graphmem.capture.kernels.rules import distance as distance
from graphmem.capture.kernels.rules import dropout as dropout
from graphmem.capture.kernels.rules import elementwise as elementwise
from graphmem.capture.kernels.rules import embedding as embedding
from graphmem.capture.kernels.rules import embedding_bag as embedding_bag
from graphmem.capture.kernels.rules import fft as fft
from graphmem.capture.kernels.rules import foreach as foreach
from graphmem.capture.kernels.rules import grouped as grouped
from graphmem.capture.kernels.rules import images as images
from graphmem.capture.kernels.rules import indexing as indexing
from graphmem.capture.kernels.rules import loss as loss
from graphmem.capture.kernels.rules import margin as margin
from graphmem.capture.kernels.rules import matmul as matmul
from graphmem.capture.kernels.rules import median as median
from graphmem.capture.kernels.rules import norm as norm
from graphmem.capture.kernels.rules import random as random
from graphmem.capture.kernels.rules import recurrent as recurrent
from graphmem.capture.kernels.rules import reductions as reductions
from graphmem.capture.kernels.rules import select as select
from graphmem.capture.kernels.rules import softmax as softmax
from graphmem.capture.kernels.rules import sort_scan as sort_scan
