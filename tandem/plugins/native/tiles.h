// Linears of bfloat16, summed in float32, in AMX tiles (16 rows times 32 terms times 16 outputs) or in
// the pairs of terms of AVX512_BF16. A row does not know the others, and terms are added in one order:
// a row's bits are its own.

constexpr long TERMS = 32, OUTPUTS = 32;  // of a step; the outputs are two tiles
constexpr long STEP = TERMS * OUTPUTS;
constexpr long TOGETHER = 256;  // rows that stay in the cache while a panel meets them
constexpr long MOST = 2048;     // rows that are copied together

// panel: c [R <= 32, OUTPUTS] = a, rows of `wide` terms, times a panel of the pack, which is read from
// memory `first` and then from the cache. READ: rows of a that are read together.
#ifdef AMX
constexpr long READ = 32;
INLINE void configure() {  // each tile: 16 rows of 64 bytes
  alignas(64) uint8_t config[64] = {1};
  for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
  _tile_loadconfig(config);
}
INLINE void release() { _tile_release(); }

template <bool TWO, bool FIRST>
INLINE void tiles(long wide, const bf16* a, const bf16* b, float* c) {
  const bf16* below = a + 16 * wide;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < wide; k += TERMS, b += STEP) {
    if (FIRST)  // the pack comes from memory
      for (long i = 0; i < STEP; i += 32) __builtin_prefetch(b + i + 4 * STEP);
    _tile_loadd(6, b, 64);
    _tile_loadd(7, b + STEP / 2, 64);
    _tile_loadd(4, a + k, 2 * wide);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, below + k, 2 * wide);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 4 * OUTPUTS);
  _tile_stored(1, c + 16, 4 * OUTPUTS);
  if (TWO) {
    _tile_stored(2, c + 16 * OUTPUTS, 4 * OUTPUTS);
    _tile_stored(3, c + 16 * OUTPUTS + 16, 4 * OUTPUTS);
  }
}

INLINE void panel(long R, long wide, const bf16* a, const bf16* b, float* c, bool first) {
  if (!first && R > 16) tiles<true, false>(wide, a, b, c);
  else R > 16 ? tiles<true, true>(wide, a, b, c) : tiles<false, true>(wide, a, b, c);
}
#else
constexpr long READ = 1;
INLINE void configure() {}
INLINE void release() {}

// R rows at once. H: tiles at once; one where the pack is read from memory, in whose order it is then.
template <int R, int H>
void block(long rows, long wide, const bf16* a, const bf16* b, float* c) {
  for (; rows >= R; rows -= R, a += R * wide, c += R * OUTPUTS) {
    __m512 sum[R][2] = {};
    for (long k = 0; k < wide; k += TERMS)
#pragma GCC unroll 2
      for (int half = 0; half < 2; half += H)
        for (long p = 0; p < TERMS / 2; p++) {
          __m512bh column[H];
          for (int h = 0; h < H; h++)
            column[h] = (__m512bh)_mm512_loadu_si512(b + (2 * k + (half + h) * TERMS + 2 * p) * W);
          for (int r = 0; r < R; r++) {
            int pair;
            memcpy(&pair, a + r * wide + k + 2 * p, 4);
            auto both = (__m512bh)_mm512_set1_epi32(pair);
            for (int h = 0; h < H; h++)
              sum[r][half + h] = _mm512_dpbf16_ps(sum[r][half + h], both, column[h]);
          }
        }
    memcpy(c, sum, sizeof sum);
  }
  if constexpr (R > 1)
    if (rows) block<R / 2, 1>(rows, wide, a, b, c);
}
INLINE void panel(long R, long wide, const bf16* a, const bf16* b, float* c, bool first) {
  long some = first ? std::min(R, 8l) : 0;  // rows that meet it as it comes
  block<8, 1>(some, wide, a, b, c);
  block<8, 2>(R - some, wide, a + some * wide, b, c + some * OUTPUTS);
}
#endif

// out [N, O] = x [N, K] w + bias; w as `pack_tiles` left it.
void linear_tiles(const bf16* x, long rows, long K, const bf16* w, long outputs, const bf16* bias,
                  bf16* out, int threads) {
  for (; rows > MOST; rows -= MOST, x += MOST * K, out += MOST * outputs)
    linear_tiles(x, MOST, K, w, outputs, bias, out, threads);
  long wide = (K + TERMS - 1) / TERMS * TERMS, count = (outputs + OUTPUTS - 1) / OUTPUTS;
  long padded = (rows + READ - 1) / READ * READ, groups = (rows + TOGETHER - 1) / TOGETHER;
  long each = groups > 1 ? 4 : 1;  // panels of one task: longer runs of outputs
  bf16* copy = (bf16*)scratch(0, padded * wide / 2);
#pragma omp parallel num_threads(threads) if (rows * K * outputs >= 8 * GRAIN)
  {
#pragma omp for schedule(static)
    for (long r = 0; r < padded; r++) {
      long own = r < rows ? K : 0;
      memcpy(copy + r * wide, x + r * K, 2 * own);
      memset(copy + r * wide + own, 0, 2 * (wide - own));
    }
    configure();
#pragma omp for schedule(static) collapse(2)
    for (long g = 0; g < groups; g++)
      for (long side = 0; side < count; side += each)
        for (long first = g * TOGETHER; first < std::min(rows, (g + 1) * TOGETHER); first += 32)
          for (long p = side; p < std::min(count, side + each); p++) {
            alignas(64) float found[32 * OUTPUTS];
            const bf16 *a = copy + first * wide, *b = w + p * wide * OUTPUTS;
            long R = std::min(32l, rows - first);
            panel(R, wide, a, b, found, first == g * TOGETHER);
            for (long r = 0; r < R; r++)
              for (long j = 0; j < OUTPUTS && p * OUTPUTS + j < outputs; j += W) {
                avx512::V v = avx512::load(found + r * OUTPUTS + j);
                long at = p * OUTPUTS + j, left = outputs - at;
                if (bias) v += avx512::take(bias + at, left);
                avx512::put(out + (first + r) * outputs + at, v, left);
              }
          }
    release();
  }
}

#ifndef AMX
// A panel of the pack is [K / 32] steps of two tiles; a tile is [16 pairs of terms, 16 outputs, 2].
void pack_tiles(const bf16* w, long outputs, long K, bf16* out, int threads) {
  long wide = (K + TERMS - 1) / TERMS * TERMS, all = (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
#pragma omp parallel for num_threads(threads)
  for (long o = 0; o < all; o++)
    for (long k = 0; k < wide; k++) {
      long step = o / OUTPUTS * wide / TERMS + k / TERMS, tile = o % OUTPUTS / 16, pair = k % TERMS / 2;
      out[step * STEP + tile * STEP / 2 + pair * 32 + o % 16 * 2 + k % 2] =
          o < outputs && k < K ? w[o * K + k] : bf16{};
    }
}
#endif
