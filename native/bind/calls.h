#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bind/capture.h"
#include "bind/handle.h"
#include "engine/engine.h"
#include "engine/shared_staging.h"

namespace farandole {

class Bound;

/// The Python view of an engine. It keeps the operations of recurring allreduces and groups by name, so that a repeated
/// call costs no more than a lookup. Used under the GIL.
class Calls {
 public:
  /// Keeps at most `capacity` names. Calls with further names work, but are not kept.
  Calls(std::shared_ptr<Engine> engine, size_t capacity)
      : engine_(std::move(engine)), capacity_(capacity), staging_(std::make_shared<SharedStaging>(engine_)) {}

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }
  [[nodiscard]] const std::shared_ptr<SharedStaging>& staging() const { return staging_; }

  /// Performs `request`, a Request of Python's, under the name `name` and blocks until it has completed. `input` and
  /// `output` are tensors, which may be the same, or sequences of tensors for a group. If the engine allocates the
  /// results, `output` is None or an empty sequence. Returns a handle unless the output holds the whole result.
  std::optional<Handle> run(nanobind::handle request, nanobind::handle name, nanobind::handle input,
                            nanobind::handle output);

  /// Starts `request`, as above. Without `wake`, no progress is made until a thread waits. If an error is thrown, no
  /// member of the group was started.
  Handle start(nanobind::handle request, nanobind::handle name, nanobind::handle input, nanobind::handle output,
               bool wake);

  /// Starts to send `tensor` to rank `peer`, or to receive it from that rank; with peer -1 from any rank. A receive
  /// takes the first message with the same tag that no earlier one takes. `name` is for errors.
  Handle start_transfer(bool sends, nanobind::handle name, nanobind::handle tensor, int peer, uint32_t tag);

  /// Leaves the other ranks and fails what is pending; see Engine::shutdown(). Releases the GIL.
  void shutdown();
  [[nodiscard]] bool is_closed() const { return closed_; }

  /// Releases `bound` at shutdown, unless it is forgotten before.
  void remember(Bound& bound) { bound_.insert(&bound); }
  void forget(Bound& bound) { bound_.erase(&bound); }

  /// Starts many independent operations, each under its own name. If an error is thrown, none was started.
  Handle start_each(RequestView request, nanobind::handle names, nanobind::handle inputs, nanobind::handle outputs,
                    bool wake);

 private:
  friend class Bound;

  /// The operations of one name.
  struct Entry {
    Recurring recurring;
    std::vector<OperationPtr> given;  // the same operations, in the caller's order
    bool busy = false;                // a thread uses it in the engine
    PyObject* known = nullptr;        // the request in `known_` that has this entry
  };
  struct Text {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  /// A request that has an entry, and need not be read again: Python's objects are immutable, and kept.
  struct Known {
    nanobind::object request, name;
    RequestView view;
    Entry* entry;
  };

  /// One tensor and the place of its result.
  struct Tensors {
    Captured input;                  // empty for a barrier and a join
    std::optional<Captured> output;  // none: the engine allocates the result

    [[nodiscard]] TensorView view() const;
    [[nodiscard]] StagedTensor staged(std::string_view name) const;
  };

  using Kept = std::unordered_map<std::string, Entry, Text, std::equal_to<>>;

  [[nodiscard]] static Tensors tensors_of(Kind kind, std::string_view name, nanobind::handle input,
                                          nanobind::handle output);
  [[nodiscard]] static std::vector<Tensors> members_of(const RequestView& request, nanobind::handle inputs,
                                                       nanobind::handle outputs);
  /// Returns the entry of that name, or `once` if it cannot be kept.
  [[nodiscard]] Entry& entry_of(const RequestView& request, Entry& once);
  void prepare(Entry& entry, const RequestView& request, std::span<const Tensors> tensors);
  [[nodiscard]] bool prepare_again(Entry& entry, const RequestView& request, std::span<const Tensors> tensors);
  /// Performs `request`. `lasting` is the memory of a tensor that is captured without its owner.
  std::optional<Handle> perform(Entry& entry, const RequestView& request, std::span<const Tensors> tensors,
                                const Captured* lasting = nullptr);
  /// Does the same for one tensor, which may be on a device.
  std::optional<Handle> perform_one(Entry& entry, const RequestView& request, const Tensors& tensors,
                                    const Captured* lasting = nullptr);
  Handle start_one(Entry& entry, const RequestView& request, const Tensors& tensors, bool wake);
  /// Returns the entry of a request that was read before; null if it must be read.
  [[nodiscard]] const Known* known_of(nanobind::handle request, nanobind::handle name) const;
  /// Returns the entry of that request from now on, or `once`.
  [[nodiscard]] Entry& learn(nanobind::handle given, nanobind::handle name, const RequestView& request, Entry& once);
  void start(std::span<const OperationPtr> operations, std::span<const Tensors> tensors, bool wake,
             const Captured* lasting = nullptr);
  /// Starts operations of which some are on a device. `names` holds a name per tensor, unless they form a group.
  Handle start_staged(const RequestView& request, std::span<const std::string_view> names,
                      std::span<const Tensors> tensors);
  void wait_for_submissions();

  std::shared_ptr<Engine> engine_;
  size_t capacity_;
  Kept singles_, groups_;                       // entries are never moved or removed
  std::unordered_map<PyObject*, Known> known_;  // by Python's object of the request
  std::shared_ptr<SharedStaging> staging_;
  std::unordered_set<Bound*> bound_;
  bool closed_ = false;
};

}  // namespace farandole
