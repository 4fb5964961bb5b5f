#include "nccl_operation.h"

#include <algorithm>

namespace simulator {
namespace {

const char* type_name(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return "int8";
    case ncclUint8: return "uint8";
    case ncclInt32: return "int32";
    case ncclUint32: return "uint32";
    case ncclInt64: return "int64";
    case ncclUint64: return "uint64";
    case ncclFloat16: return "float16";
    case ncclFloat32: return "float32";
    case ncclFloat64: return "float64";
    case ncclBfloat16: return "bfloat16";
    case ncclFloat8e4m3: return "float8_e4m3";
    case ncclFloat8e5m2: return "float8_e5m2";
    default: return "unknown type";
  }
}

const char* reduction_name(int reduction) {
  switch (reduction) {
    case ncclSum: return "sum";
    case ncclProd: return "prod";
    case ncclMax: return "max";
    case ncclMin: return "min";
    case ncclAvg: return "avg";
    default: return "premul_sum";
  }
}

std::string place(const Operation& operation) {
  if (operation.other < 0) return "";
  const char* word = operation.kind == Communication::send ? "to rank " : operation.kind == Communication::recv ? "from rank " : "root ";
  return std::string(", ") + word + std::to_string(operation.other);
}

} // namespace

bool reduces(Communication kind) {
  return kind == Communication::all_reduce || kind == Communication::reduce || kind == Communication::reduce_scatter;
}

size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
  }
}

size_t send_bytes(const Operation& operation, int ranks) {
  size_t bytes = operation.count * element_bytes(operation.type);
  switch (operation.kind) {
    case Communication::reduce_scatter:
    case Communication::all_to_all:
    case Communication::scatter: return bytes * size_t(ranks);
    case Communication::recv: return 0;
    default: return bytes;
  }
}

size_t recv_bytes(const Operation& operation, int ranks) {
  size_t bytes = operation.count * element_bytes(operation.type);
  switch (operation.kind) {
    case Communication::all_gather:
    case Communication::all_to_all:
    case Communication::gather: return bytes * size_t(ranks);
    case Communication::send: return 0;
    default: return bytes;
  }
}

std::string describe(const Operation& operation) {
  std::string text = std::string(communications[int(operation.kind)]) + "(" + std::to_string(operation.count) + " x " + type_name(operation.type);
  if (reduces(operation.kind)) text += std::string(", ") + reduction_name(operation.reduction);
  return text + place(operation) + ")";
}

bool agree(const Operation& a, const Operation& b) {
  if (a.count != b.count || a.type != b.type) return false;
  if (is_message(a.kind)) return true; // its ends were found by number, so they are a send and a recv
  return a.kind == b.kind && a.reduction == b.reduction && a.other == b.other;
}

} // namespace simulator
