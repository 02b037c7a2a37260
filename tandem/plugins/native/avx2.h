// A vector of 16 numbers on AVX2: two registers. GCC would keep a vector wider than one in memory.

template <class T>
struct Pair {
  typedef T N __attribute__((vector_size(2 * W)));
  N low, high;
  INLINE Pair(T x = 0) : low(x - N{}), high(low) {}
  INLINE Pair(N low, N high) : low(low), high(high) {}
  template <class S>
  INLINE explicit operator Pair<S>() const {  // the same bits
    return {(typename Pair<S>::N)low, (typename Pair<S>::N)high};
  }
#define EACH(S, op) \
  friend INLINE Pair<S> operator op(Pair a, Pair b) { return {a.low op b.low, a.high op b.high}; }
  EACH(T, +) EACH(T, -) EACH(T, *) EACH(T, /) EACH(T, &) EACH(T, <<) EACH(T, >>)
  EACH(int32_t, <) EACH(int32_t, >) EACH(int32_t, <=) EACH(int32_t, >=) EACH(int32_t, ==)
#undef EACH
  friend INLINE Pair operator-(Pair a) { return {-a.low, -a.high}; }
  INLINE Pair& operator+=(Pair b) { return *this = *this + b; }
  INLINE Pair& operator-=(Pair b) { return *this = *this - b; }
  friend INLINE Pair pick(Pair<int32_t> of, Pair a, Pair b) {
    return {of.low ? a.low : b.low, of.high ? a.high : b.high};
  }
};
typedef Pair<float> V;
typedef Pair<int32_t> I;
typedef Pair<uint32_t> U;
typedef uint16_t H __attribute__((vector_size(W)));
INLINE I places_from(int at) {
  return I(I::N{0, 1, 2, 3, 4, 5, 6, 7}, I::N{8, 9, 10, 11, 12, 13, 14, 15}) + at;
}

INLINE V load(const float* p) {
  V v;
  memcpy(&v.low, p, sizeof v.low);
  memcpy(&v.high, p + W / 2, sizeof v.high);
  return v;
}
INLINE void store(float* p, V v) {
  memcpy(p, &v.low, sizeof v.low);
  memcpy(p + W / 2, &v.high, sizeof v.high);
}
INLINE U wide(const bf16* p) {
  H half[2];
  memcpy(half, p, sizeof half);
  return {__builtin_convertvector(half[0], U::N), __builtin_convertvector(half[1], U::N)};
}
INLINE void narrow(bf16* p, U u) {
  H half[2] = {__builtin_convertvector(u.low, H), __builtin_convertvector(u.high, H)};
  memcpy(p, half, sizeof half);
}
INLINE float first_of(V v) { return v.low[0]; }
INLINE float lanes_sum(V v) {
  V::N sum = v.low + v.high;
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}
INLINE float lanes_max(V v) {
  float most = v.low[0];
  for (int i = 1; i < W / 2; i++) most = v.low[i] > most ? v.low[i] : most;
  for (int i = 0; i < W / 2; i++) most = v.high[i] > most ? v.high[i] : most;
  return most;
}
