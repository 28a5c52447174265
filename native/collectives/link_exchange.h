#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/piece.h"
#include "transport/mesh.h"

namespace farandole {

/// Bytes to send to one peer.
struct Outgoing {
  Link* link = nullptr;
  const std::byte* at = nullptr;
  size_t left = 0;

  /// Sends as much as the link takes; returns whether it took any.
  bool push();
};

/// Bytes to receive from one peer.
struct Incoming {
  Link* link = nullptr;
  std::byte* at = nullptr;
  size_t left = 0;

  /// Reads the bytes that have arrived; returns whether there were any.
  bool pull();
};

/// Waits over all links of a mesh for those that an algorithm needs next.
///
/// A peer whose link hangs up while no data is expected from it counts as lost once nothing has moved for half a
/// second, unless this rank has heard that it left in order. In a tree or a ring this reports a death two hops away.
class LinkWaiter {
 public:
  explicit LinkWaiter(Mesh& mesh);

  /// Reports progress.
  void moved();

  /// For the next pause: wake when `peer` has sent data (`reading`) or takes data (`writing`).
  void want(int peer, bool reading, bool writing);

  /// For the next pause: data in memory is awaited too. It cannot wake a sleeper, so the pause is a short nap.
  void want_memory() { wants_memory_ = true; }

  /// Waits briefly after no progress, then clears the wants. Throws what the guard throws, or `peer_lost`.
  void pause();

 private:
  void look_for_lost();

  Mesh& mesh_;
  Waiter waiter_;
  std::vector<pollfd> fds_;    // of the links that have a descriptor
  std::vector<int> peers_;     // the peer of each descriptor
  bool wants_memory_ = false;  // data that poll() cannot wait for
  uint64_t hung_up_since_ns_ = 0;
};

/// Runs all transfers to completion, in both directions at once.
void exchange(Mesh& mesh, std::span<Outgoing> sends, std::span<Incoming> receives);

/// The input of `bucket` at `offset` as one run: in place if it lies in one piece, else copied to `staging`.
[[nodiscard]] const std::byte* input_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);

/// The output of `bucket` at `offset` as one run, for reading.
[[nodiscard]] const std::byte* output_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);

/// The place for the output of `bucket` at `offset` as one run: in place if it lies in one piece, else `staging`, from
/// which `write_output` copies it to its pieces.
[[nodiscard]] std::byte* output_place(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);
void write_output(const BucketView& bucket, size_t offset, size_t bytes, const std::byte* run,
                  const std::byte* staging);

/// Copies every input of `bucket` to its output, unless they are the same memory.
void copy_through(const BucketView& bucket);

/// Rounds `value` up to a multiple of a cache line, which holds whole elements of every type.
[[nodiscard]] constexpr size_t whole_lines(size_t value) { return (value + 63) / 64 * 64; }

}  // namespace farandole
