#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/guard.h"
#include "transport/mpi_library.h"
#include "transport/waiter.h"

namespace farandole {

/// An MPI communicator for the ranks of one engine.
class MpiComm {
 public:
  /// Creates the communicator of the ranks `ranks` of MPI_COMM_WORLD, in this order. Blocks until all of them call it,
  /// without a deadline. Throws Error (Invalid) if MPI does not allow calls from several threads, Error (Fabric) if MPI
  /// fails.
  MpiComm(void* loaded, const std::vector<int>& ranks);
  /// Frees the communicator, unless MPI has ended or is unusable after a failure.
  ~MpiComm();
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;

  [[nodiscard]] MpiLibrary& library() const { return library_; }
  [[nodiscard]] MpiLibrary::Handle handle() const { return comm_; }
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  /// Returns whether this process has abandoned a wait for MPI. MPI may still use the buffers of that call, and
  /// MPI_Finalize would block for ever.
  [[nodiscard]] static bool has_abandoned();

 private:
  MpiLibrary& library_;
  MpiLibrary::Handle comm_ = 0;
  const uint32_t fork_number_;
  int rank_ = 0;
  int size_ = 0;
};

/// An MPI communicator with the guard, policy and scratch memory of algorithms over MPI.
class MpiMesh {
 public:
  using Handle = MpiLibrary::Handle;

  /// With `direct`, allreduces and allgathers exchange data directly between ranks. Otherwise they use MPI's
  /// collectives, which take more steps.
  MpiMesh(std::shared_ptr<MpiComm> comm, Guard& guard, WaitPolicy policy, bool direct);
  ~MpiMesh();
  MpiMesh(MpiMesh&&) = default;

  [[nodiscard]] int rank() const { return comm_->rank(); }
  [[nodiscard]] int size() const { return comm_->size(); }
  [[nodiscard]] bool is_direct() const { return direct_; }
  [[nodiscard]] MpiLibrary& library() const { return comm_->library(); }
  [[nodiscard]] Handle comm() const { return comm_->handle(); }

  /// Starts a nonblocking call. `call` receives the address for its request. Throws Error: Fabric, or PeerLost.
  template <class Call>
  void start(const char* function, Call call) {
    Handle request = 0;
    if (const int code = call(&request); code != 0) fail(function, code);
    memory_->requests.push_back(request);
  }
  /// Waits for all started calls, which move about `bytes`. Throws what the guard throws, or Error (Fabric). After an
  /// error this process does not use MPI any more.
  void finish(size_t bytes);

  // Uninitialized memory, reused by later operations. It lives as long as a call of MPI may use it.
  [[nodiscard]] std::byte* packed(size_t bytes) { return grown(memory_->packed, bytes); }
  [[nodiscard]] std::byte* received(size_t bytes) { return grown(memory_->received, bytes); }
  [[nodiscard]] std::vector<int>& counts() { return memory_->counts; }
  [[nodiscard]] std::vector<int>& places() { return memory_->places; }
  [[nodiscard]] std::vector<std::span<const std::byte>>& sent() { return memory_->sent; }
  [[nodiscard]] std::vector<std::span<std::byte>>& slots() { return memory_->slots; }
  [[nodiscard]] std::vector<const void*>& sources() { return memory_->sources; }

 private:
  struct Memory {
    std::vector<std::byte> packed, received;
    std::vector<int> counts, places;
    std::vector<std::span<const std::byte>> sent;  // one entry per rank, as in `slots` and `sources`
    std::vector<std::span<std::byte>> slots;
    std::vector<const void*> sources;
    std::vector<Handle> requests;
  };
  static std::byte* grown(std::vector<std::byte>& memory, size_t bytes);
  void wait(Handle& request, uint64_t begin, uint64_t busy);
  [[noreturn]] void fail(const char* function, int code);

  std::shared_ptr<MpiComm> comm_;
  Guard& guard_;
  WaitPolicy policy_;
  bool direct_;
  std::unique_ptr<Memory> memory_;  // never freed once a call was abandoned
};

}  // namespace farandole
