#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "collectives/mpi_collectives.h"

namespace farandole {
namespace {

using Handle = MpiLibrary::Handle;

constexpr int kTag = 1;
constexpr size_t kPackedBelow = size_t{256} << 10;  // larger pieces are not copied
constexpr size_t kMostPacked = size_t{16} << 20;

void copy_unless_same(std::byte* to, const std::byte* from, size_t bytes) {
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

Handle byte_type(const MpiMesh& mesh) { return mesh.library().type_of(DType::UInt8); }

/// Calls `visit(offset, bytes)` for each part of `bytes` that one call of MPI can move.
template <class Visit>
void for_each_part(size_t bytes, Visit visit) {
  for (size_t done = 0; done < bytes; done += kMostMpiBytes) visit(done, std::min(kMostMpiBytes, bytes - done));
}

bool is_contiguous(std::span<std::byte* const> out, std::span<const size_t> bytes) {
  for (size_t rank = 1; rank < out.size(); ++rank)
    if (out[rank] != out[rank - 1] + bytes[rank - 1]) return false;
  return true;
}

/// Gathers by one call of MPI. The call needs contiguous memory.
void gather_at_once(MpiMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                    std::span<const size_t> bytes, size_t total) {
  const auto own = static_cast<size_t>(mesh.rank());
  const bool direct = is_contiguous(out, bytes);
  std::byte* to = direct ? out[0] : mesh.received(total);
  mesh.counts().assign(bytes.begin(), bytes.end());
  mesh.places().assign(bytes.size(), 0);
  for (size_t rank = 1; rank < bytes.size(); ++rank)
    mesh.places()[rank] = mesh.places()[rank - 1] + mesh.counts()[rank - 1];
  const void* from = direct && mine == out[own] ? mesh.library().in_place : mine;
  const Handle type = byte_type(mesh);
  mesh.start("MPI_Iallgatherv", [&](Handle* request) {
    return mesh.library().iallgatherv(from, mesh.counts()[own], type, to, mesh.counts().data(), mesh.places().data(),
                                      type, mesh.comm(), request);
  });
  mesh.finish(total);
  for (size_t rank = 0; !direct && rank < bytes.size(); ++rank)
    copy_unless_same(out[rank], to + mesh.places()[rank], bytes[rank]);
}

}  // namespace

void mpi_exchange(MpiMesh& mesh, std::span<const std::span<const std::byte>> send,
                  std::span<const std::span<std::byte>> receive) {
  const Handle type = byte_type(mesh);
  size_t total = 0;
  const auto size = mesh.size();
  for (int step = 1; step < size; ++step) {
    const int peer = (mesh.rank() + size - step) % size;
    const auto& to = receive[static_cast<size_t>(peer)];
    for_each_part(to.size(), [&](size_t done, size_t bytes) {
      mesh.start("MPI_Irecv", [&](Handle* request) {
        return mesh.library().irecv(to.data() + done, static_cast<int>(bytes), type, peer, kTag, mesh.comm(), request);
      });
      total += bytes;
    });
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (mesh.rank() + step) % size;
    const auto& from = send[static_cast<size_t>(peer)];
    for_each_part(from.size(), [&](size_t done, size_t bytes) {
      mesh.start("MPI_Isend", [&](Handle* request) {
        return mesh.library().isend(from.data() + done, static_cast<int>(bytes), type, peer, kTag, mesh.comm(),
                                    request);
      });
      total += bytes;
    });
  }
  mesh.finish(total);
}

void for_each_run(MpiMesh& mesh, std::span<const Piece> pieces, const std::function<void(const Piece&)>& visit) {
  for (size_t at = 0; at < pieces.size();) {
    size_t end = at;
    size_t total = 0;
    while (end < pieces.size() && pieces[end].bytes < kPackedBelow && total + pieces[end].bytes <= kMostPacked)
      total += pieces[end++].bytes;
    if (end <= at + 1) {
      if (pieces[at].bytes > 0) visit(pieces[at]);
      ++at;
      continue;
    }
    std::byte* packed = mesh.packed(total);
    std::byte* place = packed;
    for (size_t i = at; i < end; place += pieces[i++].bytes) copy_unless_same(place, pieces[i].in, pieces[i].bytes);
    if (total > 0) visit({packed, packed, total});
    place = packed;
    for (size_t i = at; i < end; place += pieces[i++].bytes) copy_unless_same(pieces[i].out, place, pieces[i].bytes);
    at = end;
  }
}

void mpi_allgather(MpiMesh& mesh, const std::byte* mine, std::span<std::byte* const> out,
                   std::span<const size_t> bytes) {
  const auto own = static_cast<size_t>(mesh.rank());
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  if (total == 0) return;
  if (mesh.size() > 1 && !mesh.is_direct() && total <= static_cast<size_t>(std::numeric_limits<int>::max()))
    return gather_at_once(mesh, mine, out, bytes, total);
  copy_unless_same(out[own], mine, bytes[own]);
  std::vector<std::span<const std::byte>> send(out.size(), {mine, bytes[own]});
  std::vector<std::span<std::byte>> receive;
  for (size_t rank = 0; rank < out.size(); ++rank) receive.emplace_back(out[rank], bytes[rank]);
  mpi_exchange(mesh, send, receive);
}

void mpi_broadcast(MpiMesh& mesh, std::span<const Piece> pieces, int root) {
  const Handle type = byte_type(mesh);
  for_each_run(mesh, pieces, [&](const Piece& piece) {
    if (mesh.rank() == root) copy_unless_same(piece.out, piece.in, piece.bytes);
    if (mesh.size() == 1) return;
    for_each_part(piece.bytes, [&](size_t done, size_t bytes) {
      mesh.start("MPI_Ibcast", [&](Handle* request) {
        return mesh.library().ibcast(piece.out + done, static_cast<int>(bytes), type, root, mesh.comm(), request);
      });
    });
    mesh.finish(piece.bytes);
  });
}

void mpi_alltoall(MpiMesh& mesh, std::span<const std::byte* const> in, std::span<const size_t> send,
                  std::span<std::byte* const> out, std::span<const size_t> receive) {
  const auto own = static_cast<size_t>(mesh.rank());
  copy_unless_same(out[own], in[own], send[own]);
  std::vector<std::span<const std::byte>> from;
  std::vector<std::span<std::byte>> to;
  for (size_t rank = 0; rank < in.size(); ++rank) {
    from.emplace_back(in[rank], send[rank]);
    to.emplace_back(out[rank], receive[rank]);
  }
  mpi_exchange(mesh, from, to);
}

}  // namespace farandole
