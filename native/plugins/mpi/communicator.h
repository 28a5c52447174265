#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core_table.h"
#include "plugins/mpi/abi.h"

namespace farandole::mpi {

/// Processes of a job in an order of their own, and their collectives. A call blocks until it has completed, within the
/// limits of the job, and throws Failure.
class Communicator {
 public:
  /// The text is for users.
  struct Failure {
    std::string text;
  };

  /// One whose every call fails with `text`.
  explicit Communicator(std::string text) : failure_(std::move(text)) {}

  /// A process set of the rank `rank_id`. `ranks` are the job's numbers of its members, in the communicator's order;
  /// `number` is different for each communicator, and the same on its members.
  Communicator(const plugins::CoreTable& table, int32_t rank_id, int32_t process_set, uint32_t number,
               std::vector<int32_t> ranks);

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }

  void allreduce(const void* input, void* output, size_t count, Element element, ReduceOp op) const;
  /// `count` elements of each rank; `output` has room for all.
  void allgather(const void* input, void* output, size_t count, Element element) const;
  /// `count` elements for each rank.
  void reduce_scatter(const void* input, void* output, size_t count, Element element, ReduceOp op) const;

  /// Starts to send to, or to receive from, the rank `peer` of this communicator. Returns what `finish` takes.
  [[nodiscard]] void* post(bool sends, void* data, size_t bytes, int peer) const;
  /// Blocks until a message is complete.
  static void finish(const plugins::CoreTable& table, void* posted);

 private:
  void require_usable() const;
  void run(int32_t kind, ReduceOp op, const void* input, void* output, size_t count, size_t room, DType dtype) const;
  [[nodiscard]] std::vector<std::byte> in_order(const std::byte* parts, size_t bytes, bool of_set) const;

  const plugins::CoreTable* table_ = nullptr;
  int32_t rank_id_ = 0;
  int32_t process_set_ = 0;
  uint32_t number_ = 0;
  int rank_ = 0;
  std::vector<int32_t> ranks_{0};  // the job's number of each rank
  std::vector<size_t> places_;     // the number of each rank in the process set; empty: its own number
  std::string failure_;
};

}  // namespace farandole::mpi
