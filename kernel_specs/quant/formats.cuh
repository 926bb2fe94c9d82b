// Conversions, scale rules and vector accesses that the quantisation kernels share. Included into their CUDA source.
namespace quant {
using i64 = long long;
constexpr int kInfinityBits = 0x7F800000;

// ---- scales

// kMax is the greatest value of a format. The exponent field of the smallest power of two that is not below amax / kMax is
// that of amax, less kExponent, rounded up where amax has a larger mantissa than kMax, which adding kCarry carries over.
// The exponent of the rounded IEEE quotient is the same for every amax.
struct E4M3 {
  static constexpr float kMax = 448.0f;
  static constexpr int kCarry = 0x1FFFFF, kExponent = 8;
};
struct E2M1 {
  static constexpr float kMax = 6.0f;
  static constexpr int kCarry = 0x3FFFFF, kExponent = 2;
};
struct E5M6 {
  static constexpr float kMax = 65024.0f;
  static constexpr int kCarry = 0x1FFFF, kExponent = 15;
};

template <class Format>
__device__ __forceinline__ int power_of_two_field(float amax) {
  const int bits = __float_as_int(amax);
  return bits == kInfinityBits ? 255 : max(((bits + Format::kCarry) >> 23) - Format::kExponent, 1);
}

struct Scale {
  float sf, inv;  // the factor that undoes the cast, and the one of the cast
  int field;      // exponent field of sf, if it is a power of two
};

// amax is at least the clamp minimum. For an infinite amax sf is infinite and inv 0: finite elements become 0.
template <class Format>
__device__ __forceinline__ Scale rounded_scale(float amax) {
  const int field = power_of_two_field<Format>(amax);
  return {__int_as_float(field << 23), __int_as_float(max(254 - field, 0) << 23), field};
}

template <class Format>
__device__ __forceinline__ Scale plain_scale(float amax) {
  return {__fdiv_rn(amax, Format::kMax), __fdiv_rn(Format::kMax, amax), 0};
}

// The value of a ue8m0 byte: 0 is below the normal range, 255 is NaN.
__device__ __forceinline__ float ue8m0_value(int byte) {
  const int bits = byte << 23;
  return __int_as_float(bits == kInfinityBits ? 0x7FFFFFFF : max(bits, 0x00400000));
}

// ---- reductions; a NaN loses against every number

// The maximum over groups of kLanes neighbouring lanes (a power of two up to 32); all lanes of the warp take part.
template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// The maximum of absolute values of 2 bfloat16 in each word, per half.
__device__ __forceinline__ unsigned abs_max_bf16x2(unsigned a, unsigned b) {
  unsigned result;
  asm("{ .reg .b32 x; abs.bf16x2 x, %2; max.bf16x2 %0, %1, x; }" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// The same up to the signs of the result, with fewer instructions.
__device__ __forceinline__ unsigned larger_magnitudes_bf16x2(unsigned a, unsigned b) {
  unsigned result;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// ---- conversions

__device__ __forceinline__ float bf16_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float bf16_high(unsigned word) { return __uint_as_float(word & 0xFFFF0000u); }

__device__ __forceinline__ unsigned to_bf16x2(float low, float high) {
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// Nearest even, saturating; NaN becomes 0x7F. The first value goes to the lowest byte.
__device__ __forceinline__ unsigned to_e4m3x4(float a, float b, float c, float d) {
  unsigned result;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }"
      : "=r"(result) : "f"(a), "f"(b), "f"(c), "f"(d));
  return result;
}

// The two e4m3 values of `codes`, exact in float16.
__device__ __forceinline__ unsigned e4m3x2_to_f16x2(unsigned short codes) {
  unsigned result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(codes));
  return result;
}

__device__ __forceinline__ float f16_low(unsigned word) {
  float result;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(result) : "r"(word));
  return result;
}
__device__ __forceinline__ float f16_high(unsigned word) {
  float result;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high; }" : "=f"(result) : "r"(word));
  return result;
}

// Eight values as e2m1, the first in the lowest 4 bits: nearest even, saturating at 6; NaN becomes +6 if its sign bit is 0, as in
// every NaN that arithmetic produces. kBounded: the caller knows that each magnitude is below 2**16 or NaN, which saves a step.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
template <bool kBounded>
__device__ __forceinline__ unsigned to_e2m1x8(const float (&v)[8]) {
  unsigned result;
  asm("{ .reg .b8 a, b, c, d;"
      " cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;"
      " cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;"
      " mov.b32 %0, {a, b, c, d}; }"
      : "=r"(result)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return result;
}
#else
// The code of a magnitude is the least of three roundings, each right in one range and too large elsewhere: to halves
// (below 2, code 2a), to ones (2 to 4, code a + 2) and to twos (from 4, code a / 2 + 4). Adding a large constant rounds to
// its unit in the last place, once and to even, and leaves the code in the low bits of the sum; NaN leaves 0xFFFF there.
template <bool kBounded>
__device__ __forceinline__ unsigned e2m1x2_magnitudes(float a, float b) {
  a = kBounded ? fabsf(a) : fminf(fabsf(a), 6.0f);
  b = kBounded ? fabsf(b) : fminf(fabsf(b), 6.0f);
  constexpr float kHalves = 4194304.0f, kOnes = 8388608.0f + 2.0f, kTwos = 16777216.0f + 8.0f;
  const auto low_halves = [](float x, float y) { return __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x5410); };
  const unsigned halves = low_halves(a + kHalves, b + kHalves);
  const unsigned ones = low_halves(a + kOnes, b + kOnes);
  const unsigned twos = low_halves(a + kTwos, b + kTwos);
  const unsigned codes = __vminu2(__vminu2(halves, ones), twos);
  return kBounded ? __vminu2(codes, 0x00070007u) : codes;
}
template <bool kBounded>
__device__ __forceinline__ unsigned to_e2m1x8(const float (&v)[8]) {
  unsigned nibbles[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* x = v + 4 * i;
    const unsigned codes = __byte_perm(e2m1x2_magnitudes<kBounded>(x[0], x[1]), e2m1x2_magnitudes<kBounded>(x[2], x[3]), 0x6420);
    const unsigned signs_low = __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x0073);
    const unsigned signs_high = __byte_perm(__float_as_uint(x[2]), __float_as_uint(x[3]), 0x0073);
    const unsigned signs = __byte_perm(signs_low, signs_high, 0x5410);
    const unsigned bytes = codes | ((signs >> 4) & 0x08080808u);
    nibbles[i] = bytes | (bytes >> 4);
  }
  return __byte_perm(nibbles[0], nibbles[1], 0x6420);
}
#endif

// Elements i and i + 4 of the eight e2m1 codes in `codes` as the low and high half of pairs[i], exact in float16.
__device__ __forceinline__ void e2m1x8_to_f16(unsigned codes, unsigned (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned nibbles = codes >> (4 * i);
    const unsigned bits = ((nibbles << 9) & 0x0E000E00u) | ((nibbles << 12) & 0x80008000u);
    // Read as float16 the code is 2**-14 of its value.
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(bits), "r"(0x74007400u));
  }
}

// ---- stochastic rounding
//
// A magnitude goes up to its neighbour if adding random bits to the part that the target cannot hold carries, so that its
// expected value is its own. 16 bits a value: the first and third value of a word take the low and the high half as they
// are, the second and fourth the same halves with their bits reversed; a word for two values gives each a half. Saturation
// and NaN are those of the nearest rounding. sm_100a and sm_103a have instructions for this, which decide themselves how
// they use a word: between archs, only the two neighbours and the expected value are the same.

struct RandomWords {
  unsigned first, second;
};

// Hashes of four values and the index of the quad among its like.
__device__ __forceinline__ RandomWords random_words(float a, float b, float c, float d, unsigned quad) {
  unsigned hash = __float_as_uint(a) * 0x5671D42Bu + __float_as_uint(b) * 0x9995E499u + __float_as_uint(c) * 0xACE1B8A5u +
                  __float_as_uint(d) * 0xE153538Du + quad;
  hash = (hash ^ (hash >> 23)) * 0x7FEB352Du;
  hash ^= hash >> 16;
  const unsigned first = hash * 0x846CA68Bu, second = hash * 0xD35A2D97u;
  return {first ^ (first >> 11), second ^ (second >> 11)};
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
__device__ __forceinline__ unsigned stochastic_e4m3x4(float a, float b, float c, float d, unsigned random) {
  unsigned result;
  asm("cvt.rs.satfinite.e4m3x4.f32 %0, { %4, %3, %2, %1 }, %5;" : "=r"(result) : "f"(a), "f"(b), "f"(c), "f"(d), "r"(random));
  return result;
}
__device__ __forceinline__ unsigned stochastic_e2m1x4(float a, float b, float c, float d, unsigned random) {
  unsigned short result;
  asm("cvt.rs.satfinite.e2m1x4.f32 %0, { %4, %3, %2, %1 }, %5;" : "=h"(result) : "f"(a), "f"(b), "f"(c), "f"(d), "r"(random));
  return result;
}
__device__ __forceinline__ unsigned stochastic_bf16x2(float low, float high, unsigned random) {
  unsigned result;
  asm("cvt.rs.bf16x2.f32 %0, %2, %1, %3;" : "=r"(result) : "f"(low), "f"(high), "r"(random));
  return result;
}
#else
// Scaled by a power of two that moves the target's exponents to those of float32, subnormal numbers become subnormal, and
// one addition serves them and the others. The product is truncated, as the sum is.
template <class Format>
__device__ __forceinline__ unsigned stochastic_code(float value, unsigned random) {
  const float scaled = __fmul_rz(fminf(fabsf(value), Format::kMax), Format::kToFloatExponents);
  const unsigned code = (__float_as_uint(scaled) + (random << (Format::kDropped - 16))) >> Format::kDropped;
  const unsigned sign = (__float_as_uint(value) >> 31) << Format::kSignBit;
  return value != value ? Format::kNan : code | sign;
}
struct StochasticE4M3 {
  static constexpr float kMax = 448.0f, kToFloatExponents = 0x1p-120f;
  static constexpr unsigned kDropped = 20, kSignBit = 7, kNan = 0x7F;
};
struct StochasticE2M1 {
  static constexpr float kMax = 6.0f, kToFloatExponents = 0x1p-126f;
  static constexpr unsigned kDropped = 22, kSignBit = 3, kNan = 7;
};
__device__ __forceinline__ unsigned stochastic_e4m3x4(float a, float b, float c, float d, unsigned random) {
  using Format = StochasticE4M3;
  const unsigned reversed = __brev(random);
  const unsigned low = stochastic_code<Format>(a, random & 0xFFFFu) | stochastic_code<Format>(b, reversed >> 16) << 8;
  const unsigned high = stochastic_code<Format>(c, random >> 16) | stochastic_code<Format>(d, reversed & 0xFFFFu) << 8;
  return low | high << 16;
}
__device__ __forceinline__ unsigned stochastic_e2m1x4(float a, float b, float c, float d, unsigned random) {
  using Format = StochasticE2M1;
  const unsigned reversed = __brev(random);
  const unsigned low = stochastic_code<Format>(a, random & 0xFFFFu) | stochastic_code<Format>(b, reversed >> 16) << 4;
  const unsigned high = stochastic_code<Format>(c, random >> 16) | stochastic_code<Format>(d, reversed & 0xFFFFu) << 4;
  return low | high << 8;
}
__device__ __forceinline__ unsigned stochastic_bf16x2(float low, float high, unsigned random) {
  const auto sum = [](float value, unsigned bits) { return value != value ? 0x7FFFFFFFu : __float_as_uint(value) + bits; };
  return __byte_perm(sum(low, random & 0xFFFFu), sum(high, random >> 16), 0x7632);
}
#endif

// ---- vector accesses; volatile, so that none moves ahead of the wait for the previous kernel
// Without cache hints: with loads that pass L1 by, plain stores are 5 % slower, and stores that are the first to leave L2 are so in
// some placements in memory (H200, copies of 2 x 59 and 2 x 268 MB).

// kPastL1: loads and stores both pass it by, which suits a few rows.
template <bool kPastL1 = false>
__device__ __forceinline__ uint4 load_16(const void* from) {
  uint4 v;
  if constexpr (kPastL1) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  } else {
    asm volatile("ld.global.v4.u32 { %0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  }
  return v;
}
__device__ __forceinline__ uint2 load_8(const void* from) {
  uint2 v;
  asm volatile("ld.global.v2.u32 { %0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ unsigned load_4(const void* from) {
  unsigned v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
template <bool kPastL1 = false>
__device__ __forceinline__ void store_16(void* to, uint4 v) {
  if constexpr (kPastL1) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], { %1, %2, %3, %4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  } else {
    asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4};" :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
}
template <bool kPastL1 = false>
__device__ __forceinline__ void store_8(void* to, uint2 v) {
  if constexpr (kPastL1) {
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], { %1, %2};" :: "l"(to), "r"(v.x), "r"(v.y) : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], { %1, %2};" :: "l"(to), "r"(v.x), "r"(v.y) : "memory");
  }
}

// 32 bytes at once where the arch has such accesses and `aligned` says that the address is a multiple of 32, else twice 16.
template <bool kPastL1 = false>
__device__ __forceinline__ void load_32(unsigned (&v)[8], const void* from, bool aligned) {
#if __CUDA_ARCH__ >= 1000
  if (aligned) {
    asm volatile("ld.global.v8.b32 { %0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7]) : "l"(from));
    return;
  }
#endif
  const uint4 a = load_16<kPastL1>(from), b = load_16<kPastL1>(static_cast<const char*>(from) + 16);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void store_32(void* to, const unsigned (&v)[8], bool aligned) {
#if __CUDA_ARCH__ >= 1000
  if (aligned) {
    asm volatile("st.global.v8.b32 [%0], { %1, %2, %3, %4, %5, %6, %7, %8};"
                 :: "l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7]) : "memory");
    return;
  }
#endif
  store_16(to, make_uint4(v[0], v[1], v[2], v[3]));
  store_16(static_cast<char*>(to) + 16, make_uint4(v[4], v[5], v[6], v[7]));
}
}  // namespace quant
