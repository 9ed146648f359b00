// w4a16 on sm_90a, for more than a few tokens:
//
//     y[m, n] = scale[n] sum_k x[m, k] W[n, k] + bias[n] + sum_r u[m, r] B[n, r]
//
// A block computes PANELS x 128 rows of W, neighbouring rows of packed tiles, for TOKENS tokens. Steps of K, two chunks
// of 64 columns each, pass through a ring of STAGES in shared memory: one thread copies, WARPGROUPS compute, each 64 rows
// of a panel. What limits is the traffic from the second-level cache, a chunk's 4.6 KB of weights a panel and TOKENS * 128
// bytes of x: so panels share an x. Of an odd number of panels the last is read twice, and written once.
//
//     producer   weights as they are stored, x as prepare.cu lays it out: a bulk copy each a step, no tensor map
//     consumer   64 rows x 64 columns of W at a time: 16 + 2 bytes a thread -> 32 weights in registers (decode.cuh),
//                the A operand of four wgmma; the tokens in shared memory are its N. There are two fragment buffers of
//                WORDS wgmma each, so that the next decode runs while the tensor cores work.
//
// A tile is the steps of K, then the adapter's, which bring bf16 rows of B and u for mma.sync: its sums are laid out as
// a warp's share of wgmma's. The sums are scaled in between. Work is dealt in one of two ways:
//
//     CLUSTER > 1   small products. The blocks of a cluster split the steps of one tile, and add their sums through each
//                   other's shared memory.
//     CLUSTER = 1   large products. Blocks take equal shares of the steps of the first `shared_tiles` tiles (stream-K),
//                   then whole tiles in turn. Where a tile is shared, each warp stores its partial sums and draws a
//                   ticket; the last adds all. No block waits for another.
//
// Either way sums are added in the order of k: the same input gives the same bits.
//
// Launched with programmatic dependence: weights are loaded before griddepcontrol.wait, everything that an earlier
// kernel may have written (x, u, B, counters) after it, and nothing is written before it. With an adapter, whose u takes
// prepare.cu longer, x's tiles are waited for by a count in memory, and the kernel's end behind the steps of K.
//
// Defines: TOKENS (16, 32, 64, 128), WARPGROUPS (2 a panel), STAGES, CLUSTER, BLOCKS (to a multiprocessor), WORDS (1 or 4),
// FIRST_REGISTERS (of any thread), then REGISTERS (of a consumer's), PRODUCER_REGISTERS; SLICES (rank / 16 of the adapter,
// 0 for none), E8M0 (0 or 1).
#include "decode.cuh"
#include "hopper.cuh"

constexpr int WARPS = 4 * WARPGROUPS, CONSUMERS = 32 * WARPS;
constexpr int PANELS = WARPGROUPS / 2;
constexpr int PIECES = TOKENS / 8;  // of four sums a thread: 16 rows x 8 tokens a warp
constexpr int CHUNKS = 2, X_BYTES = CHUNKS * TOKENS * 128, W_BYTES = CHUNKS * TILE_BYTES;
constexpr int STAGE_BYTES = X_BYTES + PANELS * W_BYTES;
constexpr int U_BYTES = TOKENS * 32, B_BYTES = 128 * 32;  // a slice of 16 ranks
static_assert(STAGE_BYTES % 1024 == 0 && 4 % WORDS == 0 && SLICES % CHUNKS == 0 && WARPGROUPS % 2 == 0, "");
static_assert(CLUSTER == 1 || CONSUMERS * PIECES * 16 <= STAGES * STAGE_BYTES, "sums are handed over there");

struct Segment {
    int tile, begin, end;
};

// The steps of one block, in order; producer and consumers walk it alike.
struct Schedule {
    int steps, tiles, position, stop, next_tile;
    __device__ Schedule(int steps, int tiles, int shared_tiles, int sharers) : steps(steps), tiles(tiles) {
        const int total = CLUSTER > 1 ? steps : shared_tiles * steps, among = CLUSTER > 1 ? CLUSTER : sharers;
        position = share(blockIdx.x % (CLUSTER > 1 ? CLUSTER : gridDim.x), total, among);
        stop = share(blockIdx.x % (CLUSTER > 1 ? CLUSTER : gridDim.x) + 1, total, among);
        next_tile = CLUSTER > 1 ? blockIdx.x / CLUSTER : shared_tiles + blockIdx.x;
    }
    static __device__ int share(int i, int total, int among) {
        return among ? (int)((long long)min(i, among) * total / among) : 0;
    }
    __device__ bool next(Segment& s) {
        if (CLUSTER == 1 && position < stop) {
            s.tile = position / steps, s.begin = position - s.tile * steps,
            s.end = min(steps, s.begin + stop - position);
            position += s.end - s.begin;
            return true;
        }
        s.tile = next_tile, s.begin = CLUSTER > 1 ? position : 0, s.end = CLUSTER > 1 ? stop : steps;
        next_tile += CLUSTER > 1 ? tiles : gridDim.x;  // a cluster has one tile
        return s.tile < tiles;
    }
};

extern "C" __global__ void __maxnreg__(FIRST_REGISTERS)
    w4a16_hopper(const uint8_t* __restrict__ weights,  // [supertiles, chunks, 4608]
                 const uint8_t* __restrict__ x,        // [token tiles, steps of K, 2, TOKENS, 64] bf16, by prepare.cu
                 const uint8_t* __restrict__ u,        // [token tiles, parts, SLICES, TOKENS, 16] bf16, by prepare.cu
                 const uint8_t* __restrict__ b,        // [SLICES, 128 supertiles, 16] bf16
                 const float* __restrict__ row_scale,  // [128 supertiles]
                 const int* __restrict__ table,        // [supertiles, 3]: first output column, rows, part
                 const bf16* __restrict__ bias,        // [n], or null
                 bf16* __restrict__ y,                 // [m, n]
                 float* __restrict__ partial,          // [blocks, 2, PANELS * 128 * TOKENS]
                 int* __restrict__ counters,           // [shared_tiles, WARPS]: zero before and after
                 uint32_t* x_ready,                    // [2], zero before and after: prepare.cu's blocks that wrote x
                 int publishers, int m, int n, int supertiles, int chunks, int token_tiles, int parts, int shared_tiles, int sharers,
                 float factor) {
    extern __shared__ uint8_t raw[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const uint32_t ring = (shared_address(raw) + 1023) & ~1023u;
    const uint32_t fulls = shared_address(full), empties = shared_address(empty);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(fulls + 8 * i, 1), barrier_init(empties + 8 * i, WARPS);
        barrier_init_fence();
    }
    __syncthreads();
    const int k_steps = (chunks + CHUNKS - 1) / CHUNKS;
    auto own_schedule = [&] {
        const int tiles = (supertiles + PANELS - 1) / PANELS * token_tiles;
        return Schedule(k_steps + SLICES / CHUNKS, tiles, shared_tiles, sharers);
    };
    Segment s = {};

    if (warp >= WARPS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x != CONSUMERS) return;
        if (SLICES == 0) start_next_kernel();
        Schedule schedule = own_schedule();
        int stage = 0, phase = 1;
        bool filling = true;  // the ring for the first time
        auto advance = [&] {
            if (++stage == STAGES) stage = 0, phase ^= 1, filling = false;
        };
        auto supertile_of = [&](int panel) { return min(s.tile / token_tiles * PANELS + panel, supertiles - 1); };
        auto weights_of = [&](int step) {
            return weights + ((size_t)supertile_of(0) * chunks + step * CHUNKS) * TILE_BYTES;
        };
        auto next_panel = [&] { return (size_t)(supertile_of(PANELS - 1) - supertile_of(0)) * chunks * TILE_BYTES; };
        auto copy_weights = [&](const uint8_t* from, size_t panel, uint32_t to, uint32_t barrier) {
            barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
            for (int p = 0; p < PANELS; p++)
                bulk_copy(to + X_BYTES + p * W_BYTES, from + p * panel, W_BYTES, barrier);
        };
        // The last chunk of an odd number, twice: the second time, x is zero.
        auto copy_last_chunk = [&](uint32_t to, uint32_t barrier) {
            barrier_expect(barrier, STAGE_BYTES);
#pragma unroll 1
            for (int i = 0; i < PANELS * CHUNKS; i++)
                bulk_copy(to + X_BYTES + i * TILE_BYTES, weights_of(k_steps - 1) + i / CHUNKS * next_panel(),
                          TILE_BYTES, barrier);
        };
        auto copy_adapter = [&](int slice, uint32_t to, uint32_t barrier) {
            const int token_tile = s.tile % token_tiles;
            barrier_expect(barrier, PANELS * CHUNKS * (U_BYTES + B_BYTES));
#pragma unroll 1
            for (int p = 0; p < PANELS; p++) {
                const int supertile = supertile_of(p);
                bulk_copy(to + p * CHUNKS * U_BYTES,
                          u + (((size_t)token_tile * parts + table[3 * supertile + 2]) * SLICES + slice) * U_BYTES,
                          CHUNKS * U_BYTES, barrier);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    bulk_copy(to + X_BYTES + p * W_BYTES + c * B_BYTES,
                              b + ((size_t)(slice + c) * supertiles + supertile) * B_BYTES, B_BYTES, barrier);
            }
        };
        const int whole_steps = chunks / CHUNKS;
        // The ring is empty: fill it with weights, which no kernel writes.
        Schedule ahead = schedule;
        for (int i = 0; i < STAGES && ahead.next(s);) {
            const size_t panel = next_panel();
            for (int step = s.begin; step < s.end && i < STAGES; step++, i++) {
                if (step < whole_steps)
                    copy_weights(weights_of(step), panel, ring + i * STAGE_BYTES, fulls + 8 * i);
                else if (step < k_steps)
                    copy_last_chunk(ring + i * STAGE_BYTES, fulls + 8 * i);
            }
        }
        if (SLICES == 0) {
            wait_for_previous_kernel();
        } else {
            wait_for_publishers(x_ready, publishers);
            accept_for_copies();
            take_count_back(x_ready);
            start_next_kernel();  // the next one may count there again
        }
        while (schedule.next(s)) {
            const uint8_t *from = weights_of(s.begin),
                          *x_from = x + ((size_t)(s.tile % token_tiles) * k_steps + s.begin) * X_BYTES;
            const size_t panel = next_panel();
            int step = s.begin;
#pragma unroll 1
            for (const int end = min(s.end, whole_steps); step < end;
                 step++, from += W_BYTES, x_from += X_BYTES, advance()) {
                const uint32_t to = ring + stage * STAGE_BYTES, barrier = fulls + 8 * stage;
                if (!filling) {
                    barrier_wait(empties + 8 * stage, phase);
                    copy_weights(from, panel, to, barrier);
                }
                bulk_copy(to, x_from, X_BYTES, barrier);
            }
            for (; step < s.end; step++, advance()) {
                const uint32_t to = ring + stage * STAGE_BYTES, barrier = fulls + 8 * stage;
                if (!filling) barrier_wait(empties + 8 * stage, phase);
                if (step < k_steps) {
                    if (!filling) copy_last_chunk(to, barrier);
                    bulk_copy(to, x_from, X_BYTES, barrier);
                } else if (SLICES > 0) {
                    wait_for_previous_kernel();
                    copy_adapter((step - k_steps) * CHUNKS, to, barrier);
                }
            }
            for (int p = 0; p < PANELS; p++) {  // what the end of the tile reads
                const int supertile = supertile_of(p);
                bring_near(row_scale + supertile * 128, 128 * sizeof(float));
                if (bias) bring_near(bias + table[3 * supertile], table[3 * supertile + 1] * sizeof(bf16));
                else bring_near(table + 3 * supertile, 3 * sizeof(int));
            }
        }
        return;
    }

    take_registers<REGISTERS>();
    Schedule schedule = own_schedule();
    // A shuffle's result is kept in a register; else the assembler would compute these anew in each step.
    auto kept = [&](uint32_t v, int from) { return __shfl_sync(~0u, v, from); };
    const int thread = kept(threadIdx.x, lane), own_warp = thread / 32, own_lane = thread % 32;
    const int g = own_lane / 4, t = own_lane % 4, own_panel = own_warp / 8, first_row = own_warp % 8 * 16;
    const uint32_t first_codes = ring + X_BYTES + own_panel * W_BYTES,
                   codes_at = kept(first_codes + own_warp % 8 * 512 + 16 * own_lane, lane),
                   scales_at = kept(first_codes + CODE_BYTES + own_warp % 8 * 64 + 2 * own_lane, lane),
                   first_x_tile = kept(matrix(ring) + own_lane, 0), first_full = kept(fulls + own_lane, 0),
                   first_empty = kept(empties + own_lane, 0);
    int stage = 0, phase = 0, last = 0;
    auto advance = [&] {
        last = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    };
    auto release = [&](int which) {
        if (own_lane == 0) barrier_arrive(first_empty + 8 * which);
    };
    float acc[TOKENS / 2];
    uint32_t a[2][WORDS][4];
    for (bool some_left = schedule.next(s); some_left; some_left = CLUSTER == 1 && schedule.next(s)) {
        const int m0 = s.tile % token_tiles * TOKENS, k_end = min(s.end, k_steps);
        const int supertile = s.tile / token_tiles * PANELS + own_panel, read = min(supertile, supertiles - 1);
        float scale0, scale8;
        auto read_scales = [&] {
            const float* scales = row_scale + read * 128 + first_row + g;
            scale0 = scales[0] * factor, scale8 = scales[8] * factor;
        };
        if (BLOCKS == 1) read_scales();  // in good time: no other block computes meanwhile
#pragma unroll
        for (int e = 0; e < TOKENS / 2; e++) acc[e] = 0.f;
#pragma unroll 1
        for (int step = s.begin; step < k_end; step++) {
            barrier_wait(first_full + 8 * stage, phase);
            const uint32_t from = stage * STAGE_BYTES, x_tile = first_x_tile + from / 16;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const uint4 codes = load_shared_16(codes_at + from + c * TILE_BYTES);
                const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w},
                               scales = load_shared_2(scales_at + from + c * TILE_BYTES);
                uint32_t scale, scale_8;
                decode_scales(scales, scale, scale_8);
#pragma unroll
                for (int k = 0; k < 4; k += WORDS) {
                    const int group = (4 * c + k) / WORDS;
                    wgmma_wait<1>();  // so this buffer is free again
                    if (group == 1 && step > s.begin) release(last);
#pragma unroll
                    for (int w = 0; w < WORDS; w++) decode_word(words[k + w], scale, scale_8, a[group % 2][w]);
                    wgmma_fence();
#pragma unroll
                    for (int w = 0; w < WORDS; w++)
                        wgmma<TOKENS>(acc, a[group % 2][w], x_tile + c * TOKENS * 8 + 2 * (k + w));
                    wgmma_commit();
                }
            }
            advance();
        }
        wgmma_wait<0>();
        if (k_end > s.begin) release(last);
        if (BLOCKS > 1) read_scales();
#pragma unroll
        for (int e = 0; e < TOKENS / 2; e++) acc[e] *= e & 2 ? scale8 : scale0;
        if constexpr (SLICES > 0)
#pragma unroll 1
            for (int step = max(s.begin, k_steps); step < s.end; step++) {
                barrier_wait(first_full + 8 * stage, phase);
                const uint32_t from = ring + stage * STAGE_BYTES;
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const uint32_t at = from + X_BYTES + own_panel * W_BYTES + c * B_BYTES + (first_row + g) * 32 + t * 4,
                                   tokens = from + (own_panel * CHUNKS + c) * U_BYTES + g * 32 + t * 4;
                    const uint32_t f[4] = {load_shared_4(at), load_shared_4(at + 256), load_shared_4(at + 16),
                                           load_shared_4(at + 272)};
#pragma unroll
                    for (int i = 0; i < PIECES; i++)
                        mma(*reinterpret_cast<float(*)[4]>(&acc[4 * i]), f, load_shared_4(tokens + 256 * i),
                            load_shared_4(tokens + 256 * i + 16));
                }
                __syncwarp();
                release(stage);
                advance();
            }
        wait_for_previous_kernel();  // long done: from here on this thread writes
        const int first_column = table[3 * read] + first_row;
        const int rows = supertile < supertiles ? table[3 * read + 1] - first_row : 0;  // valid ones
        const float bias0 = bias && g < rows ? bf16_to_float(bias[first_column + g]) : 0.f;
        const float bias8 = bias && g + 8 < rows ? bf16_to_float(bias[first_column + g + 8]) : 0.f;
        // A warp's i-th piece -> y. Four rows a thread: 0-3, 8-11, 4-7, 12-15 for t = 0 .. 3.
        auto write = [&](int i, float4 v) {
            const int token = m0 + 8 * i + g, row = (t & 1) * 8 + (t & 2) * 2;
            const uint32_t low = transpose(pack_bf16(v.x + bias0, v.y + bias0)),
                           high = transpose(pack_bf16(v.z + bias8, v.w + bias8));
            const uint32_t other = __shfl_xor_sync(~0u, t & 1 ? low : high, 1);
            const uint2 packed = t & 1 ? make_uint2(other, high) : make_uint2(low, other);
            if (token >= m) return;
            bf16* to = y + (size_t)token * n + first_column + row;
            if (((n | first_column) & 3) == 0 && row + 4 <= rows)
                *(uint2*)to = packed;
            else
#pragma unroll 1
                for (int j = 0; j < 4 && row + j < rows; j++)
                    to[j] = (bf16)((j < 2 ? packed.x : packed.y) >> (16 * (j & 1)));
        };
        if constexpr (CLUSTER > 1) {
            const uint32_t mine = ring + threadIdx.x * 16;
            consumers_sync<CONSUMERS>();  // all have left the ring
#pragma unroll
            for (int i = 0; i < PIECES; i++) store_shared_16(mine + i * CONSUMERS * 16, &acc[4 * i]);
            cluster_sync();
#pragma unroll 1
            for (int i = blockIdx.x % CLUSTER; i < PIECES; i += CLUSTER) {
                float4 v[CLUSTER];
#pragma unroll
                for (int block = 0; block < CLUSTER; block++)
                    v[block] = load_from_block(mine + i * CONSUMERS * 16, block);
#pragma unroll
                for (int block = 1; block < CLUSTER; block++) add(&v[0].x, v[block]);
                write(i, v[0]);
            }
            cluster_sync();  // before this block's memory goes
        } else {
            if (s.begin > 0 || s.end < schedule.steps) {
                const int total = shared_tiles * schedule.steps, first = s.tile * schedule.steps;
                auto block_of = [&](int position) { return (int)(((long long)(position + 1) * sharers - 1) / total); };
                // A block has two places: for the tile that its share begins in, and for the one that it ends in.
                auto sums_of = [&](int block) {
                    return (float4*)(partial + ((size_t)block * 2 + (Schedule::share(block, total, sharers) < first)) *
                                                   (PANELS * 128 * TOKENS)) +
                           threadIdx.x;
                };
                const int begin = block_of(first), end = block_of(first + schedule.steps - 1) + 1;
                float4* own = sums_of(blockIdx.x);
#pragma unroll
                for (int i = 0; i < PIECES; i++) own[i * CONSUMERS] = *(float4*)&acc[4 * i];
                __threadfence();
                __syncwarp();
                int ticket = 0, *counter = counters + s.tile * WARPS + warp;
                if (lane == 0) {
                    ticket = atomicAdd(counter, 1);
                    if (ticket == end - begin - 1) *counter = 0;
                }
                if (__shfl_sync(~0u, ticket, 0) != end - begin - 1) continue;
                __threadfence();
                if (end - begin == 2) {  // no order to keep
                    const float4* theirs = sums_of(begin + end - 1 - blockIdx.x);
#pragma unroll
                    for (int i = 0; i < PIECES; i++) add(&acc[4 * i], load_of_other_block(theirs + i * CONSUMERS));
                } else {
                    constexpr int DEPTH = PIECES < 8 ? 8 / PIECES : 1;  // loads in flight: at least 8 of 16 bytes
#pragma unroll
                    for (int e = 0; e < TOKENS / 2; e++) acc[e] = 0.f;
#pragma unroll 1
                    for (int block = begin; block < end; block += DEPTH) {
                        float4 v[DEPTH][PIECES];
#pragma unroll
                        for (int d = 0; d < DEPTH; d++) {
                            const float4* theirs = sums_of(min(block + d, end - 1));
#pragma unroll
                            for (int i = 0; i < PIECES; i++) v[d][i] = load_of_other_block(theirs + i * CONSUMERS);
                        }
#pragma unroll
                        for (int d = 0; d < DEPTH; d++)
                            if (block + d < end) {
#pragma unroll
                                for (int i = 0; i < PIECES; i++) add(&acc[4 * i], v[d][i]);
                            }
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < PIECES; i++) write(i, *(float4*)&acc[4 * i]);
        }
    }
}
