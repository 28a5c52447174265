// 256-bit kernels; compiled with -mavx2 -mf16c and called only where the processor has both.
#include <immintrin.h>

#include "base/int8_lanes.h"
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
  fill_width<32>(table);
  table.stream = &streamed;
  fill_float<Fp16>(table, DType::Float16);
  fill_int8(table);
}

}  // namespace farandole
