#include "engine/device_run.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "engine/device_side.h"
#include "engine/execute.h"

namespace farandole {
namespace {

void expect(bool fits) {
  if (!fits) throw Error::internal("a plan does not match its operation");
}

std::vector<size_t> scaled(std::span<const int64_t> rows, size_t row) {
  std::vector<size_t> bytes;
  for (const int64_t count : rows) bytes.push_back(static_cast<size_t>(count) * row);
  return bytes;
}

/// Returns the number of rows of an operation's result. Call parts_of() first.
int64_t rows_of(const Operation& operation, const Entry& entry, int rank, int size) {
  const std::span<const int64_t> rows(operation.request.kind == Kind::Allgather ? entry.sizes
                                                                                : operation.received_splits);
  if (operation.request.kind == Kind::Reducescatter) return scattered_rows(operation.request.shape[0], rank, size);
  return std::reduce(rows.begin(), rows.end());
}

}  // namespace

DeviceParts parts_of(Operation& operation, const Entry& entry, int rank, int size) {
  const Request& request = operation.request;
  const size_t row = request.row_elements() * size_of(request.dtype);
  const auto ranks = static_cast<size_t>(size), own = static_cast<size_t>(rank);
  DeviceParts parts;
  parts.in = operation.input;
  if (request.kind == Kind::Allgather) {
    expect(entry.sizes.size() == ranks && entry.sizes[own] == request.shape[0]);
    parts.received = scaled(entry.sizes, row);
  } else if (request.kind == Kind::Alltoall) {
    expect(entry.sizes.size() == ranks * ranks);
    const std::span<const int64_t> sizes(entry.sizes);
    for (size_t peer = 0; peer < ranks; ++peer) operation.received_splits.push_back(sizes[peer * ranks + own]);
    parts.sent = scaled(sizes.subspan(own * ranks, ranks), row);
    parts.received = scaled(operation.received_splits, row);
    expect(std::reduce(parts.sent.begin(), parts.sent.end()) <= request.bytes());
  } else {
    for (int owner = 0; owner < size; ++owner)
      parts.sent.push_back(static_cast<size_t>(scattered_rows(request.shape[0], owner, size)) * row);
  }
  return parts;
}

void DeviceRun::enqueue(const Bucket& bucket, std::span<const OperationPtr> operations) {
  const Request& first = operations.front()->request;
  for (const OperationPtr& operation : operations) {
    if (operation->stands_in) {
      operation->side = std::make_shared<DeviceSide>();
      operation->side->device = &device_;
    }
    if (!operation->side) throw Error::internal("an operation for NCCL is in host memory");
    operation->side->is_begun = true;
  }
  follow(operations);
  const Reduction reduction = reduction_of(first, size_);
  if (first.kind == Kind::Allreduce) nccl_allreduce(comm_, stream_, pieces_of(operations), first.dtype, reduction);
  else if (first.kind == Kind::Broadcast) nccl_broadcast(comm_, stream_, pieces_of(operations), first.root);
  else if (first.kind == Kind::Allgather) nccl_allgather(comm_, stream_, placed(bucket, operations));
  else if (first.kind == Kind::Alltoall) nccl_alltoall(comm_, stream_, placed(bucket, operations));
  else nccl_reducescatter(comm_, stream_, placed(bucket, operations), first.dtype, reduction);
  const auto after = std::make_shared<const CudaMark>(device_.mark(stream_));
  for (const OperationPtr& operation : operations) operation->side->after = after;
}

/// Make the later work in the stream wait for the marks of the operations, once for each.
void DeviceRun::follow(std::span<const OperationPtr> operations) {
  std::vector<const CudaMark*> held;
  for (const OperationPtr& operation : operations)
    for (const auto& mark : operation->side->before) {
      if (std::ranges::find(held, mark.get()) != held.end()) continue;
      mark->hold(stream_);
      held.push_back(mark.get());
    }
}

/// Return the pieces of the operations. A joined rank contributes zeros, and ignores the result.
std::vector<Piece> DeviceRun::pieces_of(std::span<const OperationPtr> operations) {
  std::vector<Piece> pieces;
  for (const OperationPtr& operation : operations) {
    const size_t bytes = operation->request.bytes();
    if (!operation->stands_in) {
      pieces.push_back({operation->input, operation->output, bytes});
      continue;
    }
    if (bytes == 0) continue;
    DeviceMemory& memory = operation->side->result = DeviceMemory(device_, bytes, stream_);
    if (traits_of(operation->request.kind).reduces) device_.clear(memory.address(), bytes, stream_);
    pieces.push_back({memory.data(), memory.data(), bytes});
  }
  return pieces;
}

/// Return the parts of the operations, with memory for each result: that of the caller, else new device memory from
/// which the caller copies the result. If the caller's memory has the wrong size, the result is written to new memory
/// too, and is discarded, because the operation has failed on this rank only.
std::vector<DeviceParts> DeviceRun::placed(const Bucket& bucket, std::span<const OperationPtr> operations) {
  std::vector<DeviceParts> placed;
  for (size_t i = 0; i < operations.size(); ++i) {
    Operation& operation = *operations[i];
    const Entry& entry = bucket.entry_of(i);
    DeviceParts parts = parts_of(operation, entry, comm_.rank(), size_);
    const size_t bytes = size_result(operation, rows_of(operation, entry, comm_.rank(), size_));
    parts.out = operation.output;
    if ((operation.output == nullptr || operation.error) && bytes > 0) {
      operation.side->result = DeviceMemory(device_, bytes, stream_);
      parts.out = operation.side->result.data();
    }
    placed.push_back(std::move(parts));
  }
  return placed;
}

}  // namespace farandole
