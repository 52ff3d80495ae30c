// One new token for every sequence through all layers of a decoder: one call a step. Threads share the rows of every matrix
// and the tokens of every sequence, phase by phase.
#include <vector>

#include "attention_amx.h"
#include "cache.h"
#include "linear_amx.h"
#include "pool.h"

namespace mla {
namespace {

constexpr int OUTPUTS = 32;           // of a matrix, that a thread takes at a time
// Tokens of a split: a task for each of a few threads, and not more than that before one repays what its start and end cost;
// of a long sequence so many that they stay more than threads, so that one that is held up leaves its share to others.
constexpr int64_t LEAST_SPLIT = 256, ENOUGH_SPLIT = 1024;
constexpr int FEW_SPLITS = 4, MOST_SPLITS = 16;
constexpr int PHASES = 12;            // of a layer, at most

struct Split {
  int row, group;
  int64_t begin, end;
};

struct Cut {  // how a step's sequences are split for layers with the same window and groups
  int window, groups;
  std::vector<Split> splits;
  std::vector<int> first;  // of each row and group, and the end
};

struct Me {  // one thread
  float* tile;
  uint32_t* rows;  // of an `Input`
  int threads;     // in all
  int phase = 0;
};

class Engine {
 public:
  void step(Step& s);
  void linear(const Linear& l, const float* x, int rows, float* out, int threads);

 private:
  void prepare(const Step& s);
  const Cut& cut_for(const Layer& l, const Step& s);
  void layer(const Layer& l, int index, Step& s, Me& me);
  void attention_inputs(const Layer& l, int index, Step& s, int task);
  void attention_output(const Layer& l, const Cut& cut, int row, int head, Me& me);

  // work(i) for every i < count, by all threads.
  template <class Work>
  void each(Me& me, int count, Work work) {
    phases_[me.phase++].share(count, work);
  }
  // Of several matrices over the same input, OUTPUTS outputs at a time: put(which, row, output, value).
  template <class Put>
  void products(Me& me, std::initializer_list<const Linear*> parts, const float* x, int64_t ldx, int rows, Put put) {
    Input in(x, ldx, rows, (*parts.begin())->k, me.threads, me.rows);
    int count = 0;
    for (const Linear* l : parts) count += (l->n + OUTPUTS - 1) / OUTPUTS;
    each(me, count, [&](int i) {
      int which = 0;
      for (const Linear* l : parts) {
        int blocks = (l->n + OUTPUTS - 1) / OUTPUTS;
        if (i < blocks) {
          int begin = i * OUTPUTS, end = begin + OUTPUTS < l->n ? begin + OUTPUTS : l->n;
          apply(*l, begin, end, in, [&](int m, int n, float value) { put(which, m, n, value); });
          return;
        }
        i -= blocks;
        which++;
      }
    });
  }

  Pool pool_;
  std::vector<Phase> phases_;
  std::vector<Cut> cuts_;
  std::vector<const Cut*> cut_of_;  // each layer
  Room<float> normed_, q_, low_q_, kv_, absorbed_, heads_, inner_, partial_, mass_, tiles_;
  Room<uint32_t> inputs_;
  int64_t tile_floats_ = 0, input_floats_ = 0;
};

int64_t query_width(const Layer& l) { return l.latent ? padded(l.rank) + padded(l.rope) : padded(l.nope); }
int64_t value_width(const Layer& l) { return l.latent ? padded(l.rank) : padded(l.v_dim); }

void Engine::prepare(const Step& s) {
  int64_t m = s.rows, q = 0, low = 0, kv = 0, absorbed = 0, heads = 0, partial = 0, mass = 0, tile = 0, widest = s.hidden;
  auto more = [](int64_t& now, int64_t wanted) { now = wanted > now ? wanted : now; };
  cuts_.clear();
  cuts_.reserve(s.num_layers);
  cut_of_.clear();
  for (int i = 0; i < s.num_layers; i++) {
    const Layer& l = s.layers[i];
    cut_of_.push_back(&cut_for(l, s));
    int64_t splits = (int64_t)cut_of_.back()->splits.size();
    int64_t each = l.latent ? l.heads : l.heads / l.kv_heads;
    more(q, m * l.heads * (l.nope + (l.latent ? l.rope : 0)));
    more(low, m * l.q_a.n);
    for (int k : {l.q.k, l.o.k, l.down.k}) more(widest, k);
    more(kv, m * (l.latent ? l.rank + l.rope : l.kv_heads * (l.nope + l.v_dim)));
    more(absorbed, m * l.heads * query_width(l));
    more(heads, m * l.heads * l.v_dim);
    more(partial, splits * each * value_width(l));
    more(mass, splits * each * 2);
    int64_t first = padded(l.latent ? l.rank : l.nope), second = padded(l.latent ? l.rope : l.v_dim);
    // Room for rows of 32 channels, too (see attention_bf16.h).
    more(tile, TOKENS * 2 * (first + second + 2 * LANES) + each * (2 * TOKENS + query_width(l) + 2 * LANES) + LANES);
#ifdef MLA_HAS_VNNI
    if (l.latent) more(tile, int8_floats(l.rank, l.rope, l.heads));
#endif
#ifdef MLA_HAS_TILES
    if (l.latent) more(tile, tile_floats(l.rank, l.rope, l.heads));
#endif
  }
  normed_.room(m * s.hidden);
  q_.room(q);
  low_q_.room(low);
  kv_.room(kv);
  absorbed_.room(absorbed);
  heads_.room(heads);
  inner_.room(m * s.intermediate);
  partial_.room(partial + partial / 4);  // grows with every token
  mass_.room(mass + mass / 4);
  tile_floats_ = padded(tile);
  tiles_.room(tile_floats_ * s.threads);
  input_floats_ = padded(Input::floats(s.rows, widest));
  inputs_.room(input_floats_ * s.threads);
}

// Which tokens of which sequence a task reads.
const Cut& Engine::cut_for(const Layer& l, const Step& s) {
  int groups = l.latent ? 1 : l.kv_heads;
  for (const Cut& cut : cuts_)
    if (cut.window == l.window && cut.groups == groups) return cut;
  cuts_.push_back({l.window, groups, {}, {}});
  Cut& cut = cuts_.back();
  for (int row = 0; row < s.rows; row++) {
    int64_t end = s.positions[row] + 1, begin = l.window && end > l.window ? end - l.window : 0;
    // By its own length alone: sums do not depend on what else runs, nor on the threads.
    int64_t seen = end - begin;
    int64_t size = std::max(std::min(seen / FEW_SPLITS + 1, ENOUGH_SPLIT), seen / MOST_SPLITS + 1);
    size = (std::max(size, LEAST_SPLIT) + PAGE - 1) / PAGE * PAGE;
    for (int group = 0; group < groups; group++) {
      cut.first.push_back((int)cut.splits.size());
      for (int64_t at = begin, next; at < end; at = next) {
        next = std::min(at / PAGE * PAGE + size, end);
        cut.splits.push_back({row, group, at, next});
      }
    }
  }
  cut.first.push_back((int)cut.splits.size());
  return cut;
}

template <class W>
void absorb(const W* w, const float* q, int nope, int rank, float scale, float* out) {
  int c = 0;
  for (; c + 4 * LANES <= rank; c += 4 * LANES) {
    vf acc[4] = {};
    for (int n = 0; n < nope; n++)
      for (int v = 0; v < 4; v++) acc[v] += q[n] * load(w + (int64_t)n * rank + c + v * LANES);
    for (int v = 0; v < 4; v++) store(out + c + v * LANES, acc[v] * scale);
  }
  for (; c < rank; c += LANES) {
    int some = rank - c < LANES ? rank - c : LANES;
    vf acc = {};
    for (int n = 0; n < nope; n++) acc += q[n] * load_first(w + (int64_t)n * rank + c, some);
    store(out + c, acc * scale);
  }
}

// Task of a row: one of its heads' queries, or, as the last, what the token leaves in the cache.
void Engine::attention_inputs(const Layer& l, int index, Step& s, int task) {
  int row = task / (l.heads + 1), head = task % (l.heads + 1);
  const float *cos = nullptr, *sin = nullptr;
  if (l.table >= 0) {
    cos = s.cos[l.table] + (int64_t)row * s.columns[l.table];
    sin = s.sin[l.table] + (int64_t)row * s.columns[l.table];
  }
  int64_t position = s.positions[row];
  if (head < l.heads) {
    int width = l.nope + (l.latent ? l.rope : 0);
    const float* q = q_.data + ((int64_t)row * l.heads + head) * width;
    float* out = absorbed_.data + ((int64_t)row * l.heads + head) * query_width(l);
    if (l.latent) {
      int64_t first = (int64_t)head * (l.nope + l.v_dim) * l.rank;
      if (l.kv_b.type == BF16)
        absorb((const bf16*)l.kv_b.w + first, q, l.nope, l.rank, l.scale, out);
      else
        absorb((const float*)l.kv_b.w + first, q, l.nope, l.rank, l.scale, out);
      float* rope = out + padded(l.rank);
      if (cos)
        rotate(q + l.nope, rope, l.rope, l.interleaved, cos, sin, l.frequencies, l.scale);
      else
        for (int i = 0; i < l.rope; i++) rope[i] = q[l.nope + i] * l.scale;
    } else {
      int turned = cos ? l.rope : 0;
      if (cos) rotate(q, out, turned, l.interleaved, cos, sin, l.frequencies, l.scale);
      for (int i = turned; i < l.nope; i++) out[i] = q[i] * l.scale;
    }
    return;
  }
  bool finite = true;
  if (l.latent) {
    float* latent = kv_.data + (int64_t)row * (l.rank + l.rope);
    float* key = latent + l.rank;
    norm(l.of_latent, latent, latent, l.rank);
    if (cos) rotate(key, key, l.rope, l.interleaved, cos, sin, l.frequencies, 1.0f);
    finite = write_entry(l.first, row, position, 0, latent, l.rank);
    if (l.rope) finite = write_entry(l.second, row, position, 0, key, l.rope) && finite;
  } else {
    int keys = l.kv_heads * l.nope, values = l.kv_heads * l.v_dim;
    float* k = kv_.data + (int64_t)row * (keys + values);
    for (int g = 0; g < l.kv_heads && cos; g++)
      rotate(k + g * l.nope, k + g * l.nope, l.rope, l.interleaved, cos, sin, l.frequencies, 1.0f);
    write_entry(l.first, row, position, 0, k, keys);
    write_entry(l.second, row, position, 0, k + keys, values);
  }
  if (!finite) s.failed = index;
}

// One head's splits together, and back from the latent to the head's values.
void Engine::attention_output(const Layer& l, const Cut& cut, int row, int head, Me& me) {
  int groups = l.latent ? 1 : l.kv_heads, each = l.heads / groups, group = head / each, mine = head % each;
  int first = cut.first[row * groups + group], end = cut.first[row * groups + group + 1];
  int64_t wide = value_width(l);
  float most = -INFINITY, mass = 0;
  for (int i = first; i < end; i++) most = std::fmax(most, mass_.data[((int64_t)i * each + mine) * 2]);
  float* total = me.tile;
  memset(total, 0, wide * sizeof(float));
  for (int i = first; i < end; i++) {
    const float* held = mass_.data + ((int64_t)i * each + mine) * 2;
    float share = std::exp(held[0] - most);
    mass += share * held[1];
    const float* part = partial_.data + ((int64_t)i * each + mine) * wide;
    for (int64_t c = 0; c < wide; c += LANES) store(total + c, load(total + c) + share * load(part + c));
  }
  float whole = 1.0f / mass;
  float* out = heads_.data + ((int64_t)row * l.heads + head) * l.v_dim;
  if (!l.latent) {
    for (int i = 0; i < l.v_dim; i++) out[i] = total[i] * whole;
    return;
  }
  auto put = [&](int base) { return [=](int, int n, float value) { out[base + n] = value * whole; }; };
  int64_t at = ((int64_t)head * (l.nope + l.v_dim) + l.nope) * l.rank;
  auto up = [&](const auto* w) {
    int n = 0;
    for (; n + 4 <= l.v_dim; n += 4) rows_of<4>(w + at + (int64_t)n * l.rank, l.rank, total, 0, 1, l.rank, put(n));
    for (; n < l.v_dim; n++) rows_of<1>(w + at + (int64_t)n * l.rank, l.rank, total, 0, 1, l.rank, put(n));
  };
  if (l.kv_b.type == BF16)
    up((const bf16*)l.kv_b.w);
  else
    up((const float*)l.kv_b.w);
}

void Engine::layer(const Layer& l, int index, Step& s, Me& me) {
  int m = s.rows, d = s.hidden;
  const Cut& cut = *cut_of_[index];
  each(me, m, [&](int row) { norm(l.before_attention, s.x + (int64_t)row * d, normed_.data + (int64_t)row * d, d); });

  int q_width = l.q.n, low = l.q_a.n;
  int kv_width = l.latent ? l.kv_a.n : l.k.n + l.v.n;
  auto kv_put = [&](int column, int row, int n, float value) { kv_.data[(int64_t)row * kv_width + column + n] = value; };
  const Linear& query = low ? l.q_a : l.q;
  float* query_out = low ? low_q_.data : q_.data;
  auto put = [&](int which, int row, int n, float value) {
    if (which == 0)
      query_out[(int64_t)row * query.n + n] = value;
    else
      kv_put(which == 2 ? l.k.n : 0, row, n, value);
  };
  if (l.latent)
    products(me, {&query, &l.kv_a}, normed_.data, d, m, put);
  else
    products(me, {&query, &l.k, &l.v}, normed_.data, d, m, put);
  if (low) {
    each(me, m, [&](int row) { norm(l.of_query, low_q_.data + (int64_t)row * low, low_q_.data + (int64_t)row * low, low); });
    products(me, {&l.q}, low_q_.data, low, m, [&](int, int row, int n, float value) { q_.data[(int64_t)row * q_width + n] = value; });
  }

  each(me, m * (l.heads + 1), [&](int task) { attention_inputs(l, index, s, task); });
  int groups = l.latent ? 1 : l.kv_heads, heads = l.heads / groups;
  int64_t ldq = query_width(l), wide = value_width(l);
  each(me, (int)cut.splits.size(), [&](int i) {
    const Split& part = cut.splits[i];
    Keys keys{&l.first, &l.second, part.row, l.latent ? 0 : (int64_t)part.group * l.nope, l.latent ? l.rank : l.nope,
              l.latent ? l.rope : l.v_dim, l.latent != 0};
    int64_t natural = TOKENS * (padded(keys.first_width) + padded(keys.second_width) + 2 * LANES);
    float* weights = me.tile + 2 * natural;
    Tile tile{me.tile, me.tile + natural, weights, weights + heads * TOKENS, weights + 2 * heads * TOKENS};
    float tops[256], masses[256];
    auto work = attend;
#ifdef MLA_HAS_BF16
    if (suits_bf16(l.first, l.second)) work = attend_bf16;
#endif
#ifdef MLA_HAS_VNNI
    if (l.latent && suits_int8(l.first, l.second, l.rank)) work = attend_int8;
#endif
#ifdef MLA_HAS_TILES
    if (l.latent && suits_tiles(l.first, l.second, l.rank)) work = attend_tiles;
#endif
    work(keys, absorbed_.data + ((int64_t)part.row * l.heads + part.group * heads) * ldq, ldq, heads, part.begin, part.end,
           l.softcap, tile, partial_.data + (int64_t)i * heads * wide, tops, masses);
    for (int h = 0; h < heads; h++) {
      mass_.data[((int64_t)i * heads + h) * 2] = tops[h];
      mass_.data[((int64_t)i * heads + h) * 2 + 1] = masses[h];
    }
  });
  each(me, m * l.heads, [&](int i) { attention_output(l, cut, i / l.heads, i % l.heads, me); });
  auto add = [&](int, int row, int n, float value) { s.x[(int64_t)row * d + n] += value; };
  products(me, {&l.o}, heads_.data, l.o.k, m, add);

  each(me, m, [&](int row) { norm(l.before_mlp, s.x + (int64_t)row * d, normed_.data + (int64_t)row * d, d); });
  int wide_mlp = l.up.n;
  Input in(normed_.data, d, m, d, me.threads, me.rows);
  each(me, (wide_mlp + OUTPUTS - 1) / OUTPUTS, [&](int i) {
    int begin = i * OUTPUTS, end = begin + OUTPUTS < wide_mlp ? begin + OUTPUTS : wide_mlp;
    auto at = [&](int row) { return inner_.data + (int64_t)row * wide_mlp; };
    const Linear& acted = l.gate.n ? l.gate : l.up;
    apply(acted, begin, end, in, [&](int row, int n, float value) { at(row)[n] = value; });
    for (int row = 0; row < m; row++)
      for (int n = begin; n < end; n += LANES) {
        int some = end - n < LANES ? end - n : LANES;
        store_first(at(row) + n, activate(load_first(at(row) + n, some), l.activation), some);
      }
    if (l.gate.n) apply(l.up, begin, end, in, [&](int row, int n, float value) { at(row)[n] *= value; });
  });
  products(me, {&l.down}, inner_.data, wide_mlp, m, add);
}

void Engine::step(Step& s) {
  s.failed = -1;
  prepare(s);
  if ((int)phases_.size() < s.num_layers * PHASES + 1) phases_ = std::vector<Phase>(s.num_layers * PHASES + 1);
  for (Phase& phase : phases_) phase.reset();
  pool_.run(s.threads, [&](int id) {
    Me me{tiles_.data + id * tile_floats_, inputs_.data + id * input_floats_, s.threads};
    for (int i = 0; i < s.num_layers; i++) layer(s.layers[i], i, s, me);
    each(me, s.rows, [&](int row) { norm(s.last, s.x + (int64_t)row * s.hidden, s.x + (int64_t)row * s.hidden, s.hidden); });
  });
}

void Engine::linear(const Linear& l, const float* x, int rows, float* out, int threads) {
  std::atomic<int> next{0};
  int count = (l.n + OUTPUTS - 1) / OUTPUTS;
  int64_t each = padded(Input::floats(rows, l.k));
  inputs_.room(each * threads);
  pool_.run(threads, [&](int id) {
    Input in(x, l.k, rows, l.k, threads, inputs_.data + id * each);
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      int begin = i * OUTPUTS, end = begin + OUTPUTS < l.n ? begin + OUTPUTS : l.n;
      apply(l, begin, end, in, [&](int m, int n, float value) { out[(int64_t)m * l.n + n] = value; });
    }
  });
}

}  // namespace
}  // namespace mla

extern "C" {
int64_t mla_prompt_size();  // see prompt.cpp

int mla_version() { return 3; }
void mla_step(mla::Step* step) { mla::of_this_process<mla::Engine>().step(*step); }
void mla_linear(const mla::Linear* l, const float* x, int rows, float* out, int threads) {
  mla::of_this_process<mla::Engine>().linear(*l, x, rows, out, threads);
}
void mla_sizes(int64_t* out) {  // so that a mirror of these structures that has slipped is noticed
  out[0] = sizeof(mla::Linear);
  out[1] = sizeof(mla::Norm);
  out[2] = sizeof(mla::Store);
  out[3] = sizeof(mla::Layer);
  out[4] = sizeof(mla::Step);
  out[5] = mla_prompt_size();
}
}
