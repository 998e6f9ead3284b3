// The one exception type of the library.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace sparsemla {

/// Thrown for every rejected call, before anything is written. It names the argument at fault, what was found there and
/// what is wanted instead; `what()` joins the three into one line: "indices: found int64, want int32".
class Error : public std::exception {
 public:
  Error(std::string_view argument, std::string_view found, std::string_view wanted)
      : argument_(argument),
        found_(found),
        wanted_(wanted),
        message_(argument_ + ": found " + found_ + ", want " + wanted_) {}

  [[nodiscard]] const char* what() const noexcept override { return message_.c_str(); }
  [[nodiscard]] const std::string& argument() const noexcept { return argument_; }
  [[nodiscard]] const std::string& found() const noexcept { return found_; }
  [[nodiscard]] const std::string& wanted() const noexcept { return wanted_; }

 private:
  std::string argument_;
  std::string found_;
  std::string wanted_;
  std::string message_;
};

}  // namespace sparsemla
