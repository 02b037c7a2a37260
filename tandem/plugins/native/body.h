// The kernels, once for each instruction set: kernels.cpp includes this file into a namespace.
//
// A vector has 16 numbers under every instruction set, and every sum has one order. A product
// (`tile`) adds one term after another with a fused multiply-add. A sum over a row adds vectors, then
// their 16 lanes (`lanes_sum`). So a row's bits depend on that row alone: not on the rows beside it,
// on the threads, or on the instruction set. The headers of the sets, avx2.h and avx512.h, have the
// vectors V (float), I and U (integers) and what is done with their halves and lanes.

INLINE V load(const bf16* p) { return (V)(wide(p) << 16); }
INLINE void store(bf16* p, V v) {  // to the nearest, ties to even
  U bits = (U)v;
  U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  narrow(p, pick(v == v, rounded, rounded * 0 + 0x7fc0));
}
INLINE float number(float x) { return x; }
INLINE float number(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE V splat(float x) { return x - V{}; }
INLINE V maximum(V a, V b) { return pick(a > b, a, b); }
INLINE V at_least(V v, float least) { return pick(v < least, splat(least), v); }  // keeps a NaN

// A vector, or its first `left` numbers if they are fewer than 16, with `fill` in the rest.
template <class T>
INLINE V take(const T* p, long left, float fill = 0.0f) {
  if (left >= W) return load(p);
  float part[W];
  for (long i = 0; i < W; i++) part[i] = i < left ? number(p[i]) : fill;
  return load(part);
}
template <class T>
INLINE void put(T* p, V v, long left) {
  if (left >= W) return store(p, v);
  T part[W];
  store(part, v);
  memcpy(p, part, left * sizeof(T));
}

// e^x to 2 ulp (Cephes' polynomial); 0 below -87.3, 3.4e38 above 88.37.
INLINE V exponential(V x) {
  V n = x * 1.44269504f + 12582912.0f;
  I power = (I)n;
  n -= 12582912.0f;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  V scale = (V)((power << 23) + (127 << 23));
  V out = p * scale;
  out = pick(x < -87.3f, V{}, out);
  return pick(x > 88.37f, splat(3.4e38f), out);
}

// ---- products

// c [R, 16 C] = a [R, K] b [K, 16 C], added to c if `add`: one sum after another over K.
template <int R, int C, class B>
INLINE void tile(long K, const float* a, long a_row, long a_step, const B* b, long b_step, float* c,
                 long c_row, bool add) {
  V sum[R][C];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) sum[r][j] = add ? load(c + r * c_row + W * j) : V{};
#pragma GCC unroll 4
  for (long k = 0; k < K; k++, a += a_step, b += b_step) {
    V column[C];
    for (int j = 0; j < C; j++) {
      column[j] = load(b + W * j);
      __builtin_prefetch(b + W * j + AHEAD * b_step);
    }
    for (int r = 0; r < R; r++) {
      V factor = splat(a[r * a_row]);
      for (int j = 0; j < C; j++) sum[r][j] += factor * column[j];
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < C; j++) store(c + r * c_row + W * j, sum[r][j]);
}

// The same for any rows and columns, a multiple of 16.
template <int C, class B>
INLINE void rows_of(long rows, long K, const float* a, long a_row, long a_step, const B* b,
                    long b_step, float* c, long c_row, bool add) {
  constexpr int R = REGISTERS / C < 6 ? REGISTERS / C : 6;
  for (; rows >= R; rows -= R, a += R * a_row, c += R * c_row)
    tile<R, C>(K, a, a_row, a_step, b, b_step, c, c_row, add);
  if constexpr (R >= 3) {
    for (; rows >= 3; rows -= 3, a += 3 * a_row, c += 3 * c_row)
      tile<3, C>(K, a, a_row, a_step, b, b_step, c, c_row, add);
  }
  for (; rows; rows--, a += a_row, c += c_row)
    tile<1, C>(K, a, a_row, a_step, b, b_step, c, c_row, add);
}
template <class B>
void product(long rows, long columns, long K, const float* a, long a_row, long a_step, const B* b,
             long b_step, float* c, long c_row, bool add) {
  long at = 0;
  for (; columns - at >= 4 * W; at += 4 * W)
    rows_of<4>(rows, K, a, a_row, a_step, b + at, b_step, c + at, c_row, add);
  for (; at < columns; at += W)
    rows_of<1>(rows, K, a, a_row, a_step, b + at, b_step, c + at, c_row, add);
}

// Rows of `linear` beside each other, as [K, R], times a panel of PANEL columns.
template <int R, class T>
void panel(long K, const float* a, const T* b, float* c, bool add) {
  constexpr int C = R * 4 <= REGISTERS ? 4 : R * 2 <= REGISTERS ? 2 : 1;
  for (int at = 0; at < PANEL; at += C * W)
    tile<R, C>(K, a, 1, R, b + at, PANEL, c + at, PANEL, add);
}
template <int R, class T>
void panels(long rows, long K, const float* a, const T* b, float* c, bool add) {
  if (rows == R) return panel<R>(K, a, b, c, add);
  if constexpr (R > 1) panels<R - 1>(rows, K, a, b, c, add);
}

// Rows of x beside each other, as [K, R].
template <class T>
INLINE void turn(const T* x, long R, long K, float* out) {
  for (long k = 0; k < K; k++, out += R)
    for (long r = 0; r < R; r++) out[r] = number(x[r * K + k]);
}
template <class T>
void linear_block(const T* x, long rows, long K, const T* w, long outputs, const T* bias, T* out,
                  int threads) {
  // few rows: sums of a whole panel, which comes from memory; many: a panel is read less often
  long groups = (rows + (rows <= FEW ? 5 : ROWS - 1)) / (rows <= FEW ? 6 : ROWS);
  long together = (rows + groups - 1) / std::max(1l, groups);
  long count = (outputs + PANEL - 1) / PANEL;
  float* beside = scratch(0, rows * K);
#pragma omp parallel num_threads(threads) if (rows * K * outputs >= 8 * GRAIN)
  {
#pragma omp for schedule(static)
    for (long g = 0; g < rows; g += together) {
      long R = std::min(together, rows - g);
      if (R == ROWS)
        turn(x + g * K, ROWS, K, beside + g * K);  // unrolled, as the compiler knows the number
      else
        turn(x + g * K, R, K, beside + g * K);
    }
#pragma omp for schedule(static)
    for (long p = 0; p < count; p++) {
      float found[ROWS * PANEL];
      long columns = std::min((long)PANEL, outputs - p * PANEL);
      for (long g = 0; g < groups; g++) {
        long R = std::min(together, rows - g * together);
        panels<ROWS>(R, K, beside + g * together * K, w + p * PANEL * K, found, false);
        for (long r = 0; r < R; r++) {
          T* to = out + (g * together + r) * outputs + p * PANEL;
          for (long j = 0; j < columns; j += W) {
            V v = load(found + r * PANEL + j);
            long left = columns - j;
            if (bias) v += take(bias + p * PANEL + j, left);
            put(to + j, v, left);
          }
        }
      }
    }
  }
}
// out [N, O] = x [N, K] w + bias; w as `pack` left it, [O / PANEL, K, PANEL].
template <class T>
void linear(const T* x, long rows, long K, const T* w, long outputs, const T* bias, T* out,
            int threads) {
  for (long first = 0; first < rows; first += MANY)  // bounds the copy of x
    linear_block(x + first * K, std::min(MANY, rows - first), K, w, outputs, bias,
                 out + first * outputs, threads);
}
template <class T>
void pack(const T* w, long outputs, long K, T* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long p = 0; p < (outputs + PANEL - 1) / PANEL; p++)
    for (long j = 0; j < PANEL; j++)
      for (long k = 0; k < K; k++)
        out[(p * K + k) * PANEL + j] = p * PANEL + j < outputs ? w[(p * PANEL + j) * K + k] : T{};
}

// c [M, N] = a b, or c += a b: the products of gradients. a [M, K] is at a_row and a_step, b [K, N]
// at b_step. Blocks of K follow one another, so a sum has one order whatever the sizes are.
void multiply(const float* a, long a_row, long a_step, long M, long K, const float* b, long b_step,
              long N, float* c, bool add, int threads) {
  long count = (N + PANEL - 1) / PANEL;
  long each = std::min(4l * ROWS, (M + threads - 1) / threads);  // rows of a task
  long tasks = each ? (M + each - 1) / each : 0;
  for (long from = 0; from < K; from += STEPS) {
    long steps = std::min(STEPS, K - from);
    float* columns = scratch(0, count * steps * PANEL);
#pragma omp parallel num_threads(threads) if (M * steps * N >= 8 * GRAIN)
    {
#pragma omp for schedule(static)
      for (long p = 0; p < count; p++)
        for (long k = 0; k < steps; k++)
          for (long j = 0; j < PANEL; j += W)
            store(columns + (p * steps + k) * PANEL + j,
                  take(b + (from + k) * b_step + p * PANEL + j, std::max(0l, N - p * PANEL - j)));
#pragma omp for schedule(dynamic)
      for (long t = 0; t < tasks; t++) {
        long first = t * each, rows = std::min(each, M - first);
        float *beside = scratch(1, rows * steps), found[ROWS * PANEL];
        for (long g = 0; g < rows; g += ROWS) {
          long R = std::min((long)ROWS, rows - g);
          const float* own = a + (first + g) * a_row + from * a_step;
          for (long k = 0; k < steps; k++)
            for (long r = 0; r < R; r++) beside[g * steps + k * R + r] = own[r * a_row + k * a_step];
        }
        for (long p = 0; p < count; p++)
          for (long g = 0; g < rows; g += ROWS) {
            long R = std::min((long)ROWS, rows - g), width = std::min((long)PANEL, N - p * PANEL);
            bool more = add || from > 0;
            float* to = c + (first + g) * N + p * PANEL;
            if (more)
              for (long r = 0; r < R; r++) memcpy(found + r * PANEL, to + r * N, 4 * width);
            panels<ROWS>(R, steps, beside + g * steps, columns + p * steps * PANEL, found, more);
            for (long r = 0; r < R; r++) memcpy(to + r * N, found + r * PANEL, 4 * width);
          }
      }
    }
  }
}

// ---- rows

// y = x + change (unless change is null), out = y * factor * weight; factor = 1 / sqrt(mean y^2 + e).
template <class T>
void rms_norm(const T* x, const T* change, const T* weight, float epsilon, long rows, long D, T* y,
              T* out, float* factors, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * D >= GRAIN)
  for (long r = 0; r < rows; r++) {
    const T* from = x + r * D;
    if (change) {
      for (long i = 0; i < D; i += W) {
        long left = D - i;
        put(y + r * D + i, take(from + i, left) + take(change + r * D + i, left), left);
      }
      from = y + r * D;
    }
    V sum = {};
    for (long i = 0; i < D; i += W) {
      V v = take(from + i, D - i);
      sum += v * v;
    }
    float factor = 1.0f / sqrtf(lanes_sum(sum) / (float)D + epsilon);
    if (factors) factors[r] = factor;
    for (long i = 0; i < D; i += W) {
      long left = D - i;
      put(out + r * D + i, take(from + i, left) * factor * take(weight + i, left), left);
    }
  }
}

// grad_x = factor * (g - s mean(g s)) with g = above * weight, s = x * factor; scaled = above * s.
template <class T>
void rms_norm_backward(const T* x, const T* weight, const float* factors, const T* above, long rows,
                       long D, T* grad, float* scaled, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * D >= GRAIN)
  for (long r = 0; r < rows; r++) {
    V factor = splat(factors[r]), sum = {};
    for (long i = 0; i < D; i += W) {
      long left = D - i;
      V up = take(above + r * D + i, left);
      V s = take(x + r * D + i, left) * factor;
      V g = up * take(weight + i, left);
      sum += g * s;
      put(scaled + r * D + i, up * s, left);
    }
    V mean = splat(lanes_sum(sum) / (float)D);
    for (long i = 0; i < D; i += W) {
      long left = D - i;
      V up = take(above + r * D + i, left);
      V s = take(x + r * D + i, left) * factor;
      V g = up * take(weight + i, left);
      V own = factor * (g - s * mean);
      put(grad + r * D + i, own, left);
    }
  }
}

// out [T, n, E] = x cos + (x's halves exchanged) sin; x has rows of x_row numbers, E is even.
template <class T>
void rotate(const T* x, long x_row, const T* cosine, const T* sine, float sign, long rows, long heads,
            long E, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * heads * E >= GRAIN)
  for (long r = 0; r < rows; r++)
    for (long h = 0; h < heads; h++) {
      const T *from = x + r * x_row + h * E, *c = cosine + r * E, *s = sine + r * E;
      T* to = out + (r * heads + h) * E;
      for (long half : {0l, E / 2})
        for (long i = half; i < half + E / 2; i += W) {
          long left = half + E / 2 - i;
          V own = take(from + i, left), other = take(from + E / 2 - half + i - half, left);
          V cosines = take(c + i, left), sines = take(s + i, left) * sign;
          V straight = own * cosines;  // fused into the sum below, as no branch is between
          put(to + i, straight + other * sines, left);
        }
    }
}

// out [N, D] = silu(gate) * up of x [N, 2 D] = (gate, up).
template <class T>
void swiglu(const T* x, long rows, long D, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * D >= GRAIN)
  for (long r = 0; r < rows; r++) {
    const T *gate = x + 2 * r * D, *up = gate + D;
    for (long i = 0; i < D; i += W) {
      long left = D - i;
      V g = take(gate + i, left);
      V u = take(up + i, left);
      V made = g / (exponential(-g) + 1.0f) * u;
      put(out + r * D + i, made, left);
    }
  }
}
template <class T>
void swiglu_backward(const T* x, const T* above, long rows, long D, T* grad, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * D >= GRAIN)
  for (long r = 0; r < rows; r++) {
    const T *gate = x + 2 * r * D, *up = gate + D;
    T *of_gate = grad + 2 * r * D, *of_up = of_gate + D;
    for (long i = 0; i < D; i += W) {
      long left = D - i;
      V g = take(gate + i, left);
      V u = take(up + i, left);
      V a = take(above + r * D + i, left);
      V sigmoid = 1.0f / (exponential(-g) + 1.0f);
      V silu = g * sigmoid;
      V own = a * u * (sigmoid * (1.0f + g * (1.0f - sigmoid)));
      put(of_gate + i, own, left);
      put(of_up + i, a * silu, left);
    }
  }
}

// ---- the vocabulary, in float32

struct Softmax {
  float most, log_sum;
};

// The largest of logits [n] / temperature, and the logarithm of the sum of exponentials above it.
INLINE Softmax softmax_of(const float* logits, long n, float temperature) {
  V most = splat(-INFINITY), sum = {};
  for (long i = 0; i < n; i += W) most = maximum(most, take(logits + i, n - i, -INFINITY));
  float top = lanes_max(most) / temperature;
  for (long i = 0; i < n; i += W)
    sum += exponential(take(logits + i, n - i, -INFINITY) / temperature - top);
  return {top, (float)log((double)lanes_sum(sum))};
}
void log_softmax(const float* logits, long rows, long n, float temperature, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * n >= GRAIN)
  for (long r = 0; r < rows; r++) {
    const float* from = logits + r * n;
    float* to = out + r * n;
    Softmax of = softmax_of(from, n, temperature);
    for (long i = 0; i < n; i += W) {
      long left = n - i;
      put(to + i, take(from + i, left) / temperature - of.most - of.log_sum, left);
    }
  }
}
// The log-probs of 16 logits; none is below -10,000, so that p log p is a number.
INLINE V logprobs_of(const float* logits, long left, float temperature, const Softmax& of) {
  return at_least(take(logits, left, -INFINITY) / temperature - of.most - of.log_sum, -1e4f);
}
INLINE float entropy_of(const float* logits, long n, float temperature, const Softmax& of) {
  V sum = {};
  for (long i = 0; i < n; i += W) {
    V v = logprobs_of(logits + i, n - i, temperature, of);
    sum += exponential(v) * v;
  }
  return -lanes_sum(sum);
}
// The log-probs of targets, int64 [N], and entropies (unless null).
void target_logprobs(const float* logits, const int64_t* targets, long rows, long n,
                     float temperature, float* logprobs, float* entropies, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * n >= GRAIN)
  for (long r = 0; r < rows; r++) {
    const float* from = logits + r * n;
    Softmax of = softmax_of(from, n, temperature);
    logprobs[r] = from[targets[r]] / temperature - of.most - of.log_sum;
    if (entropies) entropies[r] = entropy_of(from, n, temperature, of);
  }
}
// logits become d loss / d tempered logits = above (onehot - p) - above_entropy p (log p + entropy).
void logprob_slope(float* logits, const int64_t* targets, long rows, long n, float temperature,
                   const float* above, const float* above_entropy, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * n >= GRAIN)
  for (long r = 0; r < rows; r++) {
    float* at = logits + r * n;
    Softmax of = softmax_of(at, n, temperature);
    float own = above ? above[r] : 0.0f, of_entropy = above_entropy ? above_entropy[r] : 0.0f;
    float entropy = above_entropy ? entropy_of(at, n, temperature, of) : 0.0f;
    for (long i = 0; i < n; i += W) {
      V v = logprobs_of(at + i, n - i, temperature, of);
      put(at + i, exponential(v) * ((v + entropy) * -of_entropy - own), n - i);
    }
    at[targets[r]] += own;
  }
}

// The first of n numbers whose running sum is above target, which becomes the distance into it.
INLINE long search(const float* parts, long n, float total, float& target) {
  target = std::min(target, nextafterf(total, 0.0f));  // so that it has positive probability
  float sum = 0.0f;
  for (long i = 0; i < n; i++) {
    float next = sum + parts[i];
    if (next > target) {
      target -= sum;
      return i;
    }
    sum = next;
  }
  return n - 1;
}
// Tokens int64 [N] of log-probs [N, n] by uniforms [N]: a block of the vocabulary, a token in it.
void inverse_cdf(const float* table, const float* uniforms, long rows, long n, int64_t* tokens,
                 int threads) {
  long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * n >= GRAIN)
  for (long r = 0; r < rows; r++) {
    float *sums = scratch(1, blocks), parts[BLOCK], total = 0.0f;
    auto probabilities = [&](long b) {
      for (long i = 0; i < BLOCK; i += W) {
        long left = std::max(0l, std::min((long)W, n - b * BLOCK - i));
        const float* from = table + r * n + b * BLOCK + i;
        store(parts + i, exponential(take(from, left, -INFINITY)));
      }
    };
    for (long b = 0; b < blocks; b++) {
      probabilities(b);
      V sum = {};
      for (long i = 0; i < BLOCK; i += W) sum += load(parts + i);
      total += sums[b] = lanes_sum(sum);
    }
    if (!(total > 0.0f)) {  // a NaN among the logits: no token, which the next lookup refuses
      tokens[r] = -1 - n;
      continue;
    }
    float target = uniforms[r] * total, own = 0.0f;
    long block = search(sums, blocks, total, target);
    probabilities(block);
    for (long i = 0; i < BLOCK; i++) own += parts[i];
    tokens[r] = std::min(n - 1, block * BLOCK + search(parts, BLOCK, own, target));
  }
}

// ---- attention

// Scores [rows, keys] become exponentials below the largest, from `first` to `last` of each row
// and 0 elsewhere; sums and logarithms of sums are kept.
struct Scoring {
  float scale, softcap;
  long window;         // 0: no window
  const float* sinks;  // of the query heads, or null
};
INLINE V capped(V score, const Scoring& by) {
  V v = score * by.scale;
  if (by.softcap == 0.0f) return v;
  V twice = exponential(v * (2.0f / by.softcap));
  return (1.0f - 2.0f / (twice + 1.0f)) * by.softcap;  // tanh
}
INLINE V inside(long at, long first, long last, V v, float other) {
  I place = places_from((int)at);
  return pick((place >= (int)first) & (place <= (int)last), v, splat(other));
}
// A row of keys from position `start` (a multiple of 16): its exponentials, with sum and lse.
INLINE void softmax_row(float* row, long start, long keys, long first, long last, const Scoring& by,
                        long head, float& total, float& lse) {
  V most = splat(-INFINITY), sum = {};
  for (long i = 0; i < keys; i += W) {
    V v = inside(start + i, first, last, capped(load(row + i), by), -INFINITY);
    store(row + i, v);
    most = maximum(most, v);
  }
  float top = lanes_max(most);
  if (by.sinks) top = std::max(top, by.sinks[head]);
  for (long i = 0; i < keys; i += W) {
    V e = exponential(load(row + i) - top);
    store(row + i, e);
    sum += e;
  }
  total = lanes_sum(sum);
  if (by.sinks) total += first_of(exponential(splat(by.sinks[head] - top)));
  lse = top + (float)log((double)total);
}

// Queries of `tokens` consecutive positions and one key/value head, as rows: token by token, `group`
// heads each.
template <class T>
INLINE void gather(const T* x, long x_row, long tokens, long group, long E, float* out) {
  for (long t = 0; t < tokens; t++)
    for (long i = 0; i < group * E; i++) out[t * group * E + i] = number(x[t * x_row + i]);
}
// Attention of the queries q, the first one at position `at` and of head `head`, to the keys from
// position `start` on, a multiple of 16. place(n): where key `start` + n is [E, stride], and its value
// [keys, E]; `page` keys (a multiple of 16, or all) lie beside each other from there. out: rows of
// `heads` E numbers. lse: null, or rows of `heads`.
template <class T, class Place>
INLINE void attend(const T* q, long q_row, long tokens, long group, long E, long at, long start,
                   long page, long stride, Place place, long head, long heads, const Scoring& by,
                   T* out, float* lse) {
  long rows = tokens * group, seen = at + tokens - start, width = (seen + W - 1) / W * W;
  float *query = scratch(3, rows * E), *scores = scratch(4, rows * width);
  float *made = scratch(5, rows * E), *totals = scratch(8, rows);
  gather(q, q_row, tokens, group, E, query);
  for (long n = 0; n < seen; n += page)
    product(rows, (std::min(page, seen - n) + W - 1) / W * W, E, query, E, 1, place(n).first, stride,
            scores + n, width, false);
  for (long r = 0; r < rows; r++) {
    long t = r / group, g = r % group, first = by.window ? std::max(0l, at + t - by.window + 1) : 0;
    float unused, *own = lse ? lse + t * heads + g : &unused;
    softmax_row(scores + r * width, start, width, first, at + t, by, head + g, totals[r], *own);
  }
  for (long n = 0; n < seen; n += page)
    product(rows, E, std::min(page, seen - n), scores + n, width, 1, place(n).second, E, made, E,
            n > 0);
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < E; i += W)
      store(out + (r / group * heads + r % group) * E + i, load(made + r * E + i) / totals[r]);
}

// Write keys and values [T, K, E] of new tokens into their pages, then attend. Of sequence s:
// counts[s] tokens from position starts[s], in rows from firsts[s]; its pages are tables[s, :].
// A page of keys is [E, PAGE], one of values [PAGE, E].
template <class T>
void paged(const T* q, long q_row, const T* k, long k_row, const T* v, long v_row, T* keys, T* values,
           const int64_t* tables, long table_row, const int64_t* starts, const int64_t* counts,
           const int64_t* firsts, long sequences, long heads, long kv_heads, long E, float scale,
           float softcap, long window, const float* sinks, T* out, int threads) {
  long group = heads / kv_heads, together = std::max(1l, QUERIES / group);
  Scoring by{scale, softcap, window, sinks};
  std::vector<std::array<long, 3>> tasks;  // sequence, its first token, head
  for (long s = 0; s < sequences; s++)
    for (long t = 0; t < counts[s]; t += together)
      for (long h = 0; h < kv_heads; h++) tasks.push_back({s, t, h});
#pragma omp parallel num_threads(threads) if (sequences * heads * E >= GRAIN / 4)
  {
#pragma omp for schedule(static)
    for (long s = 0; s < sequences; s++)
      for (long t = 0; t < counts[s]; t++) {
        long at = starts[s] + t, page = tables[s * table_row + at / PAGE], row = firsts[s] + t;
        for (long h = 0; h < kv_heads; h++) {
          T* to = keys + (page * kv_heads + h) * PAGE * E + at % PAGE;
          for (long i = 0; i < E; i++) to[i * PAGE] = k[row * k_row + h * E + i];
          memcpy(values + ((page * kv_heads + h) * PAGE + at % PAGE) * E, v + row * v_row + h * E,
                 E * sizeof(T));
        }
      }
#pragma omp for schedule(dynamic)
    for (long n = 0; n < (long)tasks.size(); n++) {
      auto [s, t, h] = tasks[n];
      long row = firsts[s] + t, at = starts[s] + t, low = window ? std::max(0l, at - window + 1) : 0;
      auto place = [&, s = s, h = h](long key) {
        long from = (tables[s * table_row + low / PAGE + key / PAGE] * kv_heads + h) * PAGE * E;
        return std::pair(keys + from, values + from);
      };
      attend(q + row * q_row + h * group * E, q_row, std::min(together, counts[s] - t), group, E, at,
             low / PAGE * PAGE, PAGE, PAGE, place, h * group, heads, by,
             out + (row * heads + h * group) * E, (float*)nullptr);
    }
  }
}

// A layer's parts: biases, norms of queries and keys and the window may be null.
template <class T>
struct Layer {
  const T *qkv_bias, *gate_up_bias, *o_bias, *down_bias, *norm, *later_norm, *q_norm, *k_norm;
  const T *qkv, *gate_up, *o, *down;
  int64_t window;
};

// Dense layers over pages: x [rows, D] to out, with the bits of the kernels above one by one. work
// has rows x (2 D + widest) numbers, where widest is the larger of 3 F and 3 (heads + kv_heads) E.
template <class T>
void layers(const T* x, long rows, long D, long F, const Layer<T>* layers, long count, float epsilon,
            const T* cosine, const T* sine, T* const* caches, const int64_t* tables, long table_row,
            const int64_t* starts, const int64_t* counts, const int64_t* firsts, long sequences,
            long heads, long kv_heads, long E, float scale, decltype(&linear<T>) multiply, T* work,
            T* out, int threads) {
  const T* none = nullptr;
  long both = heads + kv_heads, all = both + kv_heads;
  T *total = work, *normed = total + rows * D, *made = normed + rows * D;
  T *turned = made + rows * all * E, *seen = turned + rows * both * E, *inner = made + rows * 2 * F;
  for (long n = 0; n < count; n++, x = out) {
    const Layer<T>& at = layers[n];
    rms_norm(x, none, at.norm, epsilon, rows, D, (T*)nullptr, normed, nullptr, threads);
    multiply(normed, rows, D, at.qkv, all * E, at.qkv_bias, made, threads);
    if (at.q_norm) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * both * E >= GRAIN)
      for (long r = 0; r < rows; r++) {
        T *q = made + r * all * E, *k = q + heads * E;
        rms_norm(q, none, at.q_norm, epsilon, heads, E, (T*)nullptr, q, nullptr, 1);
        rms_norm(k, none, at.k_norm, epsilon, kv_heads, E, (T*)nullptr, k, nullptr, 1);
      }
    }
    rotate(made, all * E, cosine, sine, 1.0f, rows, both, E, turned, threads);
    paged(turned, both * E, turned + heads * E, both * E, made + both * E, all * E, caches[2 * n],
          caches[2 * n + 1], tables, table_row, starts, counts, firsts, sequences, heads, kv_heads, E,
          scale, 0.0f, at.window, nullptr, seen, threads);
    multiply(seen, rows, heads * E, at.o, D, at.o_bias, normed, threads);
    rms_norm(x, normed, at.later_norm, epsilon, rows, D, total, normed, nullptr, threads);
    multiply(normed, rows, D, at.gate_up, 2 * F, at.gate_up_bias, made, threads);
    swiglu(made, rows, F, inner, threads);
    multiply(inner, rows, F, at.down, D, at.down_bias, normed, threads);
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * D >= GRAIN)
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < D; i += W) {
        long left = D - i, place = r * D + i;
        put(out + place, take(total + place, left) + take(normed + place, left), left);
      }
  }
}

// The keys that a segment [first, rows, prefix_first, prefix] of a packed pass sees: by element in
// `turned` [E, columns] and by token in `plain` [columns, E], either of which may be null.
template <class T>
INLINE void collect(const T* x, long x_row, const int64_t* segment, long E, long columns,
                    float* turned, float* plain) {
  long rows = segment[1], prefix = segment[3];
  for (long j = 0; j < columns; j++) {
    long row = j < prefix ? segment[2] + j : segment[0] + j - prefix;
    for (long i = 0; i < E; i++) {
      float value = j < prefix + rows ? number(x[row * x_row + i]) : 0.0f;
      if (turned) turned[i * columns + j] = value;
      if (plain) plain[j * E + i] = value;
    }
  }
}

// Attention of packed segments, int64 [S, 4] as in types.Microbatch; lse float32 [T, H].
template <class T>
void packed(const T* q, long q_row, const T* k, long k_row, const T* v, long v_row,
            const int64_t* segments, long count, long heads, long kv_heads, long E, float scale,
            float softcap, long window, const float* sinks, T* out, float* lse, int threads) {
  long group = heads / kv_heads, together = std::max(1l, QUERIES / group);
  Scoring by{scale, softcap, window, sinks};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long n = 0; n < count * kv_heads; n++) {
    const int64_t* segment = segments + n / kv_heads * 4;
    long h = n % kv_heads, prefix = segment[3], columns = (prefix + segment[1] + W - 1) / W * W;
    float *key = scratch(1, columns * E), *value = scratch(2, columns * E);
    collect(k + h * E, k_row, segment, E, columns, key, (float*)nullptr);
    collect(v + h * E, v_row, segment, E, columns, (float*)nullptr, value);
    for (long t = 0; t < segment[1]; t += together) {
      long row = segment[0] + t, at = prefix + t;
      long low = window ? std::max(0l, at - window + 1) / W * W : 0;
      auto place = [&](long) { return std::pair(key + low, value + low * E); };
      attend(q + row * q_row + h * group * E, q_row, std::min(together, segment[1] - t), group, E, at,
             low, columns, columns, place, h * group, heads, by,
             out + (row * heads + h * group) * E, lse + row * heads + h * group);
    }
  }
}

// The gradients of `packed`, float32 and zero before. groups int64 [G + 1]: segments groups[g] to
// groups[g + 1] share no keys with others. lost float32 [T, H]: sums of probability x its gradient.
template <class T>
void packed_backward(const T* q, long q_row, const T* k, long k_row, const T* v, long v_row,
                     const T* above, const float* lse, const int64_t* segments,
                     const int64_t* groups, long count, long heads, long kv_heads, long E,
                     float scale, float softcap, long window, float* grad_q, float* grad_k,
                     float* grad_v, float* lost, int threads) {
  long group = heads / kv_heads, together = std::max(1l, QUERIES / group);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long n = 0; n < count * kv_heads; n++) {
    long h = n % kv_heads;
    for (long s = groups[n / kv_heads]; s < groups[n / kv_heads + 1]; s++) {
      const int64_t* segment = segments + s * 4;
      long prefix = segment[3], all = prefix + segment[1], columns = (all + W - 1) / W * W;
      float *key = scratch(1, columns * E), *value = scratch(2, columns * E);
      float *plain = scratch(3, columns * E), *of_keys = scratch(4, 2 * columns * E);
      float* of_values = of_keys + columns * E;
      collect(k + h * E, k_row, segment, E, columns, key, plain);
      collect(v + h * E, v_row, segment, E, columns, value, (float*)nullptr);
      memset(of_keys, 0, 2 * columns * E * sizeof(float));
      for (long t = 0; t < segment[1]; t += together) {
        long tokens = std::min(together, segment[1] - t), rows = tokens * group, at = prefix + t;
        long low = window ? std::max(0l, at - window + 1) / W * W : 0, row = segment[0] + t;
        long seen = at + tokens - low, width = (seen + W - 1) / W * W;
        float *query = scratch(5, 2 * rows * E), *up = query + rows * E;
        float *probs = scratch(6, 2 * rows * width), *slopes = probs + rows * width;
        float* made = scratch(7, rows * E);
        gather(q + row * q_row + h * group * E, q_row, tokens, group, E, query);
        gather(above + row * heads * E + h * group * E, heads * E, tokens, group, E, up);
        product(rows, width, E, query, E, 1, key + low, columns, probs, width, false);
        product(rows, width, E, up, E, 1, value + low, columns, slopes, width, false);
        Scoring by{scale, softcap, window, nullptr};
        for (long r = 0; r < rows; r++) {
          long position = at + r / group, first = window ? std::max(0l, position - window + 1) : 0;
          long place = (row + r / group) * heads + h * group + r % group;
          float *p = probs + r * width, *d = slopes + r * width, *bend = scratch(8, width);
          V sum = {};
          for (long i = 0; i < width; i += W) {
            V v = capped(load(p + i), by), of_cap = v * (softcap == 0.0f ? 0.0f : 1.0f / softcap);
            V own = exponential(inside(low + i, first, position, v, -INFINITY) - lse[place]);
            store(bend + i, scale - scale * of_cap * of_cap);
            store(p + i, own);
            sum += own * load(d + i);
          }
          float mean = lost[place] = lanes_sum(sum);
          for (long i = 0; i < width; i += W)
            store(d + i, load(p + i) * (load(d + i) - mean) * load(bend + i));
        }
        product(rows, E, seen, slopes, width, 1, plain + low * E, E, made, E, false);
        for (long t2 = 0; t2 < tokens; t2++)
          memcpy(grad_q + (row + t2) * heads * E + h * group * E, made + t2 * group * E,
                 group * E * sizeof(float));
        product(seen, E, rows, slopes, 1, width, query, E, of_keys + low * E, E, true);
        product(seen, E, rows, probs, 1, width, up, E, of_values + low * E, E, true);
      }
      for (long j = 0; j < all; j++) {
        long row = j < prefix ? segment[2] + j : segment[0] + j - prefix;
        for (long i = 0; i < E; i++) {
          grad_k[(row * kv_heads + h) * E + i] += of_keys[j * E + i];
          grad_v[(row * kv_heads + h) * E + i] += of_values[j * E + i];
        }
      }
    }
  }
}
