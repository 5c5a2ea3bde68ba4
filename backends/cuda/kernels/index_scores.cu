// The lightning indexer's scores of MXFP4 keys, and the best score of every eight: sm_90a.
//
// scores[t, c] = sum_h weight[t, h] * relu(query[t, h] . key[position of c]), for at most 32 heads of 128 dims. The dot product,
// its product with the weight and the sum are each rounded to bf16. What a token does not see is not written; a key without a
// page is zeros. The best of eight columns is NaN where none of them is a number; candidates have none, nor need others.
//
// Compiled with CANDIDATES (whether columns stand for blocks of positions, or each for itself), CTAS (of this kernel on a
// multiprocessor), DEPTH (tiles that are on their way at a time) and SHARED_BYTES (what a launch gives) defined.
//
// A CTA is one warp group and scores a run of tiles of 64 columns of one token, of which each warp has 16: two eights of
// neighbours in a page. Keys are the long side of wgmma and come from registers: lane 4r + j takes 16 bytes of rows r and r + 8,
// which are the 32 dims of the key's scale j, decodes and scales them, and they are in place for the matrix unit. Which dims a
// step of the product sums is then given by who holds them; the queries lie in shared memory in that order.
//
// A lane copies into shared memory what it takes, and so waits for nothing but its own copies. Pages are looked up by all lanes
// of a warp at once, many tiles before their keys are copied.
//
// Numbers: e2m1 times any UE8M0 scale is exact in bf16. Sums over dims and over heads are fp32.

#include "common.cuh"

#define HEADS 32
#define DIMS 128
#define KEY_BYTES (DIMS / 2)
#define SCALES 4
#define TILE 64
#define THREADS 128
#define EIGHT 8  // neighbouring keys of which the best score is kept

// Queries as a matrix operand: rows of 128 bytes (64 numbers), eight rows to 1024 bytes, in which 16-byte chunk c of row r is
// at place c ^ (r & 7). The 128 dims are two such blocks.
#define ROW 128
#define BLOCK (HEADS * ROW)

// The 16 keys of a warp, each 4 bytes of scales four times over: for each lane what it takes.
struct Tile {
    uint4 values[2][32];
    u32 scales[2][32];
};

struct Shared {
    u8 query[2][BLOCK];
    Tile tiles[THREADS / 32][DEPTH];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");

struct Keys {
    const u8* data;
    u32 page_stride;  // bytes
    u32 page_bits;    // a page has 1 << page_bits rows, 16 or more, all values before all scales
    u32 last_row;     // of a page
    u32 scale_start;  // bytes from the start of a page to its scales
    int pages;        // of the whole cache
    const int* table;  // [requests, table_width], -1 = none
    i64 table_stride;
    int table_width;
};

struct Queries {
    const u16* data;  // [T, heads, 128]
    i64 token_stride, head_stride;
    const u16* weights;  // [T, heads]
    i64 weights_stride;
    int heads;
};

__device__ inline u64 operand(u32 at) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | (u64)(8 * ROW >> 4) << 32 | (u64)(BLOCK >> 4) << 16 | (at & 0x3ffff) >> 4;
}

__device__ inline void multiply(float (&x)[16], const u32* a, u64 b, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
        "}\n"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), "+f"(x[8]),
          "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}

__device__ inline uint4 load_16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

__device__ inline u32 load_byte(u32 from) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}

__device__ inline void copy_4(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ inline void matrices_wait(float (&x)[16]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]), "+f"(x[7]), "+f"(x[8]),
                   "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]), "+f"(x[14]), "+f"(x[15])::"memory");
}

// Sums of 16 heads of 16 keys: terms times ones.
__device__ inline void add_up(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3) {
    const u32 ones = 0x3f803f80u;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(ones));
}

__device__ inline u32 product(u32 a, u32 b) {
    u32 c;
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

__device__ inline u32 rounded_relu(float low, float high) {
    u32 pair;  // a NaN stays
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Two e2m1 codes, the lowest or (SECOND) the next in each half of a word, as the fields of bf16: values times 2^-126. The
// product puts the code at bits 6 and 12 of its half, and only the wanted bits of both places are kept.
template <bool SECOND>
__device__ inline u32 widened(u32 word) {
    const u32 moved = (word & (SECOND ? 0x00f000f0u : 0x000f000fu)) * (SECOND ? 1u << 2 | 1u << 8 : 1u << 6 | 1u << 12);
    return moved & 0x81c081c0u;
}

// 2^(byte - 1), which puts the 2^126 back, and the rest where that is no bf16: both twice. 255 is NaN.
#define MOST_AT_ONCE 128
__device__ inline u32 scale_pair(u32 byte) { return (min(byte, MOST_AT_ONCE) + 126) * 0x00800080u; }
__device__ inline u32 rest_pair(u32 byte) {
    return byte == 255 ? 0x7fc07fc0u : (max(byte, MOST_AT_ONCE) - MOST_AT_ONCE + 127) * 0x00800080u;
}

// A row's 16 bytes as the lane's part of eight matrix steps: a[4 * step + which] and a[4 * step + 2 + which].
__device__ inline void decode(u32 (&a)[32], int which, const uint4& values, u32 byte) {
    const u32 by = scale_pair(byte);
    const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low = words[i], high = low >> 8;
        u32 pairs[4] = {widened<false>(low), widened<true>(low), widened<false>(high), widened<true>(high)};
#pragma unroll
        for (int k = 0; k < 4; k++) a[4 * (2 * i + k / 2) + 2 * (k % 2) + which] = product(pairs[k], by);
    }
}

__device__ inline void multiply_by_rest(u32 (&a)[32], const u32 (&bytes)[2]) {
    u32 rest[2] = {rest_pair(bytes[0]), rest_pair(bytes[1])};
    asm volatile("" : "+r"(rest[0]), "+r"(rest[1]));  // or they are computed where none is wanted
#pragma unroll
    for (int k = 0; k < 32; k++) a[k] = product(a[k], rest[k % 2]);
}

// A thread has the dims of scale thread % 4 of head thread / 4.
struct Part {
    uint4 values[DIMS / SCALES / 8];
};

__device__ inline Part load_queries(const Queries& q, int token, int thread) {
    const int head = min(thread / 4, q.heads - 1);
    const uint4* from = (const uint4*)(q.data + token * q.token_stride + head * q.head_stride + 32 * (thread % 4));
    Part p;
#pragma unroll
    for (int i = 0; i < 4; i++) p.values[i] = from[i];
    return p;
}

// Each to where a lane's codes meet it: pair k of word i holds its dims 8i + k and 8i + k + 4 and is in step 2i + k / 2, in the
// half k % 2 of it.
__device__ inline void store_queries(Shared& s, const Part& p, bool live, int thread) {
    const int head = thread / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 v = p.values[i];
        u32 pairs[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int step = 2 * i + k / 2, chunk = (step % 4) * 2 + k % 2;
            *(u32*)(s.query[step / 4] + head * ROW + ((chunk ^ (head & 7)) * 16) + 4 * (thread % 4)) = live ? pairs[k] : 0;
        }
    }
}

// What a token sees: positions up to `visible`, and of its columns those of this CTA up to `end`.
struct Seen {
    const int* table;
    const i64* blocks;  // of EIGHT positions, which the columns stand for, -1 = none
    int visible, end;
};

// A warp looks up the page of its 16 rows, or of each eight, and as many lookups as it has lanes at a time.
#define LOOKUPS (CANDIDATES ? 2 : 1)
#define BATCH (32 / LOOKUPS)  // tiles

// A lookup: the position of the first row, -1 = not seen, and its page, -1 = none.
struct Place {
    int position, page;
};

__device__ inline i64 block_at(const Seen& seen, int column) { return CANDIDATES && column < seen.end ? seen.blocks[(u32)column / EIGHT] : -1; }

__device__ inline Place look_up(const Keys& keys, const Seen& seen, int column, i64 block) {
    Place p = {column < seen.end ? column : -1, -1};
    if (CANDIDATES) p.position = block >= 0 && block * EIGHT < seen.visible ? (int)block * EIGHT : -1;
    const int page = (u32)p.position >> keys.page_bits;
    if (p.position >= 0 && page < keys.table_width) p.page = seen.table[page];
    return p;
}

// What a warp copies next.
struct Ahead {
    int tiles, column;  // how many there are, and the warp's first column of the next one
    int tile;           // of the batch
    int lookup;         // column of this lane's next lookup
    Place now, then;    // lookups of this batch and of the next one, and the block of the one after
    i64 block;
    u32 seen;  // whether a token sees the row that this lane writes, a bit for each tile on its way: the oldest is lowest
};

__device__ inline void next_batch(Ahead& a, const Keys& keys, const Seen& seen) {
    a.now = a.then;
    a.then = look_up(keys, seen, a.lookup, a.block);
    a.lookup += BATCH * TILE;
    a.block = block_at(seen, a.lookup);
    a.tile = 0;
}

// What a lane takes: bytes from the start of a page's values and scales, and of the first tile in shared memory.
struct Lane {
    u32 from_values, from_scales, values, scales;
};

// One group of copies, empty where there are no more tiles.
__device__ inline void copy_next(Ahead& a, const Lane& l, u32 ring, const Keys& keys, const Seen& seen, int lane) {
    a.seen >>= 1;
    if (a.tiles > 0) {
        if (a.tile == BATCH) next_batch(a, keys, seen);
        const u8 *values, *scales;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int which = CANDIDATES ? 2 * a.tile + h : a.tile;
            const int page = __shfl_sync(0xffffffffu, a.now.page, which);
            const int position = CANDIDATES ? __shfl_sync(0xffffffffu, a.now.position, which) : a.column;
            const bool there = (u32)page < (u32)keys.pages;
            if (CANDIDATES || h == 0) {
                const u32 row = position & keys.last_row;
                const u8* from = keys.data + (u64)(u32)page * keys.page_stride;
                values = from + (l.from_values + row * KEY_BYTES), scales = from + (l.from_scales + row * SCALES);
                asm volatile("" : "+l"(values), "+l"(scales));  // or those of the second eight are not told by these
            }
            const u32 eight = CANDIDATES ? 0 : h * EIGHT;
            copy_16(l.values + ring + h * sizeof(Tile::values[0]), values + eight * KEY_BYTES, there ? 16 : 0);
            copy_4(l.scales + ring + h * sizeof(Tile::scales[0]), scales + eight * SCALES, there ? 4 : 0);
            if (CANDIDATES && lane % 4 == h) {
                const int column = a.column + h * EIGHT + lane / 4;
                if (position >= 0 && position + lane / 4 < seen.visible && column < seen.end) a.seen |= 1u << (DEPTH - 1);
            }
        }
        a.column += TILE, a.tile++, a.tiles--;
    }
    copies_end();
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
index_scores(const u16* queries, i64 queries_token, i64 queries_head, const u16* weights, i64 weights_token, int num_heads,
             const i64* requests, const i64* num_visible, const u8* data, u32 page_stride, u32 page_bits, u32 last_row,
             u32 scale_start, int num_pages, const int* table, i64 table_stride, int table_width, const i64* candidates,
             i64 candidates_stride, u16* out_scores, i64 out_stride, u16* out_best, i64 best_stride, int num_columns,
             u32 splits) {
    const Queries q = {queries, queries_token, queries_head, weights, weights_token, num_heads};
    const Keys keys = {data, page_stride, page_bits, last_row, scale_start, num_pages, table, table_stride, table_width};
    extern __shared__ __align__(1024) u8 memory[];
    Shared& s = *(Shared*)memory;
    // The `splits` CTAs of a token follow each other in one dimension, for the others end at 65,535.
    const int token = blockIdx.x / splits, thread = threadIdx.x, lane = thread % 32, j = lane % 4;
    const int first = thread / 32 * 16;

    let_next_launch_begin();
    wait_for_launch_ahead();
    const i64 request = requests[token], counted = num_visible[token];
    const Part part = load_queries(q, token, thread);
    u32 factors[4];  // of heads 8i + 2j and the next
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int head = 8 * i + 2 * j;
        const u16* at = q.weights + token * q.weights_stride + head;
        factors[i] = (head < q.heads ? at[0] : 0) | (head + 1 < q.heads ? at[1] : 0) << 16;
    }

    const int visible = request < 0 ? 0 : (int)max((i64)0, min(counted, (i64)0x7fffffff));
    const int end = CANDIDATES ? (visible > 0 ? num_columns : 0) : min(visible, num_columns);
    const int run = ((u32)(end + TILE - 1) / TILE + splits - 1) / splits * TILE;
    int start = blockIdx.x % splits * run;
    if (start >= end) return;
    const Seen seen = {keys.table + request * keys.table_stride, candidates + token * candidates_stride, visible, min(start + run, end)};

    // Lookups of two batches; nothing waits for the second one's pages.
    Ahead ahead = {(seen.end - start + TILE - 1) / TILE, start + first};
    ahead.lookup = start + first + (CANDIDATES ? lane / 2 * TILE + lane % 2 * EIGHT : lane * TILE);
    const i64 block = block_at(seen, ahead.lookup);
    ahead.block = block_at(seen, ahead.lookup + BATCH * TILE);
    ahead.then = look_up(keys, seen, ahead.lookup, block);
    ahead.lookup += BATCH * TILE;
    next_batch(ahead, keys, seen);

    const Tile& tile = s.tiles[thread / 32][0];
    Lane own = {lane * 16u, keys.scale_start + lane / 4 * SCALES, address(&tile.values[0][lane]), address(&tile.scales[0][lane])};
#pragma unroll
    for (u32 d = 0; d < DEPTH; d++) copy_next(ahead, own, d * sizeof(Tile), keys, seen, lane);

    store_queries(s, part, thread / 4 < q.heads, thread);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const u64 query = operand(address(s.query));

    u16* scores = out_scores + token * out_stride;
    u16* best = out_best + token * best_stride;
    // Lanes 4r and 4r + 1 write rows r and r + 8, the others none.
    int column = start + first + lane / 4 + EIGHT * (j & 1);
    const int own_end = j < 2 ? seen.end : 0;
    // Or they are computed again in every turn.
    asm volatile("" : "+l"(scores), "+l"(best), "+r"(own.from_values), "+r"(own.from_scales), "+r"(own.values), "+r"(own.scales), "+r"(column));
    u32 ring = 0;
#pragma unroll 1
    for (; start < seen.end; start += TILE, column += TILE) {
        copies_wait<DEPTH - 1>();
        u32 a[32];
        const u32 scales[2] = {load_byte(own.scales + j + ring), load_byte(own.scales + j + ring + sizeof(Tile::scales[0]))};
        decode(a, 0, load_16(own.values + ring), scales[0]);
        decode(a, 1, load_16(own.values + ring + sizeof(Tile::values[0])), scales[1]);
        if (__any_sync(0xffffffffu, max(scales[0], scales[1]) > MOST_AT_ONCE)) multiply_by_rest(a, scales);

        float x[16];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < DIMS / 16; step++)
            multiply(x, a + 4 * step, query + ((step / 4 * BLOCK + step % 4 * 32) >> 4), step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        const bool counts = CANDIDATES ? ahead.seen & 1 : column < own_end;
        copy_next(ahead, own, ring, keys, seen, lane);
        ring = ring == (DEPTH - 1) * sizeof(Tile) ? 0 : ring + sizeof(Tile);
        matrices_wait(x);

        // Rows r and r + 8 of heads 8i + 2j and the next; as they lie they are an operand of the sum over heads.
        u32 terms[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) terms[i][h] = product(rounded_relu(x[4 * i + 2 * h], x[4 * i + 2 * h + 1]), factors[i]);
        if (q.heads < HEADS) {  // an infinite key is NaN times the zeros of heads that are none
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int head = 8 * i + 2 * j;
                const u32 live = (head < q.heads ? 0xffffu : 0) | (head + 1 < q.heads ? 0xffff0000u : 0);
                terms[i][0] &= live, terms[i][1] &= live;
            }
        }
        float sums[4] = {0, 0, 0, 0};
        add_up(sums, terms[0][0], terms[0][1], terms[1][0], terms[1][1]);
        add_up(sums, terms[2][0], terms[2][1], terms[3][0], terms[3][1]);

        // All four lanes of a row have its sum.
        const u32 score = pair_of(sums[0], sums[2]) >> 16 * (j & 1);
        if (counts) scores[column] = (u16)score;
#if !CANDIDATES
        float most = counts ? low_of(score) : __int_as_float(0x7fffffff);
#pragma unroll
        for (int other = 4; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));  // but of NaN
        if (counts && out_best != nullptr) best[(u32)column / EIGHT] = (u16)pair_of(most, 0.0f);  // all lanes of an eight the same
#endif
    }
}
