// Sparse multi-query attention over the 584-byte record for few query heads: sm_90a.
//
// Compiled with HEADS (8 or 16: the columns of the matrix instructions), KEYS (rows of a tile), STAGES (slices of 32 rows
// in flight), SHARED_BYTES (what a launch gives), those of the record (DIMS, ROW_BYTES, SCALE_BYTES) and the distance of
// rows in shared memory, PITCH, defined.
//
// With few heads the work is moving rows: 576 bytes a key against 8 or 16 columns of products. So rows stay fp8 in
// shared memory, as they lie in the cache, and are widened in registers on their way into the matrix instructions,
// whose long side (M = 16) is keys for the scores and dims for the sums. A token's keys are cut into tiles of 64, which
// are fetched as two slices.
//
//   warps 4-7   fetch: a bulk copy a row, eight rows a warp; what the scales of two groups of 64 dims mean, a key a lane
//   warps 0-3   scores and softmax of 16 keys a warp, weights exchanged through shared memory, sums of 128 dims a warp
//
// A cluster of CTAs may share a token: each takes some of its tiles, and they add their sums up at the end.
//
// Numbers: an e4m3 byte is exact in f16. The other operand is f16 too: a query relative to its head's largest number, and
// a weight times its key's scale relative to the largest scale that a group of dims has had so far. Where scales of a
// slice are too far apart for that, weights are bf16, and bytes become bf16 by moving their bits, which divides them by
// 2^120. Scales of the keys enter the scores as fp32. The rotated dims are bf16 in the cache and are multiplied as such.

#include "common.cuh"

#define CODED 448
#define GROUPS (DIMS / 64)
#define SLICE 32
#define N_TILES (HEADS / 8)
#define WARPS 4  // of each kind
#define THREADS (2 * 32 * WARPS)
#define FETCH_REGISTERS 40
#define COMPUTE_REGISTERS 216

// Scores are over 2^30, so that neither they nor the largest scale leave fp32.
#define SCORE_UNIT 1.073741824e9f
#define PER_SCORE_UNIT 9.31322574615478515625e-10f
// Weights are times 2^4 and at most 2^3 more, since a running maximum may be so much too small: 2^127 with the 2^120 of
// bytes as bf16.
#define WEIGHT_SHIFT 4
#define WEIGHT_SLACK 3
// Powers of 2 between the scales of a slice and the largest that f16 weights have room for.
#define NARROW 10
#define WIDE 0x80000000u

struct Slice {
    u8 rows[SLICE * PITCH];
    float scales[SLICE][GROUPS];  // over SCORE_UNIT
    // Of a key relative to the group's largest, two keys a word: f16, or bf16 where the slice is wide. In the order in which
    // a thread takes them: the keys 2t, 2t + 1 of each eight are its word t * 4 + eight.
    u32 factors[GROUPS][SLICE / 2];
};

// What the CTAs of a cluster give each other when their tiles are done: sums of the parts of 16 dims that a CTA adds up.
#define PARTS (DIMS / 16)
struct Parts {
    float sums[(PARTS + MAX_RANKS) * HEADS * 16 + MAX_RANKS * HEADS * 8];
    float2 ends[MAX_RANKS][HEADS];  // top and total
};

struct Shared {
    union __align__(16) {
        Slice slices[STAGES];
        Parts parts;
    };
    __align__(16) u32 query[DIMS / 32][N_TILES][32][4];            // in the order of the registers that take it
    __align__(16) u32 weights[2][2][WARPS][N_TILES][32][2];        // of alternating tiles, f16 and bf16, likewise
    float unit[HEADS], sink[HEADS];                                // of the query
    float top[WARPS][HEADS], total[WARPS][HEADS];
    u64 full[STAGES], empty[STAGES], given;
    __align__(4) u8 live[STAGES][WARPS];  // a bit for each key of a slice that is one
    u32 largest[STAGES][WARPS];  // scale bytes of two groups, 16 bits each, and WIDE
};
static_assert(KEYS == 2 * SLICE && SLICE == 32, "a warp scores 16 keys, a lane fetches one");
static_assert(DIMS == 512 && SCALE_BYTES == 8 && ROW_BYTES == CODED + 2 * (DIMS - CODED), "another record");
static_assert(PITCH - ROW_BYTES >= SCALE_BYTES, "scales come behind their row");
static_assert(PITCH / 4 % 32 % 8 == 4, "eight rows start in eight different groups of four banks");
static_assert(sizeof(Parts) <= STAGES * sizeof(Slice), "one takes the place of the other");
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");

// Instructions

__device__ inline void copy_bulk(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
        "l"(from), "r"(bytes), "r"(address(barrier)) : "memory");
}

__device__ inline void copy_8(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

__device__ inline void load_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from));
}

// A matrix of 8 x 8 pairs' halves, a row a four of lanes, with rows and columns swapped.
__device__ inline u32 transposed(u32 pair) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}

#define MULTIPLY(name, type)                                                                                            \
    __device__ inline void name(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {                        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                             \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                             \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                   \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                           \
    }
MULTIPLY(multiply_f16, "f16")
MULTIPLY(multiply_bf16, "bf16")

// The lower and the upper two e4m3 bytes of a word as two f16 each.
__device__ inline void widen(u32 w, u32& lower, u32& upper) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(lower), "=r"(upper) : "r"(w));
}

// The bytes 0 and 2, and 1 and 3, of a word of e4m3 as two bf16, over 2^120: sign to sign, the rest four bits lower.
__device__ inline u32 even_bytes(u32 w) { return ((w & 0x00800080u) << 8) | ((w & 0x007f007fu) << 4); }
__device__ inline u32 odd_bytes(u32 w) { return (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u); }

__device__ inline u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline u32 half_product(u32 a, u32 b) {
    u32 product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// 2^(byte - 127); byte 0 is a subnormal of fp32.
__device__ inline float scale_of(u32 byte) { return __int_as_float(max((int)(byte << 23), 0x00400000)); }

// Of the warps of a kind.
__device__ inline void meet() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
__device__ inline void meet_fetching() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

// Whether something is so for any of those that meet.
__device__ inline bool meet_any(bool mine) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, 128, p;\nselp.u32 %0, 1, 0, q;\n}" : "=r"(any) : "r"((u32)mine) : "memory");
    return any;
}

__device__ inline void warp_arrive(u64* barrier, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

// How many rows a token has in the window and in the compressed cache: for the even and for the odd lanes, who have read
// it a token before it is looked at.
__device__ inline int length_of(const Cache& window, const Cache& compressed, int token, int num_tokens, int lane) {
    const int* lengths = lane % 2 ? compressed.lengths : window.lengths;
    return lengths && token < num_tokens ? lengths[token] : 0;
}

// The keys of one token: slices of the window, then those of the compressed cache, two a tile. The CTAs of a cluster take
// turns at tiles.
struct Span {
    int window_keys, compressed_keys, window_slices, tiles;

    __device__ Span(const Cache& window, const Cache& compressed, int length) {
        window_keys = min(__shfl_sync(0xffffffffu, length, 0), window.width);
        compressed_keys = min(__shfl_sync(0xffffffffu, length, 1), compressed.width);
        window_slices = (window_keys + SLICE - 1) / SLICE;
        tiles = (window_slices + (compressed_keys + SLICE - 1) / SLICE + 1) / 2;
    }
};

// Fetching

#define MANY 0x7fffffff  // rows
// Two tiles or one, a key a lane: the lanes 8i to 8i + 7 have those of slice i that the warp fetches.
struct Block {
    int slices;   // 0 for none
    bool first;   // of a token
    bool in_window;
    int index;    // the lane's slot, as it is in memory; -1 for none
};

// Goes through the blocks of a CTA's tokens. Indices are read a block before they are looked at. The first token is thought
// to have as many rows as there can be until its lengths are there, so that its indices come in the same time.
struct Walk {
    const Cache &window, &compressed;
    int num_tokens, warp, lane;
    int rank = cluster_rank(), ranks = cluster_size(), step = gridDim.y, token = (int)blockIdx.y - step, tile = 0;
    int first_length = length_of(window, compressed, blockIdx.y, num_tokens, lane), length = MANY;
    bool thought = true;
    Span span = {window, compressed, 0};

    __device__ Block take() {
        while (tile >= span.tiles) {
            token += step;
            if (token >= num_tokens) return {0, false, false, -1};
            span = Span(window, compressed, length);
            tile = rank;
            length = length_of(window, compressed, token + step, num_tokens, lane);
            prefetch_indices(window, compressed, token + step, num_tokens, warp, lane);
        }
        int slice = (tile + lane / 16 * ranks) * 2 + lane / 8 % 2;
        bool in_window = slice < span.window_slices;
        Block block = {tile + ranks < span.tiles ? 4 : 2, tile == rank, in_window, -1};
        int key = (slice - (in_window ? 0 : span.window_slices)) * SLICE + warp * 8 + lane % 8;
        if (key < (in_window ? span.window_keys : span.compressed_keys))
            block.index = (in_window ? window.indices : compressed.indices)[(i64)token * (in_window ? window.width : compressed.width) + key];
        tile += 2 * ranks;
        return block;
    }

    // Whether the first block was another, and must be taken again.
    __device__ bool mistaken() {
        if (!thought) return false;
        thought = false;
        int found = __shfl_sync(0xffffffffu, first_length, lane);  // not before this, as a mere comparison would be made
        if (!__any_sync(0xffffffffu, found < (lane % 2 ? compressed.width : window.width))) return false;
        token = (int)blockIdx.y - step, tile = span.tiles, length = first_length;
        return true;
    }
};

// Where a lane's key lies.
struct Source {
    bool live;
    const u8 *row, *scales;

    __device__ Source(const Cache& cache, int index) {
        live = (u32)index < cache.rows;
        u32 slot = live ? index : 0, page = slot / cache.page_size, place = slot - page * cache.page_size;
        const u8* data = cache.data + page * cache.page_stride;
        row = data + place * ROW_BYTES;
        scales = data + cache.page_size * ROW_BYTES + place * SCALE_BYTES;
    }
};

// Begins the copies of the warp's eight rows of slice `i` of a block, and of their scales behind them, or clears them
// where there are none: no byte may be a NaN. `live` has a bit for each lane.
__device__ inline void begin(Shared& s, const Source& from, u32 live, int i, int stage, int warp, int lane) {
    u8* row = s.slices[stage].rows + (warp * 8 + lane % 8) * PITCH;
    if (lane / 8 == i) {
        if (from.live) {
            copy_bulk(row, from.row, ROW_BYTES, &s.full[stage]);
            copy_8(address(row + ROW_BYTES), from.scales);
        } else {
            for (int j = 0; j < ROW_BYTES; j += 16) *(uint4*)(row + j) = make_uint4(0, 0, 0, 0);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before a later bulk copy to the same place
        }
    }
    if (lane == 0) s.live[stage][warp] = live >> (8 * i);
}

// Whether the lower or the upper half of `a` is less than that of `b`, both less than 2^15.
__device__ inline bool any_less(u32 a, u32 b) { return (a - b) & 0x80008000u; }

// Says what the scales of two groups mean, one in each half of a word, and that the warp's part of the slice is there when
// its copies are. `largest` are those of the token so far.
__device__ inline void publish(Shared& s, int stage, bool first, u32& largest, int warp, int lane) {
    Slice& slice = s.slices[stage];
    // Volatile, for both to be read at once.
    u32 all_live = *(const volatile u32*)s.live[stage], bytes = *(const volatile u16*)(slice.rows + lane * PITCH + ROW_BYTES + 2 * warp);
    bool live = all_live >> lane & 1;
    u32 scales = live ? __byte_perm(bytes, 0, warp == WARPS - 1 ? 0x4440 : 0x4140) : 0;  // the last group has none
    if (first) largest = 0;
    if (__any_sync(0xffffffffu, any_less(largest, scales)))
        largest = max(largest & 255, __reduce_max_sync(0xffffffffu, scales & 255)) | max(largest >> 16, __reduce_max_sync(0xffffffffu, scales >> 16)) << 16;
    if (!live) scales = largest;
    bool wide = __any_sync(0xffffffffu, any_less(scales + NARROW * 0x10001, largest));
    *(float2*)&slice.scales[lane][2 * warp] = make_float2(__int_as_float(scales << 23) * PER_SCORE_UNIT, __int_as_float(scales >> 16 << 23) * PER_SCORE_UNIT);
    u32 factors = (scales + 15 * 0x10001 - largest) << 10;
    if (wide) {
        int low = (scales & 255) - (largest & 255), high = (scales >> 16) - (largest >> 16);
        factors = max(low + 127, 0) << 7 | max(high + 127, 0) << 23;
    }
    u16* to = (u16*)&slice.factors[2 * warp][lane % 8 / 2 * 4 + lane / 8] + (lane & 1);
    to[0] = factors, to[SLICE] = factors >> 16;
    __syncwarp();
    if (lane == 0) {
        s.largest[stage][warp] = largest | (wide ? WIDE : 0);
        barrier_expect(&s.full[stage], __popc(all_live >> (8 * warp) & 255) * ROW_BYTES);
    }
}

__device__ inline void fetch(Shared& s, const Cache& window, const Cache& compressed, int num_tokens, int warp, int lane) {
    Walk walk = {window, compressed, num_tokens, warp, lane};
    int stage = 0, before = -1;  // the slice that was begun last, whose scales have time to come
    u32 phase = 1;               // a fresh barrier lets the first round pass
    u32 largest = 0;
    bool first = false;
    Block next = {};
    do {
        Block block = next;
        do next = walk.take();
        while (walk.mistaken());
        Source from(one_of(block.in_window, window, compressed), block.index);
        u32 live = __ballot_sync(0xffffffffu, from.live);
        for (int i = 0; i < max(block.slices, 1); i++) {
            int begun = -1;
            if (block.slices) {
                barrier_wait(&s.empty[stage], phase);
                begin(s, from, live, i, stage, warp, lane);
                begun = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            copies_end();
            if (before >= 0) {
                copies_wait<1>();
                meet_fetching();
                publish(s, before, first, largest, warp, lane);
            }
            before = begun, first = block.first && i == 0;
        }
    } while (next.slices || before >= 0);
}

// The query, as the scores' matrix instructions take it: for 32 dims the four registers of two of them, whose first takes
// the dims 4t and 4t + 1 of 16 and whose second the next two, as `widen` delivers the keys. The rotated dims come in
// their own order, over SCORE_UNIT. All are relative to a power of two that makes the head's largest 2^14 to 2^15.

__device__ inline const uint4* query_at(const u16* q, i64 q_head, const Output& out, int head, int lane) {
    return (const uint4*)(q + min(head, out.num_heads - 1) * q_head) + lane;
}

// Two heads of a warp, the first of which is `first`.
__device__ inline void take_two_heads(Shared& s, const u16* q, i64 q_head, const Output& out, int first, int lane) {
    uint4 loaded[2][2];
    float sinks[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4* from = query_at(q, q_head, out, first + i * WARPS, lane);
        loaded[i][0] = from[0], loaded[i][1] = from[32];
        sinks[i] = out.sink[min(first + i * WARPS, out.num_heads - 1)];
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int head = first + i * WARPS;
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 words[4] = {loaded[i][j].x, loaded[i][j].y, loaded[i][j].z, loaded[i][j].w};
#pragma unroll
            for (int k = 0; k < 4; k++) largest = max(largest, max(words[k] & 0x7fff, words[k] >> 16 & 0x7fff));
        }
        int exponent = max((int)(__reduce_max_sync(0xffffffffu, largest) >> 7), 15);
        float per_unit = head < out.num_heads ? __int_as_float((268 - exponent) << 23) : 0;
        if (lane == 0) s.unit[head] = __int_as_float((exponent - 14) << 23), s.sink[head] = sinks[i];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 words[4] = {loaded[i][j].x, loaded[i][j].y, loaded[i][j].z, loaded[i][j].w};
            int dim = j * 256 + lane * 8;
            u32 (*to)[4] = &s.query[dim / 32][head / 8][head % 8 * 4];
            if (dim < CODED) {
                u32 r[4];
#pragma unroll
                for (int k = 0; k < 4; k++) r[k] = half_pair(low_of(words[k]) * per_unit, high_of(words[k]) * per_unit);
                int at = dim % 32 / 16 * 2;
                *(uint2*)&to[dim % 16 / 4][at] = make_uint2(r[0], r[1]);
                *(uint2*)&to[dim % 16 / 4 + 1][at] = make_uint2(r[2], r[3]);
            } else {
                float by = per_unit * PER_SCORE_UNIT;
#pragma unroll
                for (int k = 0; k < 4; k++) to[k][dim % 32 / 8] = pair_of(low_of(words[k]) * by, high_of(words[k]) * by);
            }
        }
    }
}

__device__ inline void prefetch_query(const u16* q, i64 q_head, const Output& out, int warp, int lane) {
#pragma unroll 1
    for (int head = warp; head < HEADS; head += WARPS) prefetch(query_at(q, q_head, out, head, 2 * lane));
}

// Scores of a warp's 16 keys, which are half of a slice, over SCORE_UNIT and the query's unit. Of a thread: keys g and
// g + 8, for the heads 2t and 2t + 1 of each n.
typedef float Scores[N_TILES][4];

__device__ inline void score(Scores& scores, const Shared& s, const Slice& slice, int first_key, int lane) {
    int g = lane >> 2;
    u32 rows = address(slice.rows) + (first_key + (lane & 15)) * PITCH + (lane >> 4) * 16;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
        for (int i = 0; i < 4; i++) scores[n][i] = 0;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        u32 k[4];
        load_matrices(k, rows + CODED + step * 32);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            uint2 q = *(const uint2*)&s.query[CODED / 32 + step / 2][n][lane][step % 2 * 2];
            multiply_bf16(scores[n], k[0], k[1], k[2], k[3], q.x, q.y);
        }
    }
#pragma unroll
    for (int group = 0; group < CODED / 64; group++) {
        float sums[N_TILES][4] = {};
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32 k[4], wide[8];
            load_matrices(k, rows + group * 64 + step * 32);
#pragma unroll
            for (int i = 0; i < 4; i++) widen(k[i], wide[2 * i], wide[2 * i + 1]);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                uint4 q = *(const uint4*)s.query[group * 2 + step][n][lane];
                multiply_f16(sums[n], wide[0], wide[2], wide[1], wide[3], q.x, q.y);
                multiply_f16(sums[n], wide[4], wide[6], wide[5], wide[7], q.z, q.w);
            }
        }
        float low = slice.scales[first_key + g][group], high = slice.scales[first_key + g + 8][group];
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            scores[n][0] += sums[n][0] * low, scores[n][1] += sums[n][1] * low;
            scores[n][2] += sums[n][2] * high, scores[n][3] += sums[n][3] * high;
        }
    }
}

// The softmax, unnormalised and relative to a running maximum, which all warps have in common.
struct Softmax {
    float scale[N_TILES][2], top[N_TILES][2], total[N_TILES][2];  // in powers of 2; totals of this thread's keys

    __device__ void begin(const Shared& s, float by, int lane) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) scale[n][j] = s.unit[n * 8 + lane % 4 * 2 + j] * by, top[n][j] = -INFINITY_F, total[n][j] = 0;
    }
};

// Weights of a warp's keys times 2^WEIGHT_SHIFT, f16 and bf16, in the order in which the sums' matrix instructions take
// pairs of keys.
__device__ inline void give_weights(Scores& weights, u32 (&to)[2][WARPS][N_TILES][32][2], const Scores& x, const Softmax& softmax, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float top = softmax.top[n][i % 2];
            weights[n][i] = power_of_2(x[n][i] - (top == -INFINITY_F ? 0 : top) + WEIGHT_SHIFT);
        }
        const float(&w)[4] = weights[n];
        *(uint2*)to[0][warp][n][lane] = make_uint2(transposed(half_pair(w[0], w[1])), transposed(half_pair(w[2], w[3])));
        *(uint2*)to[1][warp][n][lane] = make_uint2(transposed(pair_of(w[0], w[1])), transposed(pair_of(w[2], w[3])));
    }
}

// Weighted sums of 64 dims, [part of 16 dims][n]. Of a thread: dims 2g and 2g + 1 of the part (coded) or g and g + 8
// (rotated), for the heads 2t and 2t + 1.
typedef float Sums[4][N_TILES][4];

__device__ inline void multiply_sums(Sums& sums, const float (&by)[N_TILES][2]) {
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[part][n][i] *= by[n][i % 2];
}

__device__ inline void multiply_sums(Sums& sums, float by) {
    float all[N_TILES][2];
    for (int n = 0; n < N_TILES; n++) all[n][0] = all[n][1] = by;
    multiply_sums(sums, all);
}

typedef u32 Weights[N_TILES][4];  // of the 32 keys of a slice

__device__ inline void take_weights(Weights& w, const u32 (&from)[WARPS][N_TILES][32][2], int slice, int lane) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint2 two = *(const uint2*)from[2 * slice + i][n][lane];
            w[n][2 * i] = two.x, w[n][2 * i + 1] = two.y;
        }
}

// Adds a slice's rows in the 64 dims of a group, relative to the group's largest scale.
__device__ inline void mix_coded(Sums& sums, const Slice& slice, const Weights& weights, int group, int lane) {
    uint4 four = *(const uint4*)&slice.factors[group][lane % 4 * 4];
    const u32 factors[4] = {four.x, four.y, four.z, four.w};
    Weights w;
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) w[n][i] = half_product(weights[n][i], factors[i]);
    u32 rows = address(slice.rows) + lane * PITCH + group * 64;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        u32 v[4], wide[8];
        load_transposed(v, rows + part * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) widen(__byte_perm(v[i], 0, 0x3120), wide[2 * i], wide[2 * i + 1]);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            multiply_f16(sums[part][n], wide[0], wide[1], wide[2], wide[3], w[n][0], w[n][1]);
            multiply_f16(sums[part][n], wide[4], wide[5], wide[6], wide[7], w[n][2], w[n][3]);
        }
    }
}

// The same where scales are far apart.
__device__ inline void mix_wide(Sums& sums, const Slice& slice, const Weights& weights, int group, int lane) {
    const float codes_shift = __int_as_float((127 + 120) << 23);
    Weights w;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 factor = slice.factors[group][lane % 4 * 4 + i];
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
            w[n][i] = pair_of(low_of(weights[n][i]) * (low_of(factor) * codes_shift), high_of(weights[n][i]) * (high_of(factor) * codes_shift));
    }
    u32 rows = address(slice.rows) + lane * PITCH + group * 64;
#pragma unroll
    for (int part = 0; part < 4; part++) {
        u32 v[4];
        load_transposed(v, rows + part * 16);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            multiply_bf16(sums[part][n], even_bytes(v[0]), odd_bytes(v[0]), even_bytes(v[1]), odd_bytes(v[1]), w[n][0], w[n][1]);
            multiply_bf16(sums[part][n], even_bytes(v[2]), odd_bytes(v[2]), even_bytes(v[3]), odd_bytes(v[3]), w[n][2], w[n][3]);
        }
    }
}

__device__ inline void mix_rotated(Sums& sums, const Slice& slice, const Weights& w, int lane) {
    u32 rows = address(slice.rows) + ((lane & 7) + (lane >> 4) * 8) * PITCH + CODED + ((lane >> 3) & 1) * 16;
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
        for (int step = 0; step < 2; step++) {
            u32 v[4];
            load_transposed(v, rows + step * 16 * PITCH + part * 32);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) multiply_bf16(sums[part][n], v[0], v[1], v[2], v[3], w[n][2 * step], w[n][2 * step + 1]);
        }
}

// The sums of a warp's 128 dims, whose last group has the rotated ones.
struct Mix {
    Sums left = {}, right = {};
    u32 largest = 0;  // scale bytes of both groups

    __device__ void multiply(const float (&by)[N_TILES][2]) {
        multiply_sums(left, by);
        multiply_sums(right, by);
    }

    // Adds slice `i` of a tile.
    __device__ void add(const Shared& s, int stage, const u32 (&weights)[2][WARPS][N_TILES][32][2], int i, int warp, int lane) {
        const Slice& slice = s.slices[stage];
        bool rotated = warp == WARPS - 1;
        u32 now = s.largest[stage][warp];
        if ((now & ~WIDE) != largest) {
            multiply_sums(left, power_of_2((float)(int)(largest & 255) - (float)(int)(now & 255)));
            multiply_sums(right, power_of_2((float)(int)(largest >> 16) - (float)(int)(now >> 16 & 255)));
            largest = now & ~WIDE;
        }
        Weights w;
        if (now & WIDE) {
            take_weights(w, weights[1], i, lane);
            mix_wide(left, slice, w, 2 * warp, lane);
            if (!rotated) mix_wide(right, slice, w, 2 * warp + 1, lane);
        } else {
            take_weights(w, weights[0], i, lane);
            mix_coded(left, slice, w, 2 * warp, lane);
            if (!rotated) mix_coded(right, slice, w, 2 * warp + 1, lane);
        }
        if (rotated) {
            take_weights(w, weights[1], i, lane);
            mix_rotated(right, slice, w, lane);
        }
    }

    __device__ void give_scales_back(int warp) {
        multiply_sums(left, scale_of(largest & 255));
        if (warp < WARPS - 1) multiply_sums(right, scale_of(largest >> 16));
    }
};

// The sums of a group as results.
__device__ inline void store(const Sums& sums, int group, bool rotated, const Output& out, int token, int lane) {
    int g = lane >> 2, t = lane & 3;
    bool odd = g & 1;
#pragma unroll
    for (int part = 0; part < 4; part++)
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int head = n * 8 + 2 * t + i, dim = 2 * g;
                float first = sums[part][n][i], second = sums[part][n][i + 2];
                if (rotated) {
                    // Of dims g and g + 8; of two neighbours the even g takes both lower ones, the odd one both upper.
                    float other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 4);
                    dim = odd ? g + 7 : g, first = odd ? other : first, second = odd ? second : other;
                }
                u16* to = out.data + token * out.token_stride + head * out.head_stride + group * 64 + part * 16 + dim;
                if (head < out.num_heads) *(u32*)to = pair_of(first, second);
            }
}

// Where the CTA that adds a part up has the sums of CTA `rank`: its first part, and the floats of a head.
__device__ inline u32 part_owner(u32 part, u32 ranks) { return (part * ranks + ranks - 1) / PARTS; }
__device__ inline u32 first_part(u32 rank, u32 ranks) { return rank * PARTS / ranks; }
__device__ inline u32 head_pitch(u32 ranks) { return (PARTS + ranks - 1) / ranks * 16 + 8; }  // heads in different banks

__device__ inline float total_of(const Shared& s, int head) { return s.total[0][head] + s.total[1][head] + s.total[2][head] + s.total[3][head]; }

__device__ inline void give_sums(Shared& s, const Sums& sums, int group, int lane) {
    u32 ranks = cluster_size(), g = lane >> 2, t = lane & 3, pitch = head_pitch(ranks);
#pragma unroll
    for (u32 part = 0; part < 4; part++) {
        u32 all = group * 4 + part, owner = part_owner(all, ranks);
        u32 to = in_rank(address(s.parts.sums) + ((cluster_rank() * HEADS + 2 * t) * pitch + (all - first_part(owner, ranks)) * 16 + 2 * g) * 4, owner);
        u32 given = in_rank(address(&s.given), owner);
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) give_2(to + (n * 8 + i) * pitch * 4, sums[part][n][i], sums[part][n][i + 2], given);
    }
}

// What this CTA has of a token, to where it is added up. The rotated dims g and g + 8 of a part are side by side there.
__device__ inline void give(Shared& s, const Mix& mix, int warp, int lane) {
    u32 ranks = cluster_size();
    give_sums(s, mix.left, 2 * warp, lane);
    give_sums(s, mix.right, 2 * warp + 1, lane);
    if (lane < HEADS)
        for (u32 to = warp; to < ranks; to += WARPS)
            give_2(in_rank(address(&s.parts.ends[cluster_rank()][lane]), to), s.top[0][lane], total_of(s, lane), in_rank(address(&s.given), to));
}

// The bytes that `give` brings a CTA.
__device__ inline u32 given_bytes(u32 rank, u32 ranks) { return ranks * HEADS * ((first_part(rank + 1, ranks) - first_part(rank, ranks)) * 64 + 8); }

// The parts of a cluster's CTAs, added up, each CTA some of the dims of all heads.
__device__ inline void add_parts(const Shared& s, const Output& out, int token, int warp, int lane) {
    u32 ranks = cluster_size(), pitch = head_pitch(ranks), first = first_part(cluster_rank(), ranks);
    u32 quads = (first_part(cluster_rank() + 1, ranks) - first) * 4;
#pragma unroll 1
    for (int head = warp; head < min(HEADS, out.num_heads); head += WARPS) {
        bool live = lane < ranks;
        float2 end = live ? s.parts.ends[lane][head] : make_float2(-INFINITY_F, 0);
        float highest = end.x;
#pragma unroll
        for (int far = MAX_RANKS / 2; far; far /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, far));
        // A CTA gave its average.
        float factor = end.y * power_of_2(end.x - (highest == -INFINITY_F ? 0 : highest)), whole = factor;
#pragma unroll
        for (int far = MAX_RANKS / 2; far; far /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, far);
        factor *= share_of(highest - WEIGHT_SHIFT, whole, s.sink[head]);
#pragma unroll 1
        for (u32 quad = lane; quad < (quads + 31) / 32 * 32; quad += 32) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 2
            for (u32 r = 0; r < ranks; r++) {
                float f = __shfl_sync(0xffffffffu, factor, r);
                float4 v = *(const float4*)&s.parts.sums[(r * HEADS + head) * pitch + min(quad, quads - 1) * 4];
                sum.x += v.x * f, sum.y += v.y * f, sum.z += v.z * f, sum.w += v.w * f;
            }
            u32 dim = first * 16 + quad * 4, one = pair_of(sum.x, sum.y), other = pair_of(sum.z, sum.w);
            u16* to = out.data + token * out.token_stride + head * out.head_stride + dim;
            if (quad >= quads) continue;
            if (dim < CODED) {
                *(uint2*)to = make_uint2(one, other);
            } else {  // dims 2i, 2i + 8, 2i + 1, 2i + 9 of a part, for the i-th quad
                u16* pair = to - quad % 4 * 2;
                *(u32*)pair = __byte_perm(one, other, 0x5410);
                *(u32*)(pair + 8) = __byte_perm(one, other, 0x7632);
            }
        }
    }
}

__device__ inline void compute(Shared& s, const Cache& window, const Cache& compressed, const u16* q, i64 q_token, i64 q_head,
                               const Output& out, float scale, int num_tokens, int warp, int lane) {
    int ranks = cluster_size(), rank = cluster_rank();
    int g = lane >> 2, t = lane & 3, step = gridDim.y;
    int stage = 0;
    u32 phase = 0, turn = 0;
    int length = length_of(window, compressed, blockIdx.y, num_tokens, lane);
    for (int token = blockIdx.y; token < num_tokens; token += step) {
#pragma unroll 1
        for (int head = warp; head < HEADS; head += 2 * WARPS) take_two_heads(s, q + token * q_token, q_head, out, head, lane);
        meet();
        if (token + step < num_tokens) prefetch_query(q + (token + step) * q_token, q_head, out, warp, lane);
        Span span(window, compressed, length);
        length = length_of(window, compressed, token + step, num_tokens, lane);
        Softmax softmax;
        softmax.begin(s, scale, lane);
        Mix mix;
        for (int tile = rank; tile < span.tiles; tile += ranks) {
            int second = stage + 1 == STAGES ? 0 : stage + 1;
            u32 second_phase = second ? phase : phase ^ 1;
            int mine = warp < 2 ? stage : second;
            barrier_wait(&s.full[mine], warp < 2 ? phase : second_phase);
            Scores x;
            score(x, s, s.slices[mine], warp % 2 * 16, lane);
            u32 live = *(const u32*)s.live[mine] >> (warp % 2 * 16 + g);
            bool above = false;
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    x[n][i] = live >> (i / 2 * 8) & 1 ? __fmul_rn(x[n][i], softmax.scale[n][i % 2]) : -INFINITY_F;
                    above |= x[n][i] > softmax.top[n][i % 2] + WEIGHT_SLACK;
                }
            Scores weights;
            while (true) {
                give_weights(weights, s.weights[turn], x, softmax, warp, lane);
                if (!meet_any(above)) break;
                // Of all the tile's keys the largest, where that is too much more than the maximum until now.
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float largest = fmaxf(x[n][j], x[n][j + 2]);
#pragma unroll
                        for (int far = 4; far < 32; far *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, far));
                        if (g == 0) s.top[warp][n * 8 + 2 * t + j] = largest;
                    }
                meet();
                float shrink[N_TILES][2];
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        int head = n * 8 + 2 * t + j;
                        float largest = fmaxf(fmaxf(s.top[0][head], s.top[1][head]), fmaxf(s.top[2][head], s.top[3][head]));
                        shrink[n][j] = 1;
                        if (largest > softmax.top[n][j] + WEIGHT_SLACK) {
                            shrink[n][j] = power_of_2(softmax.top[n][j] - largest);
                            softmax.top[n][j] = largest;
                        }
                        softmax.total[n][j] *= shrink[n][j];
                    }
                mix.multiply(shrink);
                above = false;
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int j = 0; j < 2; j++) softmax.total[n][j] += weights[n][j] + weights[n][j + 2];

            // A loop, and not its two rounds, since code that runs once is read from memory once.
#pragma unroll 1
            for (int i = 0; i < 2; i++) {
                barrier_wait(&s.full[stage], phase);
                mix.add(s, stage, s.weights[turn], i, warp, lane);
                warp_arrive(&s.empty[stage], lane);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            turn ^= 1;
        }

        if (ranks > 1) cluster_arrive_relaxed();  // the slices, whose place the parts take, have been read
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float total = softmax.total[n][j];
#pragma unroll
                for (int far = 4; far < 32; far *= 2) total += __shfl_xor_sync(0xffffffffu, total, far);
                int head = n * 8 + 2 * t + j;
                if (g == 0) s.total[warp][head] = total;
                if (g == 0 && warp == 0) s.top[0][head] = softmax.top[n][j];
            }
        meet();
        // Averages before scales, which could make sums larger than fp32 has room for.
        float share[N_TILES][2];
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int head = n * 8 + 2 * t + j;
                float total = total_of(s, head);
                if (ranks == 1) share[n][j] = share_of(softmax.top[n][j] - WEIGHT_SHIFT, total, s.sink[head]);
                else share[n][j] = total == 0 ? 0 : reciprocal(total);
            }
        mix.multiply(share);
        mix.give_scales_back(warp);
        if (ranks == 1) {
            store(mix.left, 2 * warp, false, out, token, lane);
            store(mix.right, 2 * warp + 1, warp == WARPS - 1, out, token, lane);
        } else {
            cluster_wait();
            give(s, mix, warp, lane);
            barrier_wait(&s.given, 0);
            add_parts(s, out, token, warp, lane);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
few_heads(const u16* q, i64 q_token, i64 q_head, u16* out, i64 out_token, i64 out_head, const float* sink, float scale,
          int num_tokens, int num_heads, const u8* window, i64 window_stride, u32 window_page_size, u32 window_rows,
          const int* window_indices, const int* window_lengths, int window_width, const u8* compressed, i64 compressed_stride,
          u32 compressed_page_size, u32 compressed_rows, const int* compressed_indices, const int* compressed_lengths,
          int compressed_width) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& s = *(Shared*)memory;
    let_next_launch_begin();
    Cache first = {window, window_stride, window_page_size, window_rows, window_indices, window_lengths, window_width};
    Cache second = {compressed, compressed_stride, compressed_page_size, compressed_rows, compressed_indices, compressed_lengths, compressed_width};
    int head = blockIdx.z * HEADS;  // the first of this CTA's
    Output output = {out + head * out_head, out_token, out_head, sink + head, min(num_heads - head, HEADS)};
    q += head * q_head;
    // The same in all lanes, which the compiler must know, or it guards matrix instructions by branches.
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], WARPS);
            barrier_init(&s.empty[i], WARPS);
        }
        barrier_init(&s.given, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) barrier_expect(&s.given, given_bytes(cluster_rank(), cluster_size()));
    if (warp >= WARPS) {
        set_registers<FETCH_REGISTERS>(false);
        prefetch_indices(first, second, blockIdx.y, num_tokens, warp - WARPS, lane);
        wait_for_launch_ahead();
        fetch(s, first, second, num_tokens, warp - WARPS, lane);
    } else {
        set_registers<COMPUTE_REGISTERS>(true);
        prefetch_query(q + blockIdx.y * q_token, q_head, output, warp, lane);
        wait_for_launch_ahead();
        compute(s, first, second, q, q_token, q_head, output, scale * LOG2_E * SCORE_UNIT, num_tokens, warp, lane);
    }
}
