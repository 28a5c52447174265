#pragma once

#include <cstddef>
#include <cstdint>

/// The part of TensorFlow's C interface that the operations need. resolve() finds the functions at run time in the
/// process that loads this library, so one binary works with all versions. Names and types are those of
/// tensorflow/c/{kernels,ops,tf_tensor}.h.
extern "C" {
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
struct TF_Tensor;
struct TF_Status;
}

namespace farandole::tensorflow {

using TF_DataType = int;
using TF_Bool = unsigned char;
using Create = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using Delete = void (*)(void*);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);

/// The codes of tensorflow::error::Code that the operations set.
enum TF_Code { kInvalidArgument = 3, kDeadlineExceeded = 4, kFailedPrecondition = 9, kAborted = 10, kInternal = 13 };

// This list serves both to declare the functions and to find them.
#define FARANDOLE_TF_API(X)                                                                                          \
  X(TF_Status*, NewStatus, ())                                                                                       \
  X(void, DeleteStatus, (TF_Status*))                                                                                \
  X(void, SetStatus, (TF_Status*, int, const char*))                                                                 \
  X(int, GetCode, (const TF_Status*))                                                                                \
  X(const char*, Message, (const TF_Status*))                                                                        \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char*))                                                  \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                               \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                        \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                       \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                      \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                         \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, InferShapes))                      \
  X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                            \
  X(TF_ShapeHandle*, NewShapeHandle, ())                                                                             \
  X(void, DeleteShapeHandle, (TF_ShapeHandle*))                                                                      \
  X(TF_ShapeHandle*, ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                       \
  X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))              \
  X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))             \
  X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))                             \
  X(TF_KernelBuilder*, NewKernelBuilder, (const char*, const char*, Create, Compute, Delete))                        \
  X(TF_KernelBuilder*, NewAsyncKernelBuilder, (const char*, const char*, Create, ComputeAsync, Delete))              \
  X(void, KernelBuilder_HostMemory, (TF_KernelBuilder*, const char*))                                                \
  X(void, RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                                       \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                      \
  X(void, OpKernelConstruction_GetAttrSize, (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*)) \
  X(void, OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))          \
  X(void, OpKernelConstruction_GetAttrBool, (TF_OpKernelConstruction*, const char*, TF_Bool*, TF_Status*))           \
  X(void, OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))    \
  X(int, NumInputs, (TF_OpKernelContext*))                                                                           \
  X(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                             \
  X(TF_Tensor*, AllocateOutput, (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*))    \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                                                        \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                              \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                                                \
  X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))                                             \
  X(void, DeleteTensor, (TF_Tensor*))                                                                                \
  X(TF_DataType, TensorType, (const TF_Tensor*))                                                                     \
  X(int, NumDims, (const TF_Tensor*))                                                                                \
  X(int64_t, Dim, (const TF_Tensor*, int))                                                                           \
  X(size_t, TensorByteSize, (const TF_Tensor*))                                                                      \
  X(void*, TensorData, (const TF_Tensor*))

#define FARANDOLE_TF_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
struct Api {
  FARANDOLE_TF_API(FARANDOLE_TF_DECLARE)
};
#undef FARANDOLE_TF_DECLARE

/// TensorFlow's functions, filled before the operations are registered.
extern Api tf;

/// Finds all functions. Returns the name of the first one that this TensorFlow lacks, or null.
[[nodiscard]] const char* resolve();

/// Owner of a TF_Status for one or more calls.
class Status {
 public:
  Status() : status_(tf.NewStatus()) {}
  ~Status() { tf.DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  [[nodiscard]] TF_Status* get() const { return status_; }
  [[nodiscard]] bool ok() const { return tf.GetCode(status_) == 0; }
  void set(int code, const char* text) { tf.SetStatus(status_, code, text); }

 private:
  TF_Status* status_;
};

}  // namespace farandole::tensorflow
