// The byte ring in shared memory: order, wrap-around, a full and an empty ring, two threads.
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/ring.h"

using namespace farandole;

namespace {

class Memory {
 public:
  explicit Memory(size_t capacity)
      : place_(static_cast<std::byte*>(::operator new(Ring::bytes_for(capacity), std::align_val_t{128}))),
        ring_(new (place_) Ring) {
    ring_->capacity = capacity;
  }
  ~Memory() { ::operator delete(place_, std::align_val_t{128}); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Ring& ring() { return *ring_; }

 private:
  std::byte* place_;
  Ring* ring_;
};

std::byte byte_at(uint64_t position) { return static_cast<std::byte>(position * 31 + (position >> 8)); }

void test_full_and_empty() {
  Memory memory(16);
  Ring& ring = memory.ring();
  std::vector<std::byte> bytes(20, std::byte{7});
  CHECK(ring.empty());
  CHECK_EQ(ring.pop(bytes), 0U);
  CHECK_EQ(ring.push({}), 0U);
  CHECK_EQ(ring.push(bytes), 16U);
  CHECK_EQ(ring.push(bytes), 0U);
  CHECK(!ring.empty());
  CHECK_EQ(ring.pop(std::span(bytes).first(5)), 5U);
  CHECK_EQ(ring.push(bytes), 5U);
  CHECK_EQ(ring.pop(bytes), 16U);
  CHECK(ring.empty());
}

void test_order_between_threads() {
  constexpr uint64_t kBytes = 1 << 20;
  for (const size_t capacity : {size_t{16}, size_t{4096}}) {
    Memory memory(capacity);
    std::jthread writer([&] {
      std::mt19937 random(1);
      std::vector<std::byte> chunk(300);
      for (uint64_t sent = 0; sent < kBytes;) {
        const size_t length = std::min<uint64_t>(random() % chunk.size() + 1, kBytes - sent);
        for (size_t i = 0; i < length; ++i) chunk[i] = byte_at(sent + i);
        const size_t taken = memory.ring().push(std::span(chunk).first(length));
        if (taken == 0) std::this_thread::yield();
        sent += taken;
      }
    });
    std::mt19937 random(2);
    std::vector<std::byte> chunk(300);
    bool alike = true;
    for (uint64_t got = 0; got < kBytes;) {
      const size_t count = memory.ring().pop(std::span(chunk).first(random() % chunk.size() + 1));
      if (count == 0) std::this_thread::yield();
      for (size_t i = 0; i < count; ++i) alike = alike && chunk[i] == byte_at(got + i);
      got += count;
    }
    CHECK(alike);
    writer.join();
    CHECK(memory.ring().empty());
  }
}

}  // namespace

int main() {
  test_full_and_empty();
  test_order_between_threads();
  return check::report();
}
