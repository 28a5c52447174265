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
  /// Makes later work in `stream`, a stream of the same device, wait for this point. Does not block.
  void hold(CudaLibrary::Stream stream) const;

 private:
  friend class CudaDevice;
  CudaMark(CudaDevice& device, CudaLibrary::Event event) : device_(&device), event_(event) {}

  CudaDevice* device_;
  CudaLibrary::Event event_;
};

/// One GPU: its primary context, which frameworks use as well, streams for copies, and events. Thread-safe.
///
/// Each direction of copies has its own stream, because GPUs copy in both directions at once. Only marks order these
/// streams with others.
class CudaDevice {
 public:
  using Address = CudaLibrary::Address;
  using Stream = CudaLibrary::Stream;

  /// Bytes of unused memory that allocate() keeps for reuse. The driver returns more to the GPU at the next
  /// synchronization with a stream.
  static constexpr uint64_t kKept = 64 << 20;

  /// Makes the device's context current in this thread while this object lives, and allows calls during a capture.
  ///
  /// While any thread of the process captures a CUDA graph, calls such as the query of an event fail in all threads and
  /// invalidate the capture, unless the calling thread is in the relaxed capture mode. This object sets that mode.
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

  /// The stream to pass to `__dlpack__`: the producer of a tensor makes it wait for its work.
  [[nodiscard]] Stream handover() const { return handover_; }
  [[nodiscard]] Stream to_host() const { return to_host_; }
  [[nodiscard]] Stream to_device() const { return to_device_; }

  /// Returns the number that this GPU has in all processes and on all hosts.
  [[nodiscard]] std::array<char, 16> uuid() const;
  /// Returns a stream without implicit order with other streams; end_stream() destroys it after its work. The work of
  /// an urgent stream runs first when work of others is ready too.
  [[nodiscard]] Stream make_stream(bool urgent = false);
  void end_stream(Stream stream) noexcept;

  /// Throws Error (Invalid) with `name` if the work of `stream` is being captured into a CUDA graph instead of run.
  void require_running(Stream stream, const std::string& name) const;
  /// Returns the point after the work that is in `stream` now.
  [[nodiscard]] CudaMark mark(Stream stream);
  /// Starts a copy between device memory and pinned host memory. Keep both until a later mark has passed.
  void copy_to_host(std::byte* to, Address from, size_t bytes, Stream stream);
  void copy_to_device(Address to, const std::byte* from, size_t bytes, Stream stream);
  /// Starts a copy within the device's memory.
  void copy_within(Address to, Address from, size_t bytes, Stream stream);
  /// Starts to write zeros.
  void clear(Address at, size_t bytes, Stream stream);

  /// Returns whether driver and device support stream-ordered allocation; the driver from CUDA 11.2 on.
  [[nodiscard]] bool has_memory_pools() const;
  /// Lets the other devices of this process access memory of allocate(), as they can access that of frameworks. Needed
  /// if ranks are threads of one process, because NCCL then accesses the memory of their devices directly. Throws Error
  /// (Fabric).
  void share_pool();
  /// Returns uninitialized device memory for later work in `stream`. It comes from a separate pool, because frameworks
  /// use the device's default pool. Does not block. Throws Error (Fabric).
  [[nodiscard]] Address allocate(size_t bytes, Stream stream);
  /// Frees memory of allocate() after the work that is in `stream` now.
  void free(Address memory, Stream stream) noexcept;
  /// Frees memory of allocate() after the work before `last`.
  void free_after(Address memory, const CudaMark& last) noexcept;
  /// Returns the unused memory that allocate() keeps to the GPU. Does not block: memory stays if its work is not known
  /// to be complete.
  void trim_pool() noexcept;

  /// Returns pinned host memory, which all devices can copy. May block for milliseconds. Throws Error (Fabric).
  [[nodiscard]] std::byte* allocate_pinned(size_t bytes);
  void free_pinned(std::byte* memory) noexcept;

 private:
  friend class CudaMark;

  explicit CudaDevice(int ordinal);
  [[nodiscard]] int handle() const;
  [[nodiscard]] CudaLibrary::Pool pool();
  /// Makes `call`, which frees a resource; skips it if the device is broken, or in a forked child.
  template <class Call>
  void if_it_works(Call call) noexcept;

  const CudaLibrary& library_;
  const int ordinal_;
  const uint32_t fork_number_;              // a forked child must not use the device
  CudaLibrary::Context context_ = nullptr;  // never released: frameworks may end before this library
  Stream handover_ = nullptr;
  Stream to_host_ = nullptr;
  Stream to_device_ = nullptr;
  Stream returns_ = nullptr;  // orders the frees of free_after()
  std::once_flag pool_made_;
  std::atomic<CudaLibrary::Pool> pool_ = nullptr;  // created by the first call of pool()
  std::mutex mu_;                                  // guards unused_
  std::vector<CudaLibrary::Event> unused_;
};

}  // namespace farandole
