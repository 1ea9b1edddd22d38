/* A step of a whole model in one call, from compiled_step.py.

   Compile-time settings: NUMBER is the bits of multiplied numbers (16: bfloat16, by AVX-512, or by AMX if present).
   KEPT is the bits of cached keys and values. WEIGHT is the bits of weights. Weights are in blocks of outs,
   [outs / BLOCK][in][BLOCK]. Weights of 16 bits are in pairs, [outs / BLOCK][in / 2][BLOCK][2]. With a WEIGHT of 8
   they are codes of 8 or 4 bits (`struct weight`). Sums are in float32, in an order that does not depend on the number
   of rows or threads. */

#define IS_SIZE(bits) (bits == 16 || bits == 32)
#define CODED (WEIGHT == 8)
#if !IS_SIZE(NUMBER) || !IS_SIZE(KEPT) || !(IS_SIZE(WEIGHT) || CODED) || WEIGHT > NUMBER || KEPT > NUMBER
#error "no such NUMBER, KEPT or WEIGHT"
#endif
#if CODED && NUMBER != 32
#error "codes are multiplied in float32"
#endif
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if NUMBER == 16
typedef uint16_t number;
enum { PAIR = 2 };                  /* numbers multiplied by one instruction lane: four bytes */
#else
typedef float number;
enum { PAIR = 1 };
#endif

#if KEPT == 16
typedef uint16_t kept;
#else
typedef float kept;
#endif

#if CODED
typedef uint8_t factor;             /* a byte of a block */
#elif WEIGHT == 16
typedef uint16_t factor;
#else
typedef float factor;
#endif

/* A weight. A quantized number is code * scale + least, with one scale for each out and `group` numbers (16 or 32) of the
   depth. A block then has, group after group: scales [BLOCK] of `scale_bytes` each (2: float16), leasts likewise if it
   `has_leasts`, and codes. Codes of 8 bits are signed, [group][BLOCK]. Codes of 4 bits are unsigned: four of the depth
   are words [BLOCK / 2], with codes of the two halves of the block in turns. Without leasts, 4 bits have -8 * scale. */
struct weight {
    const factor *blocks;
    int32_t bits, group, scale_bytes, has_leasts;
};

/* One layer. Biases and head norms that the model does not have are NULL. */
struct layer {
    struct weight qkv, out, gate_and_up, down;
    const float *qkv_bias, *out_bias, *gate_and_up_bias, *down_bias;
    const float *before_attention, *query_norm, *key_norm, *before_gate;
    float before_attention_epsilon, query_norm_epsilon, key_norm_epsilon, before_gate_epsilon;
    float scaling;
};

struct model {
    int64_t layers, hidden, heads, kv_heads, head_dim;
    int64_t projected;              /* queries, keys and values of a token */
    int64_t width, vocabulary;
    const struct layer *layer;
    const float *norm;
    struct weight head;
    const float *head_bias;
    float norm_epsilon;
    int32_t threads;
};

struct step {
    int64_t rows, tokens, wanted;   /* sequences, their tokens, tokens with logits */
    int64_t page_tokens;            /* a multiple of SIDE */
    int64_t longest;                /* scores of a query: positions, up to a multiple of STRIP */
    int64_t page_stride, head_stride, layer_stride, plane_stride; /* numbers from one to the next in the cache */
    kept *cache;                    /* [page][kv head][layer][keys, values][token][head_dim] */
    const int64_t *positions;       /* [tokens], row by row */
    const int64_t *row_of;          /* [tokens] */
    const int64_t *begins;          /* [rows + 1]: tokens of each row */
    const int64_t *tables;          /* [rows]: where its pages begin in the table */
    const int64_t *table;           /* pages, row by row */
    const int64_t *keep;            /* [wanted] tokens, ascending */
    const int64_t *windows;         /* [layers]: tokens that a token sees, itself included */
    const float *cosine, *sine;     /* [tokens][head_dim] */
    float *x;                       /* [tokens][hidden]: embeddings, then residuals */
    number *normed;                 /* [tokens][hidden] */
    float *qkv;                     /* [tokens][projected] */
    number *seen;                   /* [tokens][heads * head_dim] */
    number *gated;                  /* [tokens][width] */
    float *scores;                  /* [threads][scored][longest] */
    number *keys, *values;          /* of the current row of several tokens, in blocks: [kv_heads][laid * head_dim] */
    float *logits;                  /* [wanted][vocabulary] */
    float *sums;                    /* [tokens][longest depth / smallest group]: sums of the inputs that codes multiply */
    int64_t scored;                 /* at least ROWS, and the queries of a key head */
    int64_t laid;                   /* as `longest`, of rows of several tokens alone */
};

/* LANES is the float32 numbers of a vector. ROWS is the most rows that are multiplied with a block at once, so that
   their sums stay in registers. */
#if defined __AMX_BF16__
#define LANES 16
#define ROWS 32
#define DEPTH_OF_TILE 32                /* depth that a tile multiplies at once */
#elif defined __AVX512F__
#define LANES 16
#define ROWS 8
#else
#define LANES 8
#define ROWS 5
#endif
#ifndef DEPTH_OF_TILE
#define DEPTH_OF_TILE PAIR
#endif

enum {
    BLOCK = 2 * LANES, HALF = BLOCK / 2,    /* outs of a weight */
    STRIP = 32,                     /* width of rows and heads is a multiple of it */
    HEAD_STRIPS = 8,                /* most strips of a head */
    SIDE = 4,                       /* tokens of a page are a multiple of it */
    WEIGHED = ROWS == 32 ? 16 : 4,  /* queries of one token whose weighted values are summed at once */
    MANY = ROWS == 8 ? 6 : 4,       /* rows from which one tile prefetches weights (not with AMX) */
    AHEAD = 8192,                   /* bytes that are prefetched ahead */
    ASKING = ROWS == 32 ? 32 : 4,   /* most tiles that prefetch the next block together */
    ASKS_FOR_SUMS = ROWS < 32,      /* the target of a prompt's sums is prefetched */
    NEAR = 1 << 20,                 /* bytes of rows that stay in the L2 cache while blocks go by */
};

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef vec vec_at __attribute__((aligned(4), may_alias));
typedef ints ints_at __attribute__((aligned(4), may_alias));

#define UNROLLED _Pragma("GCC unroll 8")
#define ALL_LANES _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *at) { return *(const vec_at *)at; }

INLINE void store(float *at, vec x) { *(vec_at *)at = x; }

INLINE vec all(float x) { return x - (vec){0}; }

INLINE vec pick(ints which, vec one, vec other) { return (vec)((which & (ints)one) | (~which & (ints)other)); }

/* The larger or smaller number. `other` if one of them is NaN. */
#if LANES == 16
INLINE vec larger(vec one, vec other) { return _mm512_max_ps(one, other); }
INLINE vec smaller(vec one, vec other) { return _mm512_min_ps(one, other); }
#else
INLINE vec larger(vec one, vec other) { return _mm256_max_ps(one, other); }
INLINE vec smaller(vec one, vec other) { return _mm256_min_ps(one, other); }
#endif

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Rows of the first tile, if `rows` are divided into as few tiles as possible. */
INLINE int64_t even_share(int64_t rows) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    return (rows + tiles - 1) / tiles;
}

/* Reduce lanes that are four apart by `add` or `max`. Four lanes are left. */
#define FOLD_EIGHT(by, x) _mm_##by##_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))
#if LANES == 16
#define FOLD(by, x) FOLD_EIGHT(by, _mm256_##by##_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)))
#else
#define FOLD(by, x) FOLD_EIGHT(by, x)
#endif

INLINE float total(vec x) {
    const __m128 four = FOLD(add, x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Valid if no number is NaN. */
INLINE float largest(vec x) {
    const __m128 four = FOLD(max, x);
    const float one = four[0] > four[1] ? four[0] : four[1], other = four[2] > four[3] ? four[2] : four[3];
    return one > other ? one : other;
}

/* e^x; NaN of NaN, 0 of -infinity, and no more than e^88. */
INLINE vec exponential(vec x) {
#if LANES == 16
    const __mmask16 over = _mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ);
    x = smaller(all(88.0f), x);
#else
    const ints under = x < -87.0f;
    x = larger(all(-87.0f), smaller(all(88.0f), x));
#endif
    const vec n = x * 1.44269504f + 12582912.0f - 12582912.0f;     /* the nearest whole number */
    const vec rest = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec sum = all(1.0f / 720);
    sum = sum * rest + 1.0f / 120;
    sum = sum * rest + 1.0f / 24;
    sum = sum * rest + 1.0f / 6;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
#if LANES == 16
    return _mm512_maskz_scalef_ps(over, sum, n);
#else
    const ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (vec)((ints)(sum * (vec)power) & ~under);
#endif
}

#if NUMBER == 16
INLINE __m512bh bf16s(const number *at) { return (__m512bh)_mm512_loadu_si512(at); }

INLINE void store_bf16s(number *at, __m512 low, __m512 high) {
    _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

/* Convert `count` numbers, a multiple of LANES, from float32. */
INLINE void put(number *to, const float *from, const int count) {
#if NUMBER == 16
    int at = 0;
    for (; at + 2 * LANES <= count; at += 2 * LANES) store_bf16s(to + at, load(from + at), load(from + at + LANES));
    if (at < count) _mm256_storeu_si256((__m256i *)(to + at), (__m256i)_mm512_cvtneps_pbh(load(from + at)));
#else
    for (int at = 0; at < count; at += LANES) store(to + at, load(from + at));
#endif
}

#if KEPT == NUMBER
INLINE void keep(kept *to, const float *from) { put(to, from, STRIP); }
#else
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef shorts shorts_at __attribute__((aligned(2), may_alias));

/* Convert STRIP numbers from float32, rounding to nearest even. NaN stays NaN. */
INLINE void keep(kept *to, const float *from) {
    for (int at = 0; at < STRIP; at += LANES) {
        const vec x = load(from + at);
        const uints bits = (uints)x, nearest = bits + 0x7fff + (bits >> 16 & 1);
        const vec told = pick(x == x, (vec)nearest, (vec)(bits | 0x400000));
        *(shorts_at *)(to + at) = __builtin_convertvector((uints)told >> 16, shorts);
    }
}
#endif

#if NUMBER == 32
/* Load LANES keys or values. */
INLINE vec load_kept(const kept *at) {
#if KEPT == 16
#if LANES == 16
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#else
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#endif
#else
    return load(at);
#endif
}
#endif

/* Prefetch the next `pace` bytes in step `count` of a tile. */
INLINE void ask(const char *next, int64_t count, const int pace) {
    for (int at = 0; at < pace; at += 64) __builtin_prefetch(next + count * pace + at, 0, 2);
}

/* Prefetch memory that is written soon. */
INLINE void ask_for(const void *at, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char *)at + byte, 1);
}

/* The same for `bytes` of each row, rows `stride` apart. */
INLINE void ask_for_rows(const void *at, int64_t stride, int64_t rows, const int bytes) {
    for (int64_t row = 0; row < rows; row++) ask_for((const char *)at + row * stride, bytes);
}

/* Input that a weight is multiplied with. */
struct fed {
    const number *rows;             /* [][depth] */
    int64_t depth;
    const float *sums;              /* [][groups]: sums of the rows, for a quantized weight */
    int64_t groups;
};

INLINE struct fed from_row(struct fed fed, int64_t row) {
    return (struct fed){fed.rows + row * fed.depth, fed.depth, fed.sums + row * fed.groups, fed.groups};
}

/* Results of a tile: BLOCK outs of each row. */
typedef float tile_sums[ROWS][BLOCK] __attribute__((aligned(64)));

/* Finishes BLOCK outs of a row. */
typedef void finisher(const void *of, int64_t row, const float *sums);

/* Rows with complete sums: from `row` to `end`. */
struct summed {
    int64_t row, end;
    const float (*sums)[BLOCK];
};

INLINE void finish_rows(struct summed *s, int64_t count, finisher finish, const void *of) {
    for (; count && s->row < s->end; count--) finish(of, s->row++, *s->sums++);
}

#if defined __AMX_BF16__

/* AMX tiles have up to SIDE_OF_TILE rows of 64 bytes. Tiles 0 and 1 are sums, 2 and 3 the sums of the rows below them.
   4 is input rows, 5 the rows below. 6 and 7 are the two halves of a block. */
enum { SIDE_OF_TILE = 16 };

/* Rows for which this thread's tiles are configured. 0 for none. */
static _Thread_local int64_t set_for;

static void set_tiles(int64_t rows) {
    if (set_for == rows) return;
    const int upper = (int)least(rows, SIDE_OF_TILE), lower = rows > SIDE_OF_TILE ? (int)rows - SIDE_OF_TILE : 1;
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    const int rows_of[8] = {upper, upper, lower, lower, upper, lower, SIDE_OF_TILE, SIDE_OF_TILE};
    for (int each = 0; each < 8; each++) {
        config.bytes[each] = 64;
        config.rows[each] = (uint8_t)rows_of[each];
    }
    __asm__ volatile("" : : "r"(&config) : "memory");       /* all of it is read */
    _tile_loadconfig(&config);
    set_for = rows;
}

/* Multiply DEPTH_OF_TILE more of the depth. Each tile is loaded just before it is used. `load` loads rows, and may
   leave the caches to the blocks. */
#define MULTIPLY_TILES(load, blocks, a, stride, rows)                                                                 \
    do {                                                                                                              \
        load(4, a, (stride) * sizeof(number));                                                                        \
        _tile_loadd(6, blocks, 2 * BLOCK * sizeof(number));                                                           \
        _tile_dpbf16ps(0, 4, 6);                                                                                      \
        _tile_loadd(7, (blocks) + BLOCK, 2 * BLOCK * sizeof(number));                                                 \
        _tile_dpbf16ps(1, 4, 7);                                                                                      \
        if (rows > SIDE_OF_TILE) {                                                                                    \
            load(5, (a) + SIDE_OF_TILE * (stride), (stride) * sizeof(number));                                        \
            _tile_dpbf16ps(2, 5, 6);                                                                                  \
            _tile_dpbf16ps(3, 5, 7);                                                                                  \
        }                                                                                                             \
    } while (0)

/* Multiply BLOCK outs of `blocks`, [depth / 2][BLOCK][2], with `rows` rows of `a`, `stride` apart. Meanwhile finish
   `before`, as vector units work beside tiles. `more`: add to `to`, for at most SIDE_OF_TILE rows. */
INLINE void tile_of(const number *blocks, const number *a, int64_t stride, int64_t depth, int64_t rows,
                    const char *next, const int pace, const int more, float *to, int64_t to_stride,
                    struct summed *before, finisher finish, const void *of) {
    const int64_t whole = depth / DEPTH_OF_TILE * DEPTH_OF_TILE, rest = depth - whole;
    const int64_t at_once = 1 + (before->end - before->row) * DEPTH_OF_TILE / depth;
    set_tiles(rows);
    __asm__ volatile("" ::: "memory");      /* what tiles are loaded from is stored before */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (more) {
        _tile_loadd(0, to, to_stride * sizeof *to);
        _tile_loadd(1, to + LANES, to_stride * sizeof *to);
    }
    for (int64_t at = 0; at < whole; at += DEPTH_OF_TILE) {
        if (next) ask(next, at / DEPTH_OF_TILE, DEPTH_OF_TILE / 2 * pace);
        MULTIPLY_TILES(_tile_stream_loadd, blocks + at * BLOCK, a + at, stride, rows);
        finish_rows(before, at_once, finish, of);
    }
    finish_rows(before, ROWS, finish, of);
    if (rest) {                     /* and nothing behind it */
        number last_blocks[DEPTH_OF_TILE * BLOCK] = {0}, last_a[ROWS * DEPTH_OF_TILE] = {0};
        memcpy(last_blocks, blocks + whole * BLOCK, rest * BLOCK * sizeof *blocks);
        for (int64_t row = 0; row < rows; row++)
            memcpy(last_a + row * DEPTH_OF_TILE, a + row * stride + whole, rest * sizeof *a);
        __asm__ volatile("" : : "r"(last_blocks), "r"(last_a) : "memory");      /* all of them is read */
        MULTIPLY_TILES(_tile_loadd, last_blocks, last_a, DEPTH_OF_TILE, rows);
    }
    _tile_stored(0, to, to_stride * sizeof *to);
    _tile_stored(1, to + LANES, to_stride * sizeof *to);
    if (rows > SIDE_OF_TILE) {
        _tile_stored(2, to + SIDE_OF_TILE * to_stride, to_stride * sizeof *to);
        _tile_stored(3, to + SIDE_OF_TILE * to_stride + LANES, to_stride * sizeof *to);
    }
}

INLINE void release_tiles(void) {
    _tile_release();
    set_for = 0;
}

#elif NUMBER == 16

/* Multiply BLOCK outs of `blocks`, [depth / 2][BLOCK][2], with `rows` rows of `a`, `stride` apart. */
INLINE void tile_of(const number *blocks, const number *a, int64_t stride, int64_t depth, const int rows,
                    const char *next, const int pace, float *to, int64_t to_stride) {
    __m512 sum[ROWS][2];            /* in registers, which `to` could not be */
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (int64_t at = 0; at < depth; at += 2) {
        const number *here = blocks + at * BLOCK;
        ask(next, at / 2, pace);
        const __m512bh low = bf16s(here), high = bf16s(here + 2 * LANES);
        for (int row = 0; row < rows; row++) {
            const __m512bh own = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(a + row * stride + at));
            sum[row][0] = _mm512_dpbf16_ps(sum[row][0], low, own);
            sum[row][1] = _mm512_dpbf16_ps(sum[row][1], high, own);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < 2; part++) store(to + row * to_stride + part * LANES, sum[row][part]);
}

#else

/* BLOCK outs of `blocks` times `rows` rows of `a`, `stride` apart. Each word of [depth / pair][BLOCK] is a number, or a
   pair of bfloat16, which are the upper halves of numbers. */
INLINE void words_tile_of(const void *blocks, const int pair, const float *a, int64_t stride, int64_t depth,
                          const int rows, const char *next, const int pace, float *to, int64_t to_stride) {
    const int32_t *here = blocks;
    vec sum[ROWS][2];
    UNROLLED for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = all(0);
    for (int64_t at = 0; at < depth; at += pair, here += BLOCK) {
        ask(next, at / pair, pace);
        UNROLLED for (int each = 0; each < pair; each++) {
            const ints low = *(const ints_at *)here, high = *(const ints_at *)(here + LANES);
            const vec one = (vec)(pair == 1 ? low : each ? low & ~0xffff : low << 16);
            const vec two = (vec)(pair == 1 ? high : each ? high & ~0xffff : high << 16);
            UNROLLED for (int row = 0; row < rows; row++) {
                vec own = all(a[row * stride + at + each]);
                __asm__("" : "+v"(own));    /* read once, for both */
                sum[row][0] += one * own;
                sum[row][1] += two * own;
            }
            /* What was read is read again: the sums leave no register to keep it in. */
            __asm__ volatile("" ::: "memory");
        }
    }
    UNROLLED for (int row = 0; row < rows; row++) {
        store(to + row * to_stride, sum[row][0]);
        store(to + row * to_stride + LANES, sum[row][1]);
    }
}

INLINE void tile_of(const float *blocks, const float *a, int64_t stride, int64_t depth, const int rows,
                    const char *next, const int pace, float *to, int64_t to_stride) {
    words_tile_of(blocks, 1, a, stride, depth, rows, next, pace, to, to_stride);
}

#if CODED

/* Load LANES scales or leasts. */
INLINE vec load_scales(const factor *at, const int bytes) {
    if (bytes == 4) return load((const float *)at);
#if LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#else
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#endif
}

/* Load LANES codes of 8 bits as numbers. */
INLINE vec of_bytes(const factor *at) {
#if LANES == 16
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#endif
}

/* Convert the codes of 4 bits at `shift` bits in each word to numbers. */
INLINE vec of_nibbles(uints words, const int shift) {
#if LANES == 16
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps((__m512i)(words >> shift), numbers);
#else
    return __builtin_convertvector((ints)(words >> shift & 15), vec);
#endif
}

/* Multiply BLOCK outs of a quantized weight with `rows` rows, and prefetch AHEAD. */
INLINE void coded_tile_of(const struct weight *weight, struct fed fed, const int rows, float *to) {
    const number *const a = fed.rows;
    const float *sums = fed.sums;
    const int64_t stride = fed.depth, depth = fed.depth, groups = fed.groups;
    const int bits = weight->bits, bytes = weight->scale_bytes, has_leasts = weight->has_leasts;
    const int64_t of_scales = BLOCK * bytes;
    const factor *here = weight->blocks;
    vec sum[ROWS][2];
    UNROLLED for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = all(0);
    for (int64_t first = 0; first < depth; first += weight->group) {
        const factor *scales = here;
        const int64_t end = first + weight->group < depth ? first + weight->group : depth;
        vec part[ROWS][2];
        UNROLLED for (int row = 0; row < rows; row++) part[row][0] = part[row][1] = all(0);
        here += of_scales << has_leasts;
        if (bits == 4)
            for (int64_t at = first; at < end; at += 4, here += 2 * BLOCK) {
                const uints words = (uints)*(const ints_at *)here;
                __builtin_prefetch(here + AHEAD, 0, 2);
                UNROLLED for (int each = 0; each < 4; each++) {
                    const vec one = of_nibbles(words, 8 * each), two = of_nibbles(words, 8 * each + 4);
                    UNROLLED for (int row = 0; row < rows; row++) {
                        vec own = all(a[row * stride + at + each]);
                        __asm__("" : "+v"(own));    /* read once, for both */
                        part[row][0] += one * own;
                        part[row][1] += two * own;
                    }
                }
            }
        else
            for (int64_t at = first; at < end; at += 2, here += 2 * BLOCK) {
                __builtin_prefetch(here + AHEAD, 0, 2);
                UNROLLED for (int each = 0; each < 2; each++) {
                    const vec one = of_bytes(here + each * BLOCK), two = of_bytes(here + each * BLOCK + LANES);
                    UNROLLED for (int row = 0; row < rows; row++) {
                        vec own = all(a[row * stride + at + each]);
                        __asm__("" : "+v"(own));
                        part[row][0] += one * own;
                        part[row][1] += two * own;
                    }
                }
            }
        UNROLLED for (int half = 0; half < 2; half++) {
            const vec scale = load_scales(scales + half * of_scales / 2, bytes);
            UNROLLED for (int row = 0; row < rows; row++) sum[row][half] += part[row][half] * scale;
            if (bits == 4 || has_leasts) {
                const vec least = has_leasts ? load_scales(scales + of_scales + half * of_scales / 2, bytes) : -8 * scale;
                UNROLLED for (int row = 0; row < rows; row++) sum[row][half] += least * sums[row * groups];
            }
        }
        sums++;
    }
    UNROLLED for (int row = 0; row < rows; row++) {
        store(to + row * BLOCK, sum[row][0]);
        store(to + row * BLOCK + LANES, sum[row][1]);
    }
}

#elif WEIGHT == 16
INLINE void narrow_tile_of(const factor *blocks, const float *a, int64_t stride, int64_t depth, const int rows,
                           const char *next, const int pace, float *to, int64_t to_stride) {
    words_tile_of(blocks, 2, a, stride, depth, rows, next, pace, to, to_stride);
}
#endif
#endif

#if defined __AMX_BF16__

/* A tile of numbers in the layout of weights. */
static void tile(const number *blocks, const number *a, int64_t stride, int64_t depth, int64_t rows, float *to,
                 int64_t to_stride) {
    struct summed nothing = {0};
    tile_of(blocks, a, stride, depth, rows, NULL, 0, 0, to, to_stride, &nothing, NULL, NULL);
}

/* Add BLOCK more of the depth. `blocks`: BLOCK outs. */
static void more_of_tile(const number *blocks, const number *a, int64_t stride, int64_t rows, const int more,
                         tile_sums to) {
    struct summed nothing = {0};
    tile_of(blocks, a, stride, BLOCK, rows, NULL, 0, more, *to, BLOCK, &nothing, NULL, NULL);
}

/* Tile `place` of `tiles` of weights, which come from memory. Several tiles over one block each prefetch their share of
   the next block. For a single tile the core reads ahead by itself. */
INLINE void weight_tile(struct weight weight, struct fed fed, int64_t rows, int64_t place, int64_t tiles, tile_sums to,
                        struct summed *before, finisher finish, const void *of) {
    const factor *const blocks = weight.blocks;
    const int64_t depth = fed.depth;
    const int64_t askers = least(tiles, ASKING);
    const int64_t ahead = depth * BLOCK + place * depth * BLOCK / askers;
    const char *const next = tiles > 1 && place < askers ? (const char *)(blocks + ahead) : NULL;
    tile_of(blocks, fed.rows, depth, depth, rows, next, 4 * BLOCK / (int)askers, 0, *to, BLOCK, before, finish, of);
}

#else

#define SO_MANY(of, count)                                                                                            \
    case count: of(blocks, a, stride, depth, count, next, 0, to, to_stride); break;                                   \
    case -(count): of(blocks, a, stride, depth, count, next, pace, to, to_stride); break;
#if ROWS == 8
#define MORE_ROWS(of) SO_MANY(of, 6) SO_MANY(of, 7) SO_MANY(of, 8)
#else
#define MORE_ROWS(of)
#endif
#define OF_ROWS(of)                                                                                                   \
    switch (next ? -rows : rows) {                                                                                    \
    SO_MANY(of, 1) SO_MANY(of, 2) SO_MANY(of, 3) SO_MANY(of, 4) SO_MANY(of, 5)                                        \
    MORE_ROWS(of)                                                                                                     \
    default: __builtin_trap();                                                                                        \
    }

INLINE void release_tiles(void) {}

/* A tile of numbers in the layout of weights. */
static void tile(const number *blocks, const number *a, int64_t stride, int64_t depth, int64_t rows, float *to,
                 int64_t to_stride) {
    const char *const next = NULL;
    const int pace = 0;
    OF_ROWS(tile_of)
}

#if CODED

#define CODED_TILE(count) case count: coded_tile_of(&weight, fed, count, to); break;
#if ROWS == 8
#define MORE_CODED CODED_TILE(6) CODED_TILE(7) CODED_TILE(8)
#else
#define MORE_CODED
#endif

static void coded_tile(struct weight weight, struct fed fed, int64_t rows, float *to) {
    switch (rows) {
    CODED_TILE(1) CODED_TILE(2) CODED_TILE(3) CODED_TILE(4) CODED_TILE(5) MORE_CODED
    default: __builtin_trap();
    }
}

#else

/* Tile `place` of `tiles` of weights, which come from memory, with prefetching. With many rows the core does not read
   ahead far enough by itself, and with several tiles not at all. Each tile prefetches its share. */
static void ask_and_tile(const factor *blocks, const number *a, int64_t depth, int64_t rows, int64_t place,
                         int64_t tiles, float *to) {
    const int64_t stride = depth, to_stride = BLOCK, bytes = depth * BLOCK * (int64_t)sizeof *blocks;
    const int64_t askers = least(tiles, ASKING);
    const int64_t ahead = tiles > 1 ? bytes + place * bytes / askers : AHEAD;
    const int asks = tiles > 1 ? place < askers : rows >= MANY, pace = 4 * BLOCK / (int)askers;
    const char *const next = asks ? (const char *)blocks + ahead : NULL;
#if NUMBER == WEIGHT
    OF_ROWS(tile_of)
#else
    OF_ROWS(narrow_tile_of)
#endif
}
#endif

INLINE void weight_tile(struct weight weight, struct fed fed, int64_t rows, int64_t place, int64_t tiles, tile_sums to,
                        struct summed *before, finisher finish, const void *of) {
    finish_rows(before, ROWS, finish, of);
#if CODED
    (void)place, (void)tiles;
    coded_tile(weight, fed, rows, *to);
#else
    ask_and_tile(weight.blocks, fed.rows, fed.depth, rows, place, tiles, *to);
#endif
}
#endif

/* Return the blocks of a weight from an out on. */
INLINE struct weight from_out(const struct weight *weight, int64_t first, int64_t depth) {
    struct weight from = *weight;
#if CODED
    const int64_t groups = (depth + from.group - 1) / from.group;
    from.blocks += first * ((groups * from.scale_bytes << from.has_leasts) + depth * from.bits / 8);
#else
    from.blocks += first * depth;
#endif
    return from;
}

/* Prepare rows [rows][depth] as input of a weight. Called by all threads. */
INLINE struct fed sum_up(const struct weight *weight, const number *a, int64_t depth, int64_t rows, float *to) {
#if CODED
    const int64_t groups = (depth + weight->group - 1) / weight->group;
    if (weight->bits == 4 || weight->has_leasts)
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t group = 0; group < groups; group++) {
                const int64_t first = group * weight->group, end = least(first + weight->group, depth);
                vec sum = all(0);
                for (int64_t at = first; at < end; at += LANES) sum += load(a + row * depth + at);
                to[row * groups + group] = total(sum);
            }
    return (struct fed){a, depth, to, groups};
#else
    (void)weight, (void)rows;
    return (struct fed){a, depth, to, 0};
#endif
}

/* Multiply rows with a block. Finished outs go to `to`, `bytes` of each row, rows `stride` apart. */
INLINE void multiply_block(struct weight block, struct fed fed, int64_t rows, const void *to, int64_t stride,
                           const int bytes, finisher finish, const void *of) {
    tile_sums sums;                 /* finished when the next ones are stored */
    struct summed before = {0};
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t row = 0, place = 0, here; row < rows; row += here, place++) {
        here = even_share(rows - row);
        if (ASKS_FOR_SUMS && tiles > 1) ask_for_rows((const char *)to + row * stride, stride, here, bytes);
        weight_tile(block, from_row(fed, row), here, place, tiles, sums, &before, finish, of);
        before = (struct summed){row, row + here, sums};
    }
    finish_rows(&before, ROWS, finish, of);
}

/* Return how many rows are multiplied with a whole weight before the next rows are. */
INLINE int64_t rows_at_once(int64_t rows, int64_t depth) {
    const int64_t parts = (rows * depth * (int64_t)sizeof(number) + NEAR - 1) / NEAR;
    return ROWS == 32 && rows ? up_to((rows + parts - 1) / parts, ROWS) : rows;
}

struct product {
    const float *bias;              /* of the block, NULL for none */
    float *to;                      /* [rows][stride], from the block's first out on */
    int64_t stride, outs;
    int add;
};

/* to = or += sums + bias */
INLINE void set_or_add(const void *of, int64_t row, const float *sums) {
    const struct product *p = of;
    float *to = p->to + row * p->stride;
    for (int64_t out = 0; out < p->outs; out++) {
        const float told = p->bias ? sums[out] + p->bias[out] : sums[out];
        to[out] = p->add ? to[out] + told : told;
    }
}

/* to [rows][outs] = or += a [rows][depth] * weight + bias. By all threads, which have `sums` for the rows' groups. */
static void multiply(const struct weight *weight, const float *bias, const number *a, int64_t depth, int64_t outs,
                     int64_t rows, float *to, const int add, float *sums) {
    const struct fed fed = sum_up(weight, a, depth, rows, sums);
    const int64_t part = rows_at_once(rows, depth);
    for (int64_t row = 0; row < rows; row += part)
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outs; first += BLOCK) {
            struct product p = {bias ? bias + first : NULL, to + row * outs + first, outs, BLOCK, add};
            const struct weight block = from_out(weight, first, depth);
            const int64_t here = least(part, rows - row), stride = outs * (int64_t)sizeof *to;
            /* Twice, for the compiler to know how many outs nearly all blocks have. */
            if (first + BLOCK <= outs)
                multiply_block(block, from_row(fed, row), here, p.to, stride, BLOCK * sizeof *to, set_or_add, &p);
            else {
                p.outs = outs - first;
                multiply_block(block, from_row(fed, row), here, p.to, stride, BLOCK * sizeof *to, set_or_add, &p);
            }
        }
}

struct gating {
    const float *bias;              /* of the block, NULL for none */
    number *to;                     /* [rows][width], from the block's first one on */
    int64_t width;
};

/* to = silu(gate) * up: of each block the first half are gates, the second what they let through. */
INLINE void let_through(const void *of, int64_t row, const float *sums) {
    const struct gating *g = of;
    float out[HALF];
    for (int at = 0; at < HALF; at += LANES) {
        vec one = load(sums + at), other = load(sums + HALF + at);
        if (g->bias) {
            one += load(g->bias + at);
            other += load(g->bias + HALF + at);
        }
        store(out + at, one / (1 + exponential(-one)) * other);
    }
    put(g->to + row * g->width, out, HALF);
}

/* to [rows][width] = silu(gate) * up. By all threads. */
static void gate(const struct weight *weight, const float *bias, const number *a, int64_t depth, int64_t width,
                 int64_t rows, number *to, float *sums) {
    const struct fed fed = sum_up(weight, a, depth, rows, sums);
    const int64_t part = rows_at_once(rows, depth);
    for (int64_t row = 0; row < rows; row += part)
#pragma omp for schedule(static)
        for (int64_t first = 0; first < width; first += HALF) {
            const struct gating g = {bias ? bias + 2 * first : NULL, to + row * width + first, width};
            multiply_block(from_out(weight, 2 * first, depth), from_row(fed, row), least(part, rows - row), g.to,
                           width * (int64_t)sizeof *to, HALF * sizeof *to, let_through, &g);
        }
}

INLINE float root_mean(const float *x, int64_t width, float epsilon) {
    vec squares = all(0);
    for (int64_t at = 0; at < width; at += LANES) squares += load(x + at) * load(x + at);
    return 1.0f / __builtin_sqrtf(total(squares) / (float)width + epsilon);
}

/* to = x / sqrt(mean(x^2) + epsilon) * weight, [width] */
static void norm(const float *x, const float *weight, float epsilon, int64_t width, number *to) {
    const float scale = root_mean(x, width, epsilon);
    for (int64_t at = 0; at < width; at += STRIP) {
        float out[STRIP];
        for (int part = 0; part < STRIP; part += LANES)
            store(out + part, load(x + at + part) * scale * load(weight + at + part));
        put(to + at, out, STRIP);
    }
}

/* A head's query or key: its norm, if there is one, then its rotation. */
static void rotate(float *x, const float *weight, float epsilon, const float *cosine, const float *sine,
                   int64_t width) {
    const int64_t half = width / 2;
    if (weight) {
        const float scale = root_mean(x, width, epsilon);
        for (int64_t at = 0; at < width; at += LANES) store(x + at, load(x + at) * scale * load(weight + at));
    }
    for (int64_t at = 0; at < half; at += LANES) {
        const vec one = load(x + at), other = load(x + at + half);
        store(x + at, one * load(cosine + at) - other * load(sine + at));
        store(x + at + half, other * load(cosine + at + half) + one * load(sine + at + half));
    }
}

#if LANES == 16

/* Of each square of 2 * `apart` vectors and lanes, the upper right quarter and the lower left one change places. */
INLINE void exchange(vec *of, const int apart) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ints upper = (lane & apart) != 0;
    const __m512i first = (__m512i)((upper & (lane - apart + LANES)) | (~upper & lane));
    const __m512i second = (__m512i)((upper & (lane + LANES)) | (~upper & (lane + apart)));
    ALL_LANES for (int each = 0; each < LANES; each++)
        if (!(each & apart)) {
            const vec one = of[each], other = of[each + apart];
            of[each] = _mm512_permutex2var_ps(one, first, other);
            of[each + apart] = _mm512_permutex2var_ps(one, second, other);
        }
}

/* Transpose: word w of vector v becomes word v of vector w. */
INLINE void transpose(vec *of) {
    exchange(of, 8);
    exchange(of, 4);
    exchange(of, 2);
    exchange(of, 1);
}

#else

INLINE void transpose(vec *of) {
    vec pairs[LANES], fours[LANES];
    UNROLLED for (int each = 0; each < LANES; each += 2) {
        pairs[each] = _mm256_unpacklo_ps(of[each], of[each + 1]);
        pairs[each + 1] = _mm256_unpackhi_ps(of[each], of[each + 1]);
    }
    UNROLLED for (int each = 0; each < LANES; each++) {
        const int from = each / 4 * 4 + each % 4 / 2;
        const vec one = pairs[from], other = pairs[from + 2];
        fours[each] = each % 2 ? _mm256_shuffle_ps(one, other, 0xee) : _mm256_shuffle_ps(one, other, 0x44);
    }
    UNROLLED for (int each = 0; each < LANES / 2; each++) {
        of[each] = _mm256_permute2f128_ps(fours[each], fours[each + LANES / 2], 0x20);
        of[each + LANES / 2] = _mm256_permute2f128_ps(fours[each], fours[each + LANES / 2], 0x31);
    }
}
#endif

/* Keys or values of one head that a row sees, in pages. */
struct pages {
    const kept *of;                 /* page 0 */
    const int64_t *table;
    int64_t stride, tokens, head_dim, count;
};

/* Addresses of BLOCK tokens. */
typedef const kept *some_kept[BLOCK];

/* Find the tokens from `first` on. Zeros follow the last one. */
INLINE void find(const struct pages *p, int64_t first, some_kept to) {
    static const kept nothing[HEAD_STRIPS * STRIP];
    const int64_t there = least(p->count - first, BLOCK);
    const int64_t *page = p->table + first / p->tokens;
    int64_t token = 0, place = first % p->tokens;
    for (; token < there; page++, place = 0) {
        const int64_t end = least(token + p->tokens - place, there);
        const kept *at = p->of + *page * p->stride + place * p->head_dim;
        for (; token < end; token++, at += p->head_dim) to[token] = at;
    }
    for (; token < BLOCK; token++) to[token] = nothing;
}

/* Load LANES words of a token: numbers, or pairs of them. */
INLINE vec load_words(const kept *at) {
#if NUMBER == 16
    return (vec)_mm512_loadu_si512(at);
#else
    return load_kept(at);
#endif
}

/* Keys, laid out like a weight's block of which they are the outs: [head_dim / PAIR][BLOCK][PAIR]. Meanwhile the
   `next` ones are asked for, if there are any. */
INLINE void lay_keys(const some_kept key, int64_t head_dim, number *to, const kept *const *next) {
    for (int64_t at = 0; at < head_dim; at += LANES * PAIR)
        for (int64_t first = 0; first < BLOCK; first += LANES) {
            vec words[LANES];
            ALL_LANES for (int token = 0; token < LANES; token++) {
                words[token] = load_words(key[first + token] + at);
                if (next) __builtin_prefetch(next[first + token] + at, 0, 2);
            }
            transpose(words);
            ALL_LANES for (int word = 0; word < LANES; word++)
                store((float *)(to + (at + word * PAIR) * BLOCK + first * PAIR), words[word]);
        }
}

/* BLOCK dimensions of values, laid out like a weight's block that they are the depth of: [BLOCK / PAIR][BLOCK][PAIR]. */
INLINE void lay_values(const some_kept value, int64_t begin, number *to) {
    for (int64_t token = 0; token < BLOCK; token += PAIR)
        for (int at = 0; at < BLOCK; at += LANES) {
            float *const there = (float *)(to + token * BLOCK + at * PAIR);
#if NUMBER == 16
            const __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value[token] + begin + at)));
            const __m512i two =
                _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value[token + 1] + begin + at)));
            store(there, (vec)((ints)one | (ints)_mm512_slli_epi32(two, 16)));
#else
            store(there, load_kept(value[token] + begin + at));
#endif
        }
}

/* Load STRIP scores from `at` on. Scores from `count` on are -infinity. */
INLINE void load_scores(const float *scores, int64_t at, int64_t count, vec *to) {
    static const int32_t lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int part = 0; part < STRIP / LANES; part++) {
        const int64_t first = at + part * LANES;
        const ints seen = *(const ints_at *)lanes < (int32_t)(count - first) - (ints){0};
        to[part] = load(scores + first);
        if (at + STRIP > count) to[part] = pick(seen, to[part], all(-__builtin_inff()));
    }
}

/* Scores, which it scales, to weights, not yet divided by their sum, which is returned: as numbers, from the same place
   on, and 0 from `count` to `end`, a multiple of STRIP. */
static float soften(float *scores, float scaling, int64_t count, int64_t end) {
    vec most[STRIP / LANES], here[STRIP / LANES], sum = all(0);
    load_scores(scores, 0, count, most);
    for (int64_t at = STRIP; at < count; at += STRIP) {
        load_scores(scores, at, count, here);
        for (int part = 0; part < STRIP / LANES; part++) most[part] = larger(here[part], most[part]);
    }
    for (int part = 1; part < STRIP / LANES; part++) most[0] = larger(most[part], most[0]);
    const float top = largest(most[0]) * scaling;
    for (int64_t at = 0; at < end; at += STRIP) {
        load_scores(scores, at, count, here);
        float out[STRIP];
        for (int part = 0; part < STRIP / LANES; part++) {
            here[part] = exponential(here[part] * scaling - top);
            sum += here[part];
            store(out + part * LANES, here[part]);
        }
        put((number *)scores + at, out, STRIP);
    }
    return total(sum);
}

/* Finish BLOCK weighted sums of a query: divide them by the sum of the weights. */
INLINE void share_out(const float *sums, float sum, number *to) {
    const float share = 1.0f / sum;
    float out[BLOCK];
    for (int part = 0; part < BLOCK; part += LANES) store(out + part, load(sums + part) * share);
    put(to, out, BLOCK);
}

struct weighing {
    struct pages values;
    const float *scores;            /* the weights */
    int64_t longest;
    const float *sum;
    number *to;                     /* [queries][head_dim] */
};

#if defined __AMX_BF16__

/* Compute the weighted sums of all values. */
static void weigh(const struct weighing *w, int64_t queries) {
    number laid[BLOCK * BLOCK] __attribute__((aligned(64)));
    some_kept value;
    for (int64_t begin = 0; begin < w->values.head_dim; begin += BLOCK) {
        tile_sums sums;
        for (int64_t first = 0; first < w->values.count; first += BLOCK) {
            find(&w->values, first, value);
            lay_values(value, begin, laid);
            more_of_tile(laid, (const number *)w->scores + first, PAIR * w->longest, queries, first > 0, sums);
        }
        for (int64_t query = 0; query < queries; query++)
            share_out(sums[query], w->sum[query], w->to + query * w->values.head_dim + begin);
    }
}

#else
#if NUMBER == 16

/* Compute the weighted sums of all values for `queries` queries and `parts` times STRIP dimensions. */
INLINE void weigh_of(const struct weighing *w, int64_t begin, const int queries, const int parts) {
    __m512 low[WEIGHED][2], high[WEIGHED][2];
    for (int query = 0; query < queries; query++)
        for (int part = 0; part < parts; part++) low[query][part] = high[query][part] = _mm512_setzero_ps();
    for (int64_t page = 0; page * w->values.tokens < w->values.count; page++) {
        const kept *values = w->values.of + w->values.table[page] * w->values.stride + begin;
        const int64_t first = page * w->values.tokens, tokens = least(w->values.tokens, w->values.count - first);
        for (int64_t token = 0; token < tokens; token += 2) {
            /* Behind the last one, which is its own pair, the weight is 0. */
            const kept *const one = values + token * w->values.head_dim;
            const kept *const two = values + least(token + 1, tokens - 1) * w->values.head_dim;
            __m512bh below[2], above[2];
            for (int part = 0; part < parts; part++) {
                const __m512i a = _mm512_loadu_si512(one + part * STRIP), b = _mm512_loadu_si512(two + part * STRIP);
                below[part] = (__m512bh)_mm512_unpacklo_epi16(a, b);
                above[part] = (__m512bh)_mm512_unpackhi_epi16(a, b);
            }
            for (int query = 0; query < queries; query++) {
                const int32_t *pair = (const int32_t *)((const number *)(w->scores + query * w->longest) + first + token);
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(*pair);
                for (int part = 0; part < parts; part++) {
                    low[query][part] = _mm512_dpbf16_ps(low[query][part], below[part], weight);
                    high[query][part] = _mm512_dpbf16_ps(high[query][part], above[part], weight);
                }
            }
        }
    }
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int query = 0; query < queries; query++) {
        const __m512 share = _mm512_set1_ps(1.0f / w->sum[query]);
        for (int part = 0; part < parts; part++) {
            const __m512 one = _mm512_permutex2var_ps(low[query][part], left, high[query][part]);
            const __m512 two = _mm512_permutex2var_ps(low[query][part], right, high[query][part]);
            store_bf16s(w->to + query * w->values.head_dim + begin + part * STRIP, _mm512_mul_ps(one, share),
                        _mm512_mul_ps(two, share));
        }
    }
}

#else

/* The same in float32. */
INLINE void weigh_of(const struct weighing *w, int64_t begin, const int queries, const int parts) {
    const int most = LANES == 16 || queries < WEIGHED ? 4 : 2;     /* vectors of each query whose sums stay in registers */
    const int vectors = most * LANES > parts * STRIP ? parts * STRIP / LANES : most;
    for (int from = 0; from < parts * STRIP; from += vectors * LANES) {
        vec sum[WEIGHED][4] = {0};
        for (int64_t page = 0; page * w->values.tokens < w->values.count; page++) {
            const kept *values = w->values.of + w->values.table[page] * w->values.stride + begin + from;
            const int64_t first = page * w->values.tokens, tokens = least(w->values.tokens, w->values.count - first);
            for (int64_t token = 0; token < tokens; token++) {
                const kept *value = values + token * w->values.head_dim;
                UNROLLED for (int each = 0; each < vectors; each++) {
                    const vec part = load_kept(value + each * LANES);
                    UNROLLED for (int query = 0; query < queries; query++)
                        sum[query][each] += part * w->scores[query * w->longest + first + token];
                }
            }
        }
        for (int query = 0; query < queries; query++)
            for (int each = 0; each < vectors; each++)
                store(w->to + query * w->values.head_dim + begin + from + each * LANES,
                      sum[query][each] * (1.0f / w->sum[query]));
    }
}
#endif

static void weigh(const struct weighing *w, int64_t queries) {
    for (int64_t begin = 0; begin < w->values.head_dim; begin += 2 * STRIP) {
        const int parts = w->values.head_dim - begin > STRIP ? 2 : 1;
        switch (4 * parts + (int)queries) {
        case 5: weigh_of(w, begin, 1, 1); break;
        case 6: weigh_of(w, begin, 2, 1); break;
        case 7: weigh_of(w, begin, 3, 1); break;
        case 8: weigh_of(w, begin, 4, 1); break;
        case 9: weigh_of(w, begin, 1, 2); break;
        case 10: weigh_of(w, begin, 2, 2); break;
        case 11: weigh_of(w, begin, 3, 2); break;
        default: weigh_of(w, begin, 4, 2);
        }
    }
}
#endif

/* Return the keys of one head and layer in a page, [token][head_dim]. Values follow `plane_stride` later. */
INLINE kept *keys_of(const struct step *s, int64_t index, int64_t head, int64_t page) {
    return s->cache + page * s->page_stride + head * s->head_stride + index * s->layer_stride;
}

/* A token's own key and value of one head go to its page; its queries that share them wait where their results
   will be. */
static void enter(const struct model *m, int64_t index, const struct step *s, int64_t token, int64_t head) {
    const struct layer *layer = m->layer + index;
    const int64_t row = s->row_of[token];
    const int64_t head_dim = m->head_dim, group = m->heads / m->kv_heads, position = s->positions[token];
    const int64_t page = s->table[s->tables[row] + position / s->page_tokens];
    const float *cosine = s->cosine + token * head_dim, *sine = s->sine + token * head_dim;
    float *qkv = s->qkv + token * m->projected;
    float *key = qkv + (m->heads + head) * head_dim;
    const float *value = key + m->kv_heads * head_dim;
    kept *place = keys_of(s, index, head, page) + position % s->page_tokens * head_dim;
    number *seen = s->seen + (token * m->heads + head * group) * head_dim;

    if (token + 1 < s->tokens) {
        ask_for(qkv + m->projected + head * group * head_dim, group * head_dim * (int64_t)sizeof *qkv);
        ask_for(key + m->projected, head_dim * (int64_t)sizeof *key);
        ask_for(value + m->projected, head_dim * (int64_t)sizeof *value);
    }
    rotate(key, layer->key_norm, layer->key_norm_epsilon, cosine, sine, head_dim);
    for (int64_t at = 0; at < head_dim; at += STRIP) {
        keep(place + at, key + at);
        keep(place + s->plane_stride + at, value + at);
    }
    for (int64_t each = 0; each < group; each++) {
        float *query = qkv + (head * group + each) * head_dim;
        rotate(query, layer->query_norm, layer->query_norm_epsilon, cosine, sine, head_dim);
        for (int64_t at = 0; at < head_dim; at += STRIP) put(seen + each * head_dim + at, query + at, STRIP);
    }
}

/* How many tokens before its window a token at `position` does not see. */
INLINE int64_t unseen(const struct step *s, int64_t index, int64_t position) {
    const int64_t count = position + 1 - s->windows[index];
    return count < 0 ? 0 : count;
}

INLINE void hide(float *scores, int64_t count) {
    for (int64_t at = 0; at < count; at++) scores[at] = -__builtin_inff();
}

/* The queries of a row's only token that share a key head look at all that it sees, in the pages: what is summed is
   summed in the order of `attend_many`. */
static void attend(const struct model *m, int64_t index, const struct step *s, int64_t row, int64_t head, float *scores) {
    const int64_t head_dim = m->head_dim, group = m->heads / m->kv_heads, token = s->begins[row];
    int64_t aligned = s->page_tokens;
    while (aligned % STRIP) aligned += s->page_tokens;
    const int64_t hidden = unseen(s, index, s->positions[token]), base = hidden / aligned * aligned;
    const int64_t count = s->positions[token] + 1 - base;
    const int64_t *table = s->table + s->tables[row] + base / s->page_tokens;
    const struct pages keys = {keys_of(s, index, head, 0), table, s->page_stride, s->page_tokens, head_dim, count};
    number *seen = s->seen + (token * m->heads + head * group) * head_dim;
    const float scaling = m->layer[index].scaling;

    number laid[BLOCK * HEAD_STRIPS * STRIP] __attribute__((aligned(64)));
    some_kept key, next;
    find(&keys, 0, next);
    for (int64_t first = 0; first < count; first += BLOCK) {
        memcpy(key, next, sizeof key);
        find(&keys, first + BLOCK, next);
        lay_keys(key, head_dim, laid, next);
        for (int64_t each = 0; each < least(BLOCK, count - first - BLOCK); each++)
            ask((const char *)(next[each] + s->plane_stride), 0, (int)(head_dim * sizeof *keys.of));
        for (int64_t query = 0, here; query < group; query += here) {
            here = even_share(group - query);
            tile(laid, seen + query * head_dim, head_dim, head_dim, here, scores + query * s->longest + first, s->longest);
        }
    }
    for (int64_t query = 0; query < group; query += WEIGHED) {
        const int64_t here = least(WEIGHED, group - query);
        float sum[WEIGHED];
        for (int64_t each = 0; each < here; each++) {
            hide(scores + (query + each) * s->longest, hidden - base);
            sum[each] = soften(scores + (query + each) * s->longest, scaling, count, up_to(count, STRIP));
        }
        struct weighing w = {keys, scores + query * s->longest, s->longest, sum, seen + query * head_dim};
        w.values.of += s->plane_stride;
        weigh(&w, here);
    }
}

/* BLOCK tokens of a row, from `first` on, laid out like weights: a head's keys, which are [laid][head_dim], and its
   values, transposed, which are [head_dim][laid]. */
static void lay(const struct model *m, int64_t index, const struct step *s, int64_t row, int64_t head, int64_t first,
                int64_t count) {
    const int64_t head_dim = m->head_dim;
    const int64_t *table = s->table + s->tables[row];
    struct pages pages = {keys_of(s, index, head, 0), table, s->page_stride, s->page_tokens, head_dim, count};
    some_kept found;
    find(&pages, first, found);
    lay_keys(found, head_dim, s->keys + (head * s->laid + first) * head_dim, NULL);
    pages.of += s->plane_stride;
    find(&pages, first, found);
    for (int64_t begin = 0; begin < head_dim; begin += BLOCK)
        lay_values(found, begin, s->values + (head * head_dim + begin) * s->laid + first * BLOCK);
}

/* Up to ROWS tokens of a row, side by side, look with one query head at all that they see. */
static void attend_many(const struct model *m, int64_t index, const struct step *s, int64_t first, int64_t tokens,
                        int64_t query, float *scores) {
    const int64_t head_dim = m->head_dim, stride = m->heads * head_dim, head = query / (m->heads / m->kv_heads);
    const int64_t base = unseen(s, index, s->positions[first]) / STRIP * STRIP;
    const int64_t count = s->positions[first + tokens - 1] + 1 - base, end = up_to(count, STRIP);
    const int64_t depth = up_to(count, DEPTH_OF_TILE);
    const number *keys = s->keys + (head * s->laid + base) * head_dim;
    const number *values = s->values + head * s->laid * head_dim + base * BLOCK;
    number *seen = s->seen + first * stride + query * head_dim;
    const float scaling = m->layer[index].scaling;
    tile_sums sums;
    float of_row[ROWS];
    for (int64_t at = 0; at < count; at += BLOCK)
        tile(keys + at * head_dim, seen, stride, head_dim, tokens, scores + at, s->longest);
    for (int64_t token = 0; token < tokens; token++) {
        hide(scores + token * s->longest, unseen(s, index, s->positions[first + token]) - base);
        of_row[token] = soften(scores + token * s->longest, scaling, s->positions[first + token] + 1 - base, end);
    }
    for (int64_t begin = 0; begin < head_dim; begin += BLOCK) {
        tile(values + begin * s->laid, (const number *)scores, PAIR * s->longest, depth, tokens, *sums, BLOCK);
        for (int64_t token = 0; token < tokens; token++)
            share_out(sums[token], of_row[token], seen + token * stride + begin);
    }
}

/* Is one of `tokens` tokens from `first` on needed behind this layer's keys and values? Of the last one only those
   are whose logits are asked for. */
static int is_needed(const struct model *m, int64_t index, const struct step *s, int64_t first, int64_t tokens) {
    if (index + 1 < m->layers) return 1;
    for (int64_t place = 0; place < s->wanted; place++)
        if (first <= s->keep[place] && s->keep[place] < first + tokens) return 1;
    return 0;
}

/* All rows, by all threads. */
static void look(const struct model *m, int64_t index, const struct step *s, float *scores) {
#pragma omp for collapse(2)
    for (int64_t token = 0; token < s->tokens; token++)
        for (int64_t head = 0; head < m->kv_heads; head++) enter(m, index, s, token, head);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t head = 0; head < m->kv_heads; head++)
            if (s->begins[row + 1] - s->begins[row] == 1 && is_needed(m, index, s, s->begins[row], 1))
                attend(m, index, s, row, head, scores);
    for (int64_t row = 0; row < s->rows; row++) {
        const int64_t begin = s->begins[row], end = s->begins[row + 1];
        if (end - begin == 1 || !is_needed(m, index, s, begin, end - begin)) continue;
        const int64_t base = unseen(s, index, s->positions[begin]) / STRIP * STRIP;
        const int64_t count = s->positions[end - 1] + 1;
#pragma omp for collapse(2)
        for (int64_t head = 0; head < m->kv_heads; head++)
            for (int64_t first = base; first < count; first += BLOCK) lay(m, index, s, row, head, first, count);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t query = 0; query < m->heads; query++)
            for (int64_t first = begin; first < end; first += ROWS)
                if (is_needed(m, index, s, first, least(ROWS, end - first)))
                    attend_many(m, index, s, first, least(ROWS, end - first), query, scores);
    }
}

/* The tokens that are needed to the end, side by side. */
static void gather(const struct step *s, int64_t hidden, int64_t of_heads) {
    for (int64_t place = 0; place < s->wanted; place++) {
        memmove(s->x + place * hidden, s->x + s->keep[place] * hidden, hidden * sizeof *s->x);
        memmove(s->seen + place * of_heads, s->seen + s->keep[place] * of_heads, of_heads * sizeof *s->seen);
    }
}

void baton_step(const struct model *m, const struct step *s) {
    const int64_t hidden = m->hidden, of_heads = m->heads * m->head_dim;
#pragma omp parallel num_threads(m->threads)
    {
        int64_t rows = s->tokens;
        float *scores = s->scores + omp_get_thread_num() * s->scored * s->longest;
        for (int64_t index = 0; index < m->layers; index++) {
            const struct layer *layer = m->layer + index;
#pragma omp for
            for (int64_t row = 0; row < rows; row++)
                norm(s->x + row * hidden, layer->before_attention, layer->before_attention_epsilon, hidden,
                     s->normed + row * hidden);
            multiply(&layer->qkv, layer->qkv_bias, s->normed, hidden, m->projected, rows, s->qkv, 0, s->sums);
            look(m, index, s, scores);
            if (index + 1 == m->layers) {
                rows = s->wanted;
#pragma omp single
                gather(s, hidden, of_heads);
            }
            multiply(&layer->out, layer->out_bias, s->seen, of_heads, hidden, rows, s->x, 1, s->sums);
#pragma omp for
            for (int64_t row = 0; row < rows; row++)
                norm(s->x + row * hidden, layer->before_gate, layer->before_gate_epsilon, hidden,
                     s->normed + row * hidden);
            gate(&layer->gate_and_up, layer->gate_and_up_bias, s->normed, hidden, m->width, rows, s->gated, s->sums);
            multiply(&layer->down, layer->down_bias, s->gated, m->width, hidden, rows, s->x, 1, s->sums);
        }
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            norm(s->x + row * hidden, m->norm, m->norm_epsilon, hidden, s->normed + row * hidden);
        multiply(&m->head, m->head_bias, s->normed, hidden, m->vocabulary, rows, s->logits, 0, s->sums);
        release_tiles();
    }
}
