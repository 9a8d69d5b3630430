// Asks the real cuDNN, without a card, which plan it puts first for a convolution, and what workspace the plan takes.
// cuDNN plans from a description of a device since 9.8 (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR). grow_trees.py talks to it.
//
//   ask_plans DEVICE.json [all]
//   question: fwd|bwd_data|bwd_weight fp32|fp16|bf16|fp64 DIMENSIONS BATCH CHANNELS FILTERS SIDE TAPS STRIDE PADDING
//             DILATION GROUPS LAST TF32
//             (square images and filters; LAST: channels_last; TF32: whether tensor cores may serve fp32)
//   answer:   WORKSPACE engine ENGINE KNOB=VALUE ... | none
//   all:      every plan that builds, of the heuristics' list and then of the fallback's, as PyTorch times them under
//             cudnn.benchmark (get_plans_from_find of Conv_v8.cpp), parted by " ; "
//
//   g++ -std=c++17 -O1 -I$SITE/nvidia/cudnn/include -I$SITE/nvidia/cu13/include ask_plans.cpp -o ask_plans
//       $SITE/nvidia/cudnn/lib/libcudnn.so.9 -Wl,-rpath,$SITE/nvidia/cudnn/lib       (wheel nvidia-cudnn-cu13 9.20)
#include <cudnn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Descriptor = cudnnBackendDescriptor_t;
using Numbers = std::vector<int64_t>;
struct Failed {};
std::vector<Descriptor> made;

void Check(cudnnStatus_t status) {
  if (status != CUDNN_STATUS_SUCCESS) throw Failed();
}

Descriptor Make(cudnnBackendDescriptorType_t type) {
  Descriptor descriptor;
  Check(cudnnBackendCreateDescriptor(type, &descriptor));
  made.push_back(descriptor);
  return descriptor;
}

template <class T>
void Set(Descriptor to, int name, cudnnBackendAttributeType_t type, const std::vector<T>& values) {
  Check(cudnnBackendSetAttribute(to, static_cast<cudnnBackendAttributeName_t>(name), type, values.size(), values.data()));
}

void SetDescriptor(Descriptor to, int name, Descriptor value) {
  Set<Descriptor>(to, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, {value});
}

template <class T>
T Get(Descriptor from, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
  int64_t count = 0;
  cudnnBackendGetAttribute(from, name, type, 1, &count, &value);
  return value;
}

Numbers Strides(const Numbers& dims, bool last) {
  Numbers strides(dims.size());
  int64_t stride = last ? dims[1] : 1;
  for (size_t i = dims.size(); i-- > (last ? 2 : 1);) {
    strides[i] = stride;
    stride *= dims[i];
  }
  if (last) strides[1] = 1;
  strides[0] = stride;
  return strides;
}

Descriptor Tensor(int64_t id, cudnnDataType_t type, const Numbers& dims, bool last) {
  Descriptor tensor = Make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  Set(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims);
  Set(tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, Strides(dims, last));
  Set<int64_t>(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, {id});
  Set<int64_t>(tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, {32});
  Set<cudnnDataType_t>(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, {type});
  Check(cudnnBackendFinalize(tensor));
  return tensor;
}

struct Question {
  std::string direction, type;
  int64_t dimensions, batch, channels, filters, side, taps, stride, padding, dilation, groups;
  int last, tf32;

  Numbers All(int64_t value) const { return Numbers(dimensions, value); }
  // Two leading sizes, then one for every spatial dimension.
  Numbers Dims(int64_t first, int64_t second, int64_t spatial) const {
    Numbers dims = {first, second};
    dims.resize(2 + dimensions, spatial);
    return dims;
  }
};

Descriptor Convolution(const Question& q) {
  Descriptor convolution = Make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  Set<cudnnDataType_t>(convolution, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE,
                       {q.type == "fp64" ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT});
  Set<cudnnConvolutionMode_t>(convolution, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE,
                              {CUDNN_CROSS_CORRELATION});
  Set<int64_t>(convolution, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, {q.dimensions});
  Set<int64_t>(convolution, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, q.All(q.dilation));
  Set<int64_t>(convolution, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, q.All(q.stride));
  Set<int64_t>(convolution, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, q.All(q.padding));
  Set<int64_t>(convolution, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, q.All(q.padding));
  Check(cudnnBackendFinalize(convolution));
  return convolution;
}

// Attributes of an operation stand in the order alpha, beta, convolution, and the tensors.
Descriptor Graph(const Question& q) {
  const cudnnDataType_t type = q.type == "fp32"   ? CUDNN_DATA_FLOAT
                               : q.type == "fp16" ? CUDNN_DATA_HALF
                               : q.type == "bf16" ? CUDNN_DATA_BFLOAT16
                                                  : CUDNN_DATA_DOUBLE;
  const int64_t out = (q.side + 2 * q.padding - q.dilation * (q.taps - 1) - 1) / q.stride + 1;
  Descriptor x = Tensor('x', type, q.Dims(q.batch, q.channels, q.side), q.last);
  Descriptor y = Tensor('y', type, q.Dims(q.batch, q.filters, out), q.last);
  Descriptor w = Tensor('w', type, q.Dims(q.filters, q.channels / q.groups, q.taps), q.last);
  const bool forward = q.direction == "fwd", data = q.direction == "bwd_data";
  const int first = forward ? CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA
                    : data  ? CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA
                            : CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA;
  Descriptor operation = Make(forward ? CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR
                              : data  ? CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR
                                      : CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
  if (type == CUDNN_DATA_DOUBLE) {
    Set<double>(operation, first, CUDNN_TYPE_DOUBLE, {1.});
    Set<double>(operation, first + 1, CUDNN_TYPE_DOUBLE, {0.});
  } else {
    Set<float>(operation, first, CUDNN_TYPE_FLOAT, {1.f});
    Set<float>(operation, first + 1, CUDNN_TYPE_FLOAT, {0.f});
  }
  SetDescriptor(operation, first + 2, Convolution(q));
  SetDescriptor(operation, first + 3, w);
  SetDescriptor(operation, first + 4, x);
  SetDescriptor(operation, first + 5, y);
  Check(cudnnBackendFinalize(operation));
  Descriptor graph = Make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  SetDescriptor(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
  Check(cudnnBackendFinalize(graph));
  return graph;
}

// What PyTorch leaves out (filterEngineConfigs of Conv_v8.cpp).
bool LeftOut(Descriptor engine, const Question& q) {
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
  int64_t count = 0;
  cudnnBackendGetAttribute(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                           CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes);
  for (int64_t i = 0; i < count; ++i) {
    if (notes[i] == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) return true;
    if (notes[i] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && q.type == "fp32" && !q.tf32) return true;
  }
  return false;
}

std::string Knobs(Descriptor config) {
  std::vector<Descriptor> choices(CUDNN_KNOB_TYPE_COUNTS);
  for (Descriptor& choice : choices) choice = Make(CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
  int64_t count = 0;
  cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES, CUDNN_TYPE_BACKEND_DESCRIPTOR, choices.size(),
                           &count, choices.data());
  std::string text;
  for (int64_t i = 0; i < count; ++i) {
    const auto knob = Get(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE, CUDNN_TYPE_KNOB_TYPE, CUDNN_KNOB_TYPE_COUNTS);
    const auto value = Get<int64_t>(choices[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, CUDNN_TYPE_INT64, 0);
    text += " " + std::to_string(static_cast<int>(knob)) + "=" + std::to_string(value);
  }
  return text;
}

// Plans of one list, in its order, that build; only the first unless all are asked for.
std::vector<std::string> Plans(Descriptor graph, Descriptor device, cudnnBackendHeurMode_t mode, const Question& q,
                               bool all) {
  Descriptor heuristics = Make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  SetDescriptor(heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  Set<cudnnBackendHeurMode_t>(heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, {mode});
  SetDescriptor(heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
  Check(cudnnBackendFinalize(heuristics));
  int64_t count = 0;
  Check(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, 0));
  std::vector<Descriptor> configs(count);
  for (Descriptor& config : configs) config = Make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  Check(cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                                 &count, configs.data()));
  std::vector<std::string> plans;
  for (int64_t i = 0; i < count && (all || plans.empty()); ++i) {
    Descriptor engine = Get(configs[i], CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                            Make(CUDNN_BACKEND_ENGINE_DESCRIPTOR));
    if (LeftOut(engine, q)) continue;
    Descriptor plan = Make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    SetDescriptor(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
    SetDescriptor(plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
    if (cudnnBackendFinalize(plan) != CUDNN_STATUS_SUCCESS) continue;
    const auto bytes = Get<int64_t>(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, -1);
    const auto number = Get<int64_t>(engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, -1);
    plans.push_back(std::to_string(bytes) + " engine " + std::to_string(number) + Knobs(configs[i]));
  }
  return plans;
}

Descriptor Device(const char* path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  text.erase(text.rfind('}') + 1);
  Descriptor device = Make(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  Check(cudnnBackendSetAttribute(device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, text.size(),
                                 text.data()));
  Check(cudnnBackendFinalize(device));
  made.clear();  // it stays
  return device;
}

}  // namespace

int main(int count, char** arguments) {
  const bool all = count > 2;
  Descriptor device = Device(arguments[1]);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    Question q;
    words >> q.direction >> q.type >> q.dimensions >> q.batch >> q.channels >> q.filters >> q.side >> q.taps >>
        q.stride >> q.padding >> q.dilation >> q.groups >> q.last >> q.tf32;
    std::vector<std::string> plans;
    for (auto mode : {CUDNN_HEUR_MODE_INSTANT, CUDNN_HEUR_MODE_FALLBACK}) {
      if (!all && !plans.empty()) break;
      try {
        for (const std::string& plan : Plans(Graph(q), device, mode, q, all)) plans.push_back(plan);
      } catch (const Failed&) {
      }
    }
    std::string answer;
    for (const std::string& plan : plans) answer += (answer.empty() ? "" : " ; ") + plan;
    std::printf("%s\n", answer.empty() ? "none" : answer.c_str());
    std::fflush(stdout);
    for (size_t i = made.size(); i-- > 0;) cudnnBackendDestroyDescriptor(made[i]);
    made.clear();
  }
}
