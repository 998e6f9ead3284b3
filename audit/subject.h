// The problem under audit, generated or from a file, and what the audit derives from it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "audit/attention_file.h"
#include "audit/audit.h"
#include "numerics/problem.h"

namespace sparsemla::audit {

struct Subject {
  Problem problem;         // a generated one, or empty
  AttentionFile file;      // one read from a file, or empty
  AttentionInputs inputs;  // views into one of the two, as given, with the softmax scale filled in
  Tensor dout;
  Tensor dlse;
  ProblemSizes sizes;
  std::vector<std::int32_t> indices;   // [T, W], slots at or past topk_length replaced by -1
  std::vector<std::int32_t> own_keys;  // [T] of a generated problem; empty for a file

  /// Errors: no source or two, gradients wanted and no dout, what the generator and the reader reject.
  static Subject open(const AuditRequest& request, bool with_gradients);

  /// The inputs over another list for each token; topk_length is already in it.
  [[nodiscard]] AttentionInputs with_indices(const std::vector<std::int32_t>& list) const;
};

/// Writes the inputs under the names AttentionFile reads. Errors: what write_safetensors rejects.
void write_inputs(const Subject& subject, const std::filesystem::path& path);

/// The key of each token that draws the most weight, summed over heads.
struct Dominant {
  std::vector<std::int32_t> keys;  // [T], as it stands in the list; -1 for a token without a valid slot
  double weight_median = 0;        // over (token, head) rows of the tokens that have one; NaN if none has
  double weight_p90 = 0;
};

/// fp64, from the reference's lse [T,H] (weights without the sink). For a generated problem it is the token's own key.
[[nodiscard]] Dominant find_dominant(const Subject& subject, const std::vector<double>& lse, int num_threads);

}  // namespace sparsemla::audit
