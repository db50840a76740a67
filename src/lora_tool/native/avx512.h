/* x86-64 with AVX-512 F, BW and VL: Intel's servers since Skylake, AMD since Zen 4. */
#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,fma,f16c")))

static int avx512_runs(void) {
    return avx2_runs() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

TARGET static inline void avx512_narrow_bf16(uint16_t *place, __m512 value) {
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i high = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
    _mm256_storeu_si256((__m256i *)place, _mm512_cvtepi32_epi16(high));
}

TARGET static inline __m512 avx512_widen_e4m3(const uint8_t *place) {
    __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)place)), most = _mm256_set1_epi16(0x3F80);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16((short)0x8000));
    __m256i size = _mm256_and_si256(_mm256_slli_epi16(codes, 7), most);
    size = _mm256_mask_mov_epi16(size, _mm256_cmpeq_epi16_mask(size, most), _mm256_set1_epi16(0x7E00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(size, sign)), _mm512_set1_ps(256.0f));
}

TARGET static inline void avx512_narrow_e4m3(uint8_t *place, __m512 value) {
    __m512i bits = _mm512_castps_si512(value), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(size, _mm512_set1_epi32(0x7FFFF)), odd);
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32(120 << 3));
    __mmask16 small = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(121 << 23));
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p14f));
    code = _mm512_mask_sub_epi32(code, small, _mm512_castps_si512(sum), _mm512_set1_epi32(0x46800000));
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    _mm_storeu_si128((__m128i *)place, _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
}

#define LANES 16
#define VECTORS 2
#define ROWS 12
#define VECTOR __m512
#define BITS __m512i
#define ZERO() _mm512_setzero_ps()
#define SET(x) _mm512_set1_ps(x)
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define FMA(x, y, z) _mm512_fmadd_ps(x, y, z)
#define FMS(x, y, z) _mm512_fmsub_ps(x, y, z)
#define MUL(x, y) _mm512_mul_ps(x, y)
#define ADD(x, y) _mm512_add_ps(x, y)
#define WIDEN_bf16(p)                                                                                                  \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define WIDEN_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define WIDEN_e4m3(p) avx512_widen_e4m3(p)
#define NARROW_bf16(p, v) avx512_narrow_bf16(p, v)
#define NARROW_f16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define NARROW_e4m3(p, v) avx512_narrow_e4m3(p, v)
#define LEAST(x, y) _mm512_min_ps(x, y)
#define MOST(x, y) _mm512_max_ps(x, y)
#define NOTHING() _mm512_setzero_si512()
#define LARGER(b, v) _mm512_max_epu32(b, _mm512_slli_epi32(_mm512_castps_si512(v), 1))
#define LARGEST(b) _mm512_reduce_max_epu32(b)
#include "tile.h"
