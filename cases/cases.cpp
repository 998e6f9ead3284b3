#include "cases/cases.h"

#include "cases/builders.h"
#include "sparsemla/error.h"

namespace sparsemla::cases {

const std::vector<Case>& table() {
  static const std::vector<Case> kTable = [] {
    std::vector<Case> cases;
    add_report_index_cases(cases);
    add_report_value_cases(cases);
    add_report_shape_cases(cases);
    add_shape_cases(cases);
    add_hostile_cases(cases);
    return cases;
  }();
  return kTable;
}

const Case& find(std::string_view name) {
  for (const Case& entry : table()) {
    if (entry.name == name) return entry;
  }
  throw Error("case", name, "a name in the case table (docs/cases.md)");
}

}  // namespace sparsemla::cases
