// Mixes of a token in quads of 4: pre, post and the rows of comb. Needs accesses.cuh.
namespace mhc {
enum class Kind { kPre, kPost, kComb };

// What quad `quad` of a token is.
__device__ __forceinline__ Kind kind_of(int quad) { return quad == 0 ? Kind::kPre : quad == 1 ? Kind::kPost : Kind::kComb; }

// Within 1e-6 of it, relatively where it is not below that: for few tokens a rounded quotient takes an eighth of the time.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }

// A mix from its affine value: sigmoid + eps of pre, sigmoid * post_mult of post, the value itself of comb.
__device__ __forceinline__ float finished(Kind kind, float affine, float post_mult, float eps) {
  if (kind == Kind::kComb) return affine;
  const float s = sigmoid(affine);
  return kind == Kind::kPre ? __fadd_rn(s, eps) : __fmul_rn(s, post_mult);
}

struct Quad {
  float at[4];

  __device__ __forceinline__ static Quad load(const float* from) { return of(load_once(from)); }
  __device__ __forceinline__ static Quad load_cached(const float* from) { return of(mhc::load_cached(from)); }
  __device__ __forceinline__ static Quad of(float4 v) { return { {v.x, v.y, v.z, v.w} }; }
  __device__ __forceinline__ void store(float* to) const { *reinterpret_cast<float4*>(to) = make_float4(at[0], at[1], at[2], at[3]); }
};

__device__ __forceinline__ Quad finished(Kind kind, const Quad& mixes, float scale, const Quad& base, float post_mult, float eps) {
  Quad result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.at[i] = finished(kind, __fmaf_rn(mixes.at[i], scale, base.at[i]), post_mult, eps);
  return result;
}
}  // namespace mhc
