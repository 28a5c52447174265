// The collectives of one host, on 1 to 5 ranks: every type, sizes without common divisors, in place and not, one after
// another, so that each finds the slots as the previous one left them.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "collectives/shm_collectives.h"
#include "shm_ranks.h"

using namespace farandole;
using ranks::Bytes;

namespace {

constexpr size_t kSlot = 8192;
constexpr DType kTypes[] = {DType::UInt8,    DType::Int8,    DType::Int32,   DType::Int64, DType::Float16,
                            DType::BFloat16, DType::Float32, DType::Float64, DType::Bool,  DType::Int16,
                            DType::UInt16,   DType::UInt32,  DType::UInt64};
#if defined(__SANITIZE_THREAD__)
constexpr int kSteps = 40;  // races show in the first steps
#else
constexpr int kSteps = 150;
#endif
// In elements: none, one, one step through the small slots, and several rounds of all slots.
constexpr size_t kCounts[] = {0, 1, 7, 511, 1025, 2 * kSlot + 3, 45'001};

std::string context(const SharedMesh& mesh, DType dtype, size_t count) {
  return std::string(name_of(dtype)) + "[" + std::to_string(count) + "], rank " + std::to_string(mesh.rank()) + " of " +
         std::to_string(mesh.size());
}

Bytes reduced(DType dtype, const Reduction& reduction, const std::vector<Bytes>& all) {
  std::vector<const void*> sources;
  for (const Bytes& each : all) sources.push_back(each.data());
  Bytes result(all[0].size());
  reduce(dtype, reduction, result.data(), sources, result.size() / size_of(dtype));
  return result;
}

Reduction reduction_for(DType dtype, int step, int size) {
  if (dtype == DType::Bool || step % 3 == 0) return {.op = step % 2 == 0 ? ReduceOp::Sum : ReduceOp::Max};
  return {.op = ReduceOp::Average, .divisor = size};
}

// The count is cut into pieces of uneven sizes, some of them empty.
std::vector<size_t> cut(size_t count, int step) {
  std::mt19937 random(static_cast<unsigned>(step));
  std::vector<size_t> parts;
  while (count > 0 && parts.size() < 6) {
    parts.push_back(random() % 4 == 0 ? 0 : random() % (count + 1));
    count -= parts.back();
  }
  parts.push_back(count);
  return parts;
}

void reduce_all(SharedMesh& mesh, DType dtype, size_t count, int step) {
  const std::vector<Bytes> all = ranks::inputs(dtype, count, mesh.size(), step);
  const Reduction reduction = reduction_for(dtype, step, mesh.size());
  Bytes mine = all[static_cast<size_t>(mesh.rank())];
  // Each rank decides by itself whether it works in place.
  const bool in_place = (step + mesh.rank()) % 2 == 0;
  Bytes other(mine.size());
  std::byte* out = in_place ? mine.data() : other.data();
  std::vector<Piece> pieces;
  size_t at = 0;
  for (const size_t part : cut(count, step)) {
    const size_t bytes = part * size_of(dtype);
    pieces.push_back({mine.data() + at, out + at, bytes});
    at += bytes;
  }
  shm_allreduce(mesh, pieces, dtype, reduction);
  const Bytes expected = reduced(dtype, reduction, all);
  check::that(std::equal(expected.begin(), expected.end(), out), "allreduce", context(mesh, dtype, count));
  if (!in_place) check::that(mine == all[static_cast<size_t>(mesh.rank())], "its input is left alone");
}

void reduce_scatter(SharedMesh& mesh, DType dtype, size_t count, int step) {
  const std::vector<Bytes> all = ranks::inputs(dtype, count, mesh.size(), step);
  const Reduction reduction = reduction_for(dtype, step, mesh.size());
  std::vector<size_t> counts(static_cast<size_t>(mesh.size()), 0);
  std::mt19937 random(static_cast<unsigned>(step));
  for (size_t i = 0, left = count; i < counts.size(); left -= counts[i++])
    counts[i] = i + 1 == counts.size() ? left : random() % (left + 1);
  const auto me = static_cast<size_t>(mesh.rank());
  const auto before = std::accumulate(counts.begin(), counts.begin() + mesh.rank(), size_t{0});
  Bytes out(counts[me] * size_of(dtype));
  shm_reducescatter(mesh, all[me].data(), out.data(), counts, dtype, reduction);
  const Bytes expected = reduced(dtype, reduction, all);
  check::that(std::equal(out.begin(), out.end(), expected.data() + before * size_of(dtype)), "reducescatter",
              context(mesh, dtype, count));
}

void gather(SharedMesh& mesh, size_t count, int step) {
  const auto n = static_cast<size_t>(mesh.size());
  const auto me = static_cast<size_t>(mesh.rank());
  std::vector<size_t> bytes(n);
  Bytes expected;
  std::vector<Bytes> all;
  for (size_t rank = 0; rank < n; ++rank) {
    bytes[rank] = (count * (rank + static_cast<size_t>(step))) % (count + 5);
    all.push_back(ranks::input(DType::UInt8, bytes[rank], static_cast<int>(rank), step));
    expected.insert(expected.end(), all.back().begin(), all.back().end());
  }
  Bytes got(expected.size());
  std::vector<std::byte*> out(n);
  for (size_t rank = 0, at = 0; rank < n; at += bytes[rank++]) out[rank] = got.data() + at;
  const bool in_place = step % 2 == 0;
  if (in_place) std::copy(all[me].begin(), all[me].end(), out[me]);
  shm_allgather(mesh, in_place ? out[me] : all[me].data(), out, bytes);
  check::that(got == expected, "allgather", context(mesh, DType::UInt8, count));
}

void spread(SharedMesh& mesh, size_t count, int step) {
  const int root = step % mesh.size();
  const Bytes expected = ranks::input(DType::UInt8, count, root, step);
  Bytes mine = ranks::input(DType::UInt8, count, mesh.rank(), step);
  Bytes other(count);
  const bool in_place = (step + mesh.rank()) % 2 == 0;
  std::byte* out = in_place ? mine.data() : other.data();
  std::vector<Piece> pieces;
  size_t at = 0;
  for (const size_t part : cut(count, step)) {
    pieces.push_back({mine.data() + at, out + at, part});
    at += part;
  }
  shm_broadcast(mesh, pieces, root);
  check::that(std::equal(expected.begin(), expected.end(), out), "broadcast", context(mesh, DType::UInt8, count));
}

void exchange(SharedMesh& mesh, size_t count, int step) {
  const auto n = static_cast<size_t>(mesh.size());
  const auto me = static_cast<size_t>(mesh.rank());
  const auto share = [&](size_t from, size_t to) {
    return (count * (1 + from + 2 * to) + static_cast<size_t>(step)) % (count + 1);
  };
  std::vector<Bytes> sent, got;
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
  std::vector<size_t> send, receive;
  size_t longest = 0;
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b) longest = std::max(longest, share(a, b));
  for (size_t peer = 0; peer < n; ++peer) {
    send.push_back(share(me, peer));
    receive.push_back(share(peer, me));
    sent.push_back(ranks::input(DType::UInt8, send[peer], static_cast<int>(me * n + peer), step));
    got.emplace_back(receive[peer]);
  }
  for (size_t peer = 0; peer < n; ++peer) {
    in.push_back(sent[peer].data());
    out.push_back(got[peer].data());
  }
  shm_alltoall(mesh, in, send, out, receive, longest);
  for (size_t peer = 0; peer < n; ++peer)
    check::that(got[peer] == ranks::input(DType::UInt8, receive[peer], static_cast<int>(peer * n + me), step),
                "alltoall", context(mesh, DType::UInt8, count) + ", from " + std::to_string(peer));
}

void each_kind(SharedMesh& mesh) {
  int step = 0;
  for (const size_t count : kCounts) {
    for (const DType dtype : kTypes) {
      reduce_all(mesh, dtype, count, ++step);
      reduce_scatter(mesh, dtype, count, ++step);
    }
    for (int turn = 0; turn < 4; ++turn) {
      gather(mesh, 3 * count, ++step);
      spread(mesh, 5 * count, ++step);
      exchange(mesh, 2 * count, ++step);
    }
  }
}

// Every rank draws the same sequence of kinds and sizes: results must not depend on earlier operations.
void in_any_order(SharedMesh& mesh) {
  std::mt19937 random(7);
  for (int step = 0; step < kSteps; ++step) {
    const size_t count = kCounts[random() % std::size(kCounts)] + random() % 3;
    const DType dtype = kTypes[random() % std::size(kTypes)];
    switch (random() % 6) {
      case 0:
      case 1: reduce_all(mesh, dtype, count, step); break;
      case 2: reduce_scatter(mesh, dtype, count, step); break;
      case 3: gather(mesh, count, step); break;
      case 4: spread(mesh, count, step); break;
      default: exchange(mesh, count, step);
    }
  }
}

}  // namespace

int main() {
  for (int size = 1; size <= 5; ++size) {
    ranks::run(size, kSlot, each_kind);
    ranks::run(size, 4 * kSlot, in_any_order);
  }
  return check::report();
}
