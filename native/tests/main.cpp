#include <cstring>

#include "check.hpp"

namespace tiercel::test {
std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
int& failures() {
  static int n = 0;
  return n;
}
} // namespace tiercel::test

// Runs all tests, or those whose name contains the first argument.
int main(int argc, char** argv) {
  int n_passed = 0, n_failed = 0;
  for (const auto& c : tiercel::test::cases()) {
    if (argc > 1 && !std::strstr(c.name, argv[1])) continue;
    const int before = tiercel::test::failures();
    c.run();
    (tiercel::test::failures() == before ? n_passed : n_failed) += 1;
    if (tiercel::test::failures() != before) std::printf("FAILED %s\n", c.name);
  }
  std::printf("%d passed, %d failed\n", n_passed, n_failed);
  return n_failed ? 1 : 0;
}
