// The one table of problem shapes and hostile inputs, for tests, the command line and the benchmarks alike.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cases/owned_tensor.h"
#include "numerics/problem.h"

namespace sparsemla::cases {

/// What a case is for, and where it can run. A case carries several.
enum Tag : std::uint32_t {
  kForward = 1U << 0,    // has a forward worth comparing (all do)
  kBackward = 1U << 1,   // carries dout or dlse
  kRandom = 1U << 2,     // well-conditioned random inputs: the whole-tensor rel_l2 budgets apply
  kHostile = 1U << 3,    // indices, lengths or values that a caller should not send, but does
  kNonFinite = 1U << 4,  // some outputs are NaN or Inf, and must be
  kSubnormal = 1U << 5,  // the answer hangs on subnormal bf16 inputs
  kLarge = 1U << 6,      // hundreds of MiB or seconds: left out under sanitizers
  kCpu = 1U << 7,
  kGpu = 1U << 8,
};

/// Values worked out by hand from the inputs, row-major, of the shapes in attention.h. An empty vector = not stated.
struct Expectation {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<double> max_logits;
  std::vector<double> dq_latent;
  std::vector<double> dq_rope;
  std::vector<double> dkv_latent;
  std::vector<double> dk_rope;
  std::vector<double> dsink;
};

struct Case {
  std::string name;                       // [a-z0-9_]+, unique
  std::vector<std::string> reports = {};  // public reports of this kind of fault: "cuFE#676"; empty for a general shape
  std::uint32_t tags = 0;
  Layout layout = Layout::kContiguous;                     // how a run lays out its inputs and outputs
  std::function<Problem()> make = {};                      // deterministic
  std::function<Expectation(const Problem&)> expect = {};  // may be empty

  [[nodiscard]] bool has(Tag tag) const noexcept { return (tags & tag) != 0; }
};

/// All cases, in a fixed order. Building the table costs nothing; Case::make does the work.
[[nodiscard]] const std::vector<Case>& table();
/// Errors: no case of that name.
[[nodiscard]] const Case& find(std::string_view name);

}  // namespace sparsemla::cases
