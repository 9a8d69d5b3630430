"""Labels of buffers by which others know them: the memory that kernels take for a library, and how sure its size is."""

#: cuDNN's workspace of a convolution or a recurrent network: as a library told or a recording proves, and predicted.
CUDNN, CUDNN_ESTIMATE = "cuDNN workspace", "cuDNN workspace (estimate)"
#: Workspaces in which ``cudnn.benchmark`` times plans.
TIMING, TIMING_ESTIMATE = "cuDNN workspace for timing plans", "cuDNN workspace for timing plans (estimate)"
#: cuFFT's work area, of which the least is taken.
CUFFT = "cuFFT work area (estimate)"

WORKSPACES_OF_CUDNN = frozenset((CUDNN, CUDNN_ESTIMATE, TIMING, TIMING_ESTIMATE))
ESTIMATES = frozenset((CUDNN_ESTIMATE, TIMING_ESTIMATE, CUFFT))
