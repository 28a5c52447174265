// Data movement over a grid of hosts, the connections of a grid, and wirings that are not grids.

#include "collectives/grid_collectives.h"
#include "grid_ranks.h"

namespace {

using namespace farandole;
using check::GridRanks;
using Bytes = std::vector<std::byte>;

const std::vector<std::vector<int>> kPlacements{
    {0, 0, 1, 1}, {0, 1, 0, 1}, {1, 0, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 1, 2, 2, 1, 0, 0, 2, 1}};

void what_is_a_grid() {
  CHECK(!grid_of(0, {0}));
  CHECK(!grid_of(0, {0, 0, 0}));
  CHECK(!grid_of(0, {0, 1, 2}));
  CHECK(!grid_of(0, {0, 0, 1}));
  CHECK((data_peers(0, {0, 0, 0}) == std::vector<int>{}));
  CHECK((data_peers(1, {0, 1, 2}) == std::vector<int>{0, 2}));
  CHECK((data_peers(1, {0, 0, 1}) == std::vector<int>{2}));
  const Grid grid = grid_of(3, {4, 2, 2, 4}).value();
  CHECK_EQ(grid.hosts, 2);
  CHECK_EQ(grid.locals, 2);
  CHECK_EQ(grid.host, 0);
  CHECK_EQ(grid.local, 1);
  CHECK((grid.ranks == std::vector<int>{0, 3, 1, 2}));
  CHECK((data_peers(3, {4, 2, 2, 4}) == std::vector<int>{2}));
}

/// Bytes that encode their source and destination.
Bytes message(int from, int to, size_t bytes) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(i * 7 + i / 253 + static_cast<size_t>(from) * 31 + static_cast<size_t>(to) * 101);
  return data;
}

void allgather(GridRanks& ranks, size_t unit, bool in_place) {
  std::vector<size_t> bytes;
  for (size_t rank = 0; rank < ranks.size(); ++rank) bytes.push_back(rank % 3 == 1 ? 0 : rank * unit + unit / 2);
  ranks.must_run(
      [&](GridMesh& mesh, int rank) {
        const auto me = static_cast<size_t>(rank);
        const Bytes mine = message(rank, 0, bytes[me]);
        std::vector<Bytes> got;
        std::vector<std::byte*> out;
        for (const size_t count : bytes) got.emplace_back(count, std::byte{0xEE});
        for (Bytes& row : got) out.push_back(row.data());
        if (in_place) std::copy(mine.begin(), mine.end(), got[me].begin());
        grid_allgather(mesh, in_place ? got[me].data() : mine.data(), out, bytes);
        for (size_t from = 0; from < bytes.size(); ++from)
          CHECK(got[from] == message(static_cast<int>(from), 0, bytes[from]));
      },
      "allgather");
}

void alltoall(GridRanks& ranks, size_t unit) {
  const auto size = static_cast<int>(ranks.size());
  const Shares shares = [&](int from, int to) { return unit * static_cast<size_t>((from * 3 + to * 2) % 4); };
  ranks.must_run(
      [&](GridMesh& mesh, int rank) {
        std::vector<Bytes> send, got;
        std::vector<const std::byte*> in;
        std::vector<std::byte*> out;
        for (int peer = 0; peer < size; ++peer) {
          send.push_back(message(rank, peer, shares(rank, peer)));
          got.emplace_back(shares(peer, rank), std::byte{0xEE});
        }
        for (const Bytes& row : send) in.push_back(row.data());
        for (Bytes& row : got) out.push_back(row.data());
        grid_alltoall(mesh, in, out, shares);
        for (int peer = 0; peer < size; ++peer)
          CHECK(got[static_cast<size_t>(peer)] == message(peer, rank, shares(peer, rank)));
      },
      "alltoall");
}

void broadcast(GridRanks& ranks, const std::vector<size_t>& sizes, int root, bool in_place) {
  ranks.must_run(
      [&](GridMesh& mesh, int rank) {
        std::vector<Bytes> in, out;
        std::vector<Piece> pieces;
        for (const size_t bytes : sizes) {
          in.push_back(rank == root ? message(root, static_cast<int>(in.size()), bytes)
                                    : Bytes(bytes, std::byte{0x11}));
          out.emplace_back(bytes, std::byte{0xEE});
        }
        for (size_t i = 0; i < sizes.size(); ++i)
          pieces.push_back({in[i].data(), in_place ? in[i].data() : out[i].data(), sizes[i]});
        grid_broadcast(mesh, pieces, root);
        for (size_t i = 0; i < sizes.size(); ++i)
          check::that((in_place ? in : out)[i] == message(root, static_cast<int>(i), sizes[i]), "broadcast",
                      "rank " + std::to_string(rank) + ", root " + std::to_string(root));
      },
      "broadcast");
}

void movement() {
  for (const auto& hosts : kPlacements) {
    GridRanks ranks(hosts);
    for (const size_t unit : {0U, 1U, 1000U, 90'001U}) {
      allgather(ranks, unit, false);
      allgather(ranks, unit, true);
      alltoall(ranks, unit);
    }
    for (int root = 0; root < static_cast<int>(hosts.size()); ++root) {
      for (const bool in_place : {false, true}) {
        for (const size_t bytes : {0U, 1U, 5000U, 400'001U}) broadcast(ranks, {bytes}, root, in_place);
        broadcast(ranks, {0, 3, 100'000, 0, 1, 165'536, 70'001, 0}, root, in_place);
      }
    }
  }
}

}  // namespace

int main() {
  what_is_a_grid();
  movement();
  return check::report();
}
