// The instructions of sm_90 that hopper.cu and prepare.cu use, a function each. Shared memory is given by address.
#pragma once
#include "ptx.cuh"

// --- Global memory that bulk copies read -----------------------------------------------------------------------------

// What this thread wrote to global memory is there for bulk copies of whoever is told so; who is told passes it on.
__device__ __forceinline__ void publish_for_copies() {
    __threadfence();
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void accept_for_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// --- More of barriers in shared memory, and the copies that complete on them -----------------------------------------

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// --- Across the blocks of a cluster: the same place in the shared memory of block number `block` ---------------------

// All threads of the cluster that have not ended.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float load_float_from_block(uint32_t from, int block) {
    float v;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.f32 %0, [there];\n"
        "}"
        : "=f"(v)
        : "r"(from), "r"(block));
    return v;
}

__device__ __forceinline__ float4 load_from_block(uint32_t from, int block) {
    float4 v;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n"
        "}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(from), "r"(block));
    return v;
}

// --- Shared memory ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
    return v;
}

__device__ __forceinline__ uint32_t load_shared_2(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
    return v;
}

__device__ __forceinline__ void store_shared_16(uint32_t to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}

// --- Warpgroups ------------------------------------------------------------------------------------------------------

template <int COUNT>
__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// Registers: given back by the warpgroup that copies, taken by those that compute.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The lower half of the descriptor of a K-major tile at `address`: rows of 128 bytes, swizzled, groups of eight rows
// 1,024 bytes apart (which the upper half, 0x40000040, says). A step of 16 bytes adds 1.
__device__ __forceinline__ uint32_t matrix(uint32_t address) { return address >> 4 | 1 << 16; }

// d[64 rows, N tokens] += a[64, 16] (registers) times 16 columns of a tile in shared memory.
template <int N>
__device__ __forceinline__ void wgmma(float* d, const uint32_t* a, uint32_t tile);

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define THIRTY_TWO(i) SIXTEEN(i), SIXTEEN(i + 16)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// Operands behind the N / 2 numbers of d: a in A0 .. A3, the tile.
#define WGMMA(N, NAMES, D, A0, A1, A2, A3, TILE)                                                    \
    template <>                                                                                     \
    __device__ __forceinline__ void wgmma<N>(float* d, const uint32_t* a, uint32_t tile) {          \
        asm volatile(                                                                               \
            "{\n"                                                                                   \
            ".reg .b64 tile;\n"                                                                     \
            "mov.b64 tile, {%" #TILE ", 0x40000040};\n"                                             \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, "                \
            "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, tile, 1, 1, 1, 0;\n"                         \
            "}"                                                                                     \
            : D                                                                                     \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(tile));                               \
    }
#define SIXTY_FOUR THIRTY_TWO(0), THIRTY_TWO(32)
WGMMA(16, NAMES_8, EIGHT(0), 8, 9, 10, 11, 12)
WGMMA(32, NAMES_16, SIXTEEN(0), 16, 17, 18, 19, 20)
WGMMA(64, NAMES_32, THIRTY_TWO(0), 32, 33, 34, 35, 36)
WGMMA(128, NAMES_64, SIXTY_FOUR, 64, 65, 66, 67, 68)

// --- Results ---------------------------------------------------------------------------------------------------------

// An 8 x 8 matrix of 16-bit elements across a warp, transposed.
__device__ __forceinline__ uint32_t transpose(uint32_t v) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(v));
    return v;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

__device__ __forceinline__ float bf16_to_float(bf16 v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

__device__ __forceinline__ void add(float* sum, float4 v) {
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}
