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

// Not vcvtneps2bf16: it flushes subnormals to zero, so the result would depend on the processor.
struct Bf16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = RegisterOf<float, 64>;
  static constexpr size_t kWidth = 16;
  static Lanes load(const uint16_t* from) {
    const __m256i brains = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(brains), 16));
  }
  static void store(uint16_t* to, Lanes lanes) {
    const __m512i bits = _mm512_castps_si512(lanes);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
  }
};

}  // namespace

void fill_avx512(ReduceTable& table) {
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
