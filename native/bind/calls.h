#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind/capture.h"
#include "bind/handle.h"
#include "engine/engine.h"

namespace farandole {

/// An engine as Python sees it. Allreduces and groups that a program asks for step after step are kept by name, with
/// all that is the same each time, so that asking again costs no more than looking. Used under the GIL.
class Calls {
 public:
  /// Keeps `capacity` names; those that come later are handled alike, but not kept.
  Calls(std::shared_ptr<Engine> engine, size_t capacity) : engine_(std::move(engine)), capacity_(capacity) {}

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

  /// Performs `request` and returns when it is done. `input` and `output` are tensors, which may be the same, or
  /// sequences of them for a group; where the engine allocates the results, `output` is None or an empty sequence.
  /// Returns a handle unless the output holds the whole result.
  std::optional<Handle> run(const RequestView& request, nanobind::handle input, nanobind::handle output);

  /// Starts `request`. Unless `wake`, nothing happens before a thread waits. Either all members of a group are started
  /// or, when an error is thrown, none.
  Handle start(const RequestView& request, nanobind::handle input, nanobind::handle output, bool wake);

  /// Starts many operations that are independent of each other, each under a name of its own. Either all are started
  /// or, when an error is thrown, none.
  Handle start_each(RequestView request, nanobind::handle names, nanobind::handle inputs, nanobind::handle outputs,
                    bool wake);

 private:
  /// The operations asked for under one name.
  struct Entry {
    Recurring recurring;
    std::vector<OperationPtr> given;  // the same operations, in the order in which they were given
    bool busy = false;                // a thread is in the engine with it
  };
  struct Text {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  /// One tensor and where its result goes.
  struct Tensors {
    Captured input;                  // empty for a barrier and a join
    std::optional<Captured> output;  // none: the engine allocates it

    [[nodiscard]] TensorView view() const;
  };

  using Kept = std::unordered_map<std::string, Entry, Text, std::equal_to<>>;

  [[nodiscard]] static Tensors tensors_of(Kind kind, std::string_view name, nanobind::handle input,
                                          nanobind::handle output);
  [[nodiscard]] static std::vector<Tensors> members_of(const RequestView& request, nanobind::handle inputs,
                                                       nanobind::handle outputs);
  /// Returns the entry of that name, or `once` when it cannot be kept.
  [[nodiscard]] Entry& entry_of(const RequestView& request, Entry& once);
  void prepare(Entry& entry, const RequestView& request, std::span<const Tensors> tensors);
  std::optional<Handle> run(Entry& entry, Kind kind, std::span<const Tensors> tensors);
  void start(std::span<const OperationPtr> operations, std::span<const Tensors> tensors, bool wake);

  std::shared_ptr<Engine> engine_;
  size_t capacity_;
  Kept singles_, groups_;
};

}  // namespace farandole
