// What a step is given: plain structures, mirrored field by field in step.py.
#pragma once
#include <cstdint>

namespace mla {

enum Type : int32_t { F32 = 0, BF16 = 1, INT8 = 2, FP8 = 3 };
enum NormKind : int32_t { NO_NORM = 0, RMS = 1, LAYER = 2 };
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };

struct Linear {  // y = x w^T (* scale) (+ bias)
  const void* w;       // [n, k]
  const float* scale;  // [n], of INT8
  const float* bias;   // [n] or null
  int32_t n, k, type, pad;
};

struct Norm {
  const float* weight;  // [D]
  const float* bias;    // [D] or null
  float eps;
  int32_t kind;
};

struct Store {  // a layer's cache entries of one kind
  void* data;            // [B, room, width], or in pages [pages, PAGE, width]
  float* scales;         // of each token, of INT8 and FP8, null: none
  const int64_t* pages;  // [B, room] each sequence's pages in turn; null: it has places of its own
  int64_t room;          // tokens a sequence, or pages
  int32_t type, width;   // numbers a token
  float clip;            // most that a range may reach
  int32_t pad;
};

constexpr int64_t PAGE = 64;  // tokens; blocks of attention end where pages do

// Where a sequence's token is, counted in tokens from the start of the data.
inline int64_t place(const Store& s, int64_t row, int64_t position) {
  return s.pages ? s.pages[row * s.room + position / PAGE] * PAGE + position % PAGE : row * s.room + position;
}

struct Layer {
  Norm before_attention, before_mlp, of_query, of_latent;
  Linear q_a;                   // q_b reads what it gives; n = 0: none
  Linear q, kv_a;               // latent: kv_a gives latent and rotary key
  Linear k, v;                  // standard
  Linear kv_b;                  // [H, nope + v_dim, r]
  Linear o, gate, up, down;     // gate.n = 0: an MLP without
  Store first, second;
  const int32_t* frequencies;   // rotary pair -> column of the table
  int32_t latent, heads, kv_heads, nope, rope, rank, v_dim, interleaved, activation, window;  // window 0: none
  int32_t table;                // which of the step's rotary tables; -1: not rotated
  float scale, softcap;         // softcap 0: none
  int32_t pad;
};

struct Step {
  const Layer* layers;
  float* x;                  // [M, D] in: embedded tokens; out: normed hidden states
  const int64_t* positions;  // [M]
  const float* const* cos;   // tables of [M, columns]
  const float* const* sin;
  const int32_t* columns;
  Norm last;
  int32_t num_layers, rows, hidden, intermediate, threads;
  int32_t failed;            // out: layer whose latents are not finite, or -1
};

}  // namespace mla
