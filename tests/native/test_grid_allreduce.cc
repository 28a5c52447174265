// Reductions over a grid of hosts: right for every type, operation, size and placement, and the same on all ranks.
#include <algorithm>
#include <random>

#include "collectives/grid_collectives.h"
#include "grid_ranks.h"
#include "link_elements.h"

namespace {

using namespace farandole;
using check::Elements;
using check::GridRanks;
using Bytes = std::vector<std::byte>;

// Hosts in blocks, in turns, and in no order.
const std::vector<std::vector<int>> kPlacements{
    {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 0}, {0, 0, 1, 1, 2, 2}, {0, 1, 2, 2, 1, 0, 0, 2, 1}};

std::string text_of(const std::vector<int>& hosts) {
  std::string text = "hosts";
  for (const int host : hosts) text += " " + std::to_string(host);
  return text;
}

/// Checks one bucket of pieces of the given numbers of elements.
void check_allreduce(GridRanks& ranks, DType dtype, const std::vector<size_t>& sizes, const Reduction& reduction,
                     bool in_place, const std::string& context) {
  const Elements elements(dtype);
  ranks.must_run(
      [&](GridMesh& mesh, int rank) {
        std::vector<Bytes> in, out, expected;
        std::vector<Piece> pieces;
        size_t first = 0;
        for (const size_t count : sizes) {
          in.push_back(elements.fill(rank, first, count));
          expected.push_back(elements.reduced(static_cast<int>(ranks.size()), first, count, reduction));
          out.emplace_back(in.back().size(), std::byte{0xEE});
          first += count;
        }
        for (size_t i = 0; i < sizes.size(); ++i)
          pieces.push_back({in[i].data(), in_place ? in[i].data() : out[i].data(), in[i].size()});
        const std::vector<Bytes> before = in;
        grid_allreduce(mesh, pieces, dtype, reduction);
        if (!in_place) check::that(in == before, "inputs are kept", context);
        check::that((in_place ? in : out) == expected, "reduced", context + ", rank " + std::to_string(rank));
      },
      context);
}

void every_type_and_operation() {
  for (const auto& hosts : kPlacements) {
    GridRanks ranks(hosts);
    const auto size = static_cast<int>(hosts.size());
    for (const DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16, DType::Int32,
                              DType::Int8, DType::UInt16, DType::Int64, DType::Bool}) {
      for (const Reduction& reduction :
           {Reduction{}, Reduction{ReduceOp::Average, 1, 1, size}, Reduction{ReduceOp::Min}, Reduction{ReduceOp::Max},
            Reduction{ReduceOp::Product}, Reduction{ReduceOp::Sum, 2, 3, 1}}) {
        const bool scaled = reduction.op == ReduceOp::Average || reduction.prescale != 1;
        if (dtype == DType::Bool && scaled) continue;
        // Thirds are rounded at both levels; another test checks them.
        if (size_of(dtype) == 2 && is_floating(dtype) && reduction.op == ReduceOp::Average && size != 4) continue;
        const std::string context = text_of(hosts) + " " + name_of(dtype) + " " + name_of(reduction.op);
        for (const size_t count : {1U, 1000U, check::kSlow ? 20'000U : 70'001U})
          check_allreduce(ranks, dtype, {count}, reduction, count % 2 == 0, context + " " + std::to_string(count));
      }
    }
  }
}

void sizes_and_fusion() {
  for (const auto& hosts : kPlacements) {
    for (const size_t slot : {8U << 10, 128U << 10}) {
      GridRanks ranks(hosts, slot);
      const std::string context = text_of(hosts) + ", slots of " + std::to_string(slot);
      for (const size_t count : {0U, 5U, 2048U, 4097U, 8192U, 16'384U, 100'003U, 1'000'000U}) {
        if (check::kSlow && count > 200'000) continue;
        check_allreduce(ranks, DType::Float32, {count}, {}, true, context + " " + std::to_string(count));
        check_allreduce(ranks, DType::Int8, {count}, {}, false, context + " " + std::to_string(count));
      }
      check_allreduce(ranks, DType::Float32, {0, 3, 100'000, 0, 1, 1, 65'536, 70'001, 0}, {}, false, context);
      check_allreduce(ranks, DType::Float32, std::vector<size_t>(300, 501), {}, true, context);
    }
  }
}

/// Two slots of 8 KiB are too small for a pipeline over so many hosts.
void more_hosts_than_slots_are_made_for() {
  std::vector<int> hosts;
  for (int host = 0; host < 9; ++host) hosts.insert(hosts.end(), {host, host});
  GridRanks ranks(hosts, 8 << 10);
  for (const size_t count : {1U, 30'000U, 100'001U}) {
    check_allreduce(ranks, DType::Float32, {count}, {}, false, "9 hosts");
    check_allreduce(ranks, DType::Float32, {count, 0, 7, count}, {}, true, "9 hosts");
  }
}

/// Results have the same bits on all ranks, alone or fused, few or many.
void the_same_bits_everywhere() {
  for (const auto& hosts : kPlacements) {
    GridRanks ranks(hosts);
    for (const DType dtype : {DType::Float32, DType::Float16, DType::BFloat16}) {
      constexpr size_t kCount = 60'000;
      std::vector<Bytes> small(ranks.size()), large(ranks.size());
      ranks.must_run(
          [&](GridMesh& mesh, int rank) {
            std::mt19937 random(static_cast<unsigned>(rank));
            Bytes data(kCount * size_of(dtype));
            for (size_t i = 0; i < kCount; ++i) {
              const float value = std::normal_distribution<float>()(random);
              const uint16_t half = dtype == DType::Float16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
              if (dtype == DType::Float32) std::memcpy(data.data() + i * 4, &value, 4);
              else std::memcpy(data.data() + i * 2, &half, 2);
            }
            const Reduction average{ReduceOp::Average, 0.5, 3, static_cast<int>(ranks.size())};
            const auto at = static_cast<size_t>(rank);
            small[at].resize(100);
            const Piece first{data.data(), small[at].data(), 100};
            grid_allreduce(mesh, {&first, 1}, dtype, average);
            const Piece all{data.data(), data.data(), data.size()};
            grid_allreduce(mesh, {&all, 1}, dtype, average);
            large[at] = std::move(data);
          },
          text_of(hosts));
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        check::that(large[rank] == large[0], "equal bits on all ranks", text_of(hosts));
        check::that(std::equal(small[rank].begin(), small[rank].end(), large[0].begin()), "equal bits for any size",
                    text_of(hosts));
      }
    }
  }
}

/// A host's sum of fp16 may overflow where the average does not.
void an_average_of_large_halves_is_finite() {
  GridRanks ranks({0, 0, 0, 1, 1, 1});
  for (const size_t count : {4U, 100'000U}) {
    ranks.must_run(
        [&](GridMesh& mesh, int) {
          std::vector<uint16_t> data(count, fp32_to_fp16(60'000));
          const Piece piece{reinterpret_cast<std::byte*>(data.data()), reinterpret_cast<std::byte*>(data.data()),
                            data.size() * 2};
          grid_allreduce(mesh, {&piece, 1}, DType::Float16, {ReduceOp::Average, 1, 1, 6});
          for (const uint16_t half : data) CHECK_EQ(half, fp32_to_fp16(60'000));
        },
        "large halves");
  }
}

void reducescatter() {
  for (const auto& hosts : kPlacements) {
    GridRanks ranks(hosts);
    const size_t size = hosts.size();
    for (const DType dtype : {DType::Float32, DType::Int32, DType::BFloat16}) {
      for (const size_t unit : {0U, 1U, 300U, 20'001U}) {
        for (const Reduction& reduction : {Reduction{}, Reduction{ReduceOp::Average, 1, 1, static_cast<int>(size)}}) {
          if (dtype == DType::BFloat16 && reduction.op == ReduceOp::Average) continue;
          std::vector<size_t> counts(size), starts(size + 1);
          for (size_t rank = 0; rank < size; ++rank) counts[rank] = rank % 3 == 1 ? 0 : unit + rank;
          for (size_t rank = 0; rank < size; ++rank) starts[rank + 1] = starts[rank] + counts[rank];
          const Elements elements(dtype);
          const std::string context = text_of(hosts) + " " + name_of(dtype) + " " + std::to_string(unit);
          ranks.must_run(
              [&](GridMesh& mesh, int rank) {
                const auto me = static_cast<size_t>(rank);
                const Bytes in = elements.fill(rank, 0, starts.back());
                Bytes out(counts[me] * size_of(dtype), std::byte{0xEE});
                grid_reducescatter(mesh, in.data(), out.data(), counts, dtype, reduction);
                check::that(out == elements.reduced(static_cast<int>(size), starts[me], counts[me], reduction),
                            "scattered", context);
              },
              context);
        }
      }
    }
  }
}

}  // namespace

int main() {
  every_type_and_operation();
  sizes_and_fusion();
  more_hosts_than_slots_are_made_for();
  the_same_bits_everywhere();
  an_average_of_large_halves_is_finite();
  reducescatter();
  return check::report();
}
