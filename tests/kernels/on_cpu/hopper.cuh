// The functions of w4a16/hopper.cuh for a CPU: part of emulation.cpp, found by the sources in place of the real one.
#pragma once

inline void publish_for_copies() {}
inline void accept_for_copies() {}
template <int COUNT> void give_registers() {}
template <int COUNT> void take_registers() {}
template <int COUNT> void consumers_sync() { meet(block->consumers, COUNT); }
inline void cluster_sync() {  // of all threads that have not ended
    auto threads = [] {
        int count = 0;
        for (const Block& b : cluster)
            count += std::count_if(b.fibers.begin(), b.fibers.end(), [](const Fiber& f) { return !f.done; });
        return count;
    };
    Meeting& m = cluster_meeting;
    const int mine = m.generation;
    moved = true, ++m.arrived;
    while (mine == m.generation) {
        if (m.arrived == threads()) m.arrived = 0, ++m.generation, moved = true;
        else give_way();
    }
}

// The same place in a block of the cluster.
uint8_t* in_block(uint32_t address, int which) {
    return (&cluster[which] == block ? __start_block_memory : cluster[which].memory.data()) + address;
}

inline void barrier_init_fence() {}
inline void barrier_expect(uint32_t barrier, int bytes) {
    Barrier& b = barrier_at(barrier);
    b.bytes += bytes, --b.missing, b.settle();
}
inline void barrier_arrive(uint32_t barrier) {
    Barrier& b = barrier_at(barrier);
    --b.missing, b.settle();
}

inline void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    auto deliver = [=] {
        memcpy(__start_block_memory + to, from, bytes);
        Barrier& b = barrier_at(barrier);
        b.bytes -= bytes, b.settle();
    };
    if (blockIdx.x % 2) block->late.push_back(deliver);
    else deliver();
}

inline uint4 load_shared_16(uint32_t from) { return read<uint4>(__start_block_memory + from); }
inline uint32_t load_shared_4(uint32_t from) { return read<uint32_t>(__start_block_memory + from); }
inline uint32_t load_shared_2(uint32_t from) { return read<uint16_t>(__start_block_memory + from); }
inline void store_shared_16(uint32_t to, const float* v) { memcpy(__start_block_memory + to, v, 16); }
inline float4 load_from_block(uint32_t from, int which) { return read<float4>(in_block(from, which)); }
inline float load_float_from_block(uint32_t from, int which) { return read<float>(in_block(from, which)); }
inline float bf16_to_float(uint16_t v) { return value(v); }
inline void add(float* sum, float4 v) { sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w; }
inline uint32_t transpose(uint32_t v) {
    const Operands* of = exchange({v});
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    auto element = [&](int r, int c) { return of[4 * r + c / 2].v[0] >> c % 2 * 16 & 0xFFFF; };
    return element(column + 1, row) << 16 | element(column, row);
}

inline uint32_t matrix(uint32_t address) { return address >> 4 | 1 << 16; }
inline void wgmma_fence() {}
inline void wgmma_commit() { self().multiplications.emplace_back(); }
template <int N>
void wgmma(float* d, const uint32_t* a, uint32_t tile) {
    self().multiplications.back().push_back({N, d, a, tile});
}
template <int LEFT>
void wgmma_wait() {
    auto& groups = self().multiplications;
    const int first_lane = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
    const int finished = max(0, int(groups.size()) - 1 - LEFT);
    __syncwarp();
    for (int group = 0; group < finished; ++group)
        for (int i = 0; i < int(groups[group].size()); ++i) {
            const Multiplication& m = groups[group][i];
            const uint32_t* a[2][4];  // this lane's two rows, four pairs of k: fragments of the lanes of a quad
            for (int t = 0; t < 4; ++t) {
                a[0][t] = block->fibers[first_lane + lane / 4 * 4 + t].multiplications[group][i].a;
                a[1][t] = a[0][t] + 1;
            }
            for (int j = 0; j < m.n / 2; ++j) {
                const int token = j / 4 * 8 + lane % 4 * 2 + j % 2, h = j / 2 % 2;
                float sum = m.d[j];
                for (int k = 0; k < 16; ++k) {
                    const uint32_t at = ((m.tile & 0xFFFF) << 4) + token / 8 * 1024 + token % 8 * 128 + 2 * k;
                    const uint32_t swizzled = at ^ (at >> 7 & 7) << 4;  // rows of 128 bytes
                    const bf16 b = read<bf16>(__start_block_memory + swizzled);
                    sum += value(a[h][k % 8 / 2][k / 8 * 2], k % 2) * value(b);
                }
                m.d[j] = sum;
            }
        }
    __syncwarp();  // all have read a
    groups.erase(groups.begin(), groups.begin() + finished);
}

// Of hopper.cu's Schedule: the segments of all blocks as (block, tile, begin, end). Their number.
#define SEGMENTS                                                                                                   \
    extern "C" int segments(int blocks, int steps, int tiles, int shared_tiles, int sharers, int (*to)[4]) {       \
        int count = 0;                                                                                             \
        gridDim.x = blocks;                                                                                        \
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {                                                  \
            Schedule schedule(steps, tiles, shared_tiles, sharers);                                                \
            for (Segment s; schedule.next(s); ++count)                                                             \
                to[count][0] = blockIdx.x, to[count][1] = s.tile, to[count][2] = s.begin, to[count][3] = s.end;    \
        }                                                                                                          \
        return count;                                                                                              \
    }
