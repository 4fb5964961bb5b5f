// NCCL's interface: communicators, groups, collectives and messages.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "counters.h"
#include "device.h"
#include "memory.h"
#include "nccl_communicator.h"
#include "nccl_values.h"

using namespace simulator;

using CommunicatorPointer = std::shared_ptr<Communicator>;
struct ncclComm {
  CommunicatorPointer communicator;
};

namespace {

ncclResult_t refuse(ncclResult_t result, const std::string& text) {
  set_last_error(text);
  return result;
}

// --- groups --------------------------------------------------------------------------------------

struct Pending {
  CommunicatorPointer communicator;
  StreamPointer stream;
  Call call;
};

// What the thread has gathered since ncclGroupStart.
struct Group {
  int depth = 0;
  std::vector<Pending> calls;
  std::vector<CommunicatorPointer> joining;
  ncclResult_t error = ncclSuccess;
};
thread_local Group group;

// A communicator's part of a group. If it lies on several streams, they wait for one another.
ncclResult_t issue_together(const std::vector<Pending>& part) {
  std::vector<Call> calls;
  const StreamPointer& stream = part.front().stream;
  std::vector<StreamPointer> others;
  for (auto& pending : part) {
    calls.push_back(pending.call);
    bool known = pending.stream == stream || std::find(others.begin(), others.end(), pending.stream) != others.end();
    if (!known) others.push_back(pending.stream);
  }
  for (auto& other : others) submit_wait(stream, record(other));
  auto result = part.front().communicator->issue(std::move(calls), stream);
  for (auto& other : others) submit_wait(other, record(stream));
  return result;
}

ncclResult_t issue_group(std::vector<Pending> calls) {
  while (!calls.empty()) {
    auto communicator = calls.front().communicator;
    auto rest = std::stable_partition(calls.begin(), calls.end(), [&](auto& p) { return p.communicator == communicator; });
    if (auto error = issue_together({calls.begin(), rest})) return error;
    calls.erase(calls.begin(), rest);
  }
  return ncclSuccess;
}

ncclResult_t wait_until_joined(const std::vector<CommunicatorPointer>& joining) {
  for (auto& communicator : joining) {
    communicator->wait_until_settled();
    if (auto error = communicator->state()) return error;
  }
  return ncclSuccess;
}

// --- operations ----------------------------------------------------------------------------------

// The device would fault on a buffer that is elsewhere or too short.
std::optional<std::string> wrong_buffer(const Communicator& communicator, const char* which, const void* buffer, size_t bytes) {
  if (!bytes) return std::nullopt;
  auto [place, device] = locate(buffer);
  std::string subject = std::string("the ") + which + " buffer ";
  if (place == Place::pageable) return subject + "is not memory that a device can reach";
  if (place == Place::device && device != communicator.device) {
    return subject + "is on device " + std::to_string(device) + ", the communicator on device " + std::to_string(communicator.device);
  }
  if (!is_allocated(buffer, bytes)) return subject + "is shorter than the operation";
  return std::nullopt;
}

std::optional<std::string> wrong_argument(const Communicator& communicator, const Call& call, const StreamPointer& stream) {
  const Operation& o = call.operation;
  int ranks = communicator.ranks();
  if (o.other < -1 || o.other >= ranks) return "there is no rank " + std::to_string(o.other);
  if (!stream) return "the stream does not exist";
  if (stream_device(stream) != communicator.device) return "the stream belongs to another device";
  bool is_root = o.other == communicator.rank();
  bool sends = is_root || (o.kind != Communication::broadcast && o.kind != Communication::scatter);
  bool receives = is_root || (o.kind != Communication::reduce && o.kind != Communication::gather);
  if (auto text = wrong_buffer(communicator, "send", call.send, sends ? send_bytes(o, ranks) : 0)) return text;
  return wrong_buffer(communicator, "receive", call.recv, receives ? recv_bytes(o, ranks) : 0);
}

ncclResult_t remember_for_group(ncclResult_t error) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = error;
  return error;
}

ncclResult_t operate(Communication kind, const void* send, void* recv, size_t count, ncclDataType_t type, int reduction, int other, ncclComm_t comm,
                     cudaStream_t handle) {
  auto& communicator = *comm->communicator;
  if (communicator.state() == ncclInProgress) return refuse(ncclInvalidUsage, "the communicator is not ready yet");
  Call call{{kind, type, std::min<int>(reduction, ncclNumOps), other, count, 0}, send, recv, communicator.factor_of(ncclRedOp_t(reduction))};
  auto stream = find_stream(handle);
  if (auto text = wrong_argument(communicator, call, stream)) {
    return remember_for_group(refuse(ncclInvalidArgument, describe(call.operation) + ": " + *text));
  }
  size_t bytes = std::max(send_bytes(call.operation, communicator.ranks()), recv_bytes(call.operation, communicator.ranks()));
  count_communication(communicator.device, kind, bytes);
  if (group.depth == 0) return communicator.issue({call}, stream);
  group.calls.push_back({comm->communicator, stream, call});
  return ncclSuccess;
}

// --- communicators -------------------------------------------------------------------------------

uint64_t hash(const void* data, size_t bytes) {
  uint64_t value = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < bytes; ++i) value = (value ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ull;
  return value;
}

bool is_blocking(const ncclConfig_t* config) { return !config || config->blocking != 0; }

// Joins on this thread, or on another one where the caller will ask for the state later.
template <typename Join>
ncclResult_t start_joining(const CommunicatorPointer& communicator, bool blocking, Join join) {
  if (blocking && group.depth == 0) return join(*communicator);
  std::thread([communicator, join] { join(*communicator); }).detach();
  if (!blocking) return ncclInProgress;
  group.joining.push_back(communicator);
  return ncclSuccess;
}

ncclResult_t create(ncclComm_t* comm, int ranks, uint64_t id, int rank, const ncclConfig_t* config) {
  if (rank < 0 || rank >= ranks) return refuse(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  auto communicator = std::make_shared<Communicator>(current_device());
  *comm = new ncclComm{communicator};
  return start_joining(communicator, is_blocking(config), [=](Communicator& c) { return c.join(id, ranks, rank); });
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return getrandom(id->internal, sizeof id->internal, 0) == ssize_t(sizeof id->internal) ? ncclSuccess : ncclSystemError;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclInProgress: return "in progress";
    case ncclInvalidArgument: return "invalid argument (simulated NCCL)";
    case ncclInvalidUsage: return "invalid usage (simulated NCCL)";
    case ncclRemoteError: return "another rank did not come (simulated NCCL)";
    case ncclSystemError: return "a system call failed (simulated NCCL)";
    default: return "an error of the simulated NCCL";
  }
}

const char* ncclGetLastError(ncclComm_t) { return last_error(); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return create(comm, ranks, hash(&id, sizeof id), rank, config);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return create(comm, ranks, hash(ids, sizeof *ids), rank, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) { return create(comm, ranks, hash(&id, sizeof id), rank, nullptr); }

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm, ncclConfig_t* config) {
  auto from = parent->communicator;
  uint64_t split = from->next_split();
  auto communicator = std::make_shared<Communicator>(from->device);
  *comm = color == NCCL_SPLIT_NOCOLOR ? nullptr : new ncclComm{communicator};
  return start_joining(communicator, is_blocking(config), [=](Communicator& c) { return c.join_split(*from, color, key, split); });
}

// Work that is still in a stream keeps the communicator; only the handle goes.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->communicator->abort();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = comm->communicator->state();
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* ranks) {
  *ranks = comm->communicator->ranks();
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->communicator->rank();
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->communicator->device;
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** address, size_t bytes) { return cudaMalloc(address, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclMemFree(void* address) { return cudaFree(address) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t, void** handle) {
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

// --- operators -----------------------------------------------------------------------------------

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t comm) {
  *op = comm->communicator->add_operator(read_element(backing(scalar), type));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  comm->communicator->remove_operator(op);
  return ncclSuccess;
}

// --- groups --------------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group.depth > 0) return ncclSuccess;
  Group done = std::move(group);
  group = {};
  if (done.error) return done.error;
  if (auto error = wait_until_joined(done.joining)) return error;
  return issue_group(std::move(done.calls));
}

// --- collectives and messages --------------------------------------------------------------------

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::all_reduce, send, recv, count, type, op, -1, comm, stream);
}

ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::reduce, send, recv, count, type, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::broadcast, send, recv, count, type, 0, root, comm, stream);
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::all_gather, send, recv, count, type, 0, -1, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::reduce_scatter, send, recv, count, type, op, -1, comm, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::all_to_all, send, recv, count, type, 0, -1, comm, stream);
}

ncclResult_t ncclGather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::gather, send, recv, count, type, 0, root, comm, stream);
}

ncclResult_t ncclScatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::scatter, send, recv, count, type, 0, root, comm, stream);
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::send, send, nullptr, count, type, 0, peer, comm, stream);
}

ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return operate(Communication::recv, nullptr, recv, count, type, 0, peer, comm, stream);
}

} // extern "C"
