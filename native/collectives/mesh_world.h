#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "collectives/world.h"

namespace farandole {

/// The shares of this rank.
struct OwnShares {
  std::vector<size_t> send, receive;

  OwnShares(const Shares& shares, int rank, int size) {
    for (int peer = 0; peer < size; ++peer) {
      send.push_back(shares(rank, peer));
      receive.push_back(shares(peer, rank));
    }
  }
};

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
  const char* barrier() override {
    Calls::barrier(mesh_);
    return Calls::name;
  }
  const char* int8_allreduce(std::span<const Piece> pieces, float factor) override {
    if constexpr (requires { Calls::int8_allreduce; }) return Calls::int8_allreduce(mesh_, pieces, factor);
    else return nullptr;
  }

 private:
  Mesh mesh_;
};

}  // namespace farandole
