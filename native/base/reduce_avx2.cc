// 256-bit kernels; compiled with -mavx2 -mf16c and called only where the processor has both.
#include <immintrin.h>

#include "base/reduce_lanes.h"

namespace farandole {
namespace {

struct Fp16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = RegisterOf<float, 32>;
  static constexpr size_t kWidth = 8;
  static Lanes load(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(uint16_t* to, Lanes lanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT));
  }
};

// A 32-bit lane holds a pair of elements. The odd element is the upper half: clearing the lower half makes it an fp32.
// The even element is shifted up. Nothing crosses lanes.
struct Bf16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = Twin<RegisterOf<float, 32>>;
  static constexpr size_t kWidth = 16;
  static Lanes load(const uint16_t* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))))};
  }
  static void store(uint16_t* to, Lanes lanes) {
    const __m256i even = _mm256_srli_epi32(rounded(lanes.even), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(even, rounded(lanes.odd), 0xAA));
  }

 private:
  // Rounds to nearest even in the upper half. A NaN has zeros in its lower half here, because it comes from bf16 values
  // and the factors that reduce() admits. So the addition cannot turn it into an infinity or a zero.
  static __m256i rounded(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  }
};

// Non-temporal stores.
struct Streamed : OwnType<uint8_t, 32> {
  static void store(uint8_t* to, Lanes lanes) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(lanes));
  }
};

void streamed(std::byte* to, const std::byte* from, size_t bytes) {
  copy_lanes<32, Streamed>(to, from, bytes);
  _mm_sfence();  // non-temporal stores are not ordered before the later store that signals other ranks
}

}  // namespace

void fill_avx2(ReduceTable& table) {
  table.copy = &copy_lanes<32, OwnType<uint8_t, 32>>;
  table.stream = &streamed;
  fill_float<Fp16>(table, DType::Float16);
  fill_float<Bf16>(table, DType::BFloat16);
  fill_float<OwnType<float, 32>>(table, DType::Float32);
  fill_float<OwnType<double, 32>>(table, DType::Float64);
  fill_integers<OwnType<int8_t, 32>, OwnType<uint8_t, 32>>(table, DType::Int8, DType::UInt8);
  fill_integers<OwnType<int16_t, 32>, OwnType<uint16_t, 32>>(table, DType::Int16, DType::UInt16);
  fill_integers<OwnType<int32_t, 32>, OwnType<uint32_t, 32>>(table, DType::Int32, DType::UInt32);
  fill_integers<OwnType<int64_t, 32>, OwnType<uint64_t, 32>>(table, DType::Int64, DType::UInt64);
  fill_bool<Truth<32>>(table);
}

}  // namespace farandole
