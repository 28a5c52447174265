#include "collectives/nccl_collectives.h"

#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/half.h"

namespace farandole {
namespace {

/// Returns the one factor that NCCL has to apply to the inputs of a sum.
double factor_of(const Reduction& reduction) { return reduction.prescale * reduction.postscale / reduction.divisor; }

bool sums(const Reduction& reduction) { return reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Average; }

/// An operator of NCCL for as long as calls need it.
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

/// Runs `call` for each piece that has bytes, as a group.
template <class Call>
void group(NcclComm& comm, std::span<const Piece> pieces, Call call) {
  comm.group([&] {
    for (const Piece& piece : pieces) {
      const int code = piece.bytes > 0 ? call(piece) : NcclLibrary::kSuccess;
      if (code != NcclLibrary::kSuccess && code != NcclLibrary::kInProgress) return code;
    }
    return NcclLibrary::kSuccess;
  });
}

}  // namespace

bool nccl_reduces(DType dtype, const Reduction& reduction) {
  if (reduction.op == ReduceOp::Adasum) return false;
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
  const int type = NcclLibrary::type_of(DType::UInt8);
  group(comm, pieces, [&](const Piece& piece) {
    return comm.library().broadcast(piece.in, piece.out, piece.bytes, type, root, comm.handle(), stream);
  });
}

}  // namespace farandole
