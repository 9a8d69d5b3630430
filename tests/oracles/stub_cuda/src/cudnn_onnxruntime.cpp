// What ONNX Runtime's CUDA provider asks of cuDNN beyond what PyTorch does. It looks functions up by name, so none is
// imported and gen_stubs.py does not see them.
#include "cudnn_forward.h"

#define RUNS(fn)                                                   \
  API int fn##_runs() __asm__(#fn);                                \
  int fn##_runs() {                                                \
    g_memsets++; /* writes on the device: see FAKE_CUDA_SENT */ \
    return 0;                                                      \
  }
RUNS(cudnnActivationForward)
RUNS(cudnnAddTensor)
RUNS(cudnnBatchNormalizationForwardInference)
RUNS(cudnnBatchNormalizationForwardTraining)
RUNS(cudnnConvolutionBiasActivationForward)
RUNS(cudnnConvolutionForward)
RUNS(cudnnLRNCrossChannelForward)
RUNS(cudnnPoolingForward)
RUNS(cudnnRNNForward)
RUNS(cudnnReduceTensor)
RUNS(cudnnSoftmaxForward)

FWD(cudnnDeriveBNTensorDescriptor, )
FWD(cudnnCreateLRNDescriptor, *(void**)a = calloc(1, 1024))
FWD(cudnnSetLRNDescriptor, )
FWD(cudnnDestroyLRNDescriptor, )
FWD(cudnnSetPoolingNdDescriptor, )
FWD(cudnnDestroyPoolingDescriptor, )
FWD(cudnnSetActivationDescriptor, )
FWD(cudnnDestroyActivationDescriptor, )
FWD(cudnnCreateReduceTensorDescriptor, *(void**)a = calloc(1, 1024))
FWD(cudnnSetReduceTensorDescriptor, )
FWD(cudnnDestroyReduceTensorDescriptor, )
FWD(cudnnGetReductionIndicesSize, *(size_t*)e = 0)
FWD(cudnnGetReductionWorkspaceSize, *(size_t*)e = 0)
FWD(cudnnSetConvolutionNdDescriptor, )
FWD(cudnnSetConvolutionGroupCount, )
FWD(cudnnSetConvolutionMathType, )
FWD(cudnnDestroyConvolutionDescriptor, )
FWD(cudnnGetConvolutionForwardWorkspaceSize, *(size_t*)g = 0)
FWD(cudnnGetConvolutionForwardAlgorithm_v7, )
FWD(cudnnFindConvolutionForwardAlgorithmEx, )
