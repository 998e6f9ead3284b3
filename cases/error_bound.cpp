#include "cases/error_bound.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr double kU = 0x1p-8;
constexpr double kV = 0x1p-24;
constexpr double kTiny = 0x1p-120;   // a weight below this may come out as 0: 2^x flushes there
constexpr double kFlush = 0x1p-126;  // a subnormal element may be read as 0

double value(BFloat16 x) { return static_cast<double>(to_float(x)); }
double value(double x) { return x; }

/// Eight partial sums, so that the loop runs in vector registers. Widths here are multiples of 8.
template <typename A, typename B>
double dot(const A* a, const B* b, std::int64_t n) {
  std::array<double, 8> sums{};
  for (std::int64_t i = 0; i < n; i += 8) {
    for (std::int64_t lane = 0; lane < 8; ++lane) sums[lane] += value(a[i + lane]) * value(b[i + lane]);
  }
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

double absolute_dot(const BFloat16* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += std::abs(value(a[i]) * b[i]);
  return sum;
}

std::vector<double> row_norms(const std::vector<BFloat16>& values, std::int64_t width) {
  std::vector<double> norms;
  for (std::size_t row = 0; width > 0 && row < values.size(); row += static_cast<std::size_t>(width)) {
    norms.push_back(std::sqrt(dot(&values[row], &values[row], width)));
  }
  return norms;
}

double at(const std::vector<double>& norms, std::int64_t row) { return norms.empty() ? 0.0 : norms[row]; }

/// Everything in fp64, and the sums that the bounds of keys and sinks need.
class Analysis {
 public:
  Analysis(const Problem& problem, const Pipeline& pipeline, DataType dq_dtype)
      : p_(problem),
        operand_(pipeline.operands == Operands::kSplit ? 0x1p-16 : kU),
        row_sum_(pipeline.row_sum == RowSum::kRounded ? operand_ : 0.0),
        residual_(pipeline.residual ? 0x1p-16 : kU),
        dq_rounding_(dq_dtype == DataType::kBFloat16 ? kU : kV),
        scale_(scale_of(problem)),
        q_norm_(row_norms(problem.q_latent, kLatentDim)),
        qr_norm_(row_norms(problem.q_rope, problem.rope_dim)),
        k_norm_(row_norms(problem.kv_latent, kLatentDim)),
        kr_norm_(row_norms(problem.k_rope, problem.rope_dim)),
        dout_norm_(row_norms(problem.dout, kLatentDim)) {
    const auto rows = static_cast<std::size_t>(p_.num_tokens * p_.num_heads);
    for (auto* v : {&bounds_.out, &bounds_.lse, &bounds_.max_logits}) v->assign(rows, 0.0);
    if (p_.dout.empty() && p_.num_tokens > 0) return;
    for (auto* v : {&bounds_.dq_latent, &bounds_.dq_rope}) v->assign(rows, 0.0);
    for (auto* v : {&bounds_.dkv_latent, &bounds_.dk_rope, &contributions_, &latent_mass_, &rope_mass_}) {
      v->assign(static_cast<std::size_t>(p_.num_keys), 0.0);
    }
    bounds_.dsink.assign(p_.sink.size(), 0.0);
  }

  ErrorBounds run() {
    for (std::int64_t token = 0; token < p_.num_tokens; ++token) {
      const std::vector<std::int64_t> keys = valid_keys(p_, token);
      if (keys.empty()) continue;
      for (std::int64_t head = 0; head < p_.num_heads; ++head) {
        forward_row(token * p_.num_heads + head, keys);
        if (!p_.dout.empty()) backward_row(token * p_.num_heads + head, keys);
      }
    }
    for (std::size_t key = 0; key < contributions_.size(); ++key) {  // the fp32 sums over tokens and heads
      bounds_.dkv_latent[key] += kV * (64.0 + contributions_[key]) * latent_mass_[key];
      bounds_.dk_rope[key] += kV * (64.0 + contributions_[key]) * rope_mass_[key];
    }
    return bounds_;
  }

 private:
  void forward_row(std::int64_t row, const std::vector<std::int64_t>& keys) {
    const std::size_t n = keys.size();
    x_.resize(n);
    x_error_.resize(n);
    weight_.resize(n);
    weight_error_.resize(n);
    double worst = 0;
    for (std::size_t j = 0; j < n; ++j) {
      const std::int64_t key = keys[j];
      x_[j] = scale_ * (dot(&p_.q_latent[row * kLatentDim], &p_.kv_latent[key * kLatentDim], kLatentDim) +
                        dot(p_.q_rope.data() + row * p_.rope_dim, p_.k_rope.data() + key * p_.rope_dim, p_.rope_dim));
      const double norms = q_norm_[row] * k_norm_[key] + at(qr_norm_, row) * at(kr_norm_, key);
      x_error_[j] = kV * (64.0 * std::abs(scale_) * norms + 4.0 * std::abs(x_[j]));
      if (x_[j] == -INFINITY) x_error_[j] = 0;  // weight 0 whatever the size of its rounding
      worst = std::max(worst, x_error_[j]);
      if (std::isnan(x_error_[j])) worst = x_error_[j];
    }
    const double max = *std::max_element(x_.begin(), x_.end());
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) sum += weight_[j] = std::exp(x_[j] - max);
    lse_ = max + std::log(sum);
    const double sink = p_.sink.empty() ? -INFINITY : static_cast<double>(p_.sink[row % p_.num_heads]);
    lse_total_ = std::max(lse_, sink) + std::log1p(std::exp(-std::abs(lse_ - sink)));
    if (std::isinf(sink)) lse_total_ = std::max(lse_, sink);
    const double with_sink = std::exp(lse_ - lse_total_);  // 0 under a sink of +inf

    double sum_error = kV * (64.0 + static_cast<double>(n)) + row_sum_;
    for (std::size_t j = 0; j < n; ++j) {
      weight_[j] /= sum;
      weight_error_[j] = 2.0 * worst + (weight_[j] > 0 ? 4.0 * kV * (1.0 + max - x_[j]) : 0.0);
      sum_error += weight_[j] * (weight_error_[j] + 1e-300);
    }
    lse_error_ = worst + sum_error + 2.0 * kV * std::abs(lse_) + 4.0 * kV;
    const double sink_error = with_sink > 0 && with_sink < 1 ? 4.0 * kV * (std::abs(lse_) + std::abs(lse_total_)) : 0.0;
    finish_forward_row(row, keys, with_sink, sum_error + sink_error + kV * (64.0 + static_cast<double>(n)));
    bounds_.lse[row] = lse_error_;
    bounds_.max_logits[row] = worst + 2.0 * kV * std::abs(max) + kFlush;
  }

  /// `common`: relative error that all weights of the row share.
  void finish_forward_row(std::int64_t row, const std::vector<std::int64_t>& keys, double with_sink, double common) {
    out_.assign(kLatentDim, 0.0);
    double error = 0;
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double weight = with_sink * weight_[j];
      weight_error_[j] += operand_ + common;
      if (weight < kTiny) weight_error_[j] += 1.0;
      error += weight * (weight_error_[j] * k_norm_[keys[j]] + kFlush * std::sqrt(kLatentDim));
      if (weight == 0) continue;
      for (std::int64_t d = 0; d < kLatentDim; ++d) out_[d] += weight * value(p_.kv_latent[keys[j] * kLatentDim + d]);
    }
    bounds_.out[row] = error + kU * std::sqrt(dot(out_.data(), out_.data(), kLatentDim)) + kFlush;
  }

  void backward_row(std::int64_t row, const std::vector<std::int64_t>& keys) {
    const BFloat16* dout = &p_.dout[row * kLatentDim];
    const double with_sink = std::exp(lse_ - lse_total_);
    const double dlse = p_.dlse.empty() ? 0.0 : static_cast<double>(p_.dlse[row]);
    const double dpsum = dot(dout, out_.data(), kLatentDim);
    double dpsum_error = (residual_ + 64.0 * kV) * absolute_dot(dout, out_.data(), kLatentDim);
    dp_.resize(keys.size());
    for (std::size_t j = 0; j < keys.size(); ++j) {
      dp_[j] = dot(dout, &p_.kv_latent[keys[j] * kLatentDim], kLatentDim);
      if (weight_[j] > 0) dpsum_error += with_sink * weight_[j] * weight_error_[j] * std::abs(dp_[j]);
    }
    RowSums sums;
    dq_.assign(kLatentDim, 0.0);
    dq_rope_.assign(kRopeDim, 0.0);
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double p_error = x_error_[j] + lse_error_ +
                             4.0 * kV *
                                 (1.0 + (weight_[j] > 0 ? std::abs(x_[j]) : 0.0) + std::abs(lse_) +
                                  (with_sink > 0 ? std::abs(lse_total_) : 0.0)) +
                             (weight_[j] * with_sink < kTiny ? 1.0 : 0.0);
      const double weight = with_sink * weight_[j];
      const double dp_error = 64.0 * kV * dout_norm_[row] * k_norm_[keys[j]];
      const double from_out = weight * (dp_[j] - dpsum) * scale_;
      const double from_lse = weight_[j] * dlse * scale_;
      const double ds = from_out + from_lse;
      const double ds_error =
          std::abs(ds) * operand_ + (std::abs(from_out) + std::abs(from_lse)) * (p_error + 4.0 * kV) +
          std::abs(scale_) * weight * (dp_error + dpsum_error) + (std::abs(ds) < kTiny ? std::abs(ds) : 0.0);
      add_key(row, keys[j], weight, p_error, ds, ds_error, sums);
    }
    finish_backward_row(row, keys.size(), sums);
    if (p_.sink.empty()) return;
    const double sink = static_cast<double>(p_.sink[row % p_.num_heads]);
    if (std::isinf(sink)) return;  // dsink is exactly 0, whatever the row holds
    const double sink_weight = sink == lse_total_ ? 1.0 : std::exp(sink - lse_total_);
    const double relative =
        4.0 * kV * (16.0 + static_cast<double>(p_.num_tokens) + std::abs(sink) + std::abs(lse_total_)) + lse_error_;
    if (sink_weight == 0 || dpsum == 0) return;
    bounds_.dsink[row % p_.num_heads] += sink_weight * (dpsum_error + relative * std::abs(dpsum));
  }

  struct RowSums {
    double error = 0, rope_error = 0;  // sum of err dS * |k|
    double mass = 0, rope_mass = 0;    // sum of |dS| * |k|
    double ds_mass = 0;                // sum of |dS|
  };

  void add_key(std::int64_t row, std::int64_t key, double weight, double p_error, double ds, double ds_error,
               RowSums& sums) {
    const double rope = at(kr_norm_, key);
    sums.error += ds_error * k_norm_[key];
    sums.rope_error += ds_error * rope;
    sums.mass += std::abs(ds) * k_norm_[key];
    sums.rope_mass += std::abs(ds) * rope;
    sums.ds_mass += std::abs(ds);
    for (std::int64_t d = 0; d < kLatentDim; ++d) dq_[d] += ds * value(p_.kv_latent[key * kLatentDim + d]);
    for (std::int64_t d = 0; d < p_.rope_dim; ++d) dq_rope_[d] += ds * value(p_.k_rope[key * p_.rope_dim + d]);
    const double flush = kFlush * std::sqrt(kLatentDim) * (weight + std::abs(ds));
    bounds_.dkv_latent[key] += weight * (operand_ + p_error) * dout_norm_[row] + ds_error * q_norm_[row] + flush;
    bounds_.dk_rope[key] += ds_error * at(qr_norm_, row) + flush;
    latent_mass_[key] += weight * dout_norm_[row] + std::abs(ds) * q_norm_[row];
    rope_mass_[key] += std::abs(ds) * at(qr_norm_, row);
    contributions_[key] += 1.0;
  }

  void finish_backward_row(std::int64_t row, std::size_t num_keys, const RowSums& sums) {
    const double accumulation = kV * (64.0 + static_cast<double>(num_keys));
    const double flush = kFlush * (1.0 + std::sqrt(kLatentDim) * sums.ds_mass);
    const auto norm = [](const std::vector<double>& v) {
      return std::sqrt(dot(v.data(), v.data(), static_cast<std::int64_t>(v.size())));
    };
    bounds_.dq_latent[row] = sums.error + accumulation * sums.mass + dq_rounding_ * norm(dq_) + flush;
    bounds_.dq_rope[row] = sums.rope_error + accumulation * sums.rope_mass + dq_rounding_ * norm(dq_rope_) + flush;
  }

  const Problem& p_;
  double operand_, row_sum_, residual_, dq_rounding_, scale_;
  std::vector<double> q_norm_, qr_norm_, k_norm_, kr_norm_, dout_norm_;
  ErrorBounds bounds_;
  std::vector<double> contributions_, latent_mass_, rope_mass_;  // per key

  // The row at hand.
  std::vector<double> x_, x_error_, weight_, weight_error_, dp_, out_, dq_, dq_rope_;
  double lse_ = 0, lse_total_ = 0, lse_error_ = 0;
};

}  // namespace

std::vector<std::int64_t> valid_keys(const Problem& p, std::int64_t token) {
  std::int64_t first_query = 0, end_query = p.num_tokens, first_key = 0, end_key = p.num_keys;
  if (!p.cu_seqlens_q.empty()) {
    std::size_t document = 0;
    while (document + 1 < p.cu_seqlens_q.size() && p.cu_seqlens_q[document + 1] <= token) ++document;
    if (document + 1 >= p.cu_seqlens_q.size()) return {};
    first_query = p.cu_seqlens_q[document];
    end_query = p.cu_seqlens_q[document + 1];
    first_key = p.cu_seqlens_k[document];
    end_key = p.cu_seqlens_k[document + 1];
  }
  std::int64_t limit = end_key - first_key;
  if (p.causal) limit = std::min(limit, (token - first_query) + 1 + limit - (end_query - first_query));
  std::vector<std::int64_t> keys;
  for (std::int64_t j = 0; j < p.topk; ++j) {
    if (!p.topk_length.empty() && j >= p.topk_length[token]) break;
    const std::int64_t index = p.indices[token * p.topk + j];
    if (0 <= index && index < limit) keys.push_back(first_key + index);
  }
  return keys;
}

ErrorBounds error_bounds(const Problem& problem, const Pipeline& pipeline, DataType dq_dtype) {
  return Analysis(problem, pipeline, dq_dtype).run();
}

}  // namespace sparsemla::cases
