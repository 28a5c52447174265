#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "collectives/world.h"

namespace farandole {

/// A world whose collectives are the functions `Calls` over one mesh.
template <class Mesh, class Calls>
class MeshWorld : public World {
 public:
  explicit MeshWorld(Mesh mesh) : mesh_(std::move(mesh)) {}

  void turn(const Knobs& knobs) override { Calls::turn(mesh_, knobs); }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return Calls::allreduce(mesh_, pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    Calls::allgather(mesh_, mine, out, bytes);
    return Calls::name;
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override {
    Calls::broadcast(mesh_, pieces, root);
    return Calls::name;
  }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    Calls::alltoall(mesh_, in, out, shares);
    return Calls::name;
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    Calls::reducescatter(mesh_, in, out, counts, dtype, reduction);
    return Calls::name;
  }
  const char* int8_allreduce(std::span<const Piece> pieces, float factor) override {
    if constexpr (requires { Calls::int8_allreduce; }) return Calls::int8_allreduce(mesh_, pieces, factor);
    else return nullptr;
  }

 private:
  Mesh mesh_;
};

/// Two worlds of the same ranks; the knob `hierarchical` selects one.
class EitherWorld final : public World {
 public:
  EitherWorld(std::unique_ptr<World> grid, std::unique_ptr<World> flat)
      : grid_(std::move(grid)), flat_(std::move(flat)), chosen_(grid_.get()) {}

  void turn(const Knobs& knobs) override {
    grid_->turn(knobs);
    flat_->turn(knobs);
    chosen_ = (knobs.hierarchical ? grid_ : flat_).get();
  }

  const char* allreduce(std::span<const Piece> pieces, DType dtype, const Reduction& reduction) override {
    return chosen_->allreduce(pieces, dtype, reduction);
  }
  const char* allgather(const std::byte* mine, std::span<std::byte* const> out,
                        std::span<const size_t> bytes) override {
    return chosen_->allgather(mine, out, bytes);
  }
  const char* broadcast(std::span<const Piece> pieces, int root) override { return chosen_->broadcast(pieces, root); }
  const char* alltoall(std::span<const std::byte* const> in, std::span<std::byte* const> out,
                       const Shares& shares) override {
    return chosen_->alltoall(in, out, shares);
  }
  const char* reducescatter(const std::byte* in, std::byte* out, std::span<const size_t> counts, DType dtype,
                            const Reduction& reduction) override {
    return chosen_->reducescatter(in, out, counts, dtype, reduction);
  }
  const char* int8_allreduce(std::span<const Piece> pieces, float factor) override {
    return chosen_->int8_allreduce(pieces, factor);
  }

 private:
  std::unique_ptr<World> grid_, flat_;
  World* chosen_;
};

}  // namespace farandole
