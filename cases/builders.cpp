#include "cases/builders.h"

#include <algorithm>
#include <cmath>

namespace sparsemla::cases {
namespace {

double value(BFloat16 x) { return static_cast<double>(to_float(x)); }

/// Row `t*H + h` of dout dotted with row `key` of kv_latent.
double dout_dot_key(const Problem& p, std::int64_t row, std::int64_t key) {
  double sum = 0;
  for (std::int64_t d = 0; d < kLatentDim; ++d) {
    sum += value(p.dout[row * kLatentDim + d]) * value(p.kv_latent[key * kLatentDim + d]);
  }
  return sum;
}

}  // namespace

std::uint64_t Random::next() {
  state_ += 0x9E3779B97F4A7C15U;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

std::int64_t Random::below(std::int64_t bound) {
  return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
}

float Random::symmetric() { return static_cast<float>(static_cast<double>(next() >> 40) * 0x1p-23 - 1.0); }

Problem iid(const Shape& shape) {
  return make_iid({.num_tokens = shape.tokens,
                   .num_keys = shape.keys,
                   .topk = shape.topk,
                   .num_heads = shape.heads,
                   .rope_dim = shape.rope,
                   .seed = shape.seed},
                  /*with_gradient=*/true);
}

Problem iid_with_lists(const Shape& shape, const Lists& lists) {
  Problem problem = iid(shape);
  for (std::size_t t = 0; t < lists.size(); ++t) set_list(problem, static_cast<std::int64_t>(t), lists[t]);
  return problem;
}

Problem q0(const Shape& shape, const Lists& lists) {
  Problem problem = iid_with_lists(shape, lists);
  fill(problem.q_latent, 0.0F);
  fill(problem.q_rope, 0.0F);
  return problem;
}

void set_list(Problem& problem, std::int64_t token, const std::vector<std::int32_t>& list) {
  const auto begin = problem.indices.begin() + token * problem.topk;
  std::fill(begin, begin + problem.topk, -1);
  std::copy(list.begin(), list.end(), begin);
}

void add_dlse(Problem& problem, std::uint64_t seed) {
  Random random(seed);
  problem.dlse.resize(static_cast<std::size_t>(problem.num_tokens * problem.num_heads));
  for (float& x : problem.dlse) x = 2.0F * random.symmetric();
}

void fill(std::vector<BFloat16>& values, float value) { std::fill(values.begin(), values.end(), to_bfloat16(value)); }

void fill_row(std::vector<BFloat16>& values, std::int64_t row, std::int64_t width, float value) {
  if (values.empty()) return;
  std::fill_n(values.begin() + row * width, width, to_bfloat16(value));
}

void scale_by(std::vector<BFloat16>& values, float factor) {
  for (BFloat16& x : values) x = to_bfloat16(to_float(x) * factor);
}

void poison_unlisted_keys(Problem& problem, const Lists& lists) {
  std::vector<bool> listed(static_cast<std::size_t>(problem.num_keys), false);
  for (const auto& list : lists) {
    for (const std::int32_t key : list) listed[static_cast<std::size_t>(key)] = true;
  }
  for (std::int64_t key = 0; key < problem.num_keys; ++key) {
    if (listed[static_cast<std::size_t>(key)]) continue;
    fill_row(problem.kv_latent, key, kLatentDim, kNan);
    fill_row(problem.k_rope, key, kRopeDim, kNan);
  }
}

double scale_of(const Problem& problem) {
  return problem.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(kLatentDim + problem.rope_dim)));
}

double score(const Problem& p, std::int64_t token, std::int64_t head, std::int64_t key) {
  const std::int64_t row = token * p.num_heads + head;
  double sum = 0;
  for (std::int64_t d = 0; d < kLatentDim; ++d) {
    sum += value(p.q_latent[row * kLatentDim + d]) * value(p.kv_latent[key * kLatentDim + d]);
  }
  for (std::int64_t d = 0; d < p.rope_dim; ++d) {
    sum += value(p.q_rope[row * p.rope_dim + d]) * value(p.k_rope[key * p.rope_dim + d]);
  }
  return sum;
}

Expectation means(const Problem& p, const Lists& valid) {
  Expectation e;
  const std::int64_t rows = p.num_tokens * p.num_heads;
  e.out.assign(static_cast<std::size_t>(rows * kLatentDim), 0.0);
  e.lse.assign(static_cast<std::size_t>(rows), -INFINITY);
  e.max_logits.assign(static_cast<std::size_t>(rows), -INFINITY);
  e.dkv_latent.assign(static_cast<std::size_t>(p.num_keys * kLatentDim), 0.0);
  e.dk_rope.assign(static_cast<std::size_t>(p.num_keys * p.rope_dim), 0.0);
  e.dsink.assign(p.sink.size(), 0.0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto& list = valid[static_cast<std::size_t>(row / p.num_heads)];
    const std::int64_t head = row % p.num_heads;
    if (list.empty()) continue;
    const auto n = static_cast<double>(list.size());
    const double sink_term = p.sink.empty() ? 0.0 : std::exp(static_cast<double>(p.sink[head]));
    const double weight = 1.0 / (n + sink_term);
    double dout_dot_out = 0;
    for (const std::int32_t key : list) {
      for (std::int64_t d = 0; d < kLatentDim; ++d) {
        e.out[row * kLatentDim + d] += weight * value(p.kv_latent[key * kLatentDim + d]);
        e.dkv_latent[key * kLatentDim + d] += weight * value(p.dout[row * kLatentDim + d]);
      }
      dout_dot_out += weight * dout_dot_key(p, row, key);
    }
    e.lse[row] = std::log(n);
    e.max_logits[row] = 0.0;
    // A sink of +inf has weight 1 on an output of 0: no gradient reaches it.
    if (!p.sink.empty() && std::isfinite(sink_term)) e.dsink[head] -= sink_term * weight * dout_dot_out;
  }
  return e;
}

Expectation single_keys(const Problem& p, const std::vector<std::int32_t>& key) {
  Expectation e;
  const std::int64_t rows = p.num_tokens * p.num_heads;
  e.dkv_latent.assign(static_cast<std::size_t>(p.num_keys * kLatentDim), 0.0);
  e.dk_rope.assign(static_cast<std::size_t>(p.num_keys * p.rope_dim), 0.0);
  e.dq_latent.assign(static_cast<std::size_t>(rows * kLatentDim), 0.0);
  e.dq_rope.assign(static_cast<std::size_t>(rows * p.rope_dim), 0.0);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t token = row / p.num_heads;
    const std::int32_t k = key[static_cast<std::size_t>(token)];
    for (std::int64_t d = 0; d < kLatentDim; ++d) {
      e.out.push_back(value(p.kv_latent[k * kLatentDim + d]));
      e.dkv_latent[k * kLatentDim + d] += value(p.dout[row * kLatentDim + d]);
    }
    e.lse.push_back(scale_of(p) * score(p, token, row % p.num_heads, k));
    e.max_logits.push_back(e.lse.back());
  }
  return e;
}

}  // namespace sparsemla::cases
