/* One element at a time, for every processor; without an instruction for it, fmaf is right and slow. */
#define LEVEL scalar
#define TARGET
#define LANES 1
#define VECTORS 4
#define ROWS 4
#define VECTOR float
#define BITS uint32_t
#define ZERO() 0.0f
#define SET(x) (x)
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#define FMA(x, y, z) fmaf(x, y, z)
#define FMS(x, y, z) fmaf(x, y, -(z))
#define MUL(x, y) ((x) * (y))
#define ADD(x, y) ((x) + (y))
#define WIDEN_bf16(p) from_bf16(*(p))
#define WIDEN_f16(p) from_f16(*(p))
#define WIDEN_e4m3(p) from_e4m3(*(p))
#define NARROW_bf16(p, v) (*(p) = to_bf16(v))
#define NARROW_f16(p, v) (*(p) = to_f16(v))
#define NARROW_e4m3(p, v) (*(p) = to_e4m3(v))
#define LEAST(x, y) ((x) < (y) ? (x) : (y))
#define MOST(x, y) ((x) > (y) ? (x) : (y))
#define NOTHING() 0u
#define LARGER(b, v) ((b) > bits_of(v) << 1 ? (b) : bits_of(v) << 1)
#define LARGEST(b) (b)
#include "tile.h"
