#include "collectives/nccl_collectives.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/half.h"
#include "base/int8_blocks.h"

namespace farandole {
namespace {

/// Returns the single factor to apply to the inputs of a sum.
double factor_of(const Reduction& reduction) { return reduction.prescale * reduction.postscale / reduction.divisor; }

bool sums(const Reduction& reduction) { return reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Average; }

/// Owner of an NCCL operator. It must live until the calls that use the operator have returned.
class Operator {
 public:
  Operator(NcclComm& comm, DType dtype, const Reduction& reduction) : comm_(comm) {
    const double factor = factor_of(reduction);
    if (!sums(reduction) || factor == 1) {
      number_ = NcclLibrary::operator_of(sums(reduction) ? ReduceOp::Sum : reduction.op);
      return;
    }
    std::array<std::byte, 8> written{};
    const auto write = [&](auto value) { std::memcpy(written.data(), &value, sizeof value); };
    if (dtype == DType::Float64) write(factor);
    else if (dtype == DType::Float32) write(static_cast<float>(factor));
    else if (dtype == DType::Float16) write(fp32_to_fp16(static_cast<float>(factor)));
    else write(fp32_to_bf16(static_cast<float>(factor)));
    comm_.require("ncclRedOpCreatePreMulSum",
                  comm_.library().red_op_create_pre_mul_sum(&number_, written.data(), NcclLibrary::type_of(dtype),
                                                            NcclLibrary::kImmediate, comm_.handle()));
    made_ = true;
  }
  ~Operator() {
    if (made_ && !comm_.is_aborted()) comm_.library().red_op_destroy(number_, comm_.handle());
  }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  [[nodiscard]] int number() const { return number_; }

 private:
  NcclComm& comm_;
  int number_ = 0;
  bool made_ = false;
};

/// The first failure of several calls.
class FirstFailure {
 public:
  /// Makes `call` unless one has failed before.
  template <class Call>
  void then(Call call) {
    if (code_ == NcclLibrary::kSuccess || code_ == NcclLibrary::kInProgress) code_ = call();
  }
  [[nodiscard]] int code() const { return code_; }

 private:
  int code_ = NcclLibrary::kSuccess;
};

/// Runs `call` for each piece that has bytes, as a group.
template <class Call>
void group(NcclComm& comm, std::span<const Piece> pieces, Call call) {
  comm.group([&] {
    FirstFailure failure;
    for (const Piece& piece : pieces)
      if (piece.bytes > 0) failure.then([&] { return call(piece); });
    return failure.code();
  });
}

/// Runs calls as a group: `even` for each tensor of equal parts, and `each` for each non-empty part of other tensors.
/// `each` receives the rank of the part, and the bytes of the parts before it.
template <class Even, class Each>
void group(NcclComm& comm, std::span<const DeviceParts> tensors, std::vector<size_t> DeviceParts::* sizes, Even even,
           Each each) {
  comm.group([&] {
    FirstFailure failure;
    for (const DeviceParts& tensor : tensors) {
      const std::vector<size_t>& parts = tensor.*sizes;
      if (std::ranges::all_of(parts, [&](size_t bytes) { return bytes == parts[0]; })) {
        if (parts[0] > 0) failure.then([&] { return even(tensor, parts[0]); });
        continue;
      }
      size_t before = 0;
      for (size_t rank = 0; rank < parts.size(); before += parts[rank++])
        if (parts[rank] > 0) failure.then([&] { return each(tensor, static_cast<int>(rank), before); });
    }
    return failure.code();
  });
}

constexpr auto kBytes = DType::UInt8;

}  // namespace

bool nccl_reduces(DType dtype, const Reduction& reduction) {
  if (!is_elementwise(reduction.op)) return false;
  if (is_floating(dtype)) {
    // A factor that the type cannot hold would change the result by more than rounding.
    const double least = dtype == DType::Float16 ? 0x1p-14 : 0x1p-126;
    const double most = dtype == DType::Float16 ? 65504 : 0x1p127;
    const double factor = std::abs(factor_of(reduction));
    if (sums(reduction)) return factor >= least && factor <= most;
    return reduction.op == ReduceOp::Product && reduction.prescale == 1 && reduction.postscale == 1;
  }
  if (dtype == DType::Bool || dtype == DType::Int16 || dtype == DType::UInt16) return false;
  return reduction.op != ReduceOp::Average && reduction.prescale == 1 && reduction.postscale == 1;
}

void nccl_allreduce(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, DType dtype,
                    const Reduction& reduction) {
  const Operator by(comm, dtype, reduction);
  group(comm, pieces, [&](const Piece& piece) {
    return comm.library().all_reduce(piece.in, piece.out, piece.bytes / size_of(dtype), NcclLibrary::type_of(dtype),
                                     by.number(), comm.handle(), stream);
  });
}

void nccl_broadcast(NcclComm& comm, NcclLibrary::Stream stream, std::span<const Piece> pieces, int root) {
  const int type = NcclLibrary::type_of(kBytes);
  group(comm, pieces, [&](const Piece& piece) {
    return comm.library().broadcast(piece.in, piece.out, piece.bytes, type, root, comm.handle(), stream);
  });
}

void nccl_allgather(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors) {
  const NcclLibrary& library = comm.library();
  const int type = NcclLibrary::type_of(kBytes);
  group(
      comm, tensors, &DeviceParts::received,
      [&](const DeviceParts& tensor, size_t bytes) {
        return library.all_gather(tensor.in, tensor.out, bytes, type, comm.handle(), stream);
      },
      [&](const DeviceParts& tensor, int root, size_t before) {
        std::byte* to = tensor.out + before;
        return library.broadcast(root == comm.rank() ? tensor.in : to, to, tensor.received[static_cast<size_t>(root)],
                                 type, root, comm.handle(), stream);
      });
}

void nccl_reducescatter(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors, DType dtype,
                        const Reduction& reduction) {
  const NcclLibrary& library = comm.library();
  const Operator by(comm, dtype, reduction);
  const int type = NcclLibrary::type_of(dtype);
  const size_t width = size_of(dtype);
  group(
      comm, tensors, &DeviceParts::sent,
      [&](const DeviceParts& tensor, size_t bytes) {
        return library.reduce_scatter(tensor.in, tensor.out, bytes / width, type, by.number(), comm.handle(), stream);
      },
      [&](const DeviceParts& tensor, int root, size_t before) {
        std::byte* to = root == comm.rank() ? tensor.out : nullptr;  // the others need none
        return library.reduce(tensor.in + before, to, tensor.sent[static_cast<size_t>(root)] / width, type, by.number(),
                              root, comm.handle(), stream);
      });
}

void nccl_alltoall(NcclComm& comm, NcclLibrary::Stream stream, std::span<const DeviceParts> tensors) {
  const NcclLibrary& library = comm.library();
  const int type = NcclLibrary::type_of(kBytes);
  comm.group([&] {
    FirstFailure failure;
    for (const DeviceParts& tensor : tensors) {
      const std::byte* from = tensor.in;
      std::byte* to = tensor.out;
      for (size_t rank = 0; rank < tensor.sent.size(); ++rank) {
        const int peer = static_cast<int>(rank);
        const size_t sent = tensor.sent[rank], received = tensor.received[rank];
        if (sent > 0) failure.then([&] { return library.send(from, sent, type, peer, comm.handle(), stream); });
        if (received > 0) failure.then([&] { return library.recv(to, received, type, peer, comm.handle(), stream); });
        from += sent;
        to += received;
      }
    }
    return failure.code();
  });
}

}  // namespace farandole
