#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/piece.h"
#include "transport/mesh.h"

namespace farandole {

/// Bytes on their way to one peer.
struct Outgoing {
  Link* link = nullptr;
  const std::byte* at = nullptr;
  size_t left = 0;

  /// Sends what the link takes; returns whether anything went.
  bool push();
};

/// Bytes awaited from one peer.
struct Incoming {
  Link* link = nullptr;
  std::byte* at = nullptr;
  size_t left = 0;

  /// Reads what has arrived; returns whether anything had.
  bool pull();
};

/// Waits over all links of a mesh for those that an algorithm cannot go on without.
///
/// A link that hangs up although nothing is awaited from it counts as a lost peer once nothing has moved for a moment:
/// in a tree or a ring that is how a rank hears of a death two hops away.
class LinkWaiter {
 public:
  explicit LinkWaiter(Mesh& mesh);

  /// Progress was made.
  void moved();

  /// For the next pause: wake when `peer` has sent something, when it takes something.
  void want(int peer, bool reading, bool writing);

  /// For the next pause: something in memory is awaited too, which can wake nobody who sleeps.
  void want_memory() { wants_memory_ = true; }

  /// Nothing moved: waits a little for what was wanted, then forgets it. Throws what the guard throws, or `peer_lost`.
  void pause();

 private:
  void look_for_lost();

  Mesh& mesh_;
  Waiter waiter_;
  std::vector<pollfd> fds_;    // of the links that have one
  std::vector<int> peers_;     // whom each of them leads to
  bool wants_memory_ = false;  // something that poll() cannot wait for
  uint64_t hung_up_since_ns_ = 0;
};

/// Runs all transfers to their end, in both directions at once.
void exchange(Mesh& mesh, std::span<Outgoing> sends, std::span<Incoming> receives);

/// The input of `bucket` at `offset` as one run: in place where it lies in one piece, else copied to `staging`.
[[nodiscard]] const std::byte* input_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);

/// The same of the output, for reading.
[[nodiscard]] const std::byte* output_run(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);

/// Where to put the output of `bucket` at `offset` as one run: in place where it lies in one piece, else `staging`.
/// Then `write_output` brings it to its pieces.
[[nodiscard]] std::byte* output_place(const BucketView& bucket, size_t offset, size_t bytes, std::byte* staging);
void write_output(const BucketView& bucket, size_t offset, size_t bytes, const std::byte* run,
                  const std::byte* staging);

/// Copies every input of `bucket` to its output, where the two differ.
void copy_through(const BucketView& bucket);

/// `value` rounded up to a multiple of a cache line, which holds a whole number of elements of any type.
[[nodiscard]] constexpr size_t whole_lines(size_t value) { return (value + 63) / 64 * 64; }

}  // namespace farandole
