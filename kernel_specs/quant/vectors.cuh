// What a lane does with 16 elements side by side: reads them, finds their largest magnitude, turns them into codes and back.
// Needs formats.cuh.
namespace vectors {
using namespace quant;
constexpr int kShift = 4, kElements = 1 << kShift;

// ---- bfloat16 and float32. kBytes: of a vector. value(i) is element i.

// Whether vectors of a tensor whose rows are pitch_bytes apart lie on multiples of 32 bytes.
__device__ __forceinline__ bool aligned_to_32(const void* base, i64 pitch_bytes) {
  return (reinterpret_cast<unsigned long long>(base) | static_cast<unsigned long long>(pitch_bytes)) % 32 == 0;
}

__device__ __forceinline__ unsigned max_bf16x2(unsigned a, unsigned b) {
  unsigned result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

struct Bfloat16 {
  static constexpr int kItem = 2, kBytes = kElements * kItem;
  static constexpr bool kIsBfloat16 = true;
  unsigned words[8];

  __device__ __forceinline__ void load(const char* from, bool aligned) { load_32(words, from, aligned); }
  // Leaves what it does not load.
  __device__ __forceinline__ void load_halves(const char* from, bool first, bool second, bool) {
    if (first) {
      const uint4 v = load_16(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
    if (second) {
      const uint4 v = load_16(from + 16);
      words[4] = v.x, words[5] = v.y, words[6] = v.z, words[7] = v.w;
    }
  }
  __device__ __forceinline__ void store(char* to, bool aligned) const { store_32(to, words, aligned); }
  __device__ __forceinline__ void clear() { memset(words, 0, sizeof(words)); }
  __device__ __forceinline__ float value(int i) const { return i % 2 ? bf16_high(words[i / 2]) : bf16_low(words[i / 2]); }
  __device__ __forceinline__ void set_pair(int i, float low, float high) { words[i] = to_bf16x2(low, high); }
  // The largest magnitudes of the even and of the odd elements.
  __device__ __forceinline__ unsigned maxima() const {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = abs_max_bf16x2(largest, words[i]);
    return largest;
  }
  __device__ __forceinline__ float maximum() const {
    const unsigned largest = maxima();
    return fmaxf(bf16_low(largest), bf16_high(largest));
  }
};

struct Float32 {
  static constexpr int kItem = 4, kBytes = kElements * kItem;
  static constexpr bool kIsBfloat16 = false;
  unsigned words[2][8];

  __device__ __forceinline__ void load(const char* from, bool aligned) {
    load_32(words[0], from, aligned);
    load_32(words[1], from + 32, aligned);
  }
  __device__ __forceinline__ void load_halves(const char* from, bool first, bool second, bool aligned) {
    if (first) load_32(words[0], from, aligned);
    if (second) load_32(words[1], from + 32, aligned);
  }
  __device__ __forceinline__ void store(char* to, bool aligned) const {
    store_32(to, words[0], aligned);
    store_32(to + 32, words[1], aligned);
  }
  __device__ __forceinline__ void clear() { memset(words, 0, sizeof(words)); }
  __device__ __forceinline__ float value(int i) const { return __uint_as_float(words[i / 8][i % 8]); }
  __device__ __forceinline__ void set_pair(int i, float low, float high) {
    words[i / 4][2 * i % 8] = __float_as_uint(low);
    words[i / 4][2 * i % 8 + 1] = __float_as_uint(high);
  }
  __device__ __forceinline__ float maximum() const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) largest = fmaxf(largest, fabsf(value(i)));
    return largest;
  }
};

// ---- codes

// kSplits: the columns of a row may be no multiple of those of a vector.
template <class Format> struct Codes;
template <> struct Codes<E5M6> {
  static constexpr bool kSplits = true;
};
template <> struct Codes<E4M3> {
  static constexpr bool kSplits = false;
  static constexpr int kItem = 1, kBytes = 16;
  unsigned words[4];

  __device__ __forceinline__ void load(const char* from, bool) {
    const uint4 v = load_16(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  __device__ __forceinline__ void clear() { memset(words, 0, sizeof(words)); }
  __device__ __forceinline__ void store(char* to) const { store_16(to, make_uint4(words[0], words[1], words[2], words[3])); }
};
template <> struct Codes<E2M1> {
  static constexpr bool kSplits = false;
  static constexpr int kItem = 1, kBytes = 8;
  unsigned words[2];

  __device__ __forceinline__ void load(const char* from, bool) {
    const uint2 v = load_8(from);
    words[0] = v.x, words[1] = v.y;
  }
  __device__ __forceinline__ void clear() { memset(words, 0, sizeof(words)); }
  __device__ __forceinline__ void store(char* to) const { store_8(to, make_uint2(words[0], words[1])); }
};

// Turns factor times each element into codes: products rounded to float32, then to the format. kBounded: no product exceeds the
// format's range by more than a rounding, or it is NaN. `factor_is_power_of_two` may be false for any factor.
template <bool kBounded, class Input>
__device__ __forceinline__ void to_codes(const Input& x, float factor, bool factor_is_power_of_two, Codes<E4M3>& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes.words[i] = to_e4m3x4(__fmul_rn(x.value(4 * i), factor), __fmul_rn(x.value(4 * i + 1), factor),
                               __fmul_rn(x.value(4 * i + 2), factor), __fmul_rn(x.value(4 * i + 3), factor));
  }
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
template <bool kBounded, class Input>
__device__ __forceinline__ void to_codes(const Input& x, float factor, bool factor_is_power_of_two, Codes<E2M1>& codes) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float products[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i] = __fmul_rn(x.value(8 * half + i), factor);
    codes.words[half] = to_e2m1x8<kBounded>(products);
  }
}
#else
// Products to be rounded to e2m1, as 8 pairs of bfloat16: magnitudes and, in the sign bits, signs.
struct Pairs {
  unsigned magnitudes[8], signs[8];
};

// Truncated to bfloat16 with the last bit set wherever bits were lost, a number lies on the same side of all numbers with fewer
// bits as before: what it is rounded to does not change.
template <class Input>
__device__ __forceinline__ Pairs products_of(const Input& x, float factor) {
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned low = __float_as_uint(__fmul_rn(x.value(2 * i), factor));
    const unsigned high = __float_as_uint(__fmul_rn(x.value(2 * i + 1), factor));
    const unsigned lost = __vminu2(__byte_perm(low, high, 0x5410), 0x00010001u);
    pairs.signs[i] = __byte_perm(low, high, 0x7632);
    pairs.magnitudes[i] = (pairs.signs[i] | lost) & 0x7FFF7FFFu;
  }
  return pairs;
}

// Products of bfloat16 and a power of two are bfloat16 numbers, but for some below the smallest normal one, whose codes are 0.
__device__ __forceinline__ Pairs products_with_power_of_two(const Bfloat16& x, float factor) {
  const unsigned factors = __byte_perm(__float_as_uint(factor), 0, 0x3232);
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pairs.signs[i]) : "r"(x.words[i]), "r"(factors));
    pairs.magnitudes[i] = pairs.signs[i] & 0x7FFF7FFFu;
  }
  return pairs;
}

__device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  unsigned result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Rounds as e2m1x2_magnitudes does, but in bfloat16, whose unit from 64 on is 0.5, and scaled so that all three roundings leave
// the code in the last bits of numbers from 64 on. The least of three NaN ends in the code 7 as well.
__device__ __forceinline__ unsigned e2m1_pair(unsigned magnitudes) {
  const unsigned halves = fma_bf16x2(magnitudes, 0x3F803F80u, 0x42804280u);  // a + 64
  const unsigned ones = fma_bf16x2(magnitudes, 0x3F003F00u, 0x42824282u);    // a / 2 + 65
  const unsigned twos = fma_bf16x2(magnitudes, 0x3E803E80u, 0x42844284u);    // a / 4 + 66
  return __vminu2(__vminu2(halves, ones), twos);
}

template <bool kBounded, class Input>
__device__ __forceinline__ void to_codes(const Input& x, float factor, bool factor_is_power_of_two, Codes<E2M1>& codes) {
  Pairs pairs;
  if constexpr (Input::kIsBfloat16) {
    pairs = factor_is_power_of_two ? products_with_power_of_two(x, factor) : products_of(x, factor);
  } else {
    pairs = products_of(x, factor);
  }
  constexpr unsigned kSixes = 0x40C040C0u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned magnitudes = pairs.magnitudes[4 * half + i];
      rounded[i] = e2m1_pair(kBounded ? magnitudes : __vminu2(magnitudes, kSixes));
    }
    // The first elements of the pairs go to the low, the second ones to the high 4 bits of the bytes.
    const auto gather = [](const unsigned* words, unsigned pick, unsigned merge) {
      return __byte_perm(__byte_perm(words[0], words[1], pick), __byte_perm(words[2], words[3], pick), merge);
    };
    const unsigned* signs = pairs.signs + 4 * half;
    const unsigned first_signs = gather(signs, 0x7351, 0x5410), second_signs = gather(signs, 0x7351, 0x7632);
    const unsigned first = gather(rounded, 0x6240, 0x5410), second = gather(rounded, 0x6240, 0x7632);
    codes.words[half] = (first & 0x07070707u) | ((first_signs >> 4) & 0x08080808u) | ((second << 4) & 0x70707070u) |
                        (second_signs & 0x80808080u);
  }
}
#endif

// ---- codes, rounded stochastically: quads of elements share their random bits

struct Quad {
  float a, b, c, d;
  __device__ __forceinline__ unsigned random(unsigned index) const { return random_words(a, b, c, d, index).first; }
};

// Quad i of the products with factor.
template <class Input>
__device__ __forceinline__ Quad quad_of(const Input& x, float factor, int i) {
  return {__fmul_rn(x.value(4 * i), factor), __fmul_rn(x.value(4 * i + 1), factor), __fmul_rn(x.value(4 * i + 2), factor),
          __fmul_rn(x.value(4 * i + 3), factor)};
}

// `index`: of the first quad among those of the row.
template <class Input>
__device__ __forceinline__ void to_codes_stochastic(const Input& x, float factor, unsigned index, Codes<E4M3>& codes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Quad v = quad_of(x, factor, i);
    codes.words[i] = stochastic_e4m3x4(v.a, v.b, v.c, v.d, v.random(index + i));
  }
}

template <class Input>
__device__ __forceinline__ void to_codes_stochastic(const Input& x, float factor, unsigned index, Codes<E2M1>& codes) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Quad v = quad_of(x, factor, 2 * half), w = quad_of(x, factor, 2 * half + 1);
    codes.words[half] = stochastic_e2m1x4(v.a, v.b, v.c, v.d, v.random(index + 2 * half)) |
                        stochastic_e2m1x4(w.a, w.b, w.c, w.d, w.random(index + 2 * half + 1)) << 16;
  }
}

// ---- the values of codes, exact in float16

__device__ __forceinline__ unsigned abs_max_f16x2(unsigned a, unsigned b) {
  unsigned result;
  asm("{ .reg .b32 x; abs.f16x2 x, %2; max.f16x2 %0, %1, x; }" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <class Format> struct Decoded {
  static constexpr bool kIsBfloat16 = false;
  unsigned pairs[8];  // e4m3: elements 2 i and 2 i + 1; e2m1: elements i and i + 4 of each eight

  __device__ __forceinline__ explicit Decoded(const Codes<E4M3>& codes) {
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = e4m3x2_to_f16x2(static_cast<unsigned short>(codes.words[i / 2] >> (16 * (i % 2))));
  }
  __device__ __forceinline__ explicit Decoded(const Codes<E2M1>& codes) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned four[4];
      e2m1x8_to_f16(codes.words[half], four);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[4 * half + i] = four[i];
    }
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (Codes<Format>::kBytes == 16) return i % 2 ? f16_high(pairs[i / 2]) : f16_low(pairs[i / 2]);
    const unsigned pair = pairs[i / 8 * 4 + i % 4];
    return i / 4 % 2 ? f16_high(pair) : f16_low(pair);
  }
  __device__ __forceinline__ float maximum() const {
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = abs_max_f16x2(largest, pairs[i]);
    return fmaxf(f16_low(largest), f16_high(largest));
  }
};

// ---- scales

enum class Sf { kF32, kUe8m0, kE4m3 };

__device__ __forceinline__ float e4m3_value(int code) { return f16_low(e4m3x2_to_f16x2(static_cast<unsigned short>(code))); }

// The least scale is the smallest subnormal number: the inverse of 0 is nothing to multiply with.
__device__ __forceinline__ int to_e4m3_scale(float scale) {
  return max(static_cast<int>(to_e4m3x4(scale, 0.0f, 0.0f, 0.0f)), 1);
}

// Scales of e4m3 have the code in `field`.
template <class Format>
__device__ __forceinline__ Scale e4m3_scale(float amax) {
  const int code = to_e4m3_scale(__fdiv_rn(amax, Format::kMax));
  const float sf = e4m3_value(code);
  return {sf, __fdiv_rn(1.0f, sf), code};
}
}  // namespace vectors
