// 512-bit kernels; compiled with AVX-512 F, BW, DQ and VL and called only where the processor has all four.
#include <immintrin.h>

#include "base/reduce_lanes.h"

namespace farandole {
namespace {

struct Fp16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = RegisterOf<float, 64>;
  static constexpr size_t kWidth = 16;
  static Lanes load(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(uint16_t* to, Lanes lanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT));
  }
};

// As in reduce_avx2.cc, which also explains NaN. Not vcvtneps2bf16: it flushes subnormals to zero, so the result would
// depend on the processor.
struct Bf16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = Twin<RegisterOf<float, 64>>;
  static constexpr size_t kWidth = 32;
  static Lanes load(const uint16_t* from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))};
  }
  static void store(uint16_t* to, Lanes lanes) {
    const __m512i even = _mm512_srli_epi32(rounded(lanes.even), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, even, rounded(lanes.odd)));
  }

 private:
  static __m512i rounded(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  }
};

// Non-temporal stores.
struct Streamed : OwnType<uint8_t, 64> {
  static void store(uint8_t* to, Lanes lanes) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(lanes));
  }
};

void streamed(std::byte* to, const std::byte* from, size_t bytes) {
  copy_lanes<64, Streamed>(to, from, bytes);
  _mm_sfence();  // non-temporal stores are not ordered before the later store that signals other ranks
}

}  // namespace

void fill_avx512(ReduceTable& table) {
  table.copy = &copy_lanes<64, OwnType<uint8_t, 64>>;
  table.stream = &streamed;
  fill_float<Fp16>(table, DType::Float16);
  fill_float<Bf16>(table, DType::BFloat16);
  fill_float<OwnType<float, 64>>(table, DType::Float32);
  fill_float<OwnType<double, 64>>(table, DType::Float64);
  fill_integers<OwnType<int8_t, 64>, OwnType<uint8_t, 64>>(table, DType::Int8, DType::UInt8);
  fill_integers<OwnType<int16_t, 64>, OwnType<uint16_t, 64>>(table, DType::Int16, DType::UInt16);
  fill_integers<OwnType<int32_t, 64>, OwnType<uint32_t, 64>>(table, DType::Int32, DType::UInt32);
  fill_integers<OwnType<int64_t, 64>, OwnType<uint64_t, 64>>(table, DType::Int64, DType::UInt64);
  fill_bool<Truth<64>>(table);
}

}  // namespace farandole
