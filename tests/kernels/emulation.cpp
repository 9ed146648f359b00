// Runs a kernel's own source on a CPU, thread by thread: what cannot be seen without a GPU is its speed, not its result.
//
// CUDA's names and the functions of kernels/ptx.cuh are defined here, for the CPU; then the source is included. The
// threads of a block are fibers that give way at barriers and at mma, whose operands it collects from the 32 lanes by
// the instruction's own definition (PTX ISA, mma.m16n8k16). What may happen does: asynchronous copies arrive no earlier
// than they are waited for, shared memory starts as NaN, one warp goes on only when no other can (block i: warp i), and
// blocks run one after another in either order.
//
//     g++ -shared -fPIC -std=c++17 -DSOURCE='"portable.cu"' -I kernels -I kernels/w4a16 ... emulation.cpp
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define QERL_PTX
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(n)
#define __launch_bounds__(...)

using bf16 = uint16_t;
struct Index { int x; } threadIdx, blockIdx, gridDim;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float __uint_as_float(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
inline uint32_t atomicAdd(uint32_t* at, uint32_t v) { return std::exchange(*at, *at + v); }
inline void __threadfence() {}

alignas(16) uint8_t shared[99 * 1024];

// --- Threads ---

struct Copy { uint32_t to; const void* from; bool valid; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    std::vector<std::vector<Copy>> copies{1};  // groups; the last is still open
    int multiplications = 0;
    bool done = false;
};
struct Warp {
    uint32_t a[2][32][4], b[2][32][2];
    int posted[2] = {0, 0};
};
std::vector<Fiber> fibers;
std::vector<Warp> warps;
ucontext_t scheduler;
int arrived, generation;
bool moved;  // somebody got further since the scheduler last looked

void give_way() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

void __syncthreads() {
    const int mine = generation;
    moved = true;
    if (++arrived == int(fibers.size())) arrived = 0, ++generation;
    while (mine == generation) give_way();
}

// --- What ptx.cuh has ---

inline float value(uint32_t bits) { return __uint_as_float(bits << 16); }
inline bf16 round_bf16(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    return std::isnan(v) ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t multiply(uint32_t a, uint32_t b) {
    const float upper = value(a >> 16) * value(b >> 16), lower = value(a & 0xFFFF) * value(b & 0xFFFF);
    return uint32_t(round_bf16(upper)) << 16 | round_bf16(lower);
}
inline void spread_halves(uint32_t pair, uint32_t& lower, uint32_t& upper) {
    lower = (pair & 0xFFFF) * 0x10001, upper = (pair >> 16) * 0x10001;
}

void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Warp& warp = warps[threadIdx.x / 32];
    const int lane = threadIdx.x % 32, turn = fibers[threadIdx.x].multiplications++, now = turn % 2;
    memcpy(warp.a[now][lane], a, 16);
    warp.b[now][lane][0] = b0, warp.b[now][lane][1] = b1;
    moved = true;
    for (++warp.posted[now]; warp.posted[now] < 32 * (turn / 2 + 1);) give_way();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t pair_a = warp.a[now][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const uint32_t pair_b = warp.b[now][column * 4 + k % 8 / 2][k / 8];
            d[e] += value(pair_a >> k % 2 * 16 & 0xFFFF) * value(pair_b >> k % 2 * 16 & 0xFFFF);
        }
    }
}

template <typename T>
T read(const void* at) { T v; memcpy(&v, at, sizeof v); return v; }
inline uint4 load(const void* at) { return read<uint4>(at); }
inline uint4 load_once(const void* at) { return read<uint4>(at); }
inline uint32_t load_once_16_bits(const void* at) { return read<uint16_t>(at); }
inline float4 load_of_other_block(const float4* at) { return *at; }
inline uint32_t shared_address(const void* at) { return static_cast<const uint8_t*>(at) - shared; }
inline void copy_async(uint32_t to, const void* from, bool valid) {
    fibers[threadIdx.x].copies.back().push_back({to, from, valid});
}
inline void commit_copies() { fibers[threadIdx.x].copies.emplace_back(); }
template <int RUNNING>
void wait_for_copies() {
    auto& groups = fibers[threadIdx.x].copies;
    for (; int(groups.size()) - 1 > RUNNING; groups.erase(groups.begin()))
        for (const Copy& c : groups.front())
            c.valid ? memcpy(shared + c.to, c.from, 16) : memset(shared + c.to, 0, 16);
}
inline void wait_for_previous_kernel() {}

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
        fibers[threadIdx.x].done = moved = true;
        give_way();
    }

    static void run_block(int threads) {
        fibers = std::vector<Fiber>(threads);
        warps = std::vector<Warp>(threads / 32);
        arrived = 0;
        memset(shared, 0xFF, sizeof shared);
        for (Fiber& f : fibers) {
            getcontext(&f.context);
            f.context.uc_stack = {f.stack.data(), 0, f.stack.size()};
            makecontext(&f.context, enter, 0);
        }
    }

    // Every thread that can go on, once; of the lazy warp, or of the others. False where nobody got further.
    static bool turn(int lazy_warp, bool lazy) {
        moved = false;
        for (threadIdx.x = 0; threadIdx.x < int(fibers.size()); ++threadIdx.x) {
            Fiber& f = fibers[threadIdx.x];
            if (!f.done && (threadIdx.x / 32 == lazy_warp) == lazy) swapcontext(&scheduler, &f.context);
        }
        return moved;
    }

    // False where threads wait for others that never come.
    static bool finish_block(int lazy_warp) {
        while (turn(lazy_warp, false) || turn(lazy_warp, true)) {}
        for (const Fiber& f : fibers)
            if (!f.done) return false;
        return true;
    }
};

// 0, or 1 after a deadlock. `args`: the address of each argument, as for cuLaunchKernel.
template <typename... Args>
int run(void (*kernel)(Args...), int blocks, int threads, bool backwards, void** args) {
    using L = Launch<Args...>;
    L::kernel = kernel, L::args = args;
    gridDim.x = blocks;
    for (int i = 0; i < blocks; ++i) {
        blockIdx.x = backwards ? blocks - 1 - i : i;
        L::run_block(threads);
        if (!L::finish_block(i % (threads / 32))) return 1;
    }
    return 0;
}

extern "C" int run_adapter_input(int blocks, int threads, bool backwards, void** args) {
    return run(adapter_input, blocks, threads, backwards, args);
}

extern "C" int run_w4a16(int blocks, int threads, bool backwards, void** args) {
    return run(w4a16, blocks, threads, backwards, args);
}
