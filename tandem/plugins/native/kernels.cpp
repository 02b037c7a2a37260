// The kernels of body.h for each instruction set, found by name at run time.
//
// They are compiled with OpenMP but not linked to it: torch has loaded one, and two teams of threads
// on the same cores would wait for each other.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#if defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)  // which knows no GCC target
#define HAS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int W = 16;         // numbers of a vector
constexpr int PANEL = 64;     // outputs of a linear that stand beside each other
constexpr long PAGE = 128;    // tokens of a page, as in model/paged_attention.py
constexpr long BLOCK = 128;   // tokens of the vocabulary
constexpr long QUERIES = 24;  // query rows that are attended together
constexpr long GRAIN = 1 << 15; // numbers of a row kernel that are worth a second thread
constexpr long FEW = 36;          // rows of a linear, up to which memory bounds it
constexpr long MANY = 1008;        // rows of a linear that are copied together
constexpr long STEPS = 768;       // of a sum, whose factors stay in the cache
constexpr int AHEAD = 16;     // steps of a product that are fetched before they are used

struct bf16 {
  uint16_t bits;
};

// A thread's memory, kept from call to call.
float* scratch(int which, size_t count) {
  static thread_local std::vector<float> kept[9];
  auto& own = kept[which];
  if (own.size() < count + 2 * W) own.resize(count + 2 * W);
  return (float*)(((uintptr_t)own.data() + 63) / 64 * 64);
}

// REGISTERS: vectors of sums that fit. ROWS: of a linear, beside each other.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#define REGISTERS 28
#define ROWS 14
namespace avx512 {
#include "avx512.h"
#include "body.h"
}
#pragma GCC pop_options
#ifdef HAS_TILES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,amx-tile,amx-bf16")
#define AMX
namespace amx {
#include "tiles.h"
}
#undef AMX
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")
namespace pairs {
#include "tiles.h"
}
#pragma GCC pop_options
#endif
#undef REGISTERS
#undef ROWS
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define REGISTERS 6
#define ROWS 6
namespace avx2 {
#include "avx2.h"
#include "body.h"
}
#pragma GCC pop_options

struct Kernel {
  const char* name;
  void *avx512, *avx2;
};
#define TYPED(name) \
  {#name ".float32", (void*)avx512::name<float>, (void*)avx2::name<float>}, \
  {#name ".bfloat16", (void*)avx512::name<bf16>, (void*)avx2::name<bf16>}
#define PLAIN(name) {#name, (void*)avx512::name, (void*)avx2::name}
const Kernel kernels[] = {
    TYPED(linear), TYPED(pack), TYPED(rms_norm), TYPED(rms_norm_backward), TYPED(rotate),
    TYPED(swiglu), TYPED(swiglu_backward), TYPED(paged), TYPED(packed), TYPED(packed_backward),
    TYPED(layers),
#ifdef HAS_TILES
    {"linear_tiles.bfloat16", (void*)amx::linear_tiles, (void*)amx::linear_tiles},
    {"linear_pairs.bfloat16", (void*)pairs::linear_tiles, nullptr},
    {"pack_tiles.bfloat16", (void*)pairs::pack_tiles, (void*)pairs::pack_tiles},
#endif
    PLAIN(multiply), PLAIN(log_softmax), PLAIN(target_logprobs), PLAIN(logprob_slope), PLAIN(inverse_cdf),
};

}  // namespace

// What library.py must find: another number for other arguments, or for other bits.
extern "C" int edition() { return 4; }

// The address of a kernel, or null where this processor lacks the instruction set.
extern "C" void* find_kernel(const char* name, int wide) {
  __builtin_cpu_init();
  bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (wide ? !has_avx512 : !has_avx2) return nullptr;
#ifdef HAS_TILES
  if (strstr(name, "tiles")) syscall(SYS_arch_prctl, 0x1023, 18);  // asks Linux for their registers
#endif
  for (const Kernel& kernel : kernels)
    if (!strcmp(kernel.name, name)) return wide ? kernel.avx512 : kernel.avx2;
  return nullptr;
}
