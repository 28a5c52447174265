// Control messages: encoded messages are decoded equally, and damaged or hostile bytes only throw Error.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/int8_blocks.h"
#include "check.h"
#include "engine/wire.h"

using namespace farandole;

namespace {

size_t allocated_bytes = 0;

}  // namespace

// Counts the decoder's allocations; a claimed length must not become one. Not inline, because GCC would report a
// mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  allocated_bytes += bytes;
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Random = std::mt19937_64;

std::string random_text(Random& random) {
  std::string text(random() % 20, ' ');
  for (char& letter : text) letter = static_cast<char>(random());
  return text;
}

int64_t random_size(Random& random) {
  const int64_t sizes[] = {0, 1, 127, 128, 1 << 20, std::numeric_limits<int64_t>::max()};
  return sizes[random() % 6];
}

Request random_request(Random& random) {
  Request request;
  request.name = random_text(random);
  request.kind = static_cast<Kind>(random() % kKinds);
  request.dtype = static_cast<DType>(random() % kDTypes);
  request.op = static_cast<ReduceOp>(random() % farandole::kReduceOps);
  request.cacheable = random() % 2 == 0;
  request.on_device = random() % 2 == 0;
  request.prescale = static_cast<double>(random()) * 1e-300;
  request.postscale = -1.0 / static_cast<double>(random() | 1);
  request.root = static_cast<int32_t>(random());
  for (size_t i = random() % 4 + 1; i > 0; --i) request.shape.push_back(random_size(random));
  for (size_t i = random() % 4; i > 0; --i) request.splits.push_back(random_size(random));
  request.group = random_text(random);
  request.group_size = static_cast<uint32_t>(random());
  return request;
}

uint32_t random_count(Random& random, uint32_t first) {
  return static_cast<uint32_t>(random() % std::min<uint64_t>(uint64_t{kNoId} - first, 1000)) + 1;
}

Bytes random_bytes(Random& random) {
  Bytes bytes(random() % 300);
  for (std::byte& each : bytes) each = static_cast<std::byte>(random());
  return bytes;
}

CollectedRequests random_gathered(Random& random) {
  CollectedRequests collected;
  for (size_t i = random() % 5; i > 0; --i) {
    const auto rank = static_cast<int32_t>(random() >> 33);
    const auto first = static_cast<uint32_t>(random() % kNoId);
    const uint32_t count = random_count(random, first);
    switch (random() % 4) {
      case 0: collected.emplace_back(NumberRange{kSender, true, first, count}); break;
      case 1: collected.emplace_back(NumberRange{rank, random() % 2 == 0, first, count}); break;
      case 2: collected.emplace_back(RequestWithInput{rank, first, random_bytes(random)}); break;
      default: collected.emplace_back(FullRequest{rank, random_request(random)});
    }
  }
  return collected;
}

Departure random_departure(Random& random) {
  return {static_cast<int32_t>(random()), random() % 2 == 0, random_text(random), static_cast<int32_t>(random())};
}

Plan random_plan(Random& random) {
  Plan plan;
  for (size_t i = random() % 5; i > 0; --i) {
    const std::string name = random_text(random);
    if (random() % 6 == 0) {
      plan.emplace_back(Refusal{name, Error::joined(name, random_text(random))});
    } else if (random() % 3 == 0) {
      plan.emplace_back(Refusal{name, Error::timeout(name, {3, 1 << 20}, 12.5)});
    } else if (random() % 5 == 0) {
      plan.emplace_back(Refusal{name, Error::peer_lost(name, static_cast<int>(random() % 9), random_text(random))});
    } else if (random() % 5 == 0) {
      plan.emplace_back(Knobs{random() >> random() % 64, 64 * (random() % 1000 + 64), 1 << 20, random() % (1 << 20),
                              random() % 2 == 0});
    } else if (random() % 3 == 0) {
      plan.emplace_back(Refusal{name, Error::mismatch(name, "dtype", {{0, random_text(random)}, {7, "float16"}})});
    } else {
      Bucket bucket{static_cast<Kind>(random() % kKinds), {}};
      for (size_t entries = random() % 4 + 1; entries > 0; --entries) {
        const auto id = static_cast<uint32_t>(random() % kNoId);
        if (random() % 2 == 0) {
          bucket.entries.push_back({{}, id, {}, random_count(random, id)});
          continue;
        }
        if (const Bytes result = random_bytes(random); !result.empty() && random() % 3 == 0) {
          bucket.entries.push_back({{}, id, {}, 1, std::nullopt, result});
          continue;
        }
        bucket.entries.push_back({random_text(random), id, {random_size(random)}});
        if (random() % 3 == 0) bucket.entries.back().request = random_request(random);
      }
      plan.emplace_back(std::move(bucket));
    }
  }
  return plan;
}

template <class Payload>
Bytes encoded(const Payload& payload) {
  Bytes out;
  encode(payload, out);
  return out;
}

Bytes encoded(const Message& message) {
  return std::visit([](const auto& payload) { return encoded(payload); }, message);
}

std::span<const std::byte> body_of(const Bytes& frame) { return std::span(frame).subspan(kFrameHeader); }

void check_same(const Plan& got, const Plan& expected) {
  CHECK_EQ(got.size(), expected.size());
  for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    CHECK_EQ(got[i].index(), expected[i].index());
    if (const auto* bucket = std::get_if<Bucket>(&got[i])) {
      CHECK(*bucket == std::get<Bucket>(expected[i]));
      continue;
    }
    if (const auto* knobs = std::get_if<Knobs>(&got[i])) {
      CHECK(*knobs == std::get<Knobs>(expected[i]));
      continue;
    }
    const Refusal& refusal = std::get<Refusal>(got[i]);
    const Refusal& wanted = std::get<Refusal>(expected[i]);
    CHECK_EQ(refusal.name, wanted.name);
    CHECK(refusal.error.kind == wanted.error.kind);
    CHECK(refusal.error.asked == wanted.error.asked);
    CHECK(refusal.error.ranks == wanted.error.ranks);
    CHECK_EQ(refusal.error.rank, wanted.error.rank);
    CHECK_EQ(refusal.error.waited, wanted.error.waited);
    CHECK_EQ(std::string(refusal.error.what()), std::string(wanted.error.what()));
  }
}

void test_what_is_written_is_read() {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const CollectedRequests collected = random_gathered(random);
    const Bytes asked = encoded(collected);
    CHECK_EQ(frame_length(std::span(asked).first(kFrameHeader)), asked.size() - kFrameHeader);
    CHECK(std::get<CollectedRequests>(decode(body_of(asked))) == collected);

    const Plan plan = random_plan(random);
    check_same(std::get<Plan>(decode(body_of(encoded(plan)))), plan);

    const Departure departure = random_departure(random);
    const auto heard = std::get<Departure>(decode(body_of(encoded(departure))));
    CHECK(heard.rank == departure.rank && heard.clean == departure.clean && heard.reason == departure.reason);
    CHECK_EQ(heard.first, departure.first);
  }
  CHECK(std::holds_alternative<Heartbeat>(decode(body_of(encoded(Heartbeat{})))));
}

Plan plan_of(const std::vector<uint32_t>& numbers) {
  Bucket bucket{Kind::Allreduce, {}};
  for (const uint32_t id : numbers) bucket.entries.push_back({{}, id, {}});
  return {bucket};
}

void test_runs_of_numbers_are_short() {
  std::vector<uint32_t> many;
  for (uint32_t id = 0; id < 10'000; ++id) many.push_back(id);
  const Bytes frame = encoded(plan_of(many));
  CHECK(frame.size() <= 16);
  check_same(std::get<Plan>(decode(body_of(frame))), {Bucket{Kind::Allreduce, {{{}, 0, {}, 10'000}}}});
  CHECK(encoded(CollectedRequests{NumberRange{kSender, true, 0, 10'000}}).size() <= 16);
  // Numbers that make no run keep their order.
  check_same(std::get<Plan>(decode(body_of(encoded(plan_of({3, 4, 9, 8, 7, 8}))))),
             {Bucket{Kind::Allreduce, {{{}, 3, {}, 2}, {{}, 9, {}}, {{}, 8, {}}, {{}, 7, {}, 2}}}});
  // A number with a name is not part of a run.
  const Plan named{Bucket{Kind::Allreduce, {{{}, 3, {}}, {"four", 4, {}}, {{}, 5, {}}}}};
  check_same(std::get<Plan>(decode(body_of(encoded(named)))), named);
}

void test_frames_follow_each_other() {
  Bytes stream;
  encode(CollectedRequests{NumberRange{kSender, true, 7, 1}}, stream);
  const size_t first = stream.size();
  encode(Departure{1, true, "it has shut down", 1}, stream);
  CHECK_EQ(frame_length(std::span(stream).first(kFrameHeader)), first - kFrameHeader);
  CHECK_EQ(frame_length(std::span(stream).subspan(first, kFrameHeader)), stream.size() - first - kFrameHeader);
}

// Decodes arbitrary bytes: Error (Internal), or a message that encode() could have written.
void survive(std::span<const std::byte> body) {
  allocated_bytes = 0;
  try {
    const Message message = decode(body);
    const size_t spent = allocated_bytes;
    // 64 bytes for each byte that claims to be an entry, and room for the error's text.
    check::that(spent <= 200 * body.size() + 4096, "allocates little", std::to_string(spent));
    const Bytes again = encoded(message);
    CHECK(encoded(decode(body_of(again))) == again);
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::Internal);
    check::that(allocated_bytes <= 200 * body.size() + 4096, "allocates little", std::to_string(allocated_bytes));
  }
}

void test_every_truncation_throws() {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    for (const Bytes& frame : {encoded(random_gathered(random)), encoded(random_plan(random)),
                               encoded(random_departure(random)), encoded(Heartbeat{})}) {
      const auto body = body_of(frame);
      for (size_t length = 0; length < body.size(); ++length) {
        // A separate copy, so that AddressSanitizer detects a read beyond the end.
        const Bytes cut(body.begin(), body.begin() + static_cast<std::ptrdiff_t>(length));
        CHECK(CHECK_THROWS(Error, decode(cut)).kind == ErrorKind::Internal);
      }
      Bytes longer(body.begin(), body.end());
      longer.push_back(std::byte{0});
      CHECK_THROWS(Error, decode(longer));
    }
  }
}

void test_mutations_and_noise() {
  Random random(3);
  for (int i = 0; i < 20000; ++i) {
    const Bytes frame = i % 2 == 0 ? encoded(random_gathered(random)) : encoded(random_plan(random));
    Bytes body(frame.begin() + kFrameHeader, frame.end());
    for (size_t changes = random() % 3 + 1; changes > 0; --changes) {
      const auto at = body.begin() + static_cast<std::ptrdiff_t>(random() % body.size());
      switch (random() % 4) {
        case 0: *at = static_cast<std::byte>(random()); break;
        case 1: *at ^= static_cast<std::byte>(1U << (random() % 8)); break;
        case 2: body.insert(at, static_cast<std::byte>(random())); break;
        default:
          if (body.size() > 1) body.erase(at);
      }
    }
    survive(body);

    Bytes noise(random() % 64 + 1);
    for (std::byte& value : noise) value = static_cast<std::byte>(random());
    noise[0] = static_cast<std::byte>(random() % 6);  // mostly a known tag, to reach more code
    survive(noise);
  }
}

void test_lengths_that_lie() {
  const auto bytes = [](std::initializer_list<int> values) {
    Bytes body;
    for (const int value : values) body.push_back(static_cast<std::byte>(value));
    return body;
  };
  // A million millions of requests, buckets, letters: refused before any allocation.
  for (const int tag : {1, 2, 3, 4})
    for (const int next : {0, 1, 2, 0x7F, 0x80, 0xFF})
      survive(bytes({tag, next, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F}));
  Bytes long_bucket = bytes({2, 1, 0, 0, 0x80, 0x80, 0x40, 3});  // of a million entries, the first of no known form
  long_bucket.resize(long_bucket.size() + (1 << 20));
  allocated_bytes = 0;
  CHECK_THROWS(Error, decode(long_bucket));
  check::that(allocated_bytes < 2 << 20, "allocates little", std::to_string(allocated_bytes));
  CHECK_THROWS(Error, decode({}));
  CHECK_THROWS(Error, decode(bytes({0})));
  CHECK_THROWS(Error, decode(bytes({5})));
  CHECK_THROWS(Error, decode(bytes({1, 1, 3})));                 // neither numbers nor a request
  CHECK_THROWS(Error, decode(bytes({1, 1, 0, 7, 0})));           // an empty run
  CHECK_THROWS(Error, decode(bytes({1, 1, 1, 1, 0, 7, 1})));     // of rank -1
  CHECK_THROWS(Error, decode(bytes({2, 1, 0, 0, 1, 0, 7, 0})));  // an empty run in a plan
  // Beyond the largest number.
  CHECK_THROWS(Error, decode(bytes({1, 1, 0, 7, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F})));
  survive(bytes({1, 1, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F}));
  survive(bytes({2, 1, 0, 0, 1, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F}));
  CHECK_THROWS(Error, frame_length(bytes({0, 0, 0, 0})));  // no message is empty
  CHECK_THROWS(Error, frame_length(bytes({255, 255, 255, 255})));
  CHECK_EQ(frame_length(bytes({1, 0, 0, 0})), 1U);
}

}  // namespace

int main() {
  test_what_is_written_is_read();
  test_runs_of_numbers_are_short();
  test_frames_follow_each_other();
  test_every_truncation_throws();
  test_mutations_and_noise();
  test_lengths_that_lie();
  return check::report();
}
