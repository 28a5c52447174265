// Adasum over every wiring against a tree in fp64: several numbers of ranks and hosts, tensors that share buckets.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>

#include "base/half.h"
#include "check.h"
#include "collectives/adasum.h"
#include "engine_ranks.h"

using namespace ranks;

namespace {

std::atomic<void*> watched{nullptr};  // freed when null again

}  // namespace

// NOLINTBEGIN: they see the end of memory that a transport still uses. Not inline: GCC 12 would take malloc() and
// operator delete for a mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* made = std::malloc(bytes > 0 ? bytes : 1)) return made;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  void* expected = memory;
  watched.compare_exchange_strong(expected, nullptr);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
// NOLINTEND

namespace {

using Values = std::vector<double>;

const std::vector<std::vector<int>> kWorlds = {{0},    {0, 0},    {0, 0, 0},    {0, 0, 0, 0},   {0, 0, 0, 0, 0},
                                               {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 1}};
const std::vector<DType> kTypes = {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64};

double epsilon(DType dtype) {
  if (dtype == DType::Float16) return 0x1p-10;
  if (dtype == DType::BFloat16) return 0x1p-7;
  return dtype == DType::Float32 ? 0x1p-22 : 0x1p-50;
}

std::vector<std::byte> encode(DType dtype, const Values& values) {
  const size_t width = size_of(dtype);
  std::vector<std::byte> bytes(values.size() * width);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto single = static_cast<float>(values[i]);
    const uint16_t half = dtype == DType::Float16 ? farandole::fp32_to_fp16(single) : farandole::fp32_to_bf16(single);
    const void* from = width == 2   ? static_cast<const void*>(&half)
                       : width == 4 ? static_cast<const void*>(&single)
                                    : &values[i];
    std::memcpy(bytes.data() + i * width, from, width);
  }
  return bytes;
}

Values decode(DType dtype, const std::vector<std::byte>& bytes) {
  const size_t width = size_of(dtype);
  Values values(bytes.size() / width);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half = 0;
    float single = 0;
    std::memcpy(width == 2   ? static_cast<void*>(&half)
                : width == 4 ? static_cast<void*>(&single)
                             : &values[i],
                bytes.data() + i * width, width);
    if (width == 2) single = dtype == DType::Float16 ? farandole::fp16_to_fp32(half) : farandole::bf16_to_fp32(half);
    if (width < 8) values[i] = single;
  }
  return values;
}

Values pair_of(const Values& a, const Values& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  Values out(a.size());
  for (size_t i = 0; i < a.size(); ++i)
    out[i] = (aa == 0 ? 1 : 1 - ab / (2 * aa)) * a[i] + (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b[i];
  return out;
}

Values tree_of(std::vector<Values> level) {
  while (level.size() > 1) {
    std::vector<Values> next;
    for (size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(pair_of(level[i], level[i + 1]));
    if (level.size() % 2 == 1) next.push_back(level.back());
    level = std::move(next);
  }
  return level[0];
}

// The input of a rank, rounded to the type; rank 1 has zeros for every third tensor.
Values values_of(DType dtype, size_t count, size_t tensor, int rank) {
  std::mt19937 random(static_cast<unsigned>(1000 * tensor) + static_cast<unsigned>(rank));
  std::normal_distribution<double> normal(0.3);
  Values values(count);
  for (double& value : values) value = rank == 1 && tensor % 3 == 2 ? 0 : normal(random);
  return decode(dtype, encode(dtype, values));
}

double largest(const Values& values) {
  double most = 1;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

void check_close(DType dtype, const Values& got, const Values& expected, const std::string& what) {
  const double tolerance = 8 * epsilon(dtype) * largest(expected);
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::abs(got[i] - expected[i]) <= tolerance) continue;  // millions are: a text for each would take long
    check::fail(what + ": got " + std::to_string(got[i]) + ", expected " + std::to_string(expected[i]),
                std::source_location::current());
  }
}

const std::vector<size_t> kCounts = {1, 5, 64, 0, 700, 30'000};

struct Tensors {
  std::vector<std::vector<std::byte>> in, out;
  std::vector<OperationPtr> asked;
};

Tensors submit(Engine& engine, DType dtype, double prescale, double postscale, bool group) {
  Tensors tensors;
  for (size_t i = 0; i < kCounts.size(); ++i) {
    tensors.in.push_back(encode(dtype, values_of(dtype, kCounts[i], i, engine.rank())));
    tensors.out.emplace_back(tensors.in.back().size());
  }
  for (size_t i = 0; i < kCounts.size(); ++i) {
    OperationPtr one = operation(Kind::Allreduce, name_of(dtype) + std::to_string(i), dtype,
                                 {static_cast<int64_t>(kCounts[i])}, tensors.in[i].data(), tensors.out[i].data());
    one->request.op = ReduceOp::Adasum;
    one->request.prescale = prescale;
    one->request.postscale = postscale;
    if (group) {
      one->request.group = "all";
      one->request.group_size = static_cast<uint32_t>(kCounts.size());
    }
    tensors.asked.push_back(one);
    engine.submit(one, true);
  }
  return tensors;
}

void check_all(Engine& engine, DType dtype, double prescale, double postscale, const Tensors& tensors) {
  for (size_t i = 0; i < kCounts.size(); ++i) {
    finish(engine, tensors.asked[i]);
    std::vector<Values> each;
    for (int rank = 0; rank < engine.size(); ++rank) {
      each.push_back(values_of(dtype, kCounts[i], i, rank));
      for (double& value : each.back()) value *= prescale;
    }
    Values expected = tree_of(std::move(each));
    for (double& value : expected) value *= postscale;
    check_close(dtype, decode(dtype, tensors.out[i]), expected,
                std::string(name_of(dtype)) + " of " + std::to_string(kCounts[i]));
  }
}

void as_the_tree_says(Engine& engine) {
  for (const DType dtype : kTypes)
    for (const bool group : {false, true}) {
      check_all(engine, dtype, 1, 1, submit(engine, dtype, 1, 1, group));
      check_all(engine, dtype, 0.25, 3, submit(engine, dtype, 0.25, 3, group));
    }
}

// Equal gradients are averaged, orthogonal ones added.
void parallel_and_orthogonal(Engine& engine) {
  const auto n = static_cast<size_t>(engine.size());
  std::vector<float> same(37, 2.5f);
  OperationPtr one = sum("same", same);
  one->request.op = ReduceOp::Adasum;
  run_now(engine, one);
  for (const float value : same) check::equal(value, 2.5f);
  std::vector<float> own(n, 0.0f);
  own[static_cast<size_t>(engine.rank())] = 3;
  one = sum("own", own);
  one->request.op = ReduceOp::Adasum;
  run_now(engine, one);
  for (const float value : own) check::equal(value, 3.0f);
}

void integers_are_refused() {
  farandole::Request request;
  request.name = "steps";
  request.kind = Kind::Allreduce;
  request.dtype = DType::Int64;
  request.op = ReduceOp::Adasum;
  const Error error = CHECK_THROWS(Error, validate(request, 2));
  check::that(error.reason.find("int64") != std::string::npos, "the dtype is named", error.what());
}

/// A world of two ranks over MPI whose rank 1 is lost during the alltoall.
class LosingWorld final : public farandole::World {
 public:
  void turn(const farandole::Knobs&) override {}
  const char* allreduce(std::span<const farandole::Piece>, DType, const farandole::Reduction&) override { return ""; }
  const char* allgather(const std::byte*, std::span<std::byte* const>, std::span<const size_t>) override { return ""; }
  const char* broadcast(std::span<const farandole::Piece>, int) override { return ""; }
  const char* alltoall(std::span<const std::byte* const>, std::span<std::byte* const> out,
                       const farandole::Shares&) override {
    watched = out[0];  // the start of the buffer
    throw Error::peer_lost("", 1, "it failed");
  }
  const char* reducescatter(const std::byte*, std::byte*, std::span<const size_t>, DType,
                            const farandole::Reduction&) override {
    return "";
  }
  [[nodiscard]] bool has_abandoned() const override { return true; }
};

void lost_ranks_may_still_write() {
  LosingWorld world;
  std::vector<float> values(10, 1);
  auto* bytes = reinterpret_cast<std::byte*>(values.data());
  const farandole::Piece piece{bytes, bytes, values.size() * sizeof(float)};
  CHECK_THROWS(Error, (farandole::adasum(world, 0, 2, {&piece, 1}, DType::Float32, 1, 1), 0));
  CHECK(watched.load() != nullptr);
}

}  // namespace

int main() {
  for (const auto& hosts : kWorlds) {
    for (const auto& body : {as_the_tree_says, parallel_and_orthogonal})
      for (const std::string& problem : run(hosts, body)) check::equal(problem, std::string());
  }
  integers_are_refused();
  lost_ranks_may_still_write();
  return check::report();
}
