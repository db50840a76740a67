/* 64-bit ARM: every one has these. */
#include <arm_neon.h>

#define LEVEL neon
#define TARGET

static inline void neon_narrow_bf16(uint16_t *place, float32x4_t value) {
    uint32x4_t bits = vreinterpretq_u32_f32(value);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    vst1_u16(place, vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd), 16));
}

static inline float32x4_t neon_widen_e4m3(const uint8_t *place) {
    uint32_t four;
    memcpy(&four, place, sizeof four);
    uint16x4_t codes = vget_low_u16(vmovl_u8(vcreate_u8(four))), most = vdup_n_u16(0x3F80);
    uint16x4_t sign = vand_u16(vshl_n_u16(codes, 8), vdup_n_u16(0x8000)), size = vand_u16(vshl_n_u16(codes, 7), most);
    size = vbsl_u16(vceq_u16(size, most), vdup_n_u16(0x7E00), size);
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(size, sign))), 256.0f);
}

static inline void neon_narrow_e4m3(uint8_t *place, float32x4_t value) {
    uint32x4_t bits = vreinterpretq_u32_f32(value), size = vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF));
    uint32x4_t odd = vandq_u32(vshrq_n_u32(size, 20), vdupq_n_u32(1));
    uint32x4_t up = vaddq_u32(vaddq_u32(size, vdupq_n_u32(0x7FFFF)), odd);
    uint32x4_t normal = vsubq_u32(vshrq_n_u32(up, 20), vdupq_n_u32(120u << 3));
    uint32x4_t sum = vreinterpretq_u32_f32(vaddq_f32(vreinterpretq_f32_u32(size), vdupq_n_f32(0x1p14f)));
    uint32x4_t small = vsubq_u32(sum, vdupq_n_u32(0x46800000u));
    uint32x4_t code = vbslq_u32(vcltq_u32(size, vdupq_n_u32(121u << 23)), small, normal);
    uint16x4_t halves = vmovn_u32(vorrq_u32(code, vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80))));
    uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    memcpy(place, &four, sizeof four);
}

#define LANES 4
#define VECTORS 3
#define ROWS 8
#define VECTOR float32x4_t
#define BITS uint32x4_t
#define ZERO() vdupq_n_f32(0.0f)
#define SET(x) vdupq_n_f32(x)
#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32(p, v)
#define FMA(x, y, z) vfmaq_f32(z, x, y)
#define FMS(x, y, z) vfmaq_f32(vnegq_f32(z), x, y)
#define MUL(x, y) vmulq_f32(x, y)
#define ADD(x, y) vaddq_f32(x, y)
#define WIDEN_bf16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#define WIDEN_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define WIDEN_e4m3(p) neon_widen_e4m3(p)
#define NARROW_bf16(p, v) neon_narrow_bf16(p, v)
#define NARROW_f16(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define NARROW_e4m3(p, v) neon_narrow_e4m3(p, v)
#define LEAST(x, y) vbslq_f32(vcltq_f32(x, y), x, y)
#define MOST(x, y) vbslq_f32(vcgtq_f32(x, y), x, y)
#define NOTHING() vdupq_n_u32(0)
#define LARGER(b, v) vmaxq_u32(b, vshlq_n_u32(vreinterpretq_u32_f32(v), 1))
#define LARGEST(b) vmaxvq_u32(b)
#include "tile.h"
