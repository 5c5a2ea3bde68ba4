// The machine under translated kernels: threads as fibers, in an order that a seed gives, and what they wait for.
//
// A thread runs until it has to wait. All CTAs of a cluster are there at once, clusters one after another. Copies that a
// GPU makes beside the program are made at a random time, at the latest when nothing else can go on or they are waited for.

#include "machine.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

static const size_t STACK = 512 << 10;
static const u32 SHARED_START = 1024;  // of a CTA's window; what is below belongs to the system

struct Range {
    u64 first, last;
};

struct Meeting {  // of threads at one instruction
    u32 arrived = 0, due = 0;
    int line = 0;
    bool any = false, result = false;
    std::vector<Thread*> waiting;
};

struct Product {
    Half kind;
    u32 columns;
    u64 a_at, b_at;
    bool b_turned, add;
    int line;
    struct Lane {
        std::vector<u32*> sums;
        const u32* a[4];
    } lanes[32];
};

struct Warp {
    Meeting meeting;
    u32 here = 0;  // lanes
    void* operands[32];
    std::vector<Product> begun;
    std::deque<std::vector<Product>> groups;
};

struct Cta {
    u32 rank;
    std::vector<u8> memory;
    std::vector<Warp> warps;
    Meeting barriers[16];
};

struct Barrier {  // mbarrier
    u32 count, left;
    s64 bytes = 0;
    u32 phase = 0;
    std::vector<Thread*> waiting;
};

struct Fiber : Thread {
    ucontext_t context;
    u8* stack = nullptr;
    bool ended = false, blocked = false;
    const char* why = "";
    int line = 0;
    std::deque<std::function<void()>> copies;  // in the order in which they were begun
    std::deque<size_t> groups;                 // copies that were begun before each commit and are not waited for
    size_t made = 0, begun = 0;
    u32 arrivals = 0;  // at the cluster's barrier
};

static std::vector<Range> allowed;
static std::vector<Fiber> fibers;
static std::vector<Cta> ctas;
static std::map<u32, Barrier> barriers;
static std::vector<std::function<void()>> pending;
static std::mt19937 random_order;
static ucontext_t scheduler;
static Fiber* current;
static char message[1000];
static const char* kernel_name;

static Fiber& fiber(Thread& t) { return static_cast<Fiber&>(t); }

void fail(const Thread& t, int line, const char* format, ...) {
    int n = snprintf(message, sizeof message, "%s: CTA (%u, %u, %u), thread %u, PTX line %d: ", kernel_name, t.ctaid[0], t.ctaid[1],
                     t.ctaid[2], t.tid, line);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + n, sizeof message - n, format, arguments);
    va_end(arguments);
    setcontext(&scheduler);
    __builtin_unreachable();
}

static void block(Thread& t, const char* why, int line) {
    Fiber& f = fiber(t);
    f.blocked = true, f.why = why, f.line = line;
    swapcontext(&f.context, &scheduler);
}

static void wake(std::vector<Thread*>& waiting) {
    for (Thread* t : waiting) fiber(*t).blocked = false;
    waiting.clear();
}

// Memory

void bad_shared(const Thread& t, u32 at, u32 bytes, int line) {
    fail(t, line, "%u bytes of shared memory at %#x: expected a multiple of %u from %#x on, of %u bytes", bytes, at, bytes, t.shared_first,
         t.shared_bytes);
}

u8* cluster_shared_at(const Thread& t, u32 at, u32 bytes, int line) {
    u32 rank = at >> 24, offset = (at & 0xffffff) - SHARED_START;
    if (rank >= ctas.size()) fail(t, line, "shared memory of CTA %u: the cluster has %zu", rank, ctas.size());
    if (offset >= t.shared_bytes || bytes > t.shared_bytes - offset || at & (bytes - 1)) bad_shared(t, at, bytes, line);
    return ctas[rank].memory.data() + offset;
}

u8* global_at(const Thread& t, u64 at, u32 bytes, int line) {
    if (at & (bytes - 1)) fail(t, line, "%u bytes of global memory at %#llx: misaligned", bytes, (unsigned long long)at);
    for (Range& r : allowed)
        if (at >= r.first && at + bytes <= r.last) {
            std::swap(r, allowed[0]);
            return (u8*)at;
        }
    fail(t, line, "%u bytes of global memory at %#llx: in no tensor", bytes, (unsigned long long)at);
}

u32 remote_address(const Thread& t, u32 at, u32 rank, int line) {
    if (rank >= ctas.size()) fail(t, line, "mapa to CTA %u: the cluster has %zu", rank, ctas.size());
    return (at & 0xffffff) | rank << 24;
}

// Barriers

static Barrier& barrier_at(const Thread& t, u32 at, int line) {
    auto found = barriers.find(at);
    if (found == barriers.end()) fail(t, line, "no mbarrier was made at %#x", at);
    return found->second;
}

static void settle(Barrier& b) {
    if (b.left || b.bytes) return;
    b.left = b.count, b.phase ^= 1;
    wake(b.waiting);
}

void barrier_init(Thread& t, u32 at, u32 count, int line) {
    shared_at(t, at, 8, line);
    barriers[at] = Barrier{count, count};
}

void barrier_arrive(Thread& t, u32 at, u32 bytes, int line) {
    Barrier& b = barrier_at(t, at, line);
    if (!b.left) fail(t, line, "the mbarrier at %#x has all its arrivals", at);
    b.bytes += bytes, b.left--;
    settle(b);
}

void barrier_wait(Thread& t, u32 at, u32 parity, int line) {
    Barrier& b = barrier_at(t, at, line);
    while (b.phase == (parity & 1)) {  // the phase of this parity is not over
        b.waiting.push_back(&t);
        block(t, "mbarrier", line);
    }
}

// Whether this thread is the last to arrive; the others wait until it has called `wake`.
static bool last_of(Thread& t, Meeting& m, u32 due, const char* why, int line) {
    if (!m.arrived) m.due = due, m.line = line;
    if (m.due != due) fail(t, line, "%s of %u threads, where line %d waits for %u", why, due, m.line, m.due);
    if (++m.arrived == due) {
        m.arrived = 0;
        return true;
    }
    m.waiting.push_back(&t);
    block(t, why, line);
    return false;
}

static void meet(Thread& t, Meeting& m, u32 due, const char* why, int line) {
    if (last_of(t, m, due, why, line)) wake(m.waiting);
}

void cta_meet(Thread& t, u32 which, u32 threads, int line) { meet(t, t.cta->barriers[which], threads ? threads : t.ntid, "bar.sync", line); }

bool cta_any(Thread& t, u32 which, u32 threads, bool value, int line) {
    Meeting& m = t.cta->barriers[which];
    m.any = (m.arrived && m.any) || value;
    if (last_of(t, m, threads, "bar.red", line)) {
        m.result = m.any;  // read by all before it is written again, since each of them arrives again before that
        wake(m.waiting);
    }
    return m.result;
}

// Turns of the cluster that are over, and who waits. A thread that has ended is not waited for.
static u32 turn, missing;
static std::vector<Thread*> cluster_waiting;

static void count_missing() {
    missing = 0;
    for (Fiber& f : fibers) missing += !f.ended && f.arrivals <= turn;
}

static void settle_cluster(bool arrived) {
    if (!arrived || --missing) return;
    turn++;
    count_missing();
    wake(cluster_waiting);
}

void cluster_arrive(Thread& t, int line) {
    Fiber& f = fiber(t);
    if (f.arrivals > turn) fail(t, line, "barrier.cluster.arrive twice without a wait");
    f.arrivals++;
    settle_cluster(true);
}

void cluster_wait(Thread& t, int line) {
    while (turn < fiber(t).arrivals) {
        cluster_waiting.push_back(&t);
        block(t, "barrier.cluster", line);
    }
}

// Asynchronous copies

static void copy_now(const Thread& t, u8* to, u64 from, u32 bytes, u32 live_bytes, int line) {
    if (live_bytes) memcpy(to, global_at(t, from, live_bytes, line), live_bytes);
    memset(to + live_bytes, 0, bytes - live_bytes);
}

static void make_one(Fiber& f) {
    auto copy = std::move(f.copies.front());
    f.copies.pop_front();
    f.made++;
    copy();
}

void copy_small(Thread& t, u32 to, u64 from, u32 bytes, u32 live_bytes, int line) {
    Fiber& f = fiber(t);
    u8* place = shared_at(t, to, bytes, line);
    if (from & (bytes - 1)) fail(t, line, "cp.async of %u bytes from %#llx: misaligned", bytes, (unsigned long long)from);
    if (live_bytes) global_at(t, from, live_bytes & -live_bytes, line);
    f.begun++;
    f.copies.push_back([=, &t] { copy_now(t, place, from, bytes, live_bytes, line); });
}

void copies_commit(Thread& t) { fiber(t).groups.push_back(fiber(t).begun); }

void copies_wait(Thread& t, u32 left) {
    Fiber& f = fiber(t);
    while (f.groups.size() > left) {
        while (f.made < f.groups.front()) make_one(f);
        f.groups.pop_front();
    }
}

void copies_arrive(Thread& t, u32 barrier, int line) {
    Fiber& f = fiber(t);
    barrier_at(t, barrier, line);
    f.begun++;
    f.copies.push_back([=, &t] { barrier_arrive(t, barrier, 0, line); });
}

static void complete(const Thread& t, u32 barrier, u32 bytes, int line) {
    Barrier& b = barrier_at(t, barrier, line);
    b.bytes -= bytes;
    settle(b);
}

void copy_bulk(Thread& t, u32 to, u64 from, u32 bytes, u32 barrier, int line) {
    if (bytes % 16 || from % 16 || to % 16) fail(t, line, "bulk copy of %u bytes from %#llx to %#x: expected multiples of 16", bytes, (unsigned long long)from, to);
    u8* place = cluster_shared_at(t, to, 16, line);
    if (bytes) cluster_shared_at(t, to + bytes - 16, 16, line), global_at(t, from, 16, line), global_at(t, from + bytes - 16, 16, line);
    barrier_at(t, barrier, line);
    pending.push_back([=, &t] {
        memcpy(place, (const u8*)from, bytes);
        complete(t, barrier, bytes, line);
    });
}

void store_async(Thread& t, u32 to, const u32* words, u32 count, u32 barrier, int line) {
    u8* place = cluster_shared_at(t, to, 4 * count, line);
    barrier_at(t, barrier, line);
    std::vector<u32> kept(words, words + count);
    pending.push_back([=, &t] {
        memcpy(place, kept.data(), 4 * kept.size());
        complete(t, barrier, 4 * (u32)kept.size(), line);
    });
}

// Warps

static Warp& warp_of(Thread& t) { return t.cta->warps[t.warp]; }

// Calls `work(operands of all lanes)` once when all lanes of `mask` are here.
template <class Work>
static void together(Thread& t, u32 mask, const char* why, int line, void* mine, Work work) {
    Warp& w = warp_of(t);
    if (!(mask >> t.lane & 1)) fail(t, line, "%s of lanes %#x, of which lane %u is none", why, mask, t.lane);
    Meeting& m = w.meeting;
    if (!m.arrived) m.due = mask, m.line = line;
    if (m.due != mask || m.line != line) fail(t, line, "%s of lanes %#x, where lanes %#x wait for lanes %#x at line %d", why, mask, m.arrived, m.due, m.line);
    w.operands[t.lane] = mine;
    m.arrived |= 1u << t.lane;
    if (m.arrived != mask) {
        m.waiting.push_back(&t);
        block(t, why, line);
        return;
    }
    m.arrived = 0;
    work(w.operands);
    wake(m.waiting);
}

static u32 all_lanes(const Thread& t) { return t.ntid - t.warp * 32 >= 32 ? ~0u : (1u << t.ntid % 32) - 1; }

void warp_meet(Thread& t, u32 mask, int line) {
    together(t, mask & all_lanes(t), "bar.warp.sync", line, nullptr, [](void**) {});
}

struct Given {
    u32 x, lane, limits, result;
    bool inside;
};

u32 shuffle(Thread& t, Shuffle how, u32 x, u32 lane, u32 limits, u32 mask, bool& inside, int line) {
    Given mine = {x, lane & 31, limits, 0, false};
    together(t, mask, "shfl.sync", line, &mine, [&](void** all) {
        for (u32 me = 0; me < 32; me++) {
            if (!(mask >> me & 1)) continue;
            Given& g = *(Given*)all[me];
            u32 clamp = g.limits & 31, segment = g.limits >> 8 & 31;
            u32 most = (me & segment) | (clamp & ~segment), least = me & segment, from = 0;
            switch (how) {
                case UP: from = me - g.lane, g.inside = (s32)from >= (s32)most; break;
                case DOWN: from = me + g.lane, g.inside = from <= most; break;
                case BUTTERFLY: from = me ^ g.lane, g.inside = from <= most; break;
                case INDEX: from = least | (g.lane & ~segment), g.inside = from <= most; break;
            }
            if (!g.inside) from = me;
            if (!(mask >> from & 1)) fail(t, line, "shfl.sync from lane %u, which is not in %#x", from, mask);
            g.result = ((Given*)all[from])->x;
        }
    });
    inside = mine.inside;
    return mine.result;
}

u32 ballot(Thread& t, bool value, u32 mask, int line) {
    Given mine = {value};
    together(t, mask, "vote.sync", line, &mine, [&](void** all) {
        u32 bits = 0;
        for (u32 i = 0; i < 32; i++)
            if (mask >> i & 1) bits |= ((Given*)all[i])->x << i;
        for (u32 i = 0; i < 32; i++)
            if (mask >> i & 1) ((Given*)all[i])->result = bits;
    });
    return mine.result;
}

static u32 reduced(Reduce how, u32 a, u32 b) {
    switch (how) {
        case ADD: return a + b;
        case MIN_U32: return a < b ? a : b;
        case MAX_U32: return a > b ? a : b;
        case MIN_S32: return (s32)a < (s32)b ? a : b;
        case MAX_S32: return (s32)a > (s32)b ? a : b;
        case AND: return a & b;
        case OR: return a | b;
        default: return a ^ b;
    }
}

u32 reduce(Thread& t, Reduce how, u32 x, u32 mask, int line) {
    Given mine = {x};
    together(t, mask, "redux.sync", line, &mine, [&](void** all) {
        u32 result = 0;
        bool first = true;
        for (u32 i = 0; i < 32; i++)
            if (mask >> i & 1) result = first ? ((Given*)all[i])->x : reduced(how, result, ((Given*)all[i])->x), first = false;
        for (u32 i = 0; i < 32; i++)
            if (mask >> i & 1) ((Given*)all[i])->result = result;
    });
    return mine.result;
}

struct Matrices {
    u32* const* to;
    u32 from;
};

// Row r of matrix m is where lane 8m + r says; lane 4r + c holds its numbers 2c and 2c + 1, transposed those of column r.
void load_matrices(Thread& t, u32* const* to, u32 count, bool transposed, u32 from, int line) {
    Matrices mine = {to, from};
    together(t, ~0u, "ldmatrix", line, &mine, [&](void** all) {
        for (u32 m = 0; m < count; m++) {
            u16 numbers[8][8];
            for (u32 r = 0; r < 8; r++) memcpy(numbers[r], shared_at(t, ((Matrices*)all[8 * m + r])->from, 16, line), 16);
            for (u32 lane = 0; lane < 32; lane++) {
                u32 r = lane / 4, c = 2 * (lane % 4);
                *((Matrices*)all[lane])->to[m] = transposed ? pair(numbers[c][r], numbers[c + 1][r]) : pair(numbers[r][c], numbers[r][c + 1]);
            }
        }
    });
}

u32 transpose_matrix(Thread& t, u32 x, int line) {
    Given mine = {x};
    together(t, ~0u, "movmatrix", line, &mine, [&](void** all) {
        u16 numbers[8][8];
        for (u32 lane = 0; lane < 32; lane++) {
            u32 word = ((Given*)all[lane])->x;
            numbers[lane / 4][2 * (lane % 4)] = (u16)word, numbers[lane / 4][2 * (lane % 4) + 1] = (u16)(word >> 16);
        }
        for (u32 lane = 0; lane < 32; lane++) {
            u32 r = lane / 4, c = 2 * (lane % 4);
            ((Given*)all[lane])->result = pair(numbers[c][r], numbers[c + 1][r]);
        }
    });
    return mine.result;
}

static float number(Half kind, u16 x) { return kind == BF16 ? bf16(x) : f16(x); }

struct Fragments {
    u32* const* sums;
    const u32 *a, *b;
};

// Lane 4g + c: a[0] row g, columns 2c and 2c + 1; a[1] row g + 8; a[2] and a[3] columns 8 further. b[0] rows 2c and 2c + 1 of
// column g, b[1] 8 further. Sums: row g and g + 8, columns 2c and 2c + 1.
static void read_a(Half kind, float (&a)[16][16], u32 lane, const u32* words) {
    u32 g = lane / 4, c = 2 * (lane % 4);
    for (u32 i = 0; i < 4; i++)
        for (u32 h = 0; h < 2; h++) a[g + 8 * (i % 2)][c + 8 * (i / 2) + h] = number(kind, (u16)(words[i] >> (16 * h)));
}

void multiply(Thread& t, Half kind, u32* const* sums, const u32* a, const u32* b, int line) {
    Fragments mine = {sums, a, b};
    together(t, ~0u, "mma.sync", line, &mine, [&](void** all) {
        float left[16][16], right[16][8];
        for (u32 lane = 0; lane < 32; lane++) {
            Fragments& f = *(Fragments*)all[lane];
            read_a(kind, left, lane, f.a);
            for (u32 i = 0; i < 4; i++) right[2 * (lane % 4) + 8 * (i / 2) + i % 2][lane / 4] = number(kind, (u16)(f.b[i / 2] >> (16 * (i % 2))));
        }
        for (u32 lane = 0; lane < 32; lane++)
            for (u32 i = 0; i < 4; i++) {
                u32* sum = ((Fragments*)all[lane])->sums[i];
                double x = fp32(*sum);
                for (u32 k = 0; k < 16; k++) x += (double)left[lane / 4 + 8 * (i / 2)][k] * right[k][2 * (lane % 4) + i % 2];
                *sum = fp32_bits((float)x);
            }
    });
}

// wgmma: each warp multiplies the 16 rows of its part of 64.

struct Begun {
    u32* const* sums;
    const u32* const* a;
};

void multiply_async(Thread& t, Half kind, u32 columns, u32* const* sums, const u32* const* a, u64 a_at, u64 b_at, bool b_turned, bool add,
                    int line) {
    Begun mine = {sums, a};
    together(t, ~0u, "wgmma", line, &mine, [&](void** all) {
        Product p = {kind, columns, a_at, b_at, b_turned, add, line, {}};
        for (u32 lane = 0; lane < 32; lane++) {
            Begun& b = *(Begun*)all[lane];
            p.lanes[lane].sums.assign(b.sums, b.sums + columns / 2);
            for (u32 i = 0; i < 4; i++) p.lanes[lane].a[i] = b.a ? b.a[i] : nullptr;
        }
        warp_of(t).begun.push_back(std::move(p));
    });
}

// Number (row, k) of an operand of 16 numbers along k. Rows of 128 bytes (64 numbers), whose chunks of 16 bytes are in the
// order that bits 7 to 9 of the address give. Eight rows make a block; where the numbers of a row are along the other side
// (turned), the next 64 of them are `leading` bytes further.
static float operand(const Thread& t, Half kind, u64 at, u32 row, u32 k, bool turned, int line) {
    if (at >> 62 != 1) fail(t, line, "an operand of wgmma whose swizzle is not 128 bytes: not emulated");
    u32 start = (u32)(at & 0x3fff) << 4, leading = (u32)(at >> 16 & 0x3fff) << 4, stride = (u32)(at >> 32 & 0x3fff) << 4;
    u32 from = turned ? start + k / 8 * stride + k % 8 * 128 + row / 64 * leading + row % 64 * 2 : start + row / 8 * stride + row % 8 * 128 + k * 2;
    from ^= (from >> 7 & 7) << 4;
    u16 x;
    memcpy(&x, shared_at(t, from | (t.cluster_rank << 24), 2, line), 2);
    return number(kind, x);
}

static void multiply_now(Thread& t, const Product& p) {
    std::vector<std::vector<float>> right(p.columns, std::vector<float>(16));
    for (u32 n = 0; n < p.columns; n++)
        for (u32 k = 0; k < 16; k++) right[n][k] = operand(t, p.kind, p.b_at, n, k, p.b_turned, p.line);
    float left[16][16];
    for (u32 lane = 0; lane < 32; lane++) {
        if (!p.lanes[lane].a[0]) continue;
        u32 words[4];
        for (u32 i = 0; i < 4; i++) words[i] = *p.lanes[lane].a[i];
        read_a(p.kind, left, lane, words);
    }
    if (!p.lanes[0].a[0])
        for (u32 row = 0; row < 16; row++)
            for (u32 k = 0; k < 16; k++) left[row][k] = operand(t, p.kind, p.a_at, 16 * (t.warp % 4) + row, k, false, p.line);
    for (u32 lane = 0; lane < 32; lane++)
        for (u32 i = 0; i < p.columns / 2; i++) {
            u32 row = lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            u32* sum = p.lanes[lane].sums[i];
            double x = p.add ? fp32(*sum) : 0.0;
            for (u32 k = 0; k < 16; k++) x += (double)left[row][k] * right[column][k];
            *sum = fp32_bits((float)x);
        }
}

void matrices_commit(Thread& t, int line) {
    together(t, ~0u, "wgmma.commit_group", line, nullptr, [&](void**) {
        Warp& w = warp_of(t);
        w.groups.push_back(std::move(w.begun));
        w.begun.clear();
    });
}

void matrices_wait(Thread& t, u32 left, int line) {
    together(t, ~0u, "wgmma.wait_group", line, nullptr, [&](void**) {
        Warp& w = warp_of(t);
        while (w.groups.size() > left) {
            for (const Product& p : w.groups.front()) multiply_now(t, p);
            w.groups.pop_front();
        }
    });
}

// Running

static u32 below(size_t n) { return (u32)(random_order() % n); }

static void run_fiber() {
    Fiber& f = *current;
    kernel(f);
    f.ended = true;
    if (f.arrivals <= turn) settle_cluster(true);
    setcontext(&scheduler);
}

static bool make_pending() {
    if (!pending.empty()) {
        u32 which = below(pending.size());
        auto copy = std::move(pending[which]);
        pending[which] = std::move(pending.back());
        pending.pop_back();
        copy();
        return true;
    }
    return false;
}

static bool make_small() {
    u32 start = below(fibers.size());
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& f = fibers[(start + i) % fibers.size()];
        if (f.copies.empty()) continue;
        make_one(f);
        return true;
    }
    return false;
}

static void deadlock() {
    std::map<std::pair<int, std::string>, u32> where;
    for (Fiber& f : fibers)
        if (!f.ended) where[{f.line, f.why}]++;
    int n = snprintf(message, sizeof message, "%s: nothing can go on:", kernel_name);
    for (auto& [place, threads] : where)
        if (n < (int)sizeof message - 80) n += snprintf(message + n, sizeof message - n, " %u threads at PTX line %d (%s)", threads, place.first, place.second.c_str());
}

static void run_cluster() {
    while (true) {
        std::vector<Fiber*> ready;
        bool left = false;
        for (Fiber& f : fibers) {
            left |= !f.ended;
            if (!f.ended && !f.blocked) ready.push_back(&f);
        }
        if (!left) return;
        if (ready.empty() && !make_pending() && !make_small()) return deadlock();
        std::shuffle(ready.begin(), ready.end(), random_order);
        for (Fiber* f : ready) {
            if (below(4) == 0) make_pending();
            if (below(16) == 0) make_small();
            if (message[0]) return;
            current = f;
            swapcontext(&scheduler, &f->context);
            if (message[0]) return;
        }
    }
}

static u8* stack_of(size_t which) {
    static std::vector<u8*> stacks;
    while (stacks.size() <= which)
        stacks.push_back((u8*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return stacks[which];
}

static void set_up(const u32* grid, const u32* block, u32 ranks, u32 shared_bytes, const u64* parameters, u32 first) {
    const u32 threads = block[0] * block[1] * block[2];
    ctas = std::vector<Cta>(ranks);
    fibers = std::vector<Fiber>(ranks * threads);
    barriers.clear(), pending.clear(), cluster_waiting.clear();
    turn = 0;
    for (u32 rank = 0; rank < ranks; rank++) {
        Cta& cta = ctas[rank];
        cta.rank = rank, cta.memory.assign(shared_bytes, 0xff), cta.warps.resize((threads + 31) / 32);
        for (u32 i = 0; i < threads; i++) {
            Fiber& f = fibers[rank * threads + i];
            u32 index = first + rank;
            f.cta = &cta, f.tid = i, f.lane = i % 32, f.warp = i / 32, f.ntid = threads, f.cluster_rank = rank, f.cluster_size = ranks;
            f.ctaid[0] = index % grid[0], f.ctaid[1] = index / grid[0] % grid[1], f.ctaid[2] = index / grid[0] / grid[1];
            memcpy(f.nctaid, grid, sizeof f.nctaid), memcpy(f.block, block, sizeof f.block);
            f.shared_first = rank << 24 | SHARED_START, f.shared_bytes = shared_bytes, f.shared = cta.memory.data();
            f.parameters = parameters;
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = stack_of(rank * threads + i), f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            makecontext(&f.context, run_fiber, 0);
        }
    }
    count_missing();
}

// What went wrong, or an empty text. `grid` counts CTAs, `ranks` of which are a cluster.
extern "C" const char* run(const char* name, const u32* grid, const u32* block, u32 ranks, u32 shared_bytes, const u64* parameters,
                           const u64* ranges, u32 num_ranges, u32 seed) {
    message[0] = 0, kernel_name = name;
    random_order.seed(seed);
    allowed.clear();
    for (u32 i = 0; i < num_ranges; i++) allowed.push_back({ranges[2 * i], ranges[2 * i + 1]});
    for (u32 first = 0; first < grid[0] * grid[1] * grid[2] && !message[0]; first += ranks) {
        set_up(grid, block, ranks, shared_bytes, parameters, first);
        run_cluster();
    }
    return message;
}
