// Four-bit codes and their block scales -> bf16 A fragments of mma.m16n8k16 (and of wgmma, warp by warp).
//
// A lane's share of 16 rows x 64 columns is one 16-byte load of codes and two bytes of scales; kernels/layout.py says
// which bits are which. Each word gives the four registers of one k16 step: (row g, first pair of columns), (row g + 8,
// first), (row g, second), (row g + 8, second), as two bf16 numbers each, weight times block scale, exactly:
//
//     code * 2^-126   by masks (and shifts)
//     E4M3 scale      byte << 4 is s * 2^-120; times 2^113 twice: s * 2^106. The product is code * s * 2^-20.
//     E8M0 scale      byte << 7 is 2^(b - 127) as it stands.             The product is code * 2^(b - 253).
//
// What is missing is a power of two, PackedWeight.epilogue_factor, for the sums. The scale is brought up before it
// meets a code because the product of both as they stand would be below the smallest bf16 number. A word costs 15
// instructions, 1.9 a weight: 11 for the bits, 4 multiplications; the scales of 32 weights cost 4.
//
// Included by the products' sources; compiled by NVRTC without CUDA's headers. Define E8M0 as 1 for MXFP4, 0 for NVFP4.
#pragma once
#include "ptx.cuh"

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, CODE_BYTES = 4096, TILE_BYTES = 4608;
constexpr uint32_t IN_PLACE = 0x81C081C0;  // sign, two exponent bits and one mantissa bit of two bf16 numbers

// The scales of rows g (low byte) and g + 8 (next byte), each in both halves of a register.
__device__ __forceinline__ void decode_scales(uint32_t bytes, uint32_t& scale, uint32_t& scale_8) {
    uint32_t pair = __byte_perm(bytes, 0, 0x4140);  // a byte in each half
#if E8M0
    pair <<= 7;
#else
    constexpr uint32_t up = 0x78007800;  // 2^113
    pair = multiply(multiply(pair << 4, up), up);
#endif
    spread_halves(pair, scale, scale_8);
}

// One word -> the A fragment of one k16 step.
__device__ __forceinline__ void decode_word(uint32_t word, uint32_t scale, uint32_t scale_8, uint32_t (&a)[4]) {
    a[0] = multiply(word & IN_PLACE, scale);
    a[1] = multiply(word << 3 & IN_PLACE, scale_8);
    a[2] = multiply(word << 6 & IN_PLACE, scale);
    a[3] = multiply((word << 1 & 0x80008000) | (word >> 3 & 0x01800180) | (word >> 7 & 0x00400040), scale_8);
}
