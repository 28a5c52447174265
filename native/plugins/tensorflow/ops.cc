#include <dlfcn.h>
#include <link.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/tensorflow/collective.h"

// TensorFlow's definitions of the operations. They are registered while TensorFlow loads this library, because it
// creates Python functions for the operations registered by then.
namespace farandole::tensorflow {
namespace {

const char* problem = nullptr;  // the reason for missing operations

void keep_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = tf.NewShapeHandle();
  const auto inputs = static_cast<int>(tf.ShapeInferenceContextNumInputs(context));
  for (int i = 0; i < inputs && tf.GetCode(status) == 0; ++i) {
    tf.ShapeInferenceContextGetInput(context, i, shape, status);
    if (tf.GetCode(status) == 0) tf.ShapeInferenceContextSetOutput(context, i, shape, status);
  }
  tf.DeleteShapeHandle(shape);
}

void forget_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  // The interface cannot forget a single dimension; our Python functions set the others.
  tf.ShapeInferenceContextSetUnknownShape(context, status);
}

void make_scalar(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = tf.ShapeInferenceContextScalar(context);
  tf.ShapeInferenceContextSetOutput(context, 0, shape, status);
  tf.DeleteShapeHandle(shape);
}

constexpr const char* kMany =
    "T: list({bool, uint8, int8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, double}) >= 1";
constexpr const char* kOne =
    "T: {bool, uint8, int8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, double}";

struct Definition {
  const char* op;
  std::initializer_list<const char*> inputs, outputs, attributes;
  InferShapes shapes;
};

/// All operations are stateful. TensorFlow folds a stateless operation with a constant input and drops one with unused
/// results; the other ranks would wait for it forever.
bool define(const Definition& definition) {
  TF_OpDefinitionBuilder* builder = tf.NewOpDefinitionBuilder(definition.op);
  for (const char* input : definition.inputs) tf.OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : definition.outputs) tf.OpDefinitionBuilderAddOutput(builder, output);
  for (const char* attribute : definition.attributes) tf.OpDefinitionBuilderAddAttr(builder, attribute);
  tf.OpDefinitionBuilderAddAttr(builder, "rank_id: int");
  tf.OpDefinitionBuilderAddAttr(builder, "process_set: int");
  tf.OpDefinitionBuilderSetIsStateful(builder, true);
  tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, definition.shapes);
  Status status;
  tf.RegisterOpDefinition(builder, status.get());
  return status.ok();
}

bool define_all() {
  const char* name = "tensor_name: string";
  const char* grouped = "grouped: bool";
  const char* op = "op: int";
  const char* before = "prescale_bits: int";
  const char* after = "postscale_bits: int";
  return define({"FarandoleAllreduce",
                 {"tensors: T"},
                 {"reduced: T"},
                 {kMany, name, grouped, op, before, after},
                 &keep_shapes}) &&
         define({"FarandoleAllgather", {"tensors: T"}, {"gathered: T"}, {kMany, name, grouped}, &forget_shapes}) &&
         define({"FarandoleBroadcast",
                 {"tensors: T"},
                 {"spread: T"},
                 {kMany, name, grouped, "root: int"},
                 &keep_shapes}) &&
         define({"FarandoleReducescatter",
                 {"tensors: T"},
                 {"scattered: T"},
                 {kMany, name, grouped, op, before, after},
                 &forget_shapes}) &&
         define({"FarandoleAlltoall",
                 {"tensor: T", "splits: int32"},
                 {"received: T", "received_splits: int32"},
                 {kOne, name},
                 &forget_shapes}) &&
         define({"FarandoleBarrier", {}, {}, {name}, &forget_shapes}) &&
         define({"FarandoleJoin", {}, {"last: int32"}, {name}, &make_scalar}) &&
         define({"FarandolePlace", {}, {"number: int32"}, {"what: int"}, &make_scalar});
}

bool register_all() {
  return define_all() && register_collective("FarandoleAllreduce", Kind::Allreduce, {"tensors", "reduced"}) &&
         register_collective("FarandoleAllgather", Kind::Allgather, {"tensors", "gathered"}) &&
         register_collective("FarandoleBroadcast", Kind::Broadcast, {"tensors", "spread"}) &&
         register_collective("FarandoleReducescatter", Kind::Reducescatter, {"tensors", "scattered"}) &&
         register_collective("FarandoleAlltoall", Kind::Alltoall,
                             {"tensor", "splits", "received", "received_splits"}) &&
         register_collective("FarandoleBarrier", Kind::Barrier, {}) &&
         register_collective("FarandoleJoin", Kind::Join, {"last"}) && register_place("FarandolePlace", {"number"});
}

/// Returns whether another copy of this library is in the process. Both would register the same names, and TensorFlow
/// would refuse to run the operations of either.
bool has_twin() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* found) {
        const std::string_view path = object->dlpi_name;
        if (path.ends_with("/_tensorflow.so")) static_cast<std::vector<std::string>*>(found)->emplace_back(path);
        return 0;
      },
      &paths);
  int copies = 0;  // including this one
  for (const std::string& path : paths) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) continue;
    if (dlsym(library, "farandole_tensorflow_connect") != nullptr) ++copies;
    dlclose(library);
  }
  return copies > 1;
}

struct Loaded {
  Loaded() {
    problem = resolve();
    if (problem == nullptr && has_twin()) problem = "to be loaded once: another copy of farandole is in this process";
    if (problem == nullptr && !register_all()) problem = "registrations that succeed";
  }
} loaded;

}  // namespace
}  // namespace farandole::tensorflow

/// Sets the core's functions; returns null, or the missing requirement.
extern "C" __attribute__((visibility("default"))) const char* farandole_tensorflow_connect(const void* table) {
  using namespace farandole;  // NOLINT: outside of it only because of its C name
  const auto* core = static_cast<const plugins::CoreTable*>(table);
  if (core->version != plugins::kTableVersion) return "a core of the same build";
  if (tensorflow::problem == nullptr) tensorflow::core = core;
  return tensorflow::problem;
}
