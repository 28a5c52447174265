// Allreduce over links against an element-wise reference: sizes, types, operations, pieces, in place and not.
#include <cmath>
#include <cstdint>
#include <numeric>

#include "base/half.h"
#include "collectives/link_collectives.h"
#include "link_elements.h"
#include "link_ranks.h"

namespace {

using namespace farandole;
using check::Elements;
using check::Ranks;
using check::Wire;

struct Case {
  DType dtype = DType::Float32;
  Reduction reduction{};
  std::vector<size_t> pieces;  // elements
  bool in_place = false;
  Wire wire = Wire::Unix;
};

std::string text_of(const Case& c, int size) {
  const size_t elements = std::accumulate(c.pieces.begin(), c.pieces.end(), size_t{0});
  return std::string(name_of(c.dtype)) + " " + name_of(c.reduction.op) + " of " + std::to_string(elements) +
         " elements in " + std::to_string(c.pieces.size()) + " pieces, " + std::to_string(size) + " ranks over " +
         check::name_of(c.wire) + (c.in_place ? ", in place" : "");
}

/// One rank's tensors; each piece has its own allocation, so that an overrun is detected.
struct Tensors {
  std::vector<std::vector<std::byte>> in, out;
  std::vector<Piece> pieces;

  Tensors(const Case& c, int rank) {
    size_t first = 0;
    for (const size_t count : c.pieces) {
      in.push_back(Elements(c.dtype).fill(rank, first, count));
      out.emplace_back(c.in_place ? 0 : in.back().size(), std::byte{0xEE});
      first += count;
    }
    for (size_t i = 0; i < in.size(); ++i)
      pieces.push_back({in[i].data(), c.in_place ? in[i].data() : out[i].data(), in[i].size()});
  }
};

/// Under a sanitizer, run one case in three. No loop below has a length that would always skip the same cases.
bool has_its_turn() {
  static unsigned turn = 0;
  return !check::kSlow || turn++ % 3 == 0;
}

void check_case(Ranks& ranks, const Case& c) {
  if (!has_its_turn()) return;
  const std::string context = text_of(c, ranks.size());
  std::vector<std::vector<std::byte>> results(static_cast<size_t>(ranks.size()));
  ranks.must_run(
      [&](Mesh& mesh) {
        Tensors tensors(c, mesh.rank());
        link_allreduce(mesh, tensors.pieces, c.dtype, c.reduction);
        auto& result = results[static_cast<size_t>(mesh.rank())];
        for (const Piece& piece : tensors.pieces) result.insert(result.end(), piece.out, piece.out + piece.bytes);
        if (c.in_place) return;
        size_t first = 0;
        for (size_t i = 0; i < c.pieces.size(); first += c.pieces[i++])
          check::that(tensors.in[i] == Elements(c.dtype).fill(mesh.rank(), first, c.pieces[i]), "input kept", context);
      },
      context);
  const size_t elements = std::accumulate(c.pieces.begin(), c.pieces.end(), size_t{0});
  const auto expected = Elements(c.dtype).reduced(ranks.size(), 0, elements, c.reduction);
  for (const auto& result : results) check::that(result == expected, "result", context);
}

void all_types_and_operations() {
  for (const int size : check::kSizes) {
    if (size == 6 || size == 7) continue;
    Ranks ranks(size);
    for (int type = 0; type < kDTypes; ++type) {
      const auto dtype = static_cast<DType>(type);
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
        if (dtype == DType::Bool && op == ReduceOp::Average) continue;
        const Reduction reduction{op, 1, 1, size};
        check_case(ranks, {dtype, reduction, {37}, false});
        check_case(ranks, {dtype, reduction, {90'008 / size_of(dtype)}, true});
      }
    }
  }
}

void factors() {
  for (const int size : {1, 2, 3, 5}) {
    Ranks ranks(size);
    for (const DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16, DType::Int32})
      for (const size_t count : {5U, 40'003U})
        check_case(ranks, {dtype, Reduction{ReduceOp::Sum, 2, 4, 1}, {count}, true});
  }
}

void ragged_and_empty_sizes() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const int size : check::kSizes) {
      Ranks ranks(size, wire);
      for (const size_t count :
           {0U, 1U, 2U, 7U, 1024U, 2341U, 4096U, 8192U, 16'385U, 65'537U, check::kSlow ? 99'999U : 262'147U})
        for (const bool in_place : {false, true}) check_case(ranks, {DType::Float32, {}, {count}, in_place, wire});
      check_case(ranks, {DType::Int8, {}, {65'537}, true, wire});
    }
  }
}

void many_pieces() {
  std::vector<size_t> small(200, 1000);
  std::vector<size_t> mixed{0, 1, 0, 0, 70'000, 3, 65'536, 0, 17, 1, 1, 1, 200'003, 0, 5, 0};
  std::vector<size_t> single(3000, 1);
  for (const int size : check::kSizes) {
    Ranks ranks(size);
    for (const bool in_place : {false, true}) {
      for (const auto& pieces : {small, mixed, single}) check_case(ranks, {DType::Float32, {}, pieces, in_place});
      check_case(ranks, {DType::Int8, {}, {1, 2, 3, 4, 5, 60'000, 7}, in_place});
      check_case(ranks, {DType::Float32, {}, {0, 3, 0, 5}, in_place});
      check_case(ranks, {DType::Float32, {}, {0, 0}, in_place});
      check_case(ranks, {DType::Float32, {}, {}, in_place});
    }
  }
}

void large() {
  const size_t many = check::kSlow ? 1 << 19 : 1 << 22;
  for (const int size : {2, 3, 4}) {
    Ranks ranks(size, Wire::Tcp);
    for (const bool in_place : {false, true}) {
      check_case(ranks, {DType::Float32, {}, {many + 13}, in_place, Wire::Tcp});
      check_case(ranks, {DType::Float16, {}, {many / 2, many / 5 + 1}, in_place, Wire::Tcp});
    }
  }
}

void many_ranks_gather_by_doubling() {
  for (const int size : {9, 13}) {
    Ranks ranks(size);
    for (const size_t count : {1U, 501U, 20'000U}) {
      check_case(ranks, {DType::Float32, {}, {count}, true});
      check_case(ranks, {DType::Float16, {}, {count, 3}, false});
    }
  }
}

/// With these values the order of additions shows: all ranks agree bit for bit, and add in rank order.
void floats_are_added_in_rank_order() {
  for (const int size : {2, 3, 5, 8}) {
    Ranks ranks(size);
    for (const size_t count : {11U, 40'001U}) {
      const auto value = [](int rank, size_t i) {
        return static_cast<float>(std::sin(static_cast<double>(i * 17 + static_cast<size_t>(rank))) *
                                  std::pow(10.0, static_cast<double>((i + static_cast<size_t>(rank) * 5) % 9)));
      };
      std::vector<std::vector<float>> wide(static_cast<size_t>(size));
      std::vector<std::vector<uint16_t>> narrow(static_cast<size_t>(size));
      ranks.must_run([&](Mesh& mesh) {
        auto& mine = wide[static_cast<size_t>(mesh.rank())];
        auto& halves = narrow[static_cast<size_t>(mesh.rank())];
        for (size_t i = 0; i < count; ++i) {
          mine.push_back(value(mesh.rank(), i));
          halves.push_back(fp32_to_bf16(mine.back()));
        }
        const auto piece = [](auto& data) {
          auto* bytes = reinterpret_cast<std::byte*>(data.data());
          return Piece{bytes, bytes, data.size() * sizeof(data[0])};
        };
        const Piece first = piece(mine);
        const Piece second = piece(halves);
        link_allreduce(mesh, {&first, 1}, DType::Float32, {});
        link_allreduce(mesh, {&second, 1}, DType::BFloat16, {});
      });
      for (size_t i = 0; i < count; ++i) {
        float sum = value(0, i);
        float of_halves = bf16_to_fp32(fp32_to_bf16(sum));
        for (int rank = 1; rank < size; ++rank) {
          sum += value(rank, i);
          of_halves += bf16_to_fp32(fp32_to_bf16(value(rank, i)));
        }
        for (size_t rank = 0; rank < wide.size(); ++rank) {
          CHECK_EQ(wide[rank][i], sum);
          CHECK_EQ(narrow[rank][i], fp32_to_bf16(of_halves));
        }
      }
    }
  }
}

/// Operations follow each other on the same links without synchronization.
void back_to_back() {
  Ranks ranks(3, Wire::Tcp);
  ranks.must_run([](Mesh& mesh) {
    for (size_t round = 0; round < 300; ++round) {
      const size_t count = round % 7 == 0 ? 50'000 + round : round % 11;
      auto data = Elements(DType::Int32).fill(mesh.rank(), round, count);
      const Piece piece{data.data(), data.data(), data.size()};
      link_allreduce(mesh, {&piece, 1}, DType::Int32, {});
      CHECK(data == Elements(DType::Int32).reduced(mesh.size(), round, count, {}));
    }
  });
}

}  // namespace

int main() {
  all_types_and_operations();
  factors();
  ragged_and_empty_sizes();
  many_pieces();
  large();
  many_ranks_gather_by_doubling();
  floats_are_added_in_rank_order();
  back_to_back();
  return check::report();
}
