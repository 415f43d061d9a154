/* Fake quantisation to FP8, bit for bit as labkit/fp8/quantization.py defines it.
 *
 * Plain C that compilers vectorise: magnitudes are compared as integers (for floats without sign the order is the
 * same), and rounding is one addition whose own rounding falls on the FP8 grid. Types arrive as compile-time
 * constants of always-inline functions. Must be compiled with -ffp-contract=off and never with -ffast-math, which
 * would remove the addition.
 */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPONENT 0x7f800000u
#define MANTISSA 0x007fffffu
#define MAGNITUDE 0x7fffffffu
#define CHUNK 512 /* columns whose scales are held at once when tiles run down the columns */

enum { E4M3, E5M2 };
enum { TE, DEEPGEMM, VLLM };

typedef struct {
    float max;
    uint32_t max_bits;     /* bits of max */
    uint32_t min_exponent; /* exponent field of the smallest normal value */
    uint32_t shift;        /* added to an exponent field: 2^e becomes a number whose ulp is the grid step at 2^e */
} Grid;

typedef struct {
    float multiplier; /* x -> grid, unless dividing by scale */
    float divisor;
    float scale; /* grid -> value; NaN for a tile with NaN or infinity */
} Scale;

typedef struct {
    int formula, pow2;
    float overflow; /* te: replaces an infinite multiplier */
    Grid grid;
} Rule;

INLINE uint32_t bits_of(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
INLINE float float_of(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }

static Grid grid_of(int format) {
    Grid e4m3 = {448.0f, bits_of(448.0f), (127u - 6u) << 23, 20u << 23};
    Grid e5m2 = {57344.0f, bits_of(57344.0f), (127u - 14u) << 23, 21u << 23};
    return format == E4M3 ? e4m3 : e5m2;
}

INLINE float load(const void *x, int64_t i, const int bf16) {
    return bf16 ? float_of((uint32_t)((const uint16_t *)x)[i] << 16) : ((const float *)x)[i];
}

INLINE void store(void *y, int64_t i, float v, const int bf16) {
    uint32_t u = bits_of(v);
    if (bf16)
        ((uint16_t *)y)[i] = (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); /* to nearest, ties to even */
    else
        ((float *)y)[i] = v;
}

INLINE float round_to_grid(float v, Grid g) {
    uint32_t u = bits_of(v), magnitude = u & MAGNITUDE;
    magnitude = magnitude < g.max_bits ? magnitude : g.max_bits;
    uint32_t exponent = magnitude & EXPONENT;
    exponent = exponent > g.min_exponent ? exponent : g.min_exponent;
    float anchor = float_of((exponent + g.shift) | 0x400000u);
    float rounded = (float_of(magnitude) + anchor) - anchor;
    return float_of(bits_of(rounded) | (u & ~MAGNITUDE));
}

static float ceil_pow2(float scale) { return float_of((bits_of(scale) + MANTISSA) & EXPONENT); }

static Scale te_scale(float amax, const Rule *rule) {
    float m = rule->grid.max / amax;
    if ((bits_of(m) & EXPONENT) == EXPONENT)
        m = rule->overflow;
    if (rule->pow2)
        m = float_of(bits_of(m) & EXPONENT);
    if (amax == 0.0f)
        m = 1.0f;
    Scale s = {m, 1.0f / m, 1.0f / m};
    return s;
}

static Scale tile_scale(uint32_t amax_bits, const Rule *rule) {
    if (amax_bits >= EXPONENT) {
        Scale poisoned = {1.0f, 1.0f, float_of(0x7fc00000u)};
        return poisoned;
    }
    float amax = float_of(amax_bits);
    if (rule->formula == TE)
        return te_scale(amax, rule);
    if (rule->formula == DEEPGEMM && amax < 1e-4f)
        amax = 1e-4f;
    float scale = amax / rule->grid.max;
    if (rule->pow2)
        scale = ceil_pow2(scale);
    float floor = (float)(1.0 / (512.0 * rule->grid.max));
    if (rule->formula == VLLM && scale < floor)
        scale = floor;
    Scale s = {1.0f / scale, scale, scale};
    return s;
}

INLINE uint32_t magnitude_max(const void *x, int64_t start, int64_t n, const int bf16) {
    if (bf16) {
        const uint16_t *p = (const uint16_t *)x + start;
        uint16_t largest = 0;
        for (int64_t i = 0; i < n; i++) {
            uint16_t magnitude = p[i] & 0x7fff;
            largest = magnitude > largest ? magnitude : largest;
        }
        return (uint32_t)largest << 16;
    }
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(((const float *)x)[start + i]) & MAGNITUDE;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Tiles of r x c with one scale along each run of c contiguous elements. */
INLINE void wide_tiles(const void *restrict x, void *restrict y, int64_t rows, int64_t columns, int64_t r, int64_t c,
                       const Rule *rule, const int in_bf16, const int out_bf16, const int divide) {
    const Grid grid = rule->grid;
    for (int64_t top = 0; top < rows; top += r) {
        int64_t bottom = top + r < rows ? top + r : rows;
        for (int64_t left = 0; left < columns; left += c) {
            int64_t n = left + c < columns ? c : columns - left;
            uint32_t amax = 0;
            for (int64_t i = top; i < bottom; i++) {
                uint32_t row = magnitude_max(x, i * columns + left, n, in_bf16);
                amax = row > amax ? row : amax;
            }
            const Scale s = tile_scale(amax, rule);
            for (int64_t i = top; i < bottom; i++) {
                int64_t start = i * columns + left;
                for (int64_t k = start; k < start + n; k++) {
                    float v = load(x, k, in_bf16);
                    v = divide ? v / s.divisor : v * s.multiplier;
                    store(y, k, round_to_grid(v, grid) * s.scale, out_bf16);
                }
            }
        }
    }
}

/* Tiles of r x 1: neighbouring columns have scales of their own. */
INLINE void column_tiles(const void *restrict x, void *restrict y, int64_t rows, int64_t columns, int64_t r,
                         const Rule *rule, const int in_bf16, const int out_bf16, const int divide) {
    const Grid grid = rule->grid;
    uint32_t amax[CHUNK];
    float factor[CHUNK], scale[CHUNK];
    for (int64_t top = 0; top < rows; top += r) {
        int64_t bottom = top + r < rows ? top + r : rows;
        for (int64_t left = 0; left < columns; left += CHUNK) {
            int64_t n = left + CHUNK < columns ? CHUNK : columns - left;
            memset(amax, 0, sizeof amax);
            for (int64_t i = top; i < bottom; i++) {
                for (int64_t k = 0; k < n; k++) {
                    uint32_t magnitude = bits_of(load(x, i * columns + left + k, in_bf16)) & MAGNITUDE;
                    amax[k] = magnitude > amax[k] ? magnitude : amax[k];
                }
            }
            for (int64_t k = 0; k < n; k++) {
                Scale s = tile_scale(amax[k], rule);
                factor[k] = divide ? s.divisor : s.multiplier;
                scale[k] = s.scale;
            }
            for (int64_t i = top; i < bottom; i++) {
                for (int64_t k = 0; k < n; k++) {
                    float v = load(x, i * columns + left + k, in_bf16);
                    v = divide ? v / factor[k] : v * factor[k];
                    store(y, i * columns + left + k, round_to_grid(v, grid) * scale[k], out_bf16);
                }
            }
        }
    }
}

INLINE void tiles(const void *x, void *y, int64_t rows, int64_t columns, int64_t r, int64_t c, const Rule *rule,
                  const int in_bf16, const int out_bf16, const int divide) {
    if (c == 1)
        column_tiles(x, y, rows, columns, r, rule, in_bf16, out_bf16, divide);
    else
        wide_tiles(x, y, rows, columns, r, c, rule, in_bf16, out_bf16, divide);
}

/* y = dequantise(quantise(x)); x and y are row-major [rows, columns], bfloat16 or float32 (never float32 to bfloat16). */
void labkit_fake_quantize(const void *x, void *y, int64_t rows, int64_t columns, int64_t r, int64_t c, int in_bf16,
                          int out_bf16, int format, int formula, int divide, int pow2, float overflow) {
    const Rule rule = {formula, pow2, overflow, grid_of(format)};
    if (!in_bf16 && !divide)
        tiles(x, y, rows, columns, r, c, &rule, 0, 0, 0);
    else if (!in_bf16)
        tiles(x, y, rows, columns, r, c, &rule, 0, 0, 1);
    else if (!out_bf16 && !divide)
        tiles(x, y, rows, columns, r, c, &rule, 1, 0, 0);
    else if (!out_bf16)
        tiles(x, y, rows, columns, r, c, &rule, 1, 0, 1);
    else if (!divide)
        tiles(x, y, rows, columns, r, c, &rule, 1, 1, 0);
    else
        tiles(x, y, rows, columns, r, c, &rule, 1, 1, 1);
}

INLINE void grid_values(const void *restrict x, void *restrict y, int64_t n, float scale, Grid grid, const int bf16) {
    for (int64_t i = 0; i < n; i++) {
        float v = load(x, i, bf16) / scale;
        float rounded = round_to_grid(v, grid);
        store(y, i, (bits_of(v) & MAGNITUDE) > EXPONENT ? float_of(0x7fc00000u) : rounded, bf16);
    }
}

/* y = RNE(clamp(x / scale)) as grid values; NaN stays NaN. */
void labkit_to_grid(const void *x, void *y, int64_t n, float scale, int bf16, int format) {
    if (bf16)
        grid_values(x, y, n, scale, grid_of(format), 1);
    else
        grid_values(x, y, n, scale, grid_of(format), 0);
}
