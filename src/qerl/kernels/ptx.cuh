// Instructions that CUDA C++ has no name for without CUDA's headers, one function each, and the integer types.
//
// portable.cu has no other assembly: tests/kernels/on_cpu has the same functions for a CPU, and runs it there.
#ifndef QERL_PTX
#define QERL_PTX

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using bf16 = uint16_t;  // its bits

// Two bf16 products, subnormal numbers kept.
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));  // + (-0, -0): no change
#endif
    return product;
}

// The lower half of `pair` twice, and the upper. (Not byte permutations: the assembler can drop these moves, and let
// the multiplications that follow choose the half.)
__device__ __forceinline__ void spread_halves(uint32_t pair, uint32_t& lower, uint32_t& upper) {
    asm("{.reg .b16 l, u; mov.b32 {l, u}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {u, u};}"
        : "=r"(lower), "=r"(upper)
        : "r"(pair));
}

__device__ __forceinline__ bf16 round_bf16(float v) {
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(v));
    return rounded;
}

// d += a b: 16 x 16 by 16 x 8, bf16, sums in float32.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Memory that is read once, and by this block alone. Loads are volatile: they start where they stand.
__device__ __forceinline__ uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

__device__ __forceinline__ uint32_t load_once_16_bits(const void* at) {
    uint16_t v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// Memory that no kernel writes while this one runs.
__device__ __forceinline__ uint4 load(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// Starts to bring memory to the second-level cache, where there is an instruction for it (in whole units of 16 bytes). It
// changes what nobody sees but the clock, so it waits for nothing, whoever may still write there.
__device__ __forceinline__ void bring_near(const void* at, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    const uint64_t first = reinterpret_cast<uint64_t>(at) & ~15ull;
    const uint32_t whole = (static_cast<uint32_t>(reinterpret_cast<uint64_t>(at) - first) + bytes + 15) & ~15u;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first), "r"(whole));
#endif
}

// What a kernel before this one has written, perhaps while this one was there already: ordered behind waits for it, which
// the loads above are not.
__device__ __forceinline__ uint4 load_fresh(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// What another block has written: not from the first-level cache.
__device__ __forceinline__ float4 load_of_other_block(const float4* at) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

// What another block has counted; what it wrote before that is there, too.
__device__ __forceinline__ uint32_t load_of_other_block(const uint32_t* at) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// Counts for other blocks: who sees it sees what this thread wrote, or had seen, before.
__device__ __forceinline__ void add_release(uint32_t* to, uint32_t n) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(n) : "memory");
}

// By one thread of a block of a kernel that has started before the one ahead of it was over: waits until `publishers` of
// that one's blocks have counted in x_ready[0].
__device__ __forceinline__ void wait_for_publishers(const uint32_t* x_ready, uint32_t publishers) {
    while (load_of_other_block(x_ready) != publishers) {}
}

// Behind that: the last block that comes here takes the count back.
__device__ __forceinline__ void take_count_back(uint32_t* x_ready) {
    if (atomicAdd(x_ready + 1, 1) == gridDim.x - 1) {
        x_ready[0] = x_ready[1] = 0;
        __threadfence();
    }
}

// The address that copy_async takes.
__device__ __forceinline__ uint32_t shared_address(const void* at) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Starts to copy 16 bytes to shared memory, zeros if not `valid`.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the latest `RUNNING` of this thread.
template <int RUNNING>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(RUNNING) : "memory");
}

// --- Barriers in shared memory, by address ---

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Arrives when all that this thread has started to copy (copy_async) is there.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
        "again: mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Programmatic dependent launch, where there is such a thing: all before this line overlaps with the previous kernel of
// the stream.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the stream may start.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif
