// Failures in the middle of a collective: every rank soon gets an error that names the dead or silent rank.
#include <chrono>
#include <functional>

#include "collectives/link_collectives.h"
#include "collectives/link_exchange.h"
#include "link_ranks.h"

namespace {

using namespace farandole;
using namespace std::chrono_literals;
using check::Ranks;
using check::Wire;

constexpr unsigned kLarge = check::kSlow ? 1 << 20 : 4 << 20;

// An error before the limit comes from the rank's death, not from the clock; a busy machine is slow.
constexpr auto kLimit = 60s;
constexpr auto kSoon = 30s;

struct Operation {
  const char* name;
  std::function<void(Mesh&)> run;
};

std::vector<Operation> operations(size_t bytes) {
  return {
      {"allreduce",
       [=](Mesh& mesh) {
         std::vector<std::byte> data(bytes);
         const Piece piece{data.data(), data.data(), bytes};
         link_allreduce(mesh, {&piece, 1}, DType::Float32, {});
       }},
      {"reducescatter",
       [=](Mesh& mesh) {
         std::vector<std::byte> data(bytes), out(bytes);
         std::vector<size_t> counts(static_cast<size_t>(mesh.size()), bytes / 4 / static_cast<size_t>(mesh.size()));
         link_reducescatter(mesh, data.data(), out.data(), counts, DType::Float32, {});
       }},
      {"allgather",
       [=](Mesh& mesh) {
         std::vector<std::byte> mine(bytes), all(bytes * static_cast<size_t>(mesh.size()));
         std::vector<std::byte*> out;
         for (int r = 0; r < mesh.size(); ++r) out.push_back(all.data() + static_cast<size_t>(r) * bytes);
         link_allgather(mesh, mine, out, std::vector<size_t>(out.size(), bytes));
       }},
      {"alltoall",
       [=](Mesh& mesh) {
         const auto n = static_cast<size_t>(mesh.size());
         std::vector<std::byte> in(bytes * n), out(bytes * n);
         std::vector<const std::byte*> from;
         std::vector<std::byte*> to;
         for (size_t r = 0; r < n; ++r) from.push_back(in.data() + r * bytes);
         for (size_t r = 0; r < n; ++r) to.push_back(out.data() + r * bytes);
         const std::vector<size_t> sizes(n, bytes);
         link_alltoall(mesh, from, sizes, to, sizes);
       }},
  };
}

/// Sends a little to every rank, like a rank that dies in the middle of its work.
void begin_and_stop(Mesh& mesh) {
  const std::vector<std::byte> some(100);
  for (int peer = 0; peer < mesh.size(); ++peer)
    if (peer != mesh.rank()) CHECK_EQ(mesh.link(peer).try_send(some), some.size());
}

/// Checks that every rank but `victim` gets an error that names it, long before the limit.
void check_all_hear(const char* name, int size, int victim, Wire wire, const std::function<void(Mesh&)>& body) {
  const std::string context = std::string(name) + ", rank " + std::to_string(victim) + " of " + std::to_string(size) +
                              " over " + check::name_of(wire);
  Ranks ranks(size, wire, kLimit);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = ranks.run([&](Mesh& mesh) {
    if (mesh.rank() != victim) return body(mesh);
    begin_and_stop(mesh);
    ranks.drop(victim);
  });
  check::that(std::chrono::steady_clock::now() - begin < kSoon, "heard soon", context);
  for (int rank = 0; rank < size; ++rank) {
    const auto& error = errors[static_cast<size_t>(rank)];
    if (rank == victim) continue;
    check::that(error.has_value(), "failed", context);
    if (!error) continue;
    check::that(error->kind == ErrorKind::PeerLost, "peer lost", context + ": " + error->what());
    check::equal(error->rank, victim, context);
  }
}

void a_peer_that_dies_is_named_on_all_ranks() {
  for (const Wire wire : {Wire::Unix, Wire::Tcp}) {
    for (const size_t bytes : {4000U, kLarge}) {
      for (const auto& operation : operations(bytes)) {
        for (const int size : {2, 3, 5})
          for (const int victim : {0, size - 1}) check_all_hear(operation.name, size, victim, wire, operation.run);
      }
    }
  }
}

void a_dead_rank_in_the_chain_is_named_by_those_below_it() {
  for (const size_t bytes : {4000U, kLarge}) {
    Ranks ranks(4, Wire::Tcp, kLimit);
    const auto begin = std::chrono::steady_clock::now();
    // The victim is the root, so all other ranks starve.
    const auto errors = ranks.run([&](Mesh& mesh) {
      if (mesh.rank() == 0) return ranks.drop(0);
      std::vector<std::byte> data(bytes);
      const Piece piece{data.data(), data.data(), bytes};
      link_broadcast(mesh, {&piece, 1}, 0);
    });
    CHECK(std::chrono::steady_clock::now() - begin < kSoon);
    for (size_t rank = 1; rank < 4; ++rank) {
      CHECK(errors[rank].has_value());
      if (!errors[rank]) continue;
      CHECK(errors[rank]->kind == ErrorKind::PeerLost);
      CHECK_EQ(errors[rank]->rank, 0);
    }
  }
}

void a_silent_peer_ends_at_the_deadline() {
  for (const auto& operation : operations(1 << 20)) {
    for (const int size : {2, 4}) {
      Ranks ranks(size, Wire::Tcp, 300ms);
      const auto begin = std::chrono::steady_clock::now();
      const auto errors = ranks.run([&](Mesh& mesh) {
        if (mesh.rank() != 1) operation.run(mesh);
      });
      const auto took = std::chrono::steady_clock::now() - begin;
      check::that(took >= 250ms && took < 250ms + kSoon, "ended at the deadline", operation.name);
      for (int rank = 0; rank < size; ++rank) {
        const auto& error = errors[static_cast<size_t>(rank)];
        if (rank != 1) check::that(error && error->kind == ErrorKind::Timeout, "timed out", operation.name);
      }
    }
  }
}

/// A rank may leave while others work, if they need nothing more from it.
void leaving_after_the_own_part_is_no_failure() {
  for (const size_t bytes : {100U, 2U << 20}) {
    Ranks ranks(3, Wire::Tcp, kLimit);
    const auto errors = ranks.run([&](Mesh& mesh) {
      std::vector<std::byte> data(bytes, std::byte{static_cast<uint8_t>(mesh.rank())});
      const Piece piece{data.data(), data.data(), bytes};
      link_broadcast(mesh, {&piece, 1}, 0);
      CHECK(data[bytes - 1] == std::byte{0});
      if (mesh.rank() == 0) ranks.drop(0);
    });
    for (const auto& error : errors) CHECK(!error.has_value());
  }
}

/// The same, although nothing moves for longer than a link may have hung up.
void a_stall_after_a_departure_is_no_failure() {
  Ranks ranks(3, Wire::Tcp, kLimit);
  const auto errors = ranks.run([&](Mesh& mesh) {
    if (mesh.rank() == 0) return ranks.leave(0);
    std::byte byte{};
    std::vector<Outgoing> sends;
    std::vector<Incoming> receives;
    if (mesh.rank() == 1) {
      std::this_thread::sleep_for(700ms);
      sends.push_back({&mesh.link(2), &byte, 1});
    } else {
      receives.push_back({&mesh.link(1), &byte, 1});
    }
    exchange(mesh, sends, receives);
  });
  for (const auto& error : errors) check::that(!error, "no error", error ? error->what() : "");
}

}  // namespace

int main() {
  a_peer_that_dies_is_named_on_all_ranks();
  a_dead_rank_in_the_chain_is_named_by_those_below_it();
  a_silent_peer_ends_at_the_deadline();
  leaving_after_the_own_part_is_no_failure();
  a_stall_after_a_departure_is_no_failure();
  return check::report();
}
