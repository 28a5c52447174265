// 512-bit kernels; compiled with AVX-512 F, BW, DQ and VL and called only where the processor has all four.
#include <immintrin.h>

#include "base/int8_lanes.h"
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
  fill_width<64>(table);
  table.stream = &streamed;
  fill_float<Fp16>(table, DType::Float16);
  fill_int8(table);
}

}  // namespace farandole
