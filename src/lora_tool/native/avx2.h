/* x86-64 with AVX2, FMA and F16C: Intel since Haswell, AMD since Zen. */
#include <cpuid.h>
#include <immintrin.h>

#define LEVEL avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))

/* Asked once: a virtual machine takes ten microseconds for the instruction, as long as a small block. */
static int avx2_runs(void) {
    static _Atomic int known; /* 1 if not, 2 if so */
    if (!known) {
        unsigned a, b, c, d;
        int has = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_FMA) && (c & bit_F16C);
        known = 1 + has;
    }
    return known == 2;
}

TARGET static inline void avx2_narrow_bf16(uint16_t *place, __m256 value) {
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i high = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x88);
    _mm_storeu_si128((__m128i *)place, _mm256_castsi256_si128(packed));
}

TARGET static inline uint32_t avx2_largest(__m256i most) {
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xB1)));
}

TARGET static inline __m256 avx2_widen_e4m3(const uint8_t *place) {
    __m128i codes = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)place)), most = _mm_set1_epi16(0x3F80);
    __m128i sign = _mm_and_si128(_mm_slli_epi16(codes, 8), _mm_set1_epi16((short)0x8000));
    __m128i size = _mm_and_si128(_mm_slli_epi16(codes, 7), most), nan = _mm_cmpeq_epi16(size, most);
    size = _mm_blendv_epi8(size, _mm_set1_epi16(0x7E00), nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(size, sign)), _mm256_set1_ps(256.0f));
}

TARGET static inline void avx2_narrow_e4m3(uint8_t *place, __m256 value) {
    __m256i bits = _mm256_castps_si256(value), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x7FFFF)), odd);
    __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32(120 << 3));
    __m256i sum = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p14f)));
    __m256i small = _mm256_sub_epi32(sum, _mm256_set1_epi32(0x46800000));
    __m256i code = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), size));
    code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80)));
    __m256i halves = _mm256_packus_epi32(code, code), bytes = _mm256_packus_epi16(halves, halves);
    uint32_t four[2] = {(uint32_t)_mm256_extract_epi32(bytes, 0), (uint32_t)_mm256_extract_epi32(bytes, 4)};
    memcpy(place, four, sizeof four);
}

#define LANES 8
#define VECTORS 2
#define ROWS 6
#define VECTOR __m256
#define BITS __m256i
#define ZERO() _mm256_setzero_ps()
#define SET(x) _mm256_set1_ps(x)
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define FMA(x, y, z) _mm256_fmadd_ps(x, y, z)
#define FMS(x, y, z) _mm256_fmsub_ps(x, y, z)
#define MUL(x, y) _mm256_mul_ps(x, y)
#define ADD(x, y) _mm256_add_ps(x, y)
#define WIDEN_bf16(p)                                                                                                  \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define WIDEN_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define WIDEN_e4m3(p) avx2_widen_e4m3(p)
#define NARROW_bf16(p, v) avx2_narrow_bf16(p, v)
#define NARROW_f16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define NARROW_e4m3(p, v) avx2_narrow_e4m3(p, v)
#define LEAST(x, y) _mm256_min_ps(x, y)
#define MOST(x, y) _mm256_max_ps(x, y)
#define NOTHING() _mm256_setzero_si256()
#define LARGER(b, v) _mm256_max_epu32(b, _mm256_slli_epi32(_mm256_castps_si256(v), 1))
#define LARGEST(b) avx2_largest(b)
#include "tile.h"
