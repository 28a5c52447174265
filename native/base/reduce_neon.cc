// 128-bit kernels for aarch64. Every such processor has NEON, which rounds, and keeps subnormals, as IEEE 754 asks.
#include <arm_neon.h>

#include "base/int8_lanes.h"
#include "base/reduce_lanes.h"

namespace farandole {
namespace {

struct Fp16 {
  using Stored = uint16_t;
  using Math = float;
  using Lanes = RegisterOf<float, 16>;
  static constexpr size_t kWidth = 4;
  static Lanes load(const uint16_t* from) {
    return reinterpret_cast<Lanes>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))));
  }
  static void store(uint16_t* to, Lanes lanes) {
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(lanes))));
  }
};

}  // namespace

void fill_neon(ReduceTable& table) {
  fill_width<16>(table);
  table.stream = table.copy;  // GCC 11 has no intrinsic for non-temporal stores
  fill_float<Fp16>(table, DType::Float16);
  fill_int8(table);
}

}  // namespace farandole
