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

/// Throws Error (Invalid) when `output` cannot hold the result of an operation on `input`, as far as that shows now.
void require_room(Kind kind, const Captured& output, const Captured& input, std::string_view name);

/// An engine as Python sees it. The operations that a program asks for step after step are kept by name, with all that
/// is the same each time, so that asking again costs no more than looking. Used under the GIL.
class Calls {
 public:
  using Sequence = nanobind::typed<nanobind::sequence, nanobind::object>;

  /// Keeps `capacity` names; those that come later are handled alike, but not kept.
  Calls(std::shared_ptr<Engine> engine, size_t capacity) : engine_(std::move(engine)), capacity_(capacity) {}

  [[nodiscard]] const std::shared_ptr<Engine>& engine() const { return engine_; }

  /// Does an allreduce of `input` into `output`, which may be the same tensor. All without keywords, which cost more
  /// than all the rest.
  void reduce(nanobind::str name, nanobind::handle input, nanobind::handle output, int op, double prescale,
              double postscale);

  /// The same, only started.
  Handle start_reduce(nanobind::str name, nanobind::handle input, nanobind::handle output, int op, double prescale,
                      double postscale);

  /// Does an allreduce of the members of a group, or starts an operation of any kind that takes groups. `outputs` is
  /// empty where the engine allocates the results. Either all members are asked for or, when an error is thrown, none.
  void reduce_group(const std::string& name, const Sequence& inputs, const Sequence& outputs, int op, double prescale,
                    double postscale, bool cacheable);
  GroupHandle start_group(int kind, const std::string& name, const Sequence& inputs, const Sequence& outputs, int op,
                          double prescale, double postscale, bool cacheable);

  /// Starts many allreduces, each under a name of its own and independent of the others. Unless `wake`, nothing of them
  /// happens before somebody waits. Either all are asked for or, when an error is thrown, none.
  GroupHandle start_each(const Sequence& names, const Sequence& inputs, const Sequence& outputs, int op,
                         double prescale, double postscale, bool wake);

 private:
  /// What is asked for under one name.
  struct Call {
    Recurring recurring;
    std::vector<OperationPtr> given;  // the same operations, in the order in which they were given
    bool busy = false;                // a thread is in the engine with it

    /// Do only we know of the operations? Whoever has a handle may still look at the result.
    [[nodiscard]] bool is_free() const;
  };
  /// What does not depend on the tensors.
  struct Terms {
    Kind kind;
    ReduceOp op;
    double prescale, postscale;
    bool cacheable;
  };
  struct Text {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };

  /// One tensor and where its result goes.
  struct Tensors {
    Captured input;
    std::optional<Captured> output;  // none: the engine allocates it
  };

  using Kept = std::unordered_map<std::string, Call, Text, std::equal_to<>>;

  [[nodiscard]] static Tensors tensors_of(Kind kind, std::string_view name, nanobind::handle input,
                                          nanobind::handle output);
  [[nodiscard]] static std::vector<Tensors> tensors_of(Kind kind, std::string_view name, const Sequence& inputs,
                                                       const Sequence& outputs);
  /// The call of that name, or `once` when it cannot be kept.
  [[nodiscard]] Call& call_of(Kept& kept, std::string_view name, bool cacheable, Call& once);
  void prepare(Call& call, std::string_view name, const Terms& terms, std::span<const Tensors> tensors, bool grouped);
  static void name_members(Call& call, std::string_view name, size_t count, bool grouped);
  /// Makes `request` ask for this; returns whether it has changed.
  static bool fit(Request& request, const Terms& terms, const Captured& input);
  void run(Call& call, std::span<const Tensors> tensors);
  void start(std::span<const OperationPtr> operations, std::span<const Tensors> tensors, bool wake);

  std::shared_ptr<Engine> engine_;
  size_t capacity_;
  Kept singles_, groups_;
};

}  // namespace farandole
