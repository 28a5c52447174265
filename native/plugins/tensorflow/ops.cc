#include <dlfcn.h>
#include <link.h>

#include <cctype>
#include <cstring>
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
  std::string op;
  std::vector<const char*> inputs, outputs, attributes;
  InferShapes shapes;
};

/// All operations are stateful. TensorFlow folds a stateless operation with a constant input and drops one with unused
/// results; the other ranks would wait for it forever.
bool define(const Definition& definition) {
  TF_OpDefinitionBuilder* builder = tf.NewOpDefinitionBuilder(definition.op.c_str());
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

/// Returns the definition of a kind of operation, such as FarandoleAllreduce, by its traits.
Definition definition_of(Kind kind) {
  const KindTraits& traits = traits_of(kind);
  std::string op = std::string("Farandole") + traits.name;
  char& first = op[std::strlen("Farandole")];
  first = static_cast<char>(std::toupper(static_cast<unsigned char>(first)));
  const char* name = "tensor_name: string";
  if (kind == Kind::Join) return {op, {}, {"last: int32"}, {name}, &make_scalar};
  if (!traits.has_tensor()) return {op, {}, {}, {name}, &forget_shapes};
  if (traits.has_splits)
    return {
        op, {"tensor: T", "splits: int32"}, {"received: T", "received_splits: int32"}, {kOne, name}, &forget_shapes};
  Definition definition{op, {"tensors: T"}, {"results: T"}, {kMany, name, "grouped: bool"}, &keep_shapes};
  if (traits.is_sized_by_plan()) definition.shapes = &forget_shapes;
  std::vector<const char*>& attributes = definition.attributes;
  if (traits.reduces) attributes.insert(attributes.end(), {"op: int", "prescale_bits: int", "postscale_bits: int"});
  if (traits.has_root) attributes.push_back("root: int");
  return definition;
}

/// Returns the names of the inputs and outputs, which are in front of their types.
Arguments arguments_of(const Definition& definition) {
  Arguments names;
  for (const auto* arguments : {&definition.inputs, &definition.outputs})
    for (const std::string_view each : *arguments) names.emplace_back(each.substr(0, each.find(':')));
  return names;
}

bool register_all() {
  for (uint8_t kind = 0; kind < kKinds; ++kind) {
    const Definition definition = definition_of(static_cast<Kind>(kind));
    if (!define(definition)) return false;
    if (!register_collective(definition.op.c_str(), static_cast<Kind>(kind), arguments_of(definition))) return false;
  }
  return define({"FarandolePlace", {}, {"number: int32"}, {"what: int"}, &make_scalar}) &&
         register_place("FarandolePlace", {"number"});
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
