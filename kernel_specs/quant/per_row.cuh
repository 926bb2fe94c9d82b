// Casts of rows that have one scale each. A CTA has some rows, each of a power of two of warps. Needs formats.cuh and vectors.cuh, and
// from the template kThreads (of a CTA) and kHeld (vectors of a lane that stay in registers; those of longer rows are read twice).
namespace per_row {
using namespace vectors;
constexpr int kHalf = kElements / 2; // columns of an e5m6 row are a multiple of this
constexpr int kWordsPerVector = 6;   // of e5m6

// Whether a lane's vector is four quads of columns, kQuadStep apart: then each load of a warp reads 512 bytes side by side.
template <class Input, class Format> constexpr bool kQuads = false;
template <> constexpr bool kQuads<Float32, E4M3> = true;
constexpr int kQuadStep = 128;

// ---- e5m6

__device__ __forceinline__ unsigned min_bf16x2(unsigned a, unsigned b) {
  unsigned result;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The codes of the products of elements 2 i and 2 i + 1 with factor, side by side in the upper 24 bits, the first one on top.
// A code is the upper 12 bits of the product truncated to float16. It goes up if bit 16 of the product is set, and one below it
// or the code's last bit is: to the nearest, exact for normal numbers only, see the reference. The minimum with a number whose
// last bit is 0 keeps NaN from going up.
template <class Input>
__device__ __forceinline__ unsigned e5m6_pair(const Input& x, float factor, int i) {
  const float first = __fmul_rn(x.value(2 * i), factor), second = __fmul_rn(x.value(2 * i + 1), factor);
  constexpr unsigned kLargestEven = 0x7F7E7F7Eu;
  unsigned halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(first), "f"(second));
  const unsigned upper = __byte_perm(__float_as_uint(second), __float_as_uint(first), 0x7632);
  const unsigned lower = __byte_perm(__float_as_uint(second), __float_as_uint(first), 0x5410);
  const unsigned up = min_bf16x2(upper, kLargestEven) & (__vminu2(lower, 0x00010001u) | halves >> 4) & 0x00010001u;
  const unsigned rounded = halves + (up << 4);
  const unsigned shifted = rounded << 4;
  return ((rounded ^ shifted) & 0xFFF00000u) ^ shifted;
}

// Eight codes fill three words, each from its most significant bit on.
template <class Input>
__device__ __forceinline__ void to_e5m6(const Input& x, float factor, unsigned (&words)[kWordsPerVector]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned a = e5m6_pair(x, factor, 4 * half), b = e5m6_pair(x, factor, 4 * half + 1);
    const unsigned c = e5m6_pair(x, factor, 4 * half + 2), d = e5m6_pair(x, factor, 4 * half + 3);
    words[3 * half] = __byte_perm(b, a, 0x7653);
    words[3 * half + 1] = __byte_perm(c, b, 0x6532);
    words[3 * half + 2] = __byte_perm(d, c, 0x5321);
  }
}

// ---- rows

struct Row {
  int row, lane, lanes;
  bool inside;
  // The lane's first column in its vector `vector` behind column `first`.
  template <bool kQuads>
  __device__ __forceinline__ int column(int first, int vector) const {
    return first + (vector * lanes + lane) * kElements - (kQuads ? lane % 32 * (kElements - 4) : 0);
  }
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
    const int col = at.column<kQuads<Input, Format>>(first, v);
    const char* from = row + static_cast<i64>(col >> kShift) * Input::kBytes;
    x[v].clear();
    if constexpr (kQuads<Input, Format>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!at.inside || col + i * kQuadStep >= H) continue;
        const uint4 quad = load_16(row + (col + static_cast<i64>(i) * kQuadStep) * Input::kItem);
        unsigned* words = x[v].words[i / 2] + i % 2 * 4;
        words[0] = quad.x, words[1] = quad.y, words[2] = quad.z, words[3] = quad.w;
      }
    } else if constexpr (Codes<Format>::kSplits) {
      x[v].load_halves(from, at.inside && col < H, at.inside && col + kHalf < H, aligned);
    } else if (at.inside && col < H) {
      x[v].load(from, aligned);
    }
  }
}

// The largest of all lanes of the row; called by all threads of the CTA. Numbers that are not negative are in the order of their
// bits.
__device__ __forceinline__ float row_maximum(float own, int row_warps) {
  __shared__ unsigned of_warps[kThreads / 32];
  unsigned bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(own));
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) of_warps[warp] = bits;
  __syncthreads();
  bits = of_warps[(warp & -row_warps) + (threadIdx.x & (row_warps - 1))];
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, bits));
}

// Stores the e5m6 codes of a warp's vectors, the first of which begins at column `first`, by way of shared memory, so that
// neighbouring lanes write neighbouring words.
template <class Input>
__device__ __forceinline__ void store_e5m6(const Input& x, float factor, char* row, int first, int H) {
  __shared__ __align__(8) unsigned stages[kThreads / 32][32 * kWordsPerVector];
  const int lane = threadIdx.x % 32;
  const int words = (H - first) / kHalf * (kWordsPerVector / 2);
  if (words <= 0) return;
  unsigned* stage = stages[threadIdx.x / 32];
  unsigned own[kWordsPerVector];
  to_e5m6(x, factor, own);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kWordsPerVector; i += 2) {
    *reinterpret_cast<uint2*>(stage + kWordsPerVector * lane + i) = make_uint2(own[i], own[i + 1]);
  }
  __syncwarp();
  unsigned* to = reinterpret_cast<unsigned*>(row) + static_cast<i64>(first >> kShift) * kWordsPerVector + lane;
#pragma unroll
  for (int i = 0; i < kWordsPerVector; ++i) {
    if (32 * i + lane < words) to[32 * i] = stage[32 * i + lane];
  }
}

// Stores the codes of a lane's vector, whose first column is `col`; all lanes of the warp take part.
template <class Format, class Input>
__device__ __forceinline__ void store_codes(const Input& x, float factor, bool power_of_two, char* row, int col, int H) {
  if constexpr (Codes<Format>::kSplits) {
    store_e5m6(x, factor, row, col - static_cast<int>(threadIdx.x % 32) * kElements, H);
  } else if (col < H) {
    Codes<Format> codes;
    to_codes<true>(x, factor, power_of_two, codes);
    if constexpr (kQuads<Input, Format>) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (col + i * kQuadStep < H) *reinterpret_cast<unsigned*>(row + col + i * kQuadStep) = codes.words[i];
      }
    } else {
      codes.store(row + static_cast<i64>(col >> kShift) * codes.kBytes);
    }
  }
}

// row_warps: a power of two.
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
  amax = row_maximum(amax, row_warps);
  if (!at.inside) asm volatile("exit;");  // a whole warp
  const Scale scale = rounded ? rounded_scale<Format>(amax) : plain_scale<Format>(amax);
  for (int first = 0; first < H; first += step) {
    if (first > 0) load_vectors<Input, Format>(held, from, at, first, H, aligned);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) store_codes<Format>(held[v], scale.inv, rounded, to, at.column<kQuads<Input, Format>>(first, v), H);
  }
  if (at.lane == 0) {
    static_cast<unsigned*>(sf)[at.row * sf_row] = kSf == Sf::kUe8m0 ? unsigned(scale.field) : __float_as_uint(scale.sf);
  }
}
}  // namespace per_row
