/* What does a CPU with AVX-512, its bfloat16 and AMX compute? Instead of the compiler's own header: what `step.c`
   calls, on vectors that the compiler puts together from those the CPU has. What is not here does not compile.

   Names, arguments and results are Intel's. But a denormal number is a number here, where instructions of bfloat16 take
   it for 0. */

#pragma once
#include <stdint.h>

#define VECTOR(bytes) __attribute__((vector_size(bytes), may_alias))
#define EMULATED static inline __attribute__((always_inline))

typedef float __m128 VECTOR(16), __m256 VECTOR(32), __m512 VECTOR(64);
typedef int64_t __m128i VECTOR(16), __m256i VECTOR(32), __m512i VECTOR(64);
typedef int16_t __m256bh VECTOR(32), __m512bh VECTOR(64);

/* Other views of the same bits. */
typedef int8_t bytes_of_128 VECTOR(16);
typedef uint16_t shorts_of_256 VECTOR(32), shorts_of_512 VECTOR(64);
typedef int32_t ints_of_128 VECTOR(16), ints_of_256 VECTOR(32), ints_of_512 VECTOR(64);
typedef uint32_t uints_of_512 VECTOR(64);

typedef __m128i __m128i_at __attribute__((aligned(1)));
typedef __m256i __m256i_at __attribute__((aligned(1)));
typedef __m512i __m512i_at __attribute__((aligned(1)));

EMULATED __m512i _mm512_loadu_si512(const void *at) { return *(const __m512i_at *)at; }
EMULATED __m128i _mm_loadu_si128(const __m128i_at *at) { return *at; }
EMULATED __m256i _mm256_loadu_si256(const __m256i_at *at) { return *at; }
EMULATED void _mm512_storeu_si512(void *at, __m512i a) { *(__m512i_at *)at = a; }
EMULATED void _mm256_storeu_si256(__m256i_at *at, __m256i a) { *at = a; }

EMULATED __m512 _mm512_setzero_ps(void) { return (__m512){0}; }
EMULATED __m512 _mm512_set1_ps(float a) { return a - (__m512){0}; }
EMULATED __m128 _mm_set1_ps(float a) { return a - (__m128){0}; }
EMULATED __m512i _mm512_set1_epi32(int a) { return (__m512i)(a - (ints_of_512){0}); }
#define _mm512_setr_epi32(...) ((__m512i)(ints_of_512){__VA_ARGS__})
#define _mm512_setr_ps(...) ((__m512){__VA_ARGS__})

EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
EMULATED __m256 _mm256_add_ps(__m256 a, __m256 b) { return a + b; }
EMULATED __m128 _mm_add_ps(__m128 a, __m128 b) { return a + b; }
EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
EMULATED __m128 _mm_mul_ps(__m128 a, __m128 b) { return a * b; }

/* The second where one of them is a NaN. */
#define CHOOSE(name, vector, ints, by)                                                                                \
    EMULATED vector name(vector a, vector b) {                                                                        \
        const ints first = a by b;                                                                                    \
        return (vector)((first & (ints)a) | (~first & (ints)b));                                                      \
    }
CHOOSE(_mm512_max_ps, __m512, ints_of_512, >)
CHOOSE(_mm512_min_ps, __m512, ints_of_512, <)
CHOOSE(_mm256_max_ps, __m256, ints_of_256, >)
CHOOSE(_mm_max_ps, __m128, ints_of_128, >)

typedef uint16_t __mmask16;

/* Not less, or unordered. */
enum { _CMP_NLT_UQ = 21 };
EMULATED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, const int predicate) {
    __mmask16 found = 0;
    if (predicate != _CMP_NLT_UQ) __builtin_trap();
    for (int at = 0; at < 16; at++) found |= (__mmask16)(!(a[at] < b[at]) << at);
    return found;
}

/* a * 2^b, of b rounded down; 0 where the mask has none. */
EMULATED __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
    __m512 made = {0};
    for (int at = 0; at < 16; at++)
        if (mask >> at & 1)
            made[at] = b[at] == b[at] ? __builtin_ldexpf(a[at], (int)__builtin_floorf(b[at])) : b[at];
    return made;
}

EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
    return (__m512i)__builtin_convertvector((shorts_of_256)a, uints_of_512);
}
EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
    return (__m512i)__builtin_convertvector((bytes_of_128)a, ints_of_512);
}
EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) { return __builtin_convertvector((ints_of_512)a, __m512); }

/* Numbers of float16: as those of float32 with the same digits they are 2^112 times too small. */
EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
    const uints_of_512 bits = __builtin_convertvector((shorts_of_256)a, uints_of_512);
    const __m512 made = (__m512)((bits & 0x7fff) << 13) * 0x1p112f;
    return (__m512)((uints_of_512)made | (bits & 0x8000) << 16);
}
EMULATED __m512i _mm512_slli_epi32(__m512i a, const int bits) { return (__m512i)((uints_of_512)a << bits); }

/* Of each pair the second product is added first. */
EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const ints_of_512 one = (ints_of_512)a, other = (ints_of_512)b;
    sum += (__m512)(one & ~0xffff) * (__m512)(other & ~0xffff);
    return sum + (__m512)(one << 16) * (__m512)(other << 16);
}

/* To the nearest, of two the even one; a NaN stays one, and is quiet. */
EMULATED __m256bh _mm512_cvtneps_pbh(__m512 a) {
    const uints_of_512 bits = (uints_of_512)a, is_number = (uints_of_512)(a == a);
    const uints_of_512 nearest = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return __builtin_convertvector(((nearest & is_number) | (quiet & ~is_number)) >> 16, __m256bh);
}

#define PART(type, a, index) ((union { __typeof__(a) all; type parts[sizeof(a) / sizeof(type)]; }){a}.parts[index])

EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return (union { __m256bh parts[2]; __m512bh all; }){{_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)}}.all;
}
EMULATED __m256 _mm512_castps512_ps256(__m512 a) { return PART(__m256, a, 0); }
EMULATED __m128 _mm256_castps256_ps128(__m256 a) { return PART(__m128, a, 0); }
#define _mm512_extractf32x8_ps(a, index) PART(__m256, a, index)
#define _mm256_extractf128_ps(a, index) PART(__m128, a, index)

/* Lanes from elsewhere: but for the last, from the same 128 bits, which are four floats or eight shorts. */

#define EACH(type, count, from) ({ type made; for (int at = 0; at < count; at++) made[at] = from; made; })
EMULATED __m512 _mm512_permutexvar_ps(__m512i which, __m512 a) {
    const ints_of_512 place = (ints_of_512)which;
    return EACH(__m512, 16, a[place[at] & 15]);
}
#define BY_TURNS(a, b, of, second_half) (at % 2 ? b : a)[at / of * of + at % of / 2 + second_half * of / 2]

EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
    return (__m512i)EACH(shorts_of_512, 32, BY_TURNS((shorts_of_512)a, (shorts_of_512)b, 8, 0));
}
EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
    return (__m512i)EACH(shorts_of_512, 32, BY_TURNS((shorts_of_512)a, (shorts_of_512)b, 8, 1));
}
EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i which, __m512 b) {
    const ints_of_512 place = (ints_of_512)which;
    return EACH(__m512, 16, (place[at] & 16 ? b : a)[place[at] & 15]);
}

/* AMX: eight tiles of each thread, none of which is there before they are set. What a CPU refuses ends the process, or,
   where tiles of such shapes do not multiply, gives no numbers. */

struct tiles_of_amx { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; };
static _Thread_local struct tiles_of_amx tiles_are;
static _Thread_local float tiles[8][16][16];

EMULATED void must(int so) { if (!so) __builtin_trap(); }

EMULATED void _tile_loadconfig(const void *config) {
    __builtin_memcpy(&tiles_are, config, sizeof tiles_are);
    must(tiles_are.palette == 1 && !tiles_are.start);
    for (int at = 0; at < 14; at++) must(!tiles_are.none[at]);
    for (int at = 0; at < 16; at++)
        must(at < 8 ? tiles_are.rows[at] <= 16 && tiles_are.bytes[at] <= 64 : !tiles_are.rows[at] && !tiles_are.bytes[at]);
    __builtin_memset(tiles, 0, sizeof tiles);
}
EMULATED void _tile_release(void) { tiles_are = (struct tiles_of_amx){0}; }
EMULATED void _tile_zero(int tile) {
    must(tiles_are.rows[tile]);
    __builtin_memset(tiles[tile], 0, sizeof tiles[tile]);
}
EMULATED void _tile_loadd(int tile, const void *at, int64_t stride) {
    _tile_zero(tile);
    for (int row = 0; row < tiles_are.rows[tile]; row++)
        __builtin_memcpy(tiles[tile][row], (const char *)at + row * stride, tiles_are.bytes[tile]);
}
EMULATED void _tile_stream_loadd(int tile, const void *at, int64_t stride) { _tile_loadd(tile, at, stride); }
EMULATED void _tile_stored(int tile, void *at, int64_t stride) {
    must(tiles_are.rows[tile]);
    for (int row = 0; row < tiles_are.rows[tile]; row++)
        __builtin_memcpy((char *)at + row * stride, tiles[tile][row], tiles_are.bytes[tile]);
}

/* Of all pairs the first products, and the second ones, and then both. */
EMULATED void _tile_dpbf16ps(int sums, int a, int b) {
    const struct tiles_of_amx *are = &tiles_are;
    const int fit = sums != a && a != b && b != sums && are->rows[sums] && are->rows[b] &&
                    are->rows[sums] == are->rows[a] && are->bytes[sums] == are->bytes[b] &&
                    are->bytes[a] == 4 * are->rows[b];
    for (int row = 0; row < are->rows[sums]; row++) {
        __m512 first = {0}, second = {0};
        for (int pair = 0; pair < are->bytes[a] / 4; pair++) {
            ints_of_512 one, other;
            __builtin_memcpy(&one, tiles[b][pair], sizeof one);
            int32_t own;
            __builtin_memcpy(&own, &tiles[a][row][pair], sizeof own);
            other = own - (ints_of_512){0};
            first += (__m512)(one << 16) * (__m512)(other << 16);
            second += (__m512)(one & ~0xffff) * (__m512)(other & ~0xffff);
        }
        for (int at = 0; at < 16; at++) tiles[sums][row][at] += fit ? first[at] + second[at] : __builtin_nanf("");
    }
}
