// Ranks as threads, each with an engine that takes tensors in the memory of the stand-in's devices.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_devices.h"
#include "engine/staging.h"
#include "engine_ranks.h"

namespace ranks {

using check::DeviceNumbers;
using farandole::CudaDevice;
using farandole::GpuOptions;
using farandole::RequestView;
using farandole::StagedCall;
using farandole::StagedTensor;
using farandole::Staging;

inline RequestView request_of(Kind kind, int root = 0, bool cacheable = false) {
  RequestView request;
  request.kind = kind;
  request.root = root;
  request.cacheable = cacheable;
  return request;
}

/// A rank's engine with tensors on device memory.
class DeviceRank {
 public:
  explicit DeviceRank(Engine& engine) : engine_(&engine, [](Engine*) {}), staging_(engine_) {}
  ~DeviceRank() {
    engine_->shutdown();
    staging_.close();
  }

  [[nodiscard]] int rank() const { return engine_->rank(); }
  [[nodiscard]] int size() const { return engine_->size(); }
  [[nodiscard]] Staging& staging() { return staging_; }

  static StagedTensor tensor(std::string_view name, const DeviceNumbers& in, const DeviceNumbers* out,
                             const std::vector<int64_t>& shape) {
    StagedTensor made;
    made.view.input = reinterpret_cast<const std::byte*>(in.address());
    made.view.dtype = DType::Float32;
    made.view.shape = shape;
    made.device = &in.device();
    made.input_stream = in.stream();
    if (out != nullptr) {
      made.view.output = reinterpret_cast<std::byte*>(out->address());
      made.view.room = out->bytes();
      made.output_stream = out->stream();
    }
    made.name = name;
    return made;
  }

  std::shared_ptr<StagedCall> start(RequestView request, const StagedTensor& tensor) {
    return staging_.start(request, {&tensor, 1});
  }
  /// Starts a sum; the result replaces the input.
  std::shared_ptr<StagedCall> sum(const std::string& name, const DeviceNumbers& numbers) {
    const std::vector<int64_t> shape{static_cast<int64_t>(numbers.bytes() / sizeof(float))};
    return start(request_of(Kind::Allreduce, 0, true), tensor(name, numbers, &numbers, shape));
  }
  /// Joins the other ranks, and waits for all.
  void join() {
    if (!staging_.wait_for_submissions(std::chrono::seconds(30))) throw farandole::Error::internal("a call hangs");
    const OperationPtr made = operation(Kind::Join, "join", DType::UInt8, {}, nullptr, nullptr);
    submit(*engine_, made);
    ranks::finish(*engine_, made);
  }
  void wait(StagedCall& call) {
    if (!staging_.wait(call, std::chrono::seconds(30))) throw farandole::Error::internal("a call hangs");
    for (size_t i = 0; i < call.size(); ++i)
      if (call.operation(i)->error) throw *call.operation(i)->error;
  }
  /// Waits, and lets the stream of `to` wait for the copies.
  void finish(StagedCall& call, const DeviceNumbers& to) {
    wait(call);
    call.hold(to.device(), to.stream());
  }

 private:
  std::shared_ptr<Engine> engine_;
  Staging staging_;
};

/// Numbers that differ between ranks, and their sum.
inline std::vector<float> own(const DeviceRank& rank, size_t count, float extra = 0) {
  return std::vector<float>(count, static_cast<float>(rank.rank() + 1) + extra);
}

inline float total(const DeviceRank& rank) { return static_cast<float>(rank.size() * (rank.size() + 1)) / 2; }

/// Sums in place and into other memory; many at once, waited for in another order. `device_of` gives the device of
/// each.
inline void many_sums(DeviceRank& rank, const std::function<int(int)>& device_of) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<DeviceNumbers>> in, out;
    std::vector<std::shared_ptr<StagedCall>> calls;
    for (int i = 0; i < 12; ++i) {
      const auto count = static_cast<size_t>(i * i * 100);
      const auto extra = static_cast<float>(round + i);
      in.push_back(std::make_unique<DeviceNumbers>(own(rank, count, extra), device_of(i)));
      out.push_back(i % 3 == 0 ? nullptr
                               : std::make_unique<DeviceNumbers>(std::vector<float>(count, -1), device_of(i)));
      const DeviceNumbers* to = out.back() ? out.back().get() : in.back().get();
      calls.push_back(
          rank.start(request_of(Kind::Allreduce, 0, true),
                     DeviceRank::tensor("x" + std::to_string(i), *in.back(), to, {static_cast<int64_t>(count)})));
    }
    for (size_t i = calls.size(); i-- > 0;) {
      const DeviceNumbers& to = out[i] ? *out[i] : *in[i];
      rank.finish(*calls[i], to);
      const float expected = total(rank) + static_cast<float>(rank.size() * (round + static_cast<int>(i)));
      check::that(to.read() == std::vector<float>(i * i * 100, expected), "the sum", std::to_string(i));
    }
  }
}

using DeviceBody = std::function<void(DeviceRank&)>;

/// Runs `body` for every rank; returns the text of each rank's exception, "" without one.
inline std::vector<std::string> run_on_devices(int size, const DeviceBody& body, const GpuOptions& gpu = {},
                                               const std::function<void(Segment&)>& meanwhile = nullptr) {
  std::vector<Wiring> wirings = wire(std::vector<int>(static_cast<size_t>(size), 0));
  const std::shared_ptr<Segment> segment = wirings.front().segment;
  std::vector<std::string> problems(wirings.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < wirings.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        EngineOptions given = options();
        given.gpu = gpu;
        Engine engine(std::move(wirings[rank]), given);
        DeviceRank device(engine);
        body(device);
      } catch (const std::exception& error) {
        problems[rank] = error.what();
      }
    });
  }
  if (meanwhile) meanwhile(*segment);
  for (std::thread& thread : threads) thread.join();
  return problems;
}

}  // namespace ranks
