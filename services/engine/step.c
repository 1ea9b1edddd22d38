/* How is a step of a whole model computed in bfloat16? Called by compiled.py.

   Weights lie in blocks of outs, [outs / BLOCK][in / 2][BLOCK][2]. What is summed is summed in float32, in an order
   that does not depend on how many rows or threads there are. */

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

typedef uint16_t bf16;

/* Of one layer. A bias or a head's norm that the model does not have is NULL. */
struct layer {
    const bf16 *qkv, *out, *gate_and_up, *down;
    const float *qkv_bias, *out_bias, *gate_and_up_bias, *down_bias;
    const float *before_attention, *query_norm, *key_norm, *before_gate;
    float before_attention_epsilon, query_norm_epsilon, key_norm_epsilon, before_gate_epsilon;
    float scaling;
};

struct model {
    int64_t layers, hidden, heads, kv_heads, head_dim, width, vocabulary;
    const struct layer *layer;
    const float *norm;
    const bf16 *head;
    const float *head_bias;
    float norm_epsilon;
    int32_t threads;
};

struct step {
    int64_t rows, tokens, wanted;   /* sequences, what all of them feed, whose logits are asked for */
    int64_t page_tokens;            /* a multiple of SIDE */
    int64_t longest;                /* scores of a query: positions, up to a multiple of PAIRS */
    bf16 *cache;                    /* [page][kv head][layer][K, V][token][head_dim] */
    const int64_t *positions;       /* [tokens], row by row */
    const int64_t *row_of;          /* [tokens] */
    const int64_t *begins;          /* [rows + 1]: tokens of each row */
    const int64_t *tables;          /* [rows]: where its pages begin in the table */
    const int64_t *table;           /* pages, row by row */
    const int64_t *keep;            /* [wanted] tokens */
    const float *cosine, *sine;     /* [tokens][head_dim] */
    float *x;                       /* [tokens][hidden]: embeddings, then what the layers add to them */
    bf16 *normed;                   /* [tokens][hidden] */
    float *qkv;                     /* [tokens][(heads + 2 * kv_heads) * head_dim] */
    bf16 *seen;                     /* [tokens][heads * head_dim] */
    bf16 *gated;                    /* [tokens][width] */
    float *scores;                  /* [threads][scored][longest] */
    bf16 *keys, *values;            /* of the row of several tokens at hand, in blocks: [kv_heads][longest * head_dim] */
    float *logits;                  /* [wanted][vocabulary] */
    int64_t scored;                 /* at least ROWS, and the queries of a key head */
};

enum {
    LANES = 16,                     /* numbers of a vector in float32, */
    PAIRS = 2 * LANES,              /* and in bfloat16 */
    BLOCK = 32,                     /* outs of a weight, */
    ROWS = 8,                       /* rows that are multiplied with them at once: all sums stay in registers */
    SIDE = 4,                       /* tokens that are scored at once, queries that are answered at once */
    PARTS = 8,                      /* vectors that a head takes at most */
    MANY = 6, AHEAD = 8192,         /* rows, from which on what so many bytes further on is asked for */
};

#define INLINE static inline __attribute__((always_inline))

INLINE __m512bh bf16s(const bf16 *at) { return (__m512bh)_mm512_loadu_si512(at); }

INLINE void store_bf16s(bf16 *at, __m512 low, __m512 high) {
    _mm512_storeu_si512(at, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE int64_t up_to(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* e^x; NaN of NaN, which either bound lets through, 0 of -infinity. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-150.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.0f / 720);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 120));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 24));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f / 6));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, n);
}

/* The sums of four vectors. */
INLINE __m128 sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* BLOCK outs of `weight`, [depth / 2][BLOCK][2], times `rows` rows of `a`, `stride` apart. */
INLINE void tile_of(const bf16 *weight, const bf16 *a, int64_t stride, int64_t depth, const int rows, const int fetch,
                    __m512 (*to)[2]) {
    __m512 sum[ROWS][2];            /* in registers, which `to` could not be */
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (int64_t at = 0; at < depth; at += 2) {
        const bf16 *here = weight + at * BLOCK;
        if (fetch) {
            _mm_prefetch((const char *)here + AHEAD, _MM_HINT_T1);
            _mm_prefetch((const char *)here + AHEAD + 64, _MM_HINT_T1);
        }
        const __m512bh low = bf16s(here), high = bf16s(here + PAIRS);
        for (int row = 0; row < rows; row++) {
            const __m512bh own = (__m512bh)_mm512_set1_epi32(*(const int32_t *)(a + row * stride + at));
            sum[row][0] = _mm512_dpbf16_ps(sum[row][0], low, own);
            sum[row][1] = _mm512_dpbf16_ps(sum[row][1], high, own);
        }
    }
    for (int row = 0; row < rows; row++) to[row][0] = sum[row][0], to[row][1] = sum[row][1];
}

/* `fresh`: the weight comes from memory. So many rows keep the core from reading far enough ahead by itself. */
static void tile(const bf16 *weight, const bf16 *a, int64_t stride, int64_t depth, int64_t rows, int fresh,
                 __m512 (*sum)[2]) {
    switch (fresh && rows >= MANY ? -rows : rows) {
    case 1: tile_of(weight, a, stride, depth, 1, 0, sum); break;
    case 2: tile_of(weight, a, stride, depth, 2, 0, sum); break;
    case 3: tile_of(weight, a, stride, depth, 3, 0, sum); break;
    case 4: tile_of(weight, a, stride, depth, 4, 0, sum); break;
    case 5: tile_of(weight, a, stride, depth, 5, 0, sum); break;
    case 6: tile_of(weight, a, stride, depth, 6, 0, sum); break;
    case 7: tile_of(weight, a, stride, depth, 7, 0, sum); break;
    case 8: tile_of(weight, a, stride, depth, 8, 0, sum); break;
    case -6: tile_of(weight, a, stride, depth, 6, 1, sum); break;
    case -7: tile_of(weight, a, stride, depth, 7, 1, sum); break;
    default: tile_of(weight, a, stride, depth, 8, 1, sum);
    }
}

/* to [rows][outs] = or += a [rows][depth] * weight + bias. By all threads. */
static void multiply(const bf16 *weight, const float *bias, const bf16 *a, int64_t depth, int64_t outs, int64_t rows,
                     float *to, const int add) {
#pragma omp for schedule(static)
    for (int64_t first = 0; first < outs; first += BLOCK) {
        const __mmask32 there = outs - first < BLOCK ? (1u << (outs - first)) - 1 : ~0u;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t here = least(ROWS, rows - row);
            __m512 sum[ROWS][2];
            tile(weight + first * depth, a + row * depth, depth, depth, here, row == 0, sum);
            for (int64_t each = 0; each < here; each++)
                for (int half = 0; half < 2; half++) {
                    const __mmask16 mask = (__mmask16)(there >> half * LANES);
                    float *at = to + (row + each) * outs + first + half * LANES;
                    __m512 told = sum[each][half];
                    if (bias) told = _mm512_add_ps(told, _mm512_maskz_loadu_ps(mask, bias + first + half * LANES));
                    if (add) told = _mm512_add_ps(told, _mm512_maskz_loadu_ps(mask, at));
                    _mm512_mask_storeu_ps(at, mask, told);
                }
        }
    }
}

/* to [rows][width] = silu(gate) * up: of each block the first half are gates, the second what they let through. */
static void gate(const bf16 *weight, const float *bias, const bf16 *a, int64_t depth, int64_t width, int64_t rows,
                 bf16 *to) {
#pragma omp for schedule(static)
    for (int64_t first = 0; first < width; first += LANES) {
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t here = least(ROWS, rows - row);
            __m512 sum[ROWS][2];
            tile(weight + 2 * first * depth, a + row * depth, depth, depth, here, row == 0, sum);
            for (int64_t each = 0; each < here; each++) {
                __m512 one = sum[each][0], other = sum[each][1];
                if (bias) {
                    one = _mm512_add_ps(one, _mm512_loadu_ps(bias + 2 * first));
                    other = _mm512_add_ps(other, _mm512_loadu_ps(bias + 2 * first + LANES));
                }
                const __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), one);
                const __m512 below = _mm512_add_ps(_mm512_set1_ps(1), exponential(minus));
                const __m512 out = _mm512_mul_ps(_mm512_div_ps(one, below), other);
                _mm256_storeu_si256((__m256i *)(to + (row + each) * width + first), (__m256i)_mm512_cvtneps_pbh(out));
            }
        }
    }
}

INLINE float root_mean(const float *x, int64_t width, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t at = 0; at < width; at += LANES) {
        const __m512 part = _mm512_loadu_ps(x + at);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(_mm512_reduce_add_ps(squares) / (float)width + epsilon)));
}

/* to = x / sqrt(mean(x^2) + epsilon) * weight, [width] */
static void norm(const float *x, const float *weight, float epsilon, int64_t width, bf16 *to) {
    const __m512 scale = _mm512_set1_ps(root_mean(x, width, epsilon));
    for (int64_t at = 0; at < width; at += PAIRS) {
        const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x + at), scale);
        const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + at + LANES), scale);
        store_bf16s(to + at, _mm512_mul_ps(low, _mm512_loadu_ps(weight + at)),
                    _mm512_mul_ps(high, _mm512_loadu_ps(weight + at + LANES)));
    }
}

/* A head's query or key: its norm, if there is one, then its rotation. */
static void rotate(float *x, const float *weight, float epsilon, const float *cosine, const float *sine,
                   int64_t width, bf16 *to) {
    const int64_t half = width / 2;
    if (weight) {
        const float scale = root_mean(x, width, epsilon);
        for (int64_t at = 0; at < width; at++) x[at] = x[at] * scale * weight[at];
    }
    for (int64_t at = 0; at < half; at++) {
        const float one = x[at], other = x[at + half];
        x[at] = one * cosine[at] - other * sine[at];
        x[at + half] = other * cosine[at + half] + one * sine[at + half];
    }
    for (int64_t at = 0; at < width; at += PAIRS)
        store_bf16s(to + at, _mm512_loadu_ps(x + at), _mm512_loadu_ps(x + at + LANES));
}

struct scoring {
    int64_t queries, head_dim, longest;
    const bf16 *query;              /* [queries][head_dim] */
    float scaling;
};

/* Of each query and the keys of SIDE tokens, the last of which may be one and the same: to[query][token]. */
INLINE void score_some(const struct scoring *s, const bf16 *const *key, const int parts, float *to) {
    __m512bh part_of[SIDE][PARTS];
    for (int each = 0; each < SIDE; each++)
        for (int part = 0; part < parts; part++) part_of[each][part] = bf16s(key[each] + part * PAIRS);
    for (int64_t query = 0; query < s->queries; query++) {
        __m512 sum[SIDE];
        for (int each = 0; each < SIDE; each++) sum[each] = _mm512_setzero_ps();
        for (int part = 0; part < parts; part++) {
            const __m512bh own = bf16s(s->query + query * s->head_dim + part * PAIRS);
            for (int each = 0; each < SIDE; each++) sum[each] = _mm512_dpbf16_ps(sum[each], part_of[each][part], own);
        }
        const __m128 told = _mm_mul_ps(sums(sum[0], sum[1], sum[2], sum[3]), _mm_set1_ps(s->scaling));
        _mm_storeu_ps(to + query * s->longest, told);
    }
}

/* Of the `tokens` keys of a page. Behind the last of them, up to a multiple of SIDE, is nothing yet. */
INLINE void score_of(const struct scoring *s, const bf16 *keys, int64_t tokens, const int parts, float *to) {
    int64_t token = 0;
    for (; token + SIDE <= tokens; token += SIDE) {
        const bf16 *at = keys + token * s->head_dim;
        const bf16 *const key[SIDE] = {at, at + s->head_dim, at + 2 * s->head_dim, at + 3 * s->head_dim};
        score_some(s, key, parts, to + token);
    }
    if (token < tokens) {
        const bf16 *key[SIDE];
        for (int each = 0; each < SIDE; each++) key[each] = keys + least(token + each, tokens - 1) * s->head_dim;
        score_some(s, key, parts, to + token);
    }
}

static void score(const struct scoring *s, const bf16 *keys, int64_t tokens, float *to) {
    switch (s->head_dim) {
    case 2 * PAIRS: score_of(s, keys, tokens, 2, to); break;
    case 4 * PAIRS: score_of(s, keys, tokens, 4, to); break;
    default: score_of(s, keys, tokens, (int)(s->head_dim / PAIRS), to);
    }
}

/* Scores to weights, not yet divided by their sum, which is returned: in bfloat16, from the same place on, and 0
   from `count` to `end`, a multiple of PAIRS. */
static float soften(float *scores, int64_t count, int64_t end) {
    for (int64_t at = count; at < end; at++) scores[at] = -__builtin_inff();
    __m512 most = _mm512_loadu_ps(scores);
    for (int64_t at = LANES; at < end; at += LANES) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + at));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    __m512 sum = _mm512_setzero_ps();
    bf16 *to = (bf16 *)scores;
    for (int64_t at = 0; at < end; at += PAIRS) {
        const __m512 low = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at), top));
        const __m512 high = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + at + LANES), top));
        sum = _mm512_add_ps(_mm512_add_ps(sum, low), high);
        store_bf16s(to + at, low, high);
    }
    return _mm512_reduce_add_ps(sum);
}

struct weighing {
    const bf16 *values;             /* of page 0 */
    const int64_t *table;
    int64_t page_stride, page_tokens, count, head_dim;
    const float *scores;            /* the weights */
    int64_t longest;
    const float *sum;
    bf16 *to;                       /* [queries][head_dim] */
};

/* The weighted sum of all values, of `queries` queries and `parts` times PAIRS dimensions. */
INLINE void weigh_of(const struct weighing *w, int64_t begin, const int queries, const int parts) {
    __m512 low[SIDE][2], high[SIDE][2];
    for (int query = 0; query < queries; query++)
        for (int part = 0; part < parts; part++) low[query][part] = high[query][part] = _mm512_setzero_ps();
    for (int64_t page = 0; page * w->page_tokens < w->count; page++) {
        const bf16 *values = w->values + w->table[page] * w->page_stride + begin;
        const int64_t first = page * w->page_tokens, tokens = least(w->page_tokens, w->count - first);
        for (int64_t token = 0; token < tokens; token += 2) {
            /* Behind the last one, which is its own pair, the weight is 0. */
            const bf16 *one = values + token * w->head_dim, *two = values + least(token + 1, tokens - 1) * w->head_dim;
            __m512bh below[2], above[2];
            for (int part = 0; part < parts; part++) {
                const __m512i a = _mm512_loadu_si512(one + part * PAIRS), b = _mm512_loadu_si512(two + part * PAIRS);
                below[part] = (__m512bh)_mm512_unpacklo_epi16(a, b);
                above[part] = (__m512bh)_mm512_unpackhi_epi16(a, b);
            }
            for (int query = 0; query < queries; query++) {
                const int32_t *pair = (const int32_t *)((const bf16 *)(w->scores + query * w->longest) + first + token);
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
            store_bf16s(w->to + query * w->head_dim + begin + part * PAIRS, _mm512_mul_ps(one, share),
                        _mm512_mul_ps(two, share));
        }
    }
}

static void weigh(const struct weighing *w, int64_t queries) {
    for (int64_t begin = 0; begin < w->head_dim; begin += 2 * PAIRS) {
        const int parts = w->head_dim - begin > PAIRS ? 2 : 1;
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

/* A token's own key and value of one head go to its page; its queries that share them wait where their results
   will be. */
static void enter(const struct model *m, int64_t index, const struct step *s, int64_t token, int64_t head) {
    const struct layer *layer = m->layer + index;
    const int64_t row = s->row_of[token];
    const int64_t head_dim = m->head_dim, group = m->heads / m->kv_heads, position = s->positions[token];
    const int64_t of_one = s->page_tokens * head_dim, page = s->table[s->tables[row] + position / s->page_tokens];
    const float *cosine = s->cosine + token * head_dim, *sine = s->sine + token * head_dim;
    float *qkv = s->qkv + token * (m->heads + 2 * m->kv_heads) * head_dim;
    const float *value = qkv + (m->heads + m->kv_heads + head) * head_dim;
    bf16 *place = s->cache + ((page * m->kv_heads + head) * m->layers + index) * 2 * of_one +
                  position % s->page_tokens * head_dim;
    bf16 *seen = s->seen + (token * m->heads + head * group) * head_dim;

    rotate(qkv + (m->heads + head) * head_dim, layer->key_norm, layer->key_norm_epsilon, cosine, sine, head_dim, place);
    for (int64_t at = 0; at < head_dim; at += PAIRS)
        store_bf16s(place + of_one + at, _mm512_loadu_ps(value + at), _mm512_loadu_ps(value + at + LANES));
    for (int64_t query = 0; query < group; query++)
        rotate(qkv + (head * group + query) * head_dim, layer->query_norm, layer->query_norm_epsilon, cosine, sine,
               head_dim, seen + query * head_dim);
}

/* The queries of a row's only token that share a key head look at all before it, in the pages. */
static void attend(const struct model *m, int64_t index, const struct step *s, int64_t row, int64_t head, float *scores) {
    const int64_t head_dim = m->head_dim, group = m->heads / m->kv_heads, token = s->begins[row];
    const int64_t count = s->positions[token] + 1;
    const int64_t of_one = s->page_tokens * head_dim, stride = m->kv_heads * m->layers * 2 * of_one;
    const int64_t *table = s->table + s->tables[row];
    const bf16 *keys = s->cache + (head * m->layers + index) * 2 * of_one, *values = keys + of_one;
    bf16 *seen = s->seen + (token * m->heads + head * group) * head_dim;

    const struct scoring asked = {group, head_dim, s->longest, seen, m->layer[index].scaling};
    for (int64_t page = 0; page * s->page_tokens < count; page++) {
        const int64_t first = page * s->page_tokens, tokens = least(s->page_tokens, count - first);
        if (first + s->page_tokens < count) {
            const char *next = (const char *)(keys + table[page + 1] * stride);
            for (int64_t at = 0; at < 4 * of_one; at += 64) _mm_prefetch(next + at, _MM_HINT_T1);
        }
        score(&asked, keys + table[page] * stride, tokens, scores + first);
    }
    for (int64_t query = 0; query < group; query += SIDE) {
        const int64_t here = least(SIDE, group - query);
        float sum[SIDE];
        for (int64_t each = 0; each < here; each++)
            sum[each] = soften(scores + (query + each) * s->longest, count, up_to(count, PAIRS));
        const struct weighing w = {
            values, table, stride, s->page_tokens, count, head_dim, scores + query * s->longest, s->longest, sum,
            seen + query * head_dim,
        };
        weigh(&w, here);
    }
}

/* BLOCK tokens of a row, from `first` on, as blocks of two weights: one of a head's keys, [longest][head_dim], and one
   of its values, transposed, [head_dim][longest]. */
static void lay(const struct model *m, int64_t index, const struct step *s, int64_t row, int64_t head, int64_t first,
                int64_t count) {
    const int64_t head_dim = m->head_dim, of_one = s->page_tokens * head_dim;
    int32_t *keys = (int32_t *)(s->keys + (head * s->longest + first) * head_dim);
    for (int64_t token = 0; token < BLOCK; token += 2) {
        const bf16 *key[2], *value[2];
        static const bf16 nothing[PARTS * PAIRS];
        for (int each = 0; each < 2; each++) {
            const int64_t position = first + token + each;
            key[each] = value[each] = nothing;
            if (position < count) {
                const int64_t page = s->table[s->tables[row] + position / s->page_tokens];
                key[each] = s->cache + ((page * m->kv_heads + head) * m->layers + index) * 2 * of_one +
                            position % s->page_tokens * head_dim;
                value[each] = key[each] + of_one;
            }
            for (int64_t at = 0; at < head_dim / 2; at++) keys[at * BLOCK + token + each] = ((const int32_t *)key[each])[at];
        }
        for (int64_t begin = 0; begin < head_dim; begin += BLOCK) {
            bf16 *to = s->values + head * s->longest * head_dim + begin * s->longest + (first + token) * BLOCK;
            for (int64_t at = 0; at < BLOCK; at++) {
                to[2 * at] = value[0][begin + at];
                to[2 * at + 1] = value[1][begin + at];
            }
        }
    }
}

/* Up to ROWS tokens of a row, side by side, look with one query head at all before them. */
static void attend_many(const struct model *m, int64_t index, const struct step *s, int64_t first, int64_t tokens,
                        int64_t query, float *scores) {
    const int64_t head_dim = m->head_dim, stride = m->heads * head_dim, head = query / (m->heads / m->kv_heads);
    const int64_t count = s->positions[first + tokens - 1] + 1, end = up_to(count, PAIRS);
    const bf16 *keys = s->keys + head * s->longest * head_dim, *values = s->values + head * s->longest * head_dim;
    bf16 *seen = s->seen + first * stride + query * head_dim;
    const __m512 scaling = _mm512_set1_ps(m->layer[index].scaling);
    __m512 sum[ROWS][2];
    float of_row[ROWS];
    for (int64_t at = 0; at < count; at += BLOCK) {
        tile(keys + at * head_dim, seen, stride, head_dim, tokens, 0, sum);
        for (int64_t token = 0; token < tokens; token++)
            for (int half = 0; half < 2; half++)
                _mm512_storeu_ps(scores + token * s->longest + at + half * LANES, _mm512_mul_ps(sum[token][half], scaling));
    }
    for (int64_t token = 0; token < tokens; token++)
        of_row[token] = soften(scores + token * s->longest, s->positions[first + token] + 1, end);
    for (int64_t begin = 0; begin < head_dim; begin += BLOCK) {
        tile(values + begin * s->longest, (const bf16 *)scores, 2 * s->longest, up_to(count, 2), tokens, 0, sum);
        for (int64_t token = 0; token < tokens; token++) {
            const __m512 share = _mm512_set1_ps(1.0f / of_row[token]);
            store_bf16s(seen + token * stride + begin, _mm512_mul_ps(sum[token][0], share),
                        _mm512_mul_ps(sum[token][1], share));
        }
    }
}

/* All rows, by all threads. */
static void look(const struct model *m, int64_t index, const struct step *s, float *scores) {
#pragma omp for collapse(2)
    for (int64_t token = 0; token < s->tokens; token++)
        for (int64_t head = 0; head < m->kv_heads; head++) enter(m, index, s, token, head);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t head = 0; head < m->kv_heads; head++)
            if (s->begins[row + 1] - s->begins[row] == 1) attend(m, index, s, row, head, scores);
    for (int64_t row = 0; row < s->rows; row++) {
        const int64_t begin = s->begins[row], end = s->begins[row + 1];
        if (end - begin == 1) continue;
        const int64_t count = s->positions[end - 1] + 1;
#pragma omp for collapse(2)
        for (int64_t head = 0; head < m->kv_heads; head++)
            for (int64_t first = 0; first < count; first += BLOCK) lay(m, index, s, row, head, first, count);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t query = 0; query < m->heads; query++)
            for (int64_t first = begin; first < end; first += ROWS)
                attend_many(m, index, s, first, least(ROWS, end - first), query, scores);
    }
}

void baton_step(const struct model *m, const struct step *s) {
    const int64_t hidden = m->hidden, of_heads = m->heads * m->head_dim, rows = s->tokens;
    const int64_t of_qkv = of_heads + 2 * m->kv_heads * m->head_dim;
#pragma omp parallel num_threads(m->threads)
    {
        float *scores = s->scores + omp_get_thread_num() * s->scored * s->longest;
        for (int64_t index = 0; index < m->layers; index++) {
            const struct layer *layer = m->layer + index;
#pragma omp for
            for (int64_t row = 0; row < rows; row++)
                norm(s->x + row * hidden, layer->before_attention, layer->before_attention_epsilon, hidden,
                     s->normed + row * hidden);
            multiply(layer->qkv, layer->qkv_bias, s->normed, hidden, of_qkv, rows, s->qkv, 0);
            look(m, index, s, scores);
            multiply(layer->out, layer->out_bias, s->seen, of_heads, hidden, rows, s->x, 1);
#pragma omp for
            for (int64_t row = 0; row < rows; row++)
                norm(s->x + row * hidden, layer->before_gate, layer->before_gate_epsilon, hidden,
                     s->normed + row * hidden);
            gate(layer->gate_and_up, layer->gate_and_up_bias, s->normed, hidden, m->width, rows, s->gated);
            multiply(layer->down, layer->down_bias, s->gated, m->width, hidden, rows, s->x, 1);
        }
#pragma omp for
        for (int64_t place = 0; place < s->wanted; place++)
            norm(s->x + s->keep[place] * hidden, m->norm, m->norm_epsilon, hidden, s->normed + place * hidden);
        multiply(m->head, m->head_bias, s->normed, hidden, m->vocabulary, s->wanted, s->logits, 0);
    }
}
