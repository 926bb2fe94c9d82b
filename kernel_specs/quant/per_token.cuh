// Casts of rows in blocks of columns: which lane has which elements, and what the kernels do with them. Needs formats.cuh and
// vectors.cuh, and from the template kRows (rows of a CTA, one warp each) and kVectors (vectors of a lane).
namespace per_token {
using namespace vectors;
constexpr int kStep = 32 * kElements;  // columns that a warp covers with one vector of each lane
constexpr int kRowLanes = 32 / kRows;  // lanes that share a row in a turned CTA, see Place
constexpr int kMaxBlockLanes = 8;      // lanes that share the largest block, of 128 columns
constexpr int kMaxGridY = 32768;       // gridDim.y ends at 65535, far below the number of tokens
static_assert(kRowLanes >= kMaxBlockLanes);

// ---- places

// Each warp has a row. In a turned CTA each warp has kRowLanes lanes in all its rows instead, so that the scales that one store
// instruction writes have neighbours in a column of column-major scales.
struct Place {
  int row, col;  // col: of the lane's first vector; the others follow kStep columns apart
  int lane;      // lanes of a block are neighbours
  bool idle;     // the whole warp lies behind the last row
  bool in_rows;

  __device__ __forceinline__ bool has(int vector, int columns) const { return in_rows && col + vector * kStep < columns; }
};

__device__ __forceinline__ Place place_of(int rows, bool turned) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (blockIdx.z * kMaxGridY + blockIdx.y) * kRows;
  Place at;
  at.row = first + (turned ? lane / kRowLanes : warp);
  at.lane = turned ? warp * kRowLanes + lane % kRowLanes : lane;
  at.col = blockIdx.x * kVectors * kStep + at.lane * kElements;
  at.idle = first + (turned ? 0 : warp) >= rows;
  at.in_rows = at.row < rows;
  return at;
}

// Ends the thread. Behind a return the other warps' code would count as divergent, which costs it the uniform registers.
__device__ __forceinline__ void leave_if(bool idle) {
  if (idle) asm volatile("exit;");
}

struct Block {
  int shift;  // log2 of its columns, a power of two
  int lanes;  // neighbouring lanes that share it, a power of two as well
};

__device__ __forceinline__ Block block_of(int columns) { return {31 - __clz(columns), columns >> kShift}; }

// The lane to compare with in the step of a butterfly over `lanes` lanes; itself once the step is too wide.
__device__ __forceinline__ int butterfly(int lanes, int step) { return step < lanes ? step : 0; }

__device__ __forceinline__ float block_maximum(float own, int lanes) {
#pragma unroll
  for (int step = 1; step < kMaxBlockLanes; step *= 2) {
    own = fmaxf(own, __shfl_xor_sync(0xFFFFFFFFu, own, butterfly(lanes, step)));
  }
  return own;
}

// amax[v] = the largest magnitude in the block of vector v.
__device__ __forceinline__ void block_maxima(const Float32 (&x)[kVectors], int lanes, float (&amax)[kVectors]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) amax[v] = block_maximum(x[v].maximum(), lanes);
}

// The maxima of two bfloat16 vectors share a word.
__device__ __forceinline__ void block_maxima(const Bfloat16 (&x)[kVectors], int lanes, float (&amax)[kVectors]) {
  static_assert(kVectors % 2 == 0);
#pragma unroll
  for (int v = 0; v < kVectors; v += 2) {
    const unsigned a = x[v].maxima(), b = x[v + 1].maxima();
    unsigned both = max_bf16x2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
    for (int step = 1; step < kMaxBlockLanes; step *= 2) {
      both = max_bf16x2(both, __shfl_xor_sync(0xFFFFFFFFu, both, butterfly(lanes, step)));
    }
    amax[v] = bf16_low(both);
    amax[v + 1] = bf16_high(both);
  }
}

__device__ __forceinline__ unsigned load_1(const char* from) {
  unsigned v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

// ---- rows of vectors

template <class Vector>
__device__ __forceinline__ i64 vector_offset(const Place& at, i64 ld) {
  return at.row * ld * Vector::kItem + static_cast<i64>(at.col >> kShift) * Vector::kBytes;
}

// `from` and `to`: the place of the lane's first vector. Vectors outside the tensor hold zeros, so that a short last block still
// reduces over whole warps. All loads are issued before the first value is used.
template <class Vector>
__device__ __forceinline__ void load_vectors(Vector (&x)[kVectors], const char* from, const Place& at, int H, bool aligned) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (at.has(v, H)) {
      x[v].load(from + v * 32 * Vector::kBytes, aligned);
    } else {
      x[v].clear();
    }
  }
}

// ---- scales

template <class Format, Sf kSf>
__device__ __forceinline__ Scale scale_of(float amax, bool rounded) {
  if constexpr (kSf == Sf::kE4m3) return e4m3_scale<Format>(amax);
  if (rounded) return rounded_scale<Format>(amax);
  return plain_scale<Format>(amax);
}

template <Sf kSf>
constexpr int kScaleBytes = kSf == Sf::kE4m3 ? 1 : 4;

// A scale as it lies in memory, of ue8m0 ones the byte, and its value.
template <Sf kSf>
__device__ __forceinline__ unsigned load_raw_scale(const char* from) {
  if constexpr (kSf == Sf::kF32) return load_4(from);
  return load_1(from);
}
template <Sf kSf>
__device__ __forceinline__ float scale_value(unsigned raw) {
  if constexpr (kSf == Sf::kF32) return __uint_as_float(raw);
  if constexpr (kSf == Sf::kE4m3) return e4m3_value(raw);
  return ue8m0_value(raw);
}
template <Sf kSf>
constexpr unsigned kRawOne = kSf == Sf::kF32 ? 0x3F800000u : kSf == Sf::kE4m3 ? 0x38u : 127u;

// Where the scales of a lane's vectors are.
struct ScalePlaces {
  char* first;
  i64 step;
  __device__ __forceinline__ char* at(int vector) const { return first + vector * step; }
};

template <Sf kSf>
__device__ __forceinline__ ScalePlaces scale_places(const void* sf, i64 sf_row, i64 sf_col, const Place& at, Block block) {
  const int shift = block.shift + (kSf == Sf::kUe8m0 ? 2 : 0);
  char* base = const_cast<char*>(static_cast<const char*>(sf));
  return {base + (at.row * sf_row + (at.col >> shift) * sf_col) * kScaleBytes<kSf>, (kStep >> shift) * sf_col * kScaleBytes<kSf>};
}

// scale[v] = the given one at `place(v)`; 1 for vectors outside the tensor. All loads are issued before the first value is used.
template <Sf kSf, class PlaceOf>
__device__ __forceinline__ void load_scales(float (&scale)[kVectors], const Place& at, int H, PlaceOf place) {
  unsigned raw[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    raw[v] = kRawOne<kSf>;
    if (at.has(v, H)) raw[v] = load_raw_scale<kSf>(place(v));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) scale[v] = scale_value<kSf>(raw[v]);
}

// Stores the scale of a lane's vector, once for each block; `inside`: the vector lies in the tensor. All lanes of the warp
// take part: four packed bytes are gathered from as many blocks, of which those behind the row add 0.
template <Sf kSf>
__device__ __forceinline__ void store_scale(char* to, const Scale& scale, int lane, Block block, bool inside) {
  if constexpr (kSf == Sf::kUe8m0) {
    unsigned word = inside ? static_cast<unsigned>(scale.field) << (lane >> (block.shift - kShift) << 3 & 24) : 0;
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, block.lanes);
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, 2 * block.lanes);
    if (inside && (lane & (4 * block.lanes - 1)) == 0) *reinterpret_cast<unsigned*>(to) = word;
  } else if (inside && (lane & (block.lanes - 1)) == 0) {
    if constexpr (kSf == Sf::kE4m3) {
      *to = static_cast<char>(scale.field);
    } else {
      *reinterpret_cast<float*>(to) = scale.sf;
    }
  }
}

// Column-major scales. Packed ones have a quarter of the stores and run at the speed of a copy without turned CTAs.
template <Sf kSf>
__device__ __forceinline__ bool turned(i64 sf_row, i64 sf_col) { return kSf != Sf::kUe8m0 && sf_row < sf_col; }

// ---- the kernels. T, H: rows and columns of elements. ld: elements of memory from row to row.

template <class Input, class Format, Sf kSf, bool kStochastic>
__device__ __forceinline__ void cast(const void* x_base, void* out, void* sf, int T, int H, i64 ld, i64 ld_out, i64 sf_row,
                                     i64 sf_col, int block_columns, bool rounded, float amax_min) {
  constexpr bool kBounded = kSf != Sf::kE4m3;  // an e4m3 scale may be too small for its block
  rounded = kSf == Sf::kUe8m0 || (kSf == Sf::kF32 && rounded);
  const Place at = place_of(T, turned<kSf>(sf_row, sf_col));
  leave_if(at.idle);
  const Block block = block_of(block_columns);
  Input x[kVectors];
  float amax[kVectors];
  load_vectors(x, static_cast<const char*>(x_base) + vector_offset<Input>(at, ld), at, H, aligned_to_32(x_base, ld * Input::kItem));
  block_maxima(x, block.lanes, amax);
  char* to = static_cast<char*>(out) + vector_offset<Codes<Format>>(at, ld_out);
  const ScalePlaces scales = scale_places<kSf>(sf, sf_row, sf_col, at, block);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Scale scale = scale_of<Format, kSf>(fmaxf(amax_min, amax[v]), rounded);
    if (at.has(v, H)) {
      Codes<Format> codes;
      if constexpr (kStochastic) {
        to_codes_stochastic(x[v], scale.inv, (at.col + v * kStep) / 4, codes);
      } else {
        to_codes<kBounded>(x[v], scale.inv, rounded, codes);
      }
      codes.store(to + v * 32 * codes.kBytes);
    }
    store_scale<kSf>(scales.at(v), scale, at.lane, block, at.has(v, H));
  }
}

// `largest`: the greatest value of the format that the scales are for.
template <class Input, Sf kSf>
__device__ __forceinline__ void scales_only(const void* x_base, void* sf, int T, int H, i64 ld, i64 sf_row, i64 sf_col,
                                            int block_columns, bool rounded, float amax_min, float largest) {
  const Place at = place_of(T, turned<kSf>(sf_row, sf_col));
  leave_if(at.idle);
  const Block block = block_of(block_columns);
  Input x[kVectors];
  float amax[kVectors];
  load_vectors(x, static_cast<const char*>(x_base) + vector_offset<Input>(at, ld), at, H, aligned_to_32(x_base, ld * Input::kItem));
  block_maxima(x, block.lanes, amax);
  const ScalePlaces scales = scale_places<kSf>(sf, sf_row, sf_col, at, block);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const float quotient = __fdiv_rn(fmaxf(amax_min, amax[v]), largest);
    const int field = max((__float_as_int(quotient) + 0x7FFFFF) >> 23, 1);  // of the least power of two not below it
    Scale scale = {rounded ? __int_as_float(field << 23) : quotient, 0.0f, field};
    if constexpr (kSf == Sf::kE4m3) scale.field = to_e4m3_scale(quotient);
    store_scale<kSf>(scales.at(v), scale, at.lane, block, at.has(v, H));
  }
}

template <Sf kSf>
__device__ __forceinline__ void load_row_scales(float (&scale)[kVectors], const void* sf, i64 sf_row, i64 sf_col, const Place& at, int H,
                                                Block block) {
  const ScalePlaces places = scale_places<kSf>(sf, sf_row, sf_col, at, block);
  load_scales<kSf>(scale, at, H, [&](int v) { return places.at(v); });
}

template <class Input, class Format>
__device__ __forceinline__ void cast_by_scales(const void* x_base, const void* sf, const void* sf_e4m3, void* out, int T, int H,
                                               i64 ld, i64 sf_row, i64 sf_col, i64 ld_out, int block_columns) {
  const Place at = place_of(T, false);
  leave_if(at.idle);
  Input x[kVectors];
  float scale[kVectors];
  load_vectors(x, static_cast<const char*>(x_base) + vector_offset<Input>(at, ld), at, H, aligned_to_32(x_base, ld * Input::kItem));
  // One branch for all vectors: with one for each, every load would wait for the one before.
  if (sf_e4m3 != nullptr) {
    load_row_scales<Sf::kE4m3>(scale, sf_e4m3, sf_row, sf_col, at, H, block_of(block_columns));
  } else {
    load_row_scales<Sf::kF32>(scale, sf, sf_row, sf_col, at, H, block_of(block_columns));
  }
  char* to = static_cast<char*>(out) + vector_offset<Codes<Format>>(at, ld_out);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (at.has(v, H)) {
      Codes<Format> codes;
      to_codes<false>(x[v], __fdiv_rn(1.0f, scale[v]), false, codes);
      codes.store(to + v * 32 * codes.kBytes);
    }
  }
}

template <class Input, class Format>
__device__ __forceinline__ void cast_and_cast_back(void* x_base, int T, int H, i64 ld, int block_columns, bool rounded,
                                                   bool e4m3_sf, float amax_min) {
  const Place at = place_of(T, false);
  leave_if(at.idle);
  const bool aligned = aligned_to_32(x_base, ld * Input::kItem);
  char* place = static_cast<char*>(x_base) + vector_offset<Input>(at, ld);
  Input x[kVectors];
  float amax[kVectors];
  load_vectors(x, place, at, H, aligned);
  block_maxima(x, block_of(block_columns).lanes, amax);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const float a = fmaxf(amax_min, amax[v]);
    const Scale scale = e4m3_sf ? e4m3_scale<Format>(a) : scale_of<Format, Sf::kF32>(a, rounded);
    Codes<Format> codes;
    to_codes<false>(x[v], scale.inv, false, codes);
    const Decoded<Format> values(codes);
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      x[v].set_pair(i, __fmul_rn(values.value(2 * i), scale.sf), __fmul_rn(values.value(2 * i + 1), scale.sf));
    }
    if (at.has(v, H)) x[v].store(place + v * 32 * Input::kBytes, aligned);
  }
}

// The scales of vectors whose block columns are `column(v)`.
template <Sf kSf, class Column>
__device__ __forceinline__ void load_x_scales(float (&scale)[kVectors], const void* sf, i64 row, i64 sf_col, const Place& at, int H,
                                              Column column) {
  constexpr bool kPacked = kSf == Sf::kUe8m0;
  const char* scales = static_cast<const char*>(sf) + row * kScaleBytes<kSf>;
  load_scales<kSf>(scale, at, H, [&](int v) {
    const int j = column(v);
    return scales + (kPacked ? j >> 2 : j) * sf_col * kScaleBytes<kSf> + (kPacked ? j & 3 : 0);
  });
}

// The input is data times x_sf, in the one format whose pointer is not null. Its blocks have x_rows rows and x_columns columns, powers
// of two. The columns are at least those of a vector, which so has one scale.
template <class InFormat, class Format, Sf kSf>
__device__ __forceinline__ void recast(const void* x_base, const void* x_sf, const void* x_sf_packed, const void* x_sf_e4m3, void* out,
                                       void* sf, int T, int H, i64 ld, i64 x_sf_row, i64 x_sf_col, i64 ld_out, i64 sf_row, i64 sf_col,
                                       int x_rows, int x_columns, int block_columns, bool rounded, float amax_min) {
  constexpr bool kBounded = kSf != Sf::kE4m3;
  rounded = kSf == Sf::kUe8m0 || (kSf == Sf::kF32 && rounded);
  const Place at = place_of(T, turned<kSf>(sf_row, sf_col));
  leave_if(at.idle);
  const Block block = block_of(block_columns);
  Codes<InFormat> x[kVectors];
  float x_scale[kVectors];
  load_vectors(x, static_cast<const char*>(x_base) + vector_offset<Codes<InFormat>>(at, ld), at, H, false);
  const int x_shift = 31 - __clz(x_columns);
  const int x_row = at.row >> (31 - __clz(x_rows));
  const auto x_column = [&](int v) { return (at.col + v * kStep) >> x_shift; };
  if (x_sf_packed != nullptr) {
    load_x_scales<Sf::kUe8m0>(x_scale, x_sf_packed, x_row * x_sf_row, x_sf_col, at, H, x_column);
  } else if (x_sf_e4m3 != nullptr) {
    load_x_scales<Sf::kE4m3>(x_scale, x_sf_e4m3, x_row * x_sf_row, x_sf_col, at, H, x_column);
  } else {
    load_x_scales<Sf::kF32>(x_scale, x_sf, x_row * x_sf_row, x_sf_col, at, H, x_column);
  }
  char* to = static_cast<char*>(out) + vector_offset<Codes<Format>>(at, ld_out);
  const ScalePlaces scales = scale_places<kSf>(sf, sf_row, sf_col, at, block);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const Decoded<InFormat> values(x[v]);
    const float amax = block_maximum(fabsf(__fmul_rn(values.maximum(), x_scale[v])), block.lanes);
    const Scale scale = scale_of<Format, kSf>(fmaxf(amax_min, amax), rounded);
    if (at.has(v, H)) {
      Codes<Format> codes;
      to_codes<kBounded>(values, __fmul_rn(x_scale[v], scale.inv), false, codes);
      codes.store(to + v * 32 * codes.kBytes);
    }
    store_scale<kSf>(scales.at(v), scale, at.lane, block, at.has(v, H));
  }
}
}  // namespace per_token
