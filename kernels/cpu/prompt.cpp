// Attention of prompts: keys and values are arranged once, head by head, then threads take blocks of queries.
#include "prompt.h"

#include "pool.h"

namespace mla {
namespace {

constexpr int64_t MOST_ARRANGED = 64 << 20;  // bytes of keys and values that lie arranged at a time

// PyTorch's own threads, if its OpenMP has been found: they spin for a while after each of its products, and threads of ours
// would have to wait for a core until they rest.
typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
Parallel parallel = nullptr;

struct Workshop {
  std::mutex busy;
  Pool pool;
  Room<char> arranged, trays;
};

template <class Work>
void together(Workshop& shop, int threads, Work work) {
  if (threads == 1 || !parallel) return shop.pool.run(threads, work);
  struct Shared {
    Work* work;
    std::atomic<int> next;
  } shared{&work, {0}};
  parallel([](void* at) { (*((Shared*)at)->work)(((Shared*)at)->next.fetch_add(1)); }, &shared, threads, 0);
}

template <class Op, class T>
void attend_prompt(const Prompt& p) {
  typedef typename Op::unit unit;
  Workshop& shop = of_this_process<Workshop>();
  std::lock_guard<std::mutex> held(shop.busy);
  int64_t blocks = (p.keys + KEYS - 1) / KEYS, room = blocks * KEYS;
  int64_t units = paired(p.own) / Op::PER, shared = paired(p.shared) / Op::PER, wide = paired(p.v_dim);
  int64_t of_head = room * (units + wide / Op::PER), of_all = room * shared;
  int64_t tray = QUERIES * (units + shared + wide + LANES) + Op::TOGETHER * 2 * KEYS;
  int groups = (int)(MOST_ARRANGED / sizeof(unit) / of_head);
  groups = groups < 1 ? 1 : groups > p.kv_heads ? p.kv_heads : groups;
  unit* arranged = (unit*)shop.arranged.room((of_all + groups * of_head) * sizeof(unit));
  unit* trays = (unit*)shop.trays.room(tray * sizeof(unit) * p.threads);
  int each = p.heads / p.kv_heads, parts = (p.tokens + QUERIES - 1) / QUERIES;
  auto of_group = [&](int g) {
    unit* at = arranged + of_all + g * of_head;
    return Arranged<Op>{at, at + room * units};
  };
  auto in_turn = [&](int64_t count, auto work) {
    std::atomic<int64_t> next{0};
    together(shop, p.threads, [&](int id) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i, id);
    });
  };
  for (int row = 0; row < p.batch; row++)
    for (int first = 0; first < p.kv_heads; first += groups) {
      int here = p.kv_heads - first < groups ? p.kv_heads - first : groups;
      in_turn(blocks * (here + 1), [&](int64_t i, int) {
        int64_t s = i / (here + 1) * KEYS;
        int g = (int)(i % (here + 1)), tokens = (int)(p.keys - s < KEYS ? p.keys - s : KEYS);
        if (g == here) {
          const T* rope = (const T*)p.k_rope + row * p.k_rope_row + s * p.k_rope_token;
          if (shared && first == 0) Op::arrange_keys(rope, p.k_rope_token, tokens, p.shared, arranged + s * shared, nullptr);
          return;
        }
        const T* k = (const T*)p.k + row * p.k_row + s * p.k_token + (first + g) * p.k_head;
        const T* v = (const T*)p.v + row * p.v_row + s * p.v_token + (first + g) * p.v_head;
        Arranged<Op> to = of_group(g);
        if (units) Op::arrange_keys(k, p.k_token, tokens, p.own, to.turned + s * units, nullptr);
        Op::arrange_keys(v, p.v_token, tokens, p.v_dim, nullptr, to.values + s / Op::PER * wide);
      });
      // The last queries see most: they come first, so that no thread is left with them.
      in_turn((int64_t)parts * here * each, [&](int64_t i, int id) {
        unit* at = trays + id * tray;
        Tray<Op> mine{at, at + QUERIES * (units + shared), nullptr, nullptr, {}, nullptr};
        mine.scores = (float*)(mine.weights + Op::TOGETHER * KEYS);
        mine.out = mine.scores + Op::TOGETHER * KEYS;
        mine.mass = mine.out + QUERIES * wide;
        int head = (int)(i % (here * each));
        attend_block<Op, T>(p, row, first * each + head, (parts - 1 - (int)(i / (here * each))) * QUERIES,
                            of_group(head / each), arranged, mine);
      });
    }
}

}  // namespace
}  // namespace mla

extern "C" {
void mla_prompt(const mla::Prompt* p) {
  if (p->type == mla::F32) return mla::attend_prompt<mla::Singles, float>(*p);
#ifdef MLA_HAS_BF16
#ifdef MLA_HAS_AMX
  if (mla::tiles_allowed()) return mla::attend_prompt<mla::Tiles, mla::bf16>(*p);
#endif
  mla::attend_prompt<mla::Pairs, mla::bf16>(*p);
#else
  mla::attend_prompt<mla::Singles, mla::bf16>(*p);
#endif
}
void mla_share_threads(mla::Parallel given) { mla::parallel = given; }  // `GOMP_parallel`
int64_t mla_prompt_size() { return sizeof(mla::Prompt); }
}
