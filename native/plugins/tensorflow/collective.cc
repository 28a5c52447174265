#include "plugins/tensorflow/collective.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "plugins/tensorflow/callback.h"

namespace farandole::tensorflow {

const plugins::CoreTable* core = nullptr;

namespace {

/// DType by TF_DataType; -1 for types that the core does not have.
constexpr std::array<int, 24> kTypes = [] {
  std::array<int, 24> types{};
  types.fill(-1);
  const auto set = [&types](size_t theirs, DType ours) { types[theirs] = static_cast<int>(ours); };
  set(1, DType::Float32), set(2, DType::Float64), set(3, DType::Int32), set(4, DType::UInt8), set(5, DType::Int16);
  set(6, DType::Int8), set(9, DType::Int64), set(10, DType::Bool), set(14, DType::BFloat16), set(17, DType::UInt16);
  set(19, DType::Float16), set(22, DType::UInt32), set(23, DType::UInt64);
  return types;
}();
constexpr TF_DataType kInt32 = 3;

int code_of(int32_t error) {
  if (error == plugins::kNotInitialized) return kFailedPrecondition;
  switch (static_cast<ErrorKind>(error)) {
    case ErrorKind::Invalid: return kInvalidArgument;
    case ErrorKind::Mismatch:
    case ErrorKind::Joined: return kFailedPrecondition;
    case ErrorKind::Timeout: return kDeadlineExceeded;
    case ErrorKind::PeerLost:
    case ErrorKind::Fabric:
    case ErrorKind::Closed: return kAborted;
    case ErrorKind::Internal: break;
  }
  return kInternal;
}

/// Reader of a node's attributes. Its status keeps the first error.
class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction) : construction_(construction) {}

  int64_t integer(const char* name) {
    int64_t value = 0;
    if (status_.ok()) tf.OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_.get());
    return value;
  }
  bool boolean(const char* name) {
    TF_Bool value = 0;
    if (status_.ok()) tf.OpKernelConstruction_GetAttrBool(construction_, name, &value, status_.get());
    return value != 0;
  }
  std::string text(const char* name) {
    int32_t list = 0;
    int32_t length = 0;
    if (status_.ok()) tf.OpKernelConstruction_GetAttrSize(construction_, name, &list, &length, status_.get());
    std::string value(status_.ok() ? static_cast<size_t>(length) : 0, '\0');
    if (!value.empty())
      tf.OpKernelConstruction_GetAttrString(construction_, name, value.data(), value.size(), status_.get());
    return value;
  }
  void check() {
    if (!status_.ok()) tf.OpKernelConstruction_Failure(construction_, status_.get());
  }

 private:
  TF_OpKernelConstruction* construction_;
  Status status_;
};

/// A node of a graph: the part of a request that is the same in every run.
struct Collective {
  Kind kind;
  std::string name;
  int32_t rank_id, process_set;
  bool grouped = false, cacheable = false;
  int32_t op = 1, root = 0;
  double prescale = 1, postscale = 1;

  [[nodiscard]] const KindTraits& traits() const { return traits_of(kind); }
};

template <Kind kKind>
void* create(TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  auto made = std::make_unique<Collective>();
  made->kind = kKind;
  made->name = attributes.text("tensor_name");
  made->cacheable = !made->name.ends_with('.');
  made->rank_id = static_cast<int32_t>(attributes.integer("rank_id"));
  made->process_set = static_cast<int32_t>(attributes.integer("process_set"));
  if (made->traits().has_tensor() && !made->traits().has_splits) made->grouped = attributes.boolean("grouped");
  if constexpr (traits_of(kKind).reduces) {
    made->op = static_cast<int32_t>(attributes.integer("op"));
    // An attribute of type float would not hold a double.
    made->prescale = std::bit_cast<double>(attributes.integer("prescale_bits"));
    made->postscale = std::bit_cast<double>(attributes.integer("postscale_bits"));
  }
  if constexpr (traits_of(kKind).has_root) made->root = static_cast<int32_t>(attributes.integer("root"));
  attributes.check();
  return made.release();
}

/// One run of a node, from its start until its done callback.
class Run {
 public:
  /// Copies `done`, because it points to a function in the caller's frame.
  Run(const Collective& node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : node_(node), context_(context), done_(*reinterpret_cast<const Callback*>(done)) {}

  void start() {
    if (core == nullptr) return fail(kFailedPrecondition, "the core of farandole is not connected to TensorFlow");
    if (node_.traits().has_tensor() && !take_tensors()) return end();
    const plugins::Request request{node_.rank_id,      node_.process_set, static_cast<int32_t>(node_.kind),
                                   node_.op,           node_.root,        node_.grouped,
                                   node_.cacheable,    node_.prescale,    node_.postscale,
                                   node_.name.c_str(), splits_.data(),    splits_.size(),
                                   tensors_.data(),    tensors_.size()};
    const plugins::Listener listener{&done, &allocate, this};
    core->submit(&request, &listener);  // it may be deleted when this returns
  }

 private:
  /// Takes an input of any size, and its output if that has the same size.
  bool take_tensors() {
    const auto count = static_cast<size_t>(node_.traits().has_splits ? 1 : tf.NumInputs(context_));
    shapes_.resize(count);
    types_.resize(count);
    outputs_.resize(count, nullptr);
    for (size_t i = 0; i < count; ++i)
      if (!take(static_cast<int>(i))) return false;
    return !node_.traits().has_splits || read_splits();
  }

  bool take(int index) {
    const auto at = static_cast<size_t>(index);
    TF_Tensor* input = nullptr;
    tf.GetInput(context_, index, &input, status_.get());
    if (!status_.ok()) return refuse();
    types_[at] = tf.TensorType(input);
    for (int dim = 0; dim < tf.NumDims(input); ++dim) shapes_[at].push_back(tf.Dim(input, dim));
    const void* data = tf.TensorData(input);
    // The context holds the input during the run. A reference of ours would keep TensorFlow from reusing its memory.
    tf.DeleteTensor(input);
    const int type = kTypes.at(static_cast<size_t>(types_[at]));  // the operation's definition allows only these
    const auto dims = static_cast<int>(shapes_[at].size());
    void* to = nullptr;
    if (node_.traits().result == ResultSize::OfInput) {
      int forwarded = -1;
      outputs_[at] = tf.ForwardInputOrAllocateOutput(context_, &index, 1, index, shapes_[at].data(), dims, &forwarded,
                                                     status_.get());
      if (!status_.ok()) return refuse();
      to = tf.TensorData(outputs_[at]);
    }
    tensors_.push_back({data, to, 0, type, dims, shapes_[at].data()});
    return true;
  }

  bool read_splits() {
    TF_Tensor* splits = nullptr;
    tf.GetInput(context_, 1, &splits, status_.get());
    if (!status_.ok()) return refuse();
    const auto* data = static_cast<const int32_t*>(tf.TensorData(splits));
    splits_.assign(data, data + tf.TensorByteSize(splits) / sizeof(int32_t));
    tf.DeleteTensor(splits);
    return true;
  }

  static void* allocate(void* cookie, size_t index, const int64_t* shape, int32_t dims, size_t bytes) noexcept {
    auto& run = *static_cast<Run*>(cookie);
    TF_Tensor*& output = run.outputs_[index];
    output = tf.AllocateOutput(run.context_, static_cast<int>(index), run.types_[index], shape, dims, bytes,
                               run.status_.get());
    return run.status_.ok() ? tf.TensorData(output) : nullptr;
  }

  static void done(void* cookie, const plugins::Outcome* outcome) noexcept {
    auto& run = *static_cast<Run*>(cookie);
    if (outcome->error >= 0) return run.fail(code_of(outcome->error), outcome->text);
    if (run.node_.traits().has_splits) run.put(1, outcome->received, outcome->received_count);
    const int64_t last = outcome->last_joined;
    if (run.node_.kind == Kind::Join) run.put_scalar(last);
    run.end();
  }

  void put(int index, const int64_t* values, size_t count) {
    const auto dim = static_cast<int64_t>(count);
    write(tf.AllocateOutput(context_, index, kInt32, &dim, 1, count * sizeof(int32_t), status_.get()), values, count);
  }

  void put_scalar(int64_t value) {
    write(tf.AllocateOutput(context_, 0, kInt32, nullptr, 0, sizeof(int32_t), status_.get()), &value, 1);
  }

  void write(TF_Tensor* output, const int64_t* values, size_t count) {
    if (!status_.ok()) {
      refuse();
      return;
    }
    auto* to = static_cast<int32_t*>(tf.TensorData(output));
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(values[i]);
    outputs_.push_back(output);
  }

  bool refuse() {
    tf.OpKernelContext_Failure(context_, status_.get());
    return false;
  }

  void fail(int code, const char* text) {
    status_.set(code, text);
    refuse();
    end();
  }

  void end() {
    const std::unique_ptr<Run> self(this);
    for (TF_Tensor* output : outputs_)
      if (output != nullptr) tf.DeleteTensor(output);
    outputs_.clear();
    tf.RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&done_));
  }

  const Collective& node_;
  TF_OpKernelContext* context_;
  Callback done_;
  Status status_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<TF_DataType> types_;
  std::vector<plugins::Tensor> tensors_;
  std::vector<TF_Tensor*> outputs_;
  std::vector<int64_t> splits_;
};

void compute(void* node, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  (new Run(*static_cast<Collective*>(node), context, done))->start();
}

/// The creators of nodes, by kind.
constexpr auto kCreators = []<size_t... kinds>(std::index_sequence<kinds...>) {
  return std::array<Create, sizeof...(kinds)>{&create<static_cast<Kind>(kinds)>...};
}(std::make_index_sequence<kKinds>());

/// The number that a FarandolePlace node returns: an index into `plugins::Place`, or whether the rank is a member.
struct Question {
  int32_t rank_id, process_set;
  int64_t what;
};

void* create_question(TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  auto* question = new Question{static_cast<int32_t>(attributes.integer("rank_id")),
                                static_cast<int32_t>(attributes.integer("process_set")), attributes.integer("what")};
  attributes.check();
  return question;
}

void answer(void* node, TF_OpKernelContext* context) {
  const auto& question = *static_cast<Question*>(node);
  Status status;
  plugins::Place place{};
  if (core == nullptr || core->find(question.rank_id, question.process_set, &place) != 0) {
    status.set(kFailedPrecondition, question.process_set == 0
                                        ? "farandole is not initialized in this process; call init() first"
                                        : "the process set is not there (any more)");
    return tf.OpKernelContext_Failure(context, status.get());
  }
  const std::array<int32_t, 5> answers{place.rank, place.size, place.local_rank, place.local_size,
                                       place.rank >= 0 ? 1 : 0};
  TF_Tensor* output = tf.AllocateOutput(context, 0, kInt32, nullptr, 0, sizeof(int32_t), status.get());
  if (!status.ok()) return tf.OpKernelContext_Failure(context, status.get());
  *static_cast<int32_t*>(tf.TensorData(output)) = answers.at(static_cast<size_t>(question.what));
  tf.DeleteTensor(output);
}

constexpr std::array kDevices{"CPU", "GPU"};

bool add(TF_KernelBuilder* builder, const char* op, const Arguments& arguments) {
  for (const std::string& argument : arguments) tf.KernelBuilder_HostMemory(builder, argument.c_str());
  Status status;
  tf.RegisterKernelBuilder(op, builder, status.get());
  return status.ok();
}

}  // namespace

bool register_collective(const char* op, Kind kind, const Arguments& arguments) {
  return std::ranges::all_of(kDevices, [&](const char* device) {
    return add(tf.NewAsyncKernelBuilder(op, device, kCreators[static_cast<size_t>(kind)], &compute,
                                        [](void* node) { delete static_cast<Collective*>(node); }),
               op, arguments);
  });
}

bool register_place(const char* op, const Arguments& arguments) {
  return std::ranges::all_of(kDevices, [&](const char* device) {
    return add(tf.NewKernelBuilder(op, device, &create_question, &answer,
                                   [](void* node) { delete static_cast<Question*>(node); }),
               op, arguments);
  });
}

}  // namespace farandole::tensorflow
