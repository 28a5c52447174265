#include "engine/request.h"

#include <cmath>

#include "base/error.h"
#include "base/int8_blocks.h"

namespace farandole {

size_t Request::elements() const { return shape.empty() ? 1 : static_cast<size_t>(shape[0]) * row_elements(); }

size_t Request::row_elements() const {
  size_t count = 1;
  for (size_t dim = 1; dim < shape.size(); ++dim) count *= static_cast<size_t>(shape[dim]);
  return count;
}

std::string Request::type_text() const {
  std::string text = farandole::name_of(dtype);
  text += '[';
  for (size_t dim = 0; dim < shape.size(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(shape[dim]);
  return text + ']';
}

namespace {

void validate_splits(Request& request, int size) {
  const int64_t rows = request.shape[0];
  if (request.splits.empty()) {
    if (rows % size != 0)
      throw Error::invalid(request.name, "its first dimension is " + std::to_string(rows) + ", which " +
                                             std::to_string(size) + " ranks do not divide; give splits");
    request.splits.assign(static_cast<size_t>(size), rows / size);
    return;
  }
  if (request.splits.size() != static_cast<size_t>(size))
    throw Error::invalid(request.name, "splits holds " + std::to_string(request.splits.size()) + " numbers for " +
                                           std::to_string(size) + " ranks; give one for each rank");
  int64_t left = rows;
  for (const int64_t split : request.splits) {
    if (split < 0) throw Error::invalid(request.name, "splits holds " + std::to_string(split) + "; all must be >= 0");
    if (split > left)
      throw Error::invalid(request.name, "the sum of splits is more than the first dimension, " + std::to_string(rows));
    left -= split;
  }
}

void validate_reduction(const Request& request, int size) {
  if (request.kind == Kind::Reducescatter && request.op != ReduceOp::Average && request.op != ReduceOp::Sum)
    throw Error::invalid(request.name,
                         "reducescatter supports Average and Sum only, got " + std::string(name_of(request.op)));
  if (request.op == ReduceOp::Adasum) {
    if (is_floating(request.dtype)) return;
    throw Error::invalid(request.name,
                         "Adasum combines floating-point tensors (float16, bfloat16, float32, float64), got " +
                             std::string(name_of(request.dtype)) + "; use Sum or Average");
  }
  if (is_int8(request.op)) {
    if (request.dtype == DType::Float32) return;
    throw Error::invalid(request.name, "Compression.int8 sends floating-point tensors, got " +
                                           std::string(name_of(request.dtype)) + "; use Compression.none");
  }
  try {
    check_reduction(request.dtype,
                    {request.op, request.prescale, request.postscale, request.op == ReduceOp::Average ? size : 1});
  } catch (const Error& error) {
    throw error.named(request.name);
  }
}

}  // namespace

void validate(Request& request, int size) {
  if (std::isnan(request.prescale) || std::isnan(request.postscale))
    throw Error::invalid(request.name, "a scale factor is not a number");
  const KindTraits& traits = traits_of(request.kind);
  if (traits.reduces) validate_reduction(request, size);
  if (traits.is_sized_by_plan() && request.shape.empty())
    throw Error::invalid(request.name,
                         std::string(traits.name) + " needs at least one dimension; reshape the scalar to (1,)");
  if (traits.has_splits) validate_splits(request, size);
  if (traits.has_root && (request.root < 0 || request.root >= size))
    throw Error::invalid(request.name, std::string(traits.name) + " received invalid root rank " +
                                           std::to_string(request.root) + "; ranks are 0 to " +
                                           std::to_string(size - 1));
}

}  // namespace farandole
