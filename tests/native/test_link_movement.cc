// The collectives over links that only move bytes: allgather, alltoall, broadcast.
#include <algorithm>
#include <numeric>

#include "collectives/link_collectives.h"
#include "link_ranks.h"

namespace {

using namespace farandole;
using check::Ranks;
using check::Wire;
using Bytes = std::vector<std::byte>;

constexpr size_t kLarge = check::kSlow ? 2 << 20 : 16 << 20;

/// Bytes that encode their source and destination.
Bytes message(int from, int to, size_t bytes) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(i * 7 + i / 253 + static_cast<size_t>(from) * 31 + static_cast<size_t>(to) * 101);
  return data;
}

void check_allgather(Ranks& ranks, const std::vector<size_t>& bytes, bool in_place) {
  ranks.must_run([&](Mesh& mesh) {
    const auto me = static_cast<size_t>(mesh.rank());
    Bytes mine = message(mesh.rank(), 0, bytes[me]);
    std::vector<Bytes> got;
    std::vector<std::byte*> out;
    for (const size_t count : bytes) got.emplace_back(count, std::byte{0xEE});
    for (Bytes& row : got) out.push_back(row.data());
    if (in_place) got[me] = mine;
    if (in_place) out[me] = got[me].data();
    link_allgather(mesh, in_place ? got[me] : mine, out, bytes);
    for (size_t rank = 0; rank < bytes.size(); ++rank)
      check::that(got[rank] == message(static_cast<int>(rank), 0, bytes[rank]), "gathered",
                  std::to_string(rank) + " of " + std::to_string(bytes.size()));
  });
}

void allgather() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const int ranks_in_all : check::kSizes) {
      const auto size = static_cast<size_t>(ranks_in_all);
      Ranks ranks(ranks_in_all, wire);
      std::vector<size_t> ragged(size);
      for (size_t rank = 0; rank < size; ++rank) ragged[rank] = rank % 3 == 1 ? 0 : rank * 70'001 + 5;
      for (const bool in_place : {false, true}) {
        check_allgather(ranks, ragged, in_place);
        for (const size_t each : {0U, 1U, 4096U, 300'001U})
          check_allgather(ranks, std::vector<size_t>(size, each), in_place);
      }
    }
  }
  Ranks ranks(2, Wire::Tcp);
  check_allgather(ranks, {kLarge, kLarge}, false);
  check_allgather(ranks, {0, kLarge}, false);
}

void alltoall() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const int size : check::kSizes) {
      Ranks ranks(size, wire);
      for (const size_t unit : {0U, 1U, 1000U, 90'001U}) {
        // Bytes from one rank to another; zero for some.
        const auto bytes = [&](int from, int to) { return unit * static_cast<size_t>((from * 3 + to * 2) % 4); };
        ranks.must_run([&](Mesh& mesh) {
          std::vector<Bytes> send, got;
          std::vector<const std::byte*> in;
          std::vector<std::byte*> out;
          std::vector<size_t> sizes_in, sizes_out;
          for (int peer = 0; peer < size; ++peer) {
            send.push_back(message(mesh.rank(), peer, bytes(mesh.rank(), peer)));
            got.emplace_back(bytes(peer, mesh.rank()), std::byte{0xEE});
            sizes_in.push_back(send.back().size());
            sizes_out.push_back(got.back().size());
          }
          for (const Bytes& row : send) in.push_back(row.data());
          for (Bytes& row : got) out.push_back(row.data());
          link_alltoall(mesh, in, sizes_in, out, sizes_out);
          for (int peer = 0; peer < size; ++peer)
            CHECK(got[static_cast<size_t>(peer)] == message(peer, mesh.rank(), bytes(peer, mesh.rank())));
        });
      }
    }
  }
}

void check_broadcast(Ranks& ranks, const std::vector<size_t>& sizes, int root, bool in_place) {
  ranks.must_run([&](Mesh& mesh) {
    std::vector<Bytes> in, out;
    std::vector<Piece> pieces;
    for (const size_t bytes : sizes) {
      in.push_back(mesh.rank() == root ? message(root, static_cast<int>(in.size()), bytes)
                                       : Bytes(bytes, std::byte{0x11}));
      out.emplace_back(bytes, std::byte{0xEE});
    }
    for (size_t i = 0; i < sizes.size(); ++i)
      pieces.push_back({in[i].data(), in_place ? in[i].data() : out[i].data(), sizes[i]});
    link_broadcast(mesh, pieces, root);
    for (size_t i = 0; i < sizes.size(); ++i)
      check::that((in_place ? in : out)[i] == message(root, static_cast<int>(i), sizes[i]), "broadcast",
                  "rank " + std::to_string(mesh.rank()) + ", root " + std::to_string(root) + " of " +
                      std::to_string(mesh.size()) + ", piece " + std::to_string(i) + " of " + std::to_string(sizes[i]));
  });
}

void broadcast() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const int size : check::kSizes) {
      Ranks ranks(size, wire);
      for (int root = 0; root < size; root += check::kSlow ? 2 : 1) {
        for (const bool in_place : {false, true}) {
          for (const size_t bytes : {0U, 1U, 5000U, 300'001U}) check_broadcast(ranks, {bytes}, root, in_place);
          check_broadcast(ranks, {0, 3, 100'000, 0, 1, 1, 65'536, 70'001, 0}, root, in_place);
        }
      }
      check_broadcast(ranks, {(static_cast<size_t>(size) << 19) + 17}, size - 1, true);
      check_broadcast(ranks, std::vector<size_t>(static_cast<size_t>(size) * 110, 5001), 0, false);
    }
  }
  Ranks ranks(3, Wire::Tcp);
  check_broadcast(ranks, {kLarge, 1}, 1, false);
}

}  // namespace

int main() {
  allgather();
  alltoall();
  broadcast();
  return check::report();
}
