// Products of TF32 numbers by warps, and what their registers need. Needs norm_fn.cuh.
namespace norm_fn {
// To 11 significant bits, ties away from zero; NaN stays NaN. The tensor cores drop what lies below.
__device__ __forceinline__ float to_tf32(float x) {
  unsigned result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return __uint_as_float(result);
}
__device__ __forceinline__ float4 to_tf32(float4 v) { return make_float4(to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)); }

// sums (16 x 8) += a (16 x 8) . b (8 x 8). With g = lane / 4 and t = lane % 4 a lane has of a the elements (g, t), (g + 8, t),
// (g, t + 4), (g + 8, t + 4), of b (t, g), (t + 4, g), of the sums (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
// All lanes take part: volatile, so that it does not move behind a branch that some of them take.
__device__ __forceinline__ void multiply_add(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
}  // namespace norm_fn
