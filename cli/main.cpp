// sparsemla: the library from a command line. Exit codes: 0 done, 1 a budget exceeded under `audit --check`, 2 bad
// input (one line on stderr, no output file).
#include <array>
#include <cctype>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

#include "cli/commands.h"
#include "sparsemla/backend.h"

namespace {

constexpr int kBadInput = 2;

/// Names in a file may hold any byte; the message stays one line.
int reject(std::string message) {
  for (char& character : message) {
    if (std::iscntrl(static_cast<unsigned char>(character)) != 0) character = ' ';
  }
  std::fprintf(stderr, "sparsemla: %s\n", message.c_str());
  return kBadInput;
}

int execute(const std::array<sparsemla::cli::Command, 5>& commands) {
  for (const sparsemla::cli::Command& command : commands) {
    if (command.app->parsed()) return command.execute();
  }
  return reject("no subcommand; see sparsemla --help");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app("Sparse multi-head latent attention with measured numerics");
    app.set_version_flag("--version", std::string("sparsemla ") + sparsemla::version());
    app.require_subcommand(0, 1);  // at least one too, but its message would hide an unknown word's
    const std::array<sparsemla::cli::Command, 5> commands = {
        sparsemla::cli::add_info(app), sparsemla::cli::add_run(app), sparsemla::cli::add_audit(app),
        sparsemla::cli::add_plan(app), sparsemla::cli::add_bench(app)};
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      // --help and --version arrive here too, as successes that app.exit() prints to stdout.
      return error.get_exit_code() == 0 ? app.exit(error) : reject(error.what());
    }
    return execute(commands);
  } catch (const std::bad_alloc&) {
    return reject("not enough memory for a problem of this size");
  } catch (const std::exception& error) {
    return reject(error.what());
  }
}
