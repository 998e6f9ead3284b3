#include "sparsemla/attention.h"

#include "dispatch/registry.h"
#include "plan/plan.h"
#include "validate/validate.h"

namespace sparsemla {

Plan plan(const ForwardArguments& arguments, const Options& options) {
  validate(options);
  validate(arguments);
  return make_plan(arguments, options, false, arguments.out_residual.defined());
}

Plan plan(const BackwardArguments& arguments, const Options& options) {
  validate(options);
  validate(arguments);
  return make_plan(arguments, options, true, arguments.out_residual.defined());
}

std::int64_t workspace_bytes(const ForwardArguments& arguments, const Options& options) {
  return plan(arguments, options).workspace_bytes;
}

std::int64_t workspace_bytes(const BackwardArguments& arguments, const Options& options) {
  return plan(arguments, options).workspace_bytes;
}

void forward(const ForwardArguments& arguments, const Options& options) {
  const Plan chosen = plan(arguments, options);
  find_backend(chosen.backend).forward(arguments, chosen);
}

void backward(const BackwardArguments& arguments, const Options& options) {
  const Plan chosen = plan(arguments, options);
  find_backend(chosen.backend).backward(arguments, chosen);
}

}  // namespace sparsemla
