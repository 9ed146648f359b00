// Runs a kernel's own source on a CPU, thread by thread: what cannot be seen without a GPU is its speed, not its result.
//
// CUDA's names and the functions of kernels/ptx.cuh, one for each instruction, are defined here for the CPU, by the PTX
// ISA's definitions (those of w4a16/hopper.cuh in the file of that name beside this one); then the source is included.
// The threads of a block are fibers that give way where they wait for others. Blocks run one after another in either
// order, those of a cluster in turns. What may happen does:
//
//   shared memory starts as NaN, and ends so with its block
//   one warp goes on only when no other can (block i: warp i)
//   copies arrive late: those of cp.async when they are waited for, or nobody can go on without; bulk copies when nobody
//   can go on without, the last one first (odd blocks), or else at once (even blocks)
//   wgmma reads its operands, registers too, and writes its result when it is waited for
//
//     g++ -shared -fPIC -std=c++17 -DSOURCE='"portable.cu"' -DEXPORTS='RUN(w4a16)' -DDYNAMIC=shared ... emulation.cpp
//
// DYNAMIC is the source's name for its dynamic shared memory, declared there as EXTERN_SHARED for `extern __shared__`.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define QERL_PTX
#define __device__
#define __global__
#define __shared__ static __attribute__((section("block_memory")))
#define EXTERN_SHARED extern
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)
#define __maxnreg__(...)

using bf16 = uint16_t;
struct Index { int x; } threadIdx, blockIdx, gridDim;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __uint_as_float(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline void add_release(uint32_t* to, uint32_t n) { *to += n; }
template <typename T>
T atomicAdd(T* at, int v) { return std::exchange(*at, *at + v); }
inline void __threadfence() {}

// --- Threads ---

struct Copy { uint32_t to; const void* from; bool valid; };
struct Multiplication { int n; float* d; const uint32_t* a; uint32_t tile; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    std::vector<std::vector<Copy>> copies{1};                   // groups; the last is still open
    std::vector<std::vector<Multiplication>> multiplications{1};  // likewise
    int exchanges = 0;
    bool done = false;
};
struct Meeting { int arrived = 0, generation = 0; };
struct Operands { uint32_t v[6]; };
struct Warp {
    Meeting meeting;
    Operands operands[2][32];
};
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<std::function<void()>> late;  // what happens when no thread can go on
    std::vector<uint8_t> memory;  // while another block of the cluster runs
    Meeting all, consumers;
};

#pragma GCC visibility push(hidden)
extern uint8_t __start_block_memory[], __stop_block_memory[];  // the linker's, around all __shared__ variables
#pragma GCC visibility pop
alignas(1024) __attribute__((section("block_memory"))) uint8_t DYNAMIC[228 * 1024];

std::vector<Block> cluster;
Block* block;
Meeting cluster_meeting;
ucontext_t scheduler;
bool moved;  // somebody got further since the scheduler last looked

Fiber& self() { return block->fibers[threadIdx.x]; }
Warp& own_warp() { return block->warps[threadIdx.x / 32]; }
void give_way() { swapcontext(&self().context, &scheduler); }

void meet(Meeting& m, int threads) {
    const int mine = m.generation;
    moved = true;
    if (++m.arrived == threads) m.arrived = 0, ++m.generation;
    while (mine == m.generation) give_way();
}
inline void __syncthreads() { meet(block->all, block->fibers.size()); }
inline void __syncwarp() { meet(own_warp().meeting, 32); }

// What each lane of the warp brings, for all to see.
const Operands* exchange(Operands mine) {
    Operands* all = own_warp().operands[self().exchanges++ % 2];
    all[threadIdx.x % 32] = mine;
    __syncwarp();
    return all;
}
inline uint32_t __shfl_sync(uint32_t, uint32_t v, int lane) { return exchange({v})[lane].v[0]; }
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t v, int mask) { return exchange({v})[threadIdx.x % 32 ^ mask].v[0]; }

// --- What ptx.cuh has ---

inline float value(uint32_t bits) { return __uint_as_float(bits << 16); }
inline float value(uint32_t pair, int half) { return value(pair >> 16 * half & 0xFFFF); }
inline bf16 round_bf16(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return std::isnan(v) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) { return uint32_t(round_bf16(high)) << 16 | round_bf16(low); }
inline uint32_t multiply(uint32_t a, uint32_t b) {
    return pack_bf16(value(a, 0) * value(b, 0), value(a, 1) * value(b, 1));
}
inline void spread_halves(uint32_t pair, uint32_t& lower, uint32_t& upper) {
    lower = (pair & 0xFFFF) * 0x10001, upper = (pair >> 16) * 0x10001;
}

void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = threadIdx.x % 32;
    const Operands* of = exchange({a[0], a[1], a[2], a[3], b0, b1});
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t pair_a = of[row % 8 * 4 + k % 8 / 2].v[row / 8 + k / 8 * 2];
            const uint32_t pair_b = of[column * 4 + k % 8 / 2].v[4 + k / 8];
            d[e] += value(pair_a, k % 2) * value(pair_b, k % 2);
        }
    }
}

template <typename T>
T read(const void* at) { T v; memcpy(&v, at, sizeof v); return v; }
inline uint4 load(const void* at) { return read<uint4>(at); }
inline uint4 load_fresh(const void* at) { return read<uint4>(at); }
inline uint4 load_once(const void* at) { return read<uint4>(at); }
std::vector<std::pair<const void*, uint32_t>> brought_near;  // emulation.py asks whose it is
inline void bring_near(const void* at, uint32_t bytes) { brought_near.emplace_back(at, bytes); }
extern "C" bool take_brought_near(const void** at, uint32_t* bytes) {
    if (brought_near.empty()) return false;
    std::tie(*at, *bytes) = brought_near.back();
    brought_near.pop_back();
    return true;
}
inline uint32_t load_once_16_bits(const void* at) { return read<uint16_t>(at); }
inline float4 load_of_other_block(const float4* at) { return *at; }
inline uint32_t load_of_other_block(const uint32_t* at) { return *at; }
inline void wait_for_publishers(const uint32_t* x_ready, uint32_t publishers) {
    while (*x_ready != publishers) give_way();
}
inline void take_count_back(uint32_t* x_ready) {
    if (++x_ready[1] == uint32_t(gridDim.x)) x_ready[0] = x_ready[1] = 0;
}
inline uint32_t shared_address(const void* at) { return static_cast<const uint8_t*>(at) - __start_block_memory; }
inline void copy_async(uint32_t to, const void* from, bool valid) { self().copies.back().push_back({to, from, valid}); }
inline void commit_copies() { self().copies.emplace_back(); }
inline void deliver(const std::vector<Copy>& copies) {
    for (const Copy& c : copies)
        c.valid ? memcpy(__start_block_memory + c.to, c.from, 16) : memset(__start_block_memory + c.to, 0, 16);
}
template <int RUNNING>
void wait_for_copies() {
    auto& groups = self().copies;
    for (; int(groups.size()) - 1 > RUNNING; groups.erase(groups.begin())) deliver(groups.front());
}
struct Barrier {
    uint16_t phase : 1, arrivals : 15;
    int16_t missing;
    int32_t bytes;

    void settle() {
        moved = true;
        if (missing == 0 && bytes == 0) phase ^= 1, missing = arrivals;
    }
};
static_assert(sizeof(Barrier) == 8, "an mbarrier object");
inline Barrier& barrier_at(uint32_t address) { return *reinterpret_cast<Barrier*>(__start_block_memory + address); }
inline void barrier_init(uint32_t barrier, int arrivals) {
    barrier_at(barrier) = {0, uint16_t(arrivals), int16_t(arrivals), 0};
}
inline void barrier_wait(uint32_t barrier, int phase) {
    while (barrier_at(barrier).phase == phase) give_way();
}
inline void arrive_after_copies(uint32_t barrier) {
    block->late.push_back([=, copies = std::exchange(self().copies.back(), {})] {
        deliver(copies);
        Barrier& b = barrier_at(barrier);
        --b.missing, b.settle();
    });
}
inline void wait_for_previous_kernel() {}
inline void start_next_kernel() {}

// --- The kernel ---

#include SOURCE

template <typename... Args>
struct Launch {
    static inline void (*kernel)(Args...);
    static inline void** args;

    template <size_t... I>
    static void call(std::index_sequence<I...>) { kernel(*static_cast<std::remove_reference_t<Args>*>(args[I])...); }

    static void enter() {
        call(std::index_sequence_for<Args...>{});
        self().done = moved = true;
        give_way();
    }
};

// Every thread that can go on, once; of the lazy warp, or of the others. False where nobody got further.
bool turn(int lazy_warp, bool lazy) {
    moved = false;
    for (threadIdx.x = 0; threadIdx.x < int(block->fibers.size()); ++threadIdx.x)
        if (!self().done && (threadIdx.x / 32 == lazy_warp) == lazy) swapcontext(&scheduler, &self().context);
    return moved;
}

bool late() {
    if (block->late.empty()) return false;
    block->late.back()();
    block->late.pop_back();
    return true;
}

// The current block, as far as it gets. False where that is nowhere.
bool go_on(int lazy_warp) {
    bool some = false;
    while (turn(lazy_warp, false) || late() || turn(lazy_warp, true)) some = true;
    return some;
}

bool is_done(const Block& b) {
    return std::all_of(b.fibers.begin(), b.fibers.end(), [](const Fiber& f) { return f.done; });
}

// False where threads wait for others that never come.
bool run_cluster(int first, int blocks, int threads, void (*enter)()) {
    const int bytes = __stop_block_memory - __start_block_memory;
    cluster = std::vector<Block>(blocks);
    cluster_meeting = {};
    for (Block& b : cluster) {
        b.fibers = std::vector<Fiber>(threads);
        b.warps = std::vector<Warp>(threads / 32);
        b.memory = std::vector<uint8_t>(bytes, 0xFF);
        for (Fiber& f : b.fibers) {
            getcontext(&f.context);
            f.context.uc_stack = {f.stack.data(), 0, f.stack.size()};
            makecontext(&f.context, enter, 0);
        }
    }
    for (bool some = true; some;) {
        some = false;
        for (int i = 0; i < blocks; ++i) {
            block = &cluster[i], blockIdx.x = first + i;
            memcpy(__start_block_memory, block->memory.data(), bytes);
            some |= go_on(blockIdx.x % (threads / 32));
            memcpy(block->memory.data(), __start_block_memory, bytes);
            if (is_done(*block)) memset(block->memory.data(), 0xFF, bytes);
        }
    }
    return std::all_of(cluster.begin(), cluster.end(), is_done);
}

// 0; 1 after a deadlock. `args`: the address of each argument, as for cuLaunchKernel.
template <typename... Args>
int run(void (*kernel)(Args...), int blocks, int threads, int cluster_size, bool backwards, void** args) {
    using L = Launch<Args...>;
    L::kernel = kernel, L::args = args;
    gridDim.x = blocks;
    for (int i = 0; i < blocks; i += cluster_size)
        if (!run_cluster(backwards ? blocks - cluster_size - i : i, cluster_size, threads, L::enter)) return 1;
    return 0;
}

#define RUN(name)                                                                                              \
    extern "C" int run_##name(int blocks, int threads, int cluster_size, bool backwards, void** args) { \
        return run(name, blocks, threads, cluster_size, backwards, args);                              \
    }
EXPORTS
