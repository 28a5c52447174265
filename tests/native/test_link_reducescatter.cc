// Reduce-scatter over links against an element-wise reference.
#include <numeric>

#include "collectives/link_collectives.h"
#include "link_elements.h"
#include "link_ranks.h"

namespace {

using namespace farandole;
using check::Elements;
using check::Ranks;
using check::Wire;

void check_case(Ranks& ranks, DType dtype, const Reduction& reduction, const std::vector<size_t>& counts,
                bool in_place) {
  const std::string context = std::string(name_of(dtype)) + " " + name_of(reduction.op) + ", " +
                              std::to_string(ranks.size()) + " ranks, first count " + std::to_string(counts[0]);
  const size_t total = std::accumulate(counts.begin(), counts.end(), size_t{0});
  ranks.must_run(
      [&](Mesh& mesh) {
        const auto me = static_cast<size_t>(mesh.rank());
        const size_t first = std::accumulate(counts.begin(), counts.begin() + mesh.rank(), size_t{0});
        auto in = Elements(dtype).fill(mesh.rank(), 0, total);
        std::vector<std::byte> out(in_place ? 0 : counts[me] * size_of(dtype), std::byte{0xEE});
        std::byte* to = in_place ? in.data() + first * size_of(dtype) : out.data();
        link_reducescatter(mesh, in.data(), to, counts, dtype, reduction);
        const auto expected = Elements(dtype).reduced(mesh.size(), first, counts[me], reduction);
        check::that(expected.empty() || std::memcmp(to, expected.data(), expected.size()) == 0, "result", context);
        if (!in_place) check::that(in == Elements(dtype).fill(mesh.rank(), 0, total), "input kept", context);
      },
      context);
}

std::vector<size_t> split(size_t total, int size) {
  std::vector<size_t> counts(static_cast<size_t>(size), total / static_cast<size_t>(size));
  for (size_t i = 0; i < total % static_cast<size_t>(size); ++i) ++counts[i];
  return counts;
}

void even_splits() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const int size : check::kSizes) {
      Ranks ranks(size, wire);
      for (const size_t total : {0U, 1U, 3U, 8U, 1000U, 40'001U, check::kSlow ? 100'001U : 700'007U})
        for (const bool in_place : {false, true}) check_case(ranks, DType::Float32, {}, split(total, size), in_place);
    }
  }
}

void ragged_splits() {
  Ranks ranks(4);
  for (const auto& counts : std::vector<std::vector<size_t>>{
           {0, 0, 0, 1}, {5, 0, 7, 0}, {300'001, 0, 1, 17}, {0, 65'536, 65'537, 200'000}, {1, 1, 400'000, 1}})
    for (const bool in_place : {false, true}) check_case(ranks, DType::Float32, {}, counts, in_place);
}

void all_types_and_operations() {
  for (const int size : {1, 2, 3, 8}) {
    Ranks ranks(size);
    for (int type = 0; type < kDTypes; ++type) {
      const auto dtype = static_cast<DType>(type);
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product})
        if (dtype != DType::Bool || op != ReduceOp::Average)
          check_case(ranks, dtype, Reduction{op, 1, 1, size}, split(20'011, size), false);
    }
    check_case(ranks, DType::Float16, Reduction{ReduceOp::Sum, 2, 0.5, 1}, split(20'011, size), false);
  }
}

void large() {
  Ranks ranks(2, Wire::Tcp);
  check_case(ranks, DType::Float32, {}, split(check::kSlow ? 1 << 19 : 1 << 22, 2), false);
}

}  // namespace

int main() {
  even_splits();
  ragged_splits();
  all_types_and_operations();
  large();
  return check::report();
}
