"""CUDA kernels: what they allocate beyond what a fake operator shows. Importing this package fills ``script.RULES``."""

from graphmem.capture.kernels import attention as attention
from graphmem.capture.kernels import convolution as convolution
from graphmem.capture.kernels import copies as copies
from graphmem.capture.kernels import distance as distance
from graphmem.capture.kernels import dropout as dropout
from graphmem.capture.kernels import elementwise as elementwise
from graphmem.capture.kernels import embedding as embedding
from graphmem.capture.kernels import embedding_bag as embedding_bag
from graphmem.capture.kernels import fft as fft
from graphmem.capture.kernels import foreach as foreach
from graphmem.capture.kernels import grouped as grouped
from graphmem.capture.kernels import images as images
from graphmem.capture.kernels import indexing as indexing
from graphmem.capture.kernels import loss as loss
from graphmem.capture.kernels import margin as margin
from graphmem.capture.kernels import matmul as matmul
from graphmem.capture.kernels import median as median
from graphmem.capture.kernels import norm as norm
from graphmem.capture.kernels import random as random
from graphmem.capture.kernels import recurrent as recurrent
from graphmem.capture.kernels import reduce as reduce
from graphmem.capture.kernels import select as select
from graphmem.capture.kernels import softmax as softmax
from graphmem.capture.kernels import sort_scan as sort_scan
from graphmem.capture.kernels.script import RULES as RULES
