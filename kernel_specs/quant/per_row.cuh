// Casts of rows that have one scale each. A CTA has some rows, each of 1 to 8 warps. Needs formats.cuh and vectors.cuh.
namespace per_row {
using namespace vectors;
constexpr int kThreads = 256;
constexpr int kHeld = 2;             // vectors of a lane that stay in registers; those of longer rows are read twice
constexpr int kHalf = kElements / 2; // columns of an e5m6 row are a multiple of this
constexpr int kWordsPerVector = 6;   // of e5m6

// ---- e5m6

// Adds the rounding to the upper 12 bits of `value` truncated to float16, see the reference: exact for normal numbers only.
__device__ __forceinline__ unsigned e5m6_code(unsigned truncated, float value) {
  const unsigned behind = __float_as_uint(value) & 0x1FFFFu;
  const bool up = (truncated & 1) + behind > 0x10000u && value == value;
  return truncated + up;
}

// Codes 2 i and 2 i + 1 of the products with factor.
template <class Input>
__device__ __forceinline__ uint2 e5m6_pair(const Input& x, float factor, int i) {
  const float low = __fmul_rn(x.value(2 * i), factor), high = __fmul_rn(x.value(2 * i + 1), factor);
  unsigned halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return make_uint2(e5m6_code((halves & 0xFFFFu) >> 4, low), e5m6_code(halves >> 20, high));
}

// Eight codes fill three words, each from its most significant bit on.
template <class Input>
__device__ __forceinline__ void to_e5m6(const Input& x, float factor, unsigned (&words)[kWordsPerVector]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint2 a = e5m6_pair(x, factor, 4 * half), b = e5m6_pair(x, factor, 4 * half + 1);
    const uint2 c = e5m6_pair(x, factor, 4 * half + 2), d = e5m6_pair(x, factor, 4 * half + 3);
    words[3 * half] = a.x << 20 | a.y << 8 | b.x >> 4;
    words[3 * half + 1] = b.x << 28 | b.y << 16 | c.x << 4 | c.y >> 8;
    words[3 * half + 2] = c.y << 24 | d.x << 12 | d.y;
  }
}

// ---- rows

struct Row {
  int row, lane, lanes;
  bool inside;
  __device__ __forceinline__ int column(int first, int vector) const { return first + (vector * lanes + lane) * kElements; }
};

__device__ __forceinline__ Row row_of(int rows, int lanes_shift) {
  Row at;
  at.lanes = 1 << lanes_shift;
  at.lane = threadIdx.x & (at.lanes - 1);
  at.row = blockIdx.x * (kThreads >> lanes_shift) + (threadIdx.x >> lanes_shift);
  at.inside = at.row < rows;
  return at;
}

// kHeld vectors from column `first` of the row on; what lies outside is zero.
template <class Input, class Format>
__device__ __forceinline__ void load_vectors(Input (&x)[kHeld], const char* row, const Row& at, int first, int H, bool aligned) {
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
    const int col = at.column(first, v);
    const char* from = row + static_cast<i64>(col >> kShift) * Input::kBytes;
    if (at.inside && col + kElements <= H) {
      x[v].load(from, aligned);
    } else if (Codes<Format>::kSplits && at.inside && col < H) {
      x[v].load_half(from);
    } else {
      x[v].clear();
    }
  }
}

// The largest of all lanes of the row; called by all threads of the CTA.
__device__ __forceinline__ float row_maximum(float own, int lanes_shift) {
  __shared__ float of_warps[kThreads / 32];
  own = max_over_lanes<32>(own);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  const int first = threadIdx.x >> lanes_shift << (lanes_shift - 5);
  own = of_warps[first];
  for (int i = 1; i < 1 << (lanes_shift - 5); ++i) own = fmaxf(own, of_warps[first + i]);
  return own;
}

// Stores the codes of a lane's vector, which begins at column `col`; all lanes of the warp take part.
template <class Format, class Input>
__device__ __forceinline__ void store_codes(const Input& x, float factor, bool power_of_two, char* row, int col, int H) {
  if constexpr (Codes<Format>::kSplits) {
    // By way of shared memory, so that neighbouring lanes write neighbouring words.
    __shared__ unsigned stages[kThreads / 32][32 * kWordsPerVector];
    unsigned* stage = stages[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    unsigned words[kWordsPerVector];
    to_e5m6(x, factor, words);
#pragma unroll
    for (int i = 0; i < kWordsPerVector; i += 2) {
      *reinterpret_cast<uint2*>(stage + kWordsPerVector * lane + i) = make_uint2(words[i], words[i + 1]);
    }
    __syncwarp();
    const i64 first = static_cast<i64>((col >> kShift) - lane) * kWordsPerVector;
    const i64 end = static_cast<i64>(H / kHalf) * (kWordsPerVector / 2);
#pragma unroll
    for (int i = 0; i < kWordsPerVector; ++i) {
      const int word = 32 * i + lane;
      if (first + word < end) reinterpret_cast<unsigned*>(row)[first + word] = stage[word];
    }
    __syncwarp();
  } else if (col < H) {
    Codes<Format> codes;
    to_codes<true>(x, factor, power_of_two, codes);
    codes.store(row + static_cast<i64>(col >> kShift) * codes.kBytes);
  }
}

// A row has 1, 2, 4 or 8 warps.
template <class Input, class Format, Sf kSf>
__device__ __forceinline__ void cast(const void* x_base, void* out, void* sf, int T, int H, i64 ld, i64 ld_out, i64 sf_row,
                                     int row_warps, bool rounded, float amax_min) {
  const int lanes_shift = 36 - __clz(row_warps);
  rounded = rounded || kSf == Sf::kUe8m0;
  const Row at = row_of(T, lanes_shift);
  const bool aligned = aligned_to_32(x_base, ld * Input::kItem);
  const char* from = static_cast<const char*>(x_base) + at.row * ld * Input::kItem;
  char* to = static_cast<char*>(out) + at.row * ld_out;
  const int step = kHeld * kElements << lanes_shift;
  Input held[kHeld];
  float amax = amax_min;
  load_vectors<Input, Format>(held, from, at, 0, H, aligned);
#pragma unroll
  for (int v = 0; v < kHeld; ++v) amax = fmaxf(amax, held[v].maximum());
  for (int first = step; first < H; first += step) {
    Input x[kHeld];
    load_vectors<Input, Format>(x, from, at, first, H, aligned);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) amax = fmaxf(amax, x[v].maximum());
  }
  amax = row_maximum(amax, lanes_shift);
  if (!at.inside) asm volatile("exit;");  // a whole warp
  const Scale scale = rounded ? rounded_scale<Format>(amax) : plain_scale<Format>(amax);
  for (int first = 0; first < H; first += step) {
    if (first > 0) load_vectors<Input, Format>(held, from, at, first, H, aligned);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) store_codes<Format>(held[v], scale.inv, rounded, to, at.column(first, v), H);
  }
  if (at.lane == 0) {
    static_cast<unsigned*>(sf)[at.row * sf_row] = kSf == Sf::kUe8m0 ? unsigned(scale.field) : __float_as_uint(scale.sf);
  }
}
}  // namespace per_row
