#include "collectives/adasum.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "collectives/lent.h"

namespace farandole {
namespace {

/// One rank's shard of a bucket: elements [begin, end), and the tensors that they belong to.
struct Shard {
  size_t begin = 0, end = 0;
  [[nodiscard]] size_t elements() const { return end - begin; }
};

/// A tensor's elements within this rank's shard, counted from the shard's start.
struct Part {
  size_t tensor, begin, end;
};

struct Dots {
  double ab = 0, aa = 0, bb = 0;
};

// Several independent sums, so that an addition does not wait for the previous one.
template <class Work>
Dots dots_of(const Work* a, const Work* b, size_t count) {
  constexpr size_t kChains = 8;
  std::array<double, kChains> ab{}, aa{}, bb{};
  const auto add = [&](size_t chain, size_t at) {
    const auto x = static_cast<double>(a[at]);
    const auto y = static_cast<double>(b[at]);
    ab[chain] += x * y;
    aa[chain] += x * x;
    bb[chain] += y * y;
  };
  size_t at = 0;
  for (; at + kChains <= count; at += kChains)
    for (size_t chain = 0; chain < kChains; ++chain) add(chain, at + chain);
  for (size_t chain = 0; at < count; ++at, ++chain) add(chain, at);
  Dots sums;
  for (size_t chain = 0; chain < kChains; ++chain) {
    sums.ab += ab[chain];
    sums.aa += aa[chain];
    sums.bb += bb[chain];
  }
  return sums;
}

/// The coefficient of a gradient, given its dot product with the other one and its square.
double coefficient(double dot, double square) { return square == 0 ? 1 : 1 - dot / (2 * square); }

// The 16-bit types are combined as floats.
template <class Work>
void widen(DType dtype, const std::byte* from, Work* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    uint16_t half = 0;
    std::memcpy(&half, from + i * sizeof half, sizeof half);
    to[i] = static_cast<Work>(dtype == DType::Float16 ? fp16_to_fp32(half) : bf16_to_fp32(half));
  }
}

template <class Work>
void narrow(DType dtype, const Work* from, std::byte* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(from[i]);
    const uint16_t half = dtype == DType::Float16 ? fp32_to_fp16(value) : fp32_to_bf16(value);
    std::memcpy(to + i * sizeof half, &half, sizeof half);
  }
}

template <class Work>
void multiply(std::span<Work> values, double factor) {
  if (factor == 1) return;
  const auto by = static_cast<Work>(factor);
  for (Work& value : values) value *= by;
}

/// One run over one bucket, computed in the type `Work`.
template <class Work>
class Adasum {
 public:
  Adasum(World& world, int rank, int size, const BucketView& bucket, DType dtype)
      : world_(world),
        me_(static_cast<size_t>(rank)),
        n_(static_cast<size_t>(size)),
        bucket_(bucket),
        dtype_(dtype),
        width_(size_of(dtype)),
        shards_(n_) {
    const size_t elements = bucket.bytes() / width_;
    for (size_t owner = 0; owner < n_; ++owner) {
      const size_t share = elements / n_;
      const size_t extra = elements % n_;
      shards_[owner].begin = owner * share + std::min(owner, extra);
      shards_[owner].end = shards_[owner].begin + share + (owner < extra ? 1 : 0);
    }
    find_parts();
  }

  void run(double prescale, double postscale) {
    collect();
    multiply(std::span<Work>(values_), prescale);
    combine();
    multiply(std::span<Work>(values_).first(shards_[me_].elements()), postscale);
    spread();
  }

 private:
  void find_parts() {
    size_t begin = 0;
    for (size_t tensor = 0; tensor < bucket_.pieces().size(); ++tensor) {
      const size_t end = begin + bucket_.pieces()[tensor].bytes / width_;
      const size_t first = std::max(begin, shards_[me_].begin);
      const size_t last = std::min(end, shards_[me_].end);
      if (first < last) parts_.push_back({tensor, first - shards_[me_].begin, last - shards_[me_].begin});
      begin = end;
    }
  }

  /// Gathers this rank's shard of every rank's bucket.
  void collect() {
    // An alltoall takes each share as one piece; several tensors must be packed.
    const bool whole = bucket_.pieces().size() == 1;
    if (!whole) {
      packed_.resize(bucket_.bytes());
      bucket_.for_each(0, bucket_.bytes(), [&](const Piece& part, size_t done) {
        std::memcpy(packed_.data() + done, part.in, part.bytes);
      });
    }
    const std::byte* bytes = whole ? bucket_.pieces()[0].in : packed_.data();
    const size_t shard = shards_[me_].elements();
    values_.resize(n_ * shard);
    if (is_half()) halves_.resize(n_ * shard * width_);
    std::byte* arrived = is_half() ? halves_.data() : reinterpret_cast<std::byte*>(values_.data());
    std::vector<const std::byte*> in(n_);
    std::vector<std::byte*> out(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      in[peer] = bytes + shards_[peer].begin * width_;
      out[peer] = arrived + peer * shard * width_;
    }
    world_.alltoall(in, out, [this](int, int to) { return shards_[static_cast<size_t>(to)].elements() * width_; });
    if (is_half()) widen(dtype_, halves_.data(), values_.data(), values_.size());
  }

  /// Combines the ranks' shards in a binary tree; the result is at rank 0's place. A shard without a partner moves up
  /// unchanged.
  void combine() {
    for (size_t step = 1; step < n_; step *= 2) {
      std::vector<size_t> firsts;
      for (size_t first = 0; first + step < n_; first += 2 * step) firsts.push_back(first);
      find_dots(firsts, step);
      for (size_t pair = 0; pair < firsts.size(); ++pair)
        for (const Part& part : parts_)
          combine_part(part, firsts[pair], step, dots_[pair * bucket_.pieces().size() + part.tensor]);
    }
  }

  /// Dot products of all pairs and tensors, over the shards of all ranks; the same on every rank.
  void find_dots(const std::vector<size_t>& firsts, size_t step) {
    const size_t tensors = bucket_.pieces().size();
    dots_.assign(firsts.size() * tensors, {});
    for (size_t pair = 0; pair < firsts.size(); ++pair)
      for (const Part& part : parts_)
        dots_[pair * tensors + part.tensor] =
            dots_of(at(firsts[pair]) + part.begin, at(firsts[pair] + step) + part.begin, part.end - part.begin);
    auto* bytes = reinterpret_cast<std::byte*>(dots_.data());
    const Piece piece{bytes, bytes, dots_.size() * sizeof(Dots)};
    world_.allreduce({&piece, 1}, DType::Float64, {});
  }

  void combine_part(const Part& part, size_t first, size_t step, const Dots& dots) {
    const auto left = static_cast<Work>(coefficient(dots.ab, dots.aa));
    const auto right = static_cast<Work>(coefficient(dots.ab, dots.bb));
    Work* a = at(first);
    const Work* b = at(first + step);
    for (size_t i = part.begin; i < part.end; ++i) a[i] = left * a[i] + right * b[i];
  }

  /// Distributes all shards to all ranks.
  void spread() {
    const size_t shard = shards_[me_].elements();
    if (is_half()) narrow(dtype_, values_.data(), halves_.data(), shard);
    const std::byte* mine = is_half() ? halves_.data() : reinterpret_cast<const std::byte*>(values_.data());
    const bool whole = packed_.empty();
    std::byte* bytes = whole ? bucket_.pieces()[0].out : packed_.data();
    std::vector<std::byte*> out(n_);
    std::vector<size_t> sizes(n_);
    for (size_t peer = 0; peer < n_; ++peer) {
      out[peer] = bytes + shards_[peer].begin * width_;
      sizes[peer] = shards_[peer].elements() * width_;
    }
    world_.allgather(mine, out, sizes);
    if (whole) return;
    bucket_.for_each(0, bucket_.bytes(),
                     [&](const Piece& part, size_t done) { std::memcpy(part.out, packed_.data() + done, part.bytes); });
  }

  [[nodiscard]] bool is_half() const { return width_ < sizeof(Work); }
  /// The shard of `rank`, or the combination that replaced it.
  Work* at(size_t rank) { return values_.data() + rank * shards_[me_].elements(); }

  World& world_;
  size_t me_, n_;
  const BucketView& bucket_;
  DType dtype_;
  size_t width_;
  std::vector<Shard> shards_;  // by owner
  std::vector<Part> parts_;    // of this rank's shard
  std::vector<std::byte> packed_;
  std::vector<std::byte> halves_;  // in the tensors' type, if that has 16 bits
  std::vector<Work> values_;       // rank by rank
  std::vector<Dots> dots_;         // of one level: pair by pair, tensor by tensor
};

}  // namespace

void adasum(World& world, int rank, int size, std::span<const Piece> pieces, DType dtype, double prescale,
            double postscale) {
  if (!is_floating(dtype)) throw Error::internal("adasum of a type that is not floating");
  const BucketView bucket(pieces);
  if (bucket.bytes() == 0) return;
  if (dtype == DType::Float64) Lent<Adasum<double>>(world, world, rank, size, bucket, dtype)->run(prescale, postscale);
  else Lent<Adasum<float>>(world, world, rank, size, bucket, dtype)->run(prescale, postscale);
}

}  // namespace farandole
