// cuDNN: a descriptor is a bag of attributes; every graph has one engine, without workspace, that computes nothing.
#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "library_launch.h"
#include "settings.h"

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace {

// With a recent cuDNN libtorch prefers its attention on sm_90, whose graphs nobody can check here. Flash attention is
// libtorch's own kernel, so claim a version that leaves libtorch to it.
struct Version {
  int major, minor, patch;
};
Version version() { return simulator::settings().arch >= 90 ? Version{9, 8, 0} : Version{CUDNN_MAJOR, CUDNN_MINOR, CUDNN_PATCHLEVEL}; }

struct Attribute {
  cudnnBackendAttributeType_t type;
  std::vector<char> bytes;
};
struct Descriptor {
  std::map<cudnnBackendAttributeName_t, Attribute> attributes;
};
Descriptor& descriptor(cudnnBackendDescriptor_t d) { return *static_cast<Descriptor*>(d); }

size_t width(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_FRACTION: return 16;
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    default: return 4;
  }
}

// What a caller asks that it did not set itself: engines, and sizes of workspaces.
int64_t default_answer(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t room, void* values) {
  bool engine = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || name == CUDNN_ATTR_ENGINECFG_ENGINE;
  if (engine) return 1; // the caller brings the descriptor to be filled
  if (type != CUDNN_TYPE_INT64 || room != 1) return 0;
  if (values) *static_cast<int64_t*>(values) = 0;
  return 1;
}

} // namespace

extern "C" {

size_t cudnnGetVersion() { return size_t(version().major * 10000 + version().minor * 100 + version().patch); }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t status) { return status == CUDNN_STATUS_SUCCESS ? "no error" : "the simulated cuDNN does not do this"; }
void cudnnGetLastErrorString(char* text, size_t room) {
  if (room) text[0] = 0;
}

cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? version().major : which == MINOR_VERSION ? version().minor : version().patch;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return CUDNN_STATUS_SUCCESS;
}

// --- the graph interface -------------------------------------------------------------------------

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* d) {
  *d = new Descriptor;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  delete &descriptor(d);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                                       const void* values) {
  auto* bytes = static_cast<const char*>(values);
  size_t size = count > 0 ? size_t(count) * width(type) : 0;
  descriptor(d).attributes[name] = {type, std::vector<char>(bytes, bytes + size)};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t room,
                                       int64_t* count, void* values) {
  auto& attributes = descriptor(d).attributes;
  auto it = attributes.find(name);
  int64_t have;
  if (it == attributes.end()) {
    have = default_answer(name, type, room, values);
  } else {
    have = int64_t(it->second.bytes.size() / width(type));
    if (values && have) memcpy(values, it->second.bytes.data(), size_t(std::min(have, room)) * width(type));
  }
  if (count) *count = have;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return simulator::launch_in_library("cudnnBackendExecute", handle->stream) ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

} // extern "C"
