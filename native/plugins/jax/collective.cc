// The custom call of farandole in JAX's programs: a collective operation on any number of arrays.
#include <array>
#include <atomic>
#include <bit>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "engine/request.h"
#include "plugins/core_table.h"
#include "plugins/jax/xla_ffi.h"

namespace farandole::jax {
namespace {

std::atomic<const plugins::CoreTable*> core{nullptr};

/// DType by XLA's type; -1 for others.
constexpr std::array<int, 17> kTypes = [] {
  std::array<int, 17> types{};
  types.fill(-1);
  const auto set = [&types](size_t theirs, DType ours) { types[theirs] = static_cast<int>(ours); };
  set(1, DType::Bool), set(2, DType::Int8), set(3, DType::Int16), set(4, DType::Int32), set(5, DType::Int64);
  set(6, DType::UInt8), set(7, DType::UInt16), set(8, DType::UInt32), set(9, DType::UInt64), set(10, DType::Float16);
  set(11, DType::Float32), set(12, DType::Float64), set(16, DType::BFloat16);
  return types;
}();

/// Indices into the attribute `numbers`; an alltoall's splits follow.
enum Number : size_t { kRankId, kProcessSet, kKind, kOp, kRoot, kGrouped, kPrescale, kPostscale, kNumbers };

xla::Code code_of(int32_t error) {
  if (error == plugins::kNotInitialized) return xla::Code::FailedPrecondition;
  switch (static_cast<ErrorKind>(error)) {
    case ErrorKind::Invalid: return xla::Code::InvalidArgument;
    case ErrorKind::Mismatch:
    case ErrorKind::Joined: return xla::Code::FailedPrecondition;
    case ErrorKind::Timeout: return xla::Code::DeadlineExceeded;
    case ErrorKind::PeerLost:
    case ErrorKind::Fabric:
    case ErrorKind::Closed: return xla::Code::Aborted;
    case ErrorKind::Internal: break;
  }
  return xla::Code::Internal;
}

template <class Struct>
Struct made() {
  Struct made{};
  made.head.struct_size = sizeof(Struct);
  return made;
}

xla::Error* error_of(const xla::Api& api, xla::Code code, const char* message) {
  auto wanted = made<xla::ErrorCreate>();
  wanted.message = message;
  wanted.code = code;
  return api.create_error(&wanted);
}

/// One run of a custom call, from its start until XLA has its outcome. XLA keeps the arrays until then, but not their
/// descriptions.
class Run {
 public:
  /// With `in_place`, as on devices, requests name XLA's buffers as outputs. Otherwise allocate() returns them if the
  /// plan determines the size of the results.
  Run(const xla::CallFrame& frame, bool in_place) : api_(*frame.api) {
    for (int64_t i = 0; i < frame.attributes.size; ++i) {
      const std::string_view name(frame.attributes.names[i]->data, frame.attributes.names[i]->size);
      if (name == "name" && frame.attributes.types[i] == xla::kString) {
        const auto& text = *static_cast<const xla::Bytes*>(frame.attributes.values[i]);
        name_.assign(text.data, text.size);
      } else if (name == "numbers" && frame.attributes.types[i] == xla::kArray) {
        const auto& array = *static_cast<const xla::Array*>(frame.attributes.values[i]);
        const auto* data = static_cast<const int64_t*>(array.data);
        numbers_.assign(data, data + array.size);
      }
    }
    const auto count = static_cast<size_t>(frame.arguments.size);
    if (numbers_.size() < kNumbers || frame.results.size != frame.arguments.size) {
      problem_ = "the call is not one that this build of farandole makes";
      return;
    }
    const auto kind = static_cast<Kind>(numbers_[kKind]);
    const bool is_allocated = traits_of(kind).is_sized_by_plan() && !in_place;
    shapes_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const xla::Buffer& in = *frame.arguments.buffers[i];
      const xla::Buffer& out = *frame.results.buffers[i];
      const auto type = static_cast<size_t>(in.dtype);
      if (type >= kTypes.size() || kTypes[type] < 0) problem_ = "arrays of this type cannot be sent";
      if (!problem_.empty()) return;
      const size_t room = bytes_of(out, static_cast<DType>(kTypes[type]));
      tensors_.push_back({in.data, is_allocated ? nullptr : out.data, room, kTypes[type], 0, nullptr});
      shapes_[i].assign(in.dims, in.dims + in.rank);
      tensors_[i].dims = static_cast<int32_t>(in.rank);
      tensors_[i].shape = shapes_[i].data();
      results_.push_back({out.data, room});
    }
  }

  [[nodiscard]] const std::string& problem() const { return problem_; }

  void start(xla::Future* future, const plugins::CoreTable& table) {
    future_ = future;
    const plugins::Request asked = request();
    const plugins::Listener listener{&done, &allocate, this};
    table.submit(&asked, &listener);  // it may be deleted when this returns
  }

  /// Runs on arrays in the memory of a device. Returns null once the operation is in `stream`, or an error.
  xla::Error* run_in(void* stream, const plugins::CoreTable& table) {
    const plugins::Request asked = request();
    xla::Error* failed = nullptr;
    struct Ending {
      const xla::Api& api;
      xla::Error*& failed;
    } ending{api_, failed};
    const auto end = [](void* cookie, const plugins::Outcome* outcome) noexcept {
      const Ending& ending = *static_cast<Ending*>(cookie);
      if (outcome->error >= 0) ending.failed = error_of(ending.api, code_of(outcome->error), outcome->text);
    };
    const plugins::Listener listener{end, &allocate, &ending};
    table.run_on_device(&asked, stream, &listener);
    return failed;
  }

 private:
  [[nodiscard]] plugins::Request request() const {
    return {static_cast<int32_t>(numbers_[kRankId]),
            static_cast<int32_t>(numbers_[kProcessSet]),
            static_cast<int32_t>(numbers_[kKind]),
            static_cast<int32_t>(numbers_[kOp]),
            static_cast<int32_t>(numbers_[kRoot]),
            numbers_[kGrouped] != 0,
            !name_.ends_with('.'),
            std::bit_cast<double>(numbers_[kPrescale]),
            std::bit_cast<double>(numbers_[kPostscale]),
            name_.c_str(),
            numbers_.data() + kNumbers,
            numbers_.size() - kNumbers,
            tensors_.data(),
            tensors_.size()};
  }

  struct Room {
    void* data;
    size_t bytes;
  };

  [[nodiscard]] static size_t bytes_of(const xla::Buffer& buffer, DType dtype) {
    size_t bytes = size_of(dtype);
    for (int64_t dim = 0; dim < buffer.rank; ++dim) bytes *= static_cast<size_t>(buffer.dims[dim]);
    return bytes;
  }

  static void* allocate(void* cookie, size_t index, const int64_t*, int32_t, size_t bytes) noexcept {
    auto& run = *static_cast<Run*>(cookie);
    const Room& room = run.results_[index];
    if (room.bytes == bytes) return room.data;
    run.misfit_ = true;
    return nullptr;
  }

  static void done(void* cookie, const plugins::Outcome* outcome) noexcept {
    const std::unique_ptr<Run> run(static_cast<Run*>(cookie));
    if (run->misfit_) {
      run->fail(xla::Code::InvalidArgument,
                ("'" + run->name_ +
                 "': the ranks' arrays have different numbers of rows, but a compiled program has room for equal ones "
                 "only; give arrays of one shape, or call it outside of jax.jit")
                    .c_str());
    } else if (outcome->error >= 0) {
      run->fail(code_of(outcome->error), outcome->text);
    } else {
      auto there = made<xla::FutureSetAvailable>();
      there.future = run->future_;
      run->api_.set_available(&there);
    }
  }

  void fail(xla::Code code, const char* message) {
    auto failed = made<xla::FutureSetError>();
    failed.future = future_;
    failed.error = error_of(api_, code, message);
    api_.set_error(&failed);
  }

  const xla::Api& api_;
  xla::Future* future_ = nullptr;
  std::string name_, problem_;
  std::vector<int64_t> numbers_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<plugins::Tensor> tensors_;
  std::vector<Room> results_;
  std::atomic<bool> misfit_{false};
};

/// Returns the core's functions, or null and an error.
const plugins::CoreTable* connected(const xla::Api& api, xla::Error*& error) {
  const plugins::CoreTable* table = core.load();
  if (table == nullptr)
    error = error_of(api, xla::Code::FailedPrecondition, "the core of farandole is not connected to JAX");
  return table;
}

/// Starts a call on the CPU. A future tells XLA about its completion, so no thread waits.
xla::Error* execute(xla::CallFrame& frame) {
  xla::Error* error = nullptr;
  const plugins::CoreTable* table = connected(*frame.api, error);
  if (table == nullptr) return error;
  auto run = std::make_unique<Run>(frame, false);
  if (!run->problem().empty()) return error_of(*frame.api, xla::Code::InvalidArgument, run->problem().c_str());
  auto future = made<xla::FutureCreate>();
  if ((error = frame.api->create_future(&future)) != nullptr) return error;
  frame.future = future.future;
  // The completion of the operation deletes it.
  run.release()->start(future.future, *table);
  return nullptr;
}

/// Runs a call on a GPU while XLA enqueues the work of a program in its stream. XLA would block on a future here, so
/// the call blocks itself: until all ranks take part, not until the stream has reached the call.
xla::Error* execute_on_cuda(xla::CallFrame& frame) {
  xla::Error* error = nullptr;
  const plugins::CoreTable* table = connected(*frame.api, error);
  if (table == nullptr) return error;
  Run run(frame, true);
  if (!run.problem().empty()) return error_of(*frame.api, xla::Code::InvalidArgument, run.problem().c_str());
  auto stream = made<xla::StreamGet>();
  stream.context = frame.context;
  if ((error = frame.api->get_stream(&stream)) != nullptr) return error;
  return run.run_in(stream.stream, *table);
}

/// Fills in the interface version if the frame asks for metadata; returns whether it does.
bool answers_metadata(const xla::CallFrame& frame) {
  // XLA before jaxlib 0.8 passes no `api` when it asks for metadata.
  if (frame.head.extension == nullptr || frame.head.extension->type != xla::kMetadata) return false;
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.head.extension)->metadata;
  metadata.version.major = 0;
  metadata.version.minor = 1;
  return true;
}

}  // namespace
}  // namespace farandole::jax

extern "C" {

/// Sets the core's functions; returns null, or an error text.
__attribute__((visibility("default"))) const char* farandole_jax_connect(const void* table) {
  const auto* given = static_cast<const farandole::plugins::CoreTable*>(table);
  if (given->version != farandole::plugins::kTableVersion) return "it is not of the same build as the core";
  farandole::jax::core = given;
  return nullptr;
}

/// The entry points that XLA calls in every stage of a program.
__attribute__((visibility("default"))) farandole::xla::Error* farandole_jax_collective(
    farandole::xla::CallFrame* frame) {
  using namespace farandole;  // NOLINT: outside of it only because of its C name
  if (jax::answers_metadata(*frame) || frame->stage != xla::kExecute) return nullptr;
  return jax::execute(*frame);
}

__attribute__((visibility("default"))) farandole::xla::Error* farandole_jax_collective_on_cuda(
    farandole::xla::CallFrame* frame) {
  using namespace farandole;  // NOLINT: outside of it only because of its C name
  if (jax::answers_metadata(*frame) || frame->stage != xla::kExecute) return nullptr;
  return jax::execute_on_cuda(*frame);
}

}  // extern "C"
