// What the SwiGLU kernels share: the gate's function, limits, and which rows of an expanded layout count. Behind formats.cuh.
namespace swiglu {
using quant::i64;

// ---- silu(gate) = gate / (1 + exp(-gate)), every step rounded to float32

// Up to this magnitude 1 + exp(-gate) stays below 2**126 and its reciprocal normal. There the steps that __frcp_rn and __fdiv_rn
// take for most operands are right for all, and need no test: 6 instructions a division for 14.
constexpr float kPlainGate = 80.0f;

__device__ __forceinline__ float reciprocal_estimate(float t) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(t));
  return y;
}
__device__ __forceinline__ float reciprocal(float t) {
  const float y = reciprocal_estimate(t);
  return fmaf(fmaf(-t, y, 1.0f), y, y);
}

// a / t from the rounded reciprocal y of t, or from its estimate if a is the gate of t. The remainder is taken with this sign so
// that a zero keeps its own.
__device__ __forceinline__ float quotient(float a, float t, float y) {
  const float q = __fmul_rn(a, y);
  return fmaf(-fmaf(t, q, -a), y, q);
}

// t = 1 + exp(-gate) and s = 1 / t. Below kPlainGate a fused product with the power of two that ends expf loses nothing.
struct Sigmoid {
  float t, s;
};
template <bool kPlain>
__device__ __forceinline__ Sigmoid sigmoid(float gate) {
  if constexpr (kPlain) {
    const float t = 1.0f + expf(-gate);
    return {t, reciprocal(t)};
  } else {
    const float t = __fadd_rn(1.0f, expf(-gate));
    return {t, __frcp_rn(t)};
  }
}

template <bool kPlain>
__device__ __forceinline__ float silu(float gate) {
  if constexpr (kPlain) {
    const float t = 1.0f + expf(-gate);
#if __CUDA_ARCH__ < 1000
    return quotient(gate, t, reciprocal_estimate(t));  // right for every gate: all float32 have been tried on an H200
#else
    return quotient(gate, t, reciprocal(t));
#endif
  } else {
    return __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
  }
}

// ---- limits; a NaN passes both

__device__ __forceinline__ float at_most(float value, float limit) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(limit));
  return result;
}
__device__ __forceinline__ float within(float value, float limit) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(at_most(value, limit)), "f"(-limit));
  return result;
}
// A negative clamp value stands for none.
__device__ __forceinline__ float limit_of(float clamp_value) {
  return clamp_value < 0.0f ? __int_as_float(quant::kInfinityBits) : clamp_value;
}

// ---- rows of the prefix layout: segment e is [align(ends[e - 1]), ends[e]), its padding runs up to align(ends[e])

__device__ __forceinline__ int load_int(const int* from) { return int(quant::load_4(from)); }
__device__ __forceinline__ float load_float(const float* from) { return __uint_as_float(quant::load_4(from)); }

struct Place {
  unsigned start;  // the end of the last segment that ends at or before the row, aligned
  bool before_last_end;
};

// Where `row` lies among the ascending `ends`; the lanes of a warp ask for one row together.
__device__ __forceinline__ Place place_of(int row, const int* ends, int num_ends, int alignment) {
  int last = 0, passed = 0;
#pragma unroll 4
  for (int first = 0; first < num_ends; first += 32) {
    const int i = first + threadIdx.x % 32;
    const int end = i < num_ends ? load_int(ends + i) : 0x7FFFFFFF;
    passed += __popc(__ballot_sync(0xFFFFFFFFu, end <= row));
    last = max(last, __reduce_max_sync(0xFFFFFFFFu, end <= row ? end : 0));
  }
  const unsigned above = unsigned(last) + unsigned(alignment) - 1;
  return {above - above % unsigned(alignment), passed < num_ends};
}

// The weight of a row: that of its slot where the rows have an index, else its own; 0 for an index that names no slot.
struct Weights {
  const float* weights;  // null without an index: every weight is 1
  const int* index;
  int num_weights;
  float scaling;
};
__device__ __forceinline__ float weight_of(const Weights& from, int row) {
  if (from.weights == nullptr && from.index == nullptr) return 1.0f;
  const int at = from.index == nullptr ? row : load_int(from.index + row);
  if (unsigned(at) >= unsigned(from.num_weights)) return 0.0f;
  return __fmul_rn(load_float(from.weights + at), from.scaling);
}
}  // namespace swiglu
