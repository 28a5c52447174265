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
const std::vector<size_t> kCounts = {0, 1, 3, 17, 255, 256, 257, 700, 5'003, 30'001};
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
    std::vector<float> whole = mine;
    for (size_t i = 0; i < whole.size(); ++i) whole[i] += error[i];
    values = mine;
    feed_error(values, error.data());
    check::that(values == round_trip(whole), "values are rounded as they will be sent");
    const std::vector<float> back = round_trip(values);
    for (size_t i = 0; i < back.size(); ++i) {
      check::equal(error[i], whole[i] - values[i]);
      check::that(std::abs(back[i] - values[i]) <= std::abs(values[i]) * 1e-6F, "they are sent so");
      sent[i] += back[i];
    }
  }
  for (size_t i = 0; i < mine.size(); ++i)  // the sum of what was sent lacks the last error only
    check::that(std::abs(sent[i] - 50 * mine[i]) < 0.05F, "errors do not add up", std::to_string(sent[i]));
  values = {1, kInfinite};
  feed_error(values, error.data());
  check::that(error[0] == 0.0F && values[1] == kInfinite, "infinities stay and leave no error");
  values = {1e-35F, -1e-39F};
  error = {1e-35F, 0};
  feed_error(values, error.data());
  check::that(values == std::vector<float>(2) && error == std::vector<float>{2e-35F, -1e-39F}, "tiny values add up");
}

void levels_give_equal_bits() {
  for (const size_t count : kCounts) {
    std::vector<std::byte> first, first_sum;
    std::vector<float> first_fed, first_error;
    for (const char* level : simd_levels()) {
      force_simd_level(level);
      const std::vector<float> a = normal_values(count, 1), b = normal_values(count, 2);
      std::vector<std::byte> blocks(int8_bytes(count) + 1), more(int8_bytes(count)), sum(int8_bytes(count));
      quantise(a, blocks.data() + 1);  // unaligned
      quantise(b, more.data());
      blocks.erase(blocks.begin());
      const std::byte* const sources[] = {blocks.data(), more.data()};
      sum_runs(sources, count, 0.3F, sum.data());
      std::vector<float> fed = a, error = b;
      feed_error(fed, error.data());
      if (first.empty()) first = blocks, first_sum = sum, first_fed = fed, first_error = error;
      check::that(first == blocks && first_sum == sum, "the same bits", level);
      check::that(first_fed == fed && first_error == error, "the same errors", level);
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

/// Returns the bits of the sums of all tensors, reduced by the ranks of `hosts`.
std::vector<float> sums_over(const std::vector<int>& hosts) {
  std::vector<float> found;
  const auto problems = run(hosts, [&](Engine& engine) {
    for (size_t i = 0; i < kCounts.size(); ++i) {
      std::vector<float> values = values_of(engine.rank(), i);
      const OperationPtr asked = sum("t" + std::to_string(i), values);
      asked->request.op = kAverageInt8;
      run_now(engine, asked);
      if (engine.rank() == 0) found.insert(found.end(), values.begin(), values.end());
    }
  });
  for (const std::string& problem : problems) check::equal(problem, std::string());
  return found;
}

void bits_depend_on_grids_only() {
  const std::vector<float> wanted = sums_over({0, 0, 0, 0});
  check::that(sums_over({0, 1, 2, 3}) == wanted, "four hosts");
  check::that(sums_over({0, 0, 0, 1}) == wanted, "two unequal hosts");
  // The ranks of a host add in float32 first.
  const std::vector<float> grid = sums_over({0, 0, 1, 1});
  check::that(grid != wanted && sums_over({0, 1, 0, 1}) != wanted, "two equal hosts");
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
  bits_depend_on_grids_only();
  return check::report();
}
