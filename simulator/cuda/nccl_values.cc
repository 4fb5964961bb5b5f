#include "nccl_values.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

namespace simulator {
namespace {

// Floating point goes through double, integers through a 64-bit integer, so that large ones stay exact.
double load(__half x) { return double(__half2float(x)); }
double load(__nv_bfloat16 x) { return double(__bfloat162float(x)); }
double load(float x) { return double(x); }
double load(double x) { return x; }
int64_t load(int8_t x) { return x; }
int64_t load(int32_t x) { return x; }
int64_t load(int64_t x) { return x; }
uint64_t load(uint8_t x) { return x; }
uint64_t load(uint32_t x) { return x; }
uint64_t load(uint64_t x) { return x; }

template <typename T, typename Wide>
T store(Wide x) { return T(x); }
template <>
__half store(double x) { return __float2half(float(x)); }
template <>
__nv_bfloat16 store(double x) { return __float2bfloat16(float(x)); }

// Calls `action` with a null pointer of the element's type; false where elements cannot be computed with.
template <typename Action>
bool with_type(ncclDataType_t type, Action action) {
  switch (type) {
    case ncclInt8: action(static_cast<int8_t*>(nullptr)); return true;
    case ncclUint8: action(static_cast<uint8_t*>(nullptr)); return true;
    case ncclInt32: action(static_cast<int32_t*>(nullptr)); return true;
    case ncclUint32: action(static_cast<uint32_t*>(nullptr)); return true;
    case ncclInt64: action(static_cast<int64_t*>(nullptr)); return true;
    case ncclUint64: action(static_cast<uint64_t*>(nullptr)); return true;
    case ncclFloat16: action(static_cast<__half*>(nullptr)); return true;
    case ncclBfloat16: action(static_cast<__nv_bfloat16*>(nullptr)); return true;
    case ncclFloat32: action(static_cast<float*>(nullptr)); return true;
    case ncclFloat64: action(static_cast<double*>(nullptr)); return true;
    default: return false;
  }
}

template <typename Wide>
Wide reduce_two(Wide a, Wide b, int reduction) {
  switch (reduction) {
    case ncclProd: return a * b;
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return a + b; // sum, avg, and sums of what was multiplied before
  }
}

template <typename T>
void reduce_elements(Meeting& meeting, const Operation& o, uint64_t slot, size_t offset, std::vector<char>& result) {
  for (size_t i = 0; i < o.count; ++i) {
    auto element = [&](int rank) {
      T value;
      memcpy(&value, meeting.seat(rank).values[slot] + offset + i * sizeof(T), sizeof(T));
      return load(value);
    };
    auto sum = element(0);
    for (int rank = 1; rank < meeting.ranks; ++rank) sum = reduce_two(sum, element(rank), o.reduction);
    if (o.reduction == ncclAvg) sum /= decltype(sum)(meeting.ranks);
    T value = store<T>(sum);
    memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
  }
}

void append(std::vector<char>& to, const char* from, size_t bytes) { to.insert(to.end(), from, from + bytes); }

} // namespace

bool carries_values(const Operation& operation, int ranks) {
  if (send_bytes(operation, ranks) > small_bytes) return false;
  return !reduces(operation.kind) || with_type(operation.type, [](auto*) {});
}

void multiply(char* bytes, const Operation& operation, int ranks, double factor) {
  with_type(operation.type, [&]<typename T>(T*) {
    size_t elements = send_bytes(operation, ranks) / sizeof(T);
    for (size_t i = 0; i < elements; ++i) {
      T value;
      memcpy(&value, bytes + i * sizeof(T), sizeof(T));
      auto wide = load(value);
      value = store<T>(decltype(wide)(double(wide) * factor));
      memcpy(bytes + i * sizeof(T), &value, sizeof(T));
    }
  });
}

double read_element(const char* bytes, ncclDataType_t type) {
  double result = 1;
  with_type(type, [&]<typename T>(T*) {
    T value;
    memcpy(&value, bytes, sizeof(T));
    result = double(load(value));
  });
  return result;
}

std::vector<char> combine(Meeting& meeting, const Operation& o, uint64_t slot, int rank) {
  size_t part = o.count * element_bytes(o.type);
  bool is_root = rank == o.other;
  std::vector<char> result;
  auto values_of = [&](int r) { return meeting.seat(r).values[slot]; };
  switch (o.kind) {
    case Communication::reduce:
      if (!is_root) return result;
      [[fallthrough]];
    case Communication::all_reduce:
    case Communication::reduce_scatter: {
      size_t offset = o.kind == Communication::reduce_scatter ? part * size_t(rank) : 0;
      result.resize(part);
      with_type(o.type, [&]<typename T>(T*) { reduce_elements<T>(meeting, o, slot, offset, result); });
      return result;
    }
    case Communication::broadcast: append(result, values_of(o.other), part); return result;
    case Communication::scatter: append(result, values_of(o.other) + part * size_t(rank), part); return result;
    case Communication::gather:
      if (!is_root) return result;
      [[fallthrough]];
    case Communication::all_gather:
      for (int r = 0; r < meeting.ranks; ++r) append(result, values_of(r), part);
      return result;
    case Communication::all_to_all:
      for (int r = 0; r < meeting.ranks; ++r) append(result, values_of(r) + part * size_t(rank), part);
      return result;
    default: return result;
  }
}

} // namespace simulator
