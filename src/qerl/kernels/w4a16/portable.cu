// y = round(gs * (x W^T) + bias + u B^T), u = round(scaling * (x A^T)), by mma.m16n8k16: sm_80 and newer, one variant
// for a number of tokens.
//
// W is the A operand (its rows are the instruction's m), so codes go from global memory straight to the registers of
// the fragments; tokens are its n. A block's tile is WARPS_M * SLICES * 16 rows x TOKENS tokens:
//
//     warp (r, q): the r-th 16 SLICES rows of the tile; of each step of WARPS_K * 64 columns the q-th 64, a chunk
//     lane 4 g + t: rows g and g + 8 of each 16, columns 16 t .. 16 t + 15 of each 64 (layout.py's order; x follows)
//
// The work is a list of (tile, step). Each block takes an equal, contiguous share of it, so that all multiprocessors end
// at once whatever the shape; with as many blocks as tiles, each has one of its own. Where a share ends within a tile,
// the block says that it comes, and the last of the tile's blocks to do so adds the float32 sums of all in the order of
// k: the others leave theirs in `partial`, its own it has. It waits for those that are still on their way; they are of
// blocks that run, and wait for nobody. So a product has the same bits each time.
//
// Weights: each warp keeps the loads of its next DEPTH chunks in flight, the first of them while the stream's previous
// kernel may still run (sm_90 and newer): weights are frozen. x and the adapter are not, and wait: for the previous kernel,
// or for a count (x_ready) by the kernel that makes x, or, with an adapter, by the one that computes u from it. Then a tile's
// end waits for the previous kernel, and so for u. What the end reads (scales, bias, B) is brought to the second-level
// cache at the tile's beginning.
//
// x goes through shared memory (cp.async), where the warps of a q find the same. A chunk's rows are 128 bytes there, with
// the row's parity xor-ed into the number of a 16-byte unit: the two units that a lane (g, t) reads are then free of bank
// conflicts. Either (RESIDENT) all columns that the block's share needs are brought once, in pieces that have a barrier
// each, a few ahead of their use: the loop has no other loads from memory than those of weights, and no block-wide
// barrier. Or they pass through STAGES stages of CHUNKS chunks a warp. Or, up to 8 tokens, x comes from global memory to
// registers, a chunk ahead: where it is too long to stay, slower, since a lane then waits for x and, with it, for weights
// that it has only just asked for; and in narrow tiles, in which no two warps need the same x.
//
// Tokens from m on may be anything (here copies or zeros): a column of the sums depends on no other, none is stored.
// Columns from k on have zero codes; for them x is zero, or that of other columns of the token: never foreign memory.
//
// Defines: TOKENS (8, 16, 32, 64), WARPS_M, WARPS_K, SLICES, DEPTH, CHUNKS, STAGES (1: RESIDENT, or registers), RESIDENT,
// BLOCKS (to a multiprocessor), REGISTERS (of a thread; 0: all there are), E8M0.
#include "decode.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_K, ADAPTER_THREADS = 256, TILES = TOKENS / 8;
constexpr int FINISHERS = 32 * WARPS_M, BLOCK_ROWS = 16 * SLICES * WARPS_M;
static_assert(TILE_ROWS % BLOCK_ROWS == 0, "a block's rows lie in one row of packed tiles");
constexpr bool X_STAGED = TOKENS > 8 && !RESIDENT;
constexpr int CHUNK_BYTES = TOKENS * 128, STEP_BYTES = WARPS_K * CHUNK_BYTES, STAGE_BYTES = CHUNKS * STEP_BYTES;
static_assert(DEPTH % (X_STAGED ? CHUNKS : RESIDENT ? 1 : 2) == 0, "one turn of the weights' ring is whole turns of x's");

// RESIDENT: a piece is the steps that a copy by each thread brings, or one step.
constexpr int PIECE_STEPS = THREADS * 16 > STEP_BYTES ? THREADS * 16 / STEP_BYTES : 1;
constexpr int MAX_PIECES = RESIDENT ? 128 : 1, PIECES_AHEAD = 3;

using Sums = float[SLICES * TILES][4];

extern __shared__ __align__(16) uint8_t shared[];
__shared__ uint64_t piece_barriers[MAX_PIECES];
__shared__ bool completes_tile;  // this block is the last of those that share it

struct Chunk {  // a lane's codes and scales of 32 rows x 64 columns
    uint4 codes[SLICES];
    uint32_t scales[SLICES];
};

__device__ __forceinline__ Chunk load_chunk(const uint8_t* codes, const uint8_t* scales) {
    Chunk chunk;
#pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        chunk.codes[s] = load_once(codes + 512 * s);
        chunk.scales[s] = load_once_16_bits(scales + 64 * s);
    }
    return chunk;
}

// sums += chunk * x. x_of(tile, half) gives a lane's columns 16 t + 8 half .. + 7 of token 8 tile + g; refill(chunk)
// starts the loads that the chunk's registers wait for next.
template <typename X, typename Refill>
__device__ __forceinline__ void multiply_chunk(Sums& sums, Chunk& chunk, X x_of, Refill refill) {
    uint32_t scale[SLICES], scale_8[SLICES];
#pragma unroll
    for (int s = 0; s < SLICES; ++s) decode_scales(chunk.scales[s], scale[s], scale_8[s]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t first[SLICES][4], second[SLICES][4];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            decode_word(half ? chunk.codes[s].z : chunk.codes[s].x, scale[s], scale_8[s], first[s]);
            decode_word(half ? chunk.codes[s].w : chunk.codes[s].y, scale[s], scale_8[s], second[s]);
        }
        if (half == 1) refill(chunk);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            const uint4 x = x_of(j, half);
#pragma unroll
            for (int s = 0; s < SLICES; ++s) {
                mma(sums[s * TILES + j], first[s], x.x, x.y);
                mma(sums[s * TILES + j], second[s], x.z, x.w);
            }
        }
    }
}

// Block b has the work [first_of(b), first_of(b + 1)).
struct Shares {
    int each, longer;
    __device__ Shares(int total, int blocks) : each(total / blocks), longer(total % blocks) {}
    __device__ int first_of(int block) const { return block * each + min(block, longer); }
    __device__ int owner_of(int work) const {
        const int in_longer = longer * (each + 1);
        return work < in_longer ? work / (each + 1) : longer + (work - in_longer) / each;
    }
};

__device__ __forceinline__ float4 to_float4(const float (&v)[4]) { return make_float4(v[0], v[1], v[2], v[3]); }

__device__ __forceinline__ void add(float (&to)[4], float4 v) {
    to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
}

constexpr int MAX_BLOCKS = 1024;  // counters: [MAX_BLOCKS] blocks that have come to a tile, [MAX_BLOCKS] sums that are there

// Brings together the sums of the blocks that share a tile, [tile_work, tile_work + steps). True in the last to come,
// which then has the whole sums, added in the order of k. It waits for the sums of those that came before it, which
// are on their way: they wait for nobody. `thread` numbers the THREADS_WITH_SUMS that hold some.
template <int THREADS_WITH_SUMS, int N>
__device__ __forceinline__ bool join_blocks(float (&sums)[N][4], int thread, bool has_sums, const Shares& shares,
                                            int tile_work, int steps, float4* partial, uint32_t* counters) {
    const int first = shares.owner_of(tile_work), last = shares.owner_of(tile_work + steps - 1);
    // A block has two places: for the tile that its share begins in, and for the one that it ends in.
    auto place_of = [&](int block) {
        return partial + (2 * block + (shares.first_of(block) < tile_work)) * (N * THREADS_WITH_SUMS) + thread;
    };
    // A block is the first of one shared tile at most: its counters are that tile's.
    uint32_t *come = counters + first, *there = counters + MAX_BLOCKS + first;
    if (threadIdx.x == 0) completes_tile = atomicAdd(come, 1) == last - first;
    __syncthreads();
    if (!completes_tile) {
        if (has_sums) {
#pragma unroll
            for (int i = 0; i < N; ++i) place_of(blockIdx.x)[i * THREADS_WITH_SUMS] = to_float4(sums[i]);
            __threadfence();
        }
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(there, 1);
        return false;
    }
    if (threadIdx.x == 0) {
        while (load_of_other_block(there) != last - first) {}
        *come = *there = 0;
        __threadfence();
    }
    __syncthreads();
    if (has_sums) {
        float own[N][4];
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) own[i][e] = sums[i][e], sums[i][e] = 0;
        for (int block = first; block <= last; ++block) {
            const float4* from = place_of(block);
            const bool is_own = block == blockIdx.x;
#pragma unroll
            for (int i = 0; i < N; ++i)
                add(sums[i], is_own ? to_float4(own[i]) : load_of_other_block(from + i * THREADS_WITH_SUMS));
        }
    }
    return true;
}

#if REGISTERS
#define BOUNDS __maxnreg__(REGISTERS)
#else
#define BOUNDS __launch_bounds__(THREADS, BLOCKS)
#endif

// Not restrict is what the previous kernel may still be writing: no load of it may move ahead of the wait for that one.
extern "C" __global__ void BOUNDS w4a16(
    const uint8_t* __restrict__ tiles,       // [tiles_n, ceil(k / 64), TILE_BYTES]
    const float* __restrict__ global_scale,  // [128 tiles_n]
    const int* __restrict__ table,           // [tiles_n, 3]: first column of y, valid rows, part
    const bf16* x,                           // [m, k]
    bf16* __restrict__ y,                    // [m, n]
    const bf16* __restrict__ bias,           // [n], or null
    const bf16* u,                           // [tiles of tokens, parts, rank / 16, TOKENS, 16], or null: no adapter
    const bf16* b,                           // [rank / 16, 128 tiles_n, 16]
    float4* partial,                         // [2 blocks, SLICES * TILES, 128]
    uint32_t* counters,                      // [2 MAX_BLOCKS], zero and left zero
    uint32_t* x_ready,                       // [2], the same; null: x is there when the kernel before is over
    int publishers,                          // so many counts in x_ready say that x is there
    int m, int k, int n, int tiles_n, int parts, int rank, float factor) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, r = threadIdx.x / 32 % WARPS_M, q = threadIdx.x / FINISHERS;
    const int chunks = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int steps = (chunks + WARPS_K - 1) / WARPS_K, tiles_m = (m + TOKENS - 1) / TOKENS;
    const Shares shares(tiles_n * (TILE_ROWS / BLOCK_ROWS) * tiles_m * steps, gridDim.x);
    const int end_work = shares.first_of(blockIdx.x + 1);
    const uint32_t x_shared = shared_address(shared);
    // Within a chunk of x: the first of the units 2 t and 2 t + 1 to read, and the unit to copy to.
    const int x_lane = g * 128 + (2 * t + g % 2) * 16;
    const int copy_lane = threadIdx.x / 8 * 128 + (threadIdx.x % 8 ^ threadIdx.x / 8 % 2) * 16;
    // RESIDENT: the steps of K that this share needs, from its first one on; behind the last follows the first again.
    const int own_steps = min(steps, end_work - shares.first_of(blockIdx.x)), x_first = shares.first_of(blockIdx.x) % steps;
    uint8_t* const reduction = shared + (RESIDENT ? own_steps * WARPS_K * CHUNK_BYTES : 0);

    // RESIDENT: asks for the next piece of x, in units of 16 bytes: 8 to a token's row of a chunk. Rows from m on stay as
    // they are; all tokens are of one tile.
    int asked_steps = 0, steps_there = 0;
    auto ask_for_piece = [&] {
        if (asked_steps >= own_steps) return;
#pragma unroll
        for (int i = 0; i < PIECE_STEPS * STEP_BYTES / 16 / THREADS; ++i) {
            const int unit = threadIdx.x + i * THREADS, slot = asked_steps * WARPS_K + unit / (TOKENS * 8);
            const int token = unit / 8 % TOKENS, step = x_first + slot / WARPS_K, wrapped = step < steps ? step : step - steps;
            const int column = (wrapped * WARPS_K + slot % WARPS_K) * TILE_COLUMNS + unit % 8 * 8;
            if (slot >= own_steps * WARPS_K || token >= m) continue;
            const bool valid = column < k;
            copy_async(x_shared + slot * CHUNK_BYTES + token * 128 + (unit % 8 ^ token % 2) * 16,
                       valid ? x + token * k + column : x, valid);
        }
        arrive_after_copies(shared_address(piece_barriers + asked_steps / PIECE_STEPS));
        asked_steps += PIECE_STEPS;
    };

    bool is_first = true;
    for (int work = shares.first_of(blockIdx.x); work < end_work;) {
        const int tile = work / steps, first_step = work % steps, num_steps = min(steps - first_step, end_work - work);
        const int first_row = tile / tiles_m * BLOCK_ROWS, first_token = tile % tiles_m * TOKENS;
        const int tile_n = first_row / TILE_ROWS, slice_of_r = first_row % TILE_ROWS / 16 + r * SLICES;
        work += num_steps;

        // Chunks are counted from this warp's first one, in steps: its d-th is chunk first_chunk + d * WARPS_K.
        const int first_chunk = first_step * WARPS_K + q;
        int steps_left = num_steps;
        int chunks_left = min(chunks - first_chunk, num_steps * WARPS_K - q);
        const uint8_t* scales = tiles + (static_cast<uint64_t>(tile_n) * chunks + first_chunk) * TILE_BYTES;
        const uint8_t* codes = scales + slice_of_r * 512 + lane * 16;
        scales += CODE_BYTES + slice_of_r * 64 + lane * 2;
        constexpr int STRIDE = WARPS_K * TILE_BYTES;
        Chunk ring[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (chunks_left > d * WARPS_K) ring[d] = load_chunk(codes + d * STRIDE, scales + d * STRIDE);
        if (threadIdx.x == 0) {  // what the end of the tile reads
            bring_near(global_scale + tile_n * TILE_ROWS, TILE_ROWS * sizeof(float));
            if (bias != nullptr) bring_near(bias + table[3 * tile_n], table[3 * tile_n + 1] * sizeof(bf16));
            else bring_near(table + 3 * tile_n, 3 * sizeof(int));
            if (u != nullptr)
                for (int slice = 0; slice < rank / 16; ++slice)
                    bring_near(b + (static_cast<uint64_t>(slice) * tiles_n * TILE_ROWS + first_row) * 16, BLOCK_ROWS * 32);
        }
        if (is_first) {
            if constexpr (RESIDENT) {
                for (int i = threadIdx.x; i * PIECE_STEPS < own_steps; i += THREADS)
                    barrier_init(shared_address(piece_barriers + i), THREADS);
                __syncthreads();
            }
            if (x_ready == nullptr) {
                if (u == nullptr) wait_for_previous_kernel();  // else that is u's, which has waited for x
                start_next_kernel();
            } else {
                if (threadIdx.x == 0) wait_for_publishers(x_ready, publishers);
                __syncthreads();
            }
            if constexpr (RESIDENT)
#pragma unroll 1
                for (int i = 0; i < PIECES_AHEAD; ++i) ask_for_piece();
        }

        // x of up to 8 tokens. A lane that has no columns (left) keeps those of an earlier chunk, or zeros.
        const bf16* x_row = x + static_cast<uint64_t>(min(first_token + g, m - 1)) * k + t * 16;
        x_row += first_chunk * TILE_COLUMNS;
        int x_left = min(chunks_left, (k - t * 16 + TILE_COLUMNS - 1) / TILE_COLUMNS - first_chunk);
        // RESIDENT: where this warp's first chunk lies; it comes back to the beginning behind the last step of the share.
        int x_slot = first_step - x_first + (first_step < x_first ? steps : 0);
        uint4 x_next[2][2] = {};
        auto load_x = [&](int d) {
            if (x_left <= d * WARPS_K) return;
            const bf16* at = x_row + d * (WARPS_K * TILE_COLUMNS);
            x_next[d % 2][0] = load_fresh(at), x_next[d % 2][1] = load_fresh(at + 8);
        };
        // x of more. `column`: this thread's first one of the stage that is filled next.
        constexpr int ROWS = THREADS / 8;  // of 128 bytes, that one copy by each thread fills
        const int row = threadIdx.x / 8, num_tokens = m - first_token - row % TOKENS;
        int column = (first_step * WARPS_K + row / TOKENS) * TILE_COLUMNS + threadIdx.x % 8 * 8;
        auto fill_stage = [&](int stage, bool is_needed) {
            if (is_needed) {
#pragma unroll
                for (int i = 0; i < STAGE_BYTES / 16 / THREADS; ++i) {
                    const int at = column + i * ROWS / TOKENS * TILE_COLUMNS, token = i * ROWS % TOKENS;
                    const bool valid = at < k && token < num_tokens;
                    const bf16* from = x + ((first_token + row % TOKENS + token) * k + at);
                    copy_async(x_shared + stage * STAGE_BYTES + i * (ROWS * 128) + copy_lane, valid ? from : x, valid);
                }
            }
            column += WARPS_K * CHUNKS * TILE_COLUMNS;
            commit_copies();
        };
        if constexpr (X_STAGED) {
            __syncthreads();  // the previous tile's sums have left the shared memory
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i) fill_stage(i, steps_left > i * CHUNKS);
        } else if constexpr (!RESIDENT) {
            load_x(0);
        }
        if (is_first && x_ready != nullptr && threadIdx.x == 0) {  // while x is on its way
            take_count_back(x_ready);
            start_next_kernel();  // which may count there again
        }
        is_first = false;

        Sums sums = {};
        int stage = STAGES - 1;  // the one that was read last
        for (; steps_left > 0; steps_left -= DEPTH) {
            if constexpr (RESIDENT)
                for (const int end = min(x_slot + DEPTH, own_steps); steps_there < end; steps_there += PIECE_STEPS) {
                    ask_for_piece();
                    barrier_wait(shared_address(piece_barriers + steps_there / PIECE_STEPS), 0);
                }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                if (X_STAGED ? steps_left <= d : chunks_left <= d * WARPS_K) break;
                auto refill = [&](Chunk& free) {
                    if (chunks_left > (d + DEPTH) * WARPS_K)
                        free = load_chunk(codes + (d + DEPTH) * STRIDE, scales + (d + DEPTH) * STRIDE);
                };
                if constexpr (X_STAGED) {
                    if (d % CHUNKS == 0) {
                        wait_for_copies<STAGES - 2>();
                        __syncthreads();  // this stage is there for all, and all have left the one that is filled next
                        fill_stage(stage, steps_left > d + (STAGES - 1) * CHUNKS);
                        stage = stage == STAGES - 1 ? 0 : stage + 1;
                    }
                    if (chunks_left > d * WARPS_K) {
                        const int at = stage * STAGE_BYTES + (d % CHUNKS * WARPS_K + q) * CHUNK_BYTES + x_lane;
                        auto x_of = [&](int j, int half) {
                            return *reinterpret_cast<const uint4*>(shared + (at ^ half * 16) + j * 1024);
                        };
                        multiply_chunk(sums, ring[d], x_of, refill);
                    }
                } else if constexpr (RESIDENT) {
                    const int at = (x_slot * WARPS_K + q) * CHUNK_BYTES + x_lane;
                    auto x_of = [&](int j, int half) {
                        return *reinterpret_cast<const uint4*>(shared + (at ^ half * 16) + j * 1024);
                    };
                    multiply_chunk(sums, ring[d], x_of, refill);
                    x_slot = x_slot + 1 == own_steps ? 0 : x_slot + 1;
                } else {
                    load_x(d + 1);
                    multiply_chunk(sums, ring[d], [&](int, int half) { return x_next[d % 2][half]; }, refill);
                }
            }
            chunks_left -= DEPTH * WARPS_K, x_left -= DEPTH * WARPS_K;
            codes += DEPTH * STRIDE, scales += DEPTH * STRIDE, x_row += DEPTH * WARPS_K * TILE_COLUMNS;
        }

        // Sums of the warps of one r, in the order of q.
        const int thread = threadIdx.x % FINISHERS;
        if constexpr (WARPS_K > 1) {
            float4* of_others = reinterpret_cast<float4*>(reduction) + thread;
            __syncthreads();  // x has been read
            if (q > 0) {
#pragma unroll
                for (int i = 0; i < SLICES * TILES; ++i)
                    of_others[((q - 1) * SLICES * TILES + i) * FINISHERS] = to_float4(sums[i]);
            }
            __syncthreads();
            if (q == 0) {
#pragma unroll
                for (int i = 0; i < (WARPS_K - 1) * SLICES * TILES; ++i)
                    add(sums[i % (SLICES * TILES)], of_others[i * FINISHERS]);
            }
        }
        const bool is_last = num_steps == steps ||
                             join_blocks<FINISHERS>(sums, thread, q == 0, shares, tile * steps, steps, partial, counters);
        if (!is_last || q > 0) continue;

        // Scale, bias, adapter; lane 4 g + t has rows g, g + 8 and tokens 2 t, 2 t + 1 of each 16 x 8.
        const int first_column = table[3 * tile_n], valid_rows = table[3 * tile_n + 1], part = table[3 * tile_n + 2];
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
            const int row = (slice_of_r + s) * 16 + g;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float scale = global_scale[tile_n * TILE_ROWS + row + 8 * h];
                float shift = 0;
                if (bias != nullptr && row + 8 * h < valid_rows)
                    shift = __uint_as_float(uint32_t(bias[first_column + row + 8 * h]) << 16);
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    float(&v)[4] = sums[s * TILES + j];
                    v[2 * h] = v[2 * h] * factor * scale + shift;
                    v[2 * h + 1] = v[2 * h + 1] * factor * scale + shift;
                }
            }
        }
        if (u != nullptr || x_ready != nullptr) wait_for_previous_kernel();  // u is there; all before this kernel are over
        if (u != nullptr) {
            for (int slice = 0; slice < rank / 16; ++slice) {  // lane t: ranks 4 t .. 4 t + 3 of u and B
                uint32_t rows[SLICES][4];
#pragma unroll
                for (int s = 0; s < SLICES; ++s) {
                    const bf16* at = b + (static_cast<uint64_t>(slice) * tiles_n * TILE_ROWS + tile_n * TILE_ROWS +
                                          (slice_of_r + s) * 16 + g) * 16 + 4 * t;
                    const uint2 upper = *reinterpret_cast<const uint2*>(at);
                    const uint2 lower = *reinterpret_cast<const uint2*>(at + 8 * 16);
                    rows[s][0] = upper.x, rows[s][1] = lower.x, rows[s][2] = upper.y, rows[s][3] = lower.y;
                }
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    const uint2 v = *reinterpret_cast<const uint2*>(
                        u + ((tile % tiles_m * parts + part) * (rank / 16) + slice) * (TOKENS * 16) + (8 * j + g) * 16 + 4 * t);
#pragma unroll
                    for (int s = 0; s < SLICES; ++s) mma(sums[s * TILES + j], rows[s], v.x, v.y);
                }
            }
        }
        const int token = first_token + 2 * t, row_g = slice_of_r * 16 + g;
        bf16* out = y + static_cast<uint64_t>(token) * n + first_column + row_g;
#pragma unroll
        for (int j = 0; j < TILES; ++j, out += 8 * n) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                if (token + 8 * j + odd >= m) continue;
#pragma unroll
                for (int i = 0; i < SLICES * 2; ++i)
                    if (row_g + 8 * i < valid_rows)
                        out[odd * n + 8 * i] = round_bf16(sums[i / 2 * TILES + j][i % 2 * 2 + odd]);
            }
        }
    }
}

// u = round(scaling * (x A^T)) for all parts, which `w4a16` then takes. The same work list, with tiles of 16 ranks x
// TOKENS; a step is a chunk of 64 columns for each warp, whose lanes have the same columns of A and x as above.
extern "C" __global__ void __launch_bounds__(ADAPTER_THREADS, 1) adapter_input(
    const bf16* a,         // [parts rank, padded_k]
    const float* scaling,  // [parts]
    const bf16* x,         // [m, k]
    bf16* u,               // [tiles of tokens, parts rank / 16, TOKENS, 16]
    float4* partial,       // [2 blocks, ADAPTER_THREADS]
    uint32_t* counters,    // [2 MAX_BLOCKS], zero and left zero; others than the product's, which may run beside
    int m, int k, int padded_k, int parts, int rank) {
    constexpr int WARPS = ADAPTER_THREADS / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int chunks = padded_k / TILE_COLUMNS, steps = (chunks + WARPS - 1) / WARPS;
    const int tiles_m = (m + TOKENS - 1) / TOKENS, ranks = parts * rank;
    const Shares shares(ranks / 16 * tiles_m * steps, gridDim.x);
    const int end_work = shares.first_of(blockIdx.x + 1);
    wait_for_previous_kernel();
    start_next_kernel();

    for (int work = shares.first_of(blockIdx.x); work < end_work;) {
        const int tile = work / steps, first_step = work % steps, num_steps = min(steps - first_step, end_work - work);
        const int first_rank = tile / tiles_m * 16, first_token = tile % tiles_m * TOKENS;
        work += num_steps;

        float of_warp[TILES][4] = {};
        for (int step = first_step; step < first_step + num_steps; ++step) {
            const int chunk = step * WARPS + warp, column = chunk * TILE_COLUMNS + t * 16;
            if (chunk >= chunks) break;
            const bf16* rows = a + (first_rank + g) * padded_k + column;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 upper = load(rows + 8 * half), lower = load(rows + 8 * padded_k + 8 * half);
                const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y};
                const uint32_t second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    const int token = min(first_token + 8 * j + g, m - 1);
                    const uint4 v = column < k ? load_fresh(x + token * k + column + 8 * half) : make_uint4(0, 0, 0, 0);
                    mma(of_warp[j], first, v.x, v.y);
                    mma(of_warp[j], second, v.z, v.w);
                }
            }
        }

        // Thread 32 j + lane takes the sums of its 8 tokens from all warps, in their order.
        float4* of_warps = reinterpret_cast<float4*>(shared);
        __syncthreads();  // the previous tile's have been read
#pragma unroll
        for (int j = 0; j < TILES; ++j) of_warps[(warp * TILES + j) * 32 + lane] = to_float4(of_warp[j]);
        __syncthreads();
        float sums[1][4] = {};
        const bool has_sums = threadIdx.x < TILES * 32;
        if (has_sums) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w) add(sums[0], of_warps[w * TILES * 32 + threadIdx.x]);
        }
        const bool is_last = num_steps == steps || join_blocks<ADAPTER_THREADS>(sums, threadIdx.x, has_sums, shares,
                                                                                tile * steps, steps, partial, counters);
        if (!is_last || !has_sums) continue;
        const float scale = scaling[first_rank / rank];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int token = 8 * warp + 2 * t + e % 2;
            u[((tile % tiles_m * ranks + first_rank) * TOKENS) + token * 16 + g + e / 2 * 8] = round_bf16(scale * sums[0][e]);
        }
    }
}
