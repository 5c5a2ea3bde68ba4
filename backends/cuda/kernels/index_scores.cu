// The lightning indexer's scores of MXFP4 keys, and the best score of every eight: sm_90a.
//
// scores[t, c] = sum_h weight[t, h] * relu(query[t, h] . key[position of c]), for at most 32 heads of 128 dims. The dot product,
// its product with the weight and the sum are each rounded to bf16. What a token does not see is not written; a position without
// a page scores 0. The best of eight columns is NaN where none of them is a number.
//
// Compiled with CANDIDATES (whether columns stand for blocks of positions, or each for itself), CTAS (of this kernel on a
// multiprocessor), DEPTH (tiles that are read ahead) and SHARED_BYTES (what a launch gives) defined.
//
// A CTA is one warp group, of which each warp has 16 keys of a tile of 64: two eights of neighbours in a page. Keys are the long side of wgmma and come from
// registers: lane 4r + j reads 16 bytes of rows r and r + 8, which are the 32 dims of the key's scale j, decodes and scales
// them, and they are in place for the matrix unit. Which dims a step of the product sums is then given by who holds them; the
// queries lie in shared memory in that order.
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

struct Shared {
    u8 query[2][BLOCK];
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

// Where the two eights of a warp are: their first positions, -1 = none, and pages, -1 = none. Read before the keys are.
struct Place {
    int position[2], page[2];
};

// A lane's rows of a tile, one of each eight, as they lie in the cache, and what was there where they have no page.
struct Raw {
    uint4 values[2];
    u32 scales[2];  // the byte of this lane's dims
    Place place;
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
__device__ inline void decode(u32* a, int which, const uint4& values, u32 byte, bool large) {
    const u32 by = scale_pair(byte), rest = rest_pair(byte);
    const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low = words[i], high = low >> 8;
        u32 pairs[4] = {widened<false>(low), widened<true>(low), widened<false>(high), widened<true>(high)};
#pragma unroll
        for (int k = 0; k < 4; k++) a[4 * (2 * i + k / 2) + 2 * (k % 2) + which] = product(pairs[k], by);
    }
    if (large) {
#pragma unroll
        for (int k = 0; k < 16; k++) a[2 * k + which] = product(a[2 * k + which], rest);
    }
}

// Of head thread / 4, the dims of scale thread % 4, each to where a lane's codes meet it: pair k of word i holds its dims
// 8i + k and 8i + k + 4 and is in step 2i + k / 2, in the half k % 2 of it.
__device__ inline void store_queries(Shared& s, const Queries& q, int token, int thread) {
    const int head = thread / 4, j = thread % 4;
    const bool live = head < q.heads;
    const uint4* from = (const uint4*)(q.data + token * q.token_stride + (live ? head : 0) * q.head_stride + 32 * j);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = from[i];
        u32 pairs[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int step = 2 * i + k / 2, chunk = (step % 4) * 2 + k % 2;
            *(u32*)(s.query[step / 4] + head * ROW + ((chunk ^ (head & 7)) * 16) + 4 * j) = live ? pairs[k] : 0;
        }
    }
}

// What a token sees: positions up to `visible`, columns up to `end`.
struct Seen {
    const int* table;
    const i64* blocks;  // of EIGHT positions, which the columns stand for, -1 = none
    int visible, end;
};

__device__ inline Place place_of(const Keys& keys, const Seen& seen, int column) {
    Place p;
#pragma unroll
    for (int h = 0; h < 2; h++, column += EIGHT) {
        const bool live = column < seen.end;
#if CANDIDATES
        const i64 block = live ? seen.blocks[(u32)column / EIGHT] : -1;
        p.position[h] = block >= 0 && block * EIGHT < seen.visible ? (int)block * EIGHT : -1;
#else
        p.position[h] = column;
        if (h == 1) {
            p.page[1] = p.page[0];
            break;
        }
#endif
        const int page = (u32)p.position[h] >> keys.page_bits;
        p.page[h] = live && p.position[h] >= 0 && page < keys.table_width ? seen.table[page] : -1;
        if (p.page[h] >= keys.pages) p.page[h] = -1;
    }
    return p;
}

// Eight rows of values are one run of bytes, 16 a lane, and so are their scales, one a lane.
__device__ inline void load(Raw& raw, const Keys& keys, const Place& p, int lane) {
    raw.place = p;
#pragma unroll
    for (int h = 0; h < (CANDIDATES ? 2 : 1); h++) {
        if (p.page[h] < 0) continue;  // the same in all lanes
        const u32 row = p.position[h] & keys.last_row;
        const u8* page = keys.data + (u64)(u32)p.page[h] * keys.page_stride;
        const uint4* values = (const uint4*)(page + (row * KEY_BYTES + lane * 16));
        const u8* bytes = page + (keys.scale_start + row * SCALES + lane);
        raw.values[h] = __ldg(values);
        raw.scales[h] = __ldg(bytes);
#if !CANDIDATES  // both eights are neighbours
        raw.values[1] = __ldg(values + EIGHT * KEY_BYTES / 16);
        raw.scales[1] = __ldg(bytes + EIGHT * SCALES);
#endif
    }
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
    const int first = thread / 32 * 16, stride = splits * TILE;

    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
    const i64 request = requests[token];
    const int visible = request < 0 ? 0 : (int)min(num_visible[token], (i64)0x7fffffff);
    Seen seen = {keys.table + request * keys.table_stride, nullptr, visible, min(visible, num_columns)};
#if CANDIDATES
    seen.blocks = candidates + token * candidates_stride;
    seen.end = visible > 0 ? num_columns : 0;
#endif
    int start = blockIdx.x % splits * TILE;
    if (start >= seen.end) return;

    Raw raw[DEPTH] = {};
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load(raw[d], keys, place_of(keys, seen, start + d * stride + first), lane);
    Place next = place_of(keys, seen, start + DEPTH * stride + first);

    store_queries(s, q, token, thread);
    u32 factors[4];  // of heads 8i + 2j and the next
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int head = 8 * i + 2 * j;
        const u16* at = q.weights + token * q.weights_stride + head;
        factors[i] = (head < q.heads ? at[0] : 0) | (head + 1 < q.heads ? at[1] : 0) << 16;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const u64 query = operand(address(s.query));

    u16* scores = out_scores + token * out_stride;
    u16* best = out_best != nullptr ? out_best + token * best_stride : nullptr;
    asm volatile("" : "+l"(scores), "+l"(best), "+l"(seen.table));  // or their products are computed in every turn
    while (start < seen.end) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (start >= seen.end) break;
            u32 a[32];
            const Place place = raw[d].place;
            const bool large = __any_sync(0xffffffffu, max(raw[d].scales[0], raw[d].scales[1]) > MOST_AT_ONCE);
            decode(a, 0, raw[d].values[0], raw[d].scales[0], large);
            decode(a, 1, raw[d].values[1], raw[d].scales[1], large);
            load(raw[d], keys, next, lane);
            next = place_of(keys, seen, start + (DEPTH + 1) * stride + first);

            float x[16];
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int step = 0; step < DIMS / 16; step++)
                multiply(x, a + 4 * step, query + ((step / 4 * BLOCK + step % 4 * 32) >> 4), step > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
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

            // All four lanes of a row have its sum. Lanes 0 and 1 of them stand for rows r and r + 8 from here on.
            const bool second = j & 1;
            const int column = start + first + lane / 4 + EIGHT * second;
            const int eight = second ? place.position[1] : place.position[0], page = second ? place.page[1] : place.page[0];
            const bool counts = CANDIDATES ? eight >= 0 && eight + lane / 4 < visible && column < seen.end : column < seen.end;
            const u32 score = page < 0 ? 0 : pair_of(second ? sums[2] : sums[0], 0.0f) & 0xffff;
            if (j < 2 && counts) scores[column] = (u16)score;
            if (best != nullptr) {
                float most = counts ? low_of(score) : __int_as_float(0x7fffffff);
#pragma unroll
                for (int other = 4; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, other));  // but of NaN
                if (lane < 2 && column < seen.end) best[(u32)column / EIGHT] = (u16)(pair_of(most, 0.0f) & 0xffff);
            }
            start += stride;
        }
    }
}
