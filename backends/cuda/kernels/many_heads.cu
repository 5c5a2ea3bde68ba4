// Sparse multi-query attention over the 584-byte record for at most 64 query heads: sm_90a.
//
// Compiled with KEYS (rows of a tile, 32 or 64), STAGES (tiles of bf16 rows), DEPTH (slices of fp8 rows in flight) and
// SHARED_BYTES (what a launch gives) defined.
//
// With 64 heads the matrix instructions of a warp group (wgmma, M = 64 heads) have enough to do, and what they read must
// lie in shared memory in bf16. A token's keys are cut into tiles. Four warp groups work on one token, each on another
// step of it, and hand tiles over through barriers in shared memory, so that no group waits for what it began itself:
//
//   fetching   copies rows as they are, DEPTH slices of 32 ahead, widens them to bf16 and stores them as a tile
//   scoring    query x rows, softmax, bf16 weights into shared memory; fetches the query of the next token
//   summing    two groups, weights x rows over half of the dims each, 128 sums a thread; writes the output
//
// A cluster of CTAs may share a token: each takes some of its tiles, and they add their sums up at the end.
//
// Numbers: rows are exact in bf16, whatever their scale; scores and sums are fp32; weights are bf16.

#include "common.cuh"
#include "e4m3.cuh"

#define CODED 448
#define GROUP 128  // threads of a warp group
#define THREADS (4 * GROUP)
#define SLICE 32  // rows that the fetching warps take at a time, eight a warp and one to four lanes
#define SLICES (KEYS / SLICE)
#define CHUNKS 9  // of 16 bytes, that a lane has of a row
// Registers of a thread, after a start at 128: 512 for the four groups.
#define FEW_REGISTERS 96
#define MANY_REGISTERS 160

// Matrix operands lie as rows of 128 bytes (64 numbers), eight rows to 1024 bytes, in which 16-byte chunk c of row r is
// at place c ^ (r & 7). A matrix of 512 columns is eight such blocks side by side.
#define BLOCKS (DIMS / 64)
#define ROW 128
#define EIGHT_ROWS 1024

// Rows on their way, as they lie in the cache: chunk 4i + j of a row, for the lane j of its four.
struct Raw {
    uint4 chunks[CHUNKS][GROUP];
    u64 scales[SLICE];
    u32 live[4];  // by warp: four bits for each row that is a key
};

// What a CTA has of a token when its tiles are done, for the other CTAs of its cluster.
// Loads from other CTAs are slow by the byte, so sums are f16 there, which leaves them four times as exact as the output: of
// each head and half of the dims relative to a power of two, `unit`.
#define SUMS_PITCH (DIMS + 8)  // eight rows of four words are 32 banks
struct Part {
    u16 sums[HEADS][SUMS_PITCH];
};
struct Ends {
    float top[HEADS], total[HEADS], sink[HEADS];
    float unit[HEADS][2];  // and relative to 2^top
};

// What the scoring group says of a tile, for each of its warps, beside the weights.
enum Said { SAME, MOVED, END };

struct Shared {
    union {
        struct {
            u8 query[BLOCKS][HEADS * ROW];
            u8 keys[STAGES][BLOCKS][KEYS * ROW];
        };
        Part part;
    };
    // Of two tiles. Where a tile has 32 keys, these are the left and the right half of the rows.
    u8 weights[KEYS / 32][HEADS * ROW];
    union {
        Raw raw[DEPTH];
        Ends ends;
    };
    float factor[2][HEADS];  // for the sums up to now, of a tile that MOVED; at the END, for the result
    u32 said[2][4];
    u32 live[STAGES][KEYS / 8];
    u64 full[STAGES], empty[STAGES];  // keys
    u64 told[2], taken[2];            // weights, factor and said
};
static_assert(HEADS == 64 && (KEYS == 32 || KEYS == 64), "other matrices");
static_assert(DIMS == 512 && SCALE_BYTES == 8 && ROW_BYTES == CODED + 2 * (DIMS - CODED), "another record");
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");
static_assert(sizeof(Ends) <= sizeof(Raw), "one takes the place of the other");

__device__ inline void copy_8(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

template <int WHICH, int COUNT>
__device__ inline void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(WHICH), "n"(COUNT) : "memory");
}

// Of one thread of each warp, when all have done.
__device__ inline void warp_arrive(u64* barrier, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
}

__device__ inline void store_4(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
__device__ inline void store_16(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Matrix instructions

// An operand at `at`, which also says the CTA of a cluster, and that has no place here. Blocks are `block` bytes apart,
// which is looked at where the row is the long side of the product.
__device__ inline u64 operand(u32 at, u32 block) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | (u64)(EIGHT_ROWS >> 4) << 32 | (u64)(block >> 4) << 16 | (at & 0x3ffff) >> 4;
}

// What others have stored before a barrier that this thread has passed is seen by its matrix instructions from here on. It
// stands here and not behind the stores, since it waits for all copies that its thread has begun.
__device__ inline void matrices_begin() {
    asm volatile("fence.proxy.async.shared::cta;\nwgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void matrices_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

#define IO_4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define IO_16(x, i) IO_4(x, i), IO_4(x, i + 4), IO_4(x, i + 8), IO_4(x, i + 12)
#define IO_64(x, i) IO_16(x, i), IO_16(x, i + 16), IO_16(x, i + 32), IO_16(x, i + 48)

// Scores: 64 heads x KEYS keys, both operands with the summed dims along the row.
#if KEYS == 64
#define IO_SCORES(x) IO_16(x, 0), IO_16(x, 16)
#else
#define IO_SCORES(x) IO_16(x, 0)
#endif
__device__ inline void multiply(float (&x)[KEYS / 2], u64 a, u64 b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
#if KEYS == 64
        "setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n"
#else
        "setp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, %16, %17, p, 1, 1, 0, 0;\n"
#endif
        "}\n" : IO_SCORES(x) : "l"(a), "l"(b), "r"((int)add));
}

// Sums: 64 heads x 128 dims, of HALF of those that a group has; the second operand has them along the row. Twice as many
// would be one instruction that ptxas does not take in a kernel of 512 threads.
template <int HALF>
__device__ inline void multiply(float (&x)[128], u64 a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, 1, 1, 1, 0, 1;\n" : IO_64(x, 64 * HALF) : "l"(a), "l"(b));
}

// The results are named, for nothing to look at them earlier.
__device__ inline void matrices_wait(float (&x)[KEYS / 2]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : IO_SCORES(x)::"memory");
}
__device__ inline void matrices_wait(float (&x)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" : IO_64(x, 0), IO_64(x, 64)::"memory");
}

// How many rows a token has, read a token before they are looked at.
struct Lengths {
    int window, compressed;
};

__device__ inline Lengths lengths_of(const Cache& window, const Cache& compressed, int token, int num_tokens) {
    bool live = token < num_tokens;
    return {live ? window.lengths[token] : 0, live && compressed.width ? compressed.lengths[token] : 0};
}

// The keys of one token, window before compressed, and the tiles of them that this CTA has.
struct Span {
    int window_keys, keys, first, last;
};

__device__ inline Span span_of(const Cache& window, const Cache& compressed, const Lengths& lengths) {
    int window_keys = min(lengths.window, window.width), keys = window_keys + min(lengths.compressed, compressed.width);
    u32 tiles = (keys + KEYS - 1) / KEYS, ranks = cluster_size(), rank = cluster_rank();
    if (ranks == 1) return {window_keys, keys, 0, (int)tiles};
    return {window_keys, keys, (int)(tiles * rank / ranks), (int)(tiles * (rank + 1) / ranks)};
}

// Fetching

// Where a lane's row of a slice lies: a slot of one of the caches, -1 for none.
struct Place {
    bool exists;  // the slice; the same in all lanes
    bool in_window;
    int slot;
};

// Goes through the slices of a CTA's tokens. Lengths are read a token ahead.
struct Walk {
    const Cache &window, &compressed;
    int num_tokens, token, step, key;
    Span span;
    Lengths next;

    __device__ Walk(const Cache& window, const Cache& compressed, int num_tokens)
        : window(window), compressed(compressed), num_tokens(num_tokens) {
        token = blockIdx.y, step = gridDim.y;
        Lengths lengths = lengths_of(window, compressed, token, num_tokens);
        next = lengths_of(window, compressed, token + step, num_tokens);
        span = span_of(window, compressed, lengths);
        key = span.first * KEYS;
    }

    __device__ Place take(int row) {
        while (key >= span.last * KEYS) {
            token += step;
            if (token >= num_tokens) return {false, false, -1};
            span = span_of(window, compressed, next);
            next = lengths_of(window, compressed, token + step, num_tokens);
            key = span.first * KEYS;
        }
        int k = key + row;
        key += SLICE;
        bool in_window = k < span.window_keys;
        if (k >= span.keys) return {true, in_window, -1};
        const int* index = in_window ? window.indices + (i64)token * window.width + k
                                     : compressed.indices + (i64)token * compressed.width + (k - span.window_keys);
        return {true, in_window, *index};
    }
};

__device__ inline void copy_row(Raw& raw, const Place& place, const Cache& window, const Cache& compressed, int thread) {
    int lane = thread % 32;
    Cache cache = one_of(place.in_window, window, compressed);
    bool live = (u32)place.slot < cache.rows;
    u32 slot = live ? place.slot : 0, page = slot / cache.page_size, in_page = slot - page * cache.page_size;
    const u8* from = cache.data + page * cache.page_stride;
    const u8* row = from + in_page * ROW_BYTES + lane % 4 * 16;
    u32 to = address(&raw.chunks[0][thread]);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) copy_16(to + i * GROUP * 16, row + i * 64, live ? 16 : 0);  // else it is cleared
    if (lane % 4 == 0) copy_8(address(&raw.scales[thread / 4]), from + cache.page_size * ROW_BYTES + in_page * SCALE_BYTES, live ? 8 : 0);
    u32 all = __ballot_sync(0xffffffffu, live);
    if (lane == 0) raw.live[thread / 32] = all;
}

// Stores a lane's part of a row, whose place in the first block of the tile is `row`.
__device__ inline void widen_row(const uint4 (&chunks)[CHUNKS], u64 scales, u32 row, int in_eight, int lane) {
    int j = lane % 4;
    bool large = false;
#pragma unroll
    for (int i = 0; i < CODED / 64; i++) large |= (scales >> (8 * i) & 255) > MOST_AT_ONCE;
    large = __any_sync(0xffffffffu, large);
    u32 first = row + ((2 * j ^ in_eight) * 16);
#pragma unroll
    for (int i = 0; i < CODED / 64; i++) {
        u32 byte = (u32)(scales >> (8 * i)) & 255, by = scale_pair(byte);
        const uint4& c = chunks[i];
        uint4 left = {scaled(widened(c.x, false), by), scaled(widened(c.x, true), by), scaled(widened(c.y, false), by), scaled(widened(c.y, true), by)};
        uint4 right = {scaled(widened(c.z, false), by), scaled(widened(c.z, true), by), scaled(widened(c.w, false), by), scaled(widened(c.w, true), by)};
        if (large) {
            by = rest_pair(byte);
            left = {scaled(left.x, by), scaled(left.y, by), scaled(left.z, by), scaled(left.w, by)};
            right = {scaled(right.x, by), scaled(right.y, by), scaled(right.z, by), scaled(right.w, by)};
        }
        store_16(first + i * KEYS * ROW, left);
        store_16((first ^ 16) + i * KEYS * ROW, right);
    }
    // The rotated dims are bf16 in the cache.
    u32 rotated = row + (BLOCKS - 1) * KEYS * ROW;
    store_16(rotated + (j ^ in_eight) * 16, chunks[CHUNKS - 2]);
    store_16(rotated + ((4 + j) ^ in_eight) * 16, chunks[CHUNKS - 1]);
}

__device__ inline void fetch(Shared& s, const Cache& window, const Cache& compressed, int num_tokens, int thread) {
    int lane = thread % 32, warp = thread / 32, row = thread / 4, in_eight = row % 8;
    Walk walk(window, compressed, num_tokens);
    // Indices are read two slices before they are used.
    Place next = walk.take(row), after = walk.take(row);
    int begun = 0;
    auto begin = [&](Raw& raw) {
        if (next.exists) {
            copy_row(raw, next, window, compressed, thread);
            begun++;
        }
        copies_end();
        next = after;
        after = walk.take(row);
    };
    for (int d = 0; d < DEPTH; d++) begin(s.raw[d]);
    int d = 0, part = 0, stage = 0;
    u32 phase = 1;  // a fresh barrier lets the first round pass
    for (int done = 0; done < begun; done++) {
        Raw& raw = s.raw[d];
        copies_wait<DEPTH - 1>();
        __syncwarp();
        uint4 chunks[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) chunks[i] = raw.chunks[i][thread];
        u64 scales = raw.scales[row];
        u32 live = raw.live[warp];
        __syncwarp();  // all have read what one of them writes
        begin(raw);
        if (part == 0) barrier_wait(&s.empty[stage], phase);
        widen_row(chunks, scales, address(s.keys[stage][0]) + (part * SLICE + row) * ROW, in_eight, lane);
        if (lane == 0) s.live[stage][part * 4 + warp] = live;
        warp_arrive(&s.full[stage], lane);
        if (++d == DEPTH) d = 0;
        if (++part == SLICES) {
            part = 0;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// Scoring

struct Query {
    const u16* data;
    i64 token_stride, head_stride;
    int num_heads;
};

// Heads that are none become zeros.
__device__ inline void copy_query(Shared& s, const Query& q, int token, int num_tokens, int thread) {
    if (token >= num_tokens) return;
    int chunk = thread % 64;
#pragma unroll 8
    for (int i = 0; i < HEADS / 2; i++) {
        int head = 2 * i + thread / 64;
        bool live = head < q.num_heads;
        const u16* from = q.data + token * q.token_stride + (live ? head : 0) * q.head_stride + chunk * 8;
        copy_16(address(s.query[chunk / 8]) + head * ROW + (chunk % 8 ^ head % 8) * 16, from, live ? 16 : 0);
    }
}

// Where the weights of 16-byte chunk 0 of a row lie: of the tiles that take turns, each has a matrix or half of its rows.
__device__ inline u32 weights_at(Shared& s, int turn) { return address(s.weights[KEYS == 64 ? turn : 0]); }
__device__ inline int weights_chunk(int turn) { return KEYS == 64 ? 0 : 4 * turn; }

__device__ inline void score(Shared& s, const Cache& window, const Cache& compressed, const Query& q, const float* sink, float scale, int num_tokens, int thread) {
    u32 ranks = cluster_size();
    int lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    int head = warp * 16 + g;  // and 8 more
    int token = blockIdx.y, step = gridDim.y;
    int stage = 0, turn = 0;
    u32 phase = 0, turn_phase = 1;
    copy_query(s, q, token, num_tokens, thread);
    float sinks[2];
    for (int i = 0; i < 2; i++) sinks[i] = head + 8 * i < q.num_heads ? sink[head + 8 * i] : 0;
    Lengths lengths = lengths_of(window, compressed, token, num_tokens);
    for (; token < num_tokens; token += step) {
        Span span = span_of(window, compressed, lengths);
        lengths = lengths_of(window, compressed, token + step, num_tokens);
        copies_end();
        copies_wait<0>();
        meet<1, GROUP>();
        float top[2] = {-INFINITY_F, -INFINITY_F}, total[2] = {0, 0};
        if (span.first == span.last) copy_query(s, q, token + step, num_tokens, thread);
        for (int tile = span.first; tile < span.last; tile++) {
            float x[KEYS / 2];  // [block of 8 keys][head g, g + 8][key 2t, 2t + 1]
            barrier_wait(&s.full[stage], phase);
            u64 a = operand(address(s.query), 0), b = operand(address(s.keys[stage]), 0);
            matrices_begin();
#pragma unroll
            for (int k = 0; k < DIMS / 16; k++)
                multiply(x, a + ((k / 4 * HEADS * ROW + k % 4 * 32) >> 4), b + ((k / 4 * KEYS * ROW + k % 4 * 32) >> 4), k > 0);
            matrices_commit();
            matrices_wait(x);
            if (tile == span.last - 1) {
                meet<1, GROUP>();  // all have read the query
                copy_query(s, q, token + step, num_tokens, thread);
            }

            u32 live[KEYS / 8], all = 0xffffffffu;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) all &= live[j] = s.live[stage][j];
            if (all != 0xffffffffu)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    if (!(live[j] >> (8 * t) & 1)) x[4 * j] = x[4 * j + 2] = -INFINITY_F;
                    if (!(live[j] >> (8 * t + 4) & 1)) x[4 * j + 1] = x[4 * j + 3] = -INFINITY_F;
                }
            bool moved = false;
            float shrink[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float largest = -INFINITY_F;
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) largest = fmaxf(largest, fmaxf(x[4 * j + 2 * i], x[4 * j + 2 * i + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)) * scale;
                shrink[i] = 1;
                if (largest > top[i] + SLACK) {
                    shrink[i] = power_of_2(top[i] - largest);
                    total[i] *= shrink[i];
                    top[i] = largest;
                    moved = true;
                }
                float base = top[i] == -INFINITY_F ? 0 : top[i];
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    float& first = x[4 * j + 2 * i];
                    float& second = x[4 * j + 2 * i + 1];
                    // Rounded as the largest was: one rounding less, and a large score's own power would not be 1.
                    first = power_of_2(__fmul_rn(first, scale) - base), second = power_of_2(__fmul_rn(second, scale) - base);
                    total[i] += first + second;
                }
            }
            moved = __any_sync(0xffffffffu, moved);

            barrier_wait(&s.taken[turn], turn_phase);
            u32 row = weights_at(s, turn) + head * ROW + 4 * t;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                u32 chunk = ((weights_chunk(turn) + j) ^ g) * 16;
                store_4(row + chunk, pair_of(x[4 * j], x[4 * j + 1]));
                store_4(row + 8 * ROW + chunk, pair_of(x[4 * j + 2], x[4 * j + 3]));
            }
            if (t == 0) s.factor[turn][head] = shrink[0], s.factor[turn][head + 8] = shrink[1];
            if (lane == 0) s.said[turn][warp] = moved ? MOVED : SAME;
            warp_arrive(&s.told[turn], lane);
            if (turn ^= 1; turn == 0) turn_phase ^= 1;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }

#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], 1);
            total[i] += __shfl_xor_sync(0xffffffffu, total[i], 2);
        }
        barrier_wait(&s.taken[turn], turn_phase);
        if (t == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int h = head + 8 * i;
                if (ranks > 1) s.ends.top[h] = top[i], s.ends.total[h] = total[i], s.ends.sink[h] = sinks[i];
                else s.factor[turn][h] = share_of(top[i], total[i], sinks[i]);
            }
        if (lane == 0) s.said[turn][warp] = END;
        warp_arrive(&s.told[turn], lane);
        if (turn ^= 1; turn == 0) turn_phase ^= 1;
    }
}

// Summing

// Of a thread: dims 8j + 2t, 8j + 2t + 1 of its group's half, for the heads g and g + 8 of its warp's 16.
typedef float Sums[128];

// Two threads exchange halves of two blocks of 8 dims, so that each has 8 bytes of one, and four fill 32 bytes of a row.
__device__ inline void store(const Sums& sums, const float (&share)[2], const Output& out, int token, int head, int half, int lane) {
    int t = lane % 4;
    bool odd = t & 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool live = head + 8 * i < out.num_heads;
        u16* to = out.data + token * out.token_stride + (head + 8 * i) * out.head_stride + half * 256 + (odd ? 8 + 2 * (t - 1) : 2 * t);
#pragma unroll
        for (int j = 0; j < 32; j += 2) {
            u32 a = pair_of(sums[4 * j + 2 * i] * share[i], sums[4 * j + 2 * i + 1] * share[i]);
            u32 b = pair_of(sums[4 * j + 4 + 2 * i] * share[i], sums[4 * j + 5 + 2 * i] * share[i]);
            u32 other = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
            if (live) *(uint2*)(to + 8 * j) = odd ? make_uint2(other, b) : make_uint2(a, other);
        }
    }
}

__device__ inline u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float2 of_half_pair(u32 pair) {
    float2 v;
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}

__device__ inline void keep(const Sums& sums, Shared& s, int head, int half, int lane) {
    int t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float largest = 0;
#pragma unroll
        for (int j = 0; j < 32; j++) largest = fmaxf(largest, fmaxf(fabsf(sums[4 * j + 2 * i]), fabsf(sums[4 * j + 2 * i + 1])));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        // The largest becomes 2^14 to 2^15, or less where its exponent leaves no room for the unit's.
        int exponent = max(__float_as_int(largest) >> 23, 15);
        float per_unit = __int_as_float((268 - exponent) << 23);
        if (t == 0) s.ends.unit[head + 8 * i][half] = __int_as_float((exponent - 14) << 23);
        u16* row = s.part.sums[head + 8 * i] + half * 256 + 2 * t;
#pragma unroll
        for (int j = 0; j < 32; j++) *(u32*)(row + 8 * j) = half_pair(sums[4 * j + 2 * i] * per_unit, sums[4 * j + 2 * i + 1] * per_unit);
    }
}

__device__ inline void sum(Shared& s, const Output& out, int num_tokens, int half, int thread) {
    u32 ranks = cluster_size();
    int lane = thread % 32, warp = thread / 32, head = warp * 16 + lane / 4;
    int stage = 0, turn = 0;
    u32 phase = 0, turn_phase = 0;
    for (int token = blockIdx.y; token < num_tokens; token += gridDim.y) {
        Sums sums = {};
        while (true) {
            barrier_wait(&s.told[turn], turn_phase);
            u32 said = s.said[turn][warp];
            if (said == END) break;
            barrier_wait(&s.full[stage], phase);
            if (said == MOVED) {
                float first = s.factor[turn][head], second = s.factor[turn][head + 8];
#pragma unroll
                for (int j = 0; j < 32; j++) sums[4 * j] *= first, sums[4 * j + 1] *= first, sums[4 * j + 2] *= second, sums[4 * j + 3] *= second;
            }
            u64 a = operand(weights_at(s, turn) + weights_chunk(turn) * 16, 0), b = operand(address(s.keys[stage][half * BLOCKS / 2]), KEYS * ROW);
            matrices_begin();
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++) {
                multiply<0>(sums, a + (k * 32 >> 4), b + (k * 16 * ROW >> 4));
                multiply<1>(sums, a + (k * 32 >> 4), b + ((k * 16 + 2 * KEYS) * ROW >> 4));
            }
            matrices_commit();
            matrices_wait(sums);
            warp_arrive(&s.empty[stage], lane);
            if (lane == 0) barrier_arrive(&s.taken[turn]);
            if (turn ^= 1; turn == 0) turn_phase ^= 1;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        if (ranks > 1) {
            meet<2, 2 * GROUP>();  // the keys, whose place the part takes, have been read
            keep(sums, s, head, half, lane);
        } else {
            float share[2] = {s.factor[turn][head], s.factor[turn][head + 8]};
            warp_arrive(&s.taken[turn], lane);
            store(sums, share, out, token, head, half, lane);
        }
        if (turn ^= 1; turn == 0) turn_phase ^= 1;
    }
}

__device__ inline uint4 load_remote_16(u32 from) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

// The parts of a cluster's CTAs, added up by the summing groups: each warp takes half of a head's dims at a time, and the
// warps of all CTAs take turns. Loads of AT_ONCE of them and of RANKS_AT_ONCE CTAs are begun together; more of either is
// code that each CTA reads from memory to run it once.
__device__ inline void combine(Shared& s, const Output& out, int warp, int lane) {
    const int AT_ONCE = 2, RANKS_AT_ONCE = 4, ALL = HEADS * 2;
    u32 ranks = cluster_size(), step = ranks * 8;
    int token = blockIdx.y;
#pragma unroll 1
    for (u32 first = cluster_rank() + ranks * warp; first < ALL; first += AT_ONCE * step) {
        float top[AT_ONCE], total[AT_ONCE], unit[AT_ONCE], factor[AT_ONCE];  // of the CTA `lane`
        float sum[AT_ONCE][8] = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            u32 at = min(first + n * step, ALL - 1), head = at / 2;
            bool live = lane < ranks;
            u32 rank = live ? lane : 0;
            top[n] = live ? load_remote(in_rank(address(&s.ends.top[head]), rank)) : -INFINITY_F;
            total[n] = live ? load_remote(in_rank(address(&s.ends.total[head]), rank)) : 0;
            unit[n] = live ? load_remote(in_rank(address(&s.ends.unit[head][at % 2]), rank)) : 0;
        }
#pragma unroll 1
        for (u32 r = 0; r < ranks; r += RANKS_AT_ONCE) {
            uint4 v[RANKS_AT_ONCE][AT_ONCE];
#pragma unroll
            for (int m = 0; m < RANKS_AT_ONCE; m++)
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    u32 at = first + n * step;
                    if (r + m < ranks && at < ALL) v[m][n] = load_remote_16(in_rank(address(&s.part.sums[at / 2][at % 2 * 256 + lane * 8]), r + m));
                }
            if (r == 0)
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    u32 head = min(first + n * step, ALL - 1) / 2;
                    float highest = top[n];
#pragma unroll
                    for (int far = MAX_RANKS / 2; far; far /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, far));
                    float part = power_of_2(top[n] - (highest == -INFINITY_F ? 0 : highest)), whole = total[n] * part;
#pragma unroll
                    for (int far = MAX_RANKS / 2; far; far /= 2) whole += __shfl_xor_sync(0xffffffffu, whole, far);
                    factor[n] = part * share_of(highest, whole, s.ends.sink[head]) * unit[n];
                }
#pragma unroll
            for (int m = 0; m < RANKS_AT_ONCE; m++)
#pragma unroll
                for (int n = 0; n < AT_ONCE; n++) {
                    float f = __shfl_sync(0xffffffffu, factor[n], r + m);
                    if (r + m < ranks && first + n * step < ALL) {
                        const u32 words[4] = {v[m][n].x, v[m][n].y, v[m][n].z, v[m][n].w};
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float2 two = of_half_pair(words[i]);
                            sum[n][2 * i] += two.x * f, sum[n][2 * i + 1] += two.y * f;
                        }
                    }
                }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            u32 at = first + n * step, head = at / 2;
            u16* to = out.data + token * out.token_stride + head * out.head_stride + at % 2 * 256 + lane * 8;
            if (at < ALL && head < out.num_heads)
                *(uint4*)to = make_uint4(pair_of(sum[n][0], sum[n][1]), pair_of(sum[n][2], sum[n][3]), pair_of(sum[n][4], sum[n][5]), pair_of(sum[n][6], sum[n][7]));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
many_heads(const u16* q, i64 q_token, i64 q_head, u16* out, i64 out_token, i64 out_head, const float* sink, float scale,
           int num_tokens, int num_heads, const u8* window, i64 window_stride, u32 window_page_size, u32 window_rows,
           const int* window_indices, const int* window_lengths, int window_width, const u8* compressed, i64 compressed_stride,
           u32 compressed_page_size, u32 compressed_rows, const int* compressed_indices, const int* compressed_lengths,
           int compressed_width) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *(Shared*)memory;
    let_next_launch_begin();
    Cache first = {window, window_stride, window_page_size, window_rows, window_indices, window_lengths, window_width};
    Cache second = {compressed, compressed_stride, compressed_page_size, compressed_rows, compressed_indices, compressed_lengths, compressed_width};
    Output output = {out, out_token, out_head, sink, num_heads};
    // The same in all lanes, which the compiler must know, or it guards matrix instructions by branches.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0), thread = threadIdx.x % GROUP;
    if (threadIdx.x == 0) {
        if (address(memory) % EIGHT_ROWS) __trap();
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 4 * SLICES);
            barrier_init(&s.empty[i], 8);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(&s.told[i], 4);
            barrier_init(&s.taken[i], 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    bool shared_token = cluster_size() > 1;
    if (group == 3) {
        set_registers<FEW_REGISTERS>(false);
        prefetch_indices(first, second, blockIdx.y, num_tokens, thread / 32, thread % 32);
        wait_for_launch_ahead();
        fetch(s, first, second, num_tokens, thread);
    } else if (group == 0) {
        set_registers<FEW_REGISTERS>(false);
        wait_for_launch_ahead();
        score(s, first, second, {q, q_token, q_head, num_heads}, sink, scale * LOG2_E, num_tokens, thread);
        if (shared_token) cluster_meet();
    } else {
        set_registers<MANY_REGISTERS>(true);
        wait_for_launch_ahead();
        sum(s, output, num_tokens, group - 1, thread);
        if (shared_token) {
            cluster_meet();
            combine(s, output, (group - 1) * 4 + __shfl_sync(0xffffffffu, thread / 32, 0), thread % 32);
            cluster_arrive_relaxed(), cluster_wait();  // no CTA's memory goes while another reads it
        }
    }
}
