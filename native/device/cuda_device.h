#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda_library.h"

namespace farandole {

class CudaDevice;

/// A point in a stream of one device. Returns its CUDA event to the device for reuse; move-only.
class CudaMark {
 public:
  CudaMark(CudaMark&& other) noexcept;
  CudaMark& operator=(CudaMark&& other) noexcept;
  ~CudaMark();

  [[nodiscard]] CudaDevice& device() const { return *device_; }
  /// Returns whether the work before this point is complete. Throws Error (Fabric) if the device has failed.
  [[nodiscard]] bool passed() const;
  /// Makes the later work in `stream`, of the same device, wait for this point. Does not block.
  void hold(CudaLibrary::Stream stream) const;

 private:
  friend class CudaDevice;
  CudaMark(CudaDevice& device, CudaLibrary::Event event) : device_(&device), event_(event) {}

  CudaDevice* device_;
  CudaLibrary::Event event_;
};

/// One GPU: its primary context, which frameworks use as well, streams for copies, and events. Thread-safe.
///
/// Copies have streams of their own, one for each direction, because GPUs copy in both directions at once. They are
/// ordered with other streams by marks only.
class CudaDevice {
 public:
  using Address = CudaLibrary::Address;
  using Stream = CudaLibrary::Stream;

  /// Bytes of unused memory that stay with allocate() for reuse. What is above goes back to the GPU when a stream is
  /// waited for.
  static constexpr uint64_t kKept = 64 << 20;

  /// Makes the device's context that of the thread while it lives, for the driver and for libraries that look at it.
  ///
  /// While any thread of the process captures a CUDA graph, calls such as a look at an event fail in all threads and
  /// spoil the capture, unless the calling thread says that they have nothing to do with it. It says so here.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaLibrary& library_;
    int capture_mode_;
  };

  /// Returns the device with this number, one object per process. Throws Error (Invalid) if there is none, Error
  /// (Fabric) if it cannot be used.
  static CudaDevice& of(int ordinal);
  /// Returns the device on which `stream` runs. Throws as of() does.
  static CudaDevice& of_stream(Stream stream);

  [[nodiscard]] int ordinal() const { return ordinal_; }

  /// A stream that producers of DLPack's tensors make wait for their work.
  [[nodiscard]] Stream handover() const { return handover_; }
  [[nodiscard]] Stream to_host() const { return to_host_; }
  [[nodiscard]] Stream to_device() const { return to_device_; }

  /// Returns the number that this GPU has in all processes and on all hosts.
  [[nodiscard]] std::array<char, 16> uuid() const;
  /// Returns a stream that waits for no other; end_stream() drops it after its work. An urgent one comes before the
  /// work of others when both can run.
  [[nodiscard]] Stream make_stream(bool urgent = false);
  void end_stream(Stream stream) noexcept;

  /// Throws Error (Invalid) with `name` if the work of `stream` is being captured into a CUDA graph instead of run.
  void require_running(Stream stream, const std::string& name) const;
  /// Returns the point after the work that is in `stream` now.
  [[nodiscard]] CudaMark mark(Stream stream);
  /// Starts a copy between device memory and pinned host memory, which both must stay until a later mark has passed.
  void copy_to_host(std::byte* to, Address from, size_t bytes, Stream stream);
  void copy_to_device(Address to, const std::byte* from, size_t bytes, Stream stream);
  /// Starts a copy within the device's memory.
  void copy_within(Address to, Address from, size_t bytes, Stream stream);
  /// Starts to write zeros.
  void clear(Address at, size_t bytes, Stream stream);

  /// Returns whether the driver gives memory in the order of streams: CUDA 11.2, on devices that can.
  [[nodiscard]] bool has_memory_pools() const;
  /// Lets the other devices of this process reach the memory of allocate(), as they reach that of frameworks. NCCL has
  /// it so among ranks that are threads of one process. Throws Error (Fabric).
  void share_pool();
  /// Returns device memory for the later work in `stream`, uninitialized. It comes from a pool of its own, because the
  /// device's default pool is the framework's. Does not wait. Throws Error (Fabric).
  [[nodiscard]] Address allocate(size_t bytes, Stream stream);
  /// Takes memory of allocate() back after the work that is in `stream` now.
  void free(Address memory, Stream stream) noexcept;
  /// Takes memory of allocate() back after the work before `last`.
  void free_after(Address memory, const CudaMark& last) noexcept;
  /// Gives the unused memory that allocate() has kept back to the GPU. Does not wait: memory whose work is not known to
  /// be complete stays.
  void trim_pool() noexcept;

  /// Returns pinned host memory, which all devices can copy. May block for milliseconds. Throws Error (Fabric).
  [[nodiscard]] std::byte* allocate_pinned(size_t bytes);
  void free_pinned(std::byte* memory) noexcept;

 private:
  friend class CudaMark;

  explicit CudaDevice(int ordinal);
  [[nodiscard]] int handle() const;
  [[nodiscard]] CudaLibrary::Pool pool();
  /// Makes `call`. Without a working device what it would free ends with the process.
  template <class Call>
  void if_it_works(Call call) noexcept;

  const CudaLibrary& library_;
  const int ordinal_;
  const uint32_t fork_number_;              // a forked child uses no device
  CudaLibrary::Context context_ = nullptr;  // never released: frameworks may end before this library
  Stream handover_ = nullptr;
  Stream to_host_ = nullptr;
  Stream to_device_ = nullptr;
  Stream returns_ = nullptr;  // of memory
  std::once_flag pool_made_;
  std::atomic<CudaLibrary::Pool> pool_ = nullptr;  // since the first call of pool()
  std::mutex mu_;                                  // guards unused_
  std::vector<CudaLibrary::Event> unused_;
};

}  // namespace farandole
