// Threads as fibers, the order in which they run, and what they wait for. One launch at a time.

#include "machine.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <vector>

static const u32 RESERVED = 1024;       // of the first addresses of a CTA's shared memory nothing is used
static const u32 RANK_SHIFT = 24;       // where an address says its CTA of the cluster
static const size_t STACK = 128 * 1024;  // touched as far as it is used
static const u64 STACK_END = 0x5ca1ab1e0ddba115ull;

typedef void (*Act)(Warp&, u32 lanes, void** data);

// What lanes of a warp have come for.
struct Meeting {
    const char* what;
    u32 mask;
    int line;
    bool same_line;
    void* data;
    Act act;
};

struct Copy {
    u32 to, bytes, live_bytes;
    u64 from;
    u32 group;
    int line;
    bool arrives;  // no copy: arrives at barrier `to` when all before it are done
};

struct Fiber : Thread {
    jmp_buf back;
    u8* stack;
    bool started, ended;
    int waits_at;
    const char* waits_for;
    u32 aligned_count;
    std::vector<Copy> copies;
    u32 groups;  // of copies, that are complete
    bool arrived;  // at the cluster's barrier, in `arrived_phase`
    u32 arrived_phase;
    u64 fenced;  // the clock at its last fence
    u64 barrier;  // that it waits for
};

struct Product {
    Half kind;
    u32 columns;
    std::vector<u32*> sums;  // of each lane
    u32 a[32][4];
    bool a_in_registers, add, a_turned, b_turned;
    u64 a_at, b_at;
    int a_sign, b_sign, line;
    u32 group;
};

struct Warp {
    Cta* cta;
    u32 index, live, runnable;
    Fiber* lanes[32];
    Meeting* meetings[32];
    u64 priority;
    std::vector<int> aligned_lines;
    std::deque<Product> products;
    u32 product_groups;
};

struct CtaBarrier {
    u32 threads, arrived;
    std::vector<Fiber*> waiting;
    std::vector<Fiber*> all;
    u32 yes;
    u32 result;
};

struct Cta {
    u32 rank, live;
    std::vector<u8> room;
    u8* shared;
    std::vector<u64> written;
    std::vector<Warp*> warps;
    CtaBarrier barriers[16];
    std::vector<std::vector<int>> product_lines;  // of each warp group
};

struct Bulk {
    Fiber* owner;
    u32 to, bytes, barrier;
    u64 from;  // global memory, or 0 for `data`
    u8 data[16];
    int line;
};

// As Python fills it.
struct Launch {
    u32 grid[3], ranks, block[3], shared_bytes;
    u32 threads() const { return block[0] * block[1] * block[2]; }
    u64 seed;
    const u64* parameters;
    u64 ranges;
    const u64* bounds;  // begin and end of each, ascending
    u64 early;          // whether it begins before the launch ahead has ended
    u64 constants;      // of those in which it may read from its beginning on
    const u64* constant_bounds;
};

static struct {
    const Launch* launch;
    jmp_buf scheduler, failure;
    Fiber* current;
    std::vector<Cta*> ctas;
    std::vector<Warp*> warps;
    std::vector<Fiber*> fibers;
    std::vector<Bulk> bulk;
    std::vector<Fiber*> copying;
    std::vector<Warp*> multiplying;
    u32 live, cluster_arrived, cluster_phase;
    u64 random, clock, last_begin, last_end;
    u8* stacks;
    size_t stack_bytes;
    std::string message;
} machine;

static Fiber& fiber(Thread& t) { return static_cast<Fiber&>(t); }

static u32 draw(u32 below) {
    u64& x = machine.random;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    return (u32)((x * 0x2545f4914f6cdd1dull >> 32) * below >> 32);
}

// Errors

static std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
static std::string text(const char* format, ...) {
    char room[600];
    va_list rest;
    va_start(rest, format);
    vsnprintf(room, sizeof room, format, rest);
    va_end(rest);
    return room;
}

static std::string name_of(const Thread& t) {
    return text("CTA (%u, %u, %u) thread %u", t.ctaid[0], t.ctaid[1], t.ctaid[2], t.tid);
}

void fail(const Thread& t, int line, const char* format, ...) {
    char room[600];
    va_list rest;
    va_start(rest, format);
    vsnprintf(room, sizeof room, format, rest);
    va_end(rest);
    machine.message = name_of(t) + text(" at PTX line %d: ", line) + room;
    longjmp(machine.failure, 1);
}

static void fail_stuck() {
    std::string said = "a deadlock, in which nobody can go on:";
    int groups = 0;
    for (Warp* w : machine.warps) {
        std::map<int, u32> lanes;
        for (u32 i = 0; i < 32; i++)
            if (w->live >> i & 1) lanes[w->lanes[i]->waits_at] |= 1u << i;
        for (auto& at : lanes) {
            if (++groups > 40) continue;
            Fiber& f = *w->lanes[__builtin_ctz(at.second)];
            said += text("\n  CTA (%u, %u, %u) warp %u lanes %08x wait for %s at PTX line %d", f.ctaid[0], f.ctaid[1], f.ctaid[2],
                         w->index, at.second, f.waits_for, at.first);
        }
    }
    if (groups > 40) said += text("\n  and %d more", groups - 40);
    machine.message = said;
    longjmp(machine.failure, 1);
}

// Fibers

static void give_way() {
    if (!_setjmp(machine.current->back)) _longjmp(machine.scheduler, 1);
}

static void wake(Fiber& f) { f.warp->runnable |= 1u << f.lane; }

static void wait_for(Fiber& f, const char* what, int line) {
    f.waits_for = what, f.waits_at = line;
    f.warp->runnable &= ~(1u << f.lane);
    give_way();
}

static void ended(Fiber& f);

static void entry() {
    kernel(*machine.current);
    ended(*machine.current);
    _longjmp(machine.scheduler, 1);
}

static void run(Fiber& f) {
    machine.current = &f;
    if (_setjmp(machine.scheduler)) return;
    if (f.started) _longjmp(f.back, 1);
    f.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = f.stack, context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
    makecontext(&context, entry, 0);
    setcontext(&context);
}

// Meetings of a warp

static bool try_to_meet(Warp& w, const Meeting& m) {
    u32 lanes = m.mask & w.live;
    void* data[32] = {};
    for (u32 i = 0; i < 32; i++) {
        if (!(lanes >> i & 1)) continue;
        Meeting* other = w.meetings[i];
        if (!other || other->what != m.what || other->mask != m.mask) return false;
        if (m.same_line && other->line != m.line) return false;
        data[i] = other->data;
    }
    Act act = m.act;
    for (u32 i = 0; i < 32; i++)
        if (lanes >> i & 1) w.meetings[i] = nullptr, wake(*w.lanes[i]);
    if (act) act(w, lanes, data);
    return true;
}

static void meet(Thread& t, const char* what, u32 mask, bool same_line, int line, void* data, Act act) {
    if (!(mask >> t.lane & 1)) fail(t, line, "its lane %u is not in the mask %08x of those that meet", t.lane, mask);
    Meeting m = {what, mask, line, same_line, data, act};
    Warp& w = *t.warp;
    w.meetings[t.lane] = &m;
    w.runnable &= ~(1u << t.lane);
    fiber(t).waits_for = what, fiber(t).waits_at = line;
    if (!try_to_meet(w, m)) give_way();
}

static void meet_all(Thread& t, const char* what, int line, void* data, Act act) {
    aligned(t, line);
    meet(t, what, ~0u, true, line, data, act);
}

void warp_meet(Thread& t, u32 mask, int line) { meet(t, "the warp", mask, false, line, nullptr, nullptr); }

struct Shuffled {
    u32 x, lane, limits, result;
    bool inside;
    Thread* thread;
    int line;
};

template <Shuffle HOW>
static void act_shuffle(Warp&, u32 lanes, void** data) {
    u32 results[32];
    for (u32 i = 0; i < 32; i++) {
        if (!(lanes >> i & 1)) continue;
        Shuffled& s = *(Shuffled*)data[i];
        u32 segments = s.limits >> 8 & 31, limit = s.limits & 31, by = s.lane & 31;
        int last = (i & segments) | (limit & ~segments), first = i & segments, from;
        if (HOW == UP) from = (int)i - (int)by, s.inside = from >= last;
        else if (HOW == DOWN) from = i + by, s.inside = from <= last;
        else if (HOW == BUTTERFLY) from = i ^ by, s.inside = from <= last;
        else from = first | (by & ~segments), s.inside = from <= last;
        if (!s.inside) from = i;
        if (!(lanes >> from & 1)) fail(*s.thread, s.line, "it reads lane %d, which is not among those that meet, %08x", from, lanes);
        results[i] = ((Shuffled*)data[from])->x;
    }
    for (u32 i = 0; i < 32; i++)
        if (lanes >> i & 1) ((Shuffled*)data[i])->result = results[i];
}

u32 shuffle(Thread& t, Shuffle how, u32 x, u32 lane, u32 limits, u32 mask, bool& inside, int line) {
    Shuffled s = {x, lane, limits, 0, false, &t, line};
    static const struct {
        const char* name;
        Act act;
    } kinds[] = {{"shfl.up", act_shuffle<UP>}, {"shfl.down", act_shuffle<DOWN>}, {"shfl.bfly", act_shuffle<BUTTERFLY>}, {"shfl.idx", act_shuffle<INDEX>}};
    meet(t, kinds[how].name, mask, false, line, &s, kinds[how].act);
    inside = s.inside;
    return s.result;
}

struct Given {
    u32 x, lanes;
};

static void act_ballot(Warp&, u32 lanes, void** data) {
    u32 yes = 0;
    for (u32 i = 0; i < 32; i++)
        if (lanes >> i & 1 && ((Given*)data[i])->x) yes |= 1u << i;
    for (u32 i = 0; i < 32; i++)
        if (lanes >> i & 1) *(Given*)data[i] = {yes, lanes};
}

static Given vote(Thread& t, const char* name, bool value, u32 mask, int line) {
    Given g = {value, 0};
    meet(t, name, mask, false, line, &g, act_ballot);
    return g;
}
u32 ballot(Thread& t, bool value, u32 mask, int line) { return vote(t, "vote.ballot", value, mask, line).x; }
bool vote_any(Thread& t, bool value, u32 mask, int line) { return vote(t, "vote.any", value, mask, line).x != 0; }
bool vote_all(Thread& t, bool value, u32 mask, int line) {
    Given g = vote(t, "vote.all", value, mask, line);
    return g.x == g.lanes;
}

template <Reduce HOW>
static void act_reduce(Warp&, u32 lanes, void** data) {
    u32 r = 0;
    bool first = true;
    for (u32 i = 0; i < 32; i++) {
        if (!(lanes >> i & 1)) continue;
        u32 x = *(u32*)data[i];
        if (first) r = x;
        else if (HOW == ADD) r += x;
        else if (HOW == MIN_U32) r = std::min(r, x);
        else if (HOW == MAX_U32) r = std::max(r, x);
        else if (HOW == MIN_S32) r = (u32)std::min((s32)r, (s32)x);
        else if (HOW == MAX_S32) r = (u32)std::max((s32)r, (s32)x);
        else if (HOW == AND) r &= x;
        else if (HOW == OR) r |= x;
        else r ^= x;
        first = false;
    }
    for (u32 i = 0; i < 32; i++)
        if (lanes >> i & 1) *(u32*)data[i] = r;
}

u32 reduce(Thread& t, Reduce how, u32 x, u32 mask, int line) {
    static const struct {
        const char* name;
        Act act;
    } kinds[] = {{"redux.add", act_reduce<ADD>}, {"redux.min.u32", act_reduce<MIN_U32>}, {"redux.max.u32", act_reduce<MAX_U32>}, {"redux.min.s32", act_reduce<MIN_S32>},
                 {"redux.max.s32", act_reduce<MAX_S32>}, {"redux.and", act_reduce<AND>}, {"redux.or", act_reduce<OR>}, {"redux.xor", act_reduce<XOR>}};
    meet(t, kinds[how].name, mask, false, line, &x, kinds[how].act);
    return x;
}

// Of threads of a warp, all must execute the same ones in the same order.
void aligned(Thread& t, int line) {
    Fiber& f = fiber(t);
    std::vector<int>& lines = t.warp->aligned_lines;
    u32 n = f.aligned_count++;
    if (n == lines.size()) lines.push_back(line);
    else if (lines[n] != line) fail(t, line, "an aligned instruction, but another lane of the warp is at PTX line %d", lines[n]);
}

// Memory

void bad_shared(const Thread& t, u32 at, u32 bytes, int line) {
    if (bytes && at & (bytes - 1)) fail(t, line, "%u bytes at shared address 0x%x: not aligned", bytes, at);
    fail(t, line, "%u bytes at shared address 0x%x: expected within the CTA's 0x%x to 0x%x", bytes, at, t.shared_first,
         t.shared_first + t.shared_bytes);
}

static Cta& cta_at(const Thread& t, u32 at, u32 bytes, int line) {
    u32 rank = at >> RANK_SHIFT, offset = (at & ((1u << RANK_SHIFT) - 1)) - RESERVED;
    if (rank >= machine.ctas.size() || offset >= t.shared_bytes || bytes > t.shared_bytes - offset)
        fail(t, line, "%u bytes at shared address 0x%x: expected within 0x%x bytes of one of %zu CTAs", bytes, at, t.shared_bytes, machine.ctas.size());
    if (bytes && bytes <= 16 && at & (bytes - 1)) bad_shared(t, at, bytes, line);
    Cta& cta = *machine.ctas[rank];
    if (!cta.live) fail(t, line, "%u bytes at shared address 0x%x of CTA %u of the cluster, which has ended", bytes, at, rank);
    return cta;
}

static u32 offset_of(u32 at) { return (at & ((1u << RANK_SHIFT) - 1)) - RESERVED; }

u8* cluster_shared_at(const Thread& t, u32 at, u32 bytes, int line) { return cta_at(t, at, bytes, line).shared + offset_of(at); }

static void must_have_waited(const Thread& t, u64 at, int line) {
    if (!machine.launch->early || t.waited) return;
    for (u64 i = 0; i < machine.launch->constants; i++)
        if (machine.launch->constant_bounds[2 * i] <= at && at < machine.launch->constant_bounds[2 * i + 1]) return;
    fail(t, line, "global address 0x%llx before the launch ahead was waited for", (unsigned long long)at);
}

u8* global_at(const Thread& t, u64 at, u32 bytes, int line) {
    must_have_waited(t, at, line);
    if (at < machine.last_begin || at + bytes > machine.last_end) {
        const u64* bounds = machine.launch->bounds;
        u64 low = 0, high = machine.launch->ranges;
        while (low < high) {
            u64 middle = (low + high) / 2;
            if (bounds[2 * middle + 1] <= at) low = middle + 1;
            else high = middle;
        }
        if (low == machine.launch->ranges || at < bounds[2 * low] || at + bytes > bounds[2 * low + 1]) {
            long long after = low > 0 ? (long long)(at - bounds[2 * low - 1]) : -1;
            fail(t, line, "%u bytes at global address 0x%llx are in no tensor of the launch (%lld bytes past the end of one)", bytes,
                 (unsigned long long)at, after);
        }
        machine.last_begin = bounds[2 * low], machine.last_end = bounds[2 * low + 1];
    }
    if (bytes <= 16 && bytes && at % bytes) fail(t, line, "%u bytes at global address 0x%llx: not aligned", bytes, (unsigned long long)at);
    return (u8*)at;
}

u32 remote_address(const Thread& t, u32 at, u32 rank, int line) {
    if (rank >= t.cluster_size) fail(t, line, "CTA %u of a cluster of %u", rank, t.cluster_size);
    return (at & ((1u << RANK_SHIFT) - 1)) | rank << RANK_SHIFT;
}

// Barriers in shared memory, as 8 bytes: a mark, the phase, arrivals expected and pending, and bytes on their way.

static const u64 MARK = 0x6d6;
struct Barrier {
    u32 phase, expected, pending;
    s32 bytes;
};
static u64 packed(const Barrier& b) {
    return MARK << 52 | (u64)b.phase << 51 | (u64)b.expected << 37 | (u64)b.pending << 23 | ((u64)b.bytes & 0x7fffff);
}

struct BarrierPlace {
    u8* at;
    u64 key;
};
static BarrierPlace place_of(const Thread& t, u32 at, int line) {
    u8* p = cluster_shared_at(t, at, 8, line);
    return {p, (u64)p};
}

static Barrier read_barrier(const Thread& t, u8* at, int line) {
    u64 x;
    memcpy(&x, at, 8);
    if (x >> 52 != MARK) fail(t, line, "no barrier lies at offset 0x%llx: it was not initialised, or was overwritten", (unsigned long long)(at - t.shared));
    return {(u32)(x >> 51 & 1), (u32)(x >> 37 & 0x3fff), (u32)(x >> 23 & 0x3fff), (s32)((u32)x << 9) >> 9};
}

static void write_barrier(BarrierPlace place, Barrier b) {
    bool complete = b.pending == 0 && b.bytes == 0;
    if (complete) b.phase ^= 1, b.pending = b.expected;
    u64 x = packed(b);
    memcpy(place.at, &x, 8);
    if (complete)
        for (Fiber* f : machine.fibers)
            if (f->barrier == place.key) f->barrier = 0, wake(*f);
}

static void own(const Thread& t, u32 at, int line) { shared_at(t, at, 8, line); }

void barrier_init(Thread& t, u32 at, u32 count, int line) {
    own(t, at, line);
    if (count < 1 || count >= 1 << 14) fail(t, line, "a barrier of %u arrivals: expected 1 to 16383", count);
    u64 x = packed({0, count, count, 0});
    memcpy(shared_at(t, at, 8, line), &x, 8);
}

void barrier_invalidate(Thread& t, u32 at, int line) {
    read_barrier(t, shared_at(t, at, 8, line), line);
    memset(shared_at(t, at, 8, line), 0xff, 8);
}

static void change_barrier(const Thread& t, u32 at, u32 arrivals, s32 bytes, int line) {
    BarrierPlace place = place_of(t, at, line);
    Barrier b = read_barrier(t, place.at, line);
    if (arrivals > b.pending) fail(t, line, "%u arrivals at a barrier that expects %u more", arrivals, b.pending);
    b.pending -= arrivals, b.bytes += bytes;
    if (b.bytes >= 1 << 20 || b.bytes < -(1 << 20)) fail(t, line, "a barrier that expects %d bytes: at most 1048575", b.bytes);
    write_barrier(place, b);
}

void barrier_arrive(Thread& t, u32 at, u32 count, int line) { own(t, at, line), change_barrier(t, at, count, 0, line); }
void barrier_expect(Thread& t, u32 at, u32 bytes, int line) { own(t, at, line), change_barrier(t, at, 1, (s32)bytes, line); }
void barrier_arrive_remote(Thread& t, u32 at, u32 count, int line) { change_barrier(t, at, count, 0, line); }

bool barrier_try_wait(Thread& t, u32 at, u32 parity, int line) {
    own(t, at, line);
    BarrierPlace place = place_of(t, at, line);
    if (read_barrier(t, place.at, line).phase != (parity & 1)) return true;
    fiber(t).barrier = place.key;
    wait_for(fiber(t), "a phase of a barrier in shared memory", line);
    return read_barrier(t, place.at, line).phase != (parity & 1);
}

// Barriers of a CTA

static void release_if_complete(CtaBarrier& b, Cta& cta, int line) {
    if (!b.arrived || b.arrived < (b.threads ? b.threads : cta.live)) return;
    std::map<Warp*, u32> lanes;
    for (Fiber* f : b.all) lanes[f->warp] |= 1u << f->lane;
    for (auto& w : lanes)
        if ((w.second & w.first->live) != w.first->live) {
            Fiber& f = *w.first->lanes[__builtin_ctz(w.second)];
            fail(f, line, "a barrier of whole warps, to which only lanes %08x of a warp came", w.second);
        }
    b.result = b.yes;
    std::vector<Fiber*> waiting;
    waiting.swap(b.waiting);
    b.all.clear(), b.arrived = 0, b.yes = 0, b.threads = 0;
    for (Fiber* f : waiting) wake(*f);
}

static CtaBarrier& join(Thread& t, u32 which, u32 threads, bool value, bool waits, int line) {
    if (which >= 16 || threads % 32) fail(t, line, "barrier %u of %u threads: expected one of 16, of whole warps", which, threads);
    aligned(t, line);
    CtaBarrier& b = t.cta->barriers[which];
    if (b.arrived && b.threads != threads) fail(t, line, "barrier %u of %u threads, to which others came as to one of %u", which, threads, b.threads);
    b.threads = threads, b.arrived++, b.yes += value, b.all.push_back(&fiber(t));
    Fiber& f = fiber(t);
    if (waits) b.waiting.push_back(&f), f.warp->runnable &= ~(1u << f.lane), f.waits_for = "a barrier of the CTA", f.waits_at = line;
    release_if_complete(b, *t.cta, line);
    if (waits && !(f.warp->runnable >> f.lane & 1)) give_way();
    return b;
}

void cta_meet(Thread& t, u32 which, u32 threads, int line) { join(t, which, threads, false, true, line); }
void cta_arrive(Thread& t, u32 which, u32 threads, int line) { join(t, which, threads, false, false, line); }
// Nobody overwrites the result before all have read it: who comes again comes after them to the next one.
u32 cta_reduce(Thread& t, Reduction how, u32 which, u32 threads, bool value, int line) {
    u32 all = threads ? threads : t.cta->live;
    bool counted = how == EVERY ? !value : value;
    u32 result = join(t, which, threads, counted, true, line).result;
    (void)all;
    return how == COUNT ? result : how == ANY ? result != 0 : result == 0;
}

static void cluster_complete() {
    if (!machine.cluster_arrived || machine.cluster_arrived < machine.live) return;
    machine.cluster_phase++, machine.cluster_arrived = 0;
    for (Fiber* f : machine.fibers)
        if (f->waits_for && !f->ended && !strcmp(f->waits_for, "the cluster's barrier")) wake(*f);
}

void cluster_arrive(Thread& t, int line) {
    aligned(t, line);
    Fiber& f = fiber(t);
    if (f.arrived) fail(t, line, "a second arrival at the cluster's barrier without a wait");
    f.arrived = true, f.arrived_phase = machine.cluster_phase;
    machine.cluster_arrived++;
    cluster_complete();
}

void cluster_wait(Thread& t, int line) {
    aligned(t, line);
    Fiber& f = fiber(t);
    if (!f.arrived) fail(t, line, "a wait at the cluster's barrier without an arrival");
    while (machine.cluster_phase == f.arrived_phase) wait_for(f, "the cluster's barrier", line);
    f.waits_for = nullptr;
    f.arrived = false;
}

static void ended(Fiber& f) {
    Warp& w = *f.warp;
    Cta& cta = *f.cta;
    if (!w.products.empty()) fail(f, w.products.front().line, "a matrix product that is not waited for before the end");
    u64 end;
    memcpy(&end, f.stack, 8);
    if (end != STACK_END) fail(f, 0, "the emulator's stack of a thread is too small");
    f.ended = true;
    w.live &= ~(1u << f.lane), w.runnable &= ~(1u << f.lane);
    cta.live--, machine.live--;
    if (f.arrived && f.arrived_phase == machine.cluster_phase) machine.cluster_arrived--;
    for (u32 i = 0; i < 32; i++)
        if (w.meetings[i]) try_to_meet(w, Meeting(*w.meetings[i]));
    for (CtaBarrier& b : cta.barriers)
        if (b.arrived && !b.threads) release_if_complete(b, cta, b.all[0]->waits_at);
    cluster_complete();
}

// Asynchronous copies

void fence_async(Thread& t) { fiber(t).fenced = ++machine.clock; }

// What threads stored must be fenced, by them or by whoever lets it be read (or overwritten) asynchronously.
static void check_fenced(const Thread& by, u64 fenced, Cta& cta, u32 offset, u32 bytes, int line) {
    for (u32 i = offset / 16; i <= (offset + bytes - 1) / 16; i++) {
        u64 written = cta.written[i];
        if (!written || fenced > written >> 16) continue;
        Fiber& writer = *cta.warps[(written & 0xffff) / 32]->lanes[written & 31];
        if (writer.fenced > written >> 16) continue;
        fail(by, line, "an asynchronous access to shared offset 0x%x, where thread %u has stored without fence.proxy.async since", i * 16, writer.tid);
    }
}

static void arrive_now(Fiber& f, u32 barrier, int line) { change_barrier(f, barrier, 1, 0, line); }

// Less than a whole copy need not begin where as much would.
static const u8* bytes_at(const Thread& t, u64 from, u32 bytes, int line) {
    global_at(t, from + bytes - 1, 1, line);
    return global_at(t, from, 1, line);
}

static void complete_copy(Fiber& f, size_t i) {
    Copy c = f.copies[i];
    f.copies.erase(f.copies.begin() + i);
    if (c.arrives) return arrive_now(f, c.to, c.line);
    u8 data[16] = {};
    if (c.live_bytes) memcpy(data, bytes_at(f, c.from, c.live_bytes, c.line), c.live_bytes);
    memcpy(stored_at(f, c.to, c.bytes, c.line), data, c.bytes);
}

static void begin_copy(Fiber& f, Copy c) {
    if (f.copies.empty()) machine.copying.push_back(&f);
    f.copies.push_back(c);
}

void copy_small(Thread& t, u32 to, u64 from, u32 bytes, u32 live_bytes, int line) {
    shared_at(t, to, bytes, line);
    if (live_bytes > bytes) fail(t, line, "%u bytes of a copy of %u", live_bytes, bytes);
    if (from & (bytes - 1)) fail(t, line, "a copy of %u bytes from 0x%llx: not aligned", bytes, (unsigned long long)from);
    if (live_bytes) bytes_at(t, from, live_bytes, line);
    begin_copy(fiber(t), {to, bytes, live_bytes, from, fiber(t).groups, line, false});
}

void copies_commit(Thread& t) { fiber(t).groups++; }

static void wait_below(Fiber& f, u32 group) {
    while (true) {
        std::vector<size_t> left;
        for (size_t i = 0; i < f.copies.size(); i++)
            if (!f.copies[i].arrives && (s32)(f.copies[i].group - group) < 0) left.push_back(i);
        if (left.empty()) return;
        complete_copy(f, left[draw((u32)left.size())]);
    }
}
void copies_wait(Thread& t, u32 pending) { wait_below(fiber(t), fiber(t).groups - pending); }
void copies_wait_all(Thread& t) { wait_below(fiber(t), ++fiber(t).groups); }
void copies_arrive(Thread& t, u32 barrier, int line) {
    own(t, barrier, line);
    begin_copy(fiber(t), {barrier, 0, 0, 0, 0, line, true});
}

void copy_bulk(Thread& t, u32 to, u64 from, u32 bytes, u32 barrier, int line) {
    if ((to | from | bytes) & 15 || !bytes) fail(t, line, "a bulk copy of %u bytes from 0x%llx to 0x%x: expected multiples of 16", bytes, (unsigned long long)from, to);
    global_at(t, from, bytes, line);
    cta_at(t, to, bytes, line);
    place_of(t, barrier, line);
    if (to >> RANK_SHIFT != barrier >> RANK_SHIFT) fail(t, line, "a bulk copy to one CTA whose barrier is in another");
    Bulk b = {&fiber(t), to, bytes, barrier, from, {}, line};
    machine.bulk.push_back(b);
}

void store_async(Thread& t, u32 to, const void* data, u32 bytes, u32 barrier, int line) {
    cta_at(t, to, bytes, line);
    place_of(t, barrier, line);
    if (to >> RANK_SHIFT != barrier >> RANK_SHIFT) fail(t, line, "a store to one CTA whose barrier is in another");
    Bulk b = {&fiber(t), to, bytes, barrier, 0, {}, line};
    memcpy(b.data, data, bytes);
    machine.bulk.push_back(b);
}

static void complete_bulk(size_t i) {
    Bulk b = machine.bulk[i];
    machine.bulk.erase(machine.bulk.begin() + i);
    Cta& cta = cta_at(*b.owner, b.to, b.bytes, b.line);
    u32 offset = offset_of(b.to);
    if (b.from) check_fenced(*b.owner, b.owner->fenced, cta, offset, b.bytes, b.line);
    memcpy(cta.shared + offset, b.from ? global_at(*b.owner, b.from, b.bytes, b.line) : b.data, b.bytes);
    if (b.from) std::fill(cta.written.begin() + offset / 16, cta.written.begin() + (offset + b.bytes) / 16, 0);
    change_barrier(*b.owner, b.barrier, 0, -(s32)b.bytes, b.line);
}

// Matrices

static float number(Half kind, u16 x) { return kind == BF16 ? bf16(x) : f16(x); }

struct Multiplied {
    u32* sums;
    const u32 *a, *b;
};

template <Half KIND>
static void act_multiply(Warp&, u32, void** data) {
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
        const Multiplied& m = *(Multiplied*)data[l];
        int g = l / 4, t = l % 4;
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < 2; h++) a[g + i % 2 * 8][i / 2 * 8 + 2 * t + h] = number(KIND, (u16)(m.a[i] >> (16 * h)));
        for (int i = 0; i < 2; i++)
            for (int h = 0; h < 2; h++) b[i * 8 + 2 * t + h][g] = number(KIND, (u16)(m.b[i] >> (16 * h)));
    }
    for (int l = 0; l < 32; l++) {
        const Multiplied& m = *(Multiplied*)data[l];
        for (int i = 0; i < 4; i++) {
            int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            double sum = fp32(m.sums[i]);
            for (int k = 0; k < 16; k++) sum += (double)a[row][k] * b[k][column];
            m.sums[i] = fp32_bits((float)sum);
        }
    }
}

void multiply(Thread& t, Half kind, u32* sums, const u32* a, const u32* b, int line) {
    Multiplied m = {sums, a, b};
    meet_all(t, "mma", line, &m, kind == BF16 ? act_multiply<BF16> : act_multiply<F16>);
}

struct Loaded {
    Thread* thread;
    u32 *to, count, at;
    const u32* from;
    bool transposed, stores;
    int line;
};

static void act_matrices(Warp&, u32, void** data) {
    const Loaded& first = *(Loaded*)data[0];
    for (u32 m = 0; m < first.count; m++) {
        u8* rows[8];
        for (u32 r = 0; r < 8; r++) {
            const Loaded& l = *(Loaded*)data[m * 8 + r];
            rows[r] = first.stores ? stored_at(*l.thread, l.at, 16, l.line) : shared_at(*l.thread, l.at, 16, l.line);
        }
        for (u32 i = 0; i < 32; i++)
            for (u32 h = 0; h < 2; h++) {
                u32 row = i / 4, column = i % 4 * 2 + h;
                if (first.transposed) std::swap(row, column);
                Loaded& l = *(Loaded*)data[i];
                u16 x;
                if (first.stores) {
                    x = (u16)(l.from[m] >> (16 * h));
                    memcpy(rows[row] + 2 * column, &x, 2);
                } else {
                    memcpy(&x, rows[row] + 2 * column, 2);
                    l.to[m] = h ? (l.to[m] & 0xffff) | (u32)x << 16 : x;
                }
            }
    }
}

void load_matrices(Thread& t, u32* to, u32 count, bool transposed, u32 from, int line) {
    Loaded l = {&t, to, count, from, nullptr, transposed, false, line};
    meet_all(t, "ldmatrix", line, &l, act_matrices);
}

void store_matrices(Thread& t, const u32* from, u32 count, bool transposed, u32 to, int line) {
    Loaded l = {&t, nullptr, count, to, from, transposed, true, line};
    meet_all(t, "stmatrix", line, &l, act_matrices);
}

static void act_transpose(Warp&, u32, void** data) {
    u16 x[8][8];
    for (u32 i = 0; i < 32; i++)
        for (u32 h = 0; h < 2; h++) x[i / 4][i % 4 * 2 + h] = (u16)(*(u32*)data[i] >> (16 * h));
    for (u32 i = 0; i < 32; i++) *(u32*)data[i] = pair(x[i % 4 * 2][i / 4], x[i % 4 * 2 + 1][i / 4]);
}

u32 transpose_matrix(Thread& t, u32 x, int line) {
    meet_all(t, "movmatrix", line, &x, act_transpose);
    return x;
}

struct Issued {
    Fiber* thread;
    u32* const* sums;
    const u32* a;
    const Product* product;
};

static void note_product(Warp& w, int line);

static void act_issue(Warp& w, u32, void** data) {
    const Issued& first = *(Issued*)data[0];
    if (w.products.empty()) machine.multiplying.push_back(&w);
    w.products.push_back(*first.product);
    Product& p = w.products.back();
    p.group = w.product_groups;
    u32 each = p.columns / 2;
    p.sums.resize(32 * each);
    for (u32 l = 0; l < 32; l++) {
        const Issued& i = *(Issued*)data[l];
        const Product& q = *i.product;
        if (q.a_at != p.a_at || q.b_at != p.b_at || q.add != p.add) fail(*i.thread, p.line, "a matrix product whose operands are not the same in all lanes");
        std::copy(i.sums, i.sums + each, p.sums.begin() + l * each);
        if (p.a_in_registers) std::copy(i.a, i.a + 4, p.a[l]);
    }
    note_product(w, p.line);
}

// The four warps of a group have the same products.
static void note_product(Warp& w, int line) {
    std::vector<std::vector<int>>& groups = w.cta->product_lines;
    groups.resize(w.cta->warps.size());
    std::vector<int>&mine = groups[w.index], &other = groups[w.index / 4 * 4 + (w.index + 1) % 4];
    mine.push_back(line);
    size_t n = mine.size() - 1;
    if (n < other.size() && other[n] != line) fail(*w.lanes[0], line, "a matrix product of a warp group of which another warp is at PTX line %d", other[n]);
}

// The byte offset of 16 bytes, eight numbers along the row, of a matrix operand; `row` is along M or N, or along K where it is
// turned.
struct Operand {
    u32 start, leading, stride, span;  // span: bytes of a row that are swizzled, 16 where none are
    bool turned;

    Operand(const Thread& t, u64 said, bool turned, int line) : turned(turned) {
        start = (u32)(said & 0x3fff) << 4, leading = (u32)(said >> 16 & 0x3fff) << 4, stride = (u32)(said >> 32 & 0x3fff) << 4;
        const u32 spans[4] = {16, 128, 64, 32};
        span = spans[said >> 62];
        if (said >> 49 & 7) fail(t, line, "a matrix operand with a base offset, which this emulator does not know");
        if (turned && span == 16) fail(t, line, "a turned matrix operand without swizzle, which this emulator does not know");
    }

    // Of columns 8 * `eight` to 8 * `eight` + 7.
    u32 at(u32 row, u32 eight) const {
        u32 place = start + row % 8 * span + row / 8 * stride;
        if (turned) place += eight * 16 / span * leading + eight * 16 % span;
        else place += span == 16 ? eight * leading : eight * 16;
        return place ^ (place >> 7 & (span / 16 - 1)) << 4;
    }
};

static void take(const Product& p, Warp& w, const Operand& from, u32 first, u32 count, double* to, u32 row_step, u32 k_step, int sign) {
    Fiber& by = *w.lanes[0];
    u32 rows = from.turned ? 16 : count, eights = (from.turned ? count : 16) / 8;
    for (u32 r = 0; r < rows; r++)
        for (u32 e = 0; e < eights; e++) {
            u32 at = from.turned ? from.at(r, first / 8 + e) : from.at(first + r, e);
            u32 offset = at - RESERVED;
            if (at < RESERVED || offset + 16 > by.shared_bytes) fail(by, p.line, "a matrix operand at shared offset 0x%x: expected less than 0x%x", offset, by.shared_bytes);
            check_fenced(by, by.fenced, *w.cta, offset, 16, p.line);
            u16 eight[8];
            memcpy(eight, w.cta->shared + offset, 16);
            for (u32 i = 0; i < 8; i++) {
                u32 row = from.turned ? e * 8 + i : r, k = from.turned ? r : e * 8 + i;
                to[row * row_step + k * k_step] = sign * (double)number(p.kind, eight[i]);
            }
        }
}

static void complete_product(Warp& w) {
    Product p = std::move(w.products.front());
    w.products.pop_front();
    static double a[16 * 16], b[16 * 256], sums[256];
    const u32 n = p.columns, each = n / 2;
    take(p, w, Operand(*w.lanes[0], p.b_at, p.b_turned, p.line), 0, n, b, 1, n, p.b_sign);
    if (p.a_in_registers) {
        for (u32 l = 0; l < 32; l++)
            for (u32 i = 0; i < 4; i++)
                for (u32 h = 0; h < 2; h++)
                    a[(l / 4 + i % 2 * 8) * 16 + i / 2 * 8 + l % 4 * 2 + h] = p.a_sign * (double)number(p.kind, (u16)(p.a[l][i] >> (16 * h)));
    } else {
        take(p, w, Operand(*w.lanes[0], p.a_at, p.a_turned, p.line), w.index % 4 * 16, 16, a, 16, 1, p.a_sign);
    }
    for (u32 row = 0; row < 16; row++) {
        for (u32 c = 0; c < n; c++) {
            u32* sum = p.sums[(row % 8 * 4 + c % 8 / 2) * each + c / 8 * 4 + row / 8 * 2 + c % 2];
            sums[c] = p.add ? fp32(*sum) : 0;
        }
        for (u32 k = 0; k < 16; k++)
            for (u32 c = 0; c < n; c++) sums[c] += a[row * 16 + k] * b[k * n + c];
        for (u32 c = 0; c < n; c++) {
            u32* sum = p.sums[(row % 8 * 4 + c % 8 / 2) * each + c / 8 * 4 + row / 8 * 2 + c % 2];
            *sum = fp32_bits((float)sums[c]);
        }
    }
}

void multiply_async(Thread& t, Half kind, u32 columns, u32* const* sums, const u32* a, u64 a_at, u64 b_at, bool add, int a_sign, int b_sign,
                    bool a_turned, bool b_turned, int line) {
    Product p = {kind, columns, {}, {}, a != nullptr, add, a_turned, b_turned, a_at, b_at, a_sign, b_sign, line, 0};
    Issued i = {&fiber(t), sums, a, &p};
    meet_all(t, "wgmma", line, &i, act_issue);
}

void matrices_fence(Thread& t, int line) { aligned(t, line); }

static void act_commit(Warp& w, u32, void**) { w.product_groups++; }
void matrices_commit(Thread& t, int line) { meet_all(t, "wgmma.commit_group", line, nullptr, act_commit); }

static void act_wait(Warp& w, u32, void** data) {
    u32 below = w.product_groups - *(u32*)data[0];
    while (!w.products.empty() && (s32)(w.products.front().group - below) < 0) complete_product(w);
}
void matrices_wait(Thread& t, u32 pending, int line) { meet_all(t, "wgmma.wait_group", line, &pending, act_wait); }

// The order of everything

// Something that was begun, at random; false where there is nothing.
static bool complete_something() {
    auto idle_fiber = [](Fiber* f) { return f->copies.empty(); };
    auto idle_warp = [](Warp* w) { return w->products.empty(); };
    auto& copying = machine.copying;
    auto& multiplying = machine.multiplying;
    copying.erase(std::remove_if(copying.begin(), copying.end(), idle_fiber), copying.end());
    multiplying.erase(std::remove_if(multiplying.begin(), multiplying.end(), idle_warp), multiplying.end());
    size_t all = machine.bulk.size() + copying.size() + multiplying.size();
    if (!all) return false;
    size_t i = draw((u32)all);
    if (i < machine.bulk.size()) {
        complete_bulk(i);
    } else if ((i -= machine.bulk.size()) < copying.size()) {
        Fiber& f = *copying[i];
        size_t which = draw((u32)f.copies.size());
        complete_copy(f, f.copies[which].arrives ? 0 : which);  // an arrival comes after all before it
    } else {
        complete_product(*multiplying[i - copying.size()]);
    }
    return true;
}

// One warp runs ahead until it waits or, at times, is overtaken: so it can be far ahead of others.
static void run_cluster() {
    const u32 chances[] = {0, 16, 128, 256};  // of 256, that something begun completes in a round
    u32 chance = chances[draw(4)];
    while (machine.live) {
        if (draw(256) < chance) complete_something();
        Warp* next = nullptr;
        for (Warp* w : machine.warps)
            if (w->runnable && (!next || w->priority > next->priority)) next = w;
        if (!next) {
            if (!complete_something()) fail_stuck();
            continue;
        }
        u32 first = draw(32), up = draw(2);
        for (u32 i = 0; i < 32; i++) {
            u32 lane = (first + (up ? i : 32 - i)) % 32;
            if (next->runnable >> lane & 1) run(*next->lanes[lane]);
        }
        if (draw(64) == 0) next->priority = draw(1u << 30);
    }
    while (!machine.bulk.empty()) complete_bulk(0);
}

static void clear() {
    for (Fiber* f : machine.fibers) delete f;
    for (Warp* w : machine.warps) delete w;
    for (Cta* c : machine.ctas) delete c;
    machine.fibers.clear(), machine.warps.clear(), machine.ctas.clear();
    machine.bulk.clear(), machine.copying.clear(), machine.multiplying.clear();
}

static void make_cluster(const Launch& launch, u32 x, u32 y, u32 z) {
    clear();
    machine.live = 0, machine.cluster_arrived = 0, machine.cluster_phase = 0;
    u32 warps = (launch.threads() + 31) / 32, bytes = (launch.shared_bytes + 15) / 16 * 16;
    for (u32 rank = 0; rank < launch.ranks; rank++) {
        Cta* cta = new Cta();
        machine.ctas.push_back(cta);
        cta->rank = rank, cta->live = launch.threads();
        cta->room.assign(bytes + 16, 0xff);
        cta->shared = cta->room.data() + (16 - (u64)cta->room.data() % 16) % 16;
        cta->written.assign(bytes / 16 + 1, 0);
        for (u32 i = 0; i < warps; i++) {
            Warp* w = new Warp();
            cta->warps.push_back(w), machine.warps.push_back(w);
            w->cta = cta, w->index = i, w->priority = draw(1u << 30);
        }
        for (u32 i = 0; i < launch.threads(); i++) {
            Fiber* f = new Fiber();
            f->cta = cta, f->warp = cta->warps[i / 32], f->tid = i, f->lane = i % 32;
            f->ctaid[0] = x * launch.ranks + rank, f->ctaid[1] = y, f->ctaid[2] = z;
            f->nctaid[0] = launch.grid[0] * launch.ranks, f->nctaid[1] = launch.grid[1], f->nctaid[2] = launch.grid[2];
            f->ntid = launch.threads(), memcpy(f->block, launch.block, sizeof f->block);
            f->cluster_rank = rank, f->cluster_size = launch.ranks;
            f->shared_first = (rank << RANK_SHIFT) + RESERVED, f->shared_bytes = launch.shared_bytes;
            f->shared = cta->shared, f->written = cta->written.data(), f->clock = &machine.clock;
            f->parameters = launch.parameters, f->waited = false;
            f->stack = machine.stacks + machine.fibers.size() * STACK;
            memcpy(f->stack, &STACK_END, 8);
            f->warp->lanes[f->lane] = f;
            f->warp->live |= 1u << f->lane, f->warp->runnable |= 1u << f->lane;
            machine.fibers.push_back(f);
            machine.live++;
        }
    }
}

// null, or what is wrong.
extern "C" const char* emulate(const Launch* launch) {
    machine.launch = launch;
    machine.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    machine.clock = 1;
    machine.last_begin = machine.last_end = 0;
    machine.stack_bytes = (size_t)launch->ranks * launch->threads() * STACK;
    machine.stacks = (u8*)mmap(nullptr, machine.stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (machine.stacks == MAP_FAILED) return "no memory for the threads' stacks";
    bool failed = _setjmp(machine.failure);
    if (!failed) {
        std::vector<u64> order;
        for (u64 i = 0; i < (u64)launch->grid[0] * launch->grid[1] * launch->grid[2]; i++) order.push_back(i);
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw((u32)i)]);
        for (u64 i : order) {
            u32 x = (u32)(i % launch->grid[0]), y = (u32)(i / launch->grid[0] % launch->grid[1]), z = (u32)(i / launch->grid[0] / launch->grid[1]);
            make_cluster(*launch, x, y, z);
            run_cluster();
        }
    }
    clear();
    munmap(machine.stacks, machine.stack_bytes);
    machine.launch = nullptr;
    return failed ? machine.message.c_str() : nullptr;
}
