// Blocks of int8: error bound, values that are not finite, equal bits at every SIMD level; and the allreduce by them
// over several wirings.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/int8_blocks.h"
#include "base/reduce.h"
#include "check.h"
#include "engine_ranks.h"

using namespace ranks;
using namespace farandole;

namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();
const std::vector<size_t> kCounts = {0, 1, 3, 17, 255, 256, 257, 700, 5'003};
const std::vector<std::vector<int>> kWorlds = {{0},       {0, 0},       {0, 0, 0},      {0, 1},
                                               {0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1, 1, 1}};

std::vector<float> normal_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.1F);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

std::vector<float> round_trip(const std::vector<float>& values) {
  std::vector<std::byte> blocks(int8_bytes(values.size()));
  quantise(values, blocks.data());
  std::vector<float> back(values.size(), 9);
  dequantise(blocks.data(), back);
  return back;
}

/// Half a step of the block that holds value `at`, and a little for rounding in float32.
float bound(const std::vector<float>& values, size_t at) {
  float peak = 0;
  const size_t begin = at / kInt8Block * kInt8Block;
  for (size_t i = begin; i < std::min(begin + kInt8Block, values.size()); ++i)
    peak = std::max(peak, std::abs(values[i]));
  return peak * (0.5001F / 127);
}

void errors_are_within_half_a_step() {
  for (const float scale : {1e-28F, 1.0F, 3e38F / 6})
    for (const size_t count : kCounts) {
      std::vector<float> values = normal_values(count, static_cast<unsigned>(count));
      for (float& value : values) value *= scale;
      const std::vector<float> back = round_trip(values);
      for (size_t i = 0; i < count; ++i)
        check::that(std::abs(back[i] - values[i]) <= bound(values, i), "the error is small", std::to_string(i));
    }
  const std::vector<float> largest(3, std::numeric_limits<float>::max());
  for (const float value : round_trip(largest)) check::that(std::isfinite(value), "no overflow");
}

void zeros_and_values_that_are_not_finite() {
  check::that(round_trip(std::vector<float>(300)) == std::vector<float>(300), "zeros stay zeros");
  check::that(round_trip({1e-39F, -1e-35F}) == std::vector<float>(2), "tiny values become zeros");
  for (const float bad : {kInfinite, -kInfinite, std::nanf(""), -std::nanf("")}) {
    std::vector<float> values(600, 1);
    values[300] = bad;
    const std::vector<float> back = round_trip(values);
    for (size_t i = 0; i < back.size(); ++i)
      check::equal(std::isnan(back[i]), i / kInt8Block == 1, "value " + std::to_string(i));
  }
}

void errors_are_fed_back() {
  const std::vector<float> mine = normal_values(600, 5);
  std::vector<float> error(600), sent(600), values;
  for (int step = 0; step < 50; ++step) {
    values = mine;
    feed_error(values, error.data());
    const std::vector<float> back = round_trip(values);
    for (size_t i = 0; i < back.size(); ++i) {
      check::equal(error[i], values[i] - back[i]);
      sent[i] += back[i];
    }
  }
  for (size_t i = 0; i < mine.size(); ++i)  // the sum of what was sent lacks the last error only
    check::that(std::abs(sent[i] - 50 * mine[i]) < 0.05F, "errors do not add up", std::to_string(sent[i]));
  values = {1, kInfinite};
  feed_error(values, error.data());
  check::equal(error[0], 0.0F);
}

void levels_give_equal_bits() {
  for (const size_t count : kCounts) {
    std::vector<std::byte> first, first_sum;
    for (const char* level : simd_levels()) {
      force_simd_level(level);
      const std::vector<float> a = normal_values(count, 1), b = normal_values(count, 2);
      std::vector<std::byte> blocks(int8_bytes(count) + 1), more(int8_bytes(count)), sum(int8_bytes(count));
      quantise(a, blocks.data() + 1);  // unaligned
      quantise(b, more.data());
      blocks.erase(blocks.begin());
      for (size_t begin = 0; begin < count; begin += kInt8Block) {
        const size_t at = int8_bytes(begin);
        const std::byte* const sources[] = {blocks.data() + at, more.data() + at};
        sum_blocks(sources, std::min(kInt8Block, count - begin), 0.3F, sum.data() + at);
      }
      if (first.empty()) first = blocks, first_sum = sum;
      check::that(first == blocks && first_sum == sum, "the same bits", level);
    }
  }
}

std::vector<float> values_of(int rank, size_t tensor) {
  return normal_values(kCounts[tensor], static_cast<unsigned>(100 * tensor) + static_cast<unsigned>(rank));
}

void sums_are_close_and_equal_on_all_ranks(Engine& engine) {
  for (const ReduceOp op : {kSumInt8, kAverageInt8})
    for (const bool group : {false, true}) {
      std::vector<std::vector<float>> held;
      std::vector<OperationPtr> asked;
      for (size_t i = 0; i < kCounts.size(); ++i) held.push_back(values_of(engine.rank(), i));
      for (size_t i = 0; i < kCounts.size(); ++i) {
        asked.push_back(sum("t" + std::to_string(i), held[i]));
        asked.back()->request.op = op;
        asked.back()->request.prescale = 0.5;
        asked.back()->request.postscale = 4;
        if (group) {
          asked.back()->request.group = "all";
          asked.back()->request.group_size = static_cast<uint32_t>(kCounts.size());
        }
        engine.submit(asked.back(), true);
      }
      for (size_t i = 0; i < kCounts.size(); ++i) {
        finish(engine, asked[i]);
        std::vector<float> expected(kCounts[i]), slack(kCounts[i]);
        const float factor = op == kSumInt8 ? 2.0F : 2.0F / static_cast<float>(engine.size());
        for (int rank = 0; rank < engine.size(); ++rank) {
          const std::vector<float> theirs = values_of(rank, i);
          for (size_t j = 0; j < theirs.size(); ++j) {
            expected[j] += factor * theirs[j];
            slack[j] += factor * bound(theirs, j);
          }
        }
        for (size_t j = 0; j < expected.size(); ++j)  // one rounding on each rank, and one of the sum
          check::that(std::abs(held[i][j] - expected[j]) <= slack[j] + 1.1F * bound(expected, j) + 0.01F * slack[j],
                      "close to the sum", std::to_string(j));
        // Equal bits: the largest and the least value of all ranks are this rank's.
        std::vector<float> most = held[i], least = held[i];
        OperationPtr one = sum("most", most);
        one->request.op = ReduceOp::Max;
        run_now(engine, one);
        one = sum("least", least);
        one->request.op = ReduceOp::Min;
        run_now(engine, one);
        check::that(most == held[i] && least == held[i], "all ranks have the same");
      }
    }
}

void others_are_refused() {
  Request request;
  request.name = "steps";
  request.kind = Kind::Allreduce;
  request.dtype = DType::Int64;
  request.op = kSumInt8;
  const Error error = CHECK_THROWS(Error, validate(request, 2));
  check::that(error.reason.find("int64") != std::string::npos, "the dtype is named", error.what());
  request.dtype = DType::Float32;
  request.shape = {4};
  request.kind = Kind::Reducescatter;
  static_cast<void>(CHECK_THROWS(Error, validate(request, 2)));
}

}  // namespace

int main() {
  errors_are_within_half_a_step();
  zeros_and_values_that_are_not_finite();
  errors_are_fed_back();
  levels_give_equal_bits();
  others_are_refused();
  for (const auto& hosts : kWorlds)
    for (const std::string& problem : run(hosts, sums_are_close_and_equal_on_all_ranks))
      check::equal(problem, std::string());
  return check::report();
}
