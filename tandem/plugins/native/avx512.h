// A vector of 16 numbers on AVX-512: a register.

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
INLINE I places_from(int at) { return I{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + at; }

INLINE V load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, V v) { memcpy(p, &v, sizeof v); }
INLINE U wide(const bf16* p) {
  H half;
  memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, U);
}
INLINE void narrow(bf16* p, U u) {
  H half = __builtin_convertvector(u, H);
  memcpy(p, &half, sizeof half);
}
INLINE V pick(I of, V a, V b) { return of ? a : b; }
INLINE U pick(I of, U a, U b) { return of ? a : b; }
INLINE float first_of(V v) { return v[0]; }
INLINE float lanes_sum(V v) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}
INLINE float lanes_max(V v) {
  float most = v[0];
  for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
}
