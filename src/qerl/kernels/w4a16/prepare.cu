// What hopper.cu reads besides weights, from a plain x [m, k] bf16, in one launch:
//
//   tiles  x in the order of wgmma's B operand: [token tiles, chunks, TOKENS, 64], columns permuted as decode.cuh's
//          fragments want them, 16-byte pieces swizzled (piece ^= token % 8); zeros beyond m and k
//   u      scaling * x A^T, rounded to bf16: [token tiles, parts, SLICES, TOKENS, 16]
//
// Position 16 w + 8 h + 2 t + j of a chunk holds column 16 t + 4 w + 2 h + j (t, w < 4; h, j < 2; layout.py).
//
// u: a cluster of blocks takes 16 ranks (one slice) of BATCH tokens. It asks for A before x is there. K is dealt to its
// warps by steps; the sums of a block's warps are added in shared memory, those of the blocks across the cluster, in order.
//
// portable.py has u from here too, without tiles (tile_blocks = 0).
//
// Defines: TOKENS, SLICES (0: no adapter), TURNS (16-byte pieces of tiles that a thread writes at a time), CLUSTER (blocks),
// and what prepare.py has for each number of tokens: THREADS, REGISTERS, BATCH, AHEAD, AT_ONCE.
#include "hopper.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int PIECES = 8 * TOKENS;  // of 16 bytes, of a chunk's tile
constexpr int ROWS_A_BLOCK = 16 / CLUSTER;  // of A, that a block brings near for its cluster
constexpr int STEP = 32;                    // columns of K: 16 bytes of a row a lane
static_assert(SLICES == 0 || TOKENS % BATCH == 0, "a batch lies in one tile of u");

extern "C" __global__ void __maxnreg__(REGISTERS)
    w4a16_prepare(const bf16* x, uint4* __restrict__ tiles, const bf16* __restrict__ a,
                  const float* __restrict__ scaling, bf16* __restrict__ u, int m, int k, int chunks, int padded_k,
                  int parts, int tile_blocks, int pieces, uint32_t* x_ready) {
    // The product starts at once. Without an adapter it waits for this kernel's end; with one, only before it needs u:
    // until then for blocks to say in x_ready that the tiles are there, or, where it has x from elsewhere, that x is.
    // u of many tokens is work that should not compete with the product's: then it starts when there is a beginning.
    if (AT_ONCE) start_next_kernel();
    if constexpr (SLICES > 0)
        if (blockIdx.x >= tile_blocks && threadIdx.x < ROWS_A_BLOCK) {  // A, which no kernel just before this one writes
            const int slice = (blockIdx.x - tile_blocks) / CLUSTER % (parts * SLICES);
            const int row = 16 * slice + blockIdx.x % CLUSTER * ROWS_A_BLOCK + threadIdx.x;
            bring_near(a + (size_t)row * padded_k, padded_k * sizeof(bf16));
        }
    wait_for_previous_kernel();
    if (!AT_ONCE && blockIdx.x >= tile_blocks) start_next_kernel();
    if (SLICES > 0 && tile_blocks == 0 && x_ready != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
        add_release(x_ready, 1);
    if (blockIdx.x < tile_blocks) {
        for (int first = (blockIdx.x * TURNS) * THREADS + threadIdx.x; first < pieces;
             first += tile_blocks * TURNS * THREADS) {
            uint32_t v[TURNS][4];
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                const int at = first + i * THREADS, token = at / 8 % TOKENS, tile = at / PIECES;
                const int row = tile / chunks * TOKENS + token,
                          column = tile % chunks * 64 + 2 * (at % 8 ^ token % 8);  // piece 2 w + h
                const bf16* from = x + (size_t)row * k + column;
#pragma unroll
                for (int t = 0; t < 4; t++)
                    v[i][t] = row < m && column + 16 * t < k ? *(const uint32_t*)(from + 16 * t) : 0;
            }
#pragma unroll
            for (int i = 0; i < TURNS; i++)
                if (first + i * THREADS < pieces)
                    tiles[first + i * THREADS] = make_uint4(v[i][0], v[i][1], v[i][2], v[i][3]);
        }
        if (SLICES > 0) {
            publish_for_copies();
            __syncthreads();
            if (threadIdx.x == 0) add_release(x_ready, 1);
            if (!AT_ONCE) start_next_kernel();
        }
        return;
    }
    if constexpr (SLICES > 0) {
        __shared__ float sums[WARPS][16 * BATCH];
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const int rank = blockIdx.x % CLUSTER, job = (blockIdx.x - tile_blocks) / CLUSTER;
        const int slice = job % (parts * SLICES), first_token = job / (parts * SLICES) * BATCH;  // slice: of all parts
        float acc[BATCH / 8][4] = {};
        // K is summed over: its order within a step is free, and lane t takes neighbouring columns.
        const bf16 *rows = a + (size_t)(16 * slice + g) * padded_k + 8 * t,
                   *tokens = x + (size_t)(first_token + g) * k + 8 * t;
        const int tokens_left = m - first_token - g;
        for (int step = rank * WARPS + warp; STEP * step < padded_k; step += AHEAD * CLUSTER * WARPS) {
            uint4 upper[AHEAD], lower[AHEAD], v[AHEAD][BATCH / 8];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int column = STEP * (step + i * CLUSTER * WARPS);
                const bool valid = 8 * t + column < k;
                const uint4 zero = make_uint4(0, 0, 0, 0);
                upper[i] = valid ? load(rows + column) : zero;
                lower[i] = valid ? load(rows + (size_t)8 * padded_k + column) : zero;
#pragma unroll
                for (int q = 0; q < BATCH / 8; q++)
                    v[i][q] = valid && 8 * q < tokens_left ? load_fresh(tokens + (8 * q * k + column)) : zero;
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const uint4 f = upper[i], f8 = lower[i];
                const uint32_t first[4] = {f.x, f8.x, f.y, f8.y}, second[4] = {f.z, f8.z, f.w, f8.w};
#pragma unroll
                for (int q = 0; q < BATCH / 8; q++) {
                    mma(acc[q], first, v[i][q].x, v[i][q].y);
                    mma(acc[q], second, v[i][q].z, v[i][q].w);
                }
            }
        }
#pragma unroll
        for (int q = 0; q < BATCH / 8; q++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[warp][(8 * q + 2 * t + (e & 1)) * 16 + g + 8 * (e >> 1)] = acc[q][e];
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * BATCH; i += THREADS) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += sums[w][i];
            sums[0][i] = sum;
        }
        cluster_sync();
        constexpr int SHARE = 16 * BATCH / CLUSTER;  // of the cluster's results, a block
        for (int i = threadIdx.x; i < SHARE; i += THREADS) {
            const int at = rank * SHARE + i, token = first_token + at / 16;
            float sum = 0.f;
#pragma unroll
            for (int block = 0; block < CLUSTER; block++)
                sum += load_float_from_block(shared_address(&sums[0][at]), block);
            const size_t tile = (size_t)(token / TOKENS) * parts * SLICES + slice;
            u[(tile * TOKENS + token % TOKENS) * 16 + at % 16] = round_bf16(sum * scaling[slice / SLICES]);
        }
        cluster_sync();  // nobody leaves while its sums are read
    }
}
