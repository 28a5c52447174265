#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "base/error.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr uint64_t kMagic = 0x666172616e646f31;  // "farando1"
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
static_assert(kMostOffers * sizeof(uint64_t) <= kPage);
constexpr size_t kControlRing = 1 << 16;
constexpr size_t kPairRing = 1 << 18;
constexpr size_t kTransferBudget = size_t{64} << 20;  // of all message rings
constexpr size_t kLeastTransferRing = 1 << 14;
constexpr size_t kSlotBudget = size_t{256} << 20;
constexpr size_t kLeastSlot = 8192;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

struct Segment::Header {
  uint64_t magic;
  uint32_t ranks;
  uint32_t pair_rings;
  uint64_t slot_bytes;
  uint64_t transfer_ring;                      // bytes of each; 0: there are none
  alignas(128) std::atomic<uint64_t> aborted;  // 0, or reason << 32 | rank
  LaneRounds lane;

  // Offsets of the parts, in memory order.
  uint64_t areas, small, offers, lanes, control, pairs, transfers, slots, arenas, total;

  void lay_out() {
    const size_t n = ranks;
    areas = round_up(sizeof(Header), kPage);
    small = round_up(areas + n * sizeof(RankArea), kPage);
    offers = round_up(small + n * 2 * kSmallBytes, kPage);
    lanes = round_up(offers + n * kPage, kPage);
    control = round_up(lanes + n * LaneRounds::kRounds * kSmallBytes, kPage);
    pairs = round_up(control + 2 * n * Ring::bytes_for(kControlRing), kPage);
    transfers = round_up(pairs + (pair_rings != 0 ? n * n * Ring::bytes_for(kPairRing) : 0), kPage);
    slots = round_up(transfers + (transfer_ring != 0 ? n * n * Ring::bytes_for(transfer_ring) : 0), kPage);
    arenas = round_up(slots + n * kStripes * n * slot_bytes, kHugePage);
    total = arenas + n * Segment::kArenaBytes;
  }
};

std::shared_ptr<Segment> Segment::create(int ranks, size_t slot_bytes, bool pair_rings, bool transfer_rings) {
  const auto n = static_cast<size_t>(ranks);
  Header header{};
  header.magic = kMagic;
  header.ranks = static_cast<uint32_t>(ranks);
  header.pair_rings = pair_rings ? 1 : 0;
  if (transfer_rings)
    header.transfer_ring = std::bit_floor(std::clamp(kTransferBudget / (n * n), kLeastTransferRing, kPairRing));
  const size_t affordable = kSlotBudget / (kStripes * n * n);
  header.slot_bytes = std::bit_floor(std::clamp(slot_bytes, kLeastSlot, std::max(affordable, kLeastSlot)));
  header.lay_out();

  const int fd = memfd_create("farandole", MFD_CLOEXEC);
  void* base = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(header.arenas)) == 0)
    base = mmap(nullptr, header.arenas, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    const int why = errno;
    if (fd >= 0) close(fd);
    throw std::system_error(why, std::generic_category(), std::to_string(header.arenas) + " bytes of shared memory");
  }
  std::shared_ptr<Segment> segment(new Segment(fd, static_cast<std::byte*>(base), header.arenas));
  auto* placed = new (base) Header{};
  placed->ranks = header.ranks;
  placed->pair_rings = header.pair_rings;
  placed->transfer_ring = header.transfer_ring;
  placed->slot_bytes = header.slot_bytes;
  placed->lay_out();
  for (int rank = 0; rank < ranks; ++rank) {
    (new (&segment->area(rank)) RankArea)->life.prepare();
    for (const auto& [from, to] : {std::pair{rank, 0}, std::pair{0, rank}})
      (new (&segment->control_ring(from, to)) Ring)->capacity = kControlRing;
    for (int peer = 0; pair_rings && peer < ranks; ++peer)
      (new (&segment->pair_ring(rank, peer)) Ring)->capacity = kPairRing;
    for (int peer = 0; transfer_rings && peer < ranks; ++peer)
      (new (&segment->transfer_ring(rank, peer)) Ring)->capacity = header.transfer_ring;
  }
  placed->magic = kMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(int fd) {
  struct stat status{};
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0 || fstat(own, &status) != 0 || static_cast<size_t>(status.st_size) < sizeof(Header)) {
    if (own >= 0) close(own);
    throw Error::internal("the descriptor received is no shared segment of farandole");
  }
  Header found{};
  const bool ours = pread(own, &found, sizeof found, 0) == static_cast<ssize_t>(sizeof found) && found.magic == kMagic;
  Header expected{};
  expected.ranks = found.ranks;
  expected.pair_rings = found.pair_rings;
  expected.transfer_ring = found.transfer_ring;
  expected.slot_bytes = found.slot_bytes;
  expected.lay_out();
  const auto size = static_cast<size_t>(status.st_size);
  if (!ours || (size != expected.arenas && size != expected.total)) {
    close(own);
    throw Error::internal(
        "the shared segment was made by another version of farandole; install one version on all ranks");
  }
  void* base = mmap(nullptr, expected.arenas, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
  if (base == MAP_FAILED) {
    const std::string why = std::strerror(errno);
    close(own);
    throw Error::internal("mapping the shared segment failed: " + why);
  }
  return std::shared_ptr<Segment>(new Segment(own, static_cast<std::byte*>(base), expected.arenas));
}

Segment::Segment(int fd, std::byte* base, size_t bytes) : fd_(fd), base_(base), bytes_(bytes) {}

Segment::~Segment() {
  if (std::byte* arenas = arenas_.load()) munmap(arenas, static_cast<size_t>(ranks()) * kArenaBytes);
  munmap(base_, bytes_);
  close(fd_);
}

Segment::Header& Segment::header() const { return *reinterpret_cast<Header*>(base_); }
int Segment::ranks() const { return static_cast<int>(header().ranks); }
size_t Segment::slot_bytes() const { return header().slot_bytes; }
bool Segment::has_pair_rings() const { return header().pair_rings != 0; }
bool Segment::has_transfer_rings() const { return header().transfer_ring != 0; }

RankArea& Segment::area(int rank) { return reinterpret_cast<RankArea*>(base_ + header().areas)[rank]; }

std::byte* Segment::slot(int rank, int index) {
  const size_t stripe = static_cast<size_t>(ranks()) * slot_bytes();
  return base_ + header().slots + static_cast<size_t>(rank * kStripes + index) * stripe;
}

std::byte* Segment::small_slot(int rank, int parity) {
  return base_ + header().small + static_cast<size_t>(rank * 2 + parity) * kSmallBytes;
}

uint64_t* Segment::offers(int rank) {
  return reinterpret_cast<uint64_t*>(base_ + header().offers + static_cast<size_t>(rank) * kPage);
}

std::byte* Segment::arena(int rank) {
  const std::lock_guard lock(mapping_);
  if (arenas_.load() == nullptr) {
    const size_t bytes = static_cast<size_t>(ranks()) * kArenaBytes;
    // Only now does the file grow: under a limit on the size of files, other jobs do without. All ranks set one size.
    if (ftruncate(fd_, static_cast<off_t>(header().total)) != 0)
      throw Error::invalid("empty_shared",
                           "shared memory cannot grow by " + std::to_string(bytes) + " bytes (" + std::strerror(errno) +
                               "); raise the limit on the size of files (ulimit -f), or use ordinary tensors");
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_,
                      static_cast<off_t>(header().arenas));
    if (base == MAP_FAILED)
      throw Error::invalid("empty_shared", "there are no " + std::to_string(bytes) + " bytes of address space (" +
                                               std::strerror(errno) +
                                               "); raise the limit on it (ulimit -v), or use ordinary tensors");
    // A hint: large pages, where the system allows them for shared memory.
    madvise(base, bytes, MADV_HUGEPAGE);
    arenas_.store(static_cast<std::byte*>(base));
  }
  return arena_if_mapped(rank);
}

std::byte* Segment::arena_if_mapped(int rank) {
  std::byte* arenas = arenas_.load(std::memory_order_acquire);
  return arenas == nullptr ? nullptr : arenas + static_cast<size_t>(rank) * kArenaBytes;
}

void Segment::release(int rank, size_t offset, size_t bytes) {
  const size_t begin = header().arenas + static_cast<size_t>(rank) * kArenaBytes + offset;
  if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                static_cast<off_t>(bytes)) != 0)
    warn("memory of a registered buffer could not be given back: ", std::strerror(errno));
}

LaneRounds& Segment::lane() { return header().lane; }

std::byte* Segment::lane_slot(int rank, uint32_t round) {
  const auto index = static_cast<size_t>(rank) * LaneRounds::kRounds + round % LaneRounds::kRounds;
  return base_ + header().lanes + index * kSmallBytes;
}

Ring& Segment::control_ring(int from, int to) {
  // One end is always rank 0: index 2r is r -> 0, index 2r + 1 is 0 -> r.
  const auto index = static_cast<size_t>(to == 0 ? 2 * from : 2 * to + 1);
  return *reinterpret_cast<Ring*>(base_ + header().control + index * Ring::bytes_for(kControlRing));
}

Ring& Segment::pair_ring(int from, int to) {
  const auto index = static_cast<size_t>(from * ranks() + to);
  return *reinterpret_cast<Ring*>(base_ + header().pairs + index * Ring::bytes_for(kPairRing));
}

Ring& Segment::transfer_ring(int from, int to) {
  const auto index = static_cast<size_t>(from * ranks() + to);
  return *reinterpret_cast<Ring*>(base_ + header().transfers + index * Ring::bytes_for(header().transfer_ring));
}

void Segment::abort(Abort why) {
  uint64_t none = 0;
  const uint64_t word = static_cast<uint64_t>(why.reason) << 32 | static_cast<uint32_t>(why.rank);
  header().aborted.compare_exchange_strong(none, word, std::memory_order_seq_cst);
  for (int rank = 0; rank < ranks(); ++rank) area(rank).doorbell.bump();
}

std::optional<Abort> Segment::aborted() const {
  const uint64_t word = header().aborted.load(std::memory_order_acquire);
  if (word == 0) return std::nullopt;
  return Abort{static_cast<int>(word & 0xffffffff), static_cast<Abort::Reason>(word >> 32)};
}

}  // namespace farandole
