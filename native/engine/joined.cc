#include "engine/joined.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>

namespace farandole {
namespace {

/// Unwritten pages cost no memory.
std::shared_ptr<std::byte> zeros(size_t bytes) {
  auto* memory = static_cast<std::byte*>(std::calloc(bytes > 0 ? bytes : 1, 1));
  if (memory == nullptr)
    throw Error::internal("no memory for the " + std::to_string(bytes) + " bytes of a joined rank's part");
  return {memory, [](std::byte* held) { std::free(held); }};
}

template <class T>
T neutral(ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  if (op == ReduceOp::Product) return T{1};
  if constexpr (Limits::has_infinity) return op == ReduceOp::Min ? Limits::infinity() : -Limits::infinity();
  else return op == ReduceOp::Min ? Limits::max() : Limits::lowest();
}

template <class T>
void fill(std::byte* to, size_t count, T value) {
  auto* values = reinterpret_cast<T*>(to);
  std::fill(values, values + count, value);
}

/// The bits of 1, infinity and minus infinity.
uint16_t half(ReduceOp op, uint16_t one, uint16_t infinity) {
  if (op == ReduceOp::Product) return one;
  return op == ReduceOp::Min ? infinity : static_cast<uint16_t>(infinity | 0x8000);
}

void fill_neutral(const Request& request, std::byte* to) {
  const ReduceOp op = request.op;
  if (op != ReduceOp::Min && op != ReduceOp::Max && op != ReduceOp::Product) return;
  const size_t count = request.elements();
  switch (request.dtype) {
    case DType::UInt8: return fill(to, count, neutral<uint8_t>(op));
    case DType::Int8: return fill(to, count, neutral<int8_t>(op));
    case DType::Int16: return fill(to, count, neutral<int16_t>(op));
    case DType::UInt16: return fill(to, count, neutral<uint16_t>(op));
    case DType::Int32: return fill(to, count, neutral<int32_t>(op));
    case DType::UInt32: return fill(to, count, neutral<uint32_t>(op));
    case DType::Int64: return fill(to, count, neutral<int64_t>(op));
    case DType::UInt64: return fill(to, count, neutral<uint64_t>(op));
    case DType::Float32: return fill(to, count, neutral<float>(op));
    case DType::Float64: return fill(to, count, neutral<double>(op));
    case DType::Float16: return fill(to, count, half(op, 0x3c00, 0x7c00));
    case DType::BFloat16: return fill(to, count, half(op, 0x3f80, 0x7f80));
    case DType::Bool: return fill(to, count, static_cast<uint8_t>(op == ReduceOp::Max ? 0 : 1));
  }
}

}  // namespace

std::vector<int> Joined::missing() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < ranks_.size(); ++rank)
    if (!ranks_[rank]) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

void Joined::add(int rank) {
  if (ranks_[static_cast<size_t>(rank)]) throw Error::internal("rank " + std::to_string(rank) + " joined twice");
  ranks_[static_cast<size_t>(rank)] = true;
  ++count_;
  last_ = rank;
}

void Joined::clear() {
  ranks_.assign(ranks_.size(), false);
  count_ = 0;
}

std::optional<Error> impossible_with_joined(const std::vector<std::optional<Request>>& asked,
                                            const std::vector<int>& members) {
  const Request* request = nullptr;
  for (const auto& each : asked)
    if (each) request = &*each;
  const KindTraits& traits = traits_of(request->kind);
  const auto refused = [&](const std::string& why) {
    std::string kind = traits.name;
    kind[0] = static_cast<char>(std::toupper(kind[0]));
    return Error::joined(request->name, kind + " is not supported with Join at this time: " + why +
                                            "; ask for it before any rank calls join()");
  };
  for (size_t rank = 0; rank < asked.size(); ++rank) {
    if (asked[rank]) continue;
    const std::string who = "rank " + std::to_string(job_rank(static_cast<int>(rank), members)) + " has joined";
    if (traits.joined == JoinedPart::Refused) return refused(who + " and would not keep its rows");
    if (traits.has_root && static_cast<size_t>(request->root) == rank) return refused(who + " and is the root");
    if (!traits.has_splits) continue;
    for (const auto& each : asked)
      if (each && each->splits[rank] != 0) return refused(who + " and would not keep the rows sent to it");
  }
  return std::nullopt;
}

OperationPtr stand_in(const Request& request, int size) {
  auto operation = std::make_shared<Operation>();
  operation->request = request;
  operation->stands_in = true;
  const KindTraits& traits = traits_of(request.kind);
  switch (traits.joined) {
    case JoinedPart::Zeros:
    case JoinedPart::Neutral: {
      auto memory = zeros(request.bytes());
      operation->input = operation->output = memory.get();
      if (traits.joined == JoinedPart::Neutral) fill_neutral(request, memory.get());
      operation->keep = std::move(memory);
      break;
    }
    case JoinedPart::NoRows:
      operation->request.shape[0] = 0;
      if (traits.has_splits) operation->request.splits.assign(static_cast<size_t>(size), 0);
      break;
    case JoinedPart::NoTensor: break;
    case JoinedPart::Refused: throw Error::internal("the plan has a joined rank take part in " + request.name);
  }
  return operation;
}

}  // namespace farandole
