// Allgather, alltoall and reducescatter among GPUs by NCCL, over stand-ins whose streams run late: results, memory,
// order, groups, and what joined ranks contribute to them and to others.
#include <algorithm>
#include <cmath>
#include <string>

#include "nccl_stand_in.h"

using namespace ranks;
using namespace farandole;
using check::cuda;
using nccl::count, nccl::must_run, nccl::set;
using std::chrono::milliseconds;

namespace {

using Counts = std::vector<int64_t>;

std::vector<float> ramp(int rank, int64_t count, int64_t from = 0) {
  std::vector<float> values;
  for (int64_t i = from; i < from + count; ++i) values.push_back(static_cast<float>(1000 * (rank + 1) + i % 500));
  return values;
}

/// Copies the result of an operation without memory of the caller's, which works once.
std::vector<float> result_of(DeviceRank& rank, StagedCall& call, size_t index = 0) {
  const auto rows = static_cast<size_t>(call.operation(index)->result_shape[0]);
  const DeviceNumbers to(std::vector<float>(rows, -1), rank.rank());
  const auto copy = [&](size_t bytes) {
    return rank.staging().copy_result(call, index, to.device(), to.address(), bytes, to.stream());
  };
  CHECK_THROWS(Error, copy(to.bytes() + 4));
  static_cast<void>(copy(to.bytes()));
  CHECK_THROWS(Error, copy(to.bytes()));
  return to.read();
}

/// Returns whether numbers differ by no more than their rounding.
bool alike(const std::vector<float>& numbers, const std::vector<float>& expected, float rounding) {
  return std::ranges::equal(numbers, expected, [rounding](float number, float other) {
    return std::abs(number - other) <= rounding * std::abs(other);
  });
}

/// Runs the request with memory of the caller's and without; returns whether both results are as expected.
bool gives(DeviceRank& rank, const RequestView& request, const std::vector<float>& values,
           const std::vector<float>& expected, float rounding = 0) {
  const DeviceNumbers in(values, rank.rank());
  const DeviceNumbers out(std::vector<float>(expected.size(), -1), rank.rank());
  const Counts shape{static_cast<int64_t>(values.size())};
  const auto given = rank.start(request, DeviceRank::tensor("given", in, &out, shape));
  const auto made = rank.start(request, DeviceRank::tensor("made", in, nullptr, shape));
  rank.finish(*given, out);
  rank.wait(*made);
  CHECK(!given->has_result(0) && made->has_result(0));
  return alike(out.read(), expected, rounding) && alike(result_of(rank, *made), expected, rounding);
}

/// Rows of each rank: as many, or not.
Counts rows_of(int size, bool even) {
  Counts rows;
  for (int each = 0; each < size; ++each) rows.push_back(even ? 70 : 100 * each);  // none from rank 0
  return rows;
}

void gathers(DeviceRank& rank) {
  for (const bool even : {true, false}) {
    const Counts rows = rows_of(rank.size(), even);
    std::vector<float> expected;
    for (int each = 0; each < rank.size(); ++each) {
      const std::vector<float> part = ramp(each, rows[static_cast<size_t>(each)]);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    CHECK(
        gives(rank, request_of(Kind::Allgather), ramp(rank.rank(), rows[static_cast<size_t>(rank.rank())]), expected));
  }
}

/// Rank r sends (r + 1) * (peer + 1) rows, or none to itself, or as many to all.
void exchanges(DeviceRank& rank) {
  for (const int kind : {0, 1, 2}) {
    const auto rows = [&](int from, int to) -> int64_t {
      if (kind == 0) return 30;
      return kind == 1 || from != to ? (from + 1) * (to + 1) : 0;
    };
    Counts splits, received;
    std::vector<float> values, expected;
    for (int peer = 0; peer < rank.size(); ++peer) {
      splits.push_back(rows(rank.rank(), peer));
      received.push_back(rows(peer, rank.rank()));
      int64_t before = 0;
      for (int other = 0; other < rank.rank(); ++other) before += rows(peer, other);
      const std::vector<float> part = ramp(peer, received.back(), before);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    int64_t all = 0;
    for (const int64_t each : splits) all += each;
    RequestView request = request_of(Kind::Alltoall);
    request.splits = splits;
    CHECK(gives(rank, request, ramp(rank.rank(), all), expected));
    const DeviceNumbers in(ramp(rank.rank(), all), rank.rank());
    const auto call = rank.start(request, DeviceRank::tensor("splits", in, nullptr, {all}));
    rank.finish(*call, in);
    CHECK(call->operation(0)->received_splits == received);
  }
}

/// Sums and averages with factors, of rows that the ranks divide or do not.
void scatters(DeviceRank& rank) {
  for (const int64_t count : {int64_t{2}, int64_t{24}, int64_t{25}}) {
    RequestView request = request_of(Kind::Reducescatter);
    std::vector<float> sums(static_cast<size_t>(count));
    for (int each = 0; each < rank.size(); ++each)
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += ramp(each, count)[i];
    const int64_t least = count / rank.size(), more = count % rank.size();
    const int64_t from = least * rank.rank() + std::min<int64_t>(more, rank.rank());
    const int64_t own_rows = least + (rank.rank() < more ? 1 : 0);
    std::vector<float> expected(sums.begin() + from, sums.begin() + from + own_rows);
    CHECK(gives(rank, request, ramp(rank.rank(), count), expected));
    request.op = ReduceOp::Average;
    request.prescale = 4;
    request.postscale = 0.5;
    for (float& each : expected) each = each * 2 / static_cast<float>(rank.size());
    CHECK(gives(rank, request, ramp(rank.rank(), count), expected, rank.size() == 3 ? 1e-6F : 0));  // a third
  }
}

/// Results without rows, and rows without elements.
void nothing(DeviceRank& rank) {
  CHECK(gives(rank, request_of(Kind::Allgather), {}, {}));
  CHECK(gives(rank, request_of(Kind::Alltoall), {}, {}));
  CHECK(gives(rank, request_of(Kind::Reducescatter), {}, {}));
  const DeviceNumbers none({}, rank.rank());
  const auto call = rank.start(request_of(Kind::Allgather), DeviceRank::tensor("flat", none, nullptr, {3, 0}));
  rank.wait(*call);
  CHECK((call->operation(0)->result_shape == Counts{3 * rank.size(), 0}));
}

/// The result comes after the work of the caller's stream, and the host waits for neither.
void late_inputs(DeviceRank& rank) {
  gathers(rank);  // makes the communicator
  const DeviceNumbers late(std::vector<float>(50, -1), rank.rank());
  const DeviceNumbers to(std::vector<float>(static_cast<size_t>(50 * rank.size()), -2), rank.rank());
  void* key = cuda().close(late.stream());
  const std::vector<float> values = own(rank, 50);
  cuda().write(late.address(), values.data(), late.bytes(), late.stream());
  auto kept = std::make_shared<int>(1);
  const std::weak_ptr<int> alive = kept;
  const Counts shape{50};
  StagedTensor tensor = DeviceRank::tensor("late", late, nullptr, shape);
  tensor.keep = std::move(kept);
  const auto call = rank.start(request_of(Kind::Allgather), tensor);
  tensor.keep.reset();
  rank.wait(*call);
  static_cast<void>(rank.staging().copy_result(*call, 0, to.device(), to.address(), to.bytes(), to.stream()));
  std::this_thread::sleep_for(milliseconds(3));
  CHECK(!call->has_returned() && !alive.expired());
  cuda().open(key);
  std::vector<float> expected;
  for (int each = 0; each < rank.size(); ++each) expected.insert(expected.end(), 50, static_cast<float>(each + 1));
  CHECK(to.read() == expected);
  for (int i = 0; i < 1000 && !alive.expired(); ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(alive.expired());
}

/// An output of another size fails on its rank only, and the other operations go on.
void wrong_outputs(DeviceRank& rank) {
  const DeviceNumbers in(own(rank, 10), rank.rank());
  const DeviceNumbers out(std::vector<float>(static_cast<size_t>(10 * rank.size()), -1), rank.rank());
  const DeviceNumbers small(std::vector<float>(3, -1), rank.rank());
  const auto call =
      rank.start(request_of(Kind::Allgather), DeviceRank::tensor("x", in, rank.rank() == 0 ? &small : &out, {10}));
  if (rank.rank() == 0) {
    const Error error = check::thrown<Error>([&] { rank.wait(*call); });
    CHECK(error.kind == ErrorKind::Invalid);
    call->hold(in.device(), in.stream());
  } else {
    rank.finish(*call, out);
    CHECK_EQ(out.read()[0], 1.0F);
  }
  CHECK(small.read() == std::vector<float>(3, -1));
  gathers(rank);
}

/// All members of a group are one group of NCCL, also when they are known by their numbers.
void groups(DeviceRank& rank) {
  gathers(rank);
  const int before = count("stand_in_nccl_groups");
  for (const Kind kind :
       {Kind::Allgather, Kind::Reducescatter, Kind::Alltoall, Kind::Reducescatter, Kind::Reducescatter}) {
    std::vector<std::unique_ptr<DeviceNumbers>> in;
    std::vector<StagedTensor> tensors;
    const int64_t rows = 4 * rank.size();
    const Counts shape{rows};
    for (int i = 0; i < 5; ++i) {
      in.push_back(
          std::make_unique<DeviceNumbers>(own(rank, static_cast<size_t>(rows), static_cast<float>(i)), rank.rank()));
      tensors.push_back(DeviceRank::tensor("", *in.back(), nullptr, shape));
    }
    RequestView request = request_of(kind, 0, true);
    request.name = "g";
    request.grouped = true;
    const auto call = rank.staging().start(request, tensors);
    rank.wait(*call);
    for (size_t i = 0; i < 5; ++i) {
      const float first = result_of(rank, *call, i)[0];
      CHECK_EQ(first, static_cast<float>(i) * (kind == Kind::Reducescatter ? static_cast<float>(rank.size()) : 1) +
                          (kind == Kind::Reducescatter ? total(rank) : 1));
    }
  }
  if (rank.size() == 1) CHECK_EQ(count("stand_in_nccl_groups"), before + 5);
}

/// Results that nobody copies, and those that were copied, give their memory back.
void test_memory_is_given_back() {
  const size_t live = cuda().live();
  must_run(2, [](DeviceRank& rank) {
    gathers(rank);
    const DeviceNumbers in(own(rank, 1000), rank.rank());
    for (int i = 0; i < 20; ++i)
      rank.finish(*rank.start(request_of(Kind::Allgather), DeviceRank::tensor("x", in, nullptr, {1000})), in);
    CHECK(in.read() == own(rank, 1000));
  });
  for (int i = 0; i < 5000 && cuda().live() > live; ++i) std::this_thread::sleep_for(milliseconds(1));
  CHECK(cuda().live() <= live);
  CHECK(cuda().calls("cuMemPoolTrimTo") > 0);  // the ranks have ended
}

/// Rank 0 joins, and takes part on its device: zeros for sums, no rows, memory for what it does not want.
void joins(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 40), rank.rank());
  rank.finish(*rank.sum("x", numbers), numbers);
  const int copies = cuda().calls("cuMemcpyDtoHAsync");
  if (rank.rank() > 0) {
    const auto others = static_cast<float>(rank.size() - 1);
    rank.finish(*rank.sum("y", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(40, total(rank) * others));
    RequestView average = request_of(Kind::Allreduce);
    average.op = ReduceOp::Average;
    average.prescale = 3;
    rank.finish(*rank.start(average, DeviceRank::tensor("average", numbers, &numbers, {40})), numbers);
    const float expected = total(rank) * others * others * 3 / static_cast<float>(rank.size());
    CHECK(std::abs(numbers.read()[39] - expected) < 1e-2F);
    const DeviceNumbers sent(own(rank, 9), rank.rank());
    rank.finish(*rank.start(request_of(Kind::Broadcast, 1), DeviceRank::tensor("b", sent, &sent, {9})), sent);
    CHECK(sent.read() == std::vector<float>(9, 2));
    std::vector<float> all;
    for (int each = 1; each < rank.size(); ++each) all.insert(all.end(), 9, 2);
    CHECK(gives(rank, request_of(Kind::Allgather), sent.read(), all));
    Counts splits(static_cast<size_t>(rank.size()), 3);
    splits[0] = 0;
    RequestView exchange = request_of(Kind::Alltoall);
    exchange.splits = splits;
    const std::vector<float> values(static_cast<size_t>(3 * (rank.size() - 1)), 5);
    CHECK(gives(rank, exchange, values, values));
  }
  CHECK_EQ(cuda().calls("cuMemcpyDtoHAsync"), copies);
  rank.join();
}

/// What zeros would change goes through host memory while a rank has joined, and so does all before the ranks agree.
void joins_through_host_memory(DeviceRank& rank) {
  const DeviceNumbers numbers(own(rank, 40), rank.rank());
  if (rank.rank() > 0) {
    rank.finish(*rank.sum("early", numbers), numbers);
    CHECK(numbers.read() == std::vector<float>(40, total(rank) - 1));
    CHECK(gives(rank, request_of(Kind::Allgather), {7}, std::vector<float>(static_cast<size_t>(rank.size() - 1), 7)));
  }
  rank.join();
  rank.finish(*rank.sum("x", numbers), numbers);
  if (rank.rank() > 0) {
    RequestView product = request_of(Kind::Allreduce);
    product.op = ReduceOp::Product;
    const DeviceNumbers twos(std::vector<float>(10, 2), rank.rank());
    rank.finish(*rank.start(product, DeviceRank::tensor("p", twos, &twos, {10})), twos);
    CHECK(twos.read() == std::vector<float>(10, static_cast<float>(1 << (rank.size() - 1))));
  }
  rank.join();
}

/// Operations that were submitted in device memory, before the ranks have agreed on host memory.
void test_host_memory_after_all() {
  const auto every = [](DeviceRank& rank) {
    gathers(rank);
    exchanges(rank);
    scatters(rank);
  };
  cuda().share(1);
  for (const DeviceBody& first : {DeviceBody(gathers), DeviceBody(exchanges), DeviceBody(scatters)})
    must_run(2, first, false);
  must_run(2, wrong_outputs, false);
  cuda().share(0);
  cuda().pools(0);
  must_run(2, every, false);
  cuda().pools(1);
  GpuOptions some;
  some.through_host[static_cast<size_t>(Kind::Allgather)] = true;
  for (const std::string& problem : run_on_devices(2, every, some)) check::equal(problem, std::string());
}

}  // namespace

int main() {
  cuda().configure(3, 12040, 300);
  set("stand_in_version", 22705);
  for (const int size : {1, 2, 3})
    for (const DeviceBody& body : {DeviceBody(gathers), DeviceBody(exchanges), DeviceBody(scatters),
                                   DeviceBody(late_inputs), DeviceBody(wrong_outputs), DeviceBody(groups)})
      must_run(size, body);
  for (const std::string& problem : run_on_devices(2, nothing)) check::equal(problem, std::string());
  test_memory_is_given_back();
  must_run(3, joins);
  for (const std::string& problem : run_on_devices(3, joins_through_host_memory)) check::equal(problem, std::string());
  test_host_memory_after_all();
  CHECK_EQ(cuda().error(), 0);
  return check::report();
}
