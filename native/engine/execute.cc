#include "engine/execute.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/int8_blocks.h"
#include "collectives/adasum.h"
#include "collectives/int8.h"

namespace farandole {
namespace {

/// Returns whether ranks scale their inputs before the reduction if a rank has joined. For Min, Max and Product a
/// joined rank contributes the neutral value, which a factor would change: the least value times -2 is the largest.
bool scales_first(const Request& request) {
  const bool sums = request.op == ReduceOp::Sum || averages(request.op) || !is_elementwise(request.op);
  return request.prescale != 1 && (!sums || !std::isfinite(request.prescale));
}

/// Writes the scaled inputs to the outputs, and returns the pieces in place.
std::vector<Piece> scaled_pieces_of(std::span<const OperationPtr> operations) {
  std::vector<Piece> pieces;
  for (const OperationPtr& each : operations) {
    const Request& request = each->request;
    if (!each->stands_in) {
      if (each->output != each->input && request.bytes() > 0) std::memcpy(each->output, each->input, request.bytes());
      scale(request.dtype, request.prescale, each->output, request.elements());
    }
    pieces.push_back({each->output, each->output, request.bytes()});
  }
  return pieces;
}

std::vector<Piece> pieces_of(std::span<const OperationPtr> operations) {
  std::vector<Piece> pieces;
  pieces.reserve(operations.size());
  for (const OperationPtr& each : operations) pieces.push_back({each->input, each->output, each->request.bytes()});
  return pieces;
}

/// Sets and returns the operation's output: the caller's, or memory of the pool for `rows` rows of the request's shape.
std::byte* result_of(Operation& operation, int64_t rows, ResultPool& pool) {
  const size_t bytes = size_result(operation, rows);
  if (operation.output != nullptr && !operation.error) return operation.output;
  if (operation.output == nullptr && operation.listener.allocate != nullptr)
    if (std::byte* given = operation.listener.allocate(operation.listener.cookie, operation, bytes)) return given;
  return operation.result.emplace(pool.take(bytes)).data();
}

const char* allreduce(World& world, int rank, int size, const Bucket& bucket,
                      std::span<const OperationPtr> operations) {
  const Request& first = operations[0]->request;
  // An operation agreed in the lane has no entries, and no rank has joined.
  const bool scaled = !bucket.entries.empty() && bucket.entries[0].request && scales_first(first);
  const std::vector<Piece> pieces = scaled ? scaled_pieces_of(operations) : pieces_of(operations);
  Reduction reduction = reduction_of(first, size);
  if (scaled) reduction.prescale = 1;
  if (is_elementwise(first.op)) return world.allreduce(pieces, first.dtype, reduction);
  if (is_int8(first.op)) return int8_allreduce(world, rank, size, pieces, reduction);
  adasum(world, rank, size, pieces, first.dtype, reduction.prescale, reduction.postscale);
  return "adasum";
}

class Execution {
 public:
  Execution(World& world, ResultPool& pool, int rank, int size, const Entry& entry, Operation& operation)
      : world_(world),
        pool_(pool),
        rank_(static_cast<size_t>(rank)),
        size_(static_cast<size_t>(size)),
        entry_(entry),
        operation_(operation),
        row_(operation.request.row_elements() * size_of(operation.request.dtype)) {}

  const char* allgather() {
    expect(entry_.sizes.size() == size_ && entry_.sizes[rank_] == operation_.request.shape[0]);
    const int64_t rows = std::accumulate(entry_.sizes.begin(), entry_.sizes.end(), int64_t{0});
    std::byte* at = result_of(operation_, rows, pool_);
    std::vector<std::byte*> out(size_);
    std::vector<size_t> bytes(size_);
    for (size_t peer = 0; peer < size_; at += bytes[peer++]) {
      out[peer] = at;
      bytes[peer] = static_cast<size_t>(entry_.sizes[peer]) * row_;
    }
    return world_.allgather(operation_.input, out, bytes);
  }

  const char* alltoall() {
    expect(entry_.sizes.size() == size_ * size_);
    const Shares shares = [this](int from, int to) {
      return static_cast<size_t>(entry_.sizes[static_cast<size_t>(from) * size_ + static_cast<size_t>(to)]) * row_;
    };
    std::vector<const std::byte*> in(size_);
    std::vector<std::byte*> out(size_);
    int64_t rows = 0;
    for (size_t peer = 0; peer < size_; ++peer) {
      operation_.received_splits.push_back(entry_.sizes[peer * size_ + rank_]);
      rows += operation_.received_splits.back();
    }
    std::byte* to = result_of(operation_, rows, pool_);
    const std::byte* from = operation_.input;
    for (size_t peer = 0; peer < size_; ++peer) {
      in[peer] = from;
      from += shares(static_cast<int>(rank_), static_cast<int>(peer));
      out[peer] = to;
      to += shares(static_cast<int>(peer), static_cast<int>(rank_));
    }
    expect(static_cast<size_t>(from - operation_.input) <= operation_.request.bytes());
    return world_.alltoall(in, out, shares);
  }

  const char* reducescatter() {
    const Request& request = operation_.request;
    std::vector<size_t> counts(size_);
    const auto size = static_cast<int>(size_);
    for (int owner = 0; owner < size; ++owner)
      counts[static_cast<size_t>(owner)] =
          static_cast<size_t>(scattered_rows(request.shape[0], owner, size)) * request.row_elements();
    std::byte* out = result_of(operation_, scattered_rows(request.shape[0], static_cast<int>(rank_), size), pool_);
    return world_.reducescatter(operation_.input, out, counts, request.dtype, reduction_of(request, size));
  }

 private:
  static void expect(bool fits) {
    if (!fits) throw Error::internal("a plan does not match its operation");
  }

  World& world_;
  ResultPool& pool_;
  size_t rank_, size_;
  const Entry& entry_;
  Operation& operation_;
  size_t row_;  // bytes
};

}  // namespace

Reduction reduction_of(const Request& request, int size) {
  return {request.op, request.prescale, request.postscale, averages(request.op) ? size : 1};
}

size_t size_result(Operation& operation, int64_t rows) {
  operation.result_shape = operation.request.shape;
  operation.result_shape[0] = rows;
  const size_t bytes = static_cast<size_t>(rows) * operation.request.row_elements() * size_of(operation.request.dtype);
  if (operation.output != nullptr && operation.room != bytes)
    operation.error =
        Error::invalid(operation.request.name, "the result has " + std::to_string(bytes) + " bytes and the output " +
                                                   std::to_string(operation.room) + "; give one of the result's size");
  return bytes;
}

int64_t scattered_rows(int64_t rows, int owner, int size) { return rows / size + (owner < rows % size ? 1 : 0); }

const char* execute(World& world, ResultPool& pool, int rank, int size, const Bucket& bucket,
                    std::span<const OperationPtr> operations) {
  for (const OperationPtr& each : operations)
    if (each->request.kind != bucket.kind) throw Error::internal("a plan does not match its operation");
  const Request& first = operations[0]->request;
  switch (bucket.kind) {
    case Kind::Allreduce: return allreduce(world, rank, size, bucket, operations);
    case Kind::Broadcast: return world.broadcast(pieces_of(operations), first.root);
    case Kind::Barrier: return "nothing";  // all ranks have requested it, or there would be no plan
    case Kind::Join:
      if (bucket.entries[0].sizes.size() != 1) throw Error::internal("a plan does not name the rank that joined last");
      operations[0]->last_joined = static_cast<int>(bucket.entries[0].sizes[0]);
      return "nothing";
    default: break;
  }
  const char* ran = "nothing";
  for (size_t i = 0; i < operations.size(); ++i) {
    const Entry& entry = bucket.entry_of(i);
    Execution execution(world, pool, rank, size, entry, *operations[i]);
    if (bucket.kind == Kind::Allgather) ran = execution.allgather();
    else if (bucket.kind == Kind::Alltoall) ran = execution.alltoall();
    else ran = execution.reducescatter();
  }
  return ran;
}

}  // namespace farandole
