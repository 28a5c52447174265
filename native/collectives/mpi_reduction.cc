#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>

#include "collectives/mpi_collectives.h"

namespace farandole {
namespace {

using Handle = MpiLibrary::Handle;

constexpr size_t kGatheredBelow = size_t{128} << 10;  // bytes of all inputs, up to which every rank gathers them
constexpr size_t kCopiedFrom = size_t{256} << 10;  // bytes from which inputs in place are copied, where that is faster
constexpr size_t kMostCopied = size_t{16} << 20;   // largest copy, in bytes
constexpr size_t kSegment = size_t{32} << 20;      // bytes that a rank receives in one step

template <DType dtype, ReduceOp op>
void combine(void* in, void* in_out, int* count, Handle* /*type*/) {
  const std::array<const void*, 2> sources{in_out, in};
  reduce(dtype, {op}, in_out, sources, static_cast<size_t>(*count));
}

struct OwnOperator {
  DType dtype;
  ReduceOp op;
  MpiLibrary::Operator* function;
};

template <DType dtype, ReduceOp op>
constexpr OwnOperator own() {
  return {dtype, op, &combine<dtype, op>};
}

// MPI's minimum of a NaN and a number may be the number. MPI has no 16-bit floats, and its bools are only 0 and 1. Open
// MPI's sums of 8-bit and 16-bit integers saturate instead of wrapping where it uses vector instructions.
constexpr std::array kOperators{
    own<DType::Float16, ReduceOp::Min>(),  own<DType::Float16, ReduceOp::Max>(), own<DType::BFloat16, ReduceOp::Min>(),
    own<DType::BFloat16, ReduceOp::Max>(), own<DType::Float32, ReduceOp::Min>(), own<DType::Float32, ReduceOp::Max>(),
    own<DType::Float64, ReduceOp::Min>(),  own<DType::Float64, ReduceOp::Max>(), own<DType::Bool, ReduceOp::Min>(),
    own<DType::Bool, ReduceOp::Max>(),     own<DType::Bool, ReduceOp::Sum>(),    own<DType::Bool, ReduceOp::Product>(),
    own<DType::UInt8, ReduceOp::Sum>(),    own<DType::Int8, ReduceOp::Sum>(),    own<DType::UInt16, ReduceOp::Sum>(),
    own<DType::Int16, ReduceOp::Sum>()};
static_assert(kOperators.size() <= MpiLibrary::kOwnOperators);

/// Returns whether `dtype` is float32 or float64. Their factors are applied in the same type, so they can be applied
/// before and after the reduction.
bool is_wide(DType dtype) { return dtype == DType::Float32 || dtype == DType::Float64; }

/// Returns the type for Sum and Product of `dtype`. It is unsigned for integers, because only unsigned ones may wrap.
DType wrapping(DType dtype) {
  switch (dtype) {
    case DType::Int8: return DType::UInt8;
    case DType::Int16: return DType::UInt16;
    case DType::Int32: return DType::UInt32;
    case DType::Int64: return DType::UInt64;
    default: return dtype;
  }
}

struct MpiReduction {
  Handle type;
  Handle op;
};

/// Returns the type and operator for MPI_Iallreduce; none if it would not give the results of reduce().
std::optional<MpiReduction> in_pairs(MpiLibrary& library, DType dtype, const Reduction& reduction) {
  const bool scales = reduction.prescale != 1 || reduction.postscale != 1 || reduction.op == ReduceOp::Average;
  if (scales && !is_wide(dtype)) return std::nullopt;
  for (size_t slot = 0; slot < kOperators.size(); ++slot)
    if (kOperators[slot].dtype == dtype && kOperators[slot].op == reduction.op)
      return MpiReduction{library.type_of(dtype), library.own_operator(slot, kOperators[slot].function)};
  if (dtype == DType::Float16 || dtype == DType::BFloat16) return std::nullopt;
  const bool wraps = reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Product;
  return MpiReduction{library.type_of(wraps ? wrapping(dtype) : dtype), library.operator_of(reduction.op)};
}

void reduce_one(DType dtype, const Reduction& reduction, const std::byte* in, std::byte* out, size_t count) {
  const std::array<const void*, 1> source{in};
  reduce(dtype, reduction, out, source, count);
}

/// Reduces one piece by MPI_Iallreduce.
void reduce_by_mpi(MpiMesh& mesh, const Piece& piece, DType dtype, const Reduction& reduction, MpiReduction by) {
  const size_t width = size_of(dtype);
  const size_t count = piece.bytes / width;
  const bool scaled = reduction.prescale != 1;
  if (scaled) reduce_one(dtype, {ReduceOp::Sum, reduction.prescale}, piece.in, piece.out, count);
  const bool in_place = scaled || piece.in == piece.out;
  const bool copied = in_place && mesh.library().is_slow_in_place && piece.bytes >= kCopiedFrom;
  const size_t most = copied ? kMostCopied : kMostMpiBytes;
  for (size_t done = 0; done < piece.bytes; done += most) {
    const size_t bytes = std::min(most, piece.bytes - done);
    const void* from = in_place ? mesh.library().in_place : piece.in + done;
    if (copied) from = std::memcpy(mesh.received(bytes), piece.out + done, bytes);
    mesh.start("MPI_Iallreduce", [&](Handle* request) {
      return mesh.library().iallreduce(from, piece.out + done, static_cast<int>(bytes / width), by.type, by.op,
                                       mesh.comm(), request);
    });
    mesh.finish(bytes);
  }
  if (reduction.postscale != 1 || reduction.divisor != 1)
    reduce_one(dtype, {reduction.op, 1, reduction.postscale, reduction.divisor}, piece.out, piece.out, count);
}

/// Gathers all inputs on every rank and reduces them. A direct exchange allocates no memory when it is repeated.
void reduce_gathered(MpiMesh& mesh, const Piece& piece, DType dtype, const Reduction& reduction) {
  const auto size = static_cast<size_t>(mesh.size());
  std::byte* slot = mesh.received(piece.bytes * size);
  auto& slots = mesh.slots();
  auto& sources = mesh.sources();
  slots.clear();
  sources.clear();
  for (size_t rank = 0; rank < size; ++rank, slot += piece.bytes) {
    slots.emplace_back(slot, piece.bytes);
    sources.push_back(slot);
  }
  if (mesh.is_direct()) {
    mesh.sent().assign(size, {piece.in, piece.bytes});
    mpi_exchange(mesh, mesh.sent(), slots);
    sources[static_cast<size_t>(mesh.rank())] = piece.in;
  } else {
    std::vector<std::byte*> out;
    for (const auto& each : slots) out.push_back(each.data());
    mpi_allgather(mesh, piece.in, out, std::vector<size_t>(size, piece.bytes));
  }
  reduce(dtype, reduction, piece.out, sources, piece.bytes / size_of(dtype));
}

/// Reduces one share per rank, then gathers the shares.
void reduce_shares(MpiMesh& mesh, const Piece& piece, DType dtype, const Reduction& reduction) {
  const auto size = static_cast<size_t>(mesh.size());
  const size_t width = size_of(dtype);
  const size_t count = piece.bytes / width;
  std::vector<size_t> counts;
  std::vector<size_t> bytes;
  std::vector<std::byte*> shares;
  std::byte* at = piece.out;
  for (size_t rank = 0; rank < size; at += bytes[rank++]) {
    counts.push_back(count / size + (rank < count % size ? 1 : 0));
    bytes.push_back(counts.back() * width);
    shares.push_back(at);
  }
  std::byte* own = shares[static_cast<size_t>(mesh.rank())];
  mpi_reducescatter(mesh, piece.in, own, counts, dtype, reduction);
  mpi_allgather(mesh, own, shares, bytes);
}

}  // namespace

const char* mpi_allreduce(MpiMesh& mesh, std::span<const Piece> pieces, DType dtype, const Reduction& reduction) {
  if (mesh.size() == 1) {
    for (const Piece& piece : pieces) reduce_one(dtype, reduction, piece.in, piece.out, piece.bytes / size_of(dtype));
    return "mpi";
  }
  const auto by = mesh.is_direct() ? std::nullopt : in_pairs(mesh.library(), dtype, reduction);
  const auto size = static_cast<size_t>(mesh.size());
  for_each_run(mesh, pieces, [&](const Piece& piece) {
    if (by) reduce_by_mpi(mesh, piece, dtype, reduction, *by);
    else if (piece.bytes * size <= kGatheredBelow) reduce_gathered(mesh, piece, dtype, reduction);
    else reduce_shares(mesh, piece, dtype, reduction);
  });
  return by ? "mpi allreduce" : "mpi shares";
}

void mpi_reducescatter(MpiMesh& mesh, const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                       const Reduction& reduction) {
  const size_t size = counts.size();
  const auto own = static_cast<size_t>(mesh.rank());
  const size_t width = size_of(dtype);
  const size_t step = std::max<size_t>(1, kSegment / width / size);
  std::vector<const std::byte*> share(size, in);
  for (size_t rank = 1; rank < size; ++rank) share[rank] = share[rank - 1] + counts[rank - 1] * width;
  const size_t longest = *std::ranges::max_element(counts);
  for (size_t done = 0; done < longest; done += step) {
    const auto part = [&](size_t rank) { return counts[rank] > done ? std::min(step, counts[rank] - done) : 0; };
    std::vector<std::span<const std::byte>> send;
    std::vector<std::span<std::byte>> receive;
    std::vector<const void*> sources;
    const size_t mine = part(own) * width;
    std::byte* slot = mesh.received(mine * size);
    for (size_t rank = 0; rank < size; ++rank, slot += mine) {
      send.emplace_back(share[rank] + (part(rank) > 0 ? done * width : 0), part(rank) * width);
      receive.emplace_back(slot, mine);
      sources.push_back(rank == own ? share[rank] + done * width : slot);
    }
    mpi_exchange(mesh, send, receive);
    if (mine > 0) reduce(dtype, reduction, out + done * width, sources, part(own));
  }
}

}  // namespace farandole
