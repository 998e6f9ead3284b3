#include "sparsemla/attention.h"

#include "dispatch/registry.h"
#include "plan/plan.h"
#include "validate/validate.h"

namespace sparsemla {

Plan plan(const ForwardArguments& arguments, const Options& options) {
  validate(options);
  validate(arguments);
  return make_plan(arguments, options);
}

Plan plan(const BackwardArguments& arguments, const Options& options) {
  validate(options);
  validate(arguments);
  return make_plan(arguments, options);
}

std::int64_t workspace_bytes(const ForwardArguments& arguments, const Options& options) {
  return plan(arguments, options).workspace_bytes;
}

std::int64_t workspace_bytes(const BackwardArguments& arguments, const Options& options) {
  return plan(arguments, options).workspace_bytes;
}

void forward(const ForwardArguments& arguments, const Options& options) {
  const Plan chosen = plan(arguments, options);
  validate_workspace(options, chosen);
  find_backend(chosen.backend).forward(arguments, chosen, {options.stream, options.workspace});
}

void backward(const BackwardArguments& arguments, const Options& options) {
  const Plan chosen = plan(arguments, options);
  validate_workspace(options, chosen);
  find_backend(chosen.backend).backward(arguments, chosen, {options.stream, options.workspace});
}

}  // namespace sparsemla
