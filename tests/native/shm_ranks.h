// Ranks of one host as threads, each with its view of a common segment, and inputs that every rank can compute.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"
#include "check.h"
#include "transport/shared_mesh.h"

namespace ranks {

using Bytes = std::vector<std::byte>;

// Ends the wait for a rank that has failed.
class Limit : public farandole::Guard {
 public:
  void check() override {
    if (std::chrono::steady_clock::now() > end_) throw farandole::Error::internal("a rank waits for too long");
  }

 private:
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::seconds(300);
};

inline std::vector<int> all_ranks(int size) {
  std::vector<int> all(static_cast<size_t>(size));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Runs `body` on `size` threads; an exception is a failed check.
inline void run(int size, size_t slot_bytes, const std::function<void(farandole::SharedMesh&)>& body) {
  const auto segment = farandole::Segment::create(size, slot_bytes, false);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      Limit limit;
      farandole::SharedMesh mesh(segment, rank, all_ranks(size), limit, {std::chrono::microseconds(5)});
      try {
        body(mesh);
      } catch (const std::exception& error) {
        check::that(false, error.what(), "rank " + std::to_string(rank) + " of " + std::to_string(size));
      }
    });
}

// The `count` elements of rank `rank` in step `step`: small numbers of the type, so that no sum overflows.
inline Bytes input(farandole::DType dtype, size_t count, int rank, int step) {
  using farandole::DType;
  std::mt19937 random(static_cast<unsigned>(1000 * step + rank));
  const size_t width = farandole::size_of(dtype);
  Bytes bytes(count * width);
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<int>(random() % 16);
    const double fine = value + static_cast<double>(random() % 8) / 8;
    const auto single = static_cast<float>(fine);
    const uint64_t whole = dtype == DType::Bool ? value & 1 : value;
    const uint16_t half = dtype == DType::Float16 ? farandole::fp32_to_fp16(single) : farandole::fp32_to_bf16(single);
    const void* from = &whole;
    if (dtype == DType::Float32) from = &single;
    if (dtype == DType::Float64) from = &fine;
    if (dtype == DType::Float16 || dtype == DType::BFloat16) from = &half;
    std::memcpy(bytes.data() + i * width, from, width);
  }
  return bytes;
}

inline std::vector<Bytes> inputs(farandole::DType dtype, size_t count, int size, int step) {
  std::vector<Bytes> all;
  for (int rank = 0; rank < size; ++rank) all.push_back(input(dtype, count, rank, step));
  return all;
}

}  // namespace ranks
