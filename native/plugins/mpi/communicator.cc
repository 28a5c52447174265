#include "plugins/mpi/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "engine/kinds.h"

namespace farandole::mpi {
namespace {

/// The outcome of a request, as a listener gets it.
struct Ended {
  std::string text;  // of the error

  [[nodiscard]] plugins::Listener listener() { return {&done, &allocate, this}; }
  void require_success() const {
    if (!text.empty()) throw Communicator::Failure{text};
  }

 private:
  static void done(void* cookie, const plugins::Outcome* outcome) noexcept {
    if (outcome->error >= 0) static_cast<Ended*>(cookie)->text = outcome->text;
  }
  static void* allocate(void*, size_t, const int64_t*, int32_t, size_t) noexcept { return nullptr; }
};

constexpr std::array<const char*, kDTypes> kTypeNames{"uint8",    "int8",    "int32",   "int64", "float16",
                                                      "bfloat16", "float32", "float64", "bool",  "int16",
                                                      "uint16",   "uint32",  "uint64"};
constexpr std::array<const char*, 6> kOpNames{"average", "sum", "adasum", "min", "max", "product"};

}  // namespace

Communicator::Communicator(const plugins::CoreTable& table, int32_t rank_id, int32_t process_set, uint32_t number,
                           std::vector<int32_t> ranks)
    : table_(&table), rank_id_(rank_id), process_set_(process_set), number_(number), ranks_(std::move(ranks)) {
  plugins::Place place{};
  if (table.find(rank_id, process_set, &place) != 0 || place.rank < 0) {
    failure_ = "this process is not a member of the communicator";
    return;
  }
  std::vector<int32_t> sorted = ranks_;
  std::ranges::sort(sorted);
  for (const int32_t rank : ranks_)
    places_.push_back(static_cast<size_t>(std::ranges::lower_bound(sorted, rank) - sorted.begin()));
  rank_ = static_cast<int>(std::ranges::find(places_, static_cast<size_t>(place.rank)) - places_.begin());
  if (std::ranges::is_sorted(places_)) places_.clear();
}

void Communicator::require_usable() const {
  if (!failure_.empty()) throw Failure{failure_};
}

void Communicator::run(int32_t kind, ReduceOp op, const void* input, void* output, size_t count, size_t room,
                       DType dtype) const {
  // Equal requests share a name, so that the ranks soon agree on them by number. JAX makes its calls in one order on
  // all ranks.
  const bool reduces = kKindTraits[static_cast<size_t>(kind)].reduces;
  std::string name = std::string("jax.") + kKindTraits[static_cast<size_t>(kind)].name + "." +
                     kTypeNames[static_cast<size_t>(dtype)] + "." + std::to_string(count);
  if (reduces) name += std::string(".") + kOpNames[static_cast<size_t>(op)];
  const auto rows = static_cast<int64_t>(count);
  const plugins::Tensor tensor{input, output, room, static_cast<int32_t>(dtype), 1, &rows};
  const plugins::Request request{.rank_id = rank_id_,
                                 .process_set = process_set_,
                                 .kind = kind,
                                 .op = static_cast<int32_t>(op),
                                 .root = 0,
                                 .grouped = false,
                                 .cacheable = true,
                                 .prescale = 1,
                                 .postscale = 1,
                                 .name = name.c_str(),
                                 .splits = nullptr,
                                 .splits_count = 0,
                                 .tensors = &tensor,
                                 .count = 1};
  Ended ended;
  const plugins::Listener listener = ended.listener();
  table_->run(&request, &listener);
  ended.require_success();
}

/// Copies the members' parts, of `bytes` each, from the process set's order to the communicator's, or back.
std::vector<std::byte> Communicator::in_order(const std::byte* parts, size_t bytes, bool of_set) const {
  std::vector<std::byte> moved(bytes * ranks_.size());
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const size_t from = of_set ? places_[rank] : rank, to = of_set ? rank : places_[rank];
    std::memcpy(moved.data() + to * bytes, parts + from * bytes, bytes);
  }
  return moved;
}

void Communicator::allreduce(const void* input, void* output, size_t count, Element element, ReduceOp op) const {
  require_usable();
  if (element.count > 1 && op != ReduceOp::Sum) throw Failure{"complex numbers can only be added"};
  const size_t elements = count * element.count;
  run(static_cast<int32_t>(Kind::Allreduce), op, input, output, elements, count * element.bytes(), element.dtype);
}

void Communicator::allgather(const void* input, void* output, size_t count, Element element) const {
  require_usable();
  const size_t bytes = count * element.bytes();
  run(static_cast<int32_t>(Kind::Allgather), ReduceOp::Sum, input, output, count * element.count, bytes * ranks_.size(),
      element.dtype);
  if (places_.empty()) return;
  const std::vector<std::byte> moved = in_order(static_cast<const std::byte*>(output), bytes, true);
  std::memcpy(output, moved.data(), moved.size());
}

void Communicator::reduce_scatter(const void* input, void* output, size_t count, Element element, ReduceOp op) const {
  require_usable();
  if (element.count > 1 && op != ReduceOp::Sum) throw Failure{"complex numbers can only be added"};
  const size_t bytes = count * element.bytes(), elements = count * element.count * ranks_.size();
  std::vector<std::byte> moved;
  if (!places_.empty()) {
    moved = in_order(static_cast<const std::byte*>(input), bytes, false);
    input = moved.data();
  }
  run(static_cast<int32_t>(Kind::Reducescatter), op, input, output, elements, bytes, element.dtype);
}

void* Communicator::post(bool sends, void* data, size_t bytes, int peer) const {
  require_usable();
  if (peer < 0 || peer >= size()) throw Failure{"the communicator has no rank " + std::to_string(peer)};
  const std::string name = std::string("jax.") + (sends ? "send" : "receive") + "." + std::to_string(bytes);
  const plugins::Message message{.rank_id = rank_id_,
                                 .sends = sends,
                                 .peer = ranks_[static_cast<size_t>(peer)],
                                 .tag = number_,
                                 .data = data,
                                 .bytes = bytes,
                                 .name = name.c_str()};
  Ended ended;
  const plugins::Listener listener = ended.listener();
  void* posted = table_->post(&message, &listener);
  ended.require_success();
  return posted;
}

void Communicator::finish(const plugins::CoreTable& table, void* posted) {
  Ended ended;
  const plugins::Listener listener = ended.listener();
  table.finish(posted, &listener);
  ended.require_success();
}

}  // namespace farandole::mpi
