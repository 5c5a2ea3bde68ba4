// The best rows of each token, and the best blocks of eight, by scores in bf16: sm_90a.
//
// Compiled with THREADS, KEYS (scores that a CTA can hold), MOST_BLOCKS (of which a CTA can look at the rows) and SHARED_BYTES
// (what a launch gives) defined.
//
// A cluster of CTAs has one token, each CTA a run of its blocks. First the best blocks are chosen by their best score, then the
// best rows among theirs: k blocks or more hold the k best rows, since every better row than the last of these makes its block
// better too. So a row of a million scores is looked at as 131,072, and then as 4,096. Where blocks are few or candidates are
// given, the rows of all are looked at, and the first choice is left out.
//
// A choice is a radix select: the two digits of the k-th best rank, each by a histogram, then one ordered pass. Equal ranks are
// taken in the order of their columns, so the result is unique. What is no number, or not seen, has rank 0 and is counted like
// the others, since to leave it out costs more: where the k-th best is such a one, the others are all chosen.
//
// CTAs meet by barriers that count the bytes of the histograms sent, since those of a cluster wait for all stores to memory. Of
// these each CTA has two in turns: it sends the next but one when it has that of every other, which have read the one before.

#include "common.cuh"

#define WARPS (THREADS / 32)
#define EIGHT 8
#define BINS 256
#define TURNS 4        // at most: two digits of blocks, and of rows
#define SUMS TURNS     // where the counts of all CTAs are added up
#define NEWEST 0xffffu  // above every score
#define NONE 0x10000   // no rank
#define ALL 0xffffffffu

// Ranks from `least` on are chosen, and of those equal to `level` the first `room`, so many of either being in CTAs before this.
struct Choice {
    u32 least, level, room, before, level_before;
    __device__ u32 place(u32 above, u32 levels) const { return above + min(levels, room); }
};

// What the histograms of all CTAs say of the `room` best ranks.
struct Found {
    u32 digit;         // that of the last of them, or 0 where there are fewer
    u32 above;         // ranks of higher digits
    u32 before;        // those of them in CTAs before this one
    u32 level_before;  // and ranks of this digit there
};

struct Shared {
    uint4 ranks[KEYS / EIGHT];
    u16 given[2][MAX_RANKS][BINS];  // of each CTA, as it sends them
    u32 counts[TURNS + 1][BINS + EIGHT];  // behind the bins, of ranks that have none
    u32 before[BINS];                     // counts of the CTAs before this one
    u32 blocks[MOST_BLOCKS];              // whose rows are looked at
    u32 counted[WARPS];                   // chosen in a warp's run: in the low half, and in the high one of the last rank
    Found found;
    u64 barriers[2];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the launch gives less");
static_assert(KEYS >= MOST_BLOCKS * EIGHT && KEYS < 1 << 16, "all rows that are looked at are held, and counted in 16 bits");
static_assert(THREADS >= BINS, "a thread for each bin");

// Of two scores the ranks, 16 bits that order as scores do. -0 counts as 0; one that is no number has that of `none`.
__device__ inline u32 ranks_of(u32 scores, u32 none) {
    const u32 size = scores & 0x7fff7fff;
    const u32 negative = size & (scores >> 15 & 0x00010001) * 0xffff;
    const u32 no_number = ((size + 0x007f007f) >> 15 & 0x00010001) * 0xffff;
    return ((size + 0x80008000 - 2 * negative) & ~no_number) | (none & no_number);
}

// Of eight scores of which the first `live` count, the others having rank 0; `newest` is before all, if it is one of them.
__device__ inline uint4 eight_ranks(uint4 v, u32 none, int live, int newest) {
    u32 x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
        x[w] = ranks_of(x[w], none);
        if (live < 2 * w + 2) x[w] &= live == 2 * w + 1 ? 0xffff : 0;
        x[w] |= (newest == 2 * w ? NEWEST : 0) | (newest == 2 * w + 1 ? NEWEST << 16 : 0);
    }
    return {x[0], x[1], x[2], x[3]};
}

__device__ inline u32 rank_at(const uint4& eight, int i) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
    return words[i / 2] >> (16 * (i % 2)) & 0xffff;
}

// Stores 16 bytes in the shared memory of another CTA, whose barrier counts them.
__device__ inline void give_16(u32 to, uint4 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier) : "memory");
}

// Sum over the lanes before this one.
__device__ inline u32 sum_before(u32 x, int lane, u32& total) {
    u32 sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, by);
        if (lane >= by) sum += other;
    }
    total = __shfl_sync(ALL, sum, 31);
    return sum - x;
}

// By the first warp, of counts in all CTAs, and in those before this one.
__device__ inline Found find_digit(const u32* counts, const u32* before, u32 room, int lane) {
    const int each = BINS / 32, first = (31 - lane) * each;  // lane 0 has the highest digits
    u32 sum = 0, total, here[each];
#pragma unroll
    for (int i = 0; i < each; i++) sum += here[i] = counts[first + i];
    u32 above = sum_before(sum, lane, total), digit = first;
    const u32 owners = __ballot_sync(ALL, above + sum >= room);
    bool found = false;
#pragma unroll
    for (int i = each - 1; i > 0; i--) {
        found |= above + here[i] >= room;
        if (found) digit = max(digit, (u32)(first + i));
        else above += here[i];
    }
    const int owner = owners ? __ffs(owners) - 1 : 31;
    digit = __shfl_sync(ALL, digit, owner), above = __shfl_sync(ALL, above, owner);
    sum = 0;
#pragma unroll
    for (int i = 0; i < each; i++) sum += first + i > digit ? before[first + i] : 0;
    return {digit, above, __reduce_add_sync(ALL, sum), before[digit]};
}

// Sends the counts of a turn to all CTAs, this one too, and adds up theirs.
__device__ inline void add_up(Shared& s, int turn, u32 rank, u32 ranks) {
    const int thread = threadIdx.x;
    u64* barrier = &s.barriers[turn % 2];
    for (u32 i = thread; i < ranks * (BINS / EIGHT); i += THREADS) {
        const u32 to = i / (BINS / EIGHT), bin = i % (BINS / EIGHT) * EIGHT;
        const u32* counts = s.counts[turn] + bin;
        u32 x[4];
#pragma unroll
        for (int w = 0; w < 4; w++) x[w] = counts[2 * w] | counts[2 * w + 1] << 16;
        give_16(in_rank(address(&s.given[turn % 2][rank][bin]), to), {x[0], x[1], x[2], x[3]}, in_rank(address(barrier), to));
    }
    if (thread == 0) barrier_expect(barrier, ranks * sizeof s.given[0][0]);
    if (thread < BINS) {
        barrier_wait(barrier, turn / 2);
        u32 all = 0, before = 0;
#pragma unroll 4
        for (u32 r = 0; r < ranks; r++) {
            const u32 count = s.given[turn % 2][r][thread];
            all += count, before += r < rank ? count : 0;
        }
        s.counts[SUMS][thread] = all, s.before[thread] = before;
    }
    __syncthreads();
}

// What is chosen of the ranks of all CTAs, of which `eights` times EIGHT are in this one, each counted by the thread that stored
// it, for at most `k`.
__device__ inline Choice choose(Shared& s, int turn, int eights, u32 k, u32 rank, u32 ranks) {
    const int thread = threadIdx.x;
    u32 last = 0, room = k, before = 0, level_before = 0;  // `last`: the rank of the last one, as far as it is known
#pragma unroll 1
    for (int shift = 8; shift >= 0; shift -= 8, turn++) {
        u32* counts = s.counts[turn];
#pragma unroll 1
        for (int i = thread; i < eights; i += THREADS) {
            const uint4 v = s.ranks[i];
#pragma unroll
            for (int e = 0; e < EIGHT; e++) atomicAdd(counts + min((rank_at(v, e) - last) >> shift, (u32)BINS), 1);
        }
        __syncthreads();
        if (ranks > 1) add_up(s, turn, rank, ranks);
        if (thread < 32) {
            const Found found = find_digit(s.counts[ranks > 1 ? SUMS : turn], s.before, room, thread);
            if (thread == 0) s.found = found;
        }
        __syncthreads();
        last += s.found.digit << shift, room -= s.found.above, before += s.found.before, level_before = s.found.level_before;
    }
    return last ? Choice{last + 1, last, room, before, level_before} : Choice{1, NONE, 0, before, 0};
}

// Calls `take(i, e, place)` for the ranks e of the eights i of this CTA that are chosen, in order, `place` being that among all.
// Returns the first and the last place. The ranks are lost.
template <class Take>
__device__ inline uint2 collect(Shared& s, const Choice& c, int eights, Take take) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Each warp has a run of the eights, to be counted before it is taken.
    const int each = (eights + WARPS - 1) / WARPS, first = warp * each, last = min(first + each, eights);
    auto counted = [](u32 found) { return __popc(found & 0xffff) | __popc(found >> 16) << 16; };
    u32 here = 0, all;
#pragma unroll 1
    for (int i = first + lane; i < last; i += 32) {
        uint4& v = s.ranks[i];
        u32 found = 0;  // above in the low half, level in the high one
#pragma unroll
        for (int e = 0; e < EIGHT; e++)
            found |= (rank_at(v, e) >= c.least ? 1u << e : 0) | (rank_at(v, e) == c.level ? 1u << (16 + e) : 0);
        here += counted(found), v.x = found;
    }
    here = __reduce_add_sync(ALL, here);
    if (lane == 0) s.counted[warp] = here;
    __syncthreads();
    here = sum_before(lane < WARPS ? s.counted[lane] : 0, lane, all);
    const uint2 places = {c.place(c.before, c.level_before), c.place(c.before + (all & 0xffff), c.level_before + (all >> 16))};
    here = __shfl_sync(ALL, here, warp);
    u32 above = c.before + (here & 0xffff), level = c.level_before + (here >> 16);

#pragma unroll 1
    for (int i = first + lane; i - lane < last; i += 32) {
        const u32 found = i < last ? s.ranks[i].x : 0, others = sum_before(counted(found), lane, all);
        u32 my_above = above + (others & 0xffff), my_level = level + (others >> 16);
#pragma unroll 1
        for (u32 left = (found | found >> 16) & 0xffff; left; left &= left - 1) {
            const u32 e = __ffs(left) - 1;
            const bool is_above = found >> e & 1;
            if (is_above || my_level < c.room) take(i, e, c.place(my_above, my_level));
            if (is_above) my_above++;
            else my_level++;
        }
        above += all & 0xffff, level += all >> 16;
    }
    return places;
}

// scores and best [T, columns] and [T, columns / EIGHT], rows 16-byte aligned; num_visible [T]; all_candidates [T, columns /
// EIGHT], the blocks that the columns stand for, -1 = none, or null. best is looked at where a token sees more blocks than
// `all_blocks` and no candidates are given: then the best `num_blocks` are looked into. out_rows [T, num_rows], ascending, -1
// where there are fewer; out_blocks [T, num_blocks] likewise, the newest always among them, all_blocks being num_blocks, or null
// where nobody asks for them. Positions are below 2^35.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
index_choice(const u16* scores, i64 scores_stride, const u16* best, i64 best_stride, int num_columns, const i64* num_visible,
             const i64* all_candidates, i64 candidates_stride, i64* out_rows, int num_rows, i64* out_blocks, int num_blocks,
             int all_blocks) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& s = *(Shared*)memory;
    const u32 ranks = cluster_size(), rank = cluster_rank();
    const int token = blockIdx.x / ranks, thread = threadIdx.x;
    let_next_launch_begin();
    for (int i = thread; i < TURNS * (BINS + EIGHT); i += THREADS) s.counts[0][i] = 0;
    if (thread < BINS) s.before[thread] = 0;
    if (thread == 0) {
        barrier_init(&s.barriers[0], 1), barrier_init(&s.barriers[1], 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (ranks > 1) cluster_arrive_relaxed(), cluster_wait();  // all have barriers
    wait_for_launch_ahead();

    const bool whole = all_candidates == nullptr, publishes = out_blocks != nullptr;
    const i64 visible = max(num_visible[token], (i64)0);
    const int seen = whole ? (int)min(visible, (i64)num_columns) : visible ? num_columns : 0;
    const int blocks = (seen + EIGHT - 1) / EIGHT;
    // Runs begin at a multiple of 16 bytes of best scores.
    const int each = ((blocks + ranks - 1) / ranks + EIGHT - 1) / EIGHT * EIGHT;
    const int first = min((int)rank * each, blocks), count = min(each, blocks - first);
    scores += token * scores_stride, best += token * best_stride, all_candidates += token * candidates_stride;
    out_rows += token * (i64)num_rows, out_blocks += token * (i64)num_blocks;

    const bool by_blocks = whole && blocks > all_blocks;
    if (publishes && !by_blocks)
        for (int i = rank * THREADS + thread; i < num_blocks; i += ranks * THREADS) out_blocks[i] = i < blocks ? i : -1;
    int chosen = count;  // of this CTA's blocks
#pragma unroll 1
    for (int stage = by_blocks ? 0 : 1, turn = 0; stage < 2; stage++, turn += 2) {
        const int eights = stage == 0 ? (count + EIGHT - 1) / EIGHT : chosen;
#pragma unroll 1
        for (int i = thread; i < eights; i += THREADS) {
            const u16* from;
            i64 live;
            u32 none = 0;
            int newest = EIGHT;
            if (stage == 0) {
                from = best + first + i * EIGHT, live = count - i * EIGHT, none = 0x00010001;  // after all others
                if (publishes) newest = blocks - 1 - first - i * EIGHT;
            } else {
                const i64 place = by_blocks ? s.blocks[i] : first + i, block = whole ? place : all_candidates[place];
                from = scores + place * EIGHT, live = block < 0 ? 0 : min(visible - block * EIGHT, seen - place * EIGHT);
                s.blocks[i] = block;
            }
            s.ranks[i] = eight_ranks(*(const uint4*)from, none, (int)min(max(live, (i64)0), (i64)EIGHT), newest);
        }
        const Choice choice = choose(s, turn, eights, stage == 0 ? num_blocks : num_rows, rank, ranks);
        const u32 begin = choice.place(choice.before, choice.level_before);
        const uint2 places = collect(s, choice, eights, [&](int i, int e, u32 place) {
            const i64 index = stage == 0 ? first + i * EIGHT + e : s.blocks[i] * (i64)EIGHT + e;
            if (stage == 0) s.blocks[place - begin] = index;
            if (stage == 1) out_rows[place] = index;
            else if (publishes) out_blocks[place] = index;
        });
        __syncthreads();
        if (stage == 0) chosen = places.y - places.x;
        else if (rank == ranks - 1)  // knows how many there are, and puts -1 behind them
            for (int i = places.y + thread; i < num_rows; i += THREADS) out_rows[i] = -1;
    }
}
