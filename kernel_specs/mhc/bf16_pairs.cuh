// Products by warps of bfloat16 pairs, and float32 as the sum of two bfloat16. Needs norm_fn.cuh.
namespace norm_fn {
// Four floats as upper and lower parts, pairs of bfloat16: 17 or more significant bits together. What is as large as an infinity of
// bfloat16 has a NaN below.
struct Split4 {
  uint2 upper, lower;
};

__device__ __forceinline__ Split4 split(float4 v) {
  const uint2 upper = make_uint2(to_bf16x2(v.x, v.y), to_bf16x2(v.z, v.w));
  return {upper, make_uint2(to_bf16x2(v.x - bf16_low(upper.x), v.y - bf16_high(upper.x)),
                            to_bf16x2(v.z - bf16_low(upper.y), v.w - bf16_high(upper.y)))};
}

// sums (16 x 8) += a (16 x 16) . b (16 x 8). With g = lane / 4 and t = lane % 4 a lane has of a the pairs (g, 2 t), (g + 8, 2 t),
// (g, 2 t + 8), (g + 8, 2 t + 8), of b (2 t, g), (2 t + 8, g), of the sums (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
// All lanes take part: volatile, so that it does not move behind a branch that some of them take.
__device__ __forceinline__ void multiply_add_pairs(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
}  // namespace norm_fn
